import { useState } from "preact/hooks";
import { t } from "../state/language";
import { toast } from "../state/toasts";
import { IconButton } from "./button";

async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

/** Where the clipboard is not offered, as on a page without TLS. */
function copyBySelection(text: string): boolean {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

export function CopyButton({ text, label }: { text: string; label: string }) {
  const [done, setDone] = useState(false);
  const click = async () => {
    if (!(await copy(text))) {
      toast(t("copy.failed"), { kind: "error" });
      return;
    }
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return <IconButton icon={done ? "check" : "copy"} label={done ? t("copy.done") : label} onClick={click} size={16} />;
}
