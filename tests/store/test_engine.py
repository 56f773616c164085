"""One engine behind every object on a file: shared, committed in groups, private, and never carried across a fork."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hermes.core import limits
from hermes.core.errors import ConfigError, HermesError
from hermes.core.limits import SLOW_READERS_MAX, SLOW_READERS_NICENESS
from hermes.store.base import LeaseLost, StoreBusy, StoreError, StoreTimeout
from hermes.store.sessions import SessionDB
from hermes.store.sqlite import connections
from hermes.store.sqlite import engine as engine_module
from hermes.store.stores import Async, open_store, store_at
from support.waiting import idle, until_blocking

from .tools import PATIENCE_S, Turn, at_once, contents, look, mode, raw, run, side, texts, umask, url


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "state.db"


@pytest.fixture
def db(path: Path) -> Iterator[SessionDB]:
    db = SessionDB(path)
    db.create_session("s", "cli")
    yield db
    db.close()


@pytest.fixture
def store(path: Path) -> Iterator[Any]:
    store = open_store(url(path))
    store.sessions.create_session("s", "cli")
    yield store
    store.close()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[Callable[[], None]]:
    """The file locked against writers by somebody else, until released."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield lambda: other.execute("ROLLBACK") and None


def descriptors(path: Path) -> int:
    """How often this process has the file open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}") == str(path)
    return count


# ---- one engine per file


def test_writes_are_visible_to_all_objects_on_same_file(db: SessionDB, path: Path) -> None:
    others = [SessionDB(path), SessionDB(str(path)), SessionDB(path.parent / ".." / path.parent.name / path.name)]
    db.append_message("s", "user", "hello")
    assert [texts(other, "s") for other in others] == [["hello"]] * 3
    for other in others:
        other.close()


def test_one_writer_and_four_reader_connections_per_file(path: Path) -> None:
    objects = [SessionDB(path) for _ in range(10)]
    link = path.with_name("link.db")
    link.symlink_to(path)
    objects += [SessionDB(link) for _ in range(5)]
    objects[0].create_session("s", "cli")
    at_once(len(objects), lambda number: objects[number].append_message("s", "user", str(number)))
    counts = at_once(len(objects), lambda number: len(objects[number].get_messages("s")))
    assert counts == [15] * 15
    assert 1 <= descriptors(path) <= 5
    for connection in objects:
        connection.close()
    assert descriptors(path) == 0


def test_objects_on_same_file_share_threads(path: Path) -> None:
    with contextlib.closing(SessionDB(path)) as first:
        first.create_session("s", "cli")
        at_once(8, lambda _: first.get_messages("s"))
        before = threading.active_count()
        others = [SessionDB(path) for _ in range(20)]
        for other in others:
            other.append_message("s", "user", "x")
            other.get_messages("s")
        assert threading.active_count() <= before + 4
        for other in others:
            other.close()


def test_closing_one_object_keeps_others_open(db: SessionDB, path: Path) -> None:
    other = SessionDB(path)
    other.close()
    other.close()
    db.append_message("s", "user", "still here")
    assert texts(db, "s") == ["still here"]


def test_closed_store_raises_store_error(path: Path) -> None:
    db = SessionDB(path)
    db.close()
    with pytest.raises(StoreError):
        db.get_session("s")
    with pytest.raises(StoreError):
        db.create_session("s", "cli")


def test_close_under_load_neither_hangs_nor_loses_writes(path: Path) -> None:
    db = SessionDB(path)
    db.create_session("s", "cli")
    written: list[int] = []
    enough = threading.Event()

    def write(number: int) -> None:
        while True:
            written.append(db.append_message("s", "user", str(number)))
            db.get_messages("s", limit=1)
            if len(written) > 50:
                enough.set()

    results = at_once(8, write, meanwhile=lambda: (enough.wait(PATIENCE_S), db.close())[1])
    assert {type(result) for result in results} == {StoreError}
    rows = {row for (row,) in look(path, "SELECT id FROM messages")}
    assert set(written) <= rows


def test_file_can_be_reopened_after_last_close(path: Path) -> None:
    for number in range(3):
        with contextlib.closing(SessionDB(path)) as db:
            db.create_session("s", "cli")
            db.append_message("s", "user", str(number))
    with contextlib.closing(SessionDB(path)) as db:
        assert texts(db, "s") == ["0", "1", "2"]


@pytest.mark.parametrize("turn", range(10))
def test_last_close_checkpoints_wal_into_single_file(path: Path, turn: int) -> None:
    db = SessionDB(path)
    db.create_session("s", "cli")
    db.append_message("s", "user", "kept")
    at_once(8, lambda _: db.get_messages("s"))
    db.close()
    assert list(contents(path.parent)) == ["state.db"]
    assert look(path, "SELECT content FROM messages") == [("kept",)]


def test_store_and_session_db_share_engine_of_same_file(store: Any, path: Path) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        db.append_message("s", "user", "by the object")
        store.sessions.append_message("s", "user", "by the store")
        assert texts(db, "s") == ["by the object", "by the store"]
        at_once(8, lambda _: (db.get_messages("s"), store.sessions.get_messages("s")))
        assert descriptors(path) <= 5


def test_in_memory_stores_are_independent() -> None:
    first, second = open_store("sqlite://"), open_store("sqlite://")
    first.sessions.create_session("s", "cli")
    assert second.sessions.get_session("s") is None
    first.close()
    second.close()


def test_in_memory_store_creates_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("sqlite://")
    store.sessions.create_session("s", "cli")
    store.sessions.append_message("s", "user", "x")
    at_once(8, lambda _: store.sessions.get_messages("s"))
    store.close()
    assert contents(tmp_path) == {}


def test_default_path_is_state_db_in_home(home_folder: Path) -> None:
    with contextlib.closing(SessionDB()) as db:
        db.create_session("s", "cli")
        assert db.path == home_folder / "state.db"
    assert look(home_folder / "state.db", "SELECT id FROM sessions") == [("s",)]


@pytest.mark.parametrize("spelling", ["sqlite://{}", "sqlite:///{}"])
def test_url_names_absolute_path(path: Path, spelling: str) -> None:
    with contextlib.closing(open_store(spelling.format(path))) as store:
        store.sessions.create_session("s", "cli")
    assert look(path, "SELECT id FROM sessions") == [("s",)]


@pytest.mark.parametrize("spelling", ["mysql://here/it", "state.db", ""])
def test_unknown_url_scheme_is_rejected(spelling: str) -> None:
    with pytest.raises(HermesError):
        open_store(spelling)


# ---- commits


def test_write_returns_after_commit(db: SessionDB, path: Path) -> None:
    def write(number: int) -> list[bool]:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            observed = []
            for turn in range(20):
                row = db.append_message("s", "user", f"{number}/{turn}")
                observed.append(other.execute("SELECT content FROM messages WHERE id = ?", (row,)).fetchone())
        return [value == (f"{number}/{turn}",) for turn, value in enumerate(observed)]

    assert at_once(8, write) == [[True] * 20] * 8


def test_failed_operation_does_not_affect_others_in_group_commit(store: Any, path: Path) -> None:
    current = store.leases.acquire("session:s", "me", 60)
    failing: list[Callable[[], Any]] = [
        lambda: store.sessions.append_message("nobody", "user", "x"),
        lambda: store.sessions.append_message("s", "user", "fenced", lease_token=current + 1),
        lambda: store.sessions.create_session("s", "cli", exist_ok=False),
    ]

    def work(number: int) -> Any:
        if number % 4 == 3:
            return failing[number // 4 % 3]()
        return store.sessions.append_message("s", "user", str(number))

    with locked(path) as release:
        results = at_once(24, work, meanwhile=release)
    assert [isinstance(result, Exception) for result in results] == [number % 4 == 3 for number in range(24)]
    assert {type(result) for result in results[3:12:4]} == {KeyError, LeaseLost, type(results[11])}
    assert sorted(texts(store.sessions, "s"), key=int) == [str(n) for n in range(24) if n % 4 != 3]
    assert store.sessions.get_session("s")["message_count"] == 18


def test_rejected_operation_leaves_no_changes(store: Any, path: Path) -> None:
    before = look(path, "SELECT message_count, last_active FROM sessions")
    with pytest.raises(LeaseLost):
        store.sessions.append_message("s", "user", "fenced", lease_token=12345)
    assert look(path, "SELECT message_count, last_active FROM sessions") == before
    assert look(path, "SELECT count(*) FROM messages") == [(0,)]


def test_write_waits_for_lock_of_other_process(db: SessionDB, path: Path) -> None:
    finished = threading.Event()
    with locked(path) as release:
        writer = threading.Thread(target=lambda: (db.append_message("s", "user", "late"), finished.set()))
        writer.start()
        assert texts(db, "s") == []
        assert not finished.is_set()
        release()
        writer.join(PATIENCE_S)
    assert finished.is_set()
    assert texts(db, "s") == ["late"]


def test_lock_timeout_raises_busy_error_and_retry_succeeds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BUSY_S_MAX", "BUSY_TIMEOUT_S"):
        monkeypatch.setattr(limits, name, 0.01)
    with contextlib.closing(SessionDB(path)) as db:
        db.create_session("s", "cli")
        with locked(path) as release:
            with pytest.raises(StoreBusy) as refusal:
                db.append_message("s", "user", "x")
            assert str(path) in str(refusal.value)
            release()
            db.append_message("s", "user", "x")
        assert texts(db, "s") == ["x"]


def test_readers_do_not_wait_for_writer(db: SessionDB, path: Path) -> None:
    db.append_message("s", "user", "early")
    with locked(path) as release:
        writers = [threading.Thread(target=db.append_message, args=("s", "user", "late")) for _ in range(8)]
        for writer in writers:
            writer.start()
        assert at_once(8, lambda _: texts(db, "s")) == [["early"]] * 8
        release()
        for writer in writers:
            writer.join(PATIENCE_S)
    assert len(texts(db, "s")) == 9


# ---- the same as coroutines


async def test_async_wraps_every_part_of_store(store: Any) -> None:
    async_class = Async(store)
    assert await async_class.sessions.append_message("s", "user", "hello") >= 1
    assert await async_class.leases.acquire("session:s", "me", 60) == 1
    assert (await async_class.idempotency.claim("scope", "key", "print")).state == "new"
    assert (await async_class.jobs.create({"name": "n", "prompt": "p"}))["name"] == "n"
    assert await async_class.runs.unfinished() == []
    assert await async_class.responses.get("resp_1") is None
    assert [m["content"] for m in await async_class.sessions.get_messages("s")] == ["hello"]


async def test_async_wraps_single_part(db: SessionDB) -> None:
    async_class = Async(db)
    await async_class.append_message("s", "user", content="hello")
    assert [m["content"] for m in await async_class.get_messages("s", limit=1)] == ["hello"]


async def test_async_error_reaches_awaiter(db: SessionDB) -> None:
    with pytest.raises(KeyError):
        await Async(db).append_message("nobody", "user", "x")


async def test_event_loop_is_not_blocked_by_waiting_write(db: SessionDB, path: Path) -> None:
    async_class = Async(db)
    async with asyncio.timeout(PATIENCE_S):
        with locked(path) as release:
            writes = [asyncio.create_task(async_class.append_message("s", "user", str(n))) for n in range(50)]
            assert await async_class.get_messages("s") == []
            assert not any(write.done() for write in writes)
            release()
            ids = await asyncio.gather(*writes)
    assert len(set(ids)) == 50
    assert sorted(texts(db, "s"), key=int) == [str(n) for n in range(50)]


async def test_cancelled_async_write_keeps_store_consistent(db: SessionDB, path: Path) -> None:
    async_class = Async(db)
    async with asyncio.timeout(PATIENCE_S):
        with locked(path) as release:
            task = asyncio.create_task(async_class.append_message("s", "user", "left"))
            await async_class.get_messages("s")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            release()
        await async_class.append_message("s", "user", "stays")
    assert texts(db, "s")[-1] == "stays"
    assert db.get_session("s")["message_count"] == len(texts(db, "s"))


async def test_more_concurrent_writes_than_one_commit_group(db: SessionDB, path: Path) -> None:
    async_class = Async(db)
    async with asyncio.timeout(PATIENCE_S):
        with locked(path) as release:
            writes = [asyncio.create_task(async_class.append_message("s", "user", str(n))) for n in range(600)]
            await async_class.get_session("s")
            release()
            ids = await asyncio.gather(*writes)
    assert len(set(ids)) == 600
    assert db.get_session("s")["message_count"] == 600


async def test_closed_store_rejects_async_calls(path: Path) -> None:
    store = open_store(url(path))
    async_class = Async(store)
    await async_class.sessions.create_session("s", "cli")
    await asyncio.gather(*(async_class.sessions.get_session("s") for _ in range(8)))
    store.close()
    async with asyncio.timeout(PATIENCE_S):
        for work in (
            lambda: async_class.sessions.get_session("s"),
            lambda: async_class.sessions.append_message("s", "user", "x"),
        ):
            with pytest.raises(StoreError):
                await work()


# ---- one unit of work


def everything(store: Any, token: int) -> str:
    """One operation of every part."""
    store.sessions.create_session("new", "cli")
    store.sessions.append_message("s", "user", "inside", lease_token=token)
    turn = Turn(store, "s", token=token)
    turn.begin()
    store.idempotency.claim("scope", "key", "print", run_id=turn.run_id)
    store.idempotency.finish("scope", "key", 200, b"{}")
    store.jobs.create({"id": "0123456789ab", "name": "n"})
    return turn.run_id


TABLES = ("sessions", "messages", "runs", "run_events", "idempotency", "jobs", "leases")


def counts(path: Path) -> dict[str, int]:
    return {table: look(path, f"SELECT count(*) FROM {table}")[0][0] for table in TABLES}


def test_transaction_commits_all_and_returns_result(store: Any, path: Path) -> None:
    token = store.leases.acquire("session:s", "me", 60)
    run_id = store.transaction(lambda: everything(store, token))
    assert counts(path) == {
        "sessions": 2,
        "messages": 2,
        "runs": 1,
        "run_events": 1,
        "idempotency": 1,
        "jobs": 1,
        "leases": 2,
    }
    assert store.runs.get(run_id).state.status == "running"


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyError, OSError, ConnectionResetError, TimeoutError])
def test_exception_rolls_back_whole_transaction(store: Any, path: Path, kind: type[Exception]) -> None:
    token = store.leases.acquire("session:s", "me", 60)
    before = counts(path)
    raised = kind("on purpose")

    def work() -> None:
        everything(store, token)
        raise raised

    with pytest.raises(kind) as caught:
        store.transaction(work)
    assert caught.value is raised
    assert counts(path) == before
    assert store.sessions.get_session("s")["message_count"] == 0


def test_lease_lost_rolls_back_whole_transaction(store: Any, path: Path) -> None:
    token = store.leases.acquire("session:s", "me", 60)
    before = counts(path)

    def work() -> None:
        everything(store, token)
        store.sessions.append_message("s", "assistant", "too late", lease_token=token + 1)

    with pytest.raises(LeaseLost):
        store.transaction(work)
    assert counts(path) == before


def test_rejected_operation_inside_transaction_is_rolled_back_alone(store: Any) -> None:
    turn = Turn(store, "s", token=store.leases.acquire("session:s", "me", 60))
    turn.begin()

    def work() -> None:
        store.sessions.append_message("s", "user", "before")
        event = turn.event("notice", level="info", code="x", message="x")
        with pytest.raises(ValueError):
            turn.append(event, rows=[turn.row("assistant", "half"), turn.row("nobody", "of this role")])
        store.sessions.append_message("s", "user", "after")

    store.transaction(work)
    assert texts(store.sessions, "s") == ["What is the time?", "before", "after"]
    assert [event.type for event in store.runs.read(turn.run_id, 0, 100)] == ["run.started"]


def test_rolled_back_delete_keeps_session_files(store: Any, path: Path) -> None:
    file = path.parent / "uploads" / "s" / "picture.png"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")

    def work() -> None:
        assert store.sessions.delete_session("s")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.transaction(work)
    assert store.sessions.get_session("s") is not None
    assert file.exists()


def test_transaction_is_isolated_from_readers(store: Any, path: Path) -> None:
    observed = []

    def work() -> None:
        store.sessions.append_message("s", "user", "one")
        observed.append(look(path, "SELECT count(*) FROM messages"))
        store.sessions.append_message("s", "user", "two")

    store.transaction(work)
    assert observed == [[(0,)]]
    assert texts(store.sessions, "s") == ["one", "two"]


def test_transaction_reads_its_own_writes(store: Any) -> None:
    def work() -> list[str]:
        store.sessions.append_message("s", "user", "one")
        return texts(store.sessions, "s")

    assert store.transaction(work) == ["one"]


def test_failed_transaction_does_not_affect_concurrent_ones(store: Any) -> None:
    def work(number: int) -> None:
        def unit() -> None:
            store.sessions.append_message("s", "user", f"{number}a")
            if number % 2:
                raise ZeroDivisionError
            store.sessions.append_message("s", "user", f"{number}b")

        store.transaction(unit)
        store.sessions.append_message("s", "user", f"{number}c")

    results = at_once(12, work)
    assert [type(result) for result in results] == [type(None), ZeroDivisionError] * 6
    stored = texts(store.sessions, "s")
    assert sorted(stored) == sorted(f"{number}{letter}" for number in range(0, 12, 2) for letter in "abc")
    for number in range(0, 12, 2):
        assert stored.index(f"{number}b") == stored.index(f"{number}a") + 1, "somebody wrote into a transaction"


def test_nested_transaction_joins_outer(store: Any) -> None:
    def inner() -> None:
        store.sessions.append_message("s", "user", "inner")

    def outer(fails: bool) -> None:
        store.sessions.append_message("s", "user", "outer")
        store.transaction(inner)
        if fails:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.transaction(lambda: outer(True))
    assert texts(store.sessions, "s") == []
    store.transaction(lambda: outer(False))
    assert texts(store.sessions, "s") == ["outer", "inner"]


async def test_transaction_can_be_awaited(store: Any) -> None:
    def work() -> str:
        store.sessions.append_message("s", "user", "one")
        return "done"

    assert await Async(store).transaction(work) == "done"
    assert texts(store.sessions, "s") == ["one"]


# ---- forks


FORKED = """
    import json, os, signal, sys
    from hermes.store.base import StoreError
    from hermes.store.sessions import SessionDB

    def give_up(*_):
        raise TimeoutError("it hangs")

    db = SessionDB(sys.argv[1])
    db.create_session("s", "cli")
    db.append_message("s", "user", "before")
    out, back = os.pipe()
    child = os.fork()
    if not child:
        said = []
        for work in (lambda: db.append_message("s", "user", "child"), lambda: db.get_messages("s")):
            signal.signal(signal.SIGALRM, give_up)
            signal.alarm(3)
            try:
                work()
                said.append("it worked")
            except StoreError as error:
                said.append(error.message)
            except BaseException as error:
                said.append(repr(error))
            signal.alarm(0)
        os.write(back, json.dumps(said).encode())
        if sys.argv[2] == "at once":
            os._exit(0)
        db.close()
        sys.exit(0)
    os.close(back)
    said = json.loads(os.fdopen(out).read())
    os.waitpid(child, 0)
    db.append_message("s", "user", "after")
    found = [m["content"] for m in db.get_messages("s")]
    db.close()
    print(json.dumps([said, found]))
