import type { RunEvent } from "../api/types";

export interface Span {
  kind: "model" | "tool" | "wait";
  name: string;
  detail: string;
  from: number;
  to: number;
  /** When the first word came. */
  first: number | null;
  failed: boolean;
}

export interface Timeline {
  from: number;
  to: number;
  spans: Span[];
}

const str = (value: unknown): string => (typeof value === "string" ? value : "");

/** When a run asked its model, called its tools and waited for a person. */
export function timelineOf(events: RunEvent[], now: number): Timeline {
  const spans: Span[] = [];
  const open = new Map<string, Span>();
  let name = "";
  const start = events[0]?.timestamp ?? now;
  let last = start;
  const begin = (key: string, span: Omit<Span, "to" | "first" | "failed">) => {
    const made: Span = { ...span, to: Number.NaN, first: null, failed: false };
    open.set(key, made);
    spans.push(made);
    return made;
  };
  const end = (key: string, at: number, failed = false) => {
    const span = open.get(key);
    if (!span) return;
    span.to = at;
    span.failed = failed;
    open.delete(key);
  };
  const ask = (at: number) => {
    return open.get("model") ?? begin("model", { kind: "model", name, detail: "", from: at });
  };
  for (const event of events) {
    last = event.timestamp;
    switch (event.event) {
      case "run.queued":
        begin("queue", { kind: "wait", name: "queue", detail: "", from: event.timestamp });
        break;
      case "run.started":
        end("queue", event.timestamp);
        name = str(event.model) || name;
        break;
      case "model.started":
        name = str(event.model) || name;
        end("model", event.timestamp);
        ask(event.timestamp);
        break;
      case "message.delta":
      case "reasoning.delta":
        ask(event.timestamp).first ??= event.timestamp;
        break;
      case "message.completed":
        ask(event.timestamp);
        end("model", event.timestamp);
        break;
      case "tool.started":
        begin(str(event.tool_call_id), {
          kind: "tool",
          name: str(event.tool),
          detail: str(event.preview),
          from: event.timestamp,
        });
        break;
      case "tool.completed":
        end(str(event.tool_call_id), event.timestamp, Boolean(event.error));
        break;
      case "approval.request":
        begin(str(event.approval_id), {
          kind: "wait",
          name: "approval",
          detail: str(event.command),
          from: event.timestamp,
        });
        break;
      case "approval.responded":
        end(str(event.approval_id), event.timestamp, event.choice === "deny");
        break;
      case "clarify.request":
        begin(str(event.request_id), {
          kind: "wait",
          name: "question",
          detail: str(event.question),
          from: event.timestamp,
        });
        break;
      case "clarify.responded":
        end(str(event.request_id), event.timestamp);
        break;
      case "run.completed":
      case "run.failed":
      case "run.cancelled":
        for (const key of [...open.keys()]) end(key, event.timestamp, event.event === "run.failed");
        return { from: start, to: Math.max(last, start + 0.001), spans };
    }
  }
  for (const span of open.values()) span.to = now;
  return { from: start, to: Math.max(now, start + 0.001), spans };
}
