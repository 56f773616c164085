"""The log over a store that takes its time, fails or is lost: every reader reads all of it, once, and to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agent.harness import FINAL, Harness, Json, check_laws, ending, hold_answers, joined, nothing_left
from hermes.bus.memory import MemoryBus
from hermes.core.spec import Control, RunSpec
from hermes.guards.secrets import Secrets
from hermes.runs import leases as leases_module
from hermes.runs import log as log_module
from hermes.runs.leases import Lease, SessionLeases
from hermes.runs.log import RunLog
from hermes.store.base import OpenedSession, Row, StoreError
from hermes.store.stores import AsyncRuns, AsyncStore, Store
from support.model_server import ModelServer, Reply, Request
from support.waiting import DEADLINE_S, idle, until

SESSION = "the-session"


class HeldCall:
    """Calls of the store that wait, where `which` wants it, until the test lets them go."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        name: str,
        which: Callable[..., bool] = lambda *_: True,
        *,
        result: bool = False,
    ) -> None:
        """With `result`, the call is made, and its result waits."""
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        original = getattr(AsyncRuns, name)

        async def hold(runs: AsyncRuns, *args: Any, **fields: Any) -> Any:
            answer = await original(runs, *args, **fields) if result else None
            if which(*args):
                self.reached.set()
                await self.go.wait()
            return answer if result else await original(runs, *args, **fields)

        patch.setattr(AsyncRuns, name, hold)

    async def wait(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.reached.wait()


def of_type(*types: str) -> Callable[..., bool]:
    """Whether an `append` carries an event of these types."""
    return lambda _run_id, _token, events, *_: any(event.type in types for event in events)


class LogWriter:
    """A log on its own: its writer, and readers from its start."""

    def __init__(self) -> None:
        self.runs = AsyncStore(Store(None)).runs
        self.spec = RunSpec("hi", SESSION)
        self.log = RunLog(MemoryBus(), window_s=0.0)
        self.writer = self.log.open(self.spec.run_id, self.runs, secrets=Secrets())

    async def begin(self) -> LogWriter:
        await self.runs.create(self.spec)
        session = {"id": SESSION, "source": "cli"}
        await self.writer.append(self.writer.event("run.started", model="m", provider="p"), session=session)
        return self

    def reader(self) -> asyncio.Task[list[Json]]:
        async def read() -> list[Json]:
            async with asyncio.timeout(DEADLINE_S):
                return [event.as_dict() async for event in self.log.subscribe(self.spec.run_id, self.runs)]

        return asyncio.create_task(read())

    async def joined(self, readers: int) -> None:
        """Wait until so many readers have all that there is."""
        await joined(self.log, self.spec.run_id, readers)

    async def notice(self) -> None:
        await self.writer.emit("notice", level="info", code="c", message="m")

    async def complete(self) -> None:
        row = Row(SESSION, "assistant", "", self.spec.run_id)
        await self.writer.complete("m1", row, finish_reason="stop", tool_calls=[], partial=False)

    async def end(self) -> None:
        await self.writer.emit("run.completed", message_id="m1", row=None, finish_reason="stop", steps=1, usage={})
        await self.log.close(self.writer)


@pytest.fixture
async def log_writer() -> AsyncIterator[LogWriter]:
    log_writer = await LogWriter().begin()
    yield log_writer
    await log_writer.log.close(log_writer.writer)


# ---- a store that takes its time


@pytest.mark.parametrize("what", ["put_partials", "append"])
async def test_reader_joining_during_store_write_misses_nothing(
    log_writer: LogWriter, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    early = log_writer.reader()
    await log_writer.joined(1)
    held_call = HeldCall(monkeypatch, what)
    log_writer.writer.text("m1", "Once ")
    storing = asyncio.create_task(log_writer.writer.settle() if what == "put_partials" else log_writer.notice())
    await held_call.wait()
    late = log_writer.reader()
    await log_writer.joined(2)
    log_writer.writer.text("m1", "upon")
    await idle()
    held_call.go.set()
    await storing
    await log_writer.complete()
    await log_writer.end()
    assert await late == await early
    check_laws(await late)


async def test_reader_joining_during_write_of_event_before_text_misses_nothing(
    log_writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text between two events of one transaction has its number before they are in the store."""
    early = log_writer.reader()
    log_writer.writer.text("m1", "Once ")
    first = HeldCall(monkeypatch, "append")
    storing = [asyncio.create_task(log_writer.notice())]
    await first.wait()
    storing.append(asyncio.create_task(log_writer.notice()))
    await idle()
    log_writer.writer.text("m1", "upon")
    storing.append(asyncio.create_task(log_writer.complete()))
    await idle()
    second = HeldCall(monkeypatch, "append", of_type("message.completed"))
    first.go.set()
    await second.wait()
    late = log_writer.reader()
    await log_writer.joined(2)
    second.go.set()
    await asyncio.gather(*storing)
    await log_writer.end()
    assert await late == await early
    check_laws(await late)


async def test_log_closed_while_reader_reads_store_is_read_to_end(
    log_writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = HeldCall(monkeypatch, "append")
    ending = asyncio.create_task(log_writer.end())
    await append.wait()
    closing = asyncio.create_task(log_writer.log.close(log_writer.writer))
    await idle()
    read = HeldCall(monkeypatch, "read", result=True)
    reader = log_writer.reader()
    await read.wait()
    append.go.set()
    await asyncio.gather(ending, closing)
    read.go.set()
    assert [event["type"] for event in await reader] == ["run.started", "run.completed"]


async def test_log_opened_again_while_reader_reads_store_is_read_to_end(
    log_writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = HeldCall(monkeypatch, "read", result=True)
    reader = log_writer.reader()
    await read.wait()
    closed = log_writer.writer
    await log_writer.log.close(closed)
    log_writer.writer = log_writer.log.open(
        log_writer.spec.run_id, log_writer.runs, secrets=Secrets(), last_seq=closed.last_seq, state=closed.state
    )
    read.go.set()
    await idle()
    await log_writer.notice()
    await log_writer.end()
    assert [event["type"] for event in await reader] == ["run.started", "notice", "run.completed"]


@pytest.mark.parametrize("is_put", [True, False], ids=["explicit save", "periodic save"])
async def test_text_stored_after_complete_message_is_not_duplicated(
    log_writer: LogWriter, monkeypatch: pytest.MonkeyPatch, is_put: bool
) -> None:
    held_call = HeldCall(monkeypatch, "put_partials" if is_put else "put_grown")
    log_writer.writer.text("m1", "Once ")
    storing = [asyncio.create_task(log_writer.writer.settle())] if is_put else []
    await held_call.wait()
    completing = asyncio.create_task(log_writer.complete())
    await idle()
    assert not completing.done()
    held_call.go.set()
    await asyncio.gather(*storing, completing)
    await log_writer.end()
    again = await log_writer.reader()
    assert [event["text"] for event in again if event["type"] == "text.delta"] == ["Once "]
    check_laws(again)


# ---- a store that fails once


@pytest.fixture(params=[StoreError, OSError], ids=lambda error: error.__name__)
def failed_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when the first attempt to store text has failed."""
    failed = asyncio.Event()
    original = AsyncRuns.put_grown

    async def put(runs: AsyncRuns, *args: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise request.param("the disk is busy")
        await original(runs, *args)

    monkeypatch.setattr(AsyncRuns, "put_grown", put)
    return failed


async def test_late_reader_sees_text_that_could_not_be_stored(
    log_writer: LogWriter, failed_once: asyncio.Event
) -> None:
    early = log_writer.reader()
    await log_writer.joined(1)
    log_writer.writer.text("m1", "Once ")
    async with asyncio.timeout(DEADLINE_S):
        await failed_once.wait()
    await idle()
    late = log_writer.reader()
    await log_writer.joined(2)
    log_writer.writer.text("m1", "upon")
    await log_writer.complete()
    await log_writer.end()
    assert await late == await early


async def test_text_saved_with_unknown_outcome_is_stored_once(
    log_writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store may have carried out a save that it reports as failed."""
    original, saves = AsyncRuns.put_grown, 0
    monkeypatch.setattr("hermes.runs.streams.PARTIAL_S_MAX", 0.01)

    async def put(runs: AsyncRuns, *args: Any) -> None:
        nonlocal saves
        await original(runs, *args)
        saves += 1
        if saves in (1, 3):
            raise StoreError("the connection was lost during a commit")

    async def stored_texts() -> list[str]:
        return [partial.text for partial in await log_writer.runs.partials(log_writer.spec.run_id)]

    monkeypatch.setattr(AsyncRuns, "put_grown", put)
    text = ""
    for piece in ("Once ", "upon ", "a ", "time"):
        log_writer.writer.text("m1", piece)
        text += piece
        await until(stored_texts, lambda texts, whole=text: texts == [whole])
    await log_writer.complete()
    assert await log_writer.runs.partials(log_writer.spec.run_id) == []


async def test_message_completed_after_save_with_unknown_outcome_leaves_no_partial(
    log_writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, stored = AsyncRuns.put_grown, asyncio.Event()

    async def put(runs: AsyncRuns, *args: Any) -> None:
        await original(runs, *args)
        stored.set()
        raise StoreError("the connection was lost during a commit")

    monkeypatch.setattr(AsyncRuns, "put_grown", put)
    log_writer.writer.text("m1", "Once ")
    async with asyncio.timeout(DEADLINE_S):
        await stored.wait()
    await log_writer.complete()
    assert await log_writer.runs.partials(log_writer.spec.run_id) == []


async def test_log_closed_during_save_is_not_saved_repeatedly(
    log_writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, closed = asyncio.Event(), asyncio.Event()
    attempts: list[Any] = []

    async def broken(_: AsyncRuns, grown: Any) -> None:
        attempts.append(grown)
        tried.set()
        await closed.wait()
        raise StoreError("the disk is gone")

    monkeypatch.setattr(AsyncRuns, "put_grown", broken)
    monkeypatch.setattr("hermes.runs.streams.PARTIAL_S_MAX", 0.0)  # so that a timer has fired by the time all is idle
    log_writer.writer.text("m1", "Once ")
    async with asyncio.timeout(DEADLINE_S):
        await tried.wait()
    await log_writer.writer.close()
    closed.set()
    await idle()
    assert len(attempts) == 1


async def test_failed_text_save_is_retried_with_next_event(log_writer: LogWriter, failed_once: asyncio.Event) -> None:
    log_writer.writer.text("m1", "Once ")
    async with asyncio.timeout(DEADLINE_S):
        await failed_once.wait()
    await idle()
    await log_writer.notice()
    stored = await log_writer.runs.read(log_writer.spec.run_id, 0, 100)
    assert [event.type for event in stored] == ["run.started", "text.delta", "notice"]


async def test_failed_text_save_is_retried_without_further_event(
    log_writer: LogWriter, failed_once: asyncio.Event
) -> None:
    log_writer.writer.text("m1", "Once ")
    async with asyncio.timeout(DEADLINE_S):
        await failed_once.wait()
    await until(lambda: log_writer.runs.read(log_writer.spec.run_id, 0, 100), lambda events: len(events) >= 2)


# ---- the last event


def following(harness: Harness, run_id: str, after: int = 0) -> asyncio.Task[list[Json]]:
    async def read() -> list[Json]:
        return [event.as_dict() async for event in harness.engine.subscribe(run_id, after)]

    return asyncio.create_task(read())


@pytest.mark.parametrize("persist", [True, False], ids=["persisted", "unpersisted"])
@pytest.mark.parametrize("kind", ["steer", "interrupt"])
async def test_control_during_final_store_write_is_rejected(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, persist: bool, kind: Any
) -> None:
    server.script = [Reply(text="Done.")]
    held_call = HeldCall(monkeypatch, "append", of_type("run.completed"))
    running = await harness.begin(harness.spec(server, persist=persist))
    await held_call.wait()
    control = asyncio.create_task(harness.engine.control(running.run_id, Control(kind, {"text": "and tea"})))
    await idle()
    held_call.go.set()
    run = await running.end()
    assert await control == "not_active"
    assert run.result["completed"] is True
    assert (run.final["type"], run.result["pending_steer"]) == ("run.completed", None)
    assert "control.received" not in run.types


async def test_reader_joining_during_final_store_write_reads_to_end(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script = [Reply(text="Done.")]
    held_call = HeldCall(monkeypatch, "append", of_type("run.completed"))
    running = await harness.begin(harness.spec(server, persist=True))
    await held_call.wait()
    late = following(harness, running.run_id)
    await idle()
    held_call.go.set()
    run = await running.end()
    assert await ending(late) == run.events


async def test_every_accepted_steer_is_applied_or_returned(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = AsyncRuns.append

    async def slowly(runs: AsyncRuns, *args: Any, **fields: Any) -> None:
        await idle()
        await original(runs, *args, **fields)
        await idle()

    monkeypatch.setattr(AsyncRuns, "append", slowly)
    server.repeat, server.script = True, [Reply(text="Done.", continues=False)]
    for _ in range(20):
        running = await harness.begin(harness.spec(server, persist=True))
        answers: dict[str, str] = {}

        async def insist(name: str, running: Any = running, results: dict[str, str] = answers) -> None:
            number = 0
            while "not_active" not in results.values():
                number += 1
                results[f"{name}{number}"] = await running.control("steer", text=f"{name}{number}")
                await idle()

        await running.wait_for("model.started")
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(insist(name) for name in "abc"))
        run = await running.end()
        applied = {text for text, answer in answers.items() if answer == "applied"}
        assert set(answers.values()) <= {"applied", "not_active"}
        assert set((run.result["pending_steer"] or "").split()) == applied
        assert set((run.final["pending_steer"] or "").split()) == applied


async def test_subscribe_from_last_seq_ends_while_run_is_released(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script = [Reply(text="Done.")]
    go = asyncio.Event()
    original = SessionLeases.release

    async def release(leases: SessionLeases, lease: Lease) -> None:
        await go.wait()
        await original(leases, lease)

    monkeypatch.setattr(SessionLeases, "release", release)
    running = await harness.begin(harness.spec(server, persist=True))
    last = await running.wait_for("run.completed")
    tail = following(harness, running.run_id, last["seq"])
    await idle()
    go.set()
    assert await ending(tail) == []
    await running.end()


# ---- runs that end without a last event


class Thief:
    """Another process, to which a session falls although this one holds it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._held: dict[str, tuple[Any, int]] = {}
        original = AsyncStore.begin

        async def begin(store: AsyncStore, *args: Any, **fields: Any) -> OpenedSession | None:
            result = await original(store, *args, **fields)
            if result is not None:
                self._held[f"session:{result.session_id}"] = (store.leases, result.token)
            return result

        patch.setattr(AsyncStore, "begin", begin)
        patch.setattr(leases_module, "LEASE_RENEW_S", 0.02)

    async def take(self, session_id: str) -> None:
        name = f"session:{session_id}"
        leases, token = self._held[name]
        await leases.release(name, token)
        assert await leases.acquire(name, "another process", 3600.0) is not None


def endless() -> Reply:
    """An answer that is not over when a test that waits for it has failed."""
    return Reply(text=["a"] * 5_000, gap_s=0.02)


async def lose_session(harness: Harness, server: ModelServer, patch: pytest.MonkeyPatch) -> tuple[str, list[Json]]:
    """A run whose session is taken away in the middle of its answer, with what its reader saw."""
    thief = Thief(patch)
    server.script = [endless()]
    live = await harness.engine.start(harness.spec(server, persist=True, session_id=SESSION))
    assert live.task is not None
    reader = following(harness, live.spec.run_id)
    await server.until(lambda: server.open_streams == 1)
    await thief.take(SESSION)
    events = await ending(reader)
    await asyncio.wait([live.task], timeout=DEADLINE_S)
    assert live.task.done()
    return live.spec.run_id, events


async def test_reader_ends_when_run_loses_session_lease(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, events = await lose_session(harness, server, monkeypatch)
    assert events[0]["type"] == "run.started"
    assert {event["type"] for event in events}.isdisjoint(FINAL)
    await nothing_left(server)


async def test_reader_after_lost_lease_follows_new_holder(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, _ = await lose_session(harness, server, monkeypatch)
    monkeypatch.setattr(log_module, "STORE_POLL_S", 0.02)
    late = following(harness, run_id)
    server.script = [Reply(text="a" * 5_000)]
    await harness.app.store.leases.blocking.engine.submit_write(lambda tx: tx.execute("DELETE FROM leases"))
    assert await harness.engine.resume_all() == [run_id]
    events = await ending(late)
    assert (events[0]["type"], events[-1]["type"]) == ("run.started", "run.completed")


@pytest.mark.parametrize("error", [StoreError, OSError], ids=lambda error: error.__name__)
async def test_readers_end_when_store_breaks(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    go_on = hold_answers(monkeypatch)
    server.script = [Reply(text=["Once ", "upon"], gap_s=1)]
    running = await harness.engine.start(harness.spec(server, persist=True, session_id=SESSION))
    assert running.task is not None
    early = following(harness, running.spec.run_id)
    await server.until(lambda: server.open_streams == 1)

    async def broken(*_: Any, **__: Any) -> None:
        raise error("the disk is full")

    with monkeypatch.context() as breaking:
        breaking.setattr(AsyncRuns, "append", broken)
        go_on.set()
        await ending(early)
        await ending(running.task)


async def test_session_is_released_after_store_failure(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()

    async def answer(_: Request) -> Reply:
        await go_on.wait()
        return Reply(text="Done.", continues=False)

    server.handler = answer
    first = await harness.engine.start(harness.spec(server, persist=True, session_id=SESSION))
    assert first.task is not None
    await server.until(lambda: server.open_streams == 1)

    async def broken(*_: Any, **__: Any) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as breaking:
        breaking.setattr(AsyncRuns, "append", broken)
        go_on.set()
        await ending(first.task)
    run = await harness.run(server, persist=True, session_id=SESSION)
    assert run.result["completed"] is True
