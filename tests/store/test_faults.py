"""What once went wrong in the store, or nearly did."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hermes.core.errors import ConfigError
from hermes.core.events import Event
from hermes.core.spec import RunSpec
from hermes.store import connections
from hermes.store import engine as engine_module
from hermes.store.base import LeaseLost, SessionBusy, StoreBusy, StoreError
from hermes.store.maintenance import repair
from hermes.store.search import fts_query
from hermes.store.sessions import SessionDB
from hermes.store.stores import Async, Store, open_store, store_at


@pytest.mark.parametrize("session_id", [".", "..", "a/..", "a..b"])
def test_an_id_leads_nowhere_but_to_its_own_folder(file_db: SessionDB, session_id: str) -> None:
    assert file_db.path is not None
    others = file_db.path.parent / "uploads" / "other"
    others.mkdir(parents=True)
    with pytest.raises(ValueError, match="session id"):
        file_db.create_session(session_id, "cli")
    file_db.delete_session(session_id)
    assert others.exists()


def test_a_copy_of_a_database_leaves_the_folders_of_the_home_alone(file_db: SessionDB) -> None:
    assert file_db.path is not None
    file_db.create_session("s", "cli")
    folder = file_db.path.parent / "uploads" / "s"
    folder.mkdir(parents=True)
    file_db.backup(file_db.path.with_name("copy.db"))
    with contextlib.closing(SessionDB(file_db.path.with_name("copy.db"))) as copy:
        assert copy.delete_session("s")
    assert folder.exists()


def test_a_log_that_has_ended_takes_nothing_more(store: Store) -> None:
    spec = RunSpec("hi", "s")
    store.runs.create(spec)

    def event(type_: str, seq: int) -> Event:
        return Event(spec.run_id, type_, 0, {"model": "m", "provider": "p"}, seq, 1.0)

    store.runs.append(spec.run_id, None, [event("run.started", 2)])
    with pytest.raises(LeaseLost):
        store.runs.append(spec.run_id, None, [event("notice", 2)])
    store.runs.append(spec.run_id, None, [event("run.completed", 3)])
    with pytest.raises(LeaseLost):
        store.runs.append(spec.run_id, None, [event("notice", 4)])
    assert [e.seq for e in store.runs.durable(spec.run_id)] == [2, 3]


@pytest.mark.parametrize("text", ["Über", "été", "École normale", "naïve", "x-ray", "日本", "", "…", "don't"])
def test_a_sound_index_is_not_made_anew(tmp_path: Path, text: str) -> None:
    with contextlib.closing(SessionDB(tmp_path / "state.db")) as db:
        db.create_session("s", "cli")
        db.append_message("s", "user", text)
    with contextlib.closing(SessionDB(tmp_path / "state.db")) as db:
        assert db.notices == []


def test_what_the_collector_takes_away_hangs_nobody(tmp_path: Path) -> None:
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
    done = subprocess.run(
        [sys.executable, "-c", lines, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "done\n", done.stderr


def test_a_database_that_nobody_holds_any_more_is_closed(tmp_path: Path) -> None:
    SessionDB(tmp_path / "state.db").create_session("s", "cli")
    gc.collect()
    SessionDB(tmp_path / "other.db").close()
    assert [path.name for path in tmp_path.glob("state.db*")] == ["state.db"]


def test_a_rewind_hides_what_was_summarised_since(db: SessionDB) -> None:
    db.create_session("s", "cli", base_id="api-1")
    for number in range(1, 11):
        db.append_message("s", "user" if number % 2 else "assistant", f"word{number}")
    said = db.get_messages_as_conversation("s")
    db.archive_and_compact("s", [*said[:4], {"role": "user", "content": "a summary"}, *said[8:]])
    target = next(row for row in db.get_messages("s") if row["content"] == "word3")
    db.rewind_to_message("s", target["id"])
    assert [row["content"] for row in db.get_messages("s")] == ["word1", "word2"]
    found = [n for n in range(1, 11) if db.search_messages(f"word{n}")]
    assert found == [1, 2]
    history = [{"role": "user", "content": "word1"}, {"role": "assistant", "content": "word2"}]
    assert db.bind_session("api-1", history) == "s"


def test_a_repeated_row_is_the_copy_of_the_right_one(db: SessionDB) -> None:
    db.create_session("s", "cli")
    ids = [db.append_message("s", role, text) for role, text in _talk("yes", "A", "yes", "B")]
    said = db.get_messages_as_conversation("s")
    db.archive_and_compact("s", [{"role": "user", "content": "a summary"}, *said[2:]])
    db.rewind_to_message("s", ids[2])
    assert {hit["id"] for hit in db.search_messages("yes OR A OR B")} == set(ids[:2])


def _talk(*texts: str) -> list[tuple[str, str]]:
    return [("assistant" if at % 2 else "user", text) for at, text in enumerate(texts)]


async def test_reading_from_a_closed_store_is_told(tmp_path: Path) -> None:
    for number in range(20):
        store = Async(open_store(f"sqlite://{tmp_path}/{number}.db"))
        await asyncio.gather(*(store.sessions.get_session("a") for _ in range(4)))
        store.close()
        with pytest.raises(StoreError, match="closed"):
            async with asyncio.timeout(5):
                await store.sessions.get_session("a")


async def test_an_exception_that_no_future_can_carry_hangs_nobody(tmp_path: Path) -> None:
    store = Async(open_store(f"sqlite://{tmp_path}/state.db"))
    await store.sessions.create_session("s", "cli")
    odd = store.transaction(lambda: next(iter(())))
    async with asyncio.timeout(5):
        told = await asyncio.gather(
            odd, *(store.sessions.append_message("s", "user", "x") for _ in range(5)), return_exceptions=True
        )
    assert isinstance(told[0], RuntimeError) and all(isinstance(one, int) for one in told[1:])
    store.close()


def test_everybody_waits_for_another_process_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(connections, "BUSY_S_MAX", 0.3)
    monkeypatch.setattr(connections, "BUSY_TIMEOUT_S", 0.05)
    db = SessionDB(tmp_path / "state.db")
    db.create_session("s", "cli")
    tries: list[int] = []
    patiently = connections.patiently
    monkeypatch.setattr(engine_module, "patiently", lambda *args: tries.append(1) or patiently(*args))
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(db.append_message, "s", "user", "x") for _ in range(8)]
        told = [one.exception() for one in waiting]
    other.close()
    assert all(isinstance(one, StoreBusy) for one in told)
    assert len(tries) <= 4
    db.close()


def test_prefixes_are_few_and_not_of_one_letter() -> None:
    query = fts_query("a* bc* de* fg* hi* jk*")
    assert query.count("*") == 4 and '"a" AND' in query


@pytest.mark.parametrize(
    "fields",
    [
        {"content": [{"type": "text", "text": "a\x00", "x": float("nan")}]},
        {"tool_calls": [{"id": [1]}]},
        {},
    ],
    ids=["no number", "an odd id", "nested"],
)
def test_what_was_written_can_be_read(db: SessionDB, fields: dict[str, Any]) -> None:
    if not fields:
        value: Any = 1
        for _ in range(5000):
            value = [value]
        fields = {"content": [{"type": "text", "text": "x", "deep": value}]}
    db.create_session("s", "cli")
    db.append_message("s", "assistant", **fields)
    db.append_message("s", "tool", "x", tool_call_id="1")
    assert len(db.get_messages("s")) == len(db.get_messages_as_conversation("s")) == 2


def test_nothing_is_repaired_that_is_in_use(file_db: SessionDB) -> None:
    assert file_db.path is not None
    with pytest.raises(StoreBusy):
        repair(file_db.path)
    program = "import sys; from hermes.store.sessions import SessionDB; db = SessionDB(sys.argv[1]); print('up', flush=True); sys.stdin.read()"
    path = file_db.path.with_name("other.db")
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "up\n"
        with pytest.raises(StoreBusy):
            repair(path)
        other.communicate("")


def test_what_needs_the_whole_file_is_refused_in_a_transaction(store: Store) -> None:
    with pytest.raises(StoreError, match="transaction"):
        store.transaction(store.sessions.optimize)


def test_an_imported_row_enters_no_run_of_somebody_else(store: Store) -> None:
    spec = RunSpec("hi", "mine", run_id="run_1")
    store.runs.create(spec)
    store.sessions.create_session("mine", "cli")
    store.sessions.append_message("mine", "user", "hello", run_id="run_1")
    foreign = {"role": "assistant", "content": "INJECTED", "run_id": "run_1"}
    done = store.sessions.import_sessions([{"format": "hermes.session/1", "id": "other", "messages": [foreign]}])
    assert done["imported"] == 1
    assert [row.content for row in store.runs.rows("run_1")] == ["hello"]


@pytest.mark.parametrize(
    "fields",
    [
        {"message_count": 2**70},
        {"started_at": float("nan")},
        {"started_at": float("inf")},
        {"last_active": -5.0},
        {"end_reason": "x" * 5000},
        {"messages": [{"role": "user", "content": "x", "token_count": 2**65}]},
        {"usage": [{"model": "m", "calls": 2**64}]},
    ],
)
def test_numbers_that_cannot_be_kept_are_refused(db: SessionDB, fields: dict[str, Any]) -> None:
    done = db.import_sessions([{"format": "hermes.session/1", "id": "s", **fields}])
    assert done["ok"] is False and done["errors"][0]["index"] == 0
    assert db.get_session("s") is None


def test_a_session_is_not_its_own_parent(db: SessionDB) -> None:
    done = db.import_sessions([{"format": "hermes.session/1", "id": "s", "parent_session_id": "s"}])
    assert (done["imported"], done["detached"]) == (1, 1)


def test_an_index_that_does_not_fit_its_messages_is_found_out(file_db: SessionDB) -> None:
    file_db.create_session("s", "cli")
    row = file_db.append_message("s", "user", "apple pie")
    sql = "INSERT INTO messages_fts(messages_fts, rowid, body, tool) VALUES ('delete', ?, 'apple pie', NULL)"
    file_db.engine.write(lambda tx: tx.execute(sql, (row,)))
    assert file_db.check(deep=True) != []


def test_who_has_lost_a_job_gives_nothing_back(store: Store) -> None:
    store.jobs.create({"id": "j", "next_run_at": 1.0})
    assert store.jobs.claim_due(10.0, "a", ttl=5)
    assert store.jobs.claim_due(20.0, "b", ttl=5)
    assert store.jobs.finish("j", holder="a", next_run_at=None) is None
    assert store.jobs.claim_due(21.0, "c", ttl=5) == []
    assert store.jobs.finish("j", holder="b", next_run_at=None) is not None


def test_one_that_is_busy_keeps_no_other_from_being_pruned(store: Store) -> None:
    db = store.sessions
    for name in ("a", "b", "c"):
        db.create_session(name, "cli")
        db.end_session(name, "cli_close")
    db.create_session("child", "subagent", kind="delegate", parent_session_id="b")
    db.engine.write(lambda tx: tx.execute("UPDATE sessions SET last_active = 1"))
    assert store.leases.acquire("session:child", "somebody", 60)
    assert db.prune_sessions() == ["a", "c"]
    with pytest.raises(SessionBusy):
        db.delete_session("b")


@pytest.mark.parametrize(
    "url", ["postgresql://host/db?user=u&password=hunter2", "postgres:u:hunter2", "mysql://u:hunter2@h"]
)
def test_an_address_is_not_quoted(url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        store_at(url)
    assert "hunter2" not in str(refusal.value)


def test_a_child_may_open_what_its_parent_has_only_named(tmp_path: Path) -> None:
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
    done = subprocess.run([sys.executable, "-c", lines, str(tmp_path)], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
