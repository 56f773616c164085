import { ApiError, reachable, request } from "./client";
import { batches } from "./sse";
import type { RunEvent } from "./types";

const ENDS = new Set(["run.completed", "run.failed", "run.cancelled"]);
const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 4000;
/** The server says something every 15 s; a connection that is silent for longer is dead, as after sleep. */
const SILENCE_MS = 40_000;

export type Connection = "live" | "waiting" | "closed";

export interface Follower {
  onEvents(events: RunEvent[]): void;
  onConnection(state: Connection): void;
  /** The log is not there (any more). */
  onGone(): void;
}

/** Follow a run's log to its end, across lost connections: every event is told once and in order. */
export async function follow(runId: string, follower: Follower, signal: AbortSignal, after = 0): Promise<void> {
  let last = after;
  let pause = FIRST_PAUSE_MS;
  while (!signal.aborted) {
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    signal.addEventListener("abort", stop);
    let silence = setTimeout(stop, SILENCE_MS);
    try {
      const response = await request("GET", `v1/runs/${runId}/events`, {
        headers: { Accept: "text/event-stream", "Last-Event-ID": String(last), "X-Hermes-Reasoning": "on" },
        signal: attempt.signal,
      });
      follower.onConnection("live");
      for await (const batch of batches(response)) {
        clearTimeout(silence);
        silence = setTimeout(stop, SILENCE_MS);
        const events = batch.map((text) => JSON.parse(text) as RunEvent).filter((event) => event.seq > last);
        if (!events.length) continue;
        pause = FIRST_PAUSE_MS;
        last = events[events.length - 1]?.seq ?? last;
        follower.onEvents(events);
        if (events.some((event) => ENDS.has(event.event))) {
          follower.onConnection("closed");
          return;
        }
      }
    } catch (error) {
      if (error instanceof ApiError && [401, 403, 404, 410].includes(error.status)) {
        follower.onGone();
        return;
      }
      if (!(error instanceof ApiError)) reachable.value = false;
    } finally {
      clearTimeout(silence);
      signal.removeEventListener("abort", stop);
      attempt.abort();
    }
    if (signal.aborted) return;
    follower.onConnection("waiting");
    await quiet(pause, signal);
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
  }
}

/** Wait, but not longer than until there is reason to believe that the network is back. */
function quiet(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resume) => {
    const end = () => {
      clearTimeout(timer);
      removeEventListener("online", end);
      document.removeEventListener("visibilitychange", end);
      signal.removeEventListener("abort", end);
      resume();
    };
    const timer = setTimeout(end, ms);
    addEventListener("online", end);
    document.addEventListener("visibilitychange", end);
    signal.addEventListener("abort", end);
  });
}
