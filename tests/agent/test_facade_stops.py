"""`AIAgent` at the edges of a turn: stops that come early, words that come late, and runs that die under it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from hermes import app as app_module
from hermes.app import App, current
from hermes.runs import leases as leases_module
from hermes.store.base import OpenedSession, StoreError
from hermes.store.leases import Leases
from hermes.store.sessions import SessionDB
from hermes.store.stores import Async, AsyncRuns, AsyncStore
from run_agent import AIAgent
from support.model_server import Call, ModelServer, Reply, Request
from support.server_thread import serving
from support.waiting import idle, until

from .harness import KEY, QUIET, Json, check_laws, ending, hold_answers, in_thread, nothing_left

T = TypeVar("T")
SESSION = "the-session"


@pytest.fixture(autouse=True)
def quiet_home(home_folder: Path) -> None:
    home_folder.mkdir()
    configure(home_folder)


def configure(home_folder: Path, **settings: Any) -> None:
    (home_folder / "config.yaml").write_text(yaml.safe_dump({**QUIET, **settings}))


def agent_for(server: ModelServer, **fields: Any) -> AIAgent:
    return AIAgent(**{"base_url": f"{server.url}/v1", "model": "m", "api_key": KEY, "enabled_toolsets": [], **fields})


def story() -> Reply:
    """An answer that is not over before a test that waits for it has failed, unless it is stopped."""
    return Reply(text=["a "] * 5_000, gap_s=0.02)


def turns_at(app: App) -> int:
    """How many turns of the session there are: the one that runs, and those that wait for it."""
    return app.engine.admissions.leases.waiting(SESSION)


# ---- words that come late


async def test_steer_at_end_does_not_block_turn(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agent_for(server, stream_delta_callback=lambda _: None)
    original = AsyncRuns.append

    async def append(runs: AsyncRuns, run_id: str, token: Any, events: Any, *args: Any, **fields: Any) -> None:
        if any(event.final for event in events):
            agent.steer("and tea")
            await idle()
        await original(runs, run_id, token, events, *args, **fields)

    monkeypatch.setattr(AsyncRuns, "append", append)
    server.script = [Reply(text="Done.")]
    result = await ending(asyncio.create_task(agent.arun_conversation("hi")))
    assert (result["completed"], result["pending_steer"]) == (True, None)


async def test_concurrent_steers_are_not_lost(server: ModelServer) -> None:
    server.repeat, server.script = True, [Reply(text="Done.", continues=False)]
    over = threading.Event()
    for _ in range(10):
        events: list[Json] = []
        agent = agent_for(server, event_callback=events.append)
        over.clear()

        def insist(agent: AIAgent = agent) -> None:
            while not over.wait(0.0002):
                agent.steer("tea")

        thread = threading.Thread(target=insist)
        thread.start()
        try:
            result = await ending(asyncio.create_task(agent.arun_conversation("hi")))
        finally:
            over.set()
            thread.join()
        check_laws(events)
        received = [event for event in events if event["type"] == "control.received"]
        assert (result["pending_steer"] or "").split() == ["tea"] * len(received)


# ---- runs that die


async def test_turn_that_loses_session_lease_returns_to_waiter(
    server: ModelServer, database: SessionDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: dict[str, int] = {}
    original = AsyncStore.begin

    async def begin(store: AsyncStore, *args: Any, **fields: Any) -> OpenedSession | None:
        result = await original(store, *args, **fields)
        if result is not None:
            tokens[f"session:{result.session_id}"] = result.token
        return result

    monkeypatch.setattr(AsyncStore, "begin", begin)
    monkeypatch.setattr(leases_module, "LEASE_RENEW_S", 0.02)
    server.script = [story()]
    agent = agent_for(server, session_id=SESSION, session_db=database, stream_delta_callback=lambda _: None)
    waiter = asyncio.create_task(agent.arun_conversation("hi"))
    await server.until(lambda: server.open_streams == 1)
    leases, name = Async(Leases(database.engine)), f"session:{SESSION}"
    await leases.release(name, tokens[name])
    assert await leases.acquire(name, "another process", 3600.0) is not None
    outcome = await ending(waiter)
    assert isinstance(outcome, Exception) or outcome["completed"] is False
    await nothing_left(server)


@pytest.mark.parametrize("listening", [True, False], ids=["listening", "only waiting"])
async def test_turn_with_failing_store_returns_to_waiter(
    server: ModelServer, database: SessionDB, monkeypatch: pytest.MonkeyPatch, listening: bool
) -> None:
    go_on = hold_answers(monkeypatch)

    async def broken(*_: Any, **__: Any) -> None:
        raise StoreError("the disk is full")

    def on_text(_: Any) -> None:
        monkeypatch.setattr(AsyncRuns, "append", broken)
        go_on.set()

    server.script = [Reply(text=["Once ", "upon"], gap_s=1)]
    agent = agent_for(server, session_id=SESSION, session_db=database)
    if listening:
        agent.stream_delta_callback = on_text
    waiter = asyncio.create_task(agent.arun_conversation("hi"))
    if not listening:
        await server.until(lambda: server.open_streams == 1)
        on_text("")
    outcome = await ending(waiter)
    assert (outcome["final_response"], [warning["code"] for warning in outcome["warnings"]]) == (
        "Once upon",
        ["store_unavailable"],
    )


# ---- stops that come early


@pytest.fixture
def at_the_start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Has something done when a turn has been asked for and its run is not there yet."""

    def do(act: Callable[[], None]) -> None:
        async def acting(*args: Any) -> App:
            # By now a blocking caller waits; one that is not as far yet is stopped all the same.
            await asyncio.sleep(0.02)
            act()
            await idle()
            return await current(*args)

        monkeypatch.setattr(app_module, "current", acting)

    return do


