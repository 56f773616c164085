import { signal } from "@preact/signals";
import { t } from "../state/language";
import { Button } from "./button";
import { Dialog } from "./dialog";

interface Question {
  title: string;
  text: string;
  /** What the button says that does it. */
  action: string;
  answer(sure: boolean): void;
}

const question = signal<Question | null>(null);

/** Whether the user wants what cannot be undone. */
export function confirmed(title: string, text: string, action: string): Promise<boolean> {
  return new Promise((resolve) => {
    question.value = {
      title,
      text,
      action,
      answer: (sure) => {
        question.value = null;
        resolve(sure);
      },
    };
  });
}

/** Where the question is shown. */
export function Confirmation() {
  const asked = question.value;
  if (!asked) return null;
  return (
    <Dialog title={asked.title} onClose={() => asked.answer(false)}>
      <p>{asked.text}</p>
      <div class="buttons">
        <Button kind="danger" onClick={() => asked.answer(true)}>
          {asked.action}
        </Button>
        <Button onClick={() => asked.answer(false)}>{t("cancel")}</Button>
      </div>
    </Dialog>
  );
}
