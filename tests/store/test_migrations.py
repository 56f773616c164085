"""Files of older versions: brought up step by step, each step whole or not at all."""

from __future__ import annotations

import contextlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hermes.store.base import StoreError
from hermes.store.leases import Leases
from hermes.store.sessions import SessionDB
from hermes.store.sqlite.schema import MIGRATIONS
from hermes.store.stores import open_store

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
def test_migration_keeps_rows(path: Path, version: int) -> None:
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
def test_migrated_schema_equals_new_schema(path: Path, tmp_path: Path, version: int) -> None:
    older(path, version)
    SessionDB(path).close()
    SessionDB(tmp_path / "new.db").close()
    assert shape(path) == shape(tmp_path / "new.db")


def test_latest_version_is_not_migrated(path: Path) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        db.create_session("s", "cli")
    before = contents(path.parent)
    SessionDB(path).close()
    assert contents(path.parent) == before


def test_migration_keeps_file_private(path: Path) -> None:
    with umask(0o077):
        older(path, 1)
    with umask(0), contextlib.closing(SessionDB(path)) as db:
        db.create_session("t", "cli")
        assert {mode(file) for file in path.parent.iterdir() if file.is_file()} == {0o600}


# ---- a step that fails or is cut short


def test_failed_migration_step_is_rolled_back(path: Path) -> None:
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
    output = finish(next_program(path, body))
    assert output != "it worked"
    assert output.endswith(".")
    assert whole_step(path) == LATEST
    with contextlib.closing(SessionDB(path)) as db:
        assert len(texts(db, "s")) == 20


