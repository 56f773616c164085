import { batch, computed, signal } from "@preact/signals";
import { ApiError, get, patch, post, postSurely, query, request } from "../api/client";
import { type Connection, follow } from "../api/follow";
import type { ContentPart, List, Run, RunStarted, Session, StoredMessage } from "../api/types";
import { may, SEES_RUNS } from "./access";
import { variantsOf } from "./branches";
import { fileOf, imageOf } from "./content";
import { conversations } from "./conversations";
import { attempt } from "./faults";
import { type Draft, itemsOf } from "./items";
import { t } from "./language";
import { newKey } from "./outbox";
import { isFinal, RunView } from "./run_view";
import { announce } from "./toasts";
import { isImage, type Upload } from "./uploads";

const PAGE = 120;
const LOOK_MS = 4000;
/** Messages that are sent again after a reload are waited for so long before the conversation is shown without them. */
const RESUME_MS_MAX = 5000;
const SHOW_REASONING = { "X-Hermes-Reasoning": "on" };

interface MessageList extends List<StoredMessage> {
  total: number;
}

export interface Branch extends Session {
  shared_messages: number;
}

/** Tells other tabs that something has happened in a conversation. */
const tabs = "BroadcastChannel" in window ? new BroadcastChannel("hermes") : null;

/** One conversation: its stored messages, and the runs that are followed. */
export class Conversation {
  readonly session = signal<Session | null>(null);
  /** What was chosen and is not saved yet. */
  readonly changes = signal<Partial<Session>>({});
  readonly rows = signal<StoredMessage[]>([]);
  readonly total = signal(0);
  readonly views = signal<RunView[]>([]);
  readonly drafts = signal<Draft[]>([]);
  readonly branches = signal<Branch[]>([]);
  readonly variants = computed(() => variantsOf(this.id, this.branches.value));
  readonly loaded = signal(false);
  readonly missing = signal(false);
  /** Why it could not be loaded, while it is not; it is tried again. */
  readonly fault = signal<unknown>(null);
  readonly hasOlder = signal(false);
  readonly connection = signal<Connection>("closed");
  /** The message that is being edited. */
  readonly edited = signal<number | null>(null);
  readonly items = computed(() =>
    itemsOf(this.rows.value, this.total.value - this.rows.value.length, this.views.value, this.drafts.value),
  );
  readonly active = computed(() => this.views.value.filter((view) => !isFinal(view.status.value)));
  /** The run that is at work; others wait behind it. */
  readonly running = computed(() => this.active.value[0] ?? null);

  private readonly closed = new AbortController();
  private readonly finished = new Set<string>();
  private saving: Promise<void> = Promise.resolve();
  private loadingOlder: Promise<void> | null = null;
  private looking = false;

  constructor(readonly id: string) {}

  /** `resumed`: what is sent again after a reload has been answered; the server may have had it before. */
  async open(resumed: Promise<unknown> = Promise.resolve()): Promise<void> {
    await Promise.race([resumed, new Promise((resume) => setTimeout(resume, RESUME_MS_MAX))]);
    await this.load();
    void this.loadBranches();
    const timer = setInterval(() => void this.look(), LOOK_MS);
    const told = (event: MessageEvent) => {
      if (event.data === this.id) void this.look();
    };
    const seen = () => {
      if (!document.hidden) void this.look();
    };
    tabs?.addEventListener("message", told);
    document.addEventListener("visibilitychange", seen);
    this.closed.signal.addEventListener("abort", () => {
      clearInterval(timer);
      tabs?.removeEventListener("message", told);
      document.removeEventListener("visibilitychange", seen);
    });
  }

  close(): void {
    this.closed.abort();
  }

  async load(): Promise<void> {
    const path = `api/sessions/${encodeURIComponent(this.id)}`;
    try {
      const [answer, messages, runs] = await Promise.all([
        get<{ session: Session }>(path),
        get<MessageList>(`${path}/messages${query({ limit: PAGE })}`, { headers: SHOW_REASONING }),
        this.listRuns(),
      ]);
      batch(() => {
        this.session.value = answer.session;
        this.total.value = messages.total;
        this.hasOlder.value = messages.has_more;
        this.rows.value = messages.data;
        for (const run of runs) this.meet(run);
        this.loaded.value = true;
        this.fault.value = null;
      });
    } catch (error) {
      this.missing.value = isMissing(error);
      if (!(error instanceof ApiError && error.status === 401)) this.fault.value = error;
    }
  }

