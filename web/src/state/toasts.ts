import { signal } from "@preact/signals";

const INFO_MS = 4500;
const ACTION_MS = 7000;
const ERROR_MS = 9000;

interface Options {
  kind?: "info" | "error";
  action?: { label: string; run(): void };
  /** Called when it goes without its action having been chosen. */
  onEnd?(): void;
}

export interface Toast extends Options {
  id: number;
  text: string;
}

export const toasts = signal<Toast[]>([]);
/** What screen readers are told; one sentence at a time. Its number changes, so that the same one is read again. */
export const announcement = signal({ number: 0, text: "" });
const timers = new Map<number, number>();
let held = false;
let next = 1;

/** Show a message for a while; what is returned ends it. */
export function toast(text: string, options: Options = {}): () => void {
  const shown: Toast = { ...options, id: next++, text };
  toasts.value = [...toasts.value, shown];
  if (!held) start(shown);
  return () => dismiss(shown.id);
}

function start({ id, kind, action }: Toast): void {
  const ms = kind === "error" ? ERROR_MS : action ? ACTION_MS : INFO_MS;
  timers.set(id, window.setTimeout(dismiss, ms, id));
}

/** Messages stay as long as somebody is at them. */
export function hold(value: boolean): void {
  if (held === value) return;
  held = value;
  for (const timer of timers.values()) clearTimeout(timer);
  timers.clear();
  if (!held) for (const shown of toasts.value) start(shown);
}

export function dismiss(id: number, acted = false): void {
  const shown = toasts.value.find((other) => other.id === id);
  clearTimeout(timers.get(id));
  timers.delete(id);
  toasts.value = toasts.value.filter((other) => other.id !== id);
  if (!toasts.value.length) held = false;
  if (!acted) shown?.onEnd?.();
}

export function announce(text: string): void {
  announcement.value = { number: announcement.value.number + 1, text };
}
