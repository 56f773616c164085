/**
 * Messages on their way, kept by the tab until the server has answered. After a reload they are sent again under the same
 * idempotency key: the server takes each of them once, whether or not it had it before.
 */

import { readTabList, writeTabList } from "./tab_store";
import type { FileNote } from "./uploads";

const PLACE = "outbox";
/** For so long the server knows a key for certain (it keeps them for a day). */
const SENDABLE_MS = 12 * 3_600_000;

export interface Outgoing {
  key: string;
  /** null while the conversation that it begins is made. */
  conversation: string | null;
  text: string;
  files: FileNote[];
  timeMs: number;
}

/** Those that this page is sending. */
const sending = new Set<string>();

const read = (): Outgoing[] => readTabList(PLACE);
const write = (messages: Outgoing[]): void => writeTabList(PLACE, messages);

export function newKey(): string {
  return crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
}

export function newOutgoing(conversation: string | null, text: string, files: FileNote[]): Outgoing {
  return { key: newKey(), conversation, text, files, timeMs: Date.now() };
}

export function keepOutgoing(message: Outgoing): Outgoing {
  sending.add(message.key);
  write([...read(), message]);
  return message;
}

export function assignOutgoing(message: Outgoing, conversation: string): void {
  message.conversation = conversation;
  write(read().map((other) => (other.key === message.key ? message : other)));
}

export function removeOutgoing(message: Outgoing): void {
  sending.delete(message.key);
  write(read().filter((other) => other.key !== message.key));
}

/** The messages of a conversation that were on their way when the page was left, to be sent by this page. */
export function takeOutgoing(conversation: string | null): Outgoing[] {
  const left = read().filter((other) => other.conversation === conversation && !sending.has(other.key));
  for (const message of left) sending.add(message.key);
  return left;
}

/** Whether sending it again cannot carry it out twice. */
export function isSendable(message: Outgoing): boolean {
  return message.conversation !== null && Date.now() - message.timeMs < SENDABLE_MS;
}
