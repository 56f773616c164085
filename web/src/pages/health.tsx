import type { DetailedHealth } from "../api/types";
import { formatBytes, formatDuration, formatNumber, named, t } from "../state/language";
import { Load, useLoad } from "../ui/load";
import { StatusBadge } from "../ui/status_badge";
import { Table } from "../ui/table";

export default function Health() {
  const health = useLoad<DetailedHealth>("health/detailed", 5);
  return (
    <Load from={health}>
      {(found) => (
        <>
          <div class="tiles">
            <Tile label={t("health.state")} value={<StatusBadge status={found.readiness.status} />} />
            <Tile label={t("health.version")} value={found.version} />
            <Tile label={t("health.uptime")} value={formatDuration(found.uptime_seconds)} />
            <Tile label={t("health.active")} value={String(found.active_agents)} />
          </div>
          <Table label={t("health.checks")} columns={[t("health.check"), t("health.state"), t("health.detail")]}>
            {Object.entries(found.readiness.checks).map(([name, check]) => (
              <tr key={name}>
                <th scope="row">{named(`health.of.${name}`, name.replaceAll("_", " "))}</th>
                <td>
                  <StatusBadge status={check.status} />
                </td>
                <td class="wide">
                  {Object.entries(check)
                    .filter(([field]) => field !== "status")
                    .map(([field, value]) => `${named(`health.fact.${field}`, field)}: ${factOf(field, value)}`)
                    .join(" · ")}
                </td>
              </tr>
            ))}
          </Table>
        </>
      )}
    </Load>
  );
}

function factOf(field: string, value: unknown): string {
  if (typeof value !== "number") return named(`status.${value}`, String(value));
  return field.endsWith("_bytes") ? formatBytes(value) : formatNumber(value);
}

export function Tile({ label, value }: { label: string; value: preact.ComponentChildren }) {
  return (
    <div class="tile">
      <span class="faint">{label}</span>
      <strong>{value}</strong>
    </div>
  );
}
