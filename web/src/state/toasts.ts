import { signal } from "@preact/signals";

export interface Toast {
  id: number;
  text: string;
  kind: "info" | "error";
  action?: { label: string; run(): void };
}

export const toasts = signal<Toast[]>([]);
/** What screen readers are told; one sentence at a time. */
export const announcement = signal("");
let next = 1;

export function toast(text: string, options: Partial<Omit<Toast, "id" | "text">> & { ms?: number } = {}): () => void {
  const id = next++;
  const close = () => {
    toasts.value = toasts.value.filter((shown) => shown.id !== id);
  };
  toasts.value = [...toasts.value, { id, text, kind: options.kind ?? "info", action: options.action }];
  setTimeout(close, options.ms ?? (options.kind === "error" ? 9000 : 4000));
  return close;
}

export function dismiss(id: number): void {
  toasts.value = toasts.value.filter((shown) => shown.id !== id);
}

export function announce(text: string): void {
  announcement.value = text;
}
