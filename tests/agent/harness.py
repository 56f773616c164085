"""Shared by the agent's tests: a home with its app, tools defined by a test, and runs read to their end."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
import yaml

from hermes.app import App
from hermes.core.home import Home
from hermes.core.spec import Applied, Control, RouteChoice, RunSpec
from hermes.http_client.exchange import Answer
from hermes.runs.engine import LiveRun
from hermes.runs.log import RunLog
from hermes.settings import config
from hermes.store.base import Row
from hermes.store.rows import live as live_rows
from hermes.tools.framework.registry import Registry, ToolContext, ToolDef
from support import model_server
from support.model_server import Delivery, ModelServer, Protocol, Reply, Request
from support.waiting import DEADLINE_S, idle, until
from support.wire import body_bytes

T = TypeVar("T")
PROTOCOLS: tuple[Protocol, ...] = ("chat", "responses", "anthropic")
MODES = {"chat": "chat_completions", "responses": "codex_responses", "anthropic": "anthropic_messages"}
KEY = "sk-test-0123456789abcdef"
FINAL = {"run.completed", "run.failed", "run.cancelled"}
# How long a provider may be silent in tests about that, most of which put the clock forward.
SILENT_S = 400.0
# Sent to live readers only, never stored.
LIVE_ONLY = {"tool.drafted", "tool.output"}
Json = dict[str, Any]

# The request for a title would consume a reply of the script in tests about something else.
QUIET = {"auxiliary": {"title_generation": {"enabled": False}}}


@dataclass(frozen=True)
class CompletedRun:
    """A run that has ended: its result, and the events of a reader that subscribed at the start."""

    spec: RunSpec
    result: Json
    events: list[Json]

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    @property
    def final(self) -> Json:
        return self.events[-1]

    def events_of(self, *types: str) -> list[Json]:
        return [event for event in self.events if event["type"] in types]

    def event(self, kind: str) -> Json:
        events = self.events_of(kind)
        assert len(events) == 1, f"{len(events)} events {kind} in {self.types}"
        return events[0]

    def text(self, kind: str = "text.delta") -> str:
        """All messages' text in one, each rebuilt from its deltas."""
        return "".join(rebuilt(self.events, kind).values())

    def actions(self) -> list[str]:
        """The recovery actions in order, switches to a fallback included."""
        switch = {"type": "model.retrying", "action": "fallback"}
        switches = [
            switch if event["type"] == "model.switched" else event
            for event in self.events_of("model.retrying", "model.switched")
        ]
        # A switch may have been announced as well, as every wait is.
        return [event["action"] for event in switches if event is switch or event["action"] != "fallback"]

    def tool_results(self) -> list[Json]:
        """The parsed tool messages of this turn, as the result shows them, without the frame of foreign ones."""
        texts = [m["content"] for m in self.result["messages"] if m["role"] == "tool"]
        return [json.loads(t.split("\n", 1)[1].rsplit("\n", 1)[0] if t.startswith("[") else t) for t in texts]


def rebuilt(events: Iterable[Json], kind: str = "text.delta") -> dict[str, str]:
    """The text of each message, by the rule of the contract: `text = text[:offset] + piece`."""
    texts: dict[str, str] = {}
    for event in events:
        if event["type"] == kind:
            known = texts.get(event["message_id"], "")
            assert event["offset"] <= len(known), "a piece leaves a gap"
            texts[event["message_id"]] = known[: event["offset"]] + event["text"]
    return texts


def check_laws(events: list[Json]) -> None:
    """What holds for every log: numbers grow, one final event and it is the last, text is only ever appended to."""
    numbers = [event["seq"] for event in events]
    assert numbers[0] >= 1
    assert all(a < b for a, b in itertools.pairwise(numbers)), numbers
    assert [event["type"] in FINAL for event in events] == [False] * (len(events) - 1) + [True]
    lengths: dict[str, int] = {}
    for event in events:
        if event["type"] == "text.delta":
            assert event["offset"] == lengths.get(event["message_id"], 0), "delivered text was touched again"
            lengths[event["message_id"]] = event["offset"] + len(event["text"])
    for event in events:
        if event["type"] == "message.completed":
            assert event["text_length"] == lengths.get(event["message_id"], 0)


