import { signal } from "@preact/signals";
import { capabilities } from "./access";
import { dataUrl } from "./content";
import { dropFiles, type FileKey, keepFile, keptFile, newFileKey } from "./file_store";
import { formatBytes, t } from "./language";
import { readTabList, writeTabList } from "./tab_store";
import { toast } from "./toasts";

/** A file without its contents. */
export interface FileNote {
  key: FileKey;
  /** Whose next message it goes with; null: that of a new conversation. */
  conversation: string | null;
  name: string;
  mime: string;
}

export interface Upload extends FileNote {
  url: string;
}

/** Files that go with the next messages of their conversations. */
const uploads = signal<Upload[]>([]);
/** Files that were chosen and could not be kept: they have to be attached again. */
const lostUploads = signal<FileNote[]>([]);

export const uploadsOf = (conversation: string | null): Upload[] =>
  uploads.value.filter((file) => file.conversation === conversation);
export const lostUploadsOf = (conversation: string | null): FileNote[] =>
  lostUploads.value.filter((file) => file.conversation === conversation);

/** What this tab has chosen, so that it is found again after a reload. */
const PLACE = "files";
/** Images that models take. Others are sent as files, as are all texts. */
const IMAGE = /^image\/(png|jpeg|gif|webp)$/;
/** Types that the server takes for texts by themselves. */
const TEXT = /^text\/|^application\/(json|xml)$|\+(json|xml)$/;
export const isImage = (file: FileNote): boolean => IMAGE.test(file.mime);

export function notesOf(files: Upload[]): FileNote[] {
  return files.map(({ url: _, ...note }) => note);
}

let restored = false;

/** Take up what was chosen before a reload; called once, when it is known who we are. */
export async function restoreUploads(): Promise<void> {
  if (restored) return;
  restored = true;
  const notes = readTabList<FileNote>(PLACE);
  if (notes.length) returnFiles(await loadFiles(notes));
  uploads.subscribe((files) => writeTabList(PLACE, notesOf(files)));
}

/** Files that were kept, and those that were not. */
export interface LoadedFiles {
  files: Upload[];
  lost: FileNote[];
}

export async function loadFiles(notes: FileNote[]): Promise<LoadedFiles> {
  const urls = await Promise.all(notes.map((one) => keptFile<string>(one.key)));
  const files = notes.flatMap((one, index) => (urls[index] ? [{ ...one, url: urls[index] }] : []));
  return { files, lost: notes.filter((_, index) => !urls[index]) };
}

/** Put files back to those that go with the next message, and say which have to be attached again. */
export function returnFiles({ files, lost }: LoadedFiles): void {
  uploads.value = [...files, ...uploads.value];
  lostUploads.value = [...lostUploads.value, ...lost];
}

/** The files of the message that is being sent: they do not go with the next. */
export function takeUploads(conversation: string | null): Upload[] {
  const files = uploadsOf(conversation);
  uploads.value = uploads.value.filter((file) => file.conversation !== conversation);
  dropLostUploads(conversation);
  return files;
}

export function dropLostUploads(conversation: string | null): void {
  lostUploads.value = lostUploads.value.filter((file) => file.conversation !== conversation);
}

export async function addFiles(files: Iterable<File>, conversation: string | null): Promise<void> {
  const limit = (capabilities.value?.limits.max_body_bytes ?? 32_000_000) * 0.7;
  // A list of the browser is emptied with its field.
  for (const file of [...files]) {
    const total = uploadsOf(conversation).reduce((sum, other) => sum + other.key[1], file.size);
    if (total > limit) {
      toast(t("upload.large", { name: file.name, limit: formatBytes(limit) }), { kind: "error" });
      continue;
    }
    const name = file.name || "pasted";
    let mime: string;
    let url: string;
    try {
      mime = await typeOf(file);
      url = await dataUrl(file, mime);
    } catch {
      toast(t("upload.unreadable", { name }), { kind: "error" });
      continue;
    }
    const upload = { key: newFileKey(file.size), conversation, name, mime, url };
    void keepFile(upload.key, url);
    lostUploads.value = lostUploads.value.filter((other) => other.name !== name || other.conversation !== conversation);
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

/** Browsers know few types of source files by their names; whether it is a text is seen by its bytes. */
async function typeOf(file: File): Promise<string> {
  const type = file.type.split(";")[0] || "application/octet-stream";
  if (IMAGE.test(type) || TEXT.test(type)) return type;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? type : "text/plain";
  } catch (error) {
    if (error instanceof TypeError) return type;
    throw error;
  }
}
