import { effect, type Signal, signal } from "@preact/signals";

/** A value that this browser keeps. Never a secret. */
export function kept<T extends string | boolean | number>(name: string, initial: T): Signal<T> {
  const stored = read(name);
  const value = signal<T>(typeof stored === typeof initial ? (stored as T) : initial);
  effect(() => {
    try {
      localStorage.setItem(`hermes.${name}`, JSON.stringify(value.value));
    } catch {
      // A browser that keeps nothing: it holds until the page is closed.
    }
  });
  return value;
}

function read(name: string): unknown {
  try {
    return JSON.parse(localStorage.getItem(`hermes.${name}`) ?? "null");
  } catch {
    return null;
  }
}

export type Theme = "system" | "light" | "dark";
export const theme = kept<Theme>("theme", "system");
const dark = matchMedia("(prefers-color-scheme: dark)");
/** What the system wants; styles follow it by themselves, drawings have to be told. */
export const systemDark = signal(dark.matches);
dark.addEventListener("change", () => {
  systemDark.value = dark.matches;
});
const AFTER = { system: "light", light: "dark", dark: "system" } as const;

export function changeTheme(): void {
  theme.value = AFTER[theme.value];
}

export const sidebarOpen = kept<boolean>("sidebar", true);

effect(() => {
  document.documentElement.dataset.theme = theme.value;
});
