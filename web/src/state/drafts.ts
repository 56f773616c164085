import { type Signal, signal } from "@preact/signals";
import { readTab, writeTab } from "./tab_store";

const drafts = new Map<string, Signal<string>>();

/** The text in a field, which the tab keeps: of a conversation (null: of a new one), or by another name of the field. */
export function draftOf(field: string | null): Signal<string> {
  const name = `draft.${field ?? "new"}`;
  let text = drafts.get(name);
  if (!text) {
    text = signal(readTab(name) ?? "");
    text.subscribe((value) => writeTab(name, value));
    drafts.set(name, text);
  }
  return text;
}

/** Put a text that was not sent back into its field, before what is written there by now. */
export function returnText(conversation: string | null, text: string): void {
  const draft = draftOf(conversation);
  draft.value = [text, draft.value].filter(Boolean).join("\n\n");
}