class Harness:
    """A home and its app, with methods that start runs."""

    def __init__(self, home: Home, settings: Json) -> None:
        self.home = home
        self.configure(settings)
        self.app = App(home, config.load(home))
        # Waits are as short as they may be.
        self.app.services = replace(self.app.services, jitter=lambda: 0.0)
        self.engine = self.app.engine
        self.toolsets: frozenset[str] = frozenset()

    def configure(self, settings: Json) -> None:
        """Write config.yaml; a turn reads it anew when it has changed."""
        self.home.path.mkdir(parents=True, exist_ok=True)
        self.home.config_file.write_text(yaml.safe_dump({**QUIET, **settings}))

    def offer(self, *tools: ToolDef) -> None:
        """Register these tools as the only ones, and offer them to runs from now on."""
        registry = Registry(tools)
        self.app.services = replace(self.app.services, registry=lambda: registry)
        self.toolsets = frozenset(tool.toolset for tool in tools)

    def spec(
        self, where: ModelServer | str | None, message: Any = "hi", protocol: str = "chat", **fields: Any
    ) -> RunSpec:
        """The spec of a turn; it is not persisted unless `fields` has `persist`."""
        base = where.url if isinstance(where, ModelServer) else where
        of_route = {name: fields.pop(name) for name in ("model", "provider", "api_key", "fallbacks") if name in fields}
        if base is not None:
            of_route = {"model": "m", "api_key": KEY, **of_route}
            fields.setdefault("route", RouteChoice(base_url=f"{base}/v1", api_mode=MODES[protocol], **of_route))
        fields.setdefault("session_id", f"s-{secrets.token_hex(6)}")
        fields.setdefault("persist", False)
        fields.setdefault("history", None if fields["persist"] else [])
        fields.setdefault("toolsets", self.toolsets)
        return RunSpec(user_message=message, **fields)

    async def run(
        self, where: ModelServer | str | None, message: Any = "hi", protocol: str = "chat", **fields: Any
    ) -> CompletedRun:
        return await self.carry_out(self.spec(where, message, protocol, **fields))

    async def carry_out(self, spec: RunSpec) -> CompletedRun:
        return await (await self.begin(spec)).end()

    async def begin(self, spec: RunSpec) -> Running:
        """Start a run and read its events from the first on."""
        live = await self.engine.start(spec)
        return Running(self, live)

    async def rows(self, session_id: str) -> list[Row]:
        """The live rows of a session."""
        return await self.app.store.sessions.engine.read_soon(lambda tx: live_rows(tx, session_id))

    async def close(self) -> None:
        await self.app.close()


class Running:
    """A running run and a reader of its events."""

    def __init__(self, harness: Harness, live: LiveRun) -> None:
        self.spec, self.run_id = live.spec, live.spec.run_id
        self.events: list[Json] = []
        self._harness, self._live = harness, live
        self._grown = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self._harness.engine.subscribe(self.run_id):
            self.events.append(event.as_dict())
            self._grown.set()

    async def until(self, condition: Callable[[list[Json]], Any]) -> Any:
        """Wait until the events seen so far fulfil the condition."""
        async with asyncio.timeout(DEADLINE_S):
            while not (met := condition(self.events)):
                self._grown.clear()
                await self._grown.wait()
        return met

    async def wait_for(self, kind: str) -> Json:
        """The first event of that type, waited for."""
        return await self.until(lambda events: next((e for e in events if e["type"] == kind), None))

    async def control(self, kind: Any, control_id: str | None = None, **data: Any) -> Applied:
        more = {} if control_id is None else {"control_id": control_id}
        return await self._harness.engine.control(self.run_id, Control(kind, data, **more))

    async def end(self) -> CompletedRun:
        assert self._live.task is not None
        async with asyncio.timeout(DEADLINE_S):
            result = await self._live.task
            await self._reader
        check_laws(self.events)
        return CompletedRun(self.spec, result, self.events)


Run = Callable[[ToolContext, Json], Any | Awaitable[Any]]


def tool(name: str, run: Run | None = None, **fields: Any) -> ToolDef:
    """A tool of the toolset `x`. Parameters not declared otherwise are free strings, none of them required."""

    async def echo(_: ToolContext, args: Json) -> Json:
        return {"echo": args}

    fields.setdefault("parameters", schema(a={"type": "string"}))
    fields.setdefault("toolset", "x")
    return ToolDef(name=name, description=f"The tool {name}.", run=run or echo, **fields)


def schema(required: list[str] | None = None, **properties: Json) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": required or [],
        "additionalProperties": False,
    }


def reading(**fields: Any) -> Json:
    """The marks of a tool whose calls may all run at once."""
    return {"effect": "read", "scope": lambda _: frozenset(), **fields}


def cut_after(marker: str, reply: Reply) -> Callable[[Request], Reply]:
    """A handler whose answers break off right behind the marker, wherever that stands for this request."""

    def handle(request: Request) -> Reply:
        body = body_bytes(request.protocol, reply, request.body, request.key)
        return replace(reply, cut_at=body.index(marker.encode()) + len(marker.encode()))

    return handle


