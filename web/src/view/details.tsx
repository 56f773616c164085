import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { address, get } from "../api/client";
import type { List, Session, StoredFile } from "../api/types";
import { mainModel, may, models, toolsets, workspaces } from "../state/access";
import type { Conversation } from "../state/conversation";
import { formatBytes, formatCost, formatMoment, formatNumber, named, t } from "../state/language";
import { choicesOf, choose } from "../state/open";
import { link } from "../state/route";
import { IconButton } from "../ui/button";
import { Icon } from "../ui/icons";

/** The model, tools, folder, files and figures of a conversation. */
export function Details({ conversation, onClose }: { conversation: Conversation | null; onClose(): void }) {
  const session = conversation?.session.value ?? null;
  return (
    <aside class="details" aria-label={t("details")}>
      <header>
        <h2>{t("details")}</h2>
        <IconButton icon="close" label={t("close")} onClick={onClose} />
      </header>
      <Workdir conversation={conversation} />
      <Toolsets conversation={conversation} />
      {session && <Figures session={session} />}
      {conversation && <Files conversation={conversation} />}
      {conversation && <Exports id={conversation.id} />}
    </aside>
  );
}

function Workdir({ conversation }: { conversation: Conversation | null }) {
  const kept = choicesOf(conversation).workdir ?? "";
  // What is being written outlives news of the conversation.
  const written = useSignal<string | null>(null);
  // Browsers tell no change of a field whose value was set meanwhile.
  const save = () => {
    if (written.value === null) return;
    void choose(conversation, { workdir: written.value.trim() || null }).then(() => {
      written.value = null;
    });
  };
  if (!workspaces.value.length && !kept) return null;
  return (
    <label class="field">
      <span>{t("workdir")}</span>
      <input
        type="text"
        dir="ltr"
        value={written.value ?? kept}
        placeholder={t("workdir.default")}
        readOnly={!may("sessions:write")}
        list="workspaces"
        onInput={(event) => (written.value = event.currentTarget.value)}
        onBlur={save}
        onKeyDown={(event) => event.key === "Enter" && save()}
      />
      <datalist id="workspaces">
        {workspaces.value.map((path) => (
          <option key={path} value={path} />
        ))}
      </datalist>
    </label>
  );
}

function Toolsets({ conversation }: { conversation: Conversation | null }) {
  const chosen = choicesOf(conversation).toolsets;
  const offered = toolsets.value.filter((set) => set.available);
  const on = (name: string) => !chosen || chosen.includes(name);
  const toggle = (name: string) => {
    const names = offered.map((set) => set.name).filter((other) => (other === name ? !on(name) : on(other)));
    choose(conversation, { toolsets: names.length === offered.length ? null : names });
  };
  return (
    <fieldset class="field">
      <legend>{t("toolsets")}</legend>
      {offered.map((set) => (
        <label key={set.name} class="check" title={set.description}>
          <input
            type="checkbox"
            checked={on(set.name)}
            disabled={!may("sessions:write")}
            onChange={() => toggle(set.name)}
          />
          {named(`toolset.${set.name}`, set.label)}
        </label>
      ))}
    </fieldset>
  );
}

/** The first model of the list is the name under which the server offers its own. */
function modelOf(session: Session): string {
  const own = models.value[0]?.id;
  if (session.model && session.model !== own) return session.model;
  return mainModel.value?.title ?? mainModel.value?.model ?? own ?? "";
}

function Figures({ session }: { session: Session }) {
  const rows: [string, string][] = [
    [t("model"), modelOf(session)],
    [t("figure.messages"), formatNumber(session.message_count)],
    [t("figure.tools"), formatNumber(session.tool_call_count)],
    [t("figure.input"), formatNumber(session.input_tokens)],
    [t("figure.cached"), formatNumber(session.cache_read_tokens)],
    [t("figure.output"), formatNumber(session.output_tokens)],
    ...(session.actual_cost_usd === null
      ? []
      : [[t("figure.cost"), formatCost(session.actual_cost_usd)] as [string, string]]),
    [t("figure.started"), formatMoment(session.started_at)],
  ];
  return (
    <dl class="figures">
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

function Files({ conversation }: { conversation: Conversation }) {
  const files = useSignal<StoredFile[]>([]);
  const id = encodeURIComponent(conversation.id);
  const count = conversation.rows.value.length;
  useEffect(() => {
    get<List<StoredFile>>(`api/sessions/${id}/files`).then(
      (found) => {
        files.value = found.data;
      },
      () => {},
    );
  }, [id, count, files]);
  if (!files.value.length) return null;
  return (
    <div class="field">
      <h3>{t("files")}</h3>
      <ul class="plain-list">
        {files.value.map((file) => (
          <li key={file.id}>
            <a href={address(`api/sessions/${id}/files/${encodeURIComponent(file.id)}`)} download={file.name}>
              <Icon name="file" size={14} /> {file.name}
            </a>{" "}
            <span class="faint">{formatBytes(file.bytes)}</span>
          </li>
        ))}
      </ul>
    </div>
  );
}

function Exports({ id }: { id: string }) {
  const path = `api/sessions/${encodeURIComponent(id)}/export`;
  return (
    <div class="field">
      <h3>{t("export")}</h3>
      <p class="links">
        {["markdown", "json", "jsonl"].map((format) => (
          <a key={format} href={address(`${path}?format=${format}`)} download>
            {format}
          </a>
        ))}
      </p>
      <a href={link("runs", "session", id)}>{t("timeline.of_session")}</a>
    </div>
  );
}
