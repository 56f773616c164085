import { batch, type Signal, signal } from "@preact/signals";
import type { RunEvent, RunStatus, Usage } from "../api/types";
import { Recent } from "../markdown/recent";

export interface TextPart {
  kind: "text";
  key: string;
  text: Signal<string>;
  done: Signal<boolean>;
  /** The row it is stored in, where it is known. */
  messageId?: number;
}

export interface ReasoningPart {
  kind: "reasoning";
  key: string;
  text: Signal<string>;
  done: Signal<boolean>;
}

export interface Approval {
  id: string;
  command: string;
  description: string;
  rules: string[];
  choices: string[];
  expiresAt: number | null;
  choice: string | null;
  by: string | null;
}

export interface Question {
  id: string;
  question: string;
  choices: string[];
  answered: boolean | null;
}

export interface ToolState {
  name: string;
  preview: string;
  arguments: Record<string, unknown>;
  output: string;
  status: string;
  duration: number | null;
  result: string | null;
  startedAt: number | null;
  approval: Approval | null;
  question: Question | null;
}

export interface ToolPart {
  kind: "tool";
  key: string;
  callId: string;
  state: Signal<ToolState>;
}

export interface NoticePart {
  kind: "notice";
  key: string;
  level: "info" | "warn" | "error";
  code: string;
  text: string;
}

export interface SteerPart {
  kind: "steer";
  key: string;
  text: string;
  applied: Signal<boolean>;
}

export type Part = TextPart | ReasoningPart | ToolPart | NoticePart | SteerPart;

/** Live output of a tool that is shown; the whole is in its result. */
const OUTPUT_MAX = 200_000;
/** The tools that ask for an approval before their call is known, by what they ask. */
const ASKING: Record<string, string> = { command: "terminal", code: "execute_code" };
/** Warnings that tell a person nothing. */
const QUIET = new Set(["unsupported_parameter", "parameter_ignored"]);
const FINAL = new Set<RunStatus>(["completed", "failed", "cancelled"]);

/** How long tools of watched runs took, by the key of their part: stored rows do not say. */
export const durations = new Recent<number>(2000);

export function isFinal(status: RunStatus): boolean {
  return FINAL.has(status);
}

const str = (value: unknown): string => (typeof value === "string" ? value : "");
const list = (value: unknown): string[] => (Array.isArray(value) ? value.map(String) : []);

/** What is seen of a run, made from its log: each event is folded in once, in order. */
export class RunView {
  readonly parts = signal<Part[]>([]);
  readonly status = signal<RunStatus>("queued");
  readonly position = signal(0);
  readonly model = signal("");
  readonly usage = signal<Usage | null>(null);
  readonly error = signal<{ code: string; message: string } | null>(null);
  readonly unusedSteer = signal("");
  readonly startedAt = signal<number | null>(null);
  readonly finishedAt = signal<number | null>(null);
  lastSeq = 0;
  private readonly texts = new Map<string, TextPart | ReasoningPart>();
  private readonly counts = new Map<string, number>();
  private readonly tools = new Map<string, ToolPart>();
  private readonly steers = new Map<string, SteerPart>();

  constructor(
    readonly runId: string,
    readonly input: string,
  ) {}

  apply(events: RunEvent[]): void {
    batch(() => {
      for (const event of events) {
        if (event.seq <= this.lastSeq) continue;
        this.lastSeq = event.seq;
        this.fold(event);
      }
    });
  }

  private fold(event: RunEvent): void {
    switch (event.event) {
      case "run.queued":
        this.status.value = "queued";
        this.position.value = Number(event.position ?? 0);
        break;
      case "run.started":
        this.status.value = "running";
        this.model.value = str(event.model);
        this.startedAt.value ??= event.timestamp;
        break;
      case "message.delta":
        this.grow("text", str(event.message_id), Number(event.offset), str(event.delta));
        break;
      case "message.completed":
        this.complete("text", str(event.message_id), str(event.content));
        break;
      case "reasoning.delta":
        this.grow("reasoning", str(event.message_id), Number(event.offset ?? -1), str(event.text));
        break;
      case "reasoning.available":
        this.complete("reasoning", str(event.message_id), str(event.text));
        break;
      case "tool.started":
        this.startTool(event);
        break;
      case "tool.output":
        this.change(str(event.tool_call_id), (tool) => ({
          output: (tool.output + str(event.text)).slice(-OUTPUT_MAX),
        }));
        break;
      case "tool.completed":
        this.change(str(event.tool_call_id), () => ({
          status: str(event.status) || (event.error ? "error" : "ok"),
          duration: Number(event.duration),
          result: str(event.result),
        }));
        durations.set(`${this.runId}:tool:${str(event.tool_call_id)}`, Number(event.duration));
        this.resume();
        break;
      case "approval.request":
        this.askApproval(event);
        break;
      case "approval.responded":
        this.answerApproval(event);
        break;
      case "clarify.request":
        this.status.value = "waiting_for_input";
        this.change(str(event.tool_call_id), () => ({
          question: {
            id: str(event.request_id),
            question: str(event.question),
            choices: list(event.choices),
            answered: null,
          },
        }));
        break;
      case "clarify.responded":
        for (const tool of this.tools.values()) {
          const question = tool.state.value.question;
          if (question && question.id === event.request_id) {
            tool.state.value = { ...tool.state.value, question: { ...question, answered: Boolean(event.answered) } };
          }
        }
        this.resume();
        break;
      case "steer.accepted": {
        const part: SteerPart = {
          kind: "steer",
          key: `${this.runId}:steer:${event.steer_id}`,
          text: str(event.text),
          applied: signal(false),
        };
        this.steers.set(str(event.steer_id), part);
        this.add(part);
        break;
      }
      case "steer.applied":
        for (const id of list(event.steer_ids)) {
          const part = this.steers.get(id);
          if (part) part.applied.value = true;
        }
        break;
      case "context.compressed":
        this.notice("info", "context.compressed", "");
        break;
      case "model.fallback":
        this.notice("warn", "model.fallback", `${str(event.from)} → ${str(event.to)}`);
        break;
      case "usage.updated":
        this.usage.value = event.usage as Usage;
        break;
      case "warning":
        if (!QUIET.has(str(event.code))) {
          this.notice(event.level === "info" ? "info" : "warn", str(event.code), str(event.message));
        }
        break;
      case "run.completed":
      case "run.failed":
      case "run.cancelled":
        this.end(event);
        break;
    }
  }

