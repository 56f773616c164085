import { useEffect, useRef } from "preact/hooks";
import { may, mayBegin, maySend, models } from "../state/access";
import type { Conversation } from "../state/conversation";
import { draftOf, returnText } from "../state/drafts";
import { attempt } from "../state/faults";
import { type Key, t } from "../state/language";
import { choicesOf, choose, send } from "../state/open";
import {
  addFiles,
  dropLostUploads,
  isImage,
  lostUploadsOf,
  removeUpload,
  restoreUploads,
  takeUploads,
  uploadsOf,
} from "../state/uploads";
import { Button, IconButton } from "../ui/button";
import { Icon } from "../ui/icons";

export const EFFORTS = ["", "none", "minimal", "low", "medium", "high", "xhigh", "max"];

/** Where a message is written; a draft is kept for each conversation. */
export function Composer({ conversation }: { conversation: Conversation | null }) {
  const id = conversation?.id ?? null;
  const text = draftOf(id);
  const uploads = uploadsOf(id);
  const lost = lostUploadsOf(id);
  const area = useRef<HTMLTextAreaElement>(null);
  const picker = useRef<HTMLInputElement>(null);
  const running = conversation?.running.value ?? null;
  useEffect(() => {
    void restoreUploads();
    if (matchMedia("(pointer: fine)").matches) area.current?.focus();
  }, []);
  const submit = () => {
    const message = text.value.trim();
    if (!message && !uploads.length) return;
    void send(message, takeUploads(id));
    text.value = "";
  };
  const steer = () => {
    const message = text.value.trim();
    if (!message || !running || !conversation) return;
    text.value = "";
    void attempt(() => conversation.steer(running, message)).then((done) => {
      if (!done) returnText(conversation.id, message);
    });
  };
  const keys = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (running && (event.ctrlKey || event.metaKey)) steer();
    else submit();
  };
  const paste = (event: ClipboardEvent) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    void addFiles(files, id);
  };
  const empty = !text.value.trim() && !uploads.length;
  if (!maySend()) {
    return <p class="composer-note">{t(may("sessions:read") ? "composer.read_only" : "composer.no_sessions")}</p>;
  }
  if (!conversation && !mayBegin()) return <p class="composer-note">{t("composer.no_new")}</p>;
  return (
    <form
      class="composer"
      aria-label={t("composer.label")}
      onSubmit={(event) => {
        event.preventDefault();
        submit();
      }}
    >
      {uploads.length > 0 && (
        <ul class="uploads">
          {uploads.map((upload) => (
            <li key={upload.key[2]}>
              {isImage(upload) ? <img src={upload.url} alt="" /> : <Icon name="file" />}
              <span>{upload.name}</span>
              <IconButton
                icon="close"
                size={14}
                label={t("upload.remove", { name: upload.name })}
                onClick={() => removeUpload(upload)}
              />
            </li>
          ))}
        </ul>
      )}
      {lost.length > 0 && (
        <p class="lost-uploads" role="status">
          <Icon name="warn" size={15} />
          <span>{t("upload.again", { names: lost.map((file) => file.name).join(", ") })}</span>
          <IconButton icon="close" size={14} label={t("close")} onClick={() => dropLostUploads(id)} />
        </p>
      )}
      <textarea
        ref={area}
        rows={1}
        dir="auto"
        aria-label={t("composer.label")}
        placeholder={t(running ? "composer.next" : "composer.placeholder")}
        value={text.value}
        onInput={(event) => (text.value = event.currentTarget.value)}
        onKeyDown={keys}
        onPaste={paste}
      />
      <div class="composer-row">
        <input
          ref={picker}
          type="file"
          multiple
          class="visually-hidden"
          tabIndex={-1}
          aria-label={t("upload.choose")}
          onChange={(event) => {
            void addFiles(event.currentTarget.files ?? [], id);
            event.currentTarget.value = "";
          }}
        />
        <IconButton icon="paperclip" label={t("upload.choose")} onClick={() => picker.current?.click()} />
        {may("sessions:write") && (
          <>
            <ModelChoice conversation={conversation} />
            <EffortChoice conversation={conversation} />
          </>
        )}
        <span class="space" />
        {running && !empty && (
          <>
            <Button kind="quiet" icon="steer" onClick={steer}>
              {t("steer")}
            </Button>
            <Button type="submit" kind="plain">
              {t("queue")}
            </Button>
          </>
        )}
        {running ? (
          <IconButton
            class="send stop"
            icon="stop"
            label={t("stop")}
            disabled={running.status.value === "stopping"}
            onClick={() => conversation && void attempt(() => conversation.stop(running))}
          />
        ) : (
          <button type="submit" class="icon-button send" aria-label={t("send")} title={t("send")} disabled={empty}>
            <Icon name="send" />
          </button>
        )}
      </div>
    </form>
  );
}

function ModelChoice({ conversation }: { conversation: Conversation | null }) {
  const chosen = choicesOf(conversation).model ?? "";
  const known = models.value.map((model) => model.id);
  if (known.length < 2 && !chosen) return null;
  return (
    <label class="choice">
      <span class="visually-hidden">{t("model")}</span>
      <select value={chosen} onChange={(event) => choose(conversation, { model: event.currentTarget.value || null })}>
        <option value="">{t("model.default", { name: known[0] ?? "" })}</option>
        {known.slice(1).map((id) => (
          <option key={id}>{id}</option>
        ))}
        {chosen && !known.includes(chosen) && <option>{chosen}</option>}
      </select>
    </label>
  );
}

function EffortChoice({ conversation }: { conversation: Conversation | null }) {
  const chosen = choicesOf(conversation).reasoning_effort ?? "";
  return (
    <label class="choice">
      <span class="visually-hidden">{t("effort")}</span>
      <select
        value={chosen}
        onChange={(event) => choose(conversation, { reasoning_effort: event.currentTarget.value || null })}
      >
        {EFFORTS.map((effort) => (
          <option key={effort} value={effort}>
            {t(`effort.${effort || "default"}` as Key)}
          </option>
        ))}
      </select>
    </label>
  );
}
