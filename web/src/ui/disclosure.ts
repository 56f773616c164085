import { type Signal, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";

const open = new Set<string>();

/** Whether a part of a conversation is unfolded; it stays so while its row is not drawn. */
export function useDisclosure(key: string): Signal<boolean> {
  const shown = useSignal(open.has(key));
  useEffect(() => {
    if (shown.value) open.add(key);
    else open.delete(key);
  }, [key, shown.value]);
  return shown;
}
