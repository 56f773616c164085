import { computed, signal } from "@preact/signals";

/** The part of the address behind `#`, as a list: `#/c/ID` is `["c", "ID"]`. */
function read(): string[] {
  return location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decode);
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export const route = signal(read());
addEventListener("hashchange", () => {
  route.value = read();
});

export const page = computed(() => route.value[0] ?? "c");
export const conversationId = computed(() => (page.value === "c" ? (route.value[1] ?? null) : null));

export function link(...parts: (string | number)[]): string {
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}`;
}

export function go(...parts: (string | number)[]): void {
  location.hash = link(...parts);
  route.value = read();
}

/** The same without a step back to where we are. */
export function replace(...parts: (string | number)[]): void {
  history.replaceState(null, "", link(...parts));
  route.value = read();
}
