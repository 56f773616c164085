import { effect } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { reachable } from "../api/client";
import { PageView } from "../pages/page_view";
import { auth, loadAccess, needsKey } from "../state/access";
import { shown } from "../state/commands";
import { conversations, titleOf } from "../state/conversations";
import { t } from "../state/language";
import { current } from "../state/open";
import { sidebarOpen } from "../state/preferences";
import { page } from "../state/route";
import { Button } from "../ui/button";
import { Confirmation } from "../ui/confirm";
import { Text } from "../ui/text";
import { Chat, detailsOpen } from "./chat";
import { KeyList, Palette } from "./palette";
import { PAGES, Sidebar } from "./sidebar";
import { SignIn } from "./sign_in";
import { Toasts } from "./toasts";

export function App() {
  useEffect(() => {
    const toggle = () => (detailsOpen.value = !detailsOpen.value);
    addEventListener("hermes:details", toggle);
    return () => removeEventListener("hermes:details", toggle);
  }, []);
  if (!auth.value) return reachable.value ? <div class="loading" aria-busy="true" /> : <Away />;
  if (needsKey.value) {
    return (
      <>
        <SignIn />
        <Toasts />
      </>
    );
  }
  return (
    <div class={`app ${sidebarOpen.value ? "" : "no-sidebar"}`}>
      <button type="button" class="skip" onClick={skip}>
        {t("skip")}
      </button>
      {sidebarOpen.value && <Sidebar />}
      {sidebarOpen.value && (
        <button
          type="button"
          class="scrim"
          aria-label={t("sidebar.close")}
          onClick={() => (sidebarOpen.value = false)}
        />
      )}
      <main id="main" tabIndex={-1}>
        {page.value === "c" ? <Chat /> : <PageView />}
      </main>
      {shown.value === "palette" && <Palette />}
      {shown.value === "keys" && <KeyList />}
      <Confirmation />
      <Toasts />
    </div>
  );
}

/** What the window is called: the conversation or page that is looked at. */
function title(): string {
  if (!auth.value || needsKey.value) return "Hermes";
  const session = current.value?.session.value;
  const entry = PAGES.find((other) => other.page === page.value);
  const name = entry ? t(entry.label) : session ? titleOf(session) : "";
  return name ? `${name} – Hermes` : "Hermes";
}

effect(() => {
  document.title = title();
});

function skip(): void {
  document.querySelector<HTMLElement>("#main")?.focus();
}

export async function begin(): Promise<void> {
  for (let pause = 500; ; pause = Math.min(pause * 2, 5000)) {
    try {
      await loadAccess();
      break;
    } catch {
      reachable.value = false;
      await new Promise((resume) => setTimeout(resume, pause));
    }
  }
  if (auth.value?.signed_in) conversations.watch();
}

function Away() {
  return (
    <main class="sign-in">
      <div class="empty">
        <h1>Hermes</h1>
        <p>
          <Text text={t("fault.unreachable")} />
        </p>
        <Button kind="primary" onClick={() => location.reload()}>
          {t("connection.retry")}
        </Button>
      </div>
    </main>
  );
}
