"""What a server counts: plain numbers while it works, made into text when somebody asks. No label holds free text."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from aiohttp import web

import hermes
from hermes.core.events import Event
from hermes.core.failures import KINDS
from hermes.core.limits import ROWS_COUNTED_S
from hermes.core.spec import RunKind
from hermes.runs.engine import LiveRun, RunEngine
from hermes.server.documents import check_on
from hermes.server.middleware import ADAPTER, Handler
from hermes.server.routes import route, route_at
from hermes.store.base import StoreError
from hermes.store.connections import Tx
from hermes.tools.framework.toolsets import builtin

if TYPE_CHECKING:
    from prometheus_client import Metric

    from hermes.server.adapter import APIServerAdapter
    from hermes.server.sse import EventStream

Labels = tuple[str, ...]
OTHER = "other"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GONE = 499
_METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS", "PUT"})
_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_TABLES = ("sessions", "messages", "runs", "run_log", "jobs", "idempotency")

# name, without what every name begins and a counter ends with: what it is, and its labels
_COUNTS: dict[str, tuple[str, Labels]] = {
    "http_requests": ("Requests that were answered", ("route", "method", "status")),
    "turns": ("Turns that have ended", ("kind", "outcome")),
    "tokens": ("Tokens that models have read and written", ("direction",)),
    "tool_calls": ("Calls of tools that have ended", ("tool", "outcome")),
    "provider_errors": ("Requests to models that failed", ("code",)),
    "refused": ("Turns that were asked for and not begun", ("code",)),
    "disconnects": ("Clients that left before their turn had ended", ("action",)),
}
_SECONDS = {
    "http_request_seconds": "How long requests took",
    "turn_seconds": "How long turns took",
    "first_delta_seconds": "How long it took from the beginning of a turn to its first text",
    "session_wait_seconds": "How long turns waited for their session",
}
_GAUGES: dict[str, tuple[str, Labels]] = {
    "build_info": ("The version at work", ("version",)),
    "turns_active": ("Turns at work", ("kind",)),
    "sse_streams_active": ("Streams that are being read", ()),
    "store_rows": ("Rows in the stores, counted at most once a minute", ("store",)),
    "process_resident_bytes": ("Memory of the process", ()),
}


class _Spread:
    """How often something took how long."""

    def __init__(self) -> None:
        self.counts, self.sum_s = [0] * (len(_BOUNDS_S) + 1), 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self.sum_s += max(0.0, seconds)


class Metrics:
    def __init__(self) -> None:
        self.counts: dict[str, Counter[Labels]] = {name: Counter() for name in _COUNTS}
        self.seconds = {name: _Spread() for name in _SECONDS}
        self.streams: set[EventStream] = set()
        self._gauges: dict[str, dict[Labels, float]] = {}
        self._rows: dict[Labels, float] = {}
        self._rows_at = float("-inf")

    # --- counting -------------------------------------------------------------------------------------------------

    def hear(self, live: LiveRun, event: Event) -> None:
        """Count what a run has put on record."""
        kind, data, state = event.type, event.data, live.log.state
        if kind == "usage":
            for direction in ("input", "output"):
                self.counts["tokens"][direction,] += data[f"{direction}_tokens"]
        elif kind == "tool.finished":
            self.counts["tool_calls"][_tool(data["name"]), data["status"]] += 1
        elif kind == "run.started":
            self.seconds["session_wait_seconds"].add(live.waited_s)
        elif kind == "model.retrying":
            self._provider_failed(KINDS[data["failure"]].code)
        elif (event.final or kind == "run.interrupted") and not live.spec.count_only:
            self.counts["turns"][live.spec.kind, state.status] += 1
            self._provider_failed(state.code)
            if event.final and state.started_at is not None:
                self.seconds["turn_seconds"].add(event.ts - state.started_at)
                if live.log.first_delta_at is not None and live.resumption is None:
                    self.seconds["first_delta_seconds"].add(live.log.first_delta_at - state.started_at)

    def _provider_failed(self, code: str) -> None:
        if code.startswith("provider_"):
            self.counts["provider_errors"][code,] += 1

    def refused(self, status: int, code: str) -> None:
        """Count a turn that was not begun, unless a defect of ours is why."""
        if status < 500 or status == 503:
            self.counts["refused"][code,] += 1

    def answered(self, request: web.Request, status: int, seconds: float) -> None:
        route = route_at(request)
        method = request.method if request.method in _METHODS else OTHER
        self.counts["http_requests"][route.path if route else OTHER, method, str(status)] += 1
        if status != 101:  # a WebSocket lasts as long as its client likes
            self.seconds["http_request_seconds"].add(seconds)

    # --- telling --------------------------------------------------------------------------------------------------

    async def text(self, adapter: APIServerAdapter) -> bytes:
        """All of it in the format of Prometheus, with what the other workers of the server have counted."""
        app = await adapter.app()
        if time.monotonic() - self._rows_at > ROWS_COUNTED_S:
            self._rows_at = time.monotonic()
            with contextlib.suppress(StoreError):
                self._rows |= await app.store.blocking.engine.read_soon(partial(_rows, _TABLES), slow=True)
                self._rows |= await adapter.stored_responses.engine.read_soon(partial(_rows, ("responses",)), slow=True)
        together = Metrics()
        together._gauges |= {"build_info": {(hermes.__version__,): 1.0}, "store_rows": self._rows}
        for dumped in (self.dump(app.engine), *(await app.engine.peers.ask_all("metrics")).values()):
            together._add(dumped)
        return await asyncio.to_thread(together._rendered)

    def dump(self, engine: RunEngine) -> dict[str, Any]:
        """What this process has counted, as it travels to another worker."""
        kinds = engine.kinds
        gauges: dict[str, Mapping[Labels, float]] = {
            "turns_active": {(kind,): float(kinds[kind]) for kind in get_args(RunKind)},
            "sse_streams_active": {(): float(len(self.streams))},
            "process_resident_bytes": _resident_bytes(),
        }
        return {
            "counts": {name: list(values.items()) for name, values in self.counts.items()},
            "seconds": {name: (spread.counts, spread.sum_s) for name, spread in self.seconds.items()},
            "gauges": {name: list(values.items()) for name, values in gauges.items()},
        }

    def _add(self, dumped: Mapping[str, Any]) -> None:
        for name, found in dumped["counts"].items():
            for labels, count in found:
                self.counts[name][tuple(labels)] += count
        for name, (counts, sum_s) in dumped["seconds"].items():
            spread = self.seconds[name]
            spread.counts = [one + other for one, other in zip(spread.counts, counts, strict=True)]
            spread.sum_s += sum_s
        for name, found in dumped["gauges"].items():
            gauge = self._gauges.setdefault(name, {})
            for labels, value in found:
                gauge[tuple(labels)] = gauge.get(tuple(labels), 0.0) + value

    def _rendered(self) -> bytes:
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        plain = (_GAUGES, GaugeMetricFamily, self._gauges), (_COUNTS, CounterMetricFamily, self.counts)
        for table, make, values in plain:
            for name, (about, labels) in table.items():
                family: Any = make(f"hermes_{name}", about, labels=labels)
                for found, value in sorted(dict(values[name]).items()):
                    family.add_metric(found, value)
                yield family
        for name, about in _SECONDS.items():
            spread = self.seconds[name]
            bounds = [*(str(float(bound)) for bound in _BOUNDS_S), "+Inf"]
            timed = HistogramMetricFamily(f"hermes_{name}", about, labels=())
            timed.add_metric((), list(zip(bounds, accumulate(spread.counts), strict=True)), spread.sum_s)
            yield timed


def _tool(name: str) -> str:
    """A tool's name where it is ours; a model may have made up any other."""
    return name if builtin().get(name) else "mcp" if name.startswith("mcp_") else OTHER


