import { useSignal } from "@preact/signals";
import { patch } from "../api/client";
import { may } from "../state/access";
import { attempt } from "../state/faults";
import { type Key, t } from "../state/language";
import { toast } from "../state/toasts";
import { Button, IconButton } from "../ui/button";
import { Load, useLoad } from "../ui/load";

interface Store {
  entries: string[];
  chars: number;
  limit: number;
  enabled: boolean;
}

type Target = "memory" | "user";
type Operation = { action: string; content?: string; old_text?: string };

export default function Memory() {
  const memory = useLoad<Record<Target, Store>>("api/memory");
  const change = (target: Target) => (operation: Operation) =>
    attempt(() => patch(`api/memory/${target}`, { operations: [operation] })).then(async (done) => {
      await memory.reload();
      return done;
    });
  return (
    <>
      <p class="page-note">{t("memory.text")}</p>
      <Load from={memory}>
        {(found) => (
          <div class="columns">
            {(["memory", "user"] as const).map((target) => (
              <StoreView key={target} target={target} store={found[target]} change={change(target)} />
            ))}
          </div>
        )}
      </Load>
    </>
  );
}

interface StoreProps {
  target: Target;
  store: Store;
  change(operation: Operation): Promise<boolean>;
}

function StoreView({ target, store, change }: StoreProps) {
  const text = useSignal("");
  const write = may("sessions:write");
  const add = (event: SubmitEvent) => {
    event.preventDefault();
    if (!text.value.trim()) return;
    void change({ action: "add", content: text.value.trim() }).then((done) => {
      if (done) text.value = "";
    });
  };
  return (
    <section aria-label={t(`memory.${target}` as Key)}>
      <h2>{t(`memory.${target}` as Key)}</h2>
      <p class="faint">
        {t("memory.size", { chars: store.chars, limit: store.limit })} {store.enabled ? "" : t("memory.off")}
      </p>
      {!store.entries.length && <p class="faint">{t("memory.none")}</p>}
      <ul class="cards">
        {store.entries.map((entry) => (
          <Entry key={entry} entry={entry} editable={write} change={change} />
        ))}
      </ul>
      {write && (
        <form class="line" onSubmit={add}>
          <input
            type="text"
            dir="auto"
            aria-label={t("memory.new")}
            placeholder={t("memory.new")}
            value={text.value}
            onInput={(event) => (text.value = event.currentTarget.value)}
          />
          <Button type="submit">{t("add")}</Button>
        </form>
      )}
    </section>
  );
}

function Entry({ entry, editable, change }: { entry: string; editable: boolean; change: StoreProps["change"] }) {
  const text = useSignal<string | null>(null);
  if (text.value !== null) {
    return (
      <li>
        <textarea
          dir="auto"
          aria-label={t("edit")}
          value={text.value}
          onInput={(event) => (text.value = event.currentTarget.value)}
        />
        <div class="buttons">
          <Button
            kind="primary"
            onClick={() => void change({ action: "replace", old_text: entry, content: text.value ?? "" })}
          >
            {t("save")}
          </Button>
          <Button onClick={() => (text.value = null)}>{t("cancel")}</Button>
        </div>
      </li>
    );
  }
  const drop = async () => {
    if (!(await change({ action: "remove", old_text: entry }))) return;
    const undo = () => void change({ action: "add", content: entry });
    toast(t("memory.removed"), { action: { label: t("undo"), run: undo } });
  };
  return (
    <li class="card-row">
      <span dir="auto">{entry}</span>
      {editable && (
        <>
          <IconButton icon="pencil" label={t("edit")} size={16} onClick={() => (text.value = entry)} />
          <IconButton icon="trash" label={t("delete")} size={16} onClick={() => void drop()} />
        </>
      )}
    </li>
  );
}
