import { effect, signal, untracked } from "@preact/signals";
import type { Session } from "../api/types";
import { auth, needsKey } from "./access";
import { attachmentsOf, resendable } from "./content";
import { Conversation, partsOf } from "./conversation";
import { conversations } from "./conversations";
import { returnText } from "./drafts";
import { attempt } from "./faults";
import {
  assignOutgoing,
  isSendable,
  keepOutgoing,
  newOutgoing,
  type Outgoing,
  removeOutgoing,
  takeOutgoing,
} from "./outbox";
import { conversationId, go, replace, route } from "./route";
import { forgetFiles, type LoadedFiles, loadFiles, notesOf, returnFiles, type Upload } from "./uploads";

/** The conversation that is looked at; null before a new one has its first message. */
export const current = signal<Conversation | null>(null);
/** What a new conversation begins with. */
export type Choices = Partial<Pick<Session, "model" | "toolsets" | "workdir" | "reasoning_effort">>;
const newChoices = signal<Choices>({});

export function choicesOf(conversation: Conversation | null): Choices {
  return conversation ? { ...conversation.session.value, ...conversation.changes.value } : newChoices.value;
}

export async function choose(conversation: Conversation | null, fields: Choices): Promise<void> {
  if (conversation) await attempt(() => conversation.update(fields));
  else newChoices.value = { ...newChoices.value, ...fields };
}

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
    if (!auth.value || needsKey.value) return;
    const resumed = resume(current.value);
    void current.value?.open(resumed);
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

/** Send a message to the open conversation, or begin one with it. What cannot be sent goes back to where it was written. */
export async function send(text: string, files: Upload[]): Promise<void> {
  const open = current.value;
  await deliver(keepOutgoing(newOutgoing(open?.id ?? null, text, notesOf(files))), files, open);
}

async function deliver(
  message: Outgoing,
  files: Upload[],
  to: Conversation | null,
  attached = partsOf(files),
): Promise<void> {
  const sent = await attempt(async () => {
    const conversation = to ?? (await begin());
    assignOutgoing(message, conversation.id);
    await conversation.send(message.text, attached, message.key);
  });
  if (sent) forgetFiles(files);
  else giveBack(message, { files, lost: [] });
  removeOutgoing(message);
}

function giveBack(message: Outgoing, { files, lost }: LoadedFiles): void {
  const { conversation } = message;
  returnText(conversation, message.text);
  returnFiles({
    files: files.map((file) => ({ ...file, conversation })),
    lost: lost.map((file) => ({ ...file, conversation })),
  });
}

/** Send what was on its way when the page was left. What cannot be sent surely only once is a draft again. */
async function resume(conversation: Conversation | null): Promise<void> {
  for (const message of takeOutgoing(conversation?.id ?? null)) {
    const kept = await loadFiles(message.files);
    if (conversation && isSendable(message) && !kept.lost.length) {
      await deliver(message, kept.files, conversation);
    } else {
      giveBack(message, kept);
      removeOutgoing(message);
    }
  }
}

let resending = false;

/**
 * Send a message again or another text in its place: in a branch that has everything before it. Whether it was sent, or is
 * the draft of the branch.
 */
export async function resend(conversation: Conversation, messageId: number, text: string): Promise<boolean> {
  const row = conversation.rows.value.find((other) => other.id === messageId);
  if (!row || resending) return false;
  resending = true;
  const done = await attempt(async () => {
    const attached = await resendable(conversation.id, attachmentsOf(row.content));
    const id = await conversation.forkBefore(row);
    go("c", id);
    const message = newOutgoing(id, text, []);
    // What was attached before is not kept by the browser, and the message cannot be sent again without it.
    if (!attached.length) keepOutgoing(message);
    await deliver(message, [], current.value, attached);
    await current.value?.loadBranches();
  });
  resending = false;
  return done;
}

export function startNew(): void {
  newChoices.value = {};
  go("c");
  setTimeout(() => document.querySelector<HTMLElement>(".composer textarea")?.focus());
}
