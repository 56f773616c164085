import { signal } from "@preact/signals";
import type { StoredMessage } from "../api/types";
import { attachmentsOf, fileOf, imageOf, plainText } from "./content";
import type { Part, RunView, ToolPart } from "./run_view";
import { durations, isFinal } from "./run_view";

/** A message of the user that the server has not stored yet. */
export interface Draft {
  key: string;
  text: string;
  images: string[];
  files: string[];
  runId: string | null;
  time: number;
}

export interface UserItem {
  kind: "user";
  key: string;
  text: string;
  images: string[];
  files: string[];
  row: StoredMessage | null;
  /** Its place among all messages of the conversation, where it is known. */
  index: number | null;
  runId: string | null;
  time: number;
  queued: RunView | null;
}

export interface PartItem {
  kind: "part";
  key: string;
  part: Part;
}

export interface EndItem {
  kind: "end";
  key: string;
  text: string;
  user: UserItem | null;
  runId: string | null;
  time: number;
  view: RunView | null;
  truncated: boolean;
}

export interface WorkingItem {
  kind: "working";
  key: string;
  view: RunView;
}

export type Item = UserItem | PartItem | EndItem | WorkingItem;

const MARKER = /^\[(?:The turn failed: )?([\s\S]*)\]$/;

function parsed(text: string): Record<string, unknown> {
  try {
    const value = JSON.parse(text) as unknown;
    return value && typeof value === "object" ? (value as Record<string, unknown>) : { value };
  } catch {
    return { arguments: text };
  }
}

const known = new WeakMap<StoredMessage, { prefix: string; parts: Part[] }>();

/** The parts of an assistant's row; the same objects each time, so that nothing is drawn anew. */
function partsOf(row: StoredMessage, run: string, texts: number, reasonings: number): Part[] {
  const prefix = `${run}:${texts}`;
  const before = known.get(row);
  if (before?.prefix === prefix) return before.parts;
  const parts: Part[] = [];
  const reasoning = row.reasoning ?? row.reasoning_content;
  if (reasoning) {
    parts.push({
      kind: "reasoning",
      key: `${run}:reasoning:${reasonings}`,
      text: signal(reasoning),
      done: signal(true),
    });
  }
  const text = plainText(row.content);
  if (row.synthetic) {
    const failed = text.startsWith("[The turn failed");
    parts.push({
      kind: "notice",
      key: `${run}:n:${row.id}`,
      level: failed ? "error" : "info",
      code: failed ? "failed" : "cancelled",
      text: MARKER.exec(text)?.[1] ?? text,
    });
  } else if (text) {
    parts.push({
      kind: "text",
      key: `${run}:text:${texts}`,
      text: signal(text),
      done: signal(true),
      messageId: row.id,
    });
  }
  for (const call of row.tool_calls ?? []) {
    const args = parsed(call.function.arguments);
    parts.push({
      kind: "tool",
      key: `${run}:tool:${call.id}`,
      callId: call.id,
      state: signal({
        name: call.function.name,
        preview: preview(args),
        arguments: args,
        output: "",
        status: "unknown",
        duration: null,
        result: null,
        startedAt: row.timestamp,
        approval: null,
        question: null,
      }),
    });
  }
  known.set(row, { prefix, parts });
  return parts;
}

/** The argument that says most about a call. */
export function preview(args: Record<string, unknown>): string {
  for (const name of ["command", "path", "query", "url", "question", "goal", "name", "pattern", "code"]) {
    const value = args[name];
    if (typeof value === "string" && value) return value;
  }
  const first = Object.values(args).find((value) => typeof value === "string");
  return typeof first === "string" ? first : "";
}

/** What a result says of its call. Any other state is one of what the tool deals with: a process, a page, the weather. */
const OUTCOMES = new Set(["error", "failed", "blocked", "denied", "timeout", "interrupted"]);

function settle(tool: ToolPart, row: StoredMessage): void {
  const state = tool.state.peek();
  if (state.result !== null) return;
  const result = plainText(row.content);
  const told = result.startsWith("{") ? parsed(result) : {};
  const failed = typeof told.error === "string" && told.error !== "";
  const ms = told.duration_ms;
  tool.state.value = {
    ...state,
    result,
    status: OUTCOMES.has(String(told.status)) ? String(told.status) : failed ? "error" : "ok",
    duration: durations.get(tool.key) ?? (typeof ms === "number" ? ms / 1000 : null),
  };
}

