import { useSignal } from "@preact/signals";
import { patch } from "../api/client";
import { may } from "../state/access";
import { attempt } from "../state/faults";
import { chooseLanguage, chosenLanguage, LANGUAGES, named, t } from "../state/language";
import { type Theme, theme } from "../state/preferences";
import { toast } from "../state/toasts";
import { Button } from "../ui/button";
import { Icon } from "../ui/icons";
import { Load, useLoad } from "../ui/load";
import { Table } from "../ui/table";

interface Setting {
  key: string;
  description: string;
  value: unknown;
  source: string;
  where: string | null;
  default: unknown;
  expected: string | null;
  choices: string[] | null;
  secret: boolean;
  editable: boolean;
}

interface Problem {
  key: string;
  message: string;
  hint: string | null;
}

const NAMES: Record<string, string> = { en: "English", de: "Deutsch" };

export default function Settings() {
  return (
    <>
      <h2>{t("settings.page")}</h2>
      <div class="inline-fields">
        <label class="inline-field">
          <span>{t("settings.language")}</span>
          <select value={chosenLanguage.value} onChange={(event) => void chooseLanguage(event.currentTarget.value)}>
            <option value="">{t("settings.browser")}</option>
            {LANGUAGES.map((name) => (
              <option key={name} value={name}>
                {NAMES[name] ?? name}
              </option>
            ))}
          </select>
        </label>
        <label class="inline-field">
          <span>{t("settings.theme")}</span>
          <select value={theme.value} onChange={(event) => (theme.value = event.currentTarget.value as Theme)}>
            <option value="system">{t("settings.system")}</option>
            <option value="light">{t("settings.light")}</option>
            <option value="dark">{t("settings.dark")}</option>
          </select>
        </label>
      </div>
      {may("admin") && <ServerSettings />}
    </>
  );
}

function ServerSettings() {
  const settings = useLoad<{ data: Setting[]; problems?: Problem[] }>("api/settings");
  const wanted = useSignal("");
  const changedOnly = useSignal(false);
  const fits = (row: Setting, word: string) => row.key.includes(word) || row.description.toLowerCase().includes(word);
  const rowsOf = (all: Setting[]) =>
    all
      .filter((row) => fits(row, wanted.value.trim().toLowerCase()))
      .filter((row) => !changedOnly.value || row.source !== "default");
  return (
    <>
      <h2>{t("settings.server")}</h2>
      <p class="page-note">{t("settings.text")}</p>
      <div class="inline-fields">
        <input
          type="search"
          class="narrow"
          aria-label={t("settings.filter")}
          placeholder={t("settings.filter")}
          value={wanted.value}
          onInput={(event) => (wanted.value = event.currentTarget.value)}
        />
        <label class="check">
          <input
            type="checkbox"
            checked={changedOnly.value}
            onChange={() => (changedOnly.value = !changedOnly.value)}
          />
          {t("settings.changed")}
        </label>
      </div>
      <Load from={settings}>
        {(list) => (
          <>
            {(list.problems ?? []).map((problem) => (
              <p key={`${problem.key}${problem.message}`} class="notice warn">
                <Icon name="warn" size={15} /> <code>{problem.key}</code> {problem.message} {problem.hint}
              </p>
            ))}
            {!rowsOf(list.data).length && <p class="faint">{t("settings.none")}</p>}
            <Table
              label={t("settings.server")}
              columns={[t("settings.key"), t("settings.value"), t("settings.source"), t("settings.default")]}
            >
              {rowsOf(list.data).map((row) => (
                <Row key={row.key} row={row} reload={settings.reload} />
              ))}
            </Table>
          </>
        )}
      </Load>
    </>
  );
}

const shown = (value: unknown): string =>
  value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);

function Row({ row, reload }: { row: Setting; reload(): Promise<void> }) {
  const text = useSignal<string | null>(null);
  const save = (value: unknown) =>
    void attempt(() => patch(`api/settings/${encodeURIComponent(row.key)}`, { value })).then(async (done) => {
      if (!done) return;
      text.value = null;
      toast(t("settings.saved"));
      await reload();
    });
  return (
    <tr>
      <th scope="row" class="setting">
        <code>{row.key}</code>
        <div class="faint" lang="en" dir="ltr">
          {row.description}
        </div>
      </th>
      <td class="wide">
        {text.value === null ? (
          <>
            <span dir="auto">{shown(row.value)}</span>{" "}
            {row.editable && (
              <Button kind="quiet" icon="pencil" onClick={() => (text.value = shown(row.value))}>
                <span class="visually-hidden">{t("settings.edit", { key: row.key })}</span>
              </Button>
            )}
          </>
        ) : (
          <form
            class="line"
            onSubmit={(event) => {
              event.preventDefault();
              save(parse(text.value ?? "", row));
            }}
          >
            {row.choices?.length ? (
              <select
                aria-label={row.key}
                value={text.value}
                onChange={(event) => (text.value = event.currentTarget.value)}
              >
                {row.choices.map((choice) => (
                  <option key={choice}>{choice}</option>
                ))}
              </select>
            ) : (
              <input
                type="text"
                aria-label={row.key}
                value={text.value}
                placeholder={row.expected ?? ""}
                onInput={(event) => (text.value = event.currentTarget.value)}
              />
            )}
            <Button kind="primary" type="submit">
              {t("save")}
            </Button>
            {row.source !== "default" && <Button onClick={() => save(null)}>{t("settings.unset")}</Button>}
            <Button kind="quiet" onClick={() => (text.value = null)}>
              {t("cancel")}
            </Button>
          </form>
        )}
      </td>
      <td title={row.where ?? undefined}>{named(`source.${row.source}`, row.source)}</td>
      <td class="faint">{shown(row.default)}</td>
    </tr>
  );
}

/** What was typed, as the kind of value that the setting has. */
function parse(text: string, row: Setting): unknown {
  const sample = row.value ?? row.default;
  if (typeof sample === "string") return text;
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
