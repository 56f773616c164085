import { reachable } from "../api/client";
import type { Conversation } from "../state/conversation";
import { t } from "../state/language";
import { Button } from "../ui/button";
import { Icon } from "../ui/icons";

/** Says that the connection is lost and looked for; nothing when all is well. */
export function Connection({ conversation }: { conversation: Conversation | null }) {
  const lost = !reachable.value || (conversation?.running.value && conversation.connection.value === "waiting");
  return (
    <div class="connection" role="status">
      {lost && (
        <span class="lost">
          <Icon name="pulse" size={15} /> {t("connection.lost")}
          <Button kind="quiet" onClick={() => dispatchEvent(new Event("online"))}>
            {t("connection.retry")}
          </Button>
        </span>
      )}
    </div>
  );
}
