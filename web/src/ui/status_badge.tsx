import { named } from "../state/language";

const LOOKS: Record<string, string> = {
  completed: "good",
  ok: "good",
  connected: "good",
  up: "good",
  down: "bad",
  failed: "bad",
  error: "bad",
  degraded: "warn",
  cancelled: "warn",
  queued: "",
  running: "warn",
  waiting_for_approval: "warn",
  waiting_for_input: "warn",
};

export function StatusBadge({ status }: { status: string }) {
  return <span class={`badge ${LOOKS[status] ?? ""}`}>{named(`status.${status}`, status)}</span>;
}
