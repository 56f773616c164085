"""Prompts are kept once, whatever number of sessions and runs has them."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from hermes.core.home import Home
from hermes.core.limits import PROMPT_USE_NOTED_S
from hermes.core.spec import RunSpec
from hermes.services.housekeeping import sweep_if_due
from hermes.settings import config
from hermes.store import prompts
from hermes.store.sessions import SessionDB
from hermes.store.sqlite.schema import MIGRATIONS
from hermes.store.stores import Store, open_store
from support.waiting import DEADLINE_S

from .tools import Turn, look, raw, side, url

PROMPT = "You are an assistant of many words. " * 100


def stored_prompts(store: Store) -> list[str]:
    return store.engine.read(lambda tx: [row[0] for row in tx.rows("SELECT text FROM prompts ORDER BY text")])


def stored_bytes(store: Store, table: str) -> int:
    """The length of everything in the rows of a table."""

    def measure(tx: object) -> int:
        rows = tx.rows(f"SELECT * FROM {table}")  # type: ignore[attr-defined]
        return sum(len(str(value)) for row in rows for value in tuple(row))

    return store.engine.read(measure)


def test_system_prompt_is_stored_once_for_all_sessions(store: Store) -> None:
    for number in range(20):
        store.sessions.create_session(f"s{number}", "api_server", system_prompt=PROMPT)
    assert stored_prompts(store) == [PROMPT]
    assert stored_bytes(store, "sessions") < 20 * 500
    for number in range(20):
        session = store.sessions.get_session(f"s{number}")
        assert session is not None and session["system_prompt"] == PROMPT
        exported = store.sessions.export_session(f"s{number}")
        assert exported is not None and exported["system_prompt"] == PROMPT
    fork = store.sessions.get_session(store.sessions.fork_session("s1"))
    assert fork is not None and fork["system_prompt"] == PROMPT
    assert stored_prompts(store) == [PROMPT]


def test_known_prompt_does_not_wait_for_a_row_lock(postgres_store: Store, postgres_schema: str) -> None:
    postgres_store.sessions.create_session("s1", "api_server", system_prompt=PROMPT)
    with psycopg.connect(postgres_schema) as connection:
        connection.execute("SELECT 1 FROM hermes.prompts FOR UPDATE")
        with ThreadPoolExecutor() as pool:
            future = pool.submit(postgres_store.sessions.create_session, "s2", "api_server", system_prompt=PROMPT)
            try:
                future.result(DEADLINE_S)
            finally:
                connection.rollback()
    assert stored_prompts(postgres_store) == [PROMPT]


def test_system_prompt_is_filled_once_and_updated_explicitly(store: Store) -> None:
    store.sessions.create_session("s", "cli")
    for prompt, expected in (("first", "first"), ("second", "first")):
        store.sessions.create_session("s", "cli", system_prompt=prompt)
        session = store.sessions.get_session("s")
        assert session is not None and session["system_prompt"] == expected
    for prompt in ("third", None, "third"):
        store.sessions.update_session("s", system_prompt=prompt)
        session = store.sessions.get_session("s")
        assert session is not None and session["system_prompt"] == prompt


@pytest.mark.parametrize("instructions", [None, "", "Be kind.", PROMPT, "half \ud83d of a pair"])
def test_run_instructions_are_deduplicated(store: Store, instructions: str | None) -> None:
    specs = [RunSpec("hi", "s", instructions=instructions) for _ in range(5)]
    for spec in specs:
        store.runs.create(spec)
    expected = instructions.replace("\ud83d", "\ufffd") if instructions else instructions
    assert stored_prompts(store) == ([expected] if expected else [])
    assert stored_bytes(store, "runs") < 5 * 700
    records = [*store.runs.list(), *store.runs.unfinished(), store.runs.get(specs[0].run_id)]
    assert [record.spec.instructions for record in records if record is not None] == [expected] * 11
    assert len(store.runs.page(owner=None, limit=10)[0]) == 5


def test_existing_prompt_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(open_store(url(path))) as store:
        store.engine.write(lambda tx: prompts.put(tx, PROMPT))
        before = side(path, "-wal").read_bytes()
        assert before
        for _ in range(3):
            store.engine.write(lambda tx: prompts.put(tx, PROMPT))
        assert side(path, "-wal").read_bytes() == before


def test_unused_prompts_are_removed(store: Store, tmp_path: Path) -> None:
    store.sessions.create_session("s", "cli", system_prompt="of a session")
    store.sessions.create_session("changed", "cli", system_prompt="of before")
    store.sessions.update_session("changed", system_prompt="of a changed session")
    store.sessions.create_session("gone", "cli", system_prompt="of a deleted session")
    turn = Turn(store, "s", instructions="of a run")
    turn.begin()
    removed = Turn(store, "s", instructions="of a removed run")
    removed.begin()
    removed.end()
    store.sessions.delete_session("gone")
    assert store.runs.remove(removed.run_id)
    assert store.sessions.remove_unused_prompts() == 0  # they were in use a moment ago
    (tmp_path / "config").mkdir()
    age(store)
    store.engine.write(lambda tx: prompts.put(tx, "of before"))
    report = sweep_if_due(store, config.load(Home(tmp_path / "config"), environ={}))
    assert report is not None and report["prompts"] == 2
    assert stored_prompts(store) == sorted(["of a session", "of a changed session", "of a run", "of before"])
    age(store)
    assert store.sessions.remove_unused_prompts() == 1
    assert "of before" not in stored_prompts(store)


def age(store: Store) -> None:
    ago = time.time() - 3 * PROMPT_USE_NOTED_S
    store.engine.write(lambda tx: tx.execute("UPDATE prompts SET used_at = ?", (ago,)))


def test_prompt_reused_during_cleanup_is_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.engine.write(lambda tx: prompts.put(tx, PROMPT))
    age(store)
    look_for = SessionDB._unused

    def use_meanwhile(self: SessionDB, before: float) -> list[str]:
        unused = look_for(self, before)
        assert len(unused) == 1
        store.sessions.create_session("s", "cli", system_prompt=PROMPT)
        return unused

    monkeypatch.setattr(SessionDB, "_unused", use_meanwhile)
    assert store.sessions.remove_unused_prompts() == 0
    session = store.sessions.get_session("s")
    assert session is not None and session["system_prompt"] == PROMPT


def test_migration_keeps_prompts_of_sessions_and_runs(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    sessions = {"a": PROMPT, "b": PROMPT, "c": "Another.", "d": None}
    spec = RunSpec("hi", "a", instructions="Be kind.")
    with raw(path) as db:
        for statement in [statement for step in MIGRATIONS[:7] for statement in step]:
            db.execute(statement)
        db.execute("PRAGMA user_version = 7")
        for session_id, prompt in sessions.items():
            values = (session_id, prompt, f"digest of {session_id}")
            db.execute(
                "INSERT INTO sessions (id, system_prompt, prompt_digest, owner, source, kind, started_at, last_active) "
                "VALUES (?, ?, ?, 'default', 'cli', 'root', 1, 1)",
                values,
            )
        db.execute(
            "INSERT INTO runs (run_id, spec, session_id, owner, kind, source, holder, status, created_at, updated_at) "
            "VALUES (?, ?, 'a', 'default', 'run', 'api_server', '', 'queued', 1, 1)",
            (spec.run_id, json.dumps(spec.stored())),
        )
    with closing(open_store(url(path))) as store:
        rows = {session: store.sessions.get_session(session) for session in sessions}
        assert {session: row and row["system_prompt"] for session, row in rows.items()} == sessions
        assert {session: row and row["prompt_digest"] for session, row in rows.items()} == {
            session: f"digest of {session}" for session in sessions
        }
        assert stored_prompts(store) == sorted({PROMPT, "Another."})
        record = store.runs.get(spec.run_id)
        assert record is not None and record.spec == spec
        assert store.sessions.remove_unused_prompts() == 0
        # What is said now is known by the same hash.
        store.sessions.create_session("new", "cli", system_prompt=PROMPT)
        assert len(stored_prompts(store)) == 2
    assert "system_prompt" not in {row[1] for row in look(path, "PRAGMA table_info(sessions)")}
