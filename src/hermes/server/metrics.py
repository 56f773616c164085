"""Metrics of this process, and `/metrics`. No label holds free text."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

import hermes
from hermes.core.events import Event
from hermes.core.failures import KINDS
from hermes.core.limits import ROWS_COUNTED_S
from hermes.core.spec import RunKind
from hermes.runs.engine import LiveRun, RunEngine
from hermes.server.documents import check_on
from hermes.server.routes import route
from hermes.store.base import StoreError
from hermes.store.engine import Tx
from hermes.tools.framework.toolsets import builtin

if TYPE_CHECKING:
    from hermes.server.context import ServerContext
    from hermes.server.sse import EventStream

Labels = tuple[str, ...]
OTHER = "other"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS", "PUT"})
_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_TABLES = ("sessions", "messages", "runs", "run_log", "jobs", "idempotency")

# name without `hermes_`: description, labels
_COUNTERS: dict[str, tuple[str, Labels]] = {
    "http_requests": ("Requests that were answered", ("route", "method", "status")),
    "turns": ("Turns that have ended", ("kind", "outcome")),
    "tokens": ("Tokens that models have read and written", ("direction",)),
    "tool_calls": ("Calls of tools that have ended", ("tool", "outcome")),
    "provider_errors": ("Requests to models that failed", ("code",)),
    "refused": ("Turns that were asked for and not begun", ("code",)),
    "disconnects": ("Clients that left before their turn had ended", ("action",)),
}
_HISTOGRAMS = {
    "http_request_seconds": "How long requests took",
    "turn_seconds": "How long turns took",
    "first_delta_seconds": "How long it took from the beginning of a turn to its first text",
    "session_wait_seconds": "How long turns waited for their session",
}
# A metric as it travels between workers: name, description, type, and its samples with their labels.
Dump = tuple[str, str, str, Sequence[tuple[str, Mapping[str, str], float]]]


class Metrics:
    """prometheus_client metrics in their own registry."""

    def __init__(self) -> None:
        self._registry, self._server = CollectorRegistry(), CollectorRegistry()
        self._counters = {
            name: Counter(f"hermes_{name}", about, labels, registry=self._registry)
            for name, (about, labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"hermes_{name}", about, buckets=_BOUNDS_S, registry=self._registry)
            for name, about in _HISTOGRAMS.items()
        }
        self._turns = Gauge("hermes_turns_active", "Turns at work", ("kind",), registry=self._registry)
        self._streams = Gauge("hermes_sse_streams_active", "Streams that are being read", registry=self._registry)
        self._memory = Gauge("hermes_process_resident_bytes", "Memory of the process", registry=self._registry)
        # Of the whole server: the same in all workers.
        version = Gauge("hermes_build_info", "The version at work", ("version",), registry=self._server)
        version.labels(hermes.__version__).set(1)
        about = "Rows in the stores, counted at most once a minute"
        self._rows = Gauge("hermes_store_rows", about, ("store",), registry=self._server)
        self._rows_at = float("-inf")
        self.streams: set[EventStream] = set()

    # --- counting -------------------------------------------------------------------------------------------------

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        self._counters[name].labels(*labels).inc(amount)

    def _time(self, name: str, seconds: float) -> None:
        self._histograms[name].observe(max(0.0, seconds))

    def hear(self, live: LiveRun, event: Event) -> None:
        """Count an event of a run."""
        kind, data, state = event.type, event.data, live.log.state
        if kind == "usage":
            for direction in ("input", "output"):
                self.count("tokens", direction, amount=data[f"{direction}_tokens"])
        elif kind == "tool.finished":
            self.count("tool_calls", _tool(data["name"]), data["status"])
        elif kind == "run.started":
            self._time("session_wait_seconds", live.waited_s)
        elif kind == "model.retrying":
            self._provider_failed(KINDS[data["failure"]].code)
        elif (event.final or kind == "run.interrupted") and not live.spec.count_only:
            self.count("turns", live.spec.kind, state.status)
            self._provider_failed(state.code)
            if event.final and state.started_at is not None:
                self._time("turn_seconds", event.ts - state.started_at)
                if live.log.first_delta_at is not None and live.resumption is None:
                    self._time("first_delta_seconds", live.log.first_delta_at - state.started_at)

    def _provider_failed(self, code: str) -> None:
        if code.startswith("provider_"):
            self.count("provider_errors", code)

    def refused(self, status: int, code: str) -> None:
        """Count a refused turn, unless it is an internal error."""
        if status < 500 or status == 503:
            self.count("refused", code)

    def answered(self, path: str | None, method: str, status: int, seconds: float) -> None:
        """`path` is that of the route."""
        self.count("http_requests", path or OTHER, method if method in _METHODS else OTHER, str(status))
        if status != 101:  # a WebSocket lasts as long as its client likes
            self._time("http_request_seconds", seconds)

    # --- telling --------------------------------------------------------------------------------------------------

    async def text(self, context: ServerContext) -> bytes:
        """The exposition format, with the counts of the server's other workers."""
        app = context.app
        if time.monotonic() - self._rows_at > ROWS_COUNTED_S:
            self._rows_at = time.monotonic()
            with contextlib.suppress(StoreError):
                stores = ((app.store.blocking.engine, _TABLES), (context.stored_responses.engine, ("responses",)))
                for engine, tables in stores:
                    for name, count in (await engine.read_soon(partial(_count_rows, tables), slow=True)).items():
                        self._rows.labels(name).set(count)
        dumps = [_dump(self._server), self.dump(app.engine), *(await app.engine.peers.ask_all("metrics")).values()]
        registry = CollectorRegistry()
        registry.register(_Sums(dumps))
        return await asyncio.to_thread(generate_latest, registry)

    def dump(self, engine: RunEngine) -> list[Dump]:
        """The counts of this process, for another worker."""
        for kind in get_args(RunKind):
            self._turns.labels(kind).set(engine.kinds[kind])
        self._streams.set(len(self.streams))
        with contextlib.suppress(OSError):  # where there is no /proc, it is 0
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self._memory.set(pages * os.sysconf("SC_PAGE_SIZE"))
        return _dump(self._registry)


