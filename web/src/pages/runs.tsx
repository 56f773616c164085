import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { post, query } from "../api/client";
import { follow } from "../api/follow";
import type { List, Run, RunEvent } from "../api/types";
import { attempt } from "../state/faults";
import { formatDuration, formatMoment, formatNumber, type Key, named, t } from "../state/language";
import { link, route } from "../state/route";
import { isFinal } from "../state/run_view";
import { type Span, timelineOf } from "../state/timeline";
import { Button } from "../ui/button";
import { Icon } from "../ui/icons";
import { Load, useLoad } from "../ui/load";
import { StatusBadge } from "../ui/status_badge";
import { Table } from "../ui/table";

const STATUSES = [
  "",
  "running",
  "queued",
  "waiting_for_approval",
  "waiting_for_input",
  "completed",
  "failed",
  "cancelled",
];
const LIST_S = 3;

export default function Runs() {
  const [, id, session] = route.value;
  if (id && id !== "session") return <OneRun key={id} id={id} />;
  return <RunList key={session} session={session ?? null} />;
}

function RunList({ session }: { session: string | null }) {
  const status = useSignal("");
  const runs = useLoad<List<Run>>(`v1/runs${query({ limit: 50, session_id: session, status: status.value })}`, LIST_S);
  return (
    <>
      <p class="page-note">{t("runs.text")}</p>
      <label class="inline-field">
        <span>{t("runs.status")}</span>
        <select value={status.value} onChange={(event) => (status.value = event.currentTarget.value)}>
          {STATUSES.map((name) => (
            <option key={name} value={name}>
              {name ? t(`status.${name}` as Key) : t("runs.all")}
            </option>
          ))}
        </select>
      </label>
      <Load from={runs}>
        {(list) =>
          list.data.length ? (
            <Table
              label={t("page.runs")}
              columns={[
                t("runs.run"),
                t("runs.status"),
                t("runs.kind"),
                t("runs.begun"),
                t("runs.duration"),
                t("figure.output"),
              ]}
            >
              {list.data.map((run) => (
                <tr key={run.run_id}>
                  <td class="wide">
                    <a href={link("runs", run.run_id)} dir="auto">
                      {run.input?.slice(0, 120) || run.output?.slice(0, 80) || run.run_id}
                    </a>
                  </td>
                  <td>
                    <StatusBadge status={run.status} />
                  </td>
                  <td>{named(`kind.${run.kind}`, run.kind)}</td>
                  <td>{formatMoment(run.created_at)}</td>
                  <td>{duration(run)}</td>
                  <td>{formatNumber(run.usage.output_tokens)}</td>
                </tr>
              ))}
            </Table>
          ) : (
            <p class="faint">{t("runs.none")}</p>
          )
        }
      </Load>
    </>
  );
}

function duration(run: Run): string {
  const from = run.started_at ?? run.created_at;
  return formatDuration(Math.max(0, (run.finished_at ?? Date.now() / 1000) - from));
}

function OneRun({ id }: { id: string }) {
  const run = useLoad<Run>(`v1/runs/${encodeURIComponent(id)}`, LIST_S);
  const events = useSignal<RunEvent[]>([]);
  const gone = useSignal(false);
  useEffect(() => {
    const closed = new AbortController();
    void follow(
      id,
      {
        onEvents: (more) =>
          (events.value = [...events.value, ...more.filter((event) => event.event !== "tool.output")]),
        onConnection: () => {},
        onGone: () => (gone.value = true),
      },
      closed.signal,
    );
    return () => closed.abort();
  }, [id, events, gone]);
  return (
    <Load from={run}>
      {(found) => (
        <>
          <p class="crumbs">
            <a href={link("runs")}>{t("page.runs")}</a> <Icon name="chevron" size={14} /> <code>{found.run_id}</code>
          </p>
          <div class="run-head">
            <StatusBadge status={found.status} />
            <span>{found.model}</span>
            <span>{duration(found)}</span>
            <span>
              {t("runs.tokens", {
                input: formatNumber(found.usage.input_tokens),
                output: formatNumber(found.usage.output_tokens),
              })}
            </span>
            <a href={link("c", found.session_id)}>{t("runs.conversation")}</a>
            {!isFinal(found.status) && (
              <Button icon="stop" onClick={() => void attempt(() => post(`v1/runs/${id}/stop`)).then(run.reload)}>
                {t("stop")}
              </Button>
            )}
          </div>
          {found.error && <p class="field-fault">{found.error}</p>}
          {gone.value ? <p class="faint">{t("runs.expired")}</p> : <Waterfall events={events.value} />}
        </>
      )}
    </Load>
  );
}

function Waterfall({ events }: { events: RunEvent[] }) {
  const timeline = timelineOf(events, Date.now() / 1000);
  const whole = timeline.to - timeline.from;
  if (!events.length) return null;
  return (
    <>
      <h2>{t("timeline")}</h2>
      <Table
        label={t("timeline")}
        columns={[t("timeline.what"), t("timeline.when"), t("timeline.start"), t("runs.duration")]}
      >
        {timeline.spans.map((span, index) => (
          <tr key={index} class={span.failed ? "failed" : ""}>
            <th scope="row" class="span-name">
              {nameOf(span)} <span class="faint">{span.detail.slice(0, 60)}</span>
            </th>
            <td class="span-place">
              <div class="span-line">
                <div
                  class={`span-bar span-${span.kind} ${span.failed ? "bad" : ""}`}
                  style={{
                    insetInlineStart: `${((span.from - timeline.from) / whole) * 100}%`,
                    width: `max(3px, ${((span.to - span.from) / whole) * 100}%)`,
                  }}
                >
                  {span.first !== null && (
                    <i
                      style={{ width: `${((span.first - span.from) / Math.max(span.to - span.from, 0.001)) * 100}%` }}
                      title={t("timeline.first", { time: formatDuration(span.first - span.from) })}
                    />
                  )}
                </div>
              </div>
            </td>
            <td>{formatDuration(span.from - timeline.from)}</td>
            <td>{formatDuration(span.to - span.from)}</td>
          </tr>
        ))}
      </Table>
      <p class="legend">
        <span class="span-bar span-model" /> {t("timeline.model")} <span class="span-bar span-tool" />{" "}
        {t("timeline.tool")} <span class="span-bar span-wait" /> {t("timeline.wait")}
      </p>
    </>
  );
}

function nameOf(span: Span): string {
  return span.kind === "wait" ? t(`timeline.${span.name}` as Key) : span.name || t("model");
}
