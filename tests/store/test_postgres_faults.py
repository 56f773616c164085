"""The PostgreSQL engine when the server, the network or its callers misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psycopg
import pytest

from hermes.cluster.engines import PostgresEngine as Server
from hermes.core import limits
from hermes.store.base import StoreBusy, StoreError, StoreTimeout, StoreUnreachable
from hermes.store.engine import Conflict, Engine, TimeUp, Tx
from hermes.store.postgres import engine as engine_module
from hermes.store.postgres.engine import PostgresEngine
from hermes.store.stores import Store, open_store
from support.engines import execute
from support.waiting import DEADLINE_S, until, until_blocking

from .conftest import create_conversation


class Gate:
    """Work that waits in the server until the gate is opened."""

    def __init__(self, db: psycopg.Connection[Any]) -> None:
        self._db, self._number = db, int.from_bytes(os.urandom(4)) >> 1
        db.execute("SELECT pg_advisory_lock(0, %s)", (self._number,))

    def __call__(self, tx: Tx) -> None:
        tx.value("SELECT pg_advisory_xact_lock_shared(0, ?)", (self._number,))

    @property
    def waiting(self) -> int:
        """How many wait."""
        query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted"
        row = self._db.execute(query, (self._number,)).fetchone()
        assert row is not None
        return int(row[0])


@contextmanager
def closed_gate(engine: Engine) -> Iterator[Gate]:
    """It is opened afterwards."""
    assert isinstance(engine, PostgresEngine)
    with psycopg.connect(engine.url, autocommit=True) as db:
        yield Gate(db)


@pytest.fixture
def engine(postgres_store: Store) -> PostgresEngine:
    assert isinstance(postgres_store.engine, PostgresEngine)
    return postgres_store.engine


def note(key: str, value: str = "") -> Callable[[Tx], None]:
    return lambda tx: tx.execute("INSERT INTO state_meta VALUES (?, ?)", (key, value))


def value(key: str) -> Callable[[Tx], Any]:
    return lambda tx: tx.value("SELECT value FROM state_meta WHERE key = ?", (key,))


def connection_count(engine: PostgresEngine) -> int:
    with psycopg.connect(engine.url) as db:
        row = db.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND application_name = 'hermes'"
        ).fetchone()
        assert row is not None
        return int(row[0])


# --- the server goes away -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["restart", "kill"])
def test_server_restart_neither_loses_nor_repeats_events(
    own_postgres: Server, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads and a loop append rows without a key; what was acknowledged is there, and nothing twice."""
    for name in ("PG_AWAY_S_MAX", "BUSY_S_MAX"):  # nobody gives up, however long the server takes to start
        monkeypatch.setattr(engine_module, name, DEADLINE_S)
    stop, acknowledged, lock = threading.Event(), set[str](), threading.Lock()

    def append(name: str) -> Callable[[Tx], None]:
        def work(tx: Tx) -> None:
            tx.value("SELECT count(*) FROM conversation_objects")
            tx.execute(
                "INSERT INTO conversation_items (conversation_id, response_id, json) VALUES ('c', ?, '{}')", (name,)
            )

        return work

    with closing(open_store(own_postgres.url)) as store:
        engine = store.engine
        engine.write(lambda tx: tx.execute("INSERT INTO conversation_objects VALUES ('c', 'o', 1, '{}')"))

        def write_in_thread(number: int) -> None:
            for index in range(100_000):
                if stop.is_set():
                    return
                engine.write(append(name := f"t{number}-{index}"))
                with lock:
                    acknowledged.add(name)

        async def write_on_loop(number: int) -> None:
            for index in range(100_000):
                if stop.is_set():
                    return
                await engine.submit_write(append(name := f"l{number}-{index}"))
                assert await engine.read_soon(lambda tx: tx.value("SELECT 1")) == 1
                with lock:
                    acknowledged.add(name)

        async def on_loop() -> None:
            await asyncio.gather(*(write_on_loop(number) for number in range(4)))

        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(write_in_thread, number) for number in range(3)]
            jobs.append(pool.submit(lambda: asyncio.run(on_loop())))
            try:
                for _ in range(3):
                    before = len(acknowledged)
                    if fault == "kill":
                        own_postgres.kill()
                        own_postgres.start()
                    else:
                        own_postgres.restart()
                    until_blocking(
                        lambda before=before: len(acknowledged) > before + 20 or any(job.done() for job in jobs)
                    )  # type: ignore[misc]
            finally:
                stop.set()
            for job in jobs:
                job.result(DEADLINE_S)
        names = engine.read(lambda tx: [row[0] for row in tx.rows("SELECT response_id FROM conversation_items")])
    assert len(names) == len(set(names)), "a row was written twice"
    assert acknowledged == set(names)