@pytest.mark.parametrize("blocking", [False, True], ids=["awaited", "blocking"])
async def test_interrupt_before_run_exists_stops_it(
    server: ModelServer, at_the_start: Callable[[Callable[[], None]], None], blocking: bool
) -> None:
    server.script = [story()]
    agent = agent_for(server)
    at_the_start(agent.interrupt)
    if blocking:
        result = await in_thread(lambda: agent.run_conversation("hi"))
    else:
        result = await agent.arun_conversation("hi")
    assert (result["interrupted"], result["completed"]) == (True, False)


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Presses Ctrl-C, for a test in the main thread."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def wait_for_quiet(server: ModelServer) -> None:
    """Wait until nothing of Hermes goes on behind blocking calls."""
    asyncio.run_coroutine_threadsafe(nothing_left(server), app_module.background_loop()).result()


def test_keyboard_interrupt_before_run_exists_ends_run(
    at_the_start: Callable[[Callable[[], None]], None], ctrl_c: Callable[[], None]
) -> None:
    at_the_start(ctrl_c)
    with serving(story()) as server:
        result = None
        with contextlib.suppress(KeyboardInterrupt):
            result = agent_for(server, stream_delta_callback=lambda _: None).run_conversation("hi")
        assert result is None or result["interrupted"]
        wait_for_quiet(server)
        assert all(request.closed_early for request in server.requests)


def test_keyboard_interrupt_during_handover_ends_run(monkeypatch: pytest.MonkeyPatch) -> None:
    hand_over = asyncio.run_coroutine_threadsafe

    def interrupted(*args: Any) -> Any:
        hand_over(*args)
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", hand_over)
        raise KeyboardInterrupt

    with serving(story()) as server:
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            agent_for(server).run_conversation("hi")
        wait_for_quiet(server)
        assert all(request.closed_early for request in server.requests)


async def test_early_interrupt_is_recorded(
    server: ModelServer, at_the_start: Callable[[Callable[[], None]], None]
) -> None:
    server.script = [story()]
    events: list[Json] = []
    agent = agent_for(server, event_callback=events.append)
    at_the_start(agent.interrupt)
    await agent.arun_conversation("hi")
    check_laws(events)
    (received,) = (event for event in events if event["type"] == "control.received")
    assert received["control"] == "interrupt"
    assert (events[-1]["type"], events[-1]["reason"], events[-1]["by"]) == ("run.cancelled", "stop", "user")


class Occupied:
    """A session whose turn goes on until it is let go."""

    def __init__(self, server: ModelServer) -> None:
        self._gate, self._server = asyncio.Event(), server
        server.handler = self._answer

    async def _answer(self, _: Request) -> Reply:
        await self._gate.wait()
        return Reply(text="Done.", continues=False)

    async def begin(self) -> None:
        self._turn = asyncio.create_task(agent_for(self._server, session_id=SESSION).arun_conversation("first"))
        await self._server.until(lambda: self._server.open_streams == 1)

    async def lease_released(self) -> None:
        self._gate.set()
        assert (await self._turn)["completed"] is True


@pytest.fixture
async def occupied(server: ModelServer) -> Occupied:
    occupied = Occupied(server)
    await occupied.begin()
    return occupied


async def test_interrupt_while_waiting_for_session_is_recorded(server: ModelServer, occupied: Occupied) -> None:
    events: list[Json] = []
    waiting = agent_for(server, session_id=SESSION, event_callback=events.append)
    second = asyncio.create_task(waiting.arun_conversation("second"))
    app = await current()
    await until(lambda: turns_at(app) == 2)
    waiting.interrupt()
    await occupied.lease_released()
    assert (await second)["interrupted"] is True
    assert [event["control"] for event in events if event["type"] == "control.received"] == ["interrupt"]


