"""Maintenance of a database file: backup, checks, shrinking, and salvage of a damaged one."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hermes.core.home import make_private_folder, private_opener
from hermes.core.json_types import JsonObject
from hermes.core.limits import QUICK_CHECK_S_MAX
from hermes.store.base import StoreBusy, StoreError, StoreReadOnly
from hermes.store.engine import TimeUp, Tx
from hermes.store.sqlite.connections import Schema
from hermes.store.sqlite.engine import SqliteEngine
from hermes.store.sqlite.salvage import copy_table, open_damaged
from hermes.store.sqlite.schema import STATE
from hermes.store.sqlite.space import give_back, gives_back, vacuum

R = TypeVar("R")
Progress = Callable[[str], None]
_VACUUM_SHARE = 0.25
_CHECKS = ("PRAGMA integrity_check", "PRAGMA foreign_key_check")


# The use of the tables; the others are small.
_PARTS = {
    "rows": ("sessions", "messages", "prompts", "session_files", "pending_calls"),
    "blobs": ("blobs", "message_blobs"),
    "logs": ("runs", "run_log", "run_partials", "run_controls"),
}
_PART_OF = {table: part for part, tables in _PARTS.items() for table in tables}


def backup(engine: SqliteEngine, target: Path) -> None:
    if target.exists():
        raise StoreError("The file exists already.", where=str(target), hint="name another one")
    try:
        make_private_folder(target.parent)
        os.close(private_opener(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        raise StoreReadOnly(f"The copy cannot be made: {error.strerror}.", where=str(target)) from error
    try:
        with contextlib.closing(sqlite3.connect(target)) as copy:
            engine.copy_to(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
    except BaseException as error:
        target.unlink(missing_ok=True)
        if isinstance(error, sqlite3.Error):
            raise StoreError(f"The copy could not be made: {error}.", where=str(target)) from error
        raise


def check(engine: SqliteEngine, deep: bool, progress: Progress) -> list[str]:
    problems: list[str] = []
    until = time.monotonic() + (float("inf") if deep else QUICK_CHECK_S_MAX)
    checks = [
        ("pages", "PRAGMA integrity_check" if deep else "PRAGMA quick_check"),
        ("links", "PRAGMA foreign_key_check"),
    ]
    for name, sql in checks:
        progress(f"checking {name}")
        problems += engine.read(lambda tx, sql=sql: _checked(tx, sql, until), slow=True)  # type: ignore[misc]
    if deep and not engine.read_only:
        progress("checking the search index")
        problems += engine.exclusive(_index_fault)
    return problems


def optimize(engine: SqliteEngine) -> dict[str, int]:
    before = total_bytes(engine)
    engine.write(lambda tx: tx.execute("INSERT INTO messages_fts(messages_fts) VALUES ('optimize')"))
    engine.write(lambda tx: tx.execute("DELETE FROM state_meta WHERE key = 'purge_due'"))
    engine.exclusive(_vacuum)
    return {"bytes_before": before, "bytes_after": total_bytes(engine)}


def vacuum_if_worthwhile(engine: SqliteEngine) -> bool:
    def is_worthwhile(tx: Tx) -> bool:
        free, pages = tx.value("PRAGMA freelist_count"), tx.value("PRAGMA page_count")
        return not gives_back(tx) and bool(free > pages * _VACUUM_SHARE)

    if not engine.read(is_worthwhile):
        return False
    engine.exclusive(_vacuum)
    return True


def give_back_space(engine: SqliteEngine) -> None:
    """In steps, between which others can write."""
    while engine.write(give_back) == "more":
        pass


def sizes(engine: SqliteEngine, seconds_max: float | None) -> dict[str, int]:
    def read(tx: Tx) -> dict[str, int]:
        page, pages, free = (int(tx.value(f"PRAGMA {name}")) for name in ("page_size", "page_count", "freelist_count"))
        try:
            with tx.within(seconds_max) if seconds_max is not None else contextlib.nullcontext():
                parts = _part_sizes(tx, free * page)
        except TimeUp:
            return {}
        if parts:  # pointer map pages belong to no table
            parts["other"] += pages * page - sum(parts.values())
        return parts

    return engine.read(read)


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


def total_bytes(engine: SqliteEngine) -> int:
    return engine.read(lambda tx: int(tx.value("PRAGMA page_count")) * int(tx.value("PRAGMA page_size")))


def _vacuum(db: sqlite3.Connection) -> None:
    vacuum(db)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _checked(tx: Tx, sql: str, until: float) -> list[str]:
    try:
        with tx.within(until - time.monotonic()):
            return [" ".join(map(str, row)) for row in tx.each(sql) if tuple(row) != ("ok",)]
    except TimeUp:
        return []
    except sqlite3.DatabaseError as error:
        return [f"the check could not go on: {error}"]


def _index_fault(db: sqlite3.Connection) -> list[str]:
    try:
        db.execute("INSERT INTO messages_fts(messages_fts, rank) VALUES ('integrity-check', 1)")
    except sqlite3.DatabaseError as error:
        return [f"the search index does not fit the messages: {error}"]
    return []


# --- repair ----------------------------------------------------------------------------------------------------------


def repair(path: str | Path) -> JsonObject:
    """Repair a damaged database that nobody uses: first a copy, then its index, then row by row."""
    path = Path(path)
    if in_use(path):
        raise StoreBusy("The database is in use.", where=str(path), hint="stop the server and try again")
    report: JsonObject = {"repaired": False, "strategy": None, "backup_path": None, "rows": 0, "error": None}
    report |= {"sessions": 0, "damaged": []}
    backup = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}")
    try:
        for tail in ("", "-wal"):
            beside = path.with_name(path.name + tail)
            if beside.exists():
                _copy_private(beside, backup.with_name(backup.name + tail))
        report["backup_path"] = str(backup)
        for strategy, attempt in (("index", _rebuild), ("salvage", _salvage)):
            with contextlib.suppress(sqlite3.Error, StoreError):
                return report | attempt(path) | {"repaired": True, "strategy": strategy}
        report["error"] = "Nothing in the file could be read."
    except OSError as error:
        report["error"] = f"{error.strerror}: {error.filename}"
    return report


def in_use(path: Path) -> bool:
    if SqliteEngine.is_open(path):
        return True
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=0.2, isolation_level=None)) as db:
            db.execute("PRAGMA locking_mode=EXCLUSIVE")
            db.execute("BEGIN EXCLUSIVE")
            db.execute("ROLLBACK")
    except sqlite3.Error as error:
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return False


def _copy_private(source: Path, target: Path) -> None:
    with open(source, "rb") as old, open(target, "wb", opener=private_opener) as new:
        while chunk := old.read(1 << 20):
            new.write(chunk)
        new.flush()
        os.fsync(new.fileno())


def _rebuild(path: Path) -> JsonObject:
    """Enough if only the index is damaged."""
    engine = SqliteEngine(path, STATE)
    engine.takes_unfinished = True
    try:
        engine.exclusive(engine.index.rebuild)
        faults: list[str] = []
        for sql in _CHECKS:
            faults += engine.read(lambda tx, sql=sql: _checked(tx, sql, float("inf")))  # type: ignore[misc]
        faults += engine.exclusive(_index_fault)
        if faults:
            raise StoreError(faults[0])
        counts = {"rows": "SELECT count(*) FROM messages", "sessions": "SELECT count(*) FROM sessions"}
        return engine.read(lambda tx: {name: int(tx.value(sql)) for name, sql in counts.items()})
    finally:
        engine._close()


def _salvage(path: Path) -> JsonObject:
    """Copy every readable row to a new file that replaces the old one."""
    fresh = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    whole = path.with_name(f"{fresh.name}-whole")
    try:
        with contextlib.closing(open_damaged(_of_whole_pages(path, whole))) as old:
            version = int(old.execute("PRAGMA user_version").fetchone()[0])
            steps = STATE.migrations[:version] if version > 0 else STATE.migrations
            # The tables in the old file's version, which are then migrated.
            copied = _in_file(fresh, Schema(steps), lambda engine: _copy_tables(old, engine))
        if not copied["sessions"][0] and not copied["messages"][0]:
            raise StoreError("No session could be read.")
        _in_file(fresh, STATE, _put_in_order)
    except BaseException:
        _remove(fresh)
        raise
    finally:
        _remove(whole)
    _remove(path, keep_main=True)
    os.replace(fresh, path)
    damaged = sorted(table for table, (_, whole) in copied.items() if not whole)
    return {"rows": copied["messages"][0], "sessions": copied["sessions"][0], "damaged": damaged}


def _of_whole_pages(path: Path, copy: Path) -> Path:
    """The file, or a copy without a partial last page, for which SQLite would read zeros."""
    with open(path, "rb") as file:
        page = int.from_bytes(file.read(18)[16:], "big")
    page = 65_536 if page == 1 else page
    if page < 512 or not (surplus := path.stat().st_size % page):
        return path
    for tail in ("", "-wal"):
        if (beside := path.with_name(path.name + tail)).exists():
            _copy_private(beside, copy.with_name(copy.name + tail))
    os.truncate(copy, path.stat().st_size - surplus)
    return copy


def _in_file(path: Path, schema: Schema, work: Callable[[SqliteEngine], R]) -> R:
    engine = SqliteEngine(path, schema)
    engine.takes_unfinished = True
    try:
        engine.open()
        return work(engine)
    finally:
        engine._close()


def _copy_tables(old: sqlite3.Connection, engine: SqliteEngine) -> dict[str, tuple[int, bool]]:
    sql = (
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'messages_fts%' "
        "AND name NOT LIKE 'sqlite_%'"
    )
    names = [name for (name,) in engine.read(lambda tx: tx.rows(sql))]
    # Tables that name the keys of others come first.
    tables = sorted(names, key=lambda name: name not in ("sessions", "messages", "runs", "blobs"))
    engine.exclusive(lambda db: db.execute("PRAGMA foreign_keys=OFF"))
    return {table: engine.write(lambda tx, table=table: copy_table(old, tx, table)) for table in tables}  # type: ignore[misc]


def _put_in_order(engine: SqliteEngine) -> None:
    engine.write(_drop_orphans)
    engine.exclusive(engine.index.rebuild)


def _drop_orphans(tx: Tx) -> None:
    for table, column, parent, key in (
        ("messages", "session_id", "sessions", "id"),
        ("session_files", "session_id", "sessions", "id"),
        ("pending_calls", "session_id", "sessions", "id"),
        ("run_log", "run_id", "runs", "run_id"),
        ("run_partials", "run_id", "runs", "run_id"),
        ("run_controls", "run_id", "runs", "run_id"),
    ):
        if table == "messages":
            # Messages are worth more than the row of their session.
            tx.execute(
                "INSERT OR IGNORE INTO sessions (id, owner, source, kind, started_at, last_active) "
                "SELECT session_id, 'default', 'repair', 'root', min(timestamp), max(timestamp) FROM messages "
                "WHERE session_id NOT IN (SELECT id FROM sessions) GROUP BY session_id"
            )
        else:
            tx.execute(f"DELETE FROM {table} WHERE {column} NOT IN (SELECT {key} FROM {parent})")
    tx.execute("UPDATE sessions SET parent_session_id = NULL WHERE parent_session_id NOT IN (SELECT id FROM sessions)")
    tx.execute(
        "UPDATE sessions SET message_count = (SELECT count(*) FROM messages WHERE session_id = sessions.id "
        "AND NOT model_only AND (active OR compacted))"
    )


def _remove(path: Path, *, keep_main: bool = False) -> None:
    for tail in ("-wal", "-shm", "-journal", *(() if keep_main else ("",))):
        path.with_name(path.name + tail).unlink(missing_ok=True)
