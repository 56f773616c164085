import { Markdown } from "../markdown/markdown";
import { type Key, t } from "../state/language";
import type { NoticePart, Part, ReasoningPart, SteerPart } from "../state/run_view";
import { useDisclosure } from "../ui/disclosure";
import { Icon } from "../ui/icons";
import { ToolCard } from "./tool_card";

export function PartView({ part }: { part: Part }) {
  switch (part.kind) {
    case "text":
      return (
        <article class="answer" aria-label={t("said.agent")}>
          <Markdown text={part.text} done={part.done} />
        </article>
      );
    case "reasoning":
      return <Reasoning part={part} />;
    case "tool":
      return <ToolCard part={part} />;
    case "notice":
      return <Notice part={part} />;
    case "steer":
      return <Steer part={part} />;
  }
}

function Reasoning({ part }: { part: ReasoningPart }) {
  const open = useDisclosure(part.key);
  return (
    <details class="reasoning" open={open.value} onToggle={(event) => (open.value = event.currentTarget.open)}>
      <summary>
        <Icon name="spark" size={15} />
        {t(part.done.value ? "reasoning" : "reasoning.live")}
      </summary>
      {open.value && <Markdown text={part.text} done={part.done} />}
    </details>
  );
}

const NOTICES: Record<string, Key> = {
  cancelled: "notice.cancelled",
  "context.compressed": "notice.compressed",
  "model.fallback": "notice.fallback",
  resumed: "notice.resumed",
};

function Notice({ part }: { part: NoticePart }) {
  const key = NOTICES[part.code];
  const own = part.code === "cancelled" || part.code === "resumed";
  return (
    <p class={`notice ${part.level}`}>
      <Icon name={part.level === "info" ? "info" : "warn"} size={15} />
      {key ? t(key) : ""} {own ? "" : part.text}
    </p>
  );
}

function Steer({ part }: { part: SteerPart }) {
  return (
    <p class="steer" dir="auto">
      <Icon name="steer" size={15} />
      <span>{part.text}</span>
      <span class="badge">{t(part.applied.value ? "steer.applied" : "steer.sent")}</span>
    </p>
  );
}
