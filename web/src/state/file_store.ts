/** Files that wait to be sent, kept by the browser (IndexedDB) for a day at most, so that they survive a reload. */

const DATABASE = "hermes.files";
const STORE = "files";
const KEPT_MS = 86_400_000;
/** Of all tabs together. What is beyond it is not kept. */
const BYTES_MAX = 100_000_000;

/** When a file was chosen and how large it is are part of its key: they are read without the file. */
export type FileKey = [timeMs: number, bytes: number, id: string];

export function newFileKey(bytes: number): FileKey {
  return [Date.now(), bytes, crypto.randomUUID?.() ?? String(Math.random())];
}

function answer<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function use<T>(mode: IDBTransactionMode, work: (store: IDBObjectStore) => Promise<T>): Promise<T> {
  const opening = indexedDB.open(DATABASE, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(STORE);
  const database = await answer(opening);
  try {
    return await work(database.transaction(STORE, mode).objectStore(STORE));
  } finally {
    database.close();
  }
}

/** Keep a file where there is room for it; a browser that keeps nothing is no error. */
export async function keepFile<T>(key: FileKey, file: T): Promise<void> {
  await use("readwrite", async (store) => {
    let bytes = key[1];
    for (const other of (await answer(store.getAllKeys())) as FileKey[]) {
      if (other[0] < Date.now() - KEPT_MS) store.delete(other);
      else bytes += other[1];
    }
    if (bytes <= BYTES_MAX) await answer(store.put(file, key));
  }).catch(() => {});
}

export async function keptFile<T>(key: FileKey): Promise<T | null> {
  return use("readonly", async (store) => ((await answer(store.get(key))) as T | undefined) ?? null).catch(() => null);
}

export async function dropFiles(keys: FileKey[]): Promise<void> {
  if (!keys.length) return;
  await use("readwrite", async (store) => {
    for (const key of keys) await answer(store.delete(key));
  }).catch(() => {});
}

/** Drop the files of every tab. */
export async function dropAllFiles(): Promise<void> {
  await use("readwrite", (store) => answer(store.clear())).catch(() => {});
}