def test_idle_connections_of_a_restarted_server_are_replaced(own_postgres: Server) -> None:
    async def use(store: Store) -> None:
        engine = store.engine
        with closed_gate(engine) as gate:
            reads = [asyncio.create_task(engine.read_soon(gate)) for _ in range(5)]
            await until(lambda: gate.waiting == 5)
        await asyncio.gather(*reads)
        await asyncio.to_thread(own_postgres.restart)
        assert await asyncio.gather(*(engine.read_soon(lambda tx: tx.value("SELECT 1")) for _ in range(5))) == [1] * 5

    with closing(open_store(own_postgres.url)) as store:
        asyncio.run(use(store))


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """The server's processes exist and do nothing: its sockets accept, and nobody answers."""
    pids = [server.state.pid]
    for pid in pids:  # it grows on the way
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_server_that_hangs_is_given_up(own_postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_store(own_postgres.url)) as store:
        engine = store.engine

        async def use() -> None:
            await engine.submit_write(note("before"))
            with stopped(own_postgres), monkeypatch.context() as patch:
                patch.setattr(limits, "PG_ANSWER_S_MAX", 0.5)
                patch.setattr(engine_module, "BUSY_S_MAX", 0.5)
                patch.setattr(engine_module, "PG_CHECK_S_MAX", 0.5)
                for operation in (
                    engine.check(),
                    engine.read_soon(value("before")),
                    engine.submit_write(note("during")),
                    asyncio.to_thread(engine.read, value("before")),
                ):
                    with pytest.raises(StoreUnreachable):
                        await operation
            assert await engine.read_soon(value("before")) == ""
            monkeypatch.setattr(engine_module, "PG_CHECK_S_MAX", DEADLINE_S)
            await engine.check()

        engine.read(value("before"))
        asyncio.run(use())


def test_slow_reads_of_an_unreachable_server_are_reported(
    own_postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_store(own_postgres.url)) as store:

        async def use() -> list[Any]:
            await store.engine.read_soon(value("x"), slow=True)
            await asyncio.to_thread(own_postgres.kill)
            # Enough to be refused once.
            monkeypatch.setattr(engine_module, "SLOW_READ_S_MAX", 3.0)
            # One of them has to wait for the others.
            reads = [store.engine.read_soon(value("x"), slow=True) for _ in range(limits.SLOW_READERS_MAX + 1)]
            failures = await asyncio.gather(*reads, return_exceptions=True)
            await asyncio.to_thread(own_postgres.start)
            await store.engine.read_soon(value("x"))
            failures.append((await asyncio.gather(store.engine.read_soon(sleep, slow=True), return_exceptions=True))[0])
            return failures

        def sleep(tx: Tx) -> None:
            tx.value("SELECT pg_sleep(20)")

        *failures, slow = asyncio.run(use())
    assert [type(failure) for failure in failures] == [StoreUnreachable] * len(failures)
    assert isinstance(slow, StoreTimeout) and "searched" in slow.message


def test_threads_give_up_a_server_before_loops_do(own_postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PG_AWAY_S_MAX", 0.5)
    monkeypatch.setattr(engine_module, "BUSY_S_MAX", DEADLINE_S)
    with closing(open_store(own_postgres.url)) as store:
        engine = store.engine

        async def use() -> None:
            await engine.submit_write(note("before"))
            await asyncio.to_thread(own_postgres.kill)
            waiting = engine.submit_write(note("during"))
            with pytest.raises(StoreUnreachable):
                await asyncio.to_thread(engine.write, note("given up"))
            assert not waiting.done()
            await asyncio.to_thread(own_postgres.start)
            await waiting
            assert await engine.read_soon(value("during")) == ""
            assert await engine.read_soon(value("given up")) is None

        asyncio.run(use())


# --- statements that do not come through -----------------------------------------------------------------------------


def test_deadlock_is_retried(engine: PostgresEngine) -> None:
    for key in ("a", "b"):
        engine.write(note(key, "0"))
    meet = threading.Barrier(2)
    runs: list[str] = []

    def change(first: str, second: str) -> None:
        def work(tx: Tx) -> None:
            runs.append(first)
            add = "UPDATE state_meta SET value = (value::int + 1)::text WHERE key = ?"
            tx.change(add, (first,))
            with suppress(threading.BrokenBarrierError):
                meet.wait(DEADLINE_S)
            meet.abort()
            tx.change(add, (second,))

        engine.write(work)

    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(change, "a", "b"), pool.submit(change, "b", "a")]:
            job.result(DEADLINE_S)
    assert (engine.read(value("a")), engine.read(value("b"))) == ("2", "2")
    assert len(runs) > 2


