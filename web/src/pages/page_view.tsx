import { useSignal } from "@preact/signals";
import type { ComponentType } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { reachable } from "../api/client";
import { conversations } from "../state/conversations";
import { t } from "../state/language";
import { sidebarOpen } from "../state/preferences";
import { link, page } from "../state/route";
import { Button, IconButton } from "../ui/button";
import { Connection } from "../view/connection";
import { PAGES } from "../view/sidebar";

/** Pages come when they are asked for. */
const LOADERS: Record<string, () => Promise<{ default: ComponentType }>> = {
  runs: () => import("./runs"),
  jobs: () => import("./jobs"),
  skills: () => import("./skills"),
  memory: () => import("./memory"),
  usage: () => import("./usage"),
  health: () => import("./health"),
  mcp: () => import("./mcp"),
  keys: () => import("./keys"),
  model: () => import("./model"),
  settings: () => import("./settings"),
};

/** The page's own file did not come: the server is away, or has a newer page. */
function Fault() {
  // Browsers do not ask again for a part that they could not load.
  const lost = useRef(false);
  useEffect(() => {
    if (reachable.value && lost.current) location.reload();
    lost.current = !reachable.value;
  }, [reachable.value]);
  useEffect(() => void conversations.refresh(), []);
  return (
    <div class="fault" role="alert">
      <div>
        <p>{t("missing.part")}</p>
        <Button icon="retry" onClick={() => location.reload()}>
          {t("reload")}
        </Button>
      </div>
    </div>
  );
}

export function PageView() {
  const name = page.value;
  const loaded = useSignal<{ name: string; View: ComponentType } | null>(null);
  const fault = useSignal(false);
  useEffect(() => {
    const load = LOADERS[name];
    fault.value = false;
    if (!load) return;
    load().then(
      (module) => (loaded.value = { name, View: module.default }),
      () => (fault.value = true),
    );
  }, [name, loaded, fault]);
  const entry = PAGES.find((other) => other.page === name);
  const View = loaded.value?.name === name ? loaded.value.View : null;
  return (
    <div class="page">
      <header class="head">
        <IconButton
          icon="menu"
          label={t("sidebar")}
          expanded={sidebarOpen.value}
          onClick={() => (sidebarOpen.value = !sidebarOpen.value)}
        />
        <h1>{entry ? t(entry.label) : t("missing.page")}</h1>
      </header>
      <div class="page-body">
        {View && <View />}
        {!entry && <a href={link("c")}>{t("new")}</a>}
        {fault.value && <Fault />}
      </div>
      <Connection conversation={null} />
    </div>
  );
}
