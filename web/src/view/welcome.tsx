import { capabilities, mainModel, may, mayBegin } from "../state/access";
import { draftOf } from "../state/drafts";
import { formatNumber, type Key, t } from "../state/language";
import { link } from "../state/route";
import { Icon } from "../ui/icons";

const TRIES: Key[] = ["try.1", "try.2", "try.3"];

function fill(text: string): void {
  draftOf(null).value = text;
  document.querySelector<HTMLElement>(".composer textarea")?.focus();
}

/** What is seen before the first message. */
export function Welcome() {
  const model = mainModel.value;
  return (
    <div class="welcome">
      <div class="welcome-inner">
        <h2>{t("welcome.title")}</h2>
        <p>{t("welcome.text")}</p>
        {model && (
          <div class={`model-note ${model.problem ? "bad" : ""}`}>
            <Icon name={model.problem ? "warn" : "spark"} />
            <div>
              <p>
                {model.problem
                  ? t("welcome.no_model", { problem: model.problem })
                  : model.embedded
                    ? t("welcome.embedded", { name: model.title ?? model.model ?? "" })
                    : t("welcome.model", { name: model.model ?? "", provider: model.provider ?? "" })}{" "}
                {model.window && !model.problem ? t("welcome.window", { n: formatNumber(model.window) }) : ""}
              </p>
              {may("admin") && <a href={link("model")}>{t(model.problem ? "welcome.connect" : "welcome.other")}</a>}
            </div>
          </div>
        )}
        {mayBegin() && (
          <ul class="tries">
            {TRIES.map((key) => (
              <li key={key}>
                <button type="button" onClick={() => fill(t(key))}>
                  {t(key)}
                </button>
              </li>
            ))}
          </ul>
        )}
        {capabilities.value && !capabilities.value.runtime.sandbox.isolated && (
          <p class="faint">{t("welcome.no_sandbox")}</p>
        )}
      </div>
    </div>
  );
}
