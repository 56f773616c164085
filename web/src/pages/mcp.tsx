import { post } from "../api/client";
import { attempt } from "../state/faults";
import { t } from "../state/language";
import { Button } from "../ui/button";
import { Load, useLoad } from "../ui/load";
import { StatusBadge } from "../ui/status_badge";
import { Text } from "../ui/text";

interface Server {
  name: string;
  enabled: boolean;
  state: string;
  error: string | null;
  tools: (string | { name: string })[];
  target: string;
  approval: string | null;
}

export default function McpServers() {
  const servers = useLoad<{ data: Server[] }>("api/mcp", 10);
  return (
    <>
      <p class="page-note">{t("mcp.text")}</p>
      <Load from={servers}>
        {(list) =>
          list.data.length ? (
            <ul class="cards">
              {list.data.map((server) => (
                <li key={server.name}>
                  <strong>{server.name}</strong> <StatusBadge status={server.state} />
                  <Button
                    kind="quiet"
                    icon="retry"
                    onClick={() =>
                      void attempt(() => post(`api/mcp/${encodeURIComponent(server.name)}/test`)).then(servers.reload)
                    }
                  >
                    {t("mcp.test")}
                  </Button>
                  <p>
                    <code>{server.target}</code>
                  </p>
                  {server.error && <p class="field-fault">{server.error}</p>}
                  {server.tools.length > 0 && (
                    <p class="faint">
                      {server.tools.map((tool) => (typeof tool === "string" ? tool : tool.name)).join(", ")}
                    </p>
                  )}
                </li>
              ))}
            </ul>
          ) : (
            <p class="faint">
              <Text text={t("mcp.none")} />
            </p>
          )
        }
      </Load>
    </>
  );
}
