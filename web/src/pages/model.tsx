import { useSignal } from "@preact/signals";
import { ApiError, post } from "../api/client";
import { loadAccess, type MainModel } from "../state/access";
import { attempt, describe } from "../state/faults";
import { formatDuration, formatNumber, named, t } from "../state/language";
import { Button } from "../ui/button";
import { Load, useLoad } from "../ui/load";
import { Text } from "../ui/text";
import { Tile } from "./health";

interface Provider {
  name: string;
  base_url: string | null;
  needs_key: boolean;
  has_key: boolean;
  key_env: string | null;
  problem: string | null;
}

interface Connected {
  written: boolean;
  test: { answer: string | null; error: string | null; seconds: number } | null;
}

const OWN_ADDRESS = "+";

export default function ModelPage() {
  const model = useLoad<MainModel>("api/model");
  return (
    <Load from={model}>
      {(found) => (
        <>
          <div class="tiles">
            <Tile label={t("model")} value={found.title ?? found.model ?? "–"} />
            <Tile label={t("model.provider")} value={found.provider ?? "–"} />
            {found.window && <Tile label={t("model.window")} value={formatNumber(found.window)} />}
            <Tile
              label={t("model.abilities")}
              value={found.abilities.map((name) => named(`ability.${name}`, name)).join(", ") || "–"}
            />
          </div>
          {found.problem && <p class="field-fault">{found.problem}</p>}
          {found.embedded && (
            <p class="page-note">{t("welcome.embedded", { name: found.title ?? found.model ?? "" })}</p>
          )}
          <Connect onSaved={() => void model.reload()} />
        </>
      )}
    </Load>
  );
}

/** The fields of the form that were filled in, as the API wants them. */
function fieldsOf(form: HTMLFormElement): Record<string, string> {
  const fields: Record<string, string> = {};
  for (const [name, value] of new FormData(form)) {
    const text = String(value).trim();
    if (text && !(name === "provider" && text === OWN_ADDRESS)) fields[name] = text;
  }
  return fields;
}

function Connect({ onSaved }: { onSaved(): void }) {
  const providers = useLoad<{ data: Provider[] }>("api/model/providers");
  const chosen = useSignal("");
  const known = useSignal<string[]>([]);
  const told = useSignal<{ good: boolean; text: string } | null>(null);
  const refused = useSignal(false);
  const busy = useSignal(false);

  const list = async (form: HTMLFormElement) => {
    const { model: _, ...where } = fieldsOf(form);
    busy.value = true;
    await attempt(async () => {
      const found = await post<{ data: { id: string }[]; likely: string | null }>("api/model/models", where);
      known.value = found.data.map((one) => one.id);
      const field = form.elements.namedItem("model");
      if (field instanceof HTMLInputElement && !field.value) field.value = found.likely ?? "";
    });
    busy.value = false;
  };
  const connect = async (form: HTMLFormElement, options: { test_only?: boolean; anyway?: boolean }) => {
    busy.value = true;
    told.value = null;
    refused.value = false;
    try {
      const done = await post<Connected>("api/model", { ...fieldsOf(form), ...options });
      const seconds = done.test ? formatDuration(done.test.seconds) : "";
      told.value = { good: true, text: t(done.written ? "model.saved" : "model.works", { seconds }) };
      if (!done.written) return;
      await attempt(loadAccess);
      onSaved();
    } catch (error) {
      told.value = { good: false, text: describe(error) };
      refused.value = error instanceof ApiError && error.code === "provider_unavailable" && !options.test_only;
    } finally {
      busy.value = false;
    }
  };
  const form = (event: Event) => (event.currentTarget as HTMLElement).closest("form") as HTMLFormElement;
  return (
    <Load from={providers}>
      {(offered) => {
        const provider = offered.data.find((other) => other.name === chosen.value);
        return (
          <form
            class="form"
            onSubmit={(event) => {
              event.preventDefault();
              void connect(form(event), {});
            }}
          >
            <h2>{t("model.connect")}</h2>
            <p class="page-note">
              <Text text={t("model.text")} />
            </p>
            <label class="field">
              <span>{t("model.provider")}</span>
              <select
                name="provider"
                required
                value={chosen.value}
                onChange={(event) => {
                  chosen.value = event.currentTarget.value;
                  known.value = [];
                }}
              >
                <option value="">{t("model.choose")}</option>
                {offered.data.map((other) => (
                  <option key={other.name} value={other.name}>
                    {other.name}
                  </option>
                ))}
                <option value={OWN_ADDRESS}>{t("model.own_address")}</option>
              </select>
            </label>
            {provider?.problem && <p class="field-fault">{provider.problem}</p>}
            {chosen.value === OWN_ADDRESS && (
              <label class="field">
                <span>{t("model.address")}</span>
                <input name="base_url" type="text" dir="ltr" required placeholder="http://127.0.0.1:11434/v1" />
              </label>
            )}
            {(provider?.needs_key || chosen.value === OWN_ADDRESS) && (
              <label class="field">
                <span>{t("model.key")}</span>
                <input
                  name="api_key"
                  type="password"
                  autocomplete="off"
                  dir="ltr"
                  placeholder={provider?.has_key ? t("model.has_key") : ""}
                />
              </label>
            )}
            <label class="field">
              <span>{t("model")}</span>
              <span class="line">
                <input name="model" type="text" list="known-models" dir="ltr" />
                <Button disabled={busy.value || !chosen.value} onClick={(event) => void list(form(event))}>
                  {t("model.list")}
                </Button>
              </span>
              <datalist id="known-models">
                {known.value.map((name) => (
                  <option key={name} value={name} />
                ))}
              </datalist>
            </label>
            <p class={told.value?.good ? "good-text" : "field-fault"} role="status">
              {busy.value ? t("model.asking") : told.value?.text}
            </p>
            <div class="buttons">
              <Button
                disabled={busy.value || !chosen.value}
                onClick={(event) => void connect(form(event), { test_only: true })}
              >
                {t("model.try")}
              </Button>
              <Button kind="primary" type="submit" disabled={busy.value || !chosen.value}>
                {t("save")}
              </Button>
              {refused.value && (
                <Button kind="danger" onClick={(event) => void connect(form(event), { anyway: true })}>
                  {t("model.anyway")}
                </Button>
              )}
            </div>
          </form>
        );
      }}
    </Load>
  );
}