def test_successful_migration_step_is_complete(path: Path) -> None:
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
def test_kill_during_migration_step_keeps_previous_version(path: Path, part: int) -> None:
    with contextlib.closing(SessionDB(path)) as db:
        db.create_session("s", "cli")
        for number in range(20):
            db.append_message("s", "user", str(number))
    # The process ends itself, as by a power failure, when it has carried out so much of the step.
    body = f"""
        import os, signal, sqlite3, sys
        from hermes.store.sqlite import connections
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


def test_concurrent_migration_runs_once(path: Path) -> None:
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


def test_read_only_open_does_not_migrate(path: Path) -> None:
    older(path, LATEST - 1)
    before = path.read_bytes()
    with pytest.raises(StoreError) as refusal:
        SessionDB(path, read_only=True)
    assert refusal.value.message.endswith(".")
    assert path.read_bytes() == before


# ---- what older versions wrote

SUMMARY = "[Summary of the conversation so far]\n"
GO_ON = "Understood; I go on from there."


@pytest.fixture
def compacted(path: Path) -> Path:
    """A file in which a Hermes of version 5 has compacted sessions: it kept copies of rows under new ids."""
    with raw(path) as db:
        db.execute("PRAGMA journal_mode = wal")
        for statement in [statement for step in MIGRATIONS[:5] for statement in step]:
            db.execute(statement)
        db.execute("PRAGMA user_version = 5")
        db.executescript(Path(__file__).with_name("compacted_by_version_5.sql").read_text())
    return path


@pytest.mark.parametrize(
    ("session", "expected", "names"),
    [
        (
            "twice",
            ["u1", "a2", "u3", "a4", "u5", "a6", "u7", "a8", "u9", "[Stopped by the user.]"],
            ["u1", "a2", f"{SUMMARY}two", GO_ON, "u7", "a8", "u9", "[Stopped by the user.]"],
        ),
        ("rewound", ["u11", "a12", "u13", "a14"], [f"{SUMMARY}three", GO_ON, "u13", "a14"]),
        ("fork", ["u1", "a2", "u7", "a8"], ["u1", "a2", f"{SUMMARY}two", GO_ON, "u7", "a8"]),
        ("plain", ["u21", "a22"], ["u21", "a22"]),
    ],
)
def test_migration_deduplicates_rows_of_older_compaction(
    compacted: Path, session: str, expected: list[str], names: list[str]
) -> None:
    first = {text: row_id for row_id, text in look(compacted, "SELECT min(id), content FROM messages GROUP BY content")}
    with contextlib.closing(SessionDB(compacted)) as db:
        assert texts(db, session) == expected
        if session != "fork":
            assert [row["id"] for row in db.get_messages(session)] == [first[text] for text in expected]
        assert [message["content"] for message in db.get_messages_as_conversation(session)] == names
        assert db.get_session(session)["message_count"] == len(expected)
        everything = [row["id"] for row in db.get_messages(session, include_inactive=True) if not row["model_only"]]
        taken_back = ["u15", "a16"] if session == "rewound" else []
        assert len(everything) == len(expected) + len(taken_back)
        db.append_message(session, "user", "more")
        assert [message["content"] for message in db.get_messages_as_conversation(session)] == [*names, "more"]
        assert len(db.search_messages("u7")) == 2  # of the session and of its fork
        assert db.check(deep=True) == []


def test_migration_maps_fork_from_copy_to_original_message(compacted: Path) -> None:
    [(message_id,)] = look(compacted, "SELECT min(id) FROM messages WHERE content = 'a8'")
    with contextlib.closing(SessionDB(compacted)) as db:
        assert db.get_session("fork")["forked_at_message_id"] == message_id


def test_usage_leases_and_the_last_token_are_those_of_before(path: Path) -> None:
    older(path, 9)
    used = {"calls": 2, "input_tokens": 10, "output_tokens": 3, "actual_cost_usd": 0.5}
    with raw(path) as db:
        fill(db, "session_model_usage", session_id="s", model="m", provider="p", task="", **used)
        fill(db, "session_model_usage", session_id="s", model="a", provider="p", task="title", calls=1)
        fill(db, "leases", name="session:s", holder="another host:1:1", token=7, until=2**40)
        fill(db, "state_meta", key="lease_token", value="9")
    with contextlib.closing(SessionDB(path)) as db:
        title, turns = db.get_usage("s")
        assert (title["model"], title["calls"], title["actual_cost_usd"]) == ("a", 1, None)
        assert {name: turns[name] for name in used} == used
        assert look(path, "SELECT model, calls FROM session_model_usage ORDER BY 1") == [("a", 1), ("m", 2)]
        leases = Leases(db.engine)
        assert leases.holder("session:s") == "another host:1:1"
        assert leases.acquire("session:t", "me", 60) == 10


def test_migration_keeps_logs_and_messages_of_runs(path: Path) -> None:
    with raw(path) as db:
        for statement in [statement for step in MIGRATIONS[:10] for statement in step]:
            db.execute(statement)
        db.execute("PRAGMA user_version = 10")
        fill(db, "sessions", id="s", owner="default", source="cli", kind="root")
        fill(
            db,
            "runs",
            run_id="r",
            session_id="s",
            owner="guest",
            kind="chat",
            source="cli",
            spec='{"user_message":"hi"}',
        )
        for number in range(1, 4):
            fill(db, "run_events", run_id="r", seq=2 * number, ts=number / 8, type="notice", data=f'{{"n":{number}}}')
        for run_id in ("other", "r", "r"):
            fill(db, "messages", session_id="s", role="user", content=f"of {run_id}", timestamp=1, run_id=run_id)
        fill(db, "sessions", id="b", owner="default", source="cli", kind="root", base_id="b")
        fill(db, "sessions", id="b-2", owner="default", source="cli", kind="root", base_id="b")
    with closing(open_store(f"sqlite://{path}")) as store:
        log = [(e.seq, e.ts, e.type, e.data) for e in store.runs.read("r", 2, 10)]
        assert log == [(4, 0.25, "notice", {"n": 2}), (6, 0.375, "notice", {"n": 3})]
        assert [row.id for row in store.runs.rows("r")] == [2, 3]
        record = store.runs.get("r")
        assert record is not None and (record.spec.kind, record.spec.owner) == ("chat", "guest")
        assert store.sessions.bind_session("b", []) == "b-3"
    assert look(path, "SELECT run_id, seq, ts, type, step, data FROM run_events LIMIT 1") == [
        ("r", 2, 0.125, "notice", 0, '{"n":1}')
    ]
