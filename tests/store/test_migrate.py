"""A store moved to another database and back is the same store, wherever the move is interrupted."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from hermes.core.errors import ConfigError, HermesError
from hermes.core.home import Home
from hermes.core.processes import this_process
from hermes.store import tables
from hermes.store.base import StoreBusy, StoreError, StoreUnfinished
from hermes.store.engine import Tx
from hermes.store.migrate import CopyDiffers, NoSource, Progress, Report, Side, TargetNotEmpty, migrate, open_sides
from hermes.store.postgres import engine as postgres_engine
from hermes.store.sessions import SessionDB
from hermes.store.sqlite.maintenance import repair
from hermes.store.stores import Store, open_store, path_of, store_at
from support.engines import execute, new_database
from support.ports import refusing_port

from .conftest import create_conversation
from .full_store import everything, fill
from .tools import PATIENCE_S, start, url

HOME = Home(Path("/nonexistent"))
# How the command is ended in the middle: by the system, after or before the commit of a batch.
KILLED = """
import os, signal, sys
from pathlib import Path
from hermes.core.home import Home
from hermes.store import migrate, tables

source, target, batches, before_commit = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "True"
tables.MIGRATE_BATCH_ROWS = 2
insert, count = tables.insert, 0

def counted(*args):
    global count
    insert(*args)
    count += 1
    if before_commit and count == batches:
        os.kill(os.getpid(), signal.SIGKILL)

def progress(step):
    if not before_commit and count == batches:
        os.kill(os.getpid(), signal.SIGKILL)

tables.insert = counted
with migrate.open_sides(source, target, Home(Path("/nonexistent"))) as sides:
    report = migrate.migrate(*sides, progress)
