import { computed, signal } from "@preact/signals";
import { get, patch, post, query, remove } from "../api/client";
import type { List, Match, Session } from "../api/types";
import { needsKey } from "./access";
import { attempt } from "./faults";
import { formatDay, formatMonth, t } from "./language";
import { conversationId, go } from "./route";
import { toast } from "./toasts";

const PAGE = 60;
const PAGE_MAX = 200;
const UNDO_MS = 7000;
const LOOK_MS = 15_000;

export interface Group {
  label: string;
  sessions: Session[];
}

/** The list of conversations. */
class Conversations {
  readonly sessions = signal<Session[]>([]);
  readonly hasMore = signal(false);
  readonly loaded = signal(false);
  readonly archived = signal(false);
  readonly search = signal("");
  readonly matches = signal<Match[] | null>(null);
  readonly groups = computed(() => group(families(this.sessions.value)));
  private wanted = PAGE;
  /** What carries a deletion out that can still be undone, by session. */
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
    document.addEventListener("visibilitychange", look);
    addEventListener("pagehide", () => {
      for (const carryOut of [...this.deletions.values()]) carryOut(true);
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
  async change(session: Session, fields: Partial<Session>): Promise<boolean> {
    return attempt(async () => {
      const answer = await patch<{ session: Session }>(`api/sessions/${encodeURIComponent(session.id)}`, fields);
      this.sessions.value = this.sessions.value.map((other) => (other.id === session.id ? answer.session : other));
      await this.refresh();
    });
  }

  async archive(session: Session, archived: boolean): Promise<void> {
    if (!(await this.change(session, { archived }))) return;
    this.leave(session);
    toast(t(archived ? "list.archived" : "list.unarchived"), {
      action: { label: t("undo"), run: () => void this.change(session, { archived: !archived }) },
    });
  }

  /** Deleting archives at once, and deletes when the time to think better of it is up, or the page is left. */
  async delete(session: Session): Promise<void> {
    if (!(await this.change(session, { archived: true }))) return;
    const path = `api/sessions/${encodeURIComponent(session.id)}`;
    const restore = () => this.change(session, { archived: session.archived });
    const carryOut = async (leaving: boolean) => {
      clearTimeout(timer);
      const deleted = await attempt(() => remove(path, { keepalive: leaving }));
      this.deletions.delete(session.id);
      await (deleted ? this.refresh() : restore());
    };
    const timer = setTimeout(() => void carryOut(false), UNDO_MS);
    this.deletions.set(session.id, (leaving) => void carryOut(leaving));
    this.sessions.value = this.sessions.value.filter((other) => other.id !== session.id);
    this.leave(session);
    const undo = () => {
      clearTimeout(timer);
      this.deletions.delete(session.id);
      void restore();
    };
    toast(t("list.deleted"), { ms: UNDO_MS, action: { label: t("undo"), run: undo } });
  }

  private leave(session: Session): void {
    if (conversationId.value === session.id) go("c");
  }
}

/** Of conversations that are branches of one another the one used last. */
function families(sessions: Session[]): Session[] {
  const parents = new Map(sessions.map((session) => [session.id, session.parent_session_id]));
  const root = (id: string): string => {
    const parent = parents.get(id);
    return parent && parents.has(parent) ? root(parent) : (parent ?? id);
  };
  const seen = new Set<string>();
  return sessions.filter((session) => {
    const family = root(session.id);
    if (seen.has(family) && !session.pinned) return false;
    seen.add(family);
    return true;
  });
}

function group(sessions: Session[]): Group[] {
  const groups = new Map<string, Session[]>();
  for (const session of sessions) {
    const label = session.pinned ? t("list.pinned") : dayOf(session.last_active ?? session.started_at);
    groups.set(label, [...(groups.get(label) ?? []), session]);
  }
  const pinned = groups.get(t("list.pinned"));
  groups.delete(t("list.pinned"));
  const rest = [...groups].map(([label, found]) => ({ label, sessions: found }));
  return pinned ? [{ label: t("list.pinned"), sessions: pinned }, ...rest] : rest;
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
