import { signal } from "@preact/signals";
import { capabilities } from "./access";
import type { Upload } from "./conversation";
import { formatBytes, t } from "./language";
import { toast } from "./toasts";

/** Files that go with the next message. */
export const uploads = signal<Upload[]>([]);

export async function addFiles(files: Iterable<File>): Promise<void> {
  const limit = (capabilities.value?.limits.max_body_bytes ?? 32_000_000) * 0.7;
  // A list of the browser is emptied with its field.
  for (const file of [...files]) {
    const total = uploads.value.reduce((sum, other) => sum + other.bytes, file.size);
    if (total > limit) {
      toast(t("upload.large", { name: file.name, limit: formatBytes(limit) }), { kind: "error" });
      continue;
    }
    const mime = file.type || "application/octet-stream";
    uploads.value = [
      ...uploads.value,
      { name: file.name || "pasted", mime, bytes: file.size, url: await read(file, mime) },
    ];
  }
}

export function removeUpload(upload: Upload): void {
  uploads.value = uploads.value.filter((other) => other !== upload);
}

function read(file: File, mime: string): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result).replace(/^data:[^;,]*/, `data:${mime.split(";")[0]}`));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
