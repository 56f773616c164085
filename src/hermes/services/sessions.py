"""Sessions: create, change and fork, with the store's refusals as `ServiceError`; counts and sizes. Blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hermes.core.errors import ConfigError, ServiceError
from hermes.core.json_types import JsonObject
from hermes.settings import config
from hermes.store.base import SessionExists, StoreError
from hermes.store.codec import BadSessionId
from hermes.store.sessions import SessionDB
from hermes.store.stores import address, is_server, open_store, path_of

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.store.engine import Tx

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
    """`id_field` is the field that holds the id."""
    try:
        yield
    except SessionExists as error:
        raise ServiceError(str(error), "session_exists", field="id") from None
    except BadSessionId as error:
        raise ServiceError(str(error), "invalid_session_id", field=id_field) from None
    except ValueError as error:  # the id is valid, so it is the title
        raise ServiceError(str(error), "invalid_title", field="title") from None


def create(db: SessionDB, session_id: str | None, source: str, *, id_field: str = "id", **fields: Any) -> str:
    with _refusals(id_field):
        return db.create_session(session_id, source, exist_ok=False, **fields)


def fork(
    db: SessionDB,
    session_id: str,
    new_id: str | None,
    title: str | None,
    at_message_id: int | None = None,
    before_message_id: int | None = None,
) -> str:
    """Fork a session up to and including a message, or up to the one before a message. The new session's id."""
    if at_message_id is not None and before_message_id is not None:
        message = "at_message_id and before_message_id name two places; one is enough."
        raise ServiceError(message, "invalid_arguments", field="before_message_id")
    field = "at_message_id" if before_message_id is None else "before_message_id"
    try:
        with _refusals():
            return db.fork_session(session_id, new_id, title, at_message_id, before_message_id=before_message_id)
    except KeyError as error:
        raise ServiceError(error.args[0], "message_not_found", field=field) from None


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


def database_url(home: Home) -> str:
    """The configured database; with unreadable settings the home's own file. An invalid address raises ConfigError."""
    own = f"sqlite://{home.state_db}"
    try:
        settings = config.load(home)
    except ConfigError:
        return own
    url = address(home, settings)
    return url if is_server(url) or path_of(url) is not None else own


def database_file(home: Home) -> Path | None:
    """None where the database is on a server."""
    url = database_url(home)
    return None if is_server(url) else path_of(url)


def database_exists(home: Home) -> bool:
    file = database_file(home)
    return file is None or file.exists()


@contextlib.contextmanager
def open_database(home: Home, *, write: bool = False, create: bool = False) -> Iterator[SessionDB]:
    """An empty database where there is none and none is to be created."""
    url = database_url(home)
    if is_server(url):
        with contextlib.closing(open_store(url, home=home)) as store:
            yield store.sessions
        return
    path = path_of(url) or home.state_db
    exists = path.exists()
    where = path if exists or create else ":memory:"
    try:
        db = SessionDB(where, read_only=exists and not write and not create)
    except StoreError as error:
        if type(error) is not StoreError:
            raise
        db = SessionDB(where)  # migrates an older schema
    with contextlib.closing(db):
        yield db


def measure(db: SessionDB) -> JsonObject:
    """Row counts, and the bytes of the database and, where it tells them, of its parts."""

    def count(tx: Tx) -> JsonObject:
        return {name: int(tx.value(f"SELECT count(*) FROM {rows}")) for name, rows in COUNTED.items()}  # noqa: S608

    return {**db.engine.read(count), "bytes": db.total_bytes(), "parts": db.sizes()}


def last_active(db: SessionDB) -> float:
    return float(db.engine.read(lambda tx: tx.value("SELECT max(last_active) FROM sessions")) or 0.0)
