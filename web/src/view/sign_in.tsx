import { useSignal } from "@preact/signals";
import { ApiError } from "../api/client";
import { signIn } from "../state/access";
import { conversations } from "../state/conversations";
import { describe } from "../state/faults";
import { t } from "../state/language";
import { Button } from "../ui/button";

/** Asks for the key once; the server keeps the sign-in in a cookie that scripts cannot read. */
export function SignIn() {
  const fault = useSignal("");
  const busy = useSignal(false);
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    const form = event.currentTarget as HTMLFormElement;
    const key = String(new FormData(form).get("key") ?? "").trim();
    if (!key) return;
    busy.value = true;
    fault.value = "";
    try {
      await signIn(key);
      form.reset();
      conversations.watch();
    } catch (error) {
      fault.value = error instanceof ApiError && error.status === 401 ? t("signin.wrong") : describe(error);
    } finally {
      busy.value = false;
    }
  };
  return (
    <main class="sign-in">
      <form onSubmit={submit}>
        <h1>Hermes</h1>
        <p>{t("signin.text")}</p>
        <label class="field">
          <span>{t("signin.key")}</span>
          <input
            name="key"
            type="password"
            autocomplete="current-password"
            required
            dir="ltr"
            aria-invalid={fault.value ? "true" : undefined}
            aria-describedby="sign-in-fault"
            ref={(element) => element?.focus()}
          />
        </label>
        <p id="sign-in-fault" class="field-fault" role="alert">
          {fault.value}
        </p>
        <Button kind="primary" type="submit" disabled={busy.value}>
          {t("signin")}
        </Button>
        <p class="faint">{t("signin.where")}</p>
      </form>
    </main>
  );
}
