import { ApiError, get, request } from "../api/client";
import type { ContentPart, List, StoredFile, StoredMessage } from "../api/types";

/** What the server makes of a file: its text, or where it is. */
const TEXT_FILE = /^File ([^\n]{1,300}):\n/;
const OTHER_FILE = /^The user attached the file ([^\n]{1,300}) \((\d+) bytes, [^\n]*\); it is at [^\n]*\.$/;

export function plainText(content: StoredMessage["content"]): string {
  if (typeof content === "string") return content;
  return (content ?? [])
    .filter(isWritten)
    .map((part) => part.text)
    .join("\n");
}

/** Whether a part was written, not attached. */
function isWritten({ text }: ContentPart): boolean {
  return text !== undefined && !TEXT_FILE.test(text) && !OTHER_FILE.test(text);
}

/** What was sent along with a text. */
export function attachmentsOf(content: StoredMessage["content"]): ContentPart[] {
  return Array.isArray(content) ? content.filter((part) => !isWritten(part)) : [];
}

export function imageOf(part: ContentPart): string[] {
  const url = typeof part.image_url === "string" ? part.image_url : part.image_url?.url;
  return url ? [url] : [];
}

export function fileOf(part: ContentPart): string[] {
  const name = part.file?.filename ?? (TEXT_FILE.exec(part.text ?? "") ?? OTHER_FILE.exec(part.text ?? ""))?.[1];
  return name ? [name] : [];
}

/** Attachments as they are sent again: what the server made of files is files again, so that it is not taken for written. */
export async function resendable(sessionId: string, attached: ContentPart[]): Promise<ContentPart[]> {
  return await Promise.all(
    attached.map(async (part) => {
      const [head, name] = TEXT_FILE.exec(part.text ?? "") ?? [];
      if (head && name) return filePart(name, new Blob([part.text?.slice(head.length) ?? ""], { type: "text/plain" }));
      const [, other, bytes] = OTHER_FILE.exec(part.text ?? "") ?? [];
      const content = other && (await storedFile(sessionId, other, Number(bytes)));
      return content ? filePart(other, content) : part;
    }),
  );
}

/** A file that was sent in a conversation; null where it is not there any more. */
async function storedFile(sessionId: string, name: string, bytes: number): Promise<Blob | null> {
  const path = `api/sessions/${encodeURIComponent(sessionId)}/files`;
  const files = await get<List<StoredFile>>(path);
  const file = files.data.find((other) => other.name === name && other.bytes === bytes);
  if (!file) return null;
  try {
    return await (await request("GET", `${path}/${encodeURIComponent(file.id)}`)).blob();
  } catch (error) {
    if (error instanceof ApiError) return null;
    throw error;
  }
}

async function filePart(name: string, content: Blob): Promise<ContentPart> {
  return { type: "file", file: { filename: name, file_data: await dataUrl(content, content.type) } };
}

export function dataUrl(content: Blob, mime: string): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result).replace(/^data:[^,]*,/, `data:${mime};base64,`));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(content);
  });
}
