"""Files of older versions: brought up step by step, each step whole or not at all."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from hermes.store.base import StoreError
from hermes.store.schema import MIGRATIONS
from hermes.store.sessions import SessionDB

from .tools import (
    LATEST,
    PATIENCE_S,
    contents,
    finish,
    has_table,
    kill,
    look,
    mode,
    next_program,
    raw,
    texts,
    umask,
    whole_step,
)

OLD = range(LATEST)


def fill(db: sqlite3.Connection, table: str, **values: Any) -> None:
    """Add a row to a table of any version; columns that must have a value and have none get one."""
    for _, name, kind, required, default, _ in db.execute(f"PRAGMA table_info({table})").fetchall():
        if required and default is None and name not in values:
            values[name] = 0 if kind.upper() in ("INTEGER", "REAL") else ""
    columns, marks = ", ".join(values), ", ".join("?" * len(values))
    db.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", list(values.values()))


def older(path: Path, version: int, rows: int = 5) -> None:
    """A file as a Hermes of that version left it."""
    with raw(path) as db:
        db.execute("PRAGMA journal_mode = wal")
        for step in MIGRATIONS[:version]:
            for statement in step:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {version}")
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'messages'").fetchone():
            fill(db, "sessions", id="s", owner="default", source="cli", kind="root", message_count=rows)
            for number in range(rows):
                fill(db, "messages", session_id="s", role="user", content=f"number {number} zebra", timestamp=number)


def shape(path: Path) -> list[tuple[Any, ...]]:
    """Everything that makes up the schema."""
    return look(
        path, "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY 1, 2"
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.mark.parametrize("version", OLD)
def test_a_file_of_an_older_version_is_brought_up_with_its_rows(path: Path, version: int) -> None:
    older(path, version)
    had = has_table(path, "messages")
    before = look(path, "SELECT id, session_id, role, content, timestamp FROM messages") if had else []
    with contextlib.closing(SessionDB(path)) as db:
        if had:
            assert texts(db, "s") == [f"number {number} zebra" for number in range(5)]
            assert sorted(hit["id"] for hit in db.search_messages("zebra")) == [row[0] for row in before]
            assert db.get_session("s")["message_count"] == 5
        db.create_session("t", "cli")
        added = db.append_message("t", "user", "giraffe")
        assert [hit["id"] for hit in db.search_messages("giraffe")] == [added]
    assert look(path, "PRAGMA user_version") == [(LATEST,)]
    assert look(path, "SELECT id, session_id, role, content, timestamp FROM messages")[: len(before)] == before


@pytest.mark.parametrize("version", OLD)
def test_a_file_brought_up_has_the_shape_of_a_new_one(path: Path, tmp_path: Path, version: int) -> None:
    older(path, version)
    SessionDB(path).close()
    SessionDB(tmp_path / "new.db").close()
    assert shape(path) == shape(tmp_path / "new.db")


def test_the_latest_version_is_left_as_it_is(path: Path) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        db.create_session("s", "cli")
    before = contents(path.parent)
    SessionDB(path).close()
    assert contents(path.parent) == before


def test_a_file_keeps_its_privacy_when_it_is_brought_up(path: Path) -> None:
    with umask(0o077):
        older(path, 1)
    with umask(0), contextlib.closing(SessionDB(path)) as db:
        db.create_session("t", "cli")
        assert {mode(file) for file in path.parent.iterdir() if file.is_file()} == {0o600}


# ---- a step that fails or is cut short


def test_a_step_that_fails_leaves_the_version_before_it(path: Path) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        db.create_session("s", "cli")
        for number in range(20):
            db.append_message("s", "user", str(number))
    body = """
        import json, sys
        from hermes.store.base import StoreError
        from hermes.store.sessions import SessionDB

        add_step("INSERT INTO nowhere VALUES (1)")
        try:
            SessionDB(sys.argv[1])
            print(json.dumps("it worked"))
        except StoreError as error:
            print(json.dumps(error.message))
    """
    said = finish(next_program(path, body))
    assert said != "it worked"
    assert said.endswith(".")
    assert whole_step(path) == LATEST
    with contextlib.closing(SessionDB(path)) as db:
        assert len(texts(db, "s")) == 20


def test_a_step_that_succeeds_is_whole(path: Path) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        db.create_session("s", "cli")
        db.append_message("s", "user", "x")
    body = """
        import json, sys
        from hermes.store.sessions import SessionDB

        add_step()
        SessionDB(sys.argv[1]).close()
        print(json.dumps("done"))
    """
    assert finish(next_program(path, body)) == "done"
    assert whole_step(path) == LATEST + 1


@pytest.mark.parametrize("part", range(5))
def test_a_process_killed_in_the_middle_of_a_step_leaves_the_version_before_it(path: Path, part: int) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        db.create_session("s", "cli")
        for number in range(20):
            db.append_message("s", "user", str(number))
    # The process ends itself, as by a power failure, when it has carried out so much of the step.
    body = f"""
        import os, signal, sqlite3, sys
        from hermes.store import connections
        from hermes.store.sessions import SessionDB

        class Mortal(connections.Connection):
            left = {part} + 2

            def execute(self, sql, *args):
                if sql in schema.STATE.migrations[-1] or self.left <= {part} + 1:
                    self.left -= 1
                    if not self.left:
                        os.kill(os.getpid(), signal.SIGKILL)
                return super().execute(sql, *args)

        connect = sqlite3.connect
        sqlite3.connect = lambda *args, **fields: connect(*args, **{{**fields, "factory": Mortal}})
        add_step()
        SessionDB(sys.argv[1])
    """
    program = next_program(path, body)
    program.communicate(timeout=PATIENCE_S)
    assert program.returncode == -9
    assert whole_step(path) == LATEST
    with contextlib.closing(SessionDB(path)) as db:
        assert len(texts(db, "s")) == 20


def test_two_processes_that_bring_up_a_file_at_once_do_it_once(path: Path) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        db.create_session("s", "cli")
        for number in range(50):
            db.append_message("s", "user", str(number))
    body = """
        import json, sys
        from hermes.store.sessions import SessionDB

        add_step()
        print("ready", flush=True)
        sys.stdin.readline()
        db = SessionDB(sys.argv[1])
        print(json.dumps(len(db.get_messages("s"))))
        db.close()
    """
    programs = [next_program(path, body) for _ in range(4)]
    try:
        for program in programs:
            assert program.stdout.readline() == "ready\n"
        for program in programs:
            program.stdin.write("go\n")
            program.stdin.flush()
        assert [finish(program) for program in programs] == [50] * 4
    finally:
        for program in programs:
            if program.poll() is None:
                kill(program)
    assert whole_step(path) == LATEST + 1


def test_a_reader_does_not_bring_up_a_file(path: Path) -> None:
    older(path, LATEST - 1)
    before = path.read_bytes()
    with pytest.raises(StoreError) as refusal:
        SessionDB(path, read_only=True)
    assert refusal.value.message.endswith(".")
    assert path.read_bytes() == before
