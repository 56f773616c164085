/** Texts on their way to the server, kept by the tab until it has them: after a reload they are drafts again. */

const sending = new Set<string>();

function read(place: string): Record<string, string> {
  try {
    return JSON.parse(sessionStorage.getItem(place) ?? "{}");
  } catch {
    return {};
  }
}

function write(place: string, texts: Record<string, string>): void {
  if (Object.keys(texts).length) sessionStorage.setItem(place, JSON.stringify(texts));
  else sessionStorage.removeItem(place);
}

const placeOf = (conversation: string) => `hermes.unsent.${conversation}`;

/** Keep a text; what is returned lets go of it. */
export function keepUnsent(conversation: string, text: string): () => void {
  const place = placeOf(conversation);
  const id = `${Date.now()}-${Math.random()}`;
  sending.add(id);
  write(place, { ...read(place), [id]: text });
  return () => {
    sending.delete(id);
    const { [id]: _, ...rest } = read(place);
    write(place, rest);
  };
}

/** The texts that were on their way when the page was left. */
export function takeUnsent(conversation: string): string[] {
  const entries = Object.entries(read(placeOf(conversation)));
  write(placeOf(conversation), Object.fromEntries(entries.filter(([id]) => sending.has(id))));
  return entries.filter(([id]) => !sending.has(id)).map(([, text]) => text);
}