print("continued" if report.is_continued else "new")
"""


@pytest.fixture
def source_url(tmp_path: Path) -> str:
    (tmp_path / "source").mkdir()
    address = url(tmp_path / "source" / "state.db")
    with closing(open_store(address)) as store:
        fill(store)
    return address


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    (tmp_path / "target").mkdir()
    return url(tmp_path / "target" / "state.db")


@contextmanager
def sides(source: str, target: str) -> Iterator[tuple[Side, Side]]:
    with open_sides(source, target, HOME) as both:
        yield both


def move(source: str, target: str) -> Report:
    with sides(source, target) as both:
        return migrate(*both)


def read(address: str) -> dict[str, object]:
    with closing(open_store(address)) as store:
        return everything(store)


def change(address: str, sql: str) -> None:
    with closing(open_store(address)) as store:
        store.engine.write(lambda tx: tx.execute(sql))


# ---- there and back


def test_store_moved_to_postgres_and_back_is_the_same(source_url: str, postgres_database: str, sqlite_url: str) -> None:
    there = move(source_url, postgres_database)
    back = move(postgres_database, sqlite_url)
    assert there.tables == back.tables
    assert all(table.rows for table in there.tables.values()), "a table without rows shows nothing"
    assert there.unfinished_runs == 1
    expected = read(source_url)
    assert read(postgres_database) == expected
    assert read(sqlite_url) == expected


def test_store_moved_between_files_is_the_same(source_url: str, sqlite_url: str) -> None:
    move(source_url, sqlite_url)
    assert read(sqlite_url) == read(source_url)


def test_every_table_is_moved_but_leases(tmp_path: Path, postgres_database: str) -> None:
    with closing(open_store(postgres_database)) as store:
        names = (
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'hermes' AND table_type LIKE 'BASE%'"
        )
        there = store.engine.read(lambda tx: {row[0] for row in tx.rows(names)})
    assert there - {table.name for table in tables.TABLES} == {"commit_markers", "leases", "schema_version"}


@pytest.mark.parametrize("back", [False, True], ids=["to postgres", "to sqlite"])
def test_migrated_counters_continue_after_used_ids(
    source_url: str, postgres_database: str, sqlite_url: str, back: bool
) -> None:
    move(source_url, postgres_database)
    if back:
        move(postgres_database, sqlite_url)
    with closing(open_store(source_url)) as old, closing(open_store(sqlite_url if back else postgres_database)) as new:
        for store in (old, new):
            store.sessions.append_message("s", "user", "after")
            store.responses.add_conversation_items("conv_1", "ada", [{"id": "msg_9"}])
        next_ids = [
            (
                store.engine.read(lambda tx: tx.value("SELECT max(id) FROM messages")),
                store.responses.engine.read(lambda tx: tx.value("SELECT max(position) FROM conversation_items")),
            )
            for store in (old, new)
        ]
        assert next_ids[0] == next_ids[1]
        tokens = [store.leases.acquire("session:s", "h", 1) or 0 for store in (old, new)]
        uses = [store.responses.engine.write(lambda tx: tx.next_value("response_use")) for store in (old, new)]
        assert tokens[1] >= tokens[0] and uses[1] >= uses[0]
        newest = new.engine.read(lambda tx: tx.value("SELECT max(rowid) FROM runs"))
        create_conversation(new.sessions, "later", "a")
        change_runs = "INSERT INTO runs (run_id, owner, kind, session_id, source, holder, status, created_at, updated_at, spec) VALUES ('r', 'o', 'run', 's', 'x', 'h', 'queued', 1, 1, '{}')"
        new.engine.write(lambda tx: tx.execute(change_runs))
        assert new.engine.read(lambda tx: tx.value("SELECT rowid FROM runs WHERE run_id = 'r'")) > newest


def test_text_that_postgres_cannot_hold_is_replaced_and_verified(tmp_path: Path, postgres_database: str) -> None:
    (tmp_path / "source").mkdir()
    address = url(tmp_path / "source" / "state.db")
    with closing(open_store(address)) as store:
        create_conversation(store.sessions, "s", "plain")
    with closing(sqlite3.connect(tmp_path / "source" / "state.db")) as raw, raw:
        raw.execute("UPDATE messages SET reasoning = 'a' || char(0) || 'b'")
    move(address, postgres_database)
    with closing(open_store(postgres_database)) as store:
        assert store.sessions.get_messages("s")[0]["reasoning"] == "a\ufffdb"


# ---- interrupted


@pytest.mark.parametrize("to", ["postgres", "sqlite"])
def test_migration_killed_at_any_batch_is_continued(
    source_url: str, postgres_database: str, sqlite_url: str, to: str
) -> None:
    target = postgres_database if to == "postgres" else sqlite_url
    choose, killed = random.Random(21), 0
    for _ in range(40):
        program = start(KILLED, source_url, target, choose.randint(1, 9), choose.random() < 0.5)
        out, err = program.communicate(timeout=PATIENCE_S)
        if program.returncode == 0:
            break
        assert program.returncode == -9, err
        killed += 1
    assert out == "continued\n"
    assert killed > 2
    assert read(target) == read(source_url)


def test_changes_between_two_parts_start_over(
    source_url: str, postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MIGRATE_BATCH_ROWS", 2)

    def interrupt(progress: Progress) -> None:
        if progress.table == "runs":
            raise KeyboardInterrupt

    with sides(source_url, postgres_database) as both, pytest.raises(KeyboardInterrupt):
        migrate(*both, interrupt)
    change(source_url, "UPDATE messages SET content = 'changed since' WHERE id = 1")
    change(source_url, "DELETE FROM pending_calls WHERE call_id = 'c1'")
    assert move(source_url, postgres_database).is_continued
    assert read(postgres_database) == read(source_url)


def interrupt_at(source: str, target: str, name: str) -> None:
    """Leave an unfinished copy that has come to this table."""

    def interrupt(progress: Progress) -> None:
        if progress.table == name:
            raise KeyboardInterrupt

    with sides(source, target) as both, pytest.raises(KeyboardInterrupt):
        migrate(*both, interrupt)


@pytest.mark.parametrize("to", ["postgres", "sqlite"])
def test_unfinished_copy_is_refused_by_all_but_migrate(
    source_url: str, postgres_database: str, sqlite_url: str, to: str
) -> None:
    target = postgres_database if to == "postgres" else sqlite_url
    interrupt_at(source_url, target, "messages")
    for _ in range(2):
        with pytest.raises(StoreUnfinished, match="interrupted") as raised:
            open_store(target)
        assert raised.value.exit_code == 78
        assert "hermes migrate" in (raised.value.hint or "")
        with closing(store_at(target)) as store, pytest.raises(StoreUnfinished):
            store.sessions.create_session("lost", "cli")
    if to == "sqlite":
        for read_only in (False, True):
            with pytest.raises(StoreUnfinished):
                SessionDB(path_of(target), read_only=read_only)
    assert move(source_url, target).is_continued
    assert read(target) == read(source_url)


def test_unfinished_copy_can_be_repaired(source_url: str, sqlite_url: str) -> None:
    interrupt_at(source_url, sqlite_url, "messages")
    path = path_of(sqlite_url)
    assert path is not None
    assert repair(path)["repaired"]
    with pytest.raises(StoreUnfinished):
        open_store(sqlite_url)


@pytest.mark.parametrize("to", ["postgres", "sqlite"])
@pytest.mark.parametrize("before", ["lost", "new"])
def test_sessions_made_or_deleted_between_two_parts_start_over(
    source_url: str, postgres_database: str, sqlite_url: str, to: str, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_engine, "PG_RETRY_WAIT_S_MAX", 0.01)
    target = postgres_database if to == "postgres" else sqlite_url
    if before == "lost":
        with closing(open_store(source_url)) as store:
            create_conversation(store.sessions, "gone", "a")
    interrupt_at(source_url, target, "sessions")
    with closing(open_store(source_url)) as store:
        if before == "new":
            create_conversation(store.sessions, "0-first", "a", "b")
        else:
            store.sessions.delete_session("gone")
    assert move(source_url, target).is_continued
    assert read(target) == read(source_url)


def test_complete_migration_can_be_repeated(source_url: str, postgres_database: str) -> None:
    first = move(source_url, postgres_database)
    again = move(source_url, postgres_database)
    assert (first.is_unchanged, again.is_unchanged) == (False, True)
    assert again.tables == first.tables


# ---- verified


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE messages SET content = content || '.' WHERE id = 1",
        "UPDATE sessions SET pinned = NOT pinned WHERE id = 's'",
        "UPDATE jobs SET next_run_at = next_run_at + 0.001",
        "UPDATE runs SET rowid = rowid + 100",
        "DELETE FROM message_blobs",
        "UPDATE sessions SET parent_session_id = NULL WHERE id = 'a-child'",
    ],
)
def test_changed_row_is_noticed(
    source_url: str, postgres_database: str, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    finished: list[str] = []

    def tamper(progress: Progress) -> None:
        if progress.work == "copy" and progress.table == "suspended":
            finished.append(progress.table)
            target.state.write(lambda tx: tx.execute(sql))

    with sides(source_url, postgres_database) as (source, target), pytest.raises(CopyDiffers, match="differs"):
        migrate(source, target, tamper)
    assert finished == ["suspended"]
    # The next call starts over.
    assert not move(source_url, postgres_database).is_continued
    assert read(postgres_database) == read(source_url)


# ---- refused


def test_target_with_other_rows_is_refused(source_url: str, postgres_database: str) -> None:
    with closing(open_store(postgres_database)) as store:
        create_conversation(store.sessions, "other", "mine")
    with pytest.raises(TargetNotEmpty, match="sessions, messages"):
        move(source_url, postgres_database)
    with closing(open_store(postgres_database)) as store:
        assert [session["id"] for session in store.sessions.list_sessions()] == ["other"]


def test_target_that_was_only_opened_is_empty(source_url: str, postgres_database: str) -> None:
    with closing(open_store(postgres_database)) as store:
        store.sessions.set_meta("swept_at", "1.0")
    move(source_url, postgres_database)
    assert read(postgres_database) == read(source_url)


def test_target_used_since_is_not_overwritten(source_url: str, postgres_database: str) -> None:
    move(source_url, postgres_database)
    with closing(open_store(postgres_database)) as store:
        create_conversation(store.sessions, "since", "new")
    with pytest.raises(TargetNotEmpty):
        move(source_url, postgres_database)
    with closing(open_store(postgres_database)) as store:
        assert store.sessions.get_session("since") is not None


def test_unfinished_copy_is_neither_source_nor_target_of_another(
    source_url: str, postgres_database: str, sqlite_url: str, tmp_path: Path
) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with sides(source_url, postgres_database) as both, pytest.raises(KeyboardInterrupt):
        migrate(*both, interrupt)
    with pytest.raises(StoreError, match="unfinished copy"):
        move(postgres_database, sqlite_url)
    (tmp_path / "third").mkdir()
    third = url(tmp_path / "third" / "state.db")
    open_store(third).close()
    with pytest.raises(TargetNotEmpty, match="unfinished copy"):
        move(third, postgres_database)


def test_store_of_a_running_turn_is_refused(source_url: str, postgres_database: str) -> None:
    with closing(open_store(source_url)) as store:
        token = store.leases.acquire("session:s", this_process(), 60)
        assert token is not None
        with pytest.raises(StoreBusy, match="turn is running"):
            move(source_url, postgres_database)
        store.leases.release("session:s", token)
    move(source_url, postgres_database)


def test_database_with_other_connections_is_refused(
    source_url: str, postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes.store.migrate.MIGRATE_USERS_S_MAX", 0.2)
    program = start(
        "import sys\nfrom hermes.store.stores import open_store\nstore = open_store(sys.argv[1])\n"
        "store.sessions.list_sessions()\nprint('open', flush=True)\nsys.stdin.read()",
        postgres_database,
    )
    assert program.stdout is not None and program.stdout.readline() == "open\n"
    try:
        with pytest.raises(StoreBusy, match="in use"):
            move(source_url, postgres_database)
    finally:
        program.communicate("", timeout=PATIENCE_S)
    monkeypatch.undo()
    move(source_url, postgres_database)


def test_source_that_does_not_exist_is_not_made(tmp_path: Path, postgres_database: str, sqlite_url: str) -> None:
    with pytest.raises(NoSource):
        move(url(tmp_path / "none.db"), postgres_database)
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(NoSource):
        move(postgres_database, sqlite_url)
    with pytest.raises(Exception, match="does not exist"):
        execute(postgres_database, "SELECT 1 FROM hermes.sessions")


@pytest.fixture
def closed() -> Iterator[int]:
    """A port that refuses."""
    with refusing_port() as port:
        yield port


def test_addresses_that_cannot_be_moved_are_refused(source_url: str, tmp_path: Path, closed: int) -> None:
    for target, error in (
        (source_url, "same database"),
        ("sqlite://", "in memory"),
        (url(tmp_path / "source" / "copy.db"), "one folder"),
        ("mysql://user:word@host/db", "kind"),
        ("postgresql://user:se@cret@127.0.0.1:1/db", "not valid"),
        ("postgresql://user:secret@127.0.0.1:no/db", "not valid"),
        ("postgresql://user:12/cret@127.0.0.1:1/db", "not valid"),
        (f"postgresql://user:secret@127.0.0.1:{closed}/db", "out of reach"),
    ):
        with pytest.raises(HermesError, match=error) as raised:
            move(source_url, target)
        assert "cret" not in str(raised.value)
        assert isinstance(raised.value, ConfigError) or raised.value.exit_code == 69


def test_batches_are_bounded_by_bytes(source_url: str, postgres_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(store: Store) -> None:
        create_conversation(store.sessions, "big", *(f"{number} " + "x" * 100_000 for number in range(50)))

    with closing(open_store(source_url)) as store:
        add(store)
    monkeypatch.setattr(tables, "MIGRATE_BATCH_BYTES", 1_000_000)
    move(source_url, postgres_database)
    messages = next(table for table in tables.TABLES if table.name == "messages")
    for address in (source_url, postgres_database):
        with closing(open_store(address)) as store:
            side = Side(store, "")
            sizes = [
                sum(len(v) for row in rows for v in row if isinstance(v, str)) for rows in side.pages(messages, [])
            ]
        assert len(sizes) >= 5
        assert max(sizes) < 2_500_000


MEASURED = """
import json, re, sys
from pathlib import Path
from hermes.core.home import Home
from hermes.store import migrate

