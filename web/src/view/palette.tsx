import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { get, query } from "../api/client";
import type { List, Match } from "../api/types";
import { may } from "../state/access";
import { commands, shown } from "../state/commands";
import { conversations, titleOf } from "../state/conversations";
import { t } from "../state/language";
import { go } from "../state/route";
import { Dialog } from "../ui/dialog";
import { PAGES } from "./sidebar";

interface Choice {
  id: string;
  label: string;
  hint: string;
  run(): void;
}

function choices(text: string, found: Match[]): Choice[] {
  const keys = commands()
    .filter((command) => command.key !== "Ctrl+k")
    .map((command) => ({
      id: `k${command.key}`,
      label: t(command.label),
      hint: command.key,
      run: command.run,
    }));
  const pages = PAGES.filter((entry) => may(entry.scope)).map((entry) => ({
    id: `p${entry.page}`,
    label: t(entry.label),
    hint: t("palette.page"),
    run: () => go(entry.page),
  }));
  const sessions = conversations.families.value.map(({ session }) => ({
    id: session.id,
    label: titleOf(session),
    hint: t("palette.conversation"),
    run: () => go("c", session.id),
  }));
  const wanted = text.trim().toLowerCase();
  const fitting = [...keys, ...pages, ...sessions].filter((choice) => choice.label.toLowerCase().includes(wanted));
  const messages = found.map((match) => ({
    id: `m${match.message_id}:${match.session_id}`,
    label: match.snippet,
    hint: match.title ?? "",
    run: () => go("c", match.session_id, ...(match.message_id ? [match.message_id] : [])),
  }));
  return [...fitting.slice(0, 12), ...messages.slice(0, 8)];
}

/** Commands, pages and conversations by a few letters of their name. */
export function Palette() {
  const text = useSignal("");
  const at = useSignal(0);
  const found = useSignal<Match[]>([]);
  useEffect(() => {
    const wanted = text.value.trim();
    found.value = [];
    if (wanted.length < 3) return;
    const timer = setTimeout(() => {
      get<List<Match>>(`api/sessions/search${query({ q: wanted, limit: 8 })}`).then(
        (answer) => {
          if (text.value.trim() === wanted) found.value = answer.data;
        },
        () => {},
      );
    }, 200);
    return () => clearTimeout(timer);
  }, [text.value, found, text]);
  const list = choices(text.value, found.value);
  useEffect(() => {
    document.getElementById(`palette-${at.value}`)?.scrollIntoView({ block: "nearest" });
  }, [at.value]);
  const close = () => (shown.value = null);
  const run = (choice: Choice | undefined) => {
    close();
    if (choice) setTimeout(() => choice.run());
  };
  const keys = (event: KeyboardEvent) => {
    if (event.key === "ArrowDown") at.value = Math.min(at.value + 1, list.length - 1);
    else if (event.key === "ArrowUp") at.value = Math.max(at.value - 1, 0);
    else if (event.key === "Enter" && !event.isComposing) run(list[at.value]);
    else return;
    event.preventDefault();
  };
  return (
    <Dialog title={t("keys.palette")} onClose={close} class="palette" hideTitle>
      <input
        type="text"
        role="combobox"
        aria-expanded="true"
        aria-controls="palette-list"
        aria-activedescendant={list[at.value] ? `palette-${at.value}` : undefined}
        aria-label={t("palette.label")}
        placeholder={t("palette.label")}
        value={text.value}
        onInput={(event) => {
          text.value = event.currentTarget.value;
          at.value = 0;
        }}
        onKeyDown={keys}
      />
      <div id="palette-list" role="listbox" aria-label={t("keys.palette")} class="palette-list" tabIndex={-1}>
        {list.map((choice, index) => (
          <div
            key={choice.id}
            id={`palette-${index}`}
            role="option"
            tabIndex={-1}
            aria-selected={index === at.value}
            class="palette-entry"
            onClick={() => run(choice)}
            onPointerMove={() => (at.value = index)}
          >
            <span dir="auto">{choice.label}</span>
            <kbd>{choice.hint}</kbd>
          </div>
        ))}
      </div>
      {!list.length && <p class="faint padded">{t("search.none")}</p>}
    </Dialog>
  );
}

/** The list of keys. */
export function KeyList() {
  const more: [string, string][] = [
    ["Enter", t("keys.send")],
    ["Shift+Enter", t("keys.line")],
    ["Ctrl+Enter", t("keys.steer")],
    ["Esc", t("keys.close")],
  ];
  return (
    <Dialog title={t("keys.title")} onClose={() => (shown.value = null)}>
      <dl class="key-list">
        {[...commands().map((command): [string, string] => [command.key, t(command.label)]), ...more].map(
          ([key, label]) => (
            <div key={key}>
              <dt>
                <kbd>{key}</kbd>
              </dt>
              <dd>{label}</dd>
            </div>
          ),
        )}
      </dl>
    </Dialog>
  );
}
