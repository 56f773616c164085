import { computed, signal } from "@preact/signals";
import { get, patch, post, query, reachable, remove } from "../api/client";
import type { List, Match, Session } from "../api/types";
import { needsKey } from "./access";
import { type Family, familiesOf } from "./families";
import { attempt } from "./faults";
import { formatDay, formatMonth, t } from "./language";
import { conversationId, go } from "./route";
import { toast } from "./toasts";

const PAGE = 60;
const PAGE_MAX = 200;
const LOOK_MS = 15_000;
/** While the server is away. */
const LOST_MS = 4000;

export interface Group {
  label: string;
  families: Family[];
}

/** The list of conversations. */
class Conversations {
  readonly sessions = signal<Session[]>([]);
  readonly hasMore = signal(false);
  readonly loaded = signal(false);
  readonly archived = signal(false);
  readonly search = signal("");
  readonly matches = signal<Match[] | null>(null);
  readonly families = computed(() => familiesOf(this.sessions.value));
  readonly groups = computed(() => group(this.families.value));
  private wanted = PAGE;
  /** What carries a deletion out that can still be undone, by each session of it. */
  private readonly deletions = new Map<string, (leaving: boolean) => void>();
  private asked = 0;
  private watching = false;

  async refresh(): Promise<void> {
    const turn = ++this.asked;
    try {
      const found: Session[] = [];
      let cursor: string | null | undefined;
      do {
        const limit = Math.min(this.wanted - found.length, PAGE_MAX);
        const fields = { limit, archived: this.archived.value, order: "last_active", cursor };
        const page = await get<List<Session>>(`api/sessions${query(fields)}`);
        if (turn !== this.asked) return;
        found.push(...page.data);
        cursor = page.has_more ? page.next_cursor : null;
      } while (cursor && found.length < this.wanted);
      this.sessions.value = found.filter(
        (session) => (session.message_count > 0 || session.active_run_id) && !this.deletions.has(session.id),
      );
      this.hasMore.value = Boolean(cursor);
      this.loaded.value = true;
    } catch {
      // The list stays as it is; whoever needs the server says that it is away.
    }
  }

  async more(): Promise<void> {
    this.wanted += PAGE;
    await this.refresh();
  }

  /** Keep the list as it is on the server; called when somebody has signed in. */
  watch(): void {
    void this.refresh();
    if (this.watching) return;
    this.watching = true;
    const look = () => {
      if (!document.hidden && !needsKey.value) void this.refresh();
    };
    setInterval(look, LOOK_MS);
    setInterval(() => reachable.value || look(), LOST_MS);
    document.addEventListener("visibilitychange", look);
    addEventListener("online", look);
    addEventListener("pagehide", () => {
      for (const carryOut of new Set(this.deletions.values())) carryOut(true);
    });
  }

  async create(fields: Partial<Session> = {}): Promise<string> {
    const answer = await post<{ session: Session }>("api/sessions", fields);
    return answer.session.id;
  }

  async find(text: string): Promise<void> {
    this.search.value = text;
    if (!text.trim()) {
      this.matches.value = null;
      return;
    }
    const wanted = text
      .trim()
      .split(/\s+/)
      .map((word, index, words) => (index === words.length - 1 && /^[\p{L}\p{N}]+$/u.test(word) ? `${word}*` : word))
      .join(" ");
    const found = await get<List<Match>>(`api/sessions/search${query({ q: wanted, limit: 30 })}`);
    if (this.search.value === text) this.matches.value = found.data;
  }

  /** Whether it was done; why not is shown. */
  async change(sessions: Session[], fields: Partial<Session>): Promise<boolean> {
    const done = await attempt(() => Promise.all(sessions.map((session) => patch(pathOf(session), fields))));
    await this.refresh();
    return done;
  }