"""


@pytest.mark.parametrize("leaving", ["at once", "in an orderly way"])
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_forked_child_is_rejected_and_parent_continues(path: Path, kind: str, leaving: str) -> None:
    messages, contents = run(FORKED, path if kind == "file" else ":memory:", leaving)
    assert len(messages) == 2
    for sentence in messages:
        assert "fork" in sentence.lower() and sentence.endswith("."), sentence
    assert contents == ["before", "after"]
    if kind == "file":
        assert look(path, "SELECT content FROM messages") == [("before",), ("after",)]
        assert look(path, "PRAGMA integrity_check") == [("ok",)]


# ---- private files


@pytest.mark.parametrize("value", [0o000, 0o022, 0o077, 0o777], ids=oct)
def test_database_files_and_folder_are_private_with_any_umask(path: Path, value: int) -> None:
    with umask(value):
        db = SessionDB(path)
        db.create_session("s", "cli")
        db.append_message("s", "user", "x")
        db.get_messages("s")
        assert {mode(side(path, suffix)) for suffix in ("", "-wal", "-shm")} == {0o600}
        assert mode(path.parent) == 0o700
        db.close()
        assert mode(path) == 0o600


def test_open_store_creates_private_files(path: Path) -> None:
    with umask(0), contextlib.closing(open_store(url(path))) as store:
        store.sessions.create_session("s", "cli")
        assert {mode(side(path, suffix)) for suffix in ("", "-wal", "-shm")} == {0o600}


# ---- how SQLite is set


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every statement of every connection made from now on."""
    statements_run: list[str] = []
    connect = sqlite3.connect

    def traced(*args: Any, **fields: Any) -> sqlite3.Connection:
        connection = connect(*args, **fields)
        connection.set_trace_callback(statements_run.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", traced)
    return statements_run


def said_about(statements: list[str], pragma: str) -> list[str]:
    matches = (re.search(rf"pragma\s+{pragma}\s*[=(]\s*'?(\w+)", text, re.IGNORECASE) for text in statements)
    return [match[1].upper() for match in matches if match]


def test_database_is_in_wal_mode(db: SessionDB, path: Path) -> None:
    assert look(path, "PRAGMA journal_mode") == [("wal",)]


def test_connections_set_foreign_keys_and_synchronous_pragmas(statements: list[str], path: Path) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        db.create_session("s", "cli")
        assert set(said_about(statements, "foreign_keys")) & {"ON", "1", "TRUE"}
        opened = len(statements)
        db.append_message("s", "user", "x")
    assert set(said_about(statements, "synchronous")) & {"NORMAL", "1"}
    assert not set(said_about(statements[opened:], "synchronous")) & {"FULL", "2", "EXTRA", "3", "OFF", "0"}


def test_only_synced_writes_use_full_synchronous(statements: list[str], path: Path) -> None:
    with contextlib.closing(open_store(url(path))) as store:
        token = store.leases.acquire("session:s", "me", 60)
        turn = Turn(store, "s", token=token)
        statements.clear()
        turn.begin()
        assert not {"FULL", "2"} & set(said_about(statements, "synchronous"))
        statements.clear()
        turn.append(turn.event("tool.started", 1, call_id="c", name="write", args={}, effect="effect"), sync=True)
        synced = said_about(statements, "synchronous")
        assert synced and synced[0] in ("FULL", "2")
        statements.clear()
        turn.append(turn.event("notice", 1, level="info", code="x", message="x"))
        store.sessions.append_message("s", "user", "x")
        after = said_about(statements, "synchronous")
        assert (synced + after)[-1] in ("NORMAL", "1")


def test_writes_begin_immediate(statements: list[str], path: Path) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        db.create_session("s", "cli")
        statements.clear()
        db.append_message("s", "user", "x")
    transactions = [text.upper().split() for text in statements if text.upper().startswith("BEGIN")]
    assert transactions and all(keywords[1:2] == ["IMMEDIATE"] for keywords in transactions)


def test_foreign_keys_bind_related_rows(store: Any, path: Path) -> None:
    referred = {row[2] for row in look(path, "PRAGMA foreign_key_list(messages)")}
    assert "sessions" in referred
    token = store.leases.acquire("session:s", "me", 60)
    everything(store, token)
    store.leases.release("session:s", token)
    assert store.sessions.delete_session("s", force=True)
    assert look(path, "PRAGMA foreign_key_check") == []


@pytest.mark.parametrize("content", ["a\x00b", "a\ud800b", "\udfff", "\x00"])
def test_append_accepts_any_text_content(db: SessionDB, path: Path, content: str) -> None:
    db.append_message("s", "user", content)
    [(stored,)] = look(path, "SELECT content FROM messages")
    assert "\x00" not in stored
    assert len(stored) == len(content)
    stored.encode()


def test_deleted_text_is_erased_from_file(path: Path) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        for session in ("gone", "kept"):
            db.create_session(session, "cli", title=f"title {session}")
            for number in range(20):
                db.append_message(session, "user", f"{session} secretword{session} {number} " + "x " * 500)
        assert db.delete_session("gone")
    data = path.read_bytes()
    assert b"gone secretwordgone" not in data
    assert b"title gone" not in data
    assert b"kept secretwordkept" in data
    with contextlib.closing(SessionDB(path)) as db:
        db.optimize()
    # The words of an index stand there one after the other, each without what it shares with the one before.
    assert b"secretwordgone" not in path.read_bytes()
    assert b"wordgone" not in path.read_bytes()


# ---- the log of changes


def test_wal_is_checkpointed_while_writing(db: SessionDB, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WAL_ROWS", 50)
    empty = path.stat().st_size
    for number in range(400):
        db.append_message("s", "user", f"message {number} " + "words " * 200)
    log, sizes = path.with_name("state.db-wal"), [-1]
    # A folding that meets a write leaves the rest to the next one.
    while log.stat().st_size != sizes[-1] and len(sizes) < 20:
        folding = db.engine._checkpointing
        assert folding is not None
        folding.join(PATIENCE_S)
        db.set_session_title("s", f"Title {len(sizes)}")  # behind what the folding has left to the writer
        sizes.append(log.stat().st_size)
        for number in range(3):
            db.append_message("s", "user", f"more {number} " + "words " * 200)
    assert log.stat().st_size == sizes[-1], "the log begins anew"
    assert path.stat().st_size > empty + 400_000
    assert len(db.get_messages("s")) == 400 + 3 * (len(sizes) - 1)


def test_close_waits_for_checkpoint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WAL_ROWS", 1)
    for number in range(30):
        db = SessionDB(path)
        db.create_session(f"s{number}", "cli")
        db.append_message(f"s{number}", "user", "hello")
        db.close()
        assert [file.name for file in path.parent.iterdir()] == ["state.db"]


# ---- searches and other slow reads

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


def endless(started: threading.Event) -> Callable[[Any], Any]:
    """A read that ends only when it is interrupted."""

    def work(tx: Any) -> Any:
        started.set()
        return tx.value(ENDLESS)

    return work


async def test_quick_reads_do_not_wait_for_slow_reads(path: Path) -> None:
    release = threading.Event()
    with contextlib.closing(open_store(url(path), read_threads=1)) as store:
        async_class = Async(store)
        await async_class.sessions.create_session("s", "cli")
        waiting = [
            asyncio.create_task(store.engine.read_soon(lambda _: release.wait(PATIENCE_S), slow=True))
            for _ in range(40)
        ]
        await idle()  # all of them have been handed over
        try:
            async with asyncio.timeout(PATIENCE_S):
                assert (await async_class.sessions.get_session("s"))["id"] == "s"
                assert (await async_class.sessions.list_sessions())[0]["id"] == "s"
            assert not any(task.done() for task in waiting)
        finally:
            release.set()
        await asyncio.gather(*waiting)


async def test_slow_reads_do_not_wait_for_quick_reads(path: Path) -> None:
    release = threading.Event()
    with contextlib.closing(open_store(url(path), read_threads=1)) as store:
        quick = [asyncio.create_task(store.engine.read_soon(lambda _: release.wait(PATIENCE_S))) for _ in range(4)]
        await idle()
        try:
            async with asyncio.timeout(PATIENCE_S):
                assert await Async(store).sessions.search_messages("hi") == []
        finally:
            release.set()
        await asyncio.gather(*quick)


async def test_reads_do_not_wait_behind_blocked_writers(store: Any, path: Path) -> None:
    async_class = Async(store)
    await async_class.sessions.get_session("s")
    async with asyncio.timeout(PATIENCE_S):
        with locked(path) as release:
            tasks = [asyncio.create_task(async_class.sessions.delete_session(f"x{n}")) for n in range(20)]
            await idle()
            assert (await async_class.sessions.get_session("s"))["id"] == "s"
            release()
            await asyncio.gather(*tasks)


async def test_slow_read_is_interrupted_when_cancelled(store: Any) -> None:
    started = [threading.Event() for _ in range(SLOW_READERS_MAX)]
    reads = [asyncio.create_task(store.engine.read_soon(endless(event), slow=True)) for event in started]
    for event in started:
        await asyncio.to_thread(event.wait, PATIENCE_S)
    for read in reads:
        read.cancel()
    async with asyncio.timeout(PATIENCE_S):
        assert await Async(store).sessions.search_messages("hi") == []


async def test_slow_read_time_limit_includes_queueing(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await Async(store).sessions.search_messages("hi")
    monkeypatch.setattr(engine_module, "SLOW_READ_S_MAX", 0.05)
    reads = [store.engine.read_soon(endless(threading.Event()), slow=True) for _ in range(SLOW_READERS_MAX + 1)]
    async with asyncio.timeout(PATIENCE_S):
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StoreTimeout] * len(reads)
        monkeypatch.undo()
        assert await Async(store).sessions.search_messages("hi") == []


async def test_read_time_limit_is_reset_between_reads(store: Any) -> None:
    def limited(tx: Any) -> None:
        with pytest.raises(connections.TimeUp), tx.within(0.0):
            tx.value(ENDLESS)

    steps = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 200000) SELECT count(*) FROM n"
    for slow in (False, True):
        await store.engine.read_soon(limited, slow=slow)
        assert await store.engine.read_soon(lambda tx: tx.value(steps), slow=slow) == 200_000


def test_nested_read_sees_same_snapshot(store: Any, path: Path) -> None:
    def work(_: Any) -> list[Any]:
        before = store.sessions.count_sessions()
        with raw(path) as db:
            db.execute("UPDATE sessions SET archived = 1")
        return [before, store.sessions.count_sessions(), store.sessions.list_sessions()[0]["id"]]

    assert store.engine.read(work) == [1, 1, "s"]
    assert store.sessions.count_sessions() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
async def test_slow_reads_run_at_lower_priority(store: Any) -> None:
    def niceness(_: Any) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = niceness(None)
    assert await store.engine.read_soon(niceness) == own
    assert await store.engine.read_soon(niceness, slow=True) == min(19, own + SLOW_READERS_NICENESS)


def test_garbage_collected_store_does_not_hang(tmp_path: Path) -> None:
    program = """
        import gc, sys
        from pathlib import Path
        from hermes.store.sessions import SessionDB
        folder = Path(sys.argv[1])
        gc.set_threshold(30)
        for number in range(60):
            db = SessionDB(folder / f"{number % 5}.db")
            db.itself = db
            del db
            SessionDB(folder / f"{number % 7 + 10}.db").close()
        print("done")
    """
    lines = "\n".join(line.removeprefix("        ") for line in program.splitlines())
    result = subprocess.run(
        [sys.executable, "-c", lines, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert result.stdout == "done\n", result.stderr


def test_unreferenced_database_is_closed_by_gc(tmp_path: Path) -> None:
    SessionDB(tmp_path / "state.db").create_session("s", "cli")
    gc.collect()
    SessionDB(tmp_path / "other.db").close()
    assert [path.name for path in tmp_path.glob("state.db*")] == ["state.db"]


async def test_async_read_of_closed_store_raises(tmp_path: Path) -> None:
    for number in range(20):
        store = Async(open_store(f"sqlite://{tmp_path}/{number}.db"))
        await asyncio.gather(*(store.sessions.get_session("a") for _ in range(4)))
        store.close()
        with pytest.raises(StoreError, match="closed"):
            async with asyncio.timeout(PATIENCE_S):
                await store.sessions.get_session("a")


async def test_stop_iteration_in_transaction_does_not_hang_writers(tmp_path: Path) -> None:
    store = Async(open_store(f"sqlite://{tmp_path}/state.db"))
    await store.sessions.create_session("s", "cli")
    odd = store.transaction(lambda: next(iter(())))
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(
            odd, *(store.sessions.append_message("s", "user", "x") for _ in range(5)), return_exceptions=True
        )
    assert isinstance(results[0], RuntimeError) and all(isinstance(result, int) for result in results[1:])
    store.close()


def test_busy_timeout_is_waited_once_for_whole_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUSY_S_MAX", 0.3)
    db = SessionDB(tmp_path / "state.db")
    db.create_session("s", "cli")
    tries, asked = list[int](), list[int]()
    patiently, submit = connections.patiently, type(db.engine)._submit

    def counted(*args: Any) -> Any:
        until_blocking(lambda: len(asked) == 8)
        tries.append(1)
        return patiently(*args)

    def submitted(*args: Any) -> None:
        submit(*args)
        asked.append(1)

    monkeypatch.setattr(type(db.engine), "_submit", submitted)
    monkeypatch.setattr(engine_module, "patiently", counted)
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(db.append_message, "s", "user", "x") for _ in range(8)]
        errors = [task.exception() for task in waiting]
    other.close()
    assert all(isinstance(error, StoreBusy) for error in errors)
    assert len(tries) <= 2
    db.close()


@pytest.mark.parametrize("url", ["postgres:u:hunter2", "mysql://u:hunter2@h"])
def test_store_url_error_does_not_leak_password(url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        store_at(url)
    assert "hunter2" not in str(refusal.value)


def test_forked_child_can_open_store_not_yet_opened_by_parent(tmp_path: Path) -> None:
    program = """
        import os, sys
        from pathlib import Path
        from hermes.store.stores import Store
        from hermes.store.sessions import SessionDB
        named = Store(Path(sys.argv[1]) / "state.db")
        if os.fork() == 0:
            db = SessionDB(Path(sys.argv[1]) / "state.db")
            db.create_session("s", "cli")
            db.close()
            os._exit(0)
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    lines = "\n".join(line.removeprefix("        ") for line in program.splitlines())
    result = subprocess.run(
        [sys.executable, "-c", lines, str(tmp_path)], capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert result.returncode == 0, result.stderr.decode()
