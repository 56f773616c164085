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
export const sidebarOpen = kept<boolean>("sidebar", true);

effect(() => {
  document.documentElement.dataset.theme = theme.value;
});
