import { useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import { query } from "../api/client";
import { auth } from "../state/access";
import { formatCost, formatDuration, formatNumber, type Key, language, t } from "../state/language";
import { Load, useLoad } from "../ui/load";
import { Plot } from "../ui/plot";
import { Table } from "../ui/table";
import { Tile } from "./health";

interface Row {
  day?: string;
  model?: string | null;
  owner?: string | null;
  turns: number;
  failed: number;
  input_tokens: number;
  output_tokens: number;
  cache_read_tokens: number;
  cost_usd: number | null;
  first_token_p50: number | null;
  first_token_p95: number | null;
  turn_seconds: number;
  tool_calls: number;
  tool_errors: number;
  tool_seconds: number;
}

const DAY_S = 86_400;
const compact = (value: number) => new Intl.NumberFormat(language.value, { notation: "compact" }).format(value);

export default function Usage() {
  const days = useSignal(30);
  return (
    <>
      <label class="inline-field">
        <span>{t("usage.days")}</span>
        <select value={days.value} onChange={(event) => (days.value = Number(event.currentTarget.value))}>
          {[7, 30, 90].map((count) => (
            <option key={count} value={count}>
              {t("usage.last", { n: count })}
            </option>
          ))}
        </select>
      </label>
      <ByDay days={days.value} />
      <Grouped days={days.value} by="model" />
      {auth.value?.sees_all && <Grouped days={days.value} by="owner" />}
    </>
  );
}

function ByDay({ days }: { days: number }) {
  const rows = useLoad<{ data: Row[] }>(`api/usage${query({ days, group_by: "day" })}`);
  return <Load from={rows}>{(list) => <Plots days={days} rows={list.data} />}</Load>;
}

function sum(rows: Row[], field: (row: Row) => number | null): number {
  return rows.reduce((total, row) => total + (field(row) ?? 0), 0);
}

function Plots({ days, rows }: { days: number; rows: Row[] }) {
  const { times, column } = useMemo(() => {
    const byDay = new Map(rows.map((row) => [row.day ?? "", row]));
    const today = Math.floor(Date.now() / 1000 / DAY_S) * DAY_S;
    const times = Array.from({ length: days }, (_, index) => today - (days - 1 - index) * DAY_S);
    const known = times.map((time) => byDay.get(new Date(time * 1000).toISOString().slice(0, 10)));
    const column = (field: (row: Row) => number | null, empty: number | null = 0) =>
      known.map((row) => (row ? field(row) : empty));
    return { times, column };
  }, [days, rows]);
  const series = useMemo(
    () => ({
      tokens: [
        { label: t("figure.input"), color: "--line-strong", values: column((row) => row.input_tokens) },
        { label: t("figure.output"), color: "--accent", values: column((row) => row.output_tokens) },
      ],
      turns: [
        { label: t("usage.turns"), color: "--accent", values: column((row) => row.turns) },
        { label: t("usage.failed"), color: "--bad", values: column((row) => row.failed) },
      ],
      calls: [
        { label: t("figure.tools"), color: "--good", values: column((row) => row.tool_calls) },
        { label: t("usage.tool_errors"), color: "--bad", values: column((row) => row.tool_errors) },
      ],
      first: [
        { label: t("usage.half"), color: "--accent", values: column((row) => row.first_token_p50, null) },
        { label: t("usage.most"), color: "--line-strong", values: column((row) => row.first_token_p95, null) },
      ],
      tools: [{ label: t("usage.tool_time"), color: "--good", values: column((row) => row.tool_seconds) }],
      cost: [{ label: t("figure.cost"), color: "--warn", values: column((row) => row.cost_usd) }],
    }),
    [column],
  );
  if (!rows.some((row) => row.turns)) return <p class="faint">{t("usage.none")}</p>;
  const spent = sum(rows, (row) => row.cost_usd);
  return (
    <>
      <div class="tiles">
        <Tile label={t("usage.turns")} value={formatNumber(sum(rows, (row) => row.turns))} />
        <Tile label={t("usage.failed")} value={formatNumber(sum(rows, (row) => row.failed))} />
        <Tile label={t("figure.input")} value={formatNumber(sum(rows, (row) => row.input_tokens))} />
        <Tile label={t("figure.output")} value={formatNumber(sum(rows, (row) => row.output_tokens))} />
        <Tile label={t("figure.tools")} value={formatNumber(sum(rows, (row) => row.tool_calls))} />
        {spent > 0 && <Tile label={t("figure.cost")} value={formatCost(spent)} />}
      </div>
      <div class="plots">
        <Plot title={t("usage.tokens")} days={times} series={series.tokens} bars whole format={compact} />
        <Plot title={t("usage.turns_errors")} days={times} series={series.turns} bars whole format={compact} />
        <Plot title={t("usage.first")} days={times} series={series.first} format={formatDuration} />
        <Plot title={t("usage.tools_errors")} days={times} series={series.calls} bars whole format={compact} />
        <Plot title={t("usage.tool_time")} days={times} series={series.tools} bars format={formatDuration} />
        {spent > 0 && <Plot title={t("figure.cost")} days={times} series={series.cost} bars format={formatCost} />}
      </div>
    </>
  );
}

/** The figures of a group, each with a bar that compares it with the other groups. */
const FIGURES: { label: Key; of(row: Row): number | null; format(value: number): string }[] = [
  { label: "usage.turns", of: (row) => row.turns, format: formatNumber },
  { label: "usage.failed", of: (row) => row.failed, format: formatNumber },
  { label: "figure.input", of: (row) => row.input_tokens, format: formatNumber },
  { label: "figure.output", of: (row) => row.output_tokens, format: formatNumber },
  { label: "usage.first", of: (row) => row.first_token_p50, format: formatDuration },
  { label: "usage.tool_time", of: (row) => row.tool_seconds, format: formatDuration },
  { label: "usage.tool_errors", of: (row) => row.tool_errors, format: formatNumber },
  { label: "figure.cost", of: (row) => row.cost_usd, format: formatCost },
];

function Grouped({ days, by }: { days: number; by: "model" | "owner" }) {
  const rows = useLoad<{ data: Row[] }>(`api/usage${query({ days, group_by: by })}`);
  return (
    <Load from={rows}>
      {(list) =>
        list.data.length > 0 && (
          <>
            <h2>{t(`usage.by_${by}`)}</h2>
            <Table
              label={t(`usage.by_${by}`)}
              columns={[t(by === "model" ? "model" : "usage.owner"), ...FIGURES.map((figure) => t(figure.label))]}
            >
              {list.data.map((row) => (
                <tr key={row[by]}>
                  <th scope="row">{row[by] ?? "–"}</th>
                  {FIGURES.map(({ label, of, format }) => (
                    <td key={label}>
                      <Compared
                        value={of(row)}
                        most={Math.max(...list.data.map((other) => of(other) ?? 0))}
                        {...{ format }}
                      />
                    </td>
                  ))}
                </tr>
              ))}
            </Table>
          </>
        )
      }
    </Load>
  );
}

function Compared({ value, most, format }: { value: number | null; most: number; format(value: number): string }) {
  return (
    <div class="compared">
      {value === null ? "–" : format(value)}
      <i style={{ width: `${most ? (100 * (value ?? 0)) / most : 0}%` }} />
    </div>
  );
}
