import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import type { StoredMessage } from "../api/types";
import { may, mayBegin, maySend, SEES_RUNS } from "../state/access";
import type { Variants } from "../state/branches";
import { plainText } from "../state/content";
import type { Conversation } from "../state/conversation";
import { conversations } from "../state/conversations";
import { draftOf } from "../state/drafts";
import { attempt, remedy } from "../state/faults";
import type { EndItem, Item, UserItem, WorkingItem } from "../state/items";
import { formatDuration, formatNumber, formatTime, t } from "../state/language";
import { resend, send } from "../state/open";
import { link } from "../state/route";
import { Button, IconButton } from "../ui/button";
import { CopyButton } from "../ui/copy_button";
import { isTyping } from "../ui/focus";
import { Icon } from "../ui/icons";
import { Text } from "../ui/text";
import { PartView } from "./part";

export function ItemView({ item, conversation }: { item: Item; conversation: Conversation }) {
  switch (item.kind) {
    case "user":
      return <UserMessage item={item} conversation={conversation} />;
    case "part":
      return <PartView part={item.part} />;
    case "end":
      return <TurnEnd item={item} conversation={conversation} />;
    case "working":
      return <Working item={item} />;
  }
}

function UserMessage({ item, conversation }: { item: UserItem; conversation: Conversation }) {
  const variants = item.index === null ? undefined : conversation.variants.value.get(item.index);
  const { row } = item;
  if (row && conversation.edited.value === row.id) {
    return <Editor row={row} text={item.text} conversation={conversation} />;
  }
  return (
    <article class="user" aria-label={t("said.you")}>
      {item.images.length > 0 && (
        <div class="thumbs">
          {item.images.map((url, index) => (
            <img key={index} src={url} alt={t("upload.image", { n: index + 1 })} />
          ))}
        </div>
      )}
      {item.files.map((name, index) => (
        <span class="file-chip" key={index}>
          <Icon name="file" size={14} /> {name}
        </span>
      ))}
      {item.text && (
        <div class="bubble" dir="auto">
          {item.text}
        </div>
      )}
      <div class="actions">
        {item.queued ? (
          <>
            <span class="badge">{t("queue.waiting")}</span>
            <IconButton
              icon="close"
              label={t("queue.remove")}
              size={16}
              onClick={() =>
                item.queued && attempt(() => conversation.stop(item.queued as NonNullable<typeof item.queued>))
              }
            />
          </>
        ) : (
          <>
            {item.time > 0 && <time class="faint">{formatTime(item.time)}</time>}
            {variants && <BranchSwitch variants={variants} conversation={conversation} />}
            {row && mayBegin() && (
              <IconButton
                class="edit"
                icon="pencil"
                label={t("edit")}
                size={16}
                onClick={() => (conversation.edited.value = row.id)}
              />
            )}
            <CopyButton text={item.text} label={t("copy.message")} />
          </>
        )}
      </div>
    </article>
  );
}

function BranchSwitch({ variants, conversation }: { variants: Variants; conversation: Conversation }) {
  const before = variants.ids[variants.at - 1];
  const after = variants.ids[variants.at + 1];
  const forked = conversation.branches.value.some((branch) => branch.parent_session_id === conversation.id);
  const session = conversation.session.value;
  // One from which others go off stays as long as they do, and a branch is deleted where it begins.
  const own =
    variants.at > 0 && variants.ids[variants.at] === session?.id && !forked && may("sessions:write") && session;
  return (
    <nav class="branches" aria-label={t("branches")}>
      {before ? (
        <a href={link("c", before)} class="icon-button" aria-label={t("branch.before")}>
          <Icon name="left" size={16} />
        </a>
      ) : null}
      <span>
        {variants.at + 1} / {variants.ids.length}
      </span>
      {after ? (
        <a href={link("c", after)} class="icon-button" aria-label={t("branch.after")}>
          <Icon name="chevron" size={16} />
        </a>
      ) : null}
      {own && (
        <IconButton
          icon="trash"
          label={t("branch.delete")}
          size={16}
          onClick={() => void conversations.deleteBranch(own)}
        />
      )}
    </nav>
  );
}

interface EditorProps {
  row: StoredMessage;
  text: string;
  conversation: Conversation;
}