def _rows(tables: Labels, tx: Tx) -> dict[Labels, float]:
    return {(name,): tx.value(f"SELECT count(*) FROM {name}") for name in tables}  # noqa: S608  (the names are ours)


def _resident_bytes() -> dict[Labels, float]:
    with contextlib.suppress(OSError):  # where there is no /proc, it is not told
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {(): float(pages * os.sysconf("SC_PAGE_SIZE"))}
    return {}


@web.middleware
async def counting_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the request, however it ends, and the turn that it was refused."""
    counted = request.match_info.apps[-1][ADAPTER].metrics  # of a profile, where it is one's
    began, status = time.perf_counter(), 500
    try:
        response = await handler(request)
        status = response.status
    except web.HTTPException as error:
        status = error.status
        raise
    except asyncio.CancelledError:
        status = _GONE
        raise
    finally:
        counted.answered(request, status, time.perf_counter() - began)
    if status >= 400 and "X-Hermes-Completed" not in response.headers:  # which says that a turn had begun
        route = route_at(request)
        if route is not None and route.begins_turns and isinstance(response, web.Response):
            counted.refused(status, msgspec.json.decode(response.body)["error"]["code"])  # type: ignore[arg-type]
    return response


@route("GET", "/metrics", "metrics", "Prometheus metrics", scope="admin", types=("text/plain",), faults=(404,))
async def metrics(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    check_on(adapter, "metrics", request)
    return web.Response(body=await adapter.metrics.text(adapter), headers={"Content-Type": _TYPE})
