"""The tables of a store as `migrate` copies them: keys, pages of rows in key order, digests, counters."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from hermes.core.limits import MIGRATE_BATCH_BYTES, MIGRATE_BATCH_ROWS
from hermes.store.base import MIGRATION, PURGE_DUE
from hermes.store.dialect import either, placeholders
from hermes.store.engine import Tx
from hermes.store.rows import search_vector


class Table(NamedTuple):
    name: str
    key: tuple[str, ...]
    # A column that refers to other rows of the table.
    self_reference: str = ""
    where: str = "TRUE"
    in_responses: bool = False


# Parents before the tables that refer to them. Leases are not copied: they belong to processes.
TABLES = (
    Table("prompts", ("sha256",)),
    Table("sessions", ("id",), self_reference="parent_session_id"),
    Table("messages", ("id",)),
    Table("blobs", ("sha256",)),
    Table("message_blobs", ("sha256", "message_id")),
    Table("session_files", ("id",)),
    Table("pending_calls", ("owner", "call_id")),
    Table("compactions", ("owner", "digest")),
    Table("runs", ("rowid",)),
    Table("run_log", ("run_id", "last_seq")),
    Table("run_partials", ("run_id", "stream_id", "offset")),
    Table("run_controls", ("run_id", "control_id")),
    Table("idempotency", ("scope", "key")),
    Table("jobs", ("id",)),
    Table("sign_ins", ("token_sha256",)),
    Table("usage_days", ("day", "owner", "provider", "model", "name")),
    Table("state_meta", ("key",), where=f"key NOT IN ('{MIGRATION}', '{PURGE_DUE}')"),
    Table("responses", ("id",), in_responses=True),
    Table("response_items", ("sha256",), in_responses=True),
    Table("conversations", ("owner", "name"), in_responses=True),
    Table("conversation_objects", ("id",), in_responses=True),
    Table("conversation_items", ("position",), in_responses=True),
    Table("suspended", ("owner", "call_id"), in_responses=True),
)

_COLUMNS = either(
    "SELECT name, type FROM pragma_table_info(?)",
    "SELECT column_name, data_type FROM information_schema.columns "
    "WHERE table_schema = current_schema() AND table_name = ?",
)
# Columns of PostgreSQL only: the search vector of a message, and the rowid that SQLite has implicitly.
_NOT_COPIED = ("search", "rowid")
_OF_ANY_LENGTH = {"text": '"{}"', "bytea": '"{}"', "json": '"{}"::text'}


class Columns(NamedTuple):
    """The columns that both databases have, in the same order."""

    names: tuple[str, ...]
    booleans: frozenset[str]
    # The number of bytes in columns of variable length, which PostgreSQL knows without reading them.
    bytes_sql: str

    @property
    def sql(self) -> str:
        return _list(self.names)


def columns_of(tx: Tx, table: Table) -> Columns:
    types = {name: kind for name, kind in tx.rows(_COLUMNS, (table.name,)) if name not in _NOT_COPIED}
    names = tuple(sorted({*types, *table.key}))
    return Columns(
        names,
        frozenset(name for name, kind in types.items() if kind == "boolean"),
        " + ".join(
            [
                "0",
                *(
                    f"coalesce(octet_length({_OF_ANY_LENGTH[types[name]].format(name)}), 0)"
                    for name in names
                    if types.get(name) in _OF_ANY_LENGTH
                ),
            ]
        ),
    )


def _list(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def count(tx: Tx, table: Table) -> int:
    return int(tx.value(f"SELECT count(*) FROM {table.name} WHERE {table.where}"))


def page(tx: Tx, table: Table, columns: Columns, after: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The rows after a key that fit into a batch; at least one if there is one."""
    key = _list(table.key)
    where = f"({key}) > ({placeholders(after)})" if after else "TRUE"
    source = f"FROM {table.name} WHERE {table.where} AND {where} ORDER BY {key} LIMIT {MIGRATE_BATCH_ROWS}"
    # SQLite is read row by row; PostgreSQL sends all at once.
    sql = either(
        f"SELECT {columns.sql} {source}",
        f"SELECT {columns.sql} FROM (SELECT *, sum(size) OVER (ORDER BY {key}) - size AS before FROM "
        f"(SELECT {columns.sql}, {columns.bytes_sql} AS size {source}) AS page) AS sized "
        f"WHERE before < {MIGRATE_BATCH_BYTES} ORDER BY {key}",
    )
    rows: list[tuple[Any, ...]] = []
    room = MIGRATE_BATCH_BYTES
    for row in tx.each(sql, after):
        rows.append(tuple(row))
        room -= sum(len(value) for value in row if isinstance(value, str | bytes))
        if room < 0:
            break
    return rows


