import { t } from "../state/language";
import { announcement, dismiss, hold, toasts } from "../state/toasts";
import { Button, IconButton } from "../ui/button";
import { Text } from "../ui/text";

export function Toasts() {
  return (
    <>
      <div
        class="toasts"
        role="status"
        onPointerEnter={() => hold(true)}
        onPointerLeave={() => hold(false)}
        onFocusIn={() => hold(true)}
        onFocusOut={() => hold(false)}
      >
        {toasts.value.map((toast) => (
          <div key={toast.id} class={`toast ${toast.kind ?? "info"}`}>
            <span dir="auto">
              <Text text={toast.text} />
            </span>
            {toast.action && (
              <Button
                kind="quiet"
                onClick={() => {
                  toast.action?.run();
                  dismiss(toast.id, true);
                }}
              >
                {toast.action.label}
              </Button>
            )}
            <IconButton icon="close" label={t("close")} size={15} onClick={() => dismiss(toast.id)} />
          </div>
        ))}
      </div>
      <div class="visually-hidden" aria-live="polite">
        <span key={announcement.value.number}>{announcement.value.text}</span>
      </div>
    </>
  );
}
