import { computed, signal } from "@preact/signals";
import { get, post, signedOut } from "../api/client";
import type { Capabilities, List, Model, Toolset } from "../api/types";
import { dropAllFiles } from "./file_store";
import { link } from "./route";
import { clearTab, readTab, writeTab } from "./tab_store";

interface AuthSession {
  key_required: boolean;
  signed_in: boolean;
  owner: string | null;
  scopes: string[];
  sees_all: boolean;
}

export interface MainModel {
  model: string | null;
  provider: string | null;
  embedded: boolean;
  window: number | null;
  max_output: number | null;
  title: string | null;
  abilities: string[];
  problem: string | null;
}

export const auth = signal<AuthSession | null>(null);
export const capabilities = signal<Capabilities | null>(null);
export const models = signal<Model[]>([]);
export const toolsets = signal<Toolset[]>([]);
/** Folders in which a conversation may work. */
export const workspaces = signal<string[]>([]);
export const mainModel = signal<MainModel | null>(null);

export const needsKey = computed(() => signedOut.value || (auth.value !== null && !auth.value.signed_in));

/** Whether this key has a scope, or one of several that are separated by `|`. */
export function may(scope: string): boolean {
  const scopes = auth.value?.scopes ?? [];
  return scopes.includes("admin") || scope.split("|").some((name) => scopes.includes(name));
}

/** Whether this key may send messages; to new conversations, and to branches of others, only where it may make them. */
export const maySend = (): boolean => may("runs") || (may("chat") && may("sessions:write"));
export const mayBegin = (): boolean => maySend() && may("sessions:write");
/** Those of the turns that such a key may begin. */
export const SEES_RUNS = "runs|chat|jobs";

/** Whose drafts this tab keeps. */
const OWNER = "owner";

/** Begin anew, without anything that was read or written here. It does not return: the page is loaded again. */
async function forget(): Promise<never> {
  clearTab();
  await dropAllFiles();
  history.replaceState(null, "", link("c"));
  location.reload();
  return new Promise(() => {});
}

/** Learn who we are and what this server offers us. */
export async function loadAccess(): Promise<void> {
  const found = await get<AuthSession>("api/auth/session");
  if (found.signed_in) {
    const owner = JSON.stringify(found.owner);
    const before = readTab(OWNER);
    if (before !== null && before !== owner) await forget();
    writeTab(OWNER, owner);
    signedOut.value = false;
  }
  auth.value = found;
  if (!found.signed_in) return;
  const [able, known, sets, model, folders] = await Promise.all([
    get<Capabilities>("v1/capabilities"),
    get<List<Model>>("v1/models"),
    get<List<Toolset>>("v1/toolsets"),
    get<MainModel>("api/model").catch(() => null),
    get<{ data: { path: string }[] }>("api/workspaces").catch(() => ({ data: [] })),
  ]);
  capabilities.value = able;
  models.value = known.data;
  toolsets.value = sets.data;
  mainModel.value = model;
  workspaces.value = folders.data.map((folder) => folder.path);
}

export async function signIn(key: string): Promise<void> {
  await post("api/auth/login", { key });
  await loadAccess();
}

export async function signOut(everywhere = false): Promise<void> {
  await post("api/auth/logout", everywhere ? { everywhere: true } : {});
  await forget();
}