def stall_after(marker: str, reply: Reply) -> Callable[[Request], Reply]:
    """A handler whose answers fall silent right behind the marker."""

    def handle(request: Request) -> Reply:
        body = body_bytes(request.protocol, reply, request.body, request.key)
        return replace(reply, stall_at=body.index(marker.encode()) + len(marker.encode()))

    return handle


def scripted(*steps: Reply | Callable[[Request], Reply]) -> Callable[[Request], Reply]:
    """A handler that takes one step after another; a step is a reply or makes one of the request."""
    remaining = list(steps)

    def handle(request: Request) -> Reply:
        step = remaining.pop(0)
        return step(request) if callable(step) else step

    return handle


def hold_answers(patch: pytest.MonkeyPatch) -> asyncio.Event:
    """Answers of model servers wait for the event where they would pause for `gap_s`."""
    go_on, write = asyncio.Event(), model_server._write

    async def write_held(response: Any, request: Request, delivery: Delivery, limit: int | None) -> None:
        assert limit is None, "an answer with faults"
        for pause, data in delivery.parts:
            if pause:
                await go_on.wait()
            await write(response, request, replace(delivery, parts=[(0.0, data)]), None)

    patch.setattr(model_server, "_write", write_held)
    return go_on


class Clock:
    """The clock of the event loop, which the test puts forward while none of its own waits has a limit on that clock."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        loop, self.answers = asyncio.get_running_loop(), list[Answer]()
        time, init = loop.time, Answer.__init__

        def init_known(answer: Answer, *args: Any, **fields: Any) -> None:
            init(answer, *args, **fields)
            if answer._timeouts.stale_s == SILENT_S:  # and not one with a list of models
                self.answers.append(answer)

        patch.setattr(loop, "time", lambda: time() + self.ahead_s)
        patch.setattr(Answer, "__init__", init_known)

    async def put_forward(self, seconds: float) -> None:
        self.ahead_s += seconds
        await idle()

    async def answered(self, server: ModelServer, request: int) -> None:
        """Wait until that request is sent, and the beginning of its answer has come."""
        await until(lambda: len(server.requests) >= request and self.answers and self.answers[-1].status)

    async def hear(self) -> None:
        """Wait until more of the latest answer of a provider with SILENT_S comes."""
        answer = self.answers[-1]
        heard_at = answer._heard_at
        await until(lambda: answer._heard_at > heard_at)


def sent_messages(request: Request, *roles: str) -> list[tuple[str, str]]:
    """The request's messages as pairs of role and text, without the instructions."""
    return [(t.role, t.text) for t in request.turns if t.role != "system" and (not roles or t.role in roles)]


async def in_thread(work: Callable[[], T]) -> T:
    """The result of blocking work, done in a thread without a loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def carry_out() -> None:
        try:
            result = work()
        except BaseException as error:
            tell(future.set_exception, error)
        else:
            tell(future.set_result, result)

    def tell(settle: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: future.done() or settle(value))

    threading.Thread(target=carry_out, daemon=True).start()
    async with asyncio.timeout(DEADLINE_S):
        return await future


async def ending(task: asyncio.Task[Any]) -> Any:
    """The result or exception of a task, which must end and must not be cancelled."""
    await asyncio.wait([task], timeout=DEADLINE_S)
    assert task.done(), "it still waits"
    assert not task.cancelled(), "it was told that it is cancelled, which it is not"
    return task.exception() or task.result()


async def joined(log: RunLog, run_id: str, readers: int = 1) -> None:
    """Wait until so many readers of a run in this process have all that there is, and wait for more."""

    def waiting() -> list[bool]:
        return [reader._waiter is not None for reader in log.bus._readers.get(run_id, ())]

    await until(waiting, lambda value: value == [True] * readers)


def product_tasks() -> list[str]:
    """Tasks that Hermes has on this loop."""
    coroutines = [coroutine for task in asyncio.all_tasks() if inspect.iscoroutine(coroutine := task.get_coro())]
    names = [c.__qualname__ for c in coroutines if "/src/hermes/" in c.cr_code.co_filename]
    # These last as long as the sandbox of a session, which is kept for its next command.
    return [name for name in names if name not in ("EgressProxy.serve", "DiskQuota._watch")]


async def nothing_left(*servers: ModelServer) -> None:
    """No task and no open answer is left."""

    def left() -> tuple[list[str], list[int]]:
        return product_tasks(), [server.open_streams for server in servers]

    await until(left, lambda value: value == ([], [0] * len(servers)))