/** What a conversation shows: the stored rows, with the runs that are still followed in place of their own. */
export function itemsOf(rows: StoredMessage[], first: number, views: RunView[], drafts: Draft[]): Item[] {
  const items: Item[] = [];
  const live = new Map(views.map((view) => [view.runId, view]));
  const shown = new Set<string>();
  const tools = new Map<string, ToolPart>();
  const counts = new Map<string, number>();
  let user: UserItem | null = null;
  let answer: { row: StoredMessage; text: string } | null = null;

  const close = () => {
    if (answer) items.push(endOf(answer.row, answer.text, user));
    answer = null;
  };
  rows.forEach((row, place) => {
    const run = row.run_id ?? `row-${row.role === "assistant" ? row.id : "x"}`;
    const view = row.run_id ? live.get(row.run_id) : undefined;
    if (row.role === "user") {
      close();
      user = userOf(row, first + place);
      items.push(user);
      if (view) {
        shown.add(view.runId);
        items.push(...itemsOfView(view, user));
      }
    } else if (view) {
      // The view shows it.
    } else if (row.role === "assistant") {
      const texts = counts.get(run) ?? 0;
      const thoughts = counts.get(`${run}r`) ?? 0;
      const parts = partsOf(row, run, texts, thoughts);
      for (const part of parts) {
        if (part.kind === "text") counts.set(run, texts + 1);
        if (part.kind === "reasoning") counts.set(`${run}r`, thoughts + 1);
        if (part.kind === "tool") tools.set(part.callId, part);
        items.push({ kind: "part", key: part.key, part });
      }
      answer = { row, text: row.synthetic ? "" : plainText(row.content) };
    } else if (row.role === "tool" && row.tool_call_id) {
      const tool = tools.get(row.tool_call_id);
      if (tool) settle(tool, row);
    }
  });
  close();
  const stored = new Set(rows.map((row) => row.run_id));
  for (const draft of drafts) {
    if (draft.runId && (shown.has(draft.runId) || stored.has(draft.runId))) continue;
    const view = draft.runId ? live.get(draft.runId) : undefined;
    const item = userOfDraft(draft, view ?? null);
    items.push(item);
    if (view) {
      shown.add(view.runId);
      items.push(...itemsOfView(view, item));
    }
  }
  for (const view of views) {
    if (shown.has(view.runId)) continue;
    const item = userOfDraft(
      { key: view.runId, text: view.input, images: [], files: [], runId: view.runId, time: view.startedAt.value ?? 0 },
      view,
    );
    if (view.input) items.push(item);
    items.push(...itemsOfView(view, item));
  }
  return items;
}

function userOf(row: StoredMessage, index: number): UserItem {
  const attached = attachmentsOf(row.content);
  return {
    kind: "user",
    key: `u:${row.run_id ?? row.id}`,
    text: plainText(row.content),
    images: attached.flatMap(imageOf),
    files: attached.flatMap(fileOf),
    row,
    index,
    runId: row.run_id,
    time: row.timestamp,
    queued: null,
  };
}

function userOfDraft(draft: Draft, view: RunView | null): UserItem {
  return {
    kind: "user",
    key: `u:${draft.runId ?? draft.key}`,
    text: draft.text,
    images: draft.images,
    files: draft.files,
    row: null,
    index: null,
    runId: draft.runId,
    time: draft.time,
    queued: view?.status.value === "queued" && view.position.value > 0 ? view : null,
  };
}

function endOf(row: StoredMessage, text: string, user: UserItem | null): EndItem {
  return {
    kind: "end",
    key: `e:${row.run_id ?? row.id}`,
    text,
    user,
    runId: row.run_id,
    time: row.timestamp,
    view: null,
    truncated: row.finish_reason === "length" || row.finish_reason === "interrupted",
  };
}

function itemsOfView(view: RunView, user: UserItem): Item[] {
  const parts = view.parts.value;
  const items: Item[] = parts.map((part) => ({ kind: "part", key: part.key, part }));
  if (isFinal(view.status.value)) {
    const last = parts.findLast((part) => part.kind === "text");
    items.push({
      kind: "end",
      key: `e:${view.runId}`,
      text: last?.text.value ?? "",
      user,
      runId: view.runId,
      time: view.finishedAt.value ?? 0,
      view,
      // What has not begun cannot be continued.
      truncated: view.status.value !== "completed" && parts.some((part) => part.kind !== "notice"),
    });
  } else if (!(view.status.value === "queued" && view.position.value > 0)) {
    items.push({ kind: "working", key: `w:${view.runId}`, view });
  }
  return items;
}