with migrate.open_sides(sys.argv[1], sys.argv[2], Home(Path("/nonexistent"))) as sides:
    report = migrate.migrate(*sides)
peak_kb = int(re.search("VmHWM:\\s*([0-9]+)", Path("/proc/self/status").read_text())[1])
print(json.dumps([report.tables["messages"].rows, peak_kb // 1024]))
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_store(tmp_path: Path, postgres_url: str) -> None:
    peaks = []
    for count in (100, 50_000):
        folder = tmp_path / str(count)
        (folder / "back").mkdir(parents=True)
        source, back = url(folder / "state.db"), url(folder / "back" / "state.db")
        with closing(open_store(source)) as store:
            create_conversation(store.sessions, "s", "first")
            store.engine.write(partial(add_messages, count=count))
        with new_database(postgres_url) as server:
            for addresses in ((source, server), (server, back)):
                program = start(MEASURED, *addresses)
                out, err = program.communicate(timeout=500)
                assert program.returncode == 0, err
                rows, peak_mb = json.loads(out)
                assert rows == count + 1
                peaks.append(peak_mb)
    small, large = peaks[:2], peaks[2:]
    assert max(large) < max(small) + 40, peaks


def add_messages(tx: Tx, count: int) -> None:
    """Of 1 kB each."""
    tx.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
        "INSERT INTO messages (session_id, role, timestamp, content) "
        "SELECT 's', 'user', i, printf('%d %s', i, hex(randomblob(500))) FROM n",
        (count,),
    )
