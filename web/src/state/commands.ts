import { signal } from "@preact/signals";
import { isTyping } from "../ui/focus";
import { mayBegin, maySend } from "./access";
import { plainText } from "./content";
import { conversations } from "./conversations";
import { attempt } from "./faults";
import type { Key } from "./language";
import { current, resend, startNew } from "./open";
import { changeTheme, sidebarOpen } from "./preferences";
import { conversationId, go } from "./route";

export const shown = signal<"palette" | "keys" | null>(null);

export interface Command {
  label: Key;
  /** As `KeyboardEvent.key`, with `Ctrl+` where Control (or Command) is held. */
  key: string;
  run(): void;
  /** Whether this key may do it; without it every key may. */
  offered?(): boolean;
}

const focus = (selector: string) => document.querySelector<HTMLElement>(selector)?.focus();

function step(by: number): void {
  const list = conversations.groups.value.flatMap((group) => group.families);
  const at = list.findIndex(({ members }) => members.some((member) => member.id === conversationId.value));
  const next = list[at < 0 ? 0 : at + by];
  if (next) go("c", next.session.id);
}

/** Decide about the command that waits; one that cannot be seen is shown instead. */
function decide(choice: "once" | "deny"): void {
  const card = document.querySelector<HTMLElement>("[data-approval]");
  const list = card?.closest(".messages");
  if (!card || !list) return;
  const seen = list.getBoundingClientRect();
  const { top, bottom } = card.getBoundingClientRect();
  const fits = bottom - top <= seen.height;
  // Scrolled positions are whole pixels, heights are not.
  const below = bottom > seen.bottom + 1;
  if (fits ? top < seen.top - 1 || below : below || bottom < seen.top) {
    card.scrollIntoView({ block: fits ? "nearest" : "end" });
    return;
  }
  card.querySelector<HTMLElement>(choice === "once" ? "button.primary" : "button.danger")?.click();
}

function again(): void {
  const open = current.value;
  const row = open?.rows.value.findLast((other) => other.role === "user");
  if (open && row) void resend(open, row.id, plainText(row.content));
}

/** Everything a key does. */
const COMMANDS: Command[] = [
  { label: "keys.palette", key: "Ctrl+k", run: () => (shown.value = "palette") },
  { label: "new", key: "n", run: startNew, offered: mayBegin },
  { label: "keys.search", key: "/", run: () => showSearch() },
  { label: "keys.write", key: "c", run: () => focus(".composer textarea"), offered: maySend },
  { label: "keys.read", key: "m", run: () => focus(".messages") },
  { label: "keys.next", key: "j", run: () => step(1) },
  { label: "keys.previous", key: "k", run: () => step(-1) },
  { label: "stop", key: "Ctrl+.", run: stop, offered: maySend },
  { label: "keys.allow", key: "a", run: () => decide("once"), offered: maySend },
  { label: "keys.deny", key: "x", run: () => decide("deny"), offered: maySend },
  {
    label: "keys.edit",
    key: "e",
    run: () => [...document.querySelectorAll<HTMLElement>(".user .edit")].at(-1)?.click(),
    offered: mayBegin,
  },
  { label: "retry", key: "r", run: again, offered: mayBegin },
  { label: "details", key: "d", run: () => dispatchEvent(new Event("hermes:details")) },
  { label: "sidebar", key: "s", run: () => (sidebarOpen.value = !sidebarOpen.value) },
  { label: "keys.theme", key: "t", run: changeTheme },
  { label: "keys.title", key: "?", run: () => (shown.value = "keys") },
];

/** What is offered to whoever is signed in; the palette and the list of keys are made from it. */
export const commands = (): Command[] => COMMANDS.filter((command) => command.offered?.() ?? true);

function stop(): void {
  const open = current.value;
  const running = open?.running.value;
  if (open && running) void attempt(() => open.stop(running));
}

function showSearch(): void {
  sidebarOpen.value = true;
  setTimeout(() => focus("#search"));
}

export function listen(): void {
  addEventListener("keydown", (event) => {
    if (event.isComposing || event.altKey || event.defaultPrevented) return;
    const control = event.ctrlKey || event.metaKey;
    if (!control && (isTyping(event.target) || document.querySelector("dialog[open]"))) return;
    const pressed = `${control ? "Ctrl+" : ""}${event.key}`;
    const command = commands().find((other) => other.key === pressed);
    if (!command) return;
    event.preventDefault();
    command.run();
  });
  addEventListener("hermes:keys", () => (shown.value = "keys"));
}
