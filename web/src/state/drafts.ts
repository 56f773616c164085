import { type Signal, signal } from "@preact/signals";

const drafts = new Map<string, Signal<string>>();

/** The text in the field of a conversation (null: of a new one), which the tab keeps. */
export function draftOf(conversation: string | null): Signal<string> {
  const place = `hermes.draft.${conversation ?? "new"}`;
  let text = drafts.get(place);
  if (!text) {
    text = signal(sessionStorage.getItem(place) ?? "");
    text.subscribe((value) => {
      if (value) sessionStorage.setItem(place, value);
      else sessionStorage.removeItem(place);
    });
    drafts.set(place, text);
  }
  return text;
}

/** Put a text that was not sent back into its field, before what is written there by now. */
export function returnText(conversation: string | null, text: string): void {
  const draft = draftOf(conversation);
  draft.value = [text, draft.value].filter(Boolean).join("\n\n");
}