def insert(tx: Tx, table: Table, columns: Columns, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows; existing ones stay."""
    values = [f"?{either('', '::int::boolean')}" if name in columns.booleans else "?" for name in columns.names]
    names = columns.sql
    if table.self_reference:  # the row it refers to may follow
        at = columns.names.index(table.self_reference)
        rows = [(*row[:at], None, *row[at + 1 :]) for row in rows]
    if table.name == "messages" and tx.backend == "postgres":
        names, values = f"{names}, search", [*values, "?::tsvector"]
        rows = [(*row, _search(dict(zip(columns.names, row, strict=True)))) for row in rows]
    tx.many(f"INSERT INTO {table.name} ({names}) VALUES ({', '.join(values)}) ON CONFLICT DO NOTHING", rows)


def _search(message: dict[str, Any]) -> str | None:
    if message["synthetic"] or message["model_only"]:
        return None
    return search_vector(message["search_text"], message["content"], message["tool_name"])


def set_references(tx: Tx, table: Table, columns: Columns, rows: Sequence[tuple[Any, ...]]) -> None:
    """Set the self-references of a table once all its rows exist."""
    [key], reference = table.key, table.self_reference
    at, key_at = columns.names.index(reference), columns.names.index(key)
    changes = [(row[at], row[key_at]) for row in rows if row[at] is not None]
    tx.many(f"UPDATE {table.name} SET {reference} = ? WHERE {key} = ?", changes)


def clear(tx: Tx, *, responses: bool) -> None:
    """Delete all rows except leases."""
    names = [table.name for table in reversed(TABLES) if table.in_responses is responses]
    if tx.backend == "postgres":
        tx.execute(f"TRUNCATE {', '.join(names)}")
        return
    for name in names:
        tx.execute(f"DELETE FROM {name}")


# ---- digests


def digest(row: Sequence[Any]) -> int:
    """The digest of a row, equal in both databases; digests of rows are added, so their order does not matter."""
    return int.from_bytes(hashlib.sha256(msgspec.msgpack.encode([_normal(value) for value in row])).digest(), "big")


def _normal(value: Any) -> Any:
    """A value as both databases represent it: SQLite has no booleans and no -0.0, PostgreSQL no NUL in text."""
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd")
    if isinstance(value, bool):
        return int(value)
    return value + 0.0 if isinstance(value, float) else value


# ---- counters


class Counter(NamedTuple):
    """A counter: the statements that read and set it."""

    read_sql: str
    set_sql: str
    in_responses: bool = False

    def value(self, tx: Tx) -> int | None:
        value: int | None = tx.value(self.read_sql)
        return value

    def set(self, tx: Tx, value: int) -> None:
        tx.execute(self.set_sql, (value,))


def _sequence(name: str) -> str:
    return f"SELECT setval({name}, greatest(?, 1))"


def _identity(table: str, column: str, *, in_responses: bool) -> Counter:
    sequence = _sequence(f"pg_get_serial_sequence('{table}', '{column}')")
    # SQLite continues from the highest number by itself.
    return Counter(f"SELECT max({column}) FROM {table}", either("SELECT ?", sequence), in_responses)


# Numbers are not reused, even if their rows are deleted.
COUNTERS = (
    Counter(
        either("SELECT token FROM leases WHERE name = ''", "SELECT last_value FROM lease_token"),
        either(
            "INSERT INTO leases VALUES ('', '', ?, 0) ON CONFLICT (name) DO UPDATE SET token = excluded.token",
            _sequence("'lease_token'"),
        ),
    ),
    Counter(
        either(
            "SELECT seq FROM sqlite_sequence WHERE name = 'messages'",
            "SELECT last_value FROM pg_sequences WHERE schemaname = current_schema() "
            "AND sequencename = 'messages_id_seq'",
        ),
        either(
            "INSERT OR REPLACE INTO sqlite_sequence (rowid, name, seq) "
            "VALUES ((SELECT rowid FROM sqlite_sequence WHERE name = 'messages'), 'messages', ?)",
            _sequence("pg_get_serial_sequence('messages', 'id')"),
        ),
    ),
    _identity("runs", "rowid", in_responses=False),
    Counter(
        either("SELECT value FROM counters WHERE name = 'used'", "SELECT last_value FROM response_use"),
        either("UPDATE counters SET value = ? WHERE name = 'used'", _sequence("'response_use'")),
        in_responses=True,
    ),
    _identity("conversation_items", "position", in_responses=True),
)