  private async listRuns(): Promise<Run[]> {
    if (!may(SEES_RUNS)) return [];
    const runs = await get<List<Run>>(`v1/runs${query({ session_id: this.id, limit: 10 })}`);
    return runs.data.reverse();
  }

  async loadOlder(): Promise<void> {
    if (!this.hasOlder.value) return;
    this.loadingOlder ??= attempt(async () => {
      const path = `api/sessions/${encodeURIComponent(this.id)}/messages`;
      const found = await get<MessageList>(`${path}${query({ limit: 4 * PAGE, before: this.rows.value[0]?.id })}`, {
        headers: SHOW_REASONING,
      });
      batch(() => {
        this.rows.value = [...found.data, ...this.rows.value];
        this.hasOlder.value = found.has_more && found.data.length > 0;
      });
    }).then(() => {
      this.loadingOlder = null;
    });
    await this.loadingOlder;
  }

  /** Load as far back as a message. */
  async reach(messageId: number): Promise<void> {
    while (this.hasOlder.value && (this.rows.value[0]?.id ?? 0) > messageId) await this.loadOlder();
  }

  private async loadNewer(): Promise<void> {
    const path = `api/sessions/${encodeURIComponent(this.id)}/messages`;
    const last = this.rows.value[this.rows.value.length - 1]?.id ?? 0;
    const found = await get<MessageList>(`${path}${query({ limit: 2000, order: "asc", after: last })}`, {
      headers: SHOW_REASONING,
    });
    // Another answer may have come in between.
    const newest = this.rows.value[this.rows.value.length - 1]?.id ?? 0;
    const fresh = found.data.filter((row) => row.id > newest);
    if (!fresh.length) return;
    batch(() => {
      this.rows.value = [...this.rows.value, ...fresh];
      this.total.value = Math.max(found.total, this.rows.value.length);
      const stored = new Set(fresh.map((row) => row.run_id));
      this.drafts.value = this.drafts.value.filter((draft) => !stored.has(draft.runId));
    });
  }

  /** See whether something has begun or ended elsewhere. */
  private async look(): Promise<void> {
    if (this.looking || document.hidden || this.missing.value) return;
    this.looking = true;
    try {
      if (!this.loaded.value) return await this.load();
      const [runs] = await Promise.all([this.listRuns(), this.refreshSession()]);
      const met = runs.filter((run) => this.meet(run)).length;
      const known = new Set(this.rows.value.map((row) => row.run_id));
      const unseen = runs.some(
        (run) =>
          isFinal(run.status) && !known.has(run.run_id) && !this.finished.has(run.run_id) && !this.view(run.run_id),
      );
      for (const run of runs) if (isFinal(run.status)) this.finished.add(run.run_id);
      if (met || unseen) await this.loadNewer();
    } catch (error) {
      // Anything else the next look will tell; a lost connection is shown by those who follow.
      if (isMissing(error)) this.missing.value = true;
    } finally {
      this.looking = false;
    }
  }

  private view(runId: string): RunView | undefined {
    return this.views.value.find((view) => view.runId === runId);
  }

  /** Follow a run that is under way; whether it is new here. */
  private meet(run: Run): boolean {
    if (isFinal(run.status) || this.view(run.run_id)) return false;
    const view = new RunView(run.run_id, run.input ?? "");
    view.status.value = run.status;
    this.follow(view);
    return true;
  }

  private follow(view: RunView): void {
    this.views.value = [...this.views.value, view];
    let began = false;
    void follow(
      view.runId,
      {
        onEvents: (events) => {
          view.apply(events);
          if (!began && view.status.value !== "queued") {
            began = true;
            void Promise.all([this.loadNewer(), this.refreshSession()]).catch(() => {});
          }
        },
        onConnection: (state) => {
          this.connection.value = state;
        },
        onGone: () => void this.drop(view),
      },
      this.closed.signal,
    ).then(() => this.ended(view));
  }

  private async ended(view: RunView): Promise<void> {
    if (this.closed.signal.aborted || !isFinal(view.status.value)) return;
    this.finished.add(view.runId);
    announce(t(view.status.value === "completed" ? "said.done" : "said.ended"));
    tabs?.postMessage(this.id);
    void conversations.refresh();
    await attempt(() => this.refreshSession());
    // A failed turn keeps its view, which knows more about the failure than the rows.
    if (view.status.value === "completed" && !view.unusedSteer.value) await attempt(() => this.drop(view));
    else await attempt(() => this.loadNewer());
  }

