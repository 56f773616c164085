import { ApiError, Unreachable } from "../api/client";
import { named, t } from "./language";
import { toast } from "./toasts";

/** What to do about a fault, where that is known. */
export const remedy = (code: string | null): string => named(`fault.${code}`, "");

export function describe(error: unknown): string {
  if (error instanceof Unreachable) return t("fault.unreachable");
  if (error instanceof ApiError) return [error.message, remedy(error.code)].filter(Boolean).join(" ");
  return error instanceof Error ? error.message : String(error);
}

export function report(error: unknown): void {
  // The form to sign in says it.
  if (error instanceof ApiError && error.status === 401) return;
  toast(describe(error), { kind: "error" });
}

/** Do something, and show why it could not be done; whether it could. */
export async function attempt(action: () => Promise<unknown>): Promise<boolean> {
  try {
    await action();
    return true;
  } catch (error) {
    report(error);
    return false;
  }
}