async def test_turn_after_interrupted_turn_is_not_interrupted(
    server: ModelServer, at_the_start: Callable[[Callable[[], None]], None]
) -> None:
    server.repeat, server.script = True, [Reply(text="Done.", continues=False)]
    agent = agent_for(server)
    at_the_start(agent.interrupt)
    assert (await agent.arun_conversation("hi"))["interrupted"] is True
    at_the_start(lambda: None)
    assert (await agent.arun_conversation("hi"))["completed"] is True


# ---- one agent in two threads


async def test_interrupt_of_second_thread_after_first_has_ended(
    server: ModelServer,
) -> None:
    server.handler = lambda request: Reply(text="Done.") if request.number == 1 else story()
    agent = agent_for(server, session_id=SESSION)
    turns = [asyncio.create_task(in_thread(lambda: agent.run_conversation("hi"))) for _ in range(2)]
    await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
    await server.until(lambda: len(server.requests) == 2)
    agent.interrupt()
    results = await asyncio.gather(*turns)
    assert sorted(result["interrupted"] for result in results) == [False, True]


async def test_new_turn_does_not_undo_interrupt_of_running_turn(server: ModelServer) -> None:
    server.handler = lambda request: story() if request.number == 1 else Reply(text="Done.")
    agent = agent_for(server, session_id=SESSION)
    first = asyncio.create_task(in_thread(lambda: agent.run_conversation("hi")))
    await server.until(lambda: server.open_streams == 1)
    agent.interrupt()
    second = asyncio.create_task(in_thread(lambda: agent.run_conversation("hi")))
    assert (await first)["interrupted"] is True
    assert (await second)["completed"] is True


async def test_new_turn_does_not_undo_interrupt_of_queued_turn(server: ModelServer, occupied: Occupied) -> None:
    agent = agent_for(server, session_id=SESSION)
    app = await current()
    stopped = asyncio.create_task(agent.arun_conversation("second"))
    await until(lambda: turns_at(app) == 2)
    agent.interrupt()
    task = asyncio.create_task(agent.arun_conversation("third"))
    await until(lambda: turns_at(app) == 3)
    await occupied.lease_released()
    assert (await stopped)["interrupted"] is True
    assert (await task)["completed"] is True


async def test_leaving_blocking_call_ends_only_its_turn(server: ModelServer) -> None:
    server.handler = lambda request: story() if request.number == 1 else Reply(text="Done.")
    agent, go = agent_for(server, session_id=SESSION), threading.Event()

    def leave(_: Any) -> None:
        go.wait(600)
        raise SystemExit

    def begin() -> str:
        with contextlib.suppress(SystemExit):
            agent.run_conversation("hi", stream_callback=leave)
        return "left"

    leaving = asyncio.create_task(in_thread(begin))
    await server.until(lambda: server.open_streams == 1)
    staying = asyncio.create_task(in_thread(lambda: agent.run_conversation("hi")))
    try:
        app = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(current(), app_module.background_loop()))
        await until(lambda: turns_at(app) == 2)
    finally:
        go.set()
    assert await leaving == "left"
    assert (await staying)["completed"] is True
    assert [request.closed_early for request in server.requests] == [True, False]


async def test_steer_reaches_second_thread_of_same_agent(server: ModelServer) -> None:
    heard = asyncio.Event()

    async def answer(request: Request) -> Reply:
        if request.number == 2:
            await heard.wait()
        return Reply(text="Done.", continues=False)

    server.handler = answer
    events: list[Json] = []
    agent = agent_for(server, session_id=SESSION, event_callback=events.append)
    turns = [asyncio.create_task(in_thread(lambda: agent.run_conversation("hi"))) for _ in range(2)]
    await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
    await server.until(lambda: len(server.requests) == 2)
    assert agent.steer("and tea") is True
    await until(lambda: any(event["type"] == "control.received" for event in events))
    heard.set()
    results = await asyncio.gather(*turns)
    assert sorted(str(result["pending_steer"]) for result in results) == ["None", "and tea"]


# ---- callbacks


async def test_failing_async_callback_is_logged_and_ignored(
    server: ModelServer, home_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure(home_folder, memory={"write_approval": True}, approvals={"timeout": 0.1})
    call = Call("memory", {"target": "user", "action": "add", "content": "likes tea"})
    server.script = [Reply(tool_calls=[call]), Reply(text="Done.")]

    async def approve(_: Any) -> str:
        raise ValueError("the window is gone")

    agent = agent_for(server, enabled_toolsets=["memory"], approval_callback=approve)
    result = await ending(asyncio.create_task(agent.arun_conversation("hi")))
    assert result["final_response"] == "Done."
    assert "the window is gone" in caplog.text
    assert not (home_folder / "memories" / "USER.md").exists()
    await nothing_left(server)
