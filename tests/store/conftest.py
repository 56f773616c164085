"""Stores in a file, in memory and in PostgreSQL, and helpers of their tests."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, nullcontext
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import psycopg
import pytest

from hermes.store.dialect import translate
from hermes.store.postgres.engine import PostgresEngine
from hermes.store.sessions import SessionDB
from hermes.store.stores import Store, open_store
from support.engines import new_database

# Ids that clients may not choose.
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


def _for_psycopg(statement: str) -> bytes:
    return re.sub(rb"\$\d+", b"%s", translate(statement).replace(b"%", b"%%"))


# Deleting the few rows of a test is much cheaper than making a schema, or than TRUNCATE, which makes each table and index anew.
# What refers to another table comes before it.
_TABLES = (
    *(
        "message_blobs",
        "messages",
        "blobs",
        "session_files",
        "pending_calls",
        "compactions",
        "sessions",
        "prompts",
        "state_meta",
    ),
    *("run_log", "run_partials", "run_controls", "runs", "leases", "idempotency", "jobs", "sign_ins", "usage_days"),
    *("conversations", "responses", "response_items", "conversation_items", "conversation_objects", "suspended"),
)
_EMPTY = f"""
SET search_path = hermes;
{"".join(f"DELETE FROM {table};" for table in _TABLES)}
SELECT setval(oid, 1, false) FROM pg_class WHERE relkind = 'S' AND relnamespace = 'hermes'::regnamespace
"""


@pytest.fixture(scope="session")
def postgres_schema(postgres_url: str) -> Iterator[str]:
    """The address of a database with tables, reused by the tests of a process."""
    with new_database(postgres_url) as url:
        open_store(url).close()
        yield url
        _connection(url).close()


@cache
def _connection(url: str) -> psycopg.Connection[Any]:
    """Cached: connecting costs more than the deletions."""
    return psycopg.connect(url, autocommit=True)


def empty(url: str) -> None:
    _connection(url).execute(_EMPTY.encode())


@pytest.fixture
def postgres_store(postgres_schema: str) -> Iterator[Store]:
    empty(postgres_schema)
    store = open_store(postgres_schema)
    yield store
    store.close()


BACKENDS = ["file", "memory", "postgres"]


@pytest.fixture(params=BACKENDS)
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SessionDB]:
    if request.param == "postgres":
        yield request.getfixturevalue("postgres_store").sessions
        return
    db = SessionDB(":memory:" if request.param == "memory" else tmp_path / "state.db")
    yield db
    db.close()


@pytest.fixture
def file_db(tmp_path: Path) -> Iterator[SessionDB]:
    db = SessionDB(tmp_path / "state.db")
    yield db
    db.close()


@pytest.fixture(params=["file", "postgres"])
def durable_db(request: pytest.FixtureRequest) -> SessionDB:
    """A database that `raw` can query."""
    if request.param == "file":
        db: SessionDB = request.getfixturevalue("file_db")
        return db
    store: Store = request.getfixturevalue("postgres_store")
    return store.sessions


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """The store with its leases and runs."""
    if request.param == "postgres":
        yield request.getfixturevalue("postgres_store")
        return
    store = open_store("sqlite://" if request.param == "memory" else f"sqlite://{tmp_path / 'state.db'}")
    yield store
    store.close()


@pytest.fixture(params=["file", "postgres"])
def durable_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database that persists when it is closed."""
    if request.param == "file":
        return f"sqlite://{tmp_path / 'state.db'}"
    url: str = request.getfixturevalue("postgres_schema")
    empty(url)
    return url


def query(where: str | Store, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """Query a database of either backend."""
    with closing(open_store(where)) if isinstance(where, str) else nullcontext(where) as store:
        return store.engine.read(lambda tx: [tuple(row) for row in tx.rows(sql, values)])


def create_conversation(db: SessionDB, session_id: str, *texts: Any, source: str = "cli", **fields: Any) -> list[int]:
    """Create a session with alternating messages of user and assistant; returns the row ids."""
    db.create_session(session_id, source, **fields)
    return [db.append_message(session_id, role, text) for role, text in zip(cycle(["user", "assistant"]), texts)]


def call(call_id: str, name: str = "clock", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def contents(db: SessionDB, session_id: str, **window: Any) -> list[Any]:
    return [row["content"] for row in db.get_messages(session_id, **window)]


def session_ids(db: SessionDB, **filters: Any) -> list[str]:
    return [row["id"] for row in db.list_sessions(**filters)]


def raw(db: SessionDB, statement: str, *values: Any) -> list[Any]:
    """Query the database directly, without the store."""
    if isinstance(db.engine, PostgresEngine):
        with psycopg.connect(db.engine.url, options="-c search_path=hermes", autocommit=True) as server:
            cursor = server.execute(_for_psycopg(statement), values)
            return cursor.fetchall() if cursor.description else []
    assert db.path is not None
    with closing(sqlite3.connect(db.path, isolation_level=None)) as connection:
        return connection.execute(statement, values).fetchall()
