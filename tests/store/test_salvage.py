"""What is left of a damaged file is saved: every row on a page that can be read."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes.store.base import StoreDamaged
from hermes.store.sessions import SessionDB
from hermes.store.sqlite.maintenance import repair
from hermes.store.sqlite.schema import MIGRATIONS
from hermes.store.stores import open_store

from .tools import Turn, look, raw, url

SESSIONS, ROWS = 8, 20
PAGE = 4096
Damage = Callable[[Path], None]


def text_of(session: int, row: int) -> str:
    return f"session {session} row {row} " + f"words of {session}-{row} " * 60


TEXTS = {text_of(session, row) for session in range(SESSIONS) for row in range(ROWS)}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "state.db"
    with contextlib.closing(open_store(url(path))) as store:
        for row in range(ROWS):
            for session in range(SESSIONS):
                if not row:
                    store.sessions.create_session(
                        f"s{session}", "cli", title=f"Title {session}", system_prompt="Be kind."
                    )
                store.sessions.append_message(f"s{session}", "user", text_of(session, row))
        for session in range(SESSIONS):
            turn = Turn(store, f"s{session}", instructions="Be brief.")
            turn.begin()
            turn.end()
        store.sessions.optimize()  # nothing stands on a page that does not belong there
    return path


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(sound, tmp_path / "state.db"))


def pages_of(path: Path, name: str, kind: str) -> list[int]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        sql = "SELECT pageno FROM dbstat WHERE name = ? AND pagetype = ? ORDER BY path"
        return [row[0] for row in db.execute(sql, (name, kind))]


def zeroed(path: Path, *pages: int) -> None:
    with path.open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * PAGE)
            file.write(bytes(PAGE))


def truncated(share: float) -> Damage:
    def damage(path: Path) -> None:
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(int(size * share))

    return damage


def leaves(name: str, *places: int) -> Damage:
    """These of the pages that hold a table's rows, or an index's keys, are zeros."""
    return lambda path: zeroed(path, *(pages_of(path, name, "leaf")[place] for place in places))


def left_of(path: Path) -> set[str]:
    """The texts that stand in the file, on pages that are there as a whole."""
    data = path.read_bytes()
    data = data[: len(data) // PAGE * PAGE]
    return {text for text in TEXTS if text.encode() in data}


def saved(path: Path) -> set[str]:
    return {row[0] for row in look(path, "SELECT content FROM messages WHERE content LIKE 'session %'")}


@pytest.mark.parametrize(
    ("damage", "lost_at_most"),
    [
        (truncated(0.97), 40),
        (truncated(0.8), 80),
        (truncated(0.7), 140),
        (leaves("messages", 0), 10),
        (leaves("messages", -1), 10),
        (leaves("messages", 3, 4, 9, 20), 20),
        (leaves("sessions", 0), 0),
        (leaves("messages_session", 0), 0),
        (leaves("sqlite_autoindex_sessions_1", 0), 0),
        (leaves("run_log", 0), 0),
    ],
    ids=[
        *("3% cut off", "a fifth cut off", "a third cut off", "first page", "last page", "some pages", "sessions"),
        *("an index", "a primary key", "a log"),
    ],
)
def test_salvage_saves_every_readable_message(path: Path, damage: Damage, lost_at_most: int) -> None:
    damage(path)
    spoiled, remaining = path.read_bytes(), left_of(path)
    assert len(TEXTS) - len(remaining) <= lost_at_most
    report = repair(path)
    assert (report["repaired"], report["error"]) == (True, None)
    assert saved(path) == remaining
    assert Path(report["backup_path"]).read_bytes() == spoiled
    assert report["rows"] == look(path, "SELECT count(*) FROM messages")[0][0]
    with contextlib.closing(SessionDB(path)) as db:
        assert db.check(deep=True) == []
        for session in db.list_sessions(limit=50):
            assert session["message_count"] == len(db.get_messages(session["id"]))
        assert {hit["session_id"] for hit in db.search_messages("words", limit=500)} <= {
            f"s{session}" for session in range(SESSIONS)
        }
        db.append_message("s0", "user", "goes on")


def test_salvage_report_names_saved_and_damaged(path: Path) -> None:
    leaves("messages", 3)(path)
    report = repair(path)
    assert report["strategy"] == "salvage"
    assert report["damaged"] == ["messages"]
    assert report["sessions"] == SESSIONS
    assert len(TEXTS) - 10 <= report["rows"] - SESSIONS < len(TEXTS)
    titles = look(path, "SELECT title FROM sessions ORDER BY title")
    assert titles == [(f"Title {session}",) for session in range(SESSIONS)]
    with contextlib.closing(open_store(url(path))) as store:
        session = store.sessions.get_session("s3")
        assert session is not None and session["system_prompt"] == "Be kind."
        runs = store.runs.list()
        assert len(runs) == SESSIONS
        assert {len(store.runs.durable(run.spec.run_id)) for run in runs} == {2}
        assert {run.spec.instructions for run in runs} == {"Be brief."}


def test_salvage_recreates_lost_sessions_for_messages(path: Path) -> None:
    leaves("sessions", 0)(path)
    report = repair(path)
    assert report["damaged"] == ["sessions"]
    with contextlib.closing(SessionDB(path)) as db:
        assert {session["id"] for session in db.list_sessions(limit=50)} == {f"s{n}" for n in range(SESSIONS)}
        assert len(db.get_messages("s3")) == ROWS + 1


def test_salvage_finds_logs_behind_damaged_page(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with contextlib.closing(open_store(url(path))) as store:
        store.sessions.create_session("s", "cli")
        for _ in range(60):
            turn = Turn(store, "s")
            turn.begin()
            for _ in range(10):
                turn.append(turn.event("warning", message="x" * 200))
            turn.end()
    pages = pages_of(path, "run_log", "leaf")
    zeroed(path, pages[len(pages) // 3], pages[len(pages) * 2 // 3])
    assert repair(path)["damaged"] == ["run_log"]
    with contextlib.closing(open_store(url(path))) as store:
        whole = [run for run in store.runs.list() if len(store.runs.durable(run.spec.run_id)) == 12]
        assert 50 <= len(whole) < 60


def test_salvage_migrates_damaged_file_of_older_version(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with raw(path) as db:
        for statement in [statement for step in MIGRATIONS[:7] for statement in step]:
            db.execute(statement)
        db.execute("PRAGMA user_version = 7")
        db.execute(
            "INSERT INTO sessions (id, system_prompt, owner, source, kind, started_at, last_active) "
            "VALUES ('s', 'Be kind.', 'default', 'cli', 'root', 1, 1)"
        )
        for row in range(ROWS):
            db.execute(
                "INSERT INTO messages (session_id, role, content, timestamp) VALUES ('s', 'user', ?, 1)",
                (text_of(0, row),),
            )
    leaves("messages", 2)(path)
    remaining = left_of(path)
    assert repair(path)["repaired"]
    assert saved(path) == remaining and 0 < len(remaining) < ROWS
    with contextlib.closing(SessionDB(path)) as db:
        session = db.get_session("s")
        assert session is not None and session["system_prompt"] == "Be kind."


def test_truncated_file_raises_store_damaged(path: Path) -> None:
    truncated(0.8)(path)
    with pytest.raises(StoreDamaged):
        SessionDB(path)