  private async drop(view: RunView): Promise<void> {
    await this.loadNewer();
    if (this.rows.value.some((row) => row.run_id === view.runId)) {
      this.views.value = this.views.value.filter((other) => other !== view);
    }
  }

  async refreshSession(): Promise<void> {
    const answer = await get<{ session: Session }>(`api/sessions/${encodeURIComponent(this.id)}`);
    this.session.value = answer.session;
  }

  async loadBranches(): Promise<void> {
    try {
      const found = await get<List<Branch>>(`api/sessions/${encodeURIComponent(this.id)}/branches`);
      // One that is about to be deleted is in the archive.
      const own = found.data.find((branch) => branch.id === this.id);
      this.branches.value = found.data.filter((branch) => branch.archived === own?.archived);
    } catch {
      // Without them there is nothing to switch between.
    }
  }

  /** Save changes in their order. Until they are saved they count already: the next change is made of them. */
  update(fields: Partial<Session>): Promise<void> {
    this.changes.value = { ...this.changes.value, ...fields };
    const saved = this.saving.then(() => this.save(fields));
    this.saving = saved.catch(() => undefined);
    return saved;
  }

  private async save(fields: Partial<Session>): Promise<void> {
    try {
      const answer = await patch<{ session: Session }>(`api/sessions/${encodeURIComponent(this.id)}`, fields);
      this.session.value = answer.session;
      void conversations.refresh();
    } finally {
      const isNewer = ([name, value]: [string, unknown]) => fields[name as keyof Session] !== value;
      this.changes.value = Object.fromEntries(Object.entries(this.changes.value).filter(isNewer));
    }
  }

  /** Send a message; while a run is at work the server keeps it for afterwards. */
  async send(text: string, attached: ContentPart[], key = newKey()): Promise<void> {
    const draft: Draft = {
      key,
      text,
      images: attached.flatMap(imageOf),
      files: attached.flatMap(fileOf),
      runId: null,
      time: Date.now() / 1000,
    };
    this.drafts.value = [...this.drafts.value, draft];
    try {
      await this.saving;
      const started = await this.start(text, attached, key);
      batch(() => {
        this.drafts.value = this.drafts.value.map((other) =>
          other.key === draft.key ? { ...other, runId: started.run_id } : other,
        );
        if (!this.view(started.run_id)) this.follow(new RunView(started.run_id, text));
      });
      tabs?.postMessage(this.id);
      void conversations.refresh();
    } catch (error) {
      this.drafts.value = this.drafts.value.filter((other) => other.key !== draft.key);
      throw error;
    }
  }

  private async start(text: string, attached: ContentPart[], key: string): Promise<{ run_id: string }> {
    const content = attached.length ? [...(text ? [{ type: "text", text }] : []), ...attached] : text;
    if (may("runs")) {
      const input = typeof content === "string" ? content : [{ role: "user", content }];
      const body = { input, session_id: this.id };
      return await postSurely<RunStarted>("v1/runs", body, key);
    }
    // A key without the scope `runs` begins the turn here; it goes on without its first connection.
    const response = await request("POST", `api/sessions/${encodeURIComponent(this.id)}/chat/stream`, {
      body: { message: content },
      headers: { "Idempotency-Key": key },
    });
    const runId = response.headers.get("X-Hermes-Run-Id") ?? "";
    void response.body?.cancel();
    return { run_id: runId };
  }

  async stop(view: RunView): Promise<void> {
    await post(`v1/runs/${view.runId}/stop`);
    if (!isFinal(view.status.value)) view.status.value = "stopping";
  }

  async steer(view: RunView, text: string): Promise<void> {
    await post(`v1/runs/${view.runId}/steer`, { text });
  }

  /** A new conversation with everything before a message. */
  async forkBefore(row: StoredMessage): Promise<string> {
    const answer = await post<{ session: Session }>(`api/sessions/${encodeURIComponent(this.id)}/fork`, {
      before_message_id: row.id,
    });
    return answer.session.id;
  }
}

const isMissing = (error: unknown): boolean => error instanceof ApiError && error.code === "session_not_found";

export function partsOf(uploads: Upload[]): ContentPart[] {
  return uploads.map((file) =>
    isImage(file)
      ? { type: "image_url", image_url: { url: file.url } }
      : { type: "file", file: { filename: file.name, file_data: file.url } },
  );
}
