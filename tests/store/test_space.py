"""The space of what was deleted goes back to the file system, while others go on."""

from __future__ import annotations

import itertools
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from hermes.core.limits import FREE_PAGES_KEPT_MIN
from hermes.store.responses import ResponseStore
from hermes.store.sessions import SessionDB
from hermes.store.sqlite import engine, opening, schema, space
from hermes.store.sqlite.connections import Tx
from support.waiting import until_blocking

from .tools import look, side

SESSIONS, ROWS = 400, 10
OLD = [f"s{number}" for number in range(SESSIONS * 6 // 10)]
LEFT = [f"s{number}" for number in range(len(OLD), SESSIONS)]
INCREMENTAL = 2


def fill(db: SessionDB, sessions: int = SESSIONS) -> None:
    def add() -> None:
        for number in range(sessions):
            db.create_session(f"s{number}", "cli")
            for row in range(ROWS):
                text = " ".join(f"word{(number * 31 + row * 7 + at * at) % 4001}" for at in range(80))
                db.append_message(f"s{number}", "user", text)

    db.transaction(add)


def delete(db: SessionDB, ids: list[str]) -> None:
    db.transaction(lambda: [db.delete_session(session_id) for session_id in ids])


def bytes_of(db: SessionDB) -> int:
    """The size of the file when all changes are in it."""
    return number(db, "page_count") * number(db, "page_size")


def number(db: SessionDB, pragma: str) -> int:
    return db.engine.read(lambda tx: int(tx.value(f"PRAGMA {pragma}")))


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment without work is an idle one."""
    monkeypatch.setattr(engine, "UPKEEP_IDLE_S", 0.01)
    monkeypatch.setattr(engine, "UPKEEP_PAUSE_S", 0.0)


@pytest.mark.usefixtures("idle")
def test_give_back_space_shrinks_file_while_it_is_read(file_db: SessionDB) -> None:
    fill(file_db)
    path = file_db.path
    assert path is not None
    before = bytes_of(file_db)
    texts = {session_id: file_db.get_messages(session_id) for session_id in LEFT}
    ended, faults, rounds = threading.Event(), [], []

    def read() -> None:
        for session_id in itertools.cycle(LEFT):
            if ended.is_set():
                return
            try:
                if file_db.get_messages(session_id) != texts[session_id]:
                    faults.append(session_id)
            except Exception as error:
                faults.append(error)
            rounds.append(session_id)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        delete(file_db, OLD)
        # A reader that begins just then may keep a fold from its end; the next one does it.
        until_blocking(lambda: path.stat().st_size < 0.55 * before)
    finally:
        ended.set()
        for reader in readers:
            reader.join()
    assert not faults and rounds
    assert file_db.check(deep=True) == []
    assert {session_id: file_db.get_messages(session_id) for session_id in LEFT} == texts
    assert len(file_db.search_messages("word0", limit=500)) > 0


@pytest.mark.usefixtures("idle")
def test_deleted_text_is_erased_from_wal(file_db: SessionDB) -> None:
    path = file_db.path
    assert path is not None
    fill(file_db, 20)
    file_db.create_session("gone", "cli")
    file_db.append_message("gone", "user", "unmistakable")
    file_db.delete_session("gone")
    until_blocking(lambda: side(path, "-wal").stat().st_size == 0)
    assert b"unmistakable" not in path.read_bytes()


def test_give_back_space_works_in_small_steps(file_db: SessionDB, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the time is always up, a step still frees one page."""
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr(engine, "UPKEEP_IDLE_S", 3600.0)
    fill(file_db)
    delete(file_db, OLD)
    slow = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr(space, "time", slow)
    monkeypatch.setattr(schema, "time", slow)
    merged: list[str] = []
    execute = Tx.execute

    def record_merges(self: Tx, sql: str, params: object = ()) -> int:
        merged.extend([sql] if "'merge'" in sql else [])
        return execute(self, sql, params)  # type: ignore[arg-type]

    monkeypatch.setattr(Tx, "execute", record_merges)
    assert file_db.engine.write(schema._upkeep) == "more"
    assert len(merged) == 1
    monkeypatch.setattr(Tx, "execute", execute)
    file_db.engine.write(lambda tx: tx.execute("DELETE FROM state_meta WHERE key = ?", (schema.PURGE_DUE,)))
    free = number(file_db, "freelist_count")
    assert free > 2 * FREE_PAGES_KEPT_MIN
    assert file_db.engine.write(schema._upkeep) == "more"
    assert number(file_db, "freelist_count") == free - 1


def test_give_back_space_keeps_some_free_pages(file_db: SessionDB) -> None:
    fill(file_db)
    delete(file_db, OLD)
    before = number(file_db, "page_count")
    file_db.give_back_space()
    assert number(file_db, "page_count") < 0.75 * before
    assert FREE_PAGES_KEPT_MIN / 2 < number(file_db, "freelist_count") < 0.2 * before
    assert file_db.engine.write(space.give_back) == "nothing"


# ---- files of before


def of_before(path: Path, sessions: int = SESSIONS) -> None:
    """A file that does not give its space back."""
    with closing(SessionDB(path)) as db:
        fill(db, sessions)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA auto_vacuum = 0")
        connection.execute("VACUUM")
    assert look(path, "PRAGMA auto_vacuum") == [(0,)]


def test_new_files_use_incremental_auto_vacuum(tmp_path: Path) -> None:
    with closing(SessionDB(tmp_path / "state.db")) as db:
        assert number(db, "auto_vacuum") == INCREMENTAL
    with closing(ResponseStore(10, tmp_path / "response_store.db")) as responses:
        responses.put("resp_1", {"response": {"status": "completed"}})
    assert look(tmp_path / "response_store.db", "PRAGMA auto_vacuum") == [(INCREMENTAL,)]


def test_small_old_file_is_converted_to_incremental_vacuum_on_open(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    of_before(path)
    with closing(SessionDB(path)) as db:
        assert number(db, "auto_vacuum") == INCREMENTAL
        assert db.check(deep=True) == []
        assert len(db.get_messages("s7")) == ROWS


@pytest.mark.parametrize("way", ["optimize", "prune"])
def test_large_old_file_is_converted_by_explicit_vacuum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    path = tmp_path / "state.db"
    of_before(path)
    monkeypatch.setattr(opening, "VACUUM_AT_OPENING_BYTES_MAX", 4096)
    with closing(SessionDB(path)) as db:
        assert number(db, "auto_vacuum") == 0
        before = bytes_of(db)
        if way == "prune":
            for session_id in OLD:
                db.end_session(session_id, "done")
            assert len(db.prune_sessions(older_than_days=0)) == len(OLD)
        else:
            delete(db, OLD)
            db.optimize()
        assert look(path, "PRAGMA auto_vacuum") == [(INCREMENTAL,)]
        assert bytes_of(db) < 0.7 * before
        assert db.check(deep=True) == []
