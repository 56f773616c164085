/** What this tab keeps until it is closed. A browser that keeps nothing, or has no room, is no error. */

/** Profiles have pages of their own at one origin. */
const PREFIX = `hermes:${new URL("./", location.href).pathname}:`;

export function readTab(name: string): string | null {
  try {
    return sessionStorage.getItem(PREFIX + name);
  } catch {
    return null;
  }
}

/** An empty text is not kept. */
export function writeTab(name: string, text: string): void {
  try {
    if (text) sessionStorage.setItem(PREFIX + name, text);
    else sessionStorage.removeItem(PREFIX + name);
  } catch {
    // It holds until the page is left.
  }
}

export function readTabList<T>(name: string): T[] {
  try {
    return JSON.parse(readTab(name) ?? "[]");
  } catch {
    return [];
  }
}

export function writeTabList(name: string, list: unknown[]): void {
  writeTab(name, list.length ? JSON.stringify(list) : "");
}

export function clearTab(): void {
  try {
    for (const name of Object.keys(sessionStorage)) if (name.startsWith(PREFIX)) sessionStorage.removeItem(name);
  } catch {
    // There is nothing to clear.
  }
}