  /** The branches of a conversation; null where they cannot be read, which is shown. */
  private async branches(session: Session): Promise<Session[] | null> {
    let found: Session[] | null = null;
    await attempt(async () => {
      found = (await get<List<Session>>(`${pathOf(session)}/branches`)).data;
    });
    return found;
  }

  /** A conversation goes to the archive, or comes back, with all its branches. */
  async archive(session: Session, archived: boolean): Promise<void> {
    const members = (await this.branches(session))?.filter((other) => other.archived !== archived);
    if (!members || !(await this.change(members, { archived }))) return;
    this.leave(members);
    toast(t(archived ? "list.archived" : "list.unarchived"), {
      action: { label: t("undo"), run: () => void this.change(members, { archived: !archived }) },
    });
  }

  /**
   * A conversation is deleted with all its branches. That archives it at once, and deletes it when the message that
   * offers to undo it goes, or the page is left.
   */
  async delete(session: Session): Promise<void> {
    const members = await this.branches(session);
    if (!members) return;
    const text = members.length > 1 ? t("list.deleted_all", { n: members.length }) : t("list.deleted");
    await this.discard(members, text);
  }

  /** A branch from which no other goes off is deleted by itself; the one that it comes from is shown instead. */
  async deleteBranch(branch: Session): Promise<void> {
    await this.discard([branch], t("branch.deleted"), branch.parent_session_id);
  }

  private async discard(members: Session[], text: string, next: string | null = null): Promise<void> {
    const open = conversationId.value;
    const shown = members.filter((other) => !other.archived);
    const restore = async () => {
      await Promise.allSettled(shown.map((other) => patch(pathOf(other), { archived: false })));
      await this.refresh();
    };
    if (!(await this.change(shown, { archived: true }))) return restore();
    const forget = () => {
      for (const other of members) this.deletions.delete(other.id);
    };
    const carryOut = async (leaving: boolean) => {
      const removals = members.map((other) => remove(pathOf(other), { keepalive: leaving }));
      const deleted = await attempt(() => Promise.all(removals));
      await Promise.allSettled(removals);
      forget();
      await (deleted ? this.refresh() : restore());
    };
    const undo = () => {
      forget();
      void restore().then(() => {
        if (next && open && conversationId.value === next) go("c", open);
      });
    };
    const end = (leaving: boolean) => void carryOut(leaving);
    for (const other of members) this.deletions.set(other.id, end);
    this.sessions.value = this.sessions.value.filter((other) => !this.deletions.has(other.id));
    this.leave(members, next);
    toast(text, { action: { label: t("undo"), run: undo }, onEnd: () => end(false) });
  }

  private leave(sessions: Session[], next: string | null = null): void {
    if (sessions.some((session) => session.id === conversationId.value)) go("c", ...(next ? [next] : []));
  }
}

function pathOf(session: Session): string {
  return `api/sessions/${encodeURIComponent(session.id)}`;
}

function group(families: Family[]): Group[] {
  const groups = new Map<string, Family[]>();
  for (const family of families) {
    const { last_active, started_at } = family.session;
    const label = family.pinned ? t("list.pinned") : dayOf(last_active ?? started_at);
    groups.set(label, [...(groups.get(label) ?? []), family]);
  }
  const pinned = groups.get(t("list.pinned"));
  groups.delete(t("list.pinned"));
  const rest = [...groups].map(([label, found]) => ({ label, families: found }));
  return pinned ? [{ label: t("list.pinned"), families: pinned }, ...rest] : rest;
}

function dayOf(seconds: number): string {
  const midnight = new Date().setHours(0, 0, 0, 0) / 1000;
  const days = Math.ceil((midnight - seconds) / 86_400);
  if (days <= 0) return t("list.today");
  if (days === 1) return t("list.yesterday");
  return days < 7 ? formatDay(seconds) : formatMonth(seconds);
}

export const conversations = new Conversations();

export function titleOf(session: Session): string {
  return session.title || session.preview || t("list.untitled");
}
