import { useSignal } from "@preact/signals";
import { t } from "../state/language";
import { Button } from "../ui/button";
import { CopyButton } from "../ui/copy_button";
import { Load, useLoad } from "../ui/load";
import { Table } from "../ui/table";
import { Text } from "../ui/text";

interface ApiKey {
  name: string;
  scopes: string[];
  max_concurrent: number | null;
  requests_per_minute: number | null;
  tokens_per_minute: number | null;
  toolsets: string[] | null;
  models: string[] | null;
  source: string;
  current: boolean;
}

const limit = (value: number | null): string => (value ? String(value) : "–");

export default function Keys() {
  const keys = useLoad<{ data: ApiKey[] }>("api/keys");
  return (
    <>
      <p class="page-note">
        <Text text={t("apikeys.text")} />
      </p>
      <Load from={keys}>
        {(list) =>
          list.data.length ? (
            <Table
              label={t("page.keys")}
              columns={[
                t("apikeys.owner"),
                t("apikeys.scopes"),
                t("toolsets"),
                t("apikeys.models"),
                t("apikeys.turns"),
                t("apikeys.requests"),
                t("apikeys.tokens"),
                t("settings.source"),
              ]}
            >
              {list.data.map((key) => (
                <tr key={key.name}>
                  <th scope="row">
                    {key.name} {key.current && <span class="badge">{t("apikeys.this")}</span>}
                  </th>
                  <td class="wide">{key.scopes.join(", ")}</td>
                  <td>{key.toolsets?.join(", ") ?? t("all")}</td>
                  <td>{key.models?.join(", ") ?? t("all")}</td>
                  <td>{limit(key.max_concurrent)}</td>
                  <td>{limit(key.requests_per_minute)}</td>
                  <td>{limit(key.tokens_per_minute)}</td>
                  <td>
                    <code>{key.source}</code>
                  </td>
                </tr>
              ))}
            </Table>
          ) : (
            <p class="page-note">
              <Text text={t("apikeys.none")} />
            </p>
          )
        }
      </Load>
      <NewKey />
      <h2>{t("apikeys.revoke")}</h2>
      <p class="page-note">
        <Text text={t("apikeys.revoke_how")} />
      </p>
    </>
  );
}

const SCOPES = ["chat", "sessions:read", "sessions:write", "runs", "jobs", "admin"];

interface Made {
  key: string;
  entry: string;
}

async function make(name: string, scopes: string[]): Promise<Made> {
  const bytes = crypto.getRandomValues(new Uint8Array(32));
  const key = `sk-${btoa(String.fromCharCode(...bytes))
    .replace(/\+/g, "-")
    .replace(/\//g, "_")
    .replace(/=+$/, "")}`;
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(key)));
  const hex = [...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  const lines = [
    "api_server:",
    "  keys:",
    `    - name: ${name}`,
    `      key_sha256: ${hex}`,
    `      scopes: [${scopes.join(", ")}]`,
  ];
  return { key, entry: `${lines.join("\n")}\n` };
}

/** Keys belong to the server's configuration: the browser makes one, and says what to write there. */
function NewKey() {
  const made = useSignal<Made | null>(null);
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    const fields = new FormData(event.currentTarget as HTMLFormElement);
    made.value = await make(String(fields.get("name")), fields.getAll("scope").map(String));
  };
  return (
    <form class="form" onSubmit={submit}>
      <h2>{t("apikeys.new")}</h2>
      <p class="page-note">
        <Text text={t(crypto.subtle ? "apikeys.how" : "apikeys.no_crypto")} />
      </p>
      <label class="field">
        <span>{t("jobs.name")}</span>
        <input name="name" type="text" required pattern="[a-z0-9_\-]{1,64}" dir="ltr" placeholder="kitchen-tablet" />
      </label>
      <fieldset class="field">
        <legend>{t("apikeys.scopes")}</legend>
        {SCOPES.map((scope) => (
          <label key={scope} class="check">
            <input type="checkbox" name="scope" value={scope} defaultChecked={scope !== "admin" && scope !== "jobs"} />
            {scope}
          </label>
        ))}
      </fieldset>
      <div class="buttons">
        <Button kind="primary" type="submit" disabled={!crypto.subtle}>
          {t("apikeys.make")}
        </Button>
      </div>
      {made.value && (
        <>
          <p class="line">
            <code>{made.value.key}</code> <CopyButton text={made.value.key} label={t("apikeys.copy")} />
          </p>
          <div class="output" dir="ltr">
            <CopyButton text={made.value.entry} label={t("copy.code")} />
            <pre>{made.value.entry}</pre>
          </div>
        </>
      )}
    </form>
  );
}