  private add(part: Part): void {
    this.parts.value = [...this.parts.value, part];
  }

  private notice(level: NoticePart["level"], code: string, text: string): void {
    this.add({ kind: "notice", key: `${this.runId}:n${this.lastSeq}`, level, code, text });
  }

  private resume(): void {
    if (!isFinal(this.status.value) && this.status.value !== "stopping") this.status.value = "running";
  }

  /** The text of a model's message; parts are numbered so that the stored rows give them the same keys. */
  private textPart(kind: "text" | "reasoning", id: string): TextPart | ReasoningPart {
    const known = this.texts.get(`${kind}:${id}`);
    if (known) return known;
    const number = this.counts.get(kind) ?? 0;
    this.counts.set(kind, number + 1);
    const part: TextPart | ReasoningPart = {
      kind,
      key: `${this.runId}:${kind}:${number}`,
      text: signal(""),
      done: signal(false),
    };
    this.texts.set(`${kind}:${id}`, part);
    this.add(part);
    return part;
  }

  private grow(kind: "text" | "reasoning", id: string, offset: number, delta: string): void {
    if (!delta) return;
    const part = this.textPart(kind, id);
    if (kind === "text") this.closeReasoning();
    const text = part.text.value;
    // Offsets count code points; only where a text was begun again do they differ from what we have.
    const start = offset < 0 || offset >= text.length ? text : [...text].slice(0, offset).join("");
    part.text.value = start + delta;
  }

  private closeReasoning(): void {
    for (const part of this.texts.values()) if (part.kind === "reasoning") part.done.value = true;
  }

  private complete(kind: "text" | "reasoning", id: string, content: string): void {
    if (!content && !this.texts.has(`${kind}:${id}`)) return;
    const part = this.textPart(kind, id);
    if (content) part.text.value = content;
    part.done.value = true;
    if (kind === "text") this.closeReasoning();
  }

  private startTool(event: RunEvent): void {
    this.closeReasoning();
    const callId = str(event.tool_call_id);
    if (this.tools.has(callId)) {
      // An approval came first, and knew less about the call.
      const { tool, preview, arguments: args } = event;
      this.change(callId, () => ({
        name: str(tool),
        preview: str(preview),
        arguments: (args as Record<string, unknown>) ?? {},
      }));
      return;
    }
    const part: ToolPart = {
      kind: "tool",
      key: `${this.runId}:tool:${callId}`,
      callId,
      state: signal({
        name: str(event.tool),
        preview: str(event.preview),
        arguments: (event.arguments as Record<string, unknown>) ?? {},
        output: "",
        status: "running",
        duration: null,
        result: null,
        startedAt: event.timestamp,
        approval: null,
        question: null,
      }),
    };
    this.tools.set(callId, part);
    this.add(part);
  }

  private change(callId: string, make: (tool: ToolState) => Partial<ToolState>): void {
    const part = this.tools.get(callId);
    if (part) part.state.value = { ...part.state.value, ...make(part.state.value) };
  }

  private askApproval(event: RunEvent): void {
    this.status.value = "waiting_for_approval";
    const approval: Approval = {
      id: str(event.approval_id),
      command: str(event.command),
      description: str(event.description),
      rules: list(event.pattern_keys),
      choices: list(event.choices),
      expiresAt: typeof event.expires_at === "number" ? event.expires_at : null,
      choice: null,
      by: null,
    };
    const callId = str(event.tool_call_id);
    if (!this.tools.has(callId)) {
      const kind = str(event.kind) || "command";
      this.startTool({ ...event, tool: ASKING[kind] ?? kind, preview: approval.command, arguments: {} });
    }
    this.change(callId, () => ({ approval }));
  }

  private answerApproval(event: RunEvent): void {
    for (const tool of this.tools.values()) {
      const approval = tool.state.value.approval;
      if (approval && approval.id === event.approval_id) {
        tool.state.value = {
          ...tool.state.value,
          approval: { ...approval, choice: str(event.choice) || "deny", by: str(event.by) },
        };
      }
    }
    this.resume();
  }

  private end(event: RunEvent): void {
    this.status.value = event.event.slice("run.".length) as RunStatus;
    this.finishedAt.value = event.timestamp;
    if (event.usage) this.usage.value = event.usage as Usage;
    for (const part of this.texts.values()) part.done.value = true;
    for (const tool of this.tools.values()) {
      if (tool.state.value.status === "running") tool.state.value = { ...tool.state.value, status: "interrupted" };
    }
    if (event.event === "run.failed") {
      this.error.value = { code: str(event.error_code), message: str(event.error) };
    }
    if (event.event === "run.cancelled") this.notice("info", "cancelled", str(event.reason));
    this.unusedSteer.value = str(event.pending_steer);
  }
}
