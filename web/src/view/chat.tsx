import { useComputed, useSignal } from "@preact/signals";
import { useCallback, useEffect } from "preact/hooks";
import { mayBegin, maySend } from "../state/access";
import type { Conversation } from "../state/conversation";
import { titleOf } from "../state/conversations";
import { draftOf, returnText } from "../state/drafts";
import { describe } from "../state/faults";
import type { Item } from "../state/items";
import { t } from "../state/language";
import { current, wantedMessage } from "../state/open";
import { kept, sidebarOpen } from "../state/preferences";
import { link } from "../state/route";
import { addFiles, returnFiles, takeUploads } from "../state/uploads";
import { Button, IconButton } from "../ui/button";
import { Text } from "../ui/text";
import { VirtualList } from "../ui/virtual_list";
import { Composer } from "./composer";
import { Connection } from "./connection";
import { Details } from "./details";
import { ItemView } from "./message";
import { Welcome } from "./welcome";

export const detailsOpen = kept<boolean>("details", false);

export function Chat() {
  const conversation = current.value;
  const over = useSignal(false);
  const takesFiles = conversation ? maySend() : mayBegin();
  const drop = (event: DragEvent) => {
    event.preventDefault();
    over.value = false;
    if (takesFiles) void addFiles(event.dataTransfer?.files ?? [], conversation?.id ?? null);
  };
  return (
    <div
      class={`chat ${over.value ? "drop" : ""}`}
      onDragOver={(event) => {
        event.preventDefault();
        over.value = takesFiles;
      }}
      onDragLeave={(event) => {
        if (event.target === event.currentTarget) over.value = false;
      }}
      onDrop={drop}
    >
      <div class="chat-column">
        <Head conversation={conversation} />
        {conversation ? <Messages key={conversation.id} conversation={conversation} /> : <Welcome />}
        <div class="composer-place">
          <Connection conversation={conversation} />
          {!conversation?.missing.value && <Composer key={conversation?.id ?? "new"} conversation={conversation} />}
        </div>
      </div>
      {detailsOpen.value && <Details conversation={conversation} onClose={() => (detailsOpen.value = false)} />}
      {over.value && <div class="drop-hint">{t("upload.drop")}</div>}
    </div>
  );
}

function Head({ conversation }: { conversation: Conversation | null }) {
  const session = conversation?.session.value;
  return (
    <header class="head">
      <IconButton
        icon="menu"
        label={t("sidebar")}
        expanded={sidebarOpen.value}
        onClick={() => (sidebarOpen.value = !sidebarOpen.value)}
      />
      <h1 dir="auto">{session ? titleOf(session) : t("new")}</h1>
      <IconButton
        icon="info"
        label={t("details")}
        expanded={detailsOpen.value}
        onClick={() => (detailsOpen.value = !detailsOpen.value)}
      />
    </header>
  );
}

function Messages({ conversation }: { conversation: Conversation }) {
  const away = useSignal(false);
  const end = useSignal(0);
  const target = useSignal<{ key: string } | null>(null);
  const items = conversation.items.value;
  const wanted = wantedMessage.value;
  const drafts = useComputed(() => conversation.drafts.value.length);
  useEffect(() => {
    if (drafts.value) end.value++;
  }, [drafts.value, end]);
  useEffect(() => {
    if (!wanted || !conversation.loaded.value) return;
    void conversation.reach(wanted).then(() => {
      const rows = conversation.rows.value;
      const row = rows.findLast((other) => other.id <= wanted);
      const item = conversation.items.value.find(
        (other) =>
          (other.kind === "user" && other.row?.id === row?.id) ||
          (other.kind === "part" && other.part.kind === "text" && other.part.messageId === row?.id),
      );
      target.value = item ? { key: item.key } : null;
    });
  }, [wanted, conversation, conversation.loaded.value, target]);
  const draw = useCallback((item: Item) => <ItemView item={item} conversation={conversation} />, [conversation]);
  if (conversation.missing.value) return <Missing id={conversation.id} />;
  if (!conversation.loaded.value) {
    return conversation.fault.value ? <Fault conversation={conversation} /> : <div class="messages" aria-busy="true" />;
  }
  return (
    <div class="messages-place">
      <VirtualList
        items={items}
        label={t("messages")}
        target={target.value}
        toEnd={end.value}
        onAway={(value) => (away.value = value)}
        onNearTop={() => void conversation.loadOlder()}
        draw={draw}
      />
      {away.value && <IconButton class="to-end" icon="down" label={t("messages.end")} onClick={() => end.value++} />}
    </div>
  );
}

/** It is tried again by itself, too. */
function Fault({ conversation }: { conversation: Conversation }) {
  return (
    <div class="empty" role="alert">
      <h2>{t("conversation.fault")}</h2>
      <p>
        <Text text={describe(conversation.fault.value)} />
      </p>
      <Button kind="primary" icon="retry" onClick={() => void conversation.load()}>
        {t("retry")}
      </Button>
    </div>
  );
}

/** What was written for it goes with a new conversation. */
function Missing({ id }: { id: string }) {
  useEffect(() => {
    const draft = draftOf(id);
    returnText(null, draft.value);
    draft.value = "";
    returnFiles({ files: takeUploads(id).map((file) => ({ ...file, conversation: null })), lost: [] });
  }, [id]);
  return (
    <div class="empty">
      <h2>{t("missing.title")}</h2>
      <p>{t("missing.text")}</p>
      <a class="button primary" href={link("c")}>
        {t("new")}
      </a>
    </div>
  );
}
