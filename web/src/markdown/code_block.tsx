import { useLayoutEffect, useRef } from "preact/hooks";
import { t } from "../state/language";
import { CopyButton } from "../ui/copy_button";
import { highlighted, knownHighlight } from "./highlight";

/** Code with its language and a button to copy it; it is coloured once it is complete. */
export function CodeBlock({ code, language, done }: { code: string; language: string; done: boolean }) {
  const target = useRef<HTMLElement>(null);
  useLayoutEffect(() => {
    const element = target.current;
    if (!element) return;
    const known = done && language ? knownHighlight(code, language) : undefined;
    if (known === undefined) element.textContent = code;
    else element.innerHTML = known;
    if (!done || !language || known !== undefined) return;
    let current = true;
    highlighted(code, language).then(
      (html) => {
        if (current && html !== null) element.innerHTML = html;
      },
      () => {},
    );
    return () => {
      current = false;
    };
  }, [code, language, done]);
  return (
    <div class="code" dir="ltr">
      <div class="code-head">
        <span>{language}</span>
        <CopyButton text={code} label={t("copy.code")} />
      </div>
      <pre tabIndex={0}>
        <code ref={target} />
      </pre>
    </div>
  );
}
