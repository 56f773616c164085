"""Logs that several processes read and one writes, over NATS: the second reads what the first has shown, wherever it is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent.harness import joined
from hermes.bus.nats_bus import NatsBus
from hermes.bus.nats_connection import NatsConnection
from hermes.core.events import Event
from hermes.core.ids import random_hex
from hermes.core.limits import RESUME_SEQ_STEP
from hermes.core.spec import RunSpec
from hermes.guards.secrets import Secrets
from hermes.runs.log import RunLog
from hermes.runs.writer import RunWriter
from hermes.store import runs as stored_runs
from hermes.store.base import Partial, Row, StoreUnreachable
from hermes.store.stores import AsyncRuns, AsyncStore, Store
from support.nats_server import NatsServer, nats_server
from support.waiting import DEADLINE_S, idle, until


class Replica:
    def __init__(self, url: str, namespace: str, folder: Path, store: Store) -> None:
        self.connection = NatsConnection(url, namespace)
        self.bus = NatsBus(self.connection)
        self.log = RunLog(self.bus, window_s=0.0, journal=folder)
        self.store = AsyncStore(store)

    async def start(self) -> Replica:
        await self.connection.connect()
        self.bus.start()
        return self

    async def write(self, spec: RunSpec) -> RunWriter:
        writer = self.log.open(spec.run_id, self.store.runs, secrets=Secrets())
        await self.store.runs.create(spec)
        started = writer.event("run.started", model="m", provider="p")
        await writer.append(started, session={"id": spec.session_id, "source": "cli"})
        return writer

    async def read(self, run_id: str, into: list[Event], after: int = 0) -> None:
        async for event in self.log.subscribe(run_id, self.store.runs, after):
            into.append(event)  # noqa: PERF401  (others look at it meanwhile)

    async def sent(self, writer: RunWriter) -> None:
        """Wait until the stream has what was written; it gets it a moment after its readers."""
        await idle()
        await until(lambda: self.bus.recent(writer.run_id, writer.last_seq - 1))

    async def stop(self) -> None:
        self.log.shut()
        await self.bus.stop()
        await self.connection.close()


@pytest.fixture
def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    with nats_server(tmp_path / "nats") as server:
        yield server  # type: ignore[misc]


@pytest.fixture(params=["shared", "apart"])
async def two(
    request: pytest.FixtureRequest, tmp_path: Path, nats: NatsServer
) -> AsyncIterator[tuple[Replica, Replica]]:
    """Two replicas on one database; their journals are in one folder, or each has its own."""
    store, namespace = Store(tmp_path / "state.db"), f"t{random_hex(6)}"
    folders = [tmp_path / "journal", tmp_path / ("journal" if request.param == "shared" else "other")]
    replicas = [await Replica(nats.url, namespace, folder, store).start() for folder in folders]
    yield replicas[0], replicas[1]
    for replica in replicas:
        await replica.stop()
    store.close()


async def finish(writer: RunWriter, spec: RunSpec) -> None:
    await writer.complete("m1", Row(spec.session_id, "assistant", "", run_id=spec.run_id))
    await writer.emit("run.completed", usage={}, row=None)


@pytest.mark.parametrize("begins", ["before", "amid", "after"])
async def test_reader_of_other_replica_sees_same_log(two: tuple[Replica, Replica], begins: str) -> None:
    first, other = two
    spec = RunSpec("hi", session_id="s")
    writer = await first.write(spec)
    observed: dict[str, list[Event]] = {"one": [], "other": []}

    def begin() -> list[asyncio.Task[None]]:
        sides = zip((first, other), observed.values(), strict=True)
        return [asyncio.create_task(side.read(spec.run_id, into)) for side, into in sides]

    reading = begin() if begins == "before" else []
    if begins == "before":
        await until(lambda: all(observed.values()))
    for number in range(40):
        writer.text("m1", f"word {number} ")
        await idle()
        if begins == "amid" and number == 20:
            reading = begin()
            await until(lambda: all(observed.values()))
    await finish(writer, spec)
    reading = reading or begin()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*reading)
    assert [event.as_dict() for event in observed["one"]] == [event.as_dict() for event in observed["other"]]
    assert sum(event.type == "text.delta" for event in observed["other"]) == 40 and observed["other"][-1].final


async def test_late_reader_gets_earlier_text(two: tuple[Replica, Replica]) -> None:
    first, other = two
    spec, observed = RunSpec("hi", session_id="s"), list[Event]()
    writer = await first.write(spec)
    writer.text("m1", "a ")
    await first.sent(writer)
    # Nothing follows for long, as when a model thinks or a tool works.
    reading = asyncio.create_task(other.read(spec.run_id, observed))
    await until(lambda: any(event.type == "text.delta" for event in observed))
    reading.cancel()


async def test_reader_catches_up_after_nats_was_away(two: tuple[Replica, Replica], nats: NatsServer) -> None:
    first, other = two
    spec, observed = RunSpec("hi", session_id="s"), list[Event]()
    writer = await first.write(spec)
    reading = asyncio.create_task(other.read(spec.run_id, observed))
    writer.text("m1", "a ")
    await until(lambda: any(event.type == "text.delta" for event in observed))
    nats.stop(forget=True)
    await until(lambda: not first.connection.connected and not other.connection.connected)
    writer.text("m1", "b ")
    await idle()
    nats.start()
    await until(lambda: first.connection.connected and other.connection.connected)
    writer.text("m1", "c ")
    await finish(writer, spec)
    async with asyncio.timeout(DEADLINE_S):
        await reading
    whole: list[Event] = []
    await first.read(spec.run_id, whole)
    assert [event.as_dict() for event in observed] == [event.as_dict() for event in whole]


async def test_text_of_stopped_writer_is_moved_to_store(two: tuple[Replica, Replica]) -> None:
    """From its journal where that is shared, and otherwise from the stream."""
    first, other = two
    spec = RunSpec("hi", session_id="s")
    writer = await first.write(spec)
    for text in ("a ", "b ", "c "):
        writer.text("m1", text)
        writer.reasoning("m1", text, "text")
        writer.output("call-1", text)
    await first.sent(writer)
    assert await other.store.runs.partials(spec.run_id) == []
    record = await other.store.runs.get(spec.run_id)
    assert record is not None
    await other.log.absorb_from(spec.run_id, other.store.runs, record.holder)
    partials = {partial.stream_id: partial for partial in await other.store.runs.partials(spec.run_id)}
    assert {partial.text for partial in partials.values()} == {"a b c "} and len(partials) == 3
    assert partials["m1"].last_seq == writer.last_seq - 2
    await other.log.absorb_from(spec.run_id, other.store.runs, record.holder)
    assert {partial.stream_id: partial for partial in await other.store.runs.partials(spec.run_id)} == partials


async def test_journal_of_process_that_lost_the_run_is_not_shown(two: tuple[Replica, Replica]) -> None:
    first, other = two
    spec = RunSpec("hi", session_id="s")
    writer = await first.write(spec)
    writer.text("m1", "stale ")
    await idle()
    other.store.blocking.engine.write(
        lambda tx: tx.execute("UPDATE runs SET holder = 'elsewhere:1:1.00' WHERE run_id = ?", (spec.run_id,))
    )
    page, _ = await other.log._page(spec.run_id, other.store.runs, 0)
    assert [event.type for event in page] == ["run.started"]


@pytest.mark.parametrize(("adopted", "texts"), [(False, ["shown "]), (True, [])])
async def test_journal_left_behind_is_kept_for_whoever_is_about_to_go_on(
    two: tuple[Replica, Replica], adopted: bool, texts: list[str]
) -> None:
    """Whoever moves a journal moves what others need of it, who may hold the lease and have read nothing yet."""
    first, _ = two
    spec, elsewhere = RunSpec("hi", session_id="s"), "elsewhere:1:1.00"
    writer = await first.write(spec)
    writer.text("m1", "shown ")
    await idle()
    first.log.shut()
    assert await first.store.leases.acquire("session:s", elsewhere, 3600) is not None
    if adopted:
        sql = "UPDATE runs SET holder = ? WHERE run_id = ?"
        first.store.blocking.engine.write(lambda tx: tx.execute(sql, (elsewhere, spec.run_id)))
    await first.log.absorb(first.store.runs)
    assert [partial.text for partial in await first.store.runs.partials(spec.run_id)] == texts


async def test_paused_writer_publishes_nothing_until_resumed(two: tuple[Replica, Replica]) -> None:
    first, _ = two
    spec = RunSpec("hi", session_id="s")
    writer = await first.write(spec)
    reader = first.bus.subscribe(spec.run_id)
    writer.pause()
    writer.text("m1", "late ")
    committing = asyncio.create_task(writer.emit("notice", level="warn", code="c", message="m"))
    await first.write(RunSpec("hi", session_id="another"))  # what is committed behind it is stored, and published
    await idle()
    assert not reader._events and not committing.done()
    writer.go_on()
    await asyncio.wait_for(committing, DEADLINE_S)
    assert [event.type for event in await reader.take()] == ["text.delta", "notice"]


async def test_writer_that_lost_its_run_gives_nothing_out(two: tuple[Replica, Replica]) -> None:
    first, _ = two
    spec = RunSpec("hi", session_id="s")
    writer = await first.write(spec)
    reader = first.bus.subscribe(spec.run_id)
    writer.pause()
    writer.text("m1", "late ")
    committing = asyncio.create_task(writer.emit("notice", level="warn", code="c", message="m"))
    await idle()
    writer.go_on(lost=True)
    with pytest.raises(Exception, match="lost its session"):
        await asyncio.wait_for(committing, DEADLINE_S)
    await writer.close()
    await idle()
    assert not reader._events


async def test_reader_misses_nothing_of_a_run_that_its_replica_failed_to_take_over(
    two: tuple[Replica, Replica],
) -> None:
    """Both take the run up at the same number, and the one that a reader is at loses its session before it writes."""
    first, other = two
    spec, observed = RunSpec("hi", session_id="s"), list[Event]()
    former = await first.write(spec)
    reading = asyncio.create_task(other.read(spec.run_id, observed))
    # It has caught up, and waits for what comes.
    await joined(other.log, spec.run_id)
    resumed_at = {"secrets": Secrets(), "last_seq": RESUME_SEQ_STEP - 1, "state": former.state}
    losing = other.log.open(spec.run_id, other.store.runs, **resumed_at)
    former.text("m1", "a ")
    await until(lambda: len(observed) == 2)
    await first.log.close(former)
    writer = first.log.open(spec.run_id, first.store.runs, **resumed_at)
    for code in ("a", "b", "c"):
        await writer.emit("notice", level="warn", code=code, message="m")
        await first.sent(writer)
    await other.log.close(losing)
    await writer.emit("run.completed", usage={}, row=None)
    async with asyncio.timeout(DEADLINE_S):
        await reading
    assert [event.seq for event in observed] == [1, 2, *range(RESUME_SEQ_STEP, RESUME_SEQ_STEP + 4)]


async def test_readers_see_event_whose_commit_was_assumed_failed(
    two: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RunSpec("hi", session_id="s")
    writer = await two[0].write(spec)
    observed: list[list[Event]] = [[], []]
    reading = [asyncio.create_task(side.read(spec.run_id, into)) for side, into in zip(two, observed, strict=True)]
    await writer.emit("notice", level="warn", code="a", message="m")
    await until(lambda: [len(events) for events in observed] == [2, 2])
    append = AsyncRuns.append

    async def append_without_answer(runs: AsyncRuns, *args: Any, **options: Any) -> None:
        await append(runs, *args, **options)
        raise StoreUnreachable("whether the change was made is not known")

    with monkeypatch.context() as patch, pytest.raises(StoreUnreachable):
        patch.setattr(AsyncRuns, "append", append_without_answer)
        await writer.emit("notice", level="warn", code="b", message="m")
    await writer.emit("notice", level="warn", code="c", message="m")
    await writer.emit("run.completed", usage={}, row=None)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*reading)
    assert [[event.seq for event in events] for events in observed] == [[1, 2, 3, 4, 5]] * 2


async def test_reader_misses_no_event_committed_while_it_reads_the_store(
    two: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another reader of its replica reads on in the journal meanwhile: text behind the event is not for this one yet."""
    first, other = two
    spec, observed, early = RunSpec("hi", session_id="s"), list[Event](), list[Event]()
    writer = await first.write(spec)
    writer.text("m1", "a ")
    await first.sent(writer)
    started, go_on = threading.Event(), threading.Event()
    partials = stored_runs._partials

    def held_partials(*args: Any) -> list[Partial]:
        """The first call waits; the events have been read by then."""
        if not started.is_set():
            started.set()
            go_on.wait(DEADLINE_S)
        return partials(*args)

    monkeypatch.setattr(stored_runs, "_partials", held_partials)
    reading = [asyncio.create_task(other.read(spec.run_id, observed))]
    await until(started.is_set)
    await writer.emit("notice", level="warn", code="a", message="m")
    writer.text("m1", "b ")
    await first.sent(writer)
    reading.append(asyncio.create_task(other.read(spec.run_id, early)))
    await until(lambda: len(early) == 4)
    go_on.set()
    await finish(writer, spec)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*reading)
    assert [event.as_dict() for event in observed] == [event.as_dict() for event in early]
