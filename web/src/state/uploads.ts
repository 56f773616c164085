import { signal } from "@preact/signals";
import { capabilities } from "./access";
import { dropFiles, type FileKey, keepFile, keptFile, newFileKey } from "./file_store";
import { formatBytes, t } from "./language";
import { toast } from "./toasts";

/** A file without its contents. */
export interface FileNote {
  key: FileKey;
  name: string;
  mime: string;
}

export interface Upload extends FileNote {
  url: string;
}

/** Files that go with the next message. */
export const uploads = signal<Upload[]>([]);
/** Names of files that were chosen and could not be kept: they have to be attached again. */
export const lostUploads = signal<string[]>([]);

/** What this tab has chosen, so that it is found again after a reload. */
const PLACE = "hermes.files";

export function notesOf(files: Upload[]): FileNote[] {
  return files.map(({ key, name, mime }) => ({ key, name, mime }));
}

let restored = false;

/** Take up what was chosen before a reload; called once, when it is known who we are. */
export async function restoreUploads(): Promise<void> {
  if (restored) return;
  restored = true;
  let notes: FileNote[] = [];
  try {
    notes = JSON.parse(sessionStorage.getItem(PLACE) ?? "[]");
  } catch {
    // Nothing of ours.
  }
  if (notes.length) returnFiles(await loadFiles(notes));
  uploads.subscribe((files) => {
    if (files.length) sessionStorage.setItem(PLACE, JSON.stringify(notesOf(files)));
    else sessionStorage.removeItem(PLACE);
  });
}

/** Files that were kept, and the names of those that were not. */
export interface LoadedFiles {
  files: Upload[];
  lost: string[];
}

export async function loadFiles(notes: FileNote[]): Promise<LoadedFiles> {
  const urls = await Promise.all(notes.map((one) => keptFile<string>(one.key)));
  const files = notes.flatMap((one, index) => (urls[index] ? [{ ...one, url: urls[index] }] : []));
  return { files, lost: notes.filter((_, index) => !urls[index]).map((one) => one.name) };
}

/** Put files back to those that go with the next message, and say which have to be attached again. */
export function returnFiles({ files, lost }: LoadedFiles): void {
  uploads.value = [...files, ...uploads.value];
  lostUploads.value = [...lostUploads.value, ...lost];
}

export async function addFiles(files: Iterable<File>): Promise<void> {
  const limit = (capabilities.value?.limits.max_body_bytes ?? 32_000_000) * 0.7;
  // A list of the browser is emptied with its field.
  for (const file of [...files]) {
    const total = uploads.value.reduce((sum, other) => sum + other.key[1], file.size);
    if (total > limit) {
      toast(t("upload.large", { name: file.name, limit: formatBytes(limit) }), { kind: "error" });
      continue;
    }
    const mime = file.type || "application/octet-stream";
    const name = file.name || "pasted";
    let url: string;
    try {
      url = await read(file, mime);
    } catch {
      toast(t("upload.unreadable", { name }), { kind: "error" });
      continue;
    }
    const upload = { key: newFileKey(file.size), name, mime, url };
    void keepFile(upload.key, url);
    lostUploads.value = lostUploads.value.filter((other) => other !== name);
    uploads.value = [...uploads.value, upload];
  }
}

export function removeUpload(upload: Upload): void {
  uploads.value = uploads.value.filter((other) => other !== upload);
  forgetFiles([upload]);
}

export function forgetFiles(files: FileNote[]): void {
  void dropFiles(files.map((file) => file.key));
}

function read(file: File, mime: string): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result).replace(/^data:[^;,]*/, `data:${mime.split(";")[0]}`));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
