"""Sessions: made, changed and forked, with what the store refuses as `ServiceError`; counts and sizes. It blocks."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hermes.core.errors import ConfigError, ServiceError
from hermes.core.json_types import JsonObject
from hermes.settings import config
from hermes.store.base import SessionExists, StoreError
from hermes.store.codec import BadSessionId
from hermes.store.connections import TimeUp
from hermes.store.sessions import SessionDB
from hermes.store.stores import address, path_of

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.store.connections import Tx

# What the tables of the database are for; the others are small.
_PARTS = {
    "rows": ("sessions", "messages", "prompts", "session_files", "pending_calls"),
    "blobs": ("blobs", "message_blobs"),
    "logs": ("runs", "run_log", "run_partials", "run_controls"),
}
_PART_OF = {table: part for part, tables in _PARTS.items() for table in tables}
COUNTED = {
    "sessions": "sessions",
    "open": "sessions WHERE ended_at IS NULL",
    "archived": "sessions WHERE archived",
    "messages": "messages",
    "blobs": "blobs",
    "runs": "runs",
}


# --- one session -----------------------------------------------------------------------------------------------------


def unknown_session(session_id: str) -> ServiceError:
    return ServiceError(f"There is no session {session_id!r}.", "session_not_found")


@contextlib.contextmanager
def _refusals(id_field: str = "id") -> Iterator[None]:
    """What the store refuses of a new id or title; `id_field` is the field that holds the id."""
    try:
        yield
    except SessionExists as error:
        raise ServiceError(str(error), "session_exists", field="id") from None
    except BadSessionId as error:
        raise ServiceError(str(error), "invalid_session_id", field=id_field) from None
    except ValueError as error:  # the id is sound: it is the title that cannot be used
        raise ServiceError(str(error), "invalid_title", field="title") from None


def create(db: SessionDB, session_id: str | None, source: str, *, id_field: str = "id", **fields: Any) -> str:
    with _refusals(id_field):
        return db.create_session(session_id, source, exist_ok=False, **fields)


def fork(db: SessionDB, session_id: str, new_id: str | None, title: str | None, at_message_id: int | None) -> str:
    """Fork a session up to and with a message of it. The new session's id."""
    try:
        with _refusals():
            return db.fork_session(session_id, new_id, title, at_message_id)
    except KeyError as error:
        raise ServiceError(error.args[0], "message_not_found", field="at_message_id") from None


def change(
    db: SessionDB,
    session_id: str,
    *,
    title: str | msgspec.UnsetType | None = msgspec.UNSET,
    end_reason: str | None = None,
    **fields: Any,
) -> None:
    """Change all of these or nothing. An empty title clears it."""

    def work() -> None:
        if title is not msgspec.UNSET:
            with _refusals():
                db.set_session_title(session_id, title)
        if fields:
            db.update_session(session_id, **fields)
        if end_reason is not None:
            try:
                db.end_session(session_id, end_reason)
            except ValueError as error:
                raise ServiceError(str(error), "invalid_arguments", field="end_reason") from None

    try:
        db.transaction(work)
    except KeyError:
        raise unknown_session(session_id) from None


# --- the database ----------------------------------------------------------------------------------------------------


def database_file(home: Home) -> Path:
    """Where the settings keep the database; settings that cannot be read keep nobody from the home's own."""
    try:
        return path_of(address(home, config.load(home))) or home.state_db
    except ConfigError:
        return home.state_db


@contextlib.contextmanager
def open_database(home: Home, *, write: bool = False, create: bool = False) -> Iterator[SessionDB]:
    """The database for as long as it is needed. Where there is none and none is to be created, it is an empty one."""
    path = database_file(home)
    exists = path.exists()
    where = path if exists or create else ":memory:"
    try:
        db = SessionDB(where, read_only=exists and not write and not create)
    except StoreError as error:
        if type(error) is not StoreError:
            raise
        db = SessionDB(where)  # that of an older Hermes is brought up to date
    with contextlib.closing(db):
        yield db


def measure(db: SessionDB) -> JsonObject:
    """How many rows there are of what, the bytes of the file, and the bytes of its parts where SQLite tells them."""

    def read(tx: Tx) -> JsonObject:
        page, pages, free = (int(tx.value(f"PRAGMA {name}")) for name in ("page_size", "page_count", "freelist_count"))
        counts = {name: int(tx.value(f"SELECT count(*) FROM {rows}")) for name, rows in COUNTED.items()}  # noqa: S608
        parts = _part_sizes(tx, free * page)
        if parts:  # pages that say where others are belong to no table
            parts["other"] += pages * page - sum(parts.values())
        return {**counts, "bytes": pages * page, "parts": parts}

    return db.engine.read(read)


def part_sizes(db: SessionDB, seconds_max: float) -> dict[str, int]:
    """Bytes by what they are for, without free space; nothing where that takes too long."""

    def read(tx: Tx) -> dict[str, int]:
        try:
            with tx.within(seconds_max):
                return _part_sizes(tx, 0)
        except TimeUp:
            return {}

    return db.engine.read(read)


def _part_sizes(tx: Tx, free: int) -> dict[str, int]:
    parts = {"rows": 0, "index": 0, "blobs": 0, "logs": 0, "other": 0, "free": free}
    sql = (
        "SELECT coalesce(m.tbl_name, s.name), sum(s.pgsize) FROM dbstat s LEFT JOIN sqlite_master m "
        "ON m.name = s.name GROUP BY 1"
    )
    try:
        for table, count in tx.rows(sql):
            parts["index" if table.startswith("messages_fts") else _PART_OF.get(table, "other")] += count
    except sqlite3.OperationalError as error:
        if "dbstat" not in str(error):
            raise
        return {}
    return parts


def last_active(db: SessionDB) -> float:
    return float(db.engine.read(lambda tx: tx.value("SELECT max(last_active) FROM sessions")) or 0.0)
