"""The store in a file and in memory, and what the tests of it share."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from hermes.store.sessions import SessionDB
from hermes.store.stores import Store, open_store

# Ids that nobody may bring along.
BAD_IDS = [
    "",
    "..",
    "a..b",
    "../etc",
    "a/b",
    "/",
    "a\\b",
    "a\nb",
    "a\x00b",
    "\x1b[0m",
    "a\x7f",
    "a\x85",
    "C:",
    "c:notes",
    "search",
    "import",
    "x" * 257,
]


@pytest.fixture(params=["file", "memory"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SessionDB]:
    made = SessionDB(":memory:" if request.param == "memory" else tmp_path / "state.db")
    yield made
    made.close()


@pytest.fixture
def file_db(tmp_path: Path) -> Iterator[SessionDB]:
    made = SessionDB(tmp_path / "state.db")
    yield made
    made.close()


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """The store with its leases and runs."""
    made = open_store("sqlite://" if request.param == "memory" else f"sqlite://{tmp_path / 'state.db'}")
    yield made
    made.close()


def talk(db: SessionDB, session_id: str, *texts: Any, source: str = "cli", **fields: Any) -> list[int]:
    """Make a session in which a user and an assistant take turns; the ids of its rows."""
    db.create_session(session_id, source, **fields)
    return [db.append_message(session_id, role, text) for role, text in zip(cycle(["user", "assistant"]), texts)]


def call(call_id: str, name: str = "clock", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def contents(db: SessionDB, session_id: str, **window: Any) -> list[Any]:
    return [row["content"] for row in db.get_messages(session_id, **window)]


def listed(db: SessionDB, **filters: Any) -> list[str]:
    return [row["id"] for row in db.list_sessions(**filters)]


def raw(db: SessionDB, statement: str, *values: Any) -> list[Any]:
    """What lies in the file, seen past the store."""
    assert db.path is not None
    with closing(sqlite3.connect(db.path, isolation_level=None)) as connection:
        return connection.execute(statement, values).fetchall()