def test_statement_timeout_ends_the_statement_and_not_the_connection(engine: PostgresEngine) -> None:
    def slow(tx: Tx) -> None:
        tx.execute("SET LOCAL statement_timeout = 50")
        tx.value("SELECT pg_sleep(30)")

    with pytest.raises(StoreTimeout):
        engine.read(slow)
    before = connection_count(engine)
    assert engine.read(lambda tx: tx.value("SELECT 1")) == 1
    assert connection_count(engine) == before


@pytest.mark.parametrize("nested", [False, True])
def test_statement_that_was_not_prepared_behind_a_failed_one(engine: PostgresEngine, nested: bool) -> None:
    """psycopg prepares a statement when it is used for the sixth time."""
    engine.write(note("taken"))

    def fail(tx: Tx) -> None:
        tx.execute("SELECT 1 / 0")
        value("taken")(tx)

    def fail_and_go_on(tx: Tx) -> Any:
        with suppress(psycopg.DataError):
            tx.nested(fail)
        return value("taken")(tx)

    for uses in (0, 4, 5):
        for _ in range(uses):
            assert engine.read(value("taken")) == ""
        if nested:
            assert engine.write(fail_and_go_on) == ""
        else:
            with pytest.raises(StoreError, match="division"):
                engine.write(fail)
        assert engine.read(value("taken")) == ""


def test_prepared_statement_survives_a_changed_table(engine: PostgresEngine) -> None:
    everything = "SELECT * FROM state_meta"
    for _ in range(8):
        engine.read(lambda tx: tx.rows(everything))
    execute(engine.url, "ALTER TABLE hermes.state_meta ADD COLUMN more text")
    try:
        assert engine.read(lambda tx: tx.rows(everything)) == []
    finally:
        execute(engine.url, "ALTER TABLE hermes.state_meta DROP COLUMN more")