def _dump(registry: CollectorRegistry) -> list[Dump]:
    return [
        (
            metric.name,
            metric.documentation,
            metric.type,
            [(s.name, s.labels, s.value) for s in metric.samples if not s.name.endswith("_created")],
        )
        for metric in registry.collect()
    ]


class _Sums(Collector):
    """The sums of several workers' counts."""

    def __init__(self, dumps: Sequence[Sequence[Dump]]) -> None:
        self._dumps = dumps

    def collect(self) -> Iterator[Metric]:
        sums: dict[tuple[str, str, str], dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for name, about, kind, samples in (metric for dump in self._dumps for metric in dump):
            values = sums.setdefault((name, about, kind), {})
            for sample, labels, value in samples:
                key = sample, tuple(labels.items())
                values[key] = values.get(key, 0.0) + value
        for (name, about, kind), values in sums.items():
            result = Metric(name, about, kind)
            for (sample, pairs), value in values.items():
                result.add_sample(sample, dict(pairs), value)
            yield result


def _tool(name: str) -> str:
    """The tool's name where it is ours; a model may make up any other."""
    return name if builtin().get(name) else "mcp" if name.startswith("mcp_") else OTHER


def _count_rows(tables: Labels, tx: Tx) -> dict[str, float]:
    return {name: tx.value(f"SELECT count(*) FROM {name}") for name in tables}  # noqa: S608  (the names are ours)


@route("GET /metrics", "metrics", "Prometheus metrics", scope="admin", types=("text/plain",), faults=(404,))
async def metrics(context: ServerContext, request: web.Request) -> web.StreamResponse:
    check_on(context, "metrics", request)
    return web.Response(body=await context.metrics.text(context), headers={"Content-Type": _TYPE})
