"""The database of sessions as a whole: counts, sizes, and runs without an end. It blocks."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from hermes.core.json_types import JsonObject
from hermes.store.connections import TimeUp
from hermes.store.leases import Leases

if TYPE_CHECKING:
    from hermes.store.connections import Tx
    from hermes.store.sessions import SessionDB

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


def unfinished_runs(db: SessionDB) -> tuple[list[str], list[str]]:
    """The runs without an end, and those of them that no process carries on."""
    sql, leases = "SELECT run_id, session_id FROM runs WHERE ended_at IS NULL", Leases(db.engine)
    runs = db.engine.read(lambda tx: [(str(run_id), str(session_id)) for run_id, session_id in tx.rows(sql)])
    abandoned = [run_id for run_id, session_id in runs if leases.holder(f"session:{session_id}") is None]
    return [run_id for run_id, _ in runs], abandoned


def run_ids_with_prefix(db: SessionDB, *prefixes: str) -> list[str]:
    """The newest runs whose id begins with one of these, which are of one length."""
    sql = "SELECT run_id FROM runs WHERE substr(run_id, 1, ?) IN (?, ?) ORDER BY created_at DESC LIMIT 50"
    return db.engine.read(lambda tx: [str(row[0]) for row in tx.rows(sql, (len(prefixes[0]), *prefixes))])