/** What is written here is kept until it is sent or given up, also while the row is not drawn. */
function Editor({ row, text: before, conversation }: EditorProps) {
  const draft = draftOf(`edit.${conversation.id}.${row.id}`);
  const text = useSignal(draft.value || before);
  const busy = useSignal(false);
  const area = useRef<HTMLTextAreaElement>(null);
  useEffect(() => {
    // It may have come back into view while something is written elsewhere.
    if (!isTyping(document.activeElement)) area.current?.focus();
  }, []);
  const close = () => {
    draft.value = "";
    if (conversation.edited.value !== row.id) return;
    // The focus goes back to where the editing began, or it would be nowhere.
    const place = area.current?.closest(".row");
    conversation.edited.value = null;
    setTimeout(() => place?.querySelector<HTMLElement>(".edit")?.focus());
  };
  const submit = async () => {
    if (!text.value.trim() || busy.value) return;
    busy.value = true;
    if (await resend(conversation, row.id, text.value)) close();
    busy.value = false;
  };
  const keys = (event: KeyboardEvent) => {
    if (event.key === "Escape") close();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) void submit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <div class="user editor">
      <textarea
        ref={area}
        dir="auto"
        aria-label={t("edit.label")}
        value={text.value}
        onInput={(event) => {
          text.value = event.currentTarget.value;
          draft.value = text.value;
        }}
        onKeyDown={keys}
      />
      <div class="actions shown">
        <span class="faint">{t("edit.hint")}</span>
        <Button kind="quiet" onClick={close}>
          {t("cancel")}
        </Button>
        <Button kind="primary" disabled={busy.value} onClick={() => void submit()}>
          {t("edit.send")}
        </Button>
      </div>
    </div>
  );
}

function TurnEnd({ item, conversation }: { item: EndItem; conversation: Conversation }) {
  const view = item.view;
  const error = view?.error.value;
  const found =
    item.user?.row ?? conversation.rows.value.find((other) => other.role === "user" && other.run_id === item.runId);
  // It is sent again in a branch.
  const row = mayBegin() ? found : undefined;
  const again = () => row && void resend(conversation, row.id, plainText(row.content));
  return (
    <div class="turn-end">
      {error && (
        <div class="fault" role="alert">
          <Icon name="warn" />
          <div>
            {remedy(error.code) && (
              <p>
                <Text text={remedy(error.code)} />
              </p>
            )}
            <p dir="auto">{error.message}</p>
            <div class="fault-actions">
              {row && (
                <Button icon="retry" onClick={again}>
                  {t("retry")}
                </Button>
              )}
              {error.code?.startsWith("provider_") && (
                <a class="button plain" href={link("model")}>
                  {t("fault.model_settings")}
                </a>
              )}
            </div>
          </div>
        </div>
      )}
      <div class="actions">
        {item.text && <CopyButton text={item.text} label={t("copy.answer")} />}
        {row && !error && <IconButton icon="retry" label={t("retry")} size={16} onClick={again} />}
        {item.truncated && maySend() && (
          <Button kind="quiet" icon="play" onClick={() => void send(t("continue.prompt"), [])}>
            {t("continue")}
          </Button>
        )}
        {item.runId && may(SEES_RUNS) && (
          <a
            class="icon-button"
            href={link("runs", item.runId)}
            aria-label={t("timeline.of_turn")}
            title={t("timeline.of_turn")}
          >
            <Icon name="clock" size={16} />
          </a>
        )}
        {view?.usage.value && (
          <span class="faint">{t("tokens.out", { n: formatNumber(view.usage.value.output_tokens) })}</span>
        )}
        {view?.startedAt.value && view.finishedAt.value && (
          <span class="faint">{formatDuration(view.finishedAt.value - view.startedAt.value)}</span>
        )}
      </div>
    </div>
  );
}

function Working({ item }: { item: WorkingItem }) {
  const status = item.view.status.value;
  const last = item.view.parts.value.at(-1);
  const speaks = last?.kind === "text" && !last.done.value;
  if (speaks && status === "running") return <span class="caret" aria-hidden="true" />;
  if (status === "waiting_for_approval" || status === "waiting_for_input") return null;
  return (
    <div class="working">
      <span class="dots" aria-hidden="true">
        <i />
        <i />
        <i />
      </span>
      <span class="faint">{t(status === "stopping" ? "working.stopping" : "working")}</span>
    </div>
  );
}
