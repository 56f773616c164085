import { effect, signal, untracked } from "@preact/signals";
import type { Session } from "../api/types";
import { auth, needsKey } from "./access";
import { Conversation, partsOf, type Upload } from "./conversation";
import { conversations } from "./conversations";
import { attempt } from "./faults";
import { attachmentsOf } from "./items";
import { conversationId, go, replace, route } from "./route";

/** The conversation that is looked at; null before a new one has its first message. */
export const current = signal<Conversation | null>(null);
/** What a new conversation begins with. */
export type Choices = Partial<Pick<Session, "model" | "toolsets" | "workdir" | "reasoning_effort">>;
export const newChoices = signal<Choices>({});
/** A message of the open conversation that is to be shown. */
export const wantedMessage = signal<number | null>(null);

effect(() => {
  const id = auth.value && !needsKey.value ? conversationId.value : null;
  const message = Number(route.value[2]) || null;
  untracked(() => {
    wantedMessage.value = message;
    if (current.value?.id === id) return;
    current.value?.close();
    current.value = id ? new Conversation(id) : null;
    void current.value?.open();
  });
});

let beginning: Promise<Conversation> | null = null;

/** A new conversation; messages that are sent while it is made go to the same one. */
function begin(): Promise<Conversation> {
  beginning ??= conversations
    .create(newChoices.value)
    .then((id) => {
      const begun = new Conversation(id);
      begun.loaded.value = true;
      current.value = begun;
      newChoices.value = {};
      replace("c", id);
      void begun.open();
      return begun;
    })
    .finally(() => {
      beginning = null;
    });
  return beginning;
}

/** Send a message to the open conversation, or begin one with it; whether it was taken. */
export async function send(text: string, uploads: Upload[]): Promise<boolean> {
  return attempt(async () => {
    const open = current.value ?? (await begin());
    await open.send(text, partsOf(uploads));
  });
}

let resending = false;

/** Send a message again or another text in its place: in a branch that has everything before it. */
export async function resend(conversation: Conversation, messageId: number, text: string): Promise<void> {
  const row = conversation.rows.value.find((other) => other.id === messageId);
  if (!row || resending) return;
  resending = true;
  await attempt(async () => {
    const id = await conversation.forkBefore(row);
    go("c", id);
    await current.value?.send(text, attachmentsOf(row.content));
    await current.value?.loadBranches();
  });
  resending = false;
}

export function startNew(): void {
  newChoices.value = {};
  go("c");
  setTimeout(() => document.querySelector<HTMLElement>(".composer textarea")?.focus());
}
