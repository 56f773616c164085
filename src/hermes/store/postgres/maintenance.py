"""Maintenance of a PostgreSQL database; most of it is left to the server and its administrator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hermes.store.base import StoreError
from hermes.store.engine import Tx

if TYPE_CHECKING:
    from hermes.store.postgres.engine import PostgresEngine

# The use of tables and indexes; the others are small.
_PART_OF = {
    **dict.fromkeys(("sessions", "messages", "prompts", "session_files", "pending_calls"), "rows"),
    **dict.fromkeys(("blobs", "message_blobs"), "blobs"),
    **dict.fromkeys(("runs", "run_log", "run_partials", "run_controls"), "logs"),
}
_SEARCH_INDEX = "messages_search"
_SIZES = (
    "SELECT relname, pg_total_relation_size(oid) FROM pg_class "
    "WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'"
)


def backup(engine: PostgresEngine, path: Path) -> None:
    hint = "pg_dump, or hermes migrate --from postgresql://… --to sqlite:///copy.db"
    raise StoreError("Back up a database server with its own tools.", where=engine.place, hint=hint)


def check(engine: PostgresEngine, deep: bool, progress: Callable[[str], None]) -> list[str]:
    progress("checking the connection")
    engine.read(lambda tx: tx.value("SELECT 1"))
    return []


def optimize(engine: PostgresEngine) -> dict[str, int]:
    before = total_bytes(engine)
    tables = engine.read(lambda tx: [row[0] for row in tx.rows(_SIZES)])
    engine.run_outside_transaction([f'VACUUM (ANALYZE) "{table}"' for table in tables])
    return {"bytes_before": before, "bytes_after": total_bytes(engine)}


def vacuum_if_worthwhile(engine: PostgresEngine) -> bool:
    return False  # autovacuum does it


def give_back_space(engine: PostgresEngine) -> None:
    """Autovacuum does this."""


def total_bytes(engine: PostgresEngine) -> int:
    return engine.read(lambda tx: sum(int(row[1]) for row in tx.rows(_SIZES)))


def sizes(engine: PostgresEngine, seconds_max: float | None) -> dict[str, int]:
    def read(tx: Tx) -> dict[str, int]:
        parts = {"rows": 0, "index": 0, "blobs": 0, "logs": 0, "other": 0, "free": 0}
        for table, count in tx.rows(_SIZES):
            parts[_PART_OF.get(table, "other")] += count
        index = int(tx.value(f"SELECT pg_relation_size('{_SEARCH_INDEX}')"))
        parts["index"] += index
        parts["rows"] -= index
        return parts

    return engine.read(read)
