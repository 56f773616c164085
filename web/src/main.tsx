import { render } from "preact";
import { listen } from "./state/commands";
import { loadLanguage } from "./state/language";
import { sidebarOpen } from "./state/preferences";
import "./styles/base.css";
import "./styles/layout.css";
import "./styles/messages.css";
import "./styles/pages.css";
import { App, begin } from "./view/app";

// A narrow screen begins with the conversation, not with the list.
if (matchMedia("(max-width: 800px)").matches) sidebarOpen.value = false;
listen();
const root = document.getElementById("app");
void begin();
loadLanguage().finally(() => {
  if (root) render(<App />, root);
});
