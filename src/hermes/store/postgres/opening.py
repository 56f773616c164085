"""Connecting to PostgreSQL: settings of a connection, and schema migrations."""

from __future__ import annotations

import hashlib
from typing import Any

import psycopg
from psycopg import sql

from hermes.core.errors import ConfigError
from hermes.core.limits import PG_CONNECT_S_MAX, PG_IDLE_TRANSACTION_S_MAX, PG_STATEMENT_S_MAX
from hermes.store.base import StoreReadOnly, StoreTooNew
from hermes.store.engine import MARK_SQL
from hermes.store.postgres import commits
from hermes.store.postgres.connections import ADAPTERS
from hermes.store.postgres.errors import refused_at_start
from hermes.store.postgres.schema import MIGRATIONS
from hermes.store.postgres.waiting import LoopConnection, ThreadConnection
from hermes.store.postgres.wire import make_rows

SERVER_VERSION_MIN = 140_000
# A server that no longer answers is given up after seconds instead of minutes.
_CONNECTION: dict[str, Any] = {
    "autocommit": True,
    "row_factory": make_rows,
    "context": ADAPTERS,
    "application_name": "hermes",
    "client_encoding": "utf8",
    "connect_timeout": PG_CONNECT_S_MAX,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


def _settings(schema: str) -> sql.Composed:
    settings = {
        "search_path": schema,
        "application_name": schema,
        "statement_timeout": f"{PG_STATEMENT_S_MAX}s",
        "idle_in_transaction_session_timeout": f"{PG_IDLE_TRANSACTION_S_MAX}s",
        "client_connection_check_interval": f"{PG_IDLE_TRANSACTION_S_MAX}s",
    }
    calls = [
        sql.SQL("set_config({}, {}, FALSE)").format(sql.Literal(name), sql.Literal(value))
        for name, value in settings.items()
    ]
    return sql.SQL("SELECT {}").format(sql.SQL(", ").join(calls))


def connect_thread(url: str, schema: str) -> psycopg.Connection[Any]:
    db = ThreadConnection.connect(url, **_CONNECTION)
    db.execute(_settings(schema))
    return db


async def connect_loop(url: str, schema: str) -> psycopg.AsyncConnection[Any]:
    db = await LoopConnection.connect(url, **_CONNECTION)
    await db.execute(_settings(schema))
    return db


def connect(url: str, place: str) -> psycopg.Connection[Any]:
    """A first connection; failures are raised as configuration errors, or as an unreachable server."""
    try:
        db = ThreadConnection.connect(url, **_CONNECTION)
    except psycopg.Error as error:
        raise refused_at_start(error, place) from None
    if db.info.server_version < SERVER_VERSION_MIN:
        version = db.info.server_version // 10_000
        db.close()
        raise ConfigError(
            f"This is PostgreSQL {version}; Hermes needs {SERVER_VERSION_MIN // 10_000} or newer.",
            where=place,
            hint="upgrade the server, or name another one in storage.url",
        )
    return db


def make_ready(url: str, schema: str, place: str) -> str | None:
    """Create or migrate the schema; replicas that start together do it one after the other. Returns the mark of an
    unfinished migration."""
    with connect(url, place) as db:
        try:
            db.execute(_settings(schema))
            _migrate(db, schema, place)
            db.execute(commits.CLEAN_UP)
            row = db.execute(MARK_SQL).fetchone()
            return row[0] if row is not None else None
        except psycopg.Error as error:
            raise refused_at_start(error, place) from error


def has_tables(url: str, schema: str, place: str) -> bool:
    with connect(url, place) as db:
        db.execute(_settings(schema))
        return _version(db) > 0


def _migrate(db: psycopg.Connection[Any], schema: str, place: str) -> None:
    latest = len(MIGRATIONS)
    if (version := _version(db)) == latest:
        return
    check_version(version, place)
    if version > latest:
        return
    with db.transaction():
        # Creating an index of a large table takes long, and so does waiting for another replica that creates it.
        db.execute("SET LOCAL statement_timeout = 0")
        db.execute("SELECT pg_advisory_xact_lock(%s)", (lock_key(schema, "migrate"),))
        db.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
        if (version := _version(db)) >= latest:  # another replica was quicker, perhaps a newer one
            return
        for step in range(version, latest):
            for statement in MIGRATIONS[step]:
                db.execute(statement)
        db.execute("CREATE TABLE IF NOT EXISTS schema_version (version integer NOT NULL)")
        db.execute("DELETE FROM schema_version")
        db.execute("INSERT INTO schema_version VALUES (%s)", (latest,))


def _version(db: psycopg.Connection[Any]) -> int:
    if db.execute("SELECT to_regclass('schema_version')").fetchone()[0] is None:  # type: ignore[index]
        return 0
    return int(db.execute("SELECT version FROM schema_version").fetchone()[0])  # type: ignore[index]


def check_version(version: int, place: str) -> None:
    """Reject an unknown schema version; it may be one version ahead during a rolling upgrade."""
    if version > len(MIGRATIONS) + 1:
        raise StoreTooNew(
            f"The database was written by a newer Hermes (version {version}, this one knows {len(MIGRATIONS)}).",
            where=place,
            hint="update Hermes, or name another database in storage.url",
        )


async def check_writable(db: psycopg.AsyncConnection[Any], place: str) -> None:
    cursor = await db.execute("SELECT pg_is_in_recovery(), (SELECT version FROM schema_version)")
    row = await cursor.fetchone()
    if row is None or row[0]:
        raise StoreReadOnly("The server is a standby and takes no changes.", where=place)
    check_version(row[1], place)


def lock_key(schema: str, name: str) -> int:
    """The number of an advisory lock."""
    return int.from_bytes(hashlib.sha256(f"hermes {schema} {name}".encode()).digest()[:8], "big", signed=True)
