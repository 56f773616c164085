import { signal } from "@preact/signals";

/** Where the API is: beside the page, so that a profile's page talks to its profile. */
const BASE = new URL("./", location.href);

/** Whether the server can be reached, as far as the last request told. */
export const reachable = signal(true);

/** Whether the server has refused the last request for want of a key. */
export const signedOut = signal(false);

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly param: string | null = null,
  ) {
    super(message);
  }
}

/** No answer at all: the network or the server is away. */
export class Unreachable extends Error {}

export interface Options {
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal;
  keepalive?: boolean;
}

export function address(path: string): string {
  return new URL(path.replace(/^\//, ""), BASE).href;
}

/** The raw answer to a request; refusals are thrown as `ApiError`. */
export async function request(method: string, path: string, options: Options = {}): Promise<Response> {
  const headers: Record<string, string> = { Accept: "application/json", "X-Hermes-Page": "1", ...options.headers };
  if (options.body !== undefined) headers["Content-Type"] = "application/json";
  let response: Response;
  try {
    response = await fetch(address(path), {
      method,
      headers,
      body: options.body === undefined ? undefined : JSON.stringify(options.body),
      signal: options.signal,
      keepalive: options.keepalive,
      credentials: "same-origin",
      cache: "no-store",
    });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    reachable.value = false;
    throw new Unreachable(String(error));
  }
  reachable.value = true;
  if (response.ok) return response;
  throw await refusal(response);
}

async function refusal(response: Response): Promise<ApiError> {
  let code = `http_${response.status}`;
  let message = response.statusText;
  let param: string | null = null;
  try {
    const told = ((await response.json()) as { error: { code: string; message: string; param: string | null } }).error;
    [code, message, param] = [told.code, told.message, told.param];
  } catch {
    // A proxy's page: the status has to do.
  }
  if (response.status === 401) signedOut.value = true;
  return new ApiError(response.status, code, message, param);
}

async function json<T>(method: string, path: string, options?: Options): Promise<T> {
  const response = await request(method, path, options);
  return (response.status === 204 ? null : await response.json()) as T;
}

export const get = <T>(path: string, options?: Options) => json<T>("GET", path, options);
export const post = <T>(path: string, body: unknown = {}, options?: Options) =>
  json<T>("POST", path, { ...options, body });
export const patch = <T>(path: string, body: unknown) => json<T>("PATCH", path, { body });
export const put = <T>(path: string, body: unknown) => json<T>("PUT", path, { body });
export const remove = <T>(path: string, options?: Options) => json<T>("DELETE", path, options);

/** A query string of the fields that have a value. */
export function query(fields: Record<string, string | number | boolean | null | undefined>): string {
  const told = new URLSearchParams();
  for (const [name, value] of Object.entries(fields)) {
    if (value !== null && value !== undefined && value !== "") told.set(name, String(value));
  }
  return told.size ? `?${told}` : "";
}

/** Send a request until the server has answered it; the key makes sure that it is carried out once. */
export async function postSurely<T>(path: string, body: unknown, key: string): Promise<T> {
  for (let attempt = 0; ; attempt++) {
    try {
      return await post<T>(path, body, { headers: { "Idempotency-Key": key } });
    } catch (error) {
      const draining = error instanceof ApiError && error.code === "gateway_draining";
      if (!(error instanceof Unreachable || draining) || attempt >= 120) throw error;
      await new Promise((resume) => setTimeout(resume, Math.min(250 * 2 ** attempt, 3000)));
    }
  }
}