def test_endless_conflict_is_reported(engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PG_RETRY_WAIT_S_MAX", 0.01)
    runs = 0

    def work(tx: Tx) -> None:
        nonlocal runs
        runs += 1
        raise Conflict("again")

    with pytest.raises(StoreBusy):
        engine.write(work)
    assert runs == limits.PG_CONFLICTS_MAX


async def test_cancelled_wait_does_not_cancel_the_write(engine: PostgresEngine) -> None:
    with closed_gate(engine) as gate:

        def work(tx: Tx) -> None:
            gate(tx)
            note("written")(tx)

        async def wait() -> None:
            await engine.submit_write(work)

        task = asyncio.create_task(wait())
        await until(lambda: gate.waiting == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: engine.read_soon(value("written")), lambda text: text is not None)


async def test_connection_of_a_cancelled_read_is_not_used_again(engine: PostgresEngine) -> None:
    for seconds in (0.0, 0.001, 0.01, 0.05):
        task = asyncio.create_task(engine.read_soon(lambda tx: tx.value("SELECT pg_sleep(60), 'wrong'")))
        await asyncio.sleep(seconds)  # it may have come to any point
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        answers = await asyncio.gather(
            *(engine.read_soon(lambda tx, n=n: tx.value("SELECT ?::int", (n,))) for n in range(8))  # type: ignore[misc]
        )
        assert answers == list(range(8))


async def test_loop_closed_during_writes_leaves_no_partial_write(engine: PostgresEngine) -> None:
    def run() -> None:
        async def main() -> None:
            for index in range(20):
                engine.submit_write(lambda tx, index=index: [note(f"{index}-{part}")(tx) for part in "ab"])  # type: ignore[misc]
            await asyncio.sleep(0.005)  # they may have come to any point

        asyncio.run(main())

    await asyncio.to_thread(run)
    keys = await engine.read_soon(lambda tx: [row[0] for row in tx.rows("SELECT key FROM state_meta ORDER BY key")])
    assert len(keys) % 2 == 0
    assert engine.read(lambda tx: tx.value("SELECT 1")) == 1


async def test_exhausted_pool_times_out_with_an_error(engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = [engine.read_soon(lambda tx: tx.value("SELECT pg_sleep(0.1)")) for _ in range(2 * limits.PG_POOL_MAX)]
    await asyncio.gather(*waits)
    with closed_gate(engine) as gate, monkeypatch.context() as patch:
        tasks = [asyncio.create_task(engine.read_soon(gate)) for _ in range(limits.PG_POOL_MAX)]
        await until(lambda: gate.waiting == limits.PG_POOL_MAX)  # each has its connection
        patch.setattr(engine_module, "BUSY_S_MAX", 0.1)
        with pytest.raises(StoreBusy, match="in use"):
            await engine.read_soon(lambda tx: tx.value("SELECT 1"))
    await asyncio.gather(*tasks)
    assert await engine.read_soon(lambda tx: tx.value("SELECT 1")) == 1


def test_exhausted_threads_are_reported(engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    meet, end = threading.Barrier(limits.PG_THREAD_POOL_MAX + 1), threading.Event()

    def hold(tx: Tx) -> None:
        meet.wait(DEADLINE_S)
        end.wait(DEADLINE_S)

    with ThreadPoolExecutor(limits.PG_THREAD_POOL_MAX) as pool:
        jobs = [pool.submit(engine.read, hold) for _ in range(limits.PG_THREAD_POOL_MAX)]
        meet.wait(DEADLINE_S)
        with monkeypatch.context() as patch, pytest.raises(StoreBusy, match="in use"):
            patch.setattr(engine_module, "BUSY_S_MAX", 0.1)
            engine.read(value("x"))
        end.set()
        for job in jobs:
            job.result(DEADLINE_S)
    engine.read(value("x"))


def test_many_loops_one_after_the_other_leave_no_connections(engine: PostgresEngine) -> None:
    async def use() -> Any:
        return await asyncio.gather(*(engine.read_soon(lambda tx: tx.value("SELECT 1")) for _ in range(3)))

    engine.read(lambda tx: tx.value("SELECT 1"))
    before = connection_count(engine)
    for _ in range(8):
        assert asyncio.run(use()) == [1, 1, 1]
    until_blocking(lambda: connection_count(engine) <= before)


def test_loops_side_by_side_have_connections_of_their_own(engine: PostgresEngine) -> None:
    async def use(number: int) -> list[Any]:
        return [await engine.read_soon(lambda tx: tx.value("SELECT ?::int", (number,))) for _ in range(30)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda number: asyncio.run(use(number)), range(4)))
    assert results == [[number] * 30 for number in range(4)]


def test_forked_process_is_refused_and_the_parent_continues(engine: PostgresEngine) -> None:
    engine.read(value("x"))
    receive, send = Pipe(duplex=False)
    if (pid := os.fork()) == 0:
        try:
            engine.read(value("x"))
        except StoreError as error:
            send.send(str(error))
        except BaseException as error:
            send.send(repr(error))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert "forked" in receive.recv()
    assert engine.read(lambda tx: tx.value("SELECT 1")) == 1


async def test_closing_while_in_use_lets_the_transaction_end(postgres_schema: str) -> None:
    store = open_store(postgres_schema)
    engine = store.engine
    with closed_gate(engine) as gate:
        running = asyncio.create_task(engine.read_soon(gate))
        in_thread = asyncio.create_task(asyncio.to_thread(engine.read, gate))
        await until(lambda: gate.waiting == 2)
        store.close()
    await running
    await in_thread
    with pytest.raises(StoreError, match="closed"):
        await engine.read_soon(lambda tx: tx.value("SELECT 1"))
    with pytest.raises(StoreError, match="closed"):
        engine.write(note("x"))


# --- what is sent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a\x00b", "a\ud800b", "\udfff", "\x00", "a\x00\ud800"])
def test_text_that_is_none_to_postgresql_is_replaced(engine: PostgresEngine, text: str) -> None:
    replaced = "".join("\ufffd" if char == "\x00" or "\ud800" <= char <= "\udfff" else char for char in text)
    engine.write(note("one", text))
    engine.write(lambda tx: tx.many("INSERT INTO state_meta VALUES (?, ?)", [(f"many{text}", text), ("other", "x")]))
    assert engine.write(lambda tx: tx.change("UPDATE state_meta SET value = ? WHERE key = 'other'", (text,))) == 1
    read = "SELECT value FROM state_meta WHERE key = ? OR value = ? ORDER BY key"
    assert [row[0] for row in engine.read(lambda tx: tx.rows(read, (f"many{text}", "")))] == [replaced]
    assert engine.read(value("one")) == replaced == engine.read(value("other"))


async def test_replaced_text_on_a_loop(engine: PostgresEngine) -> None:
    await engine.submit_write(note("a\x00", "b\ud800"))
    assert await engine.read_soon(value("a\x00")) == "b\ufffd"


def test_replaced_text_in_every_part_of_a_message(postgres_store: Store) -> None:
    bad = "x\x00\ud800y"
    create_conversation(postgres_store.sessions, "s", bad, bad, title=None, model=bad, instructions=bad, user_id=bad)
    call = {"id": bad, "type": "function", "function": {"name": bad, "arguments": bad}}
    postgres_store.sessions.append_message("s", "assistant", [{"type": "text", "text": bad}], tool_calls=[call])
    postgres_store.sessions.append_message("s", "tool", bad, tool_call_id=bad, tool_name=bad)
    stored = repr(postgres_store.sessions.get_messages("s")) + repr(postgres_store.sessions.get_session("s"))
    assert "\\x00" not in stored and "\\ud800" not in stored
    assert postgres_store.sessions.search_messages(bad) is not None


# --- parts of transactions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, GeneratorExit, StopIteration, KeyboardInterrupt, psycopg.DataError])
def test_failed_part_is_undone_alone(engine: PostgresEngine, error: type[BaseException]) -> None:
    effects: list[str] = []

    def part(tx: Tx) -> None:
        note("part")(tx)
        tx.after(lambda: effects.append("part"))
        if error is psycopg.DataError:
            tx.value("SELECT 1 / 0")
        raise error

    def work(tx: Tx) -> str:
        note("first")(tx)
        tx.after(lambda: effects.append("work"))
        with pytest.raises(error):
            tx.nested(part)
        note("last")(tx)
        return "done"

    assert engine.write(work) == "done"
    assert [engine.read(value(key)) for key in ("first", "part", "last")] == ["", None, ""]
    assert effects == ["work"]


ERRORS = [ValueError, GeneratorExit, StopIteration, StopAsyncIteration, KeyError]


def raising(error: type[BaseException]) -> Callable[[Tx], None]:
    def work(tx: Tx) -> None:
        note("x")(tx)
        tx.value("SELECT 1")
        raise error

    return work


@pytest.mark.parametrize("error", ERRORS)
def test_error_of_work_is_raised_and_undoes_it(engine: PostgresEngine, error: type[BaseException]) -> None:
    with pytest.raises(error):
        engine.write(raising(error))
    assert engine.read(value("x")) is None


@pytest.mark.parametrize("error", ERRORS)
async def test_error_of_work_on_a_loop_is_raised_and_undoes_it(
    engine: PostgresEngine, error: type[BaseException]
) -> None:
    # A coroutine cannot raise StopIteration: Python makes this of it.
    with pytest.raises(RuntimeError if error is StopIteration else error):
        await engine.submit_write(raising(error))
    assert await engine.read_soon(value("x")) is None


@pytest.mark.parametrize("end", [None, ValueError, "error", "timeout"])
def test_timed_part_leaves_the_transaction_usable(engine: PostgresEngine, end: Any) -> None:
    limit_s = 0.1 if end == "timeout" else DEADLINE_S

    def work(tx: Tx) -> str:
        raised, usual = "nothing", tx.value("SHOW statement_timeout")
        try:
            with tx.within(limit_s):
                tx.value("SELECT 1")
                if end == "timeout":
                    tx.value("SELECT pg_sleep(10)")
                elif end == "error":
                    tx.value("SELECT 1 / 0")
                elif end is not None:
                    raise end
        except TimeUp:
            raised = "timeout"
        except psycopg.DataError:
            raised = "error"
        except ValueError:
            raised = "ValueError"
        # The time of the part is not that of what follows.
        assert tx.value("SHOW statement_timeout") == usual
        return f"{raised} {tx.value('SELECT 2')}"

    expected = {None: "nothing", ValueError: "ValueError"}.get(end, end)
    assert engine.read(work) == f"{expected} 2"
    assert engine.write(work) == f"{expected} 2"


async def test_timed_part_on_a_loop(engine: PostgresEngine) -> None:
    def work(tx: Tx) -> int:
        for _ in range(3):
            with pytest.raises(TimeUp), tx.within(0.02):
                tx.value("SELECT pg_sleep(10)")
        return int(tx.value("SELECT 2"))

    assert await engine.read_soon(work) == 2


def test_part_within_a_part(engine: PostgresEngine) -> None:
    def inner(tx: Tx) -> None:
        note("inner")(tx)
        raise ValueError

    def outer(tx: Tx) -> None:
        note("outer")(tx)
        with pytest.raises(ValueError):
            tx.nested(inner)
        note("outer 2")(tx)

    def work(tx: Tx) -> None:
        tx.nested(outer)
        with pytest.raises(ValueError):
            tx.nested(inner)
        note("work")(tx)

    engine.write(work)
    keys = engine.read(lambda tx: [row[0] for row in tx.rows("SELECT key FROM state_meta ORDER BY key")])
    assert keys == ["outer", "outer 2", "work"]
