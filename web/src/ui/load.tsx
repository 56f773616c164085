import { type Signal, useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useCallback, useEffect, useRef } from "preact/hooks";
import { get, reachable } from "../api/client";
import { describe } from "../state/faults";
import { t } from "../state/language";
import { Button } from "./button";
import { Text } from "./text";

export interface Loaded<T> {
  data: Signal<T | null>;
  fault: Signal<string>;
  reload(): Promise<void>;
}

/** What a path answers, read again every so many seconds where that is asked for. */
export function useLoad<T>(path: string, everyS = 0): Loaded<T> {
  const data = useSignal<T | null>(null);
  const fault = useSignal("");
  const wanted = useRef(path);
  wanted.current = path;
  const reload = useCallback(async () => {
    try {
      const answer = await get<T>(path);
      if (wanted.current !== path) return;
      data.value = answer;
      fault.value = "";
    } catch (error) {
      if (wanted.current === path) fault.value = describe(error);
    }
  }, [path, data, fault]);
  useEffect(() => {
    void reload();
    if (!everyS) return;
    const timer = setInterval(() => {
      if (!document.hidden) void reload();
    }, everyS * 1000);
    return () => clearInterval(timer);
  }, [reload, everyS]);
  const connected = reachable.value;
  useEffect(() => {
    if (connected && fault.value) void reload();
  }, [connected]);
  return { data, fault, reload };
}

/** Shows what was loaded, or why it was not. */
export function Load<T>({ from, children }: { from: Loaded<T>; children: (data: T) => ComponentChildren }) {
  const data = from.data.value;
  if (data !== null) return <>{children(data)}</>;
  if (!from.fault.value) return <p class="faint">{t("loading")}</p>;
  return (
    <div class="fault" role="alert">
      <div>
        <p>
          <Text text={from.fault.value} />
        </p>
        <Button icon="retry" onClick={() => void from.reload()}>
          {t("retry")}
        </Button>
      </div>
    </div>
  );
}
