import { useComputed, useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { post } from "../api/client";
import { pieces } from "../markdown/ansi";
import { diffOf } from "../markdown/diff";
import { may } from "../state/access";
import { draftOf } from "../state/drafts";
import { attempt } from "../state/faults";
import { formatDuration, type Key, named, t } from "../state/language";
import type { Approval, Question, ToolPart, ToolState } from "../state/run_view";
import { Button } from "../ui/button";
import { CopyButton } from "../ui/copy_button";
import { useDisclosure } from "../ui/disclosure";
import { Icon, type IconName } from "../ui/icons";

const ICONS: Record<string, IconName> = {
  terminal: "terminal",
  process: "terminal",
  execute_code: "terminal",
  read_file: "file",
  write_file: "file",
  patch: "file",
  search_files: "search",
  web_search: "globe",
  web_extract: "globe",
  clarify: "question",
};
const SHOWN_MAX = 40_000;

/** A tool call: what was asked, what it says while it runs, and what came of it. */
export function ToolCard({ part }: { part: ToolPart }) {
  const tool = part.state.value;
  const open = useDisclosure(part.key);
  const waits = (tool.approval && !tool.approval.choice) || (tool.question && tool.question.answered === null);
  const runId = part.key.split(":")[0] ?? "";
  const failed = !["ok", "running", "unknown"].includes(tool.status);
  return (
    <article
      class={`tool ${tool.status === "running" ? "running" : ""} ${failed ? "failed" : ""}`}
      aria-label={tool.name}
    >
      <button type="button" class="tool-head" aria-expanded={open.value} onClick={() => (open.value = !open.value)}>
        <Icon name={ICONS[tool.name] ?? "tool"} size={16} />
        <span class="tool-name">{tool.name}</span>
        <span class="tool-preview" dir="auto">
          {tool.preview.split("\n")[0]}
        </span>
        <span class="tool-state">
          {tool.status === "running" ? (
            <span class="spinner" role="img" aria-label={t("tool.running")} />
          ) : failed ? (
            named(`tool.${tool.status}`, tool.status)
          ) : (
            tool.duration !== null && formatDuration(tool.duration)
          )}
        </span>
        <span class={`turns ${open.value ? "open" : ""}`}>
          <Icon name="chevron" size={15} />
        </span>
      </button>
      {tool.approval && <ApprovalView approval={tool.approval} runId={runId} />}
      {tool.question && !waits && <p class="tool-question">{tool.question.question}</p>}
      {tool.question && waits && <QuestionView question={tool.question} runId={runId} />}
      {tool.status === "running" && tool.output && !open.value && <Output text={tool.output.slice(-3000)} live />}
      {open.value && <ToolBody tool={tool} />}
    </article>
  );
}

function ToolBody({ tool }: { tool: ToolState }) {
  const result = readable(tool.result);
  const diff = diffOf(tool.name, tool.arguments, tool.result);
  const command = typeof tool.arguments.command === "string" ? tool.arguments.command : null;
  const rest = Object.entries(tool.arguments).filter(([name]) => name !== "command" && !(diff && isContent(name)));
  return (
    <div class="tool-body">
      {command !== null && <Verbatim text={`$ ${command}`} copy={command} />}
      {rest.length > 0 && (
        <dl class="arguments">
          {rest.map(([name, value]) => (
            <div key={name}>
              <dt>{name}</dt>
              <dd dir="auto">{typeof value === "string" ? value : JSON.stringify(value)}</dd>
            </div>
          ))}
        </dl>
      )}
      {diff && (
        <pre class="diff" tabIndex={0} dir="ltr">
          {diff.slice(0, 2000).map((line, index) => (
            <span key={index} class={`diff-${line.kind}`}>
              {line.text || " "}
            </span>
          ))}
        </pre>
      )}
      {tool.result === null
        ? tool.output && <Output text={tool.output} live />
        : !(diff && result.ok) && <Output text={result.text} copy={result.text} />}
    </div>
  );
}

const isContent = (name: string) => ["content", "old_string", "new_string", "patch"].includes(name);

/** The part of a result that a person wants to read. */
function readable(result: string | null): { text: string; ok: boolean } {
  if (!result?.startsWith("{")) return { text: result ?? "", ok: true };
  try {
    const told = JSON.parse(result) as Record<string, unknown>;
    const error = typeof told.error === "string" ? told.error : "";
    for (const name of ["output", "content", "text", "answer"]) {
      const text = told[name];
      if (typeof text === "string") return { text: [text, error].filter(Boolean).join("\n"), ok: !error };
    }
    return { text: error || JSON.stringify(told, null, 2), ok: !error };
  } catch {
    return { text: result, ok: true };
  }
}

/** All of a text as it is: no part is left out or read as an instruction to a terminal. */
function Verbatim({ text, copy }: { text: string; copy?: string }) {
  return (
    <div class="output" dir="ltr">
      {copy && <CopyButton text={copy} label={t("copy.output")} />}
      <pre tabIndex={0}>{text}</pre>
    </div>
  );
}

function Output({ text, copy, live }: { text: string; copy?: string; live?: boolean }) {
  const box = useRef<HTMLPreElement>(null);
  useEffect(() => {
    if (live && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [text, live]);
  return (
    <div class="output" dir="ltr">
      {copy && <CopyButton text={copy} label={t("copy.output")} />}
      <pre ref={box} class={live ? "live" : ""} tabIndex={0}>
        {pieces(live ? text.slice(-SHOWN_MAX) : text.slice(0, SHOWN_MAX)).map((piece, index) =>
          piece.classes || piece.color ? (
            <span key={index} class={piece.classes} style={piece.color ? { color: piece.color } : undefined}>
              {piece.text}
            </span>
          ) : (
            piece.text
          ),
        )}
        {!live && text.length > SHOWN_MAX && `\n${t("tool.cut")}`}
      </pre>
    </div>
  );
}

const CHOICES: Record<string, { key: Key; kind: "primary" | "plain" | "danger" }> = {
  once: { key: "approval.once", kind: "primary" },
  session: { key: "approval.session", kind: "plain" },
  always: { key: "approval.always", kind: "plain" },
  deny: { key: "approval.deny", kind: "danger" },
};

/** A text that is written goes with a denial, and rules out everything else. */
function ApprovalView({ approval, runId }: { approval: Approval; runId: string }) {
  const instead = draftOf(`denial.${approval.id}`);
  const asked = useSignal(false);
  const comment = instead.value.trim();
  const decide = (choice: string) => {
    const body = { choice, approval_id: approval.id, ...(comment ? { comment } : {}) };
    asked.value = true;
    void attempt(() => post(`v1/runs/${runId}/approval`, body)).then((done) => {
      asked.value = done;
      if (done) instead.value = "";
    });
  };
  if (approval.choice) {
    const denied = approval.choice === "deny";
    return (
      <p class={`approval-done ${denied ? "denied" : ""}`}>
        <Icon name="shield" size={15} />
        {t(denied ? (approval.by === "timeout" ? "approval.timeout" : "approval.denied") : "approval.allowed")}
      </p>
    );
  }
  const choices = approval.choices.filter((choice) => choice !== "always" || may("admin"));
  return (
    <div
      class="approval"
      role="alertdialog"
      aria-label={t("approval.title")}
      data-approval={approval.id}
      data-run={runId}
    >
      <p class="card-title">
        <Icon name="shield" /> {t("approval.title")}
      </p>
      {approval.description && <p dir="auto">{approval.description}</p>}
      <Verbatim text={approval.command} />
      {approval.rules.length > 0 && (
        <p class="faint">
          {t("approval.rule")} <code>{approval.rules.join(", ")}</code>
        </p>
      )}
      <div class="buttons">
        {choices.map((choice) => {
          const look = CHOICES[choice];
          return (
            <Button
              key={choice}
              kind={look?.kind ?? "plain"}
              disabled={asked.value || (comment !== "" && choice !== "deny")}
              onClick={() => decide(choice)}
            >
              {look ? t(look.key) : choice}
            </Button>
          );
        })}
      </div>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (comment && !asked.value) decide("deny");
        }}
      >
        <input
          type="text"
          dir="auto"
          aria-label={t("approval.instead")}
          placeholder={t("approval.instead")}
          value={instead.value}
          onInput={(event) => (instead.value = event.currentTarget.value)}
        />
      </form>
      {approval.expiresAt && <Countdown until={approval.expiresAt} />}
    </div>
  );
}

function Countdown({ until }: { until: number }) {
  const now = useSignal(Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => {
      now.value = Date.now() / 1000;
    }, 1000);
    return () => clearInterval(timer);
  }, [now]);
  const left = useComputed(() => Math.max(0, Math.round(until - now.value)));
  return <p class="faint">{t("approval.left", { n: left.value })}</p>;
}

function QuestionView({ question, runId }: { question: Question; runId: string }) {
  const text = draftOf(`answer.${question.id}`);
  const answer = (value: string) => {
    if (!value.trim()) return;
    void attempt(() => post(`v1/runs/${runId}/clarify`, { answer: value, request_id: question.id })).then((done) => {
      if (done) text.value = "";
    });
  };
  return (
    <form
      class="question"
      aria-label={t("question.title")}
      onSubmit={(event) => {
        event.preventDefault();
        answer(text.value);
      }}
    >
      <p class="card-title" dir="auto">
        <Icon name="question" /> {question.question}
      </p>
      {question.choices.length > 0 && (
        <div class="buttons">
          {question.choices.map((choice, index) => (
            <Button key={index} onClick={() => answer(choice)}>
              {choice}
            </Button>
          ))}
        </div>
      )}
      <div class="line">
        <input
          type="text"
          dir="auto"
          aria-label={t("question.answer")}
          placeholder={t("question.answer")}
          value={text.value}
          onInput={(event) => (text.value = event.currentTarget.value)}
        />
        <Button kind="primary" type="submit">
          {t("question.send")}
        </Button>
      </div>
    </form>
  );
}
