import { t } from "../state/language";
import { announcement, dismiss, toasts } from "../state/toasts";
import { Button, IconButton } from "../ui/button";

export function Toasts() {
  return (
    <>
      <div class="toasts" role="status">
        {toasts.value.map((toast) => (
          <div key={toast.id} class={`toast ${toast.kind}`}>
            <span dir="auto">{toast.text}</span>
            {toast.action && (
              <Button
                kind="quiet"
                onClick={() => {
                  toast.action?.run();
                  dismiss(toast.id);
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
        {announcement.value}
      </div>
    </>
  );
}
