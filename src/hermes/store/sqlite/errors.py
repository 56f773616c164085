"""Errors of a database file as ours, with hints; the search index and its repair."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hermes.core.limits import BUSY_S_MAX, FREE_BYTES_MIN
from hermes.store.base import RunExists, StoreBusy, StoreDamaged, StoreError, StoreFull, StoreReadOnly
from hermes.store.sqlite.connections import Schema, Tx, connect, uri, write_transaction

# The 1 includes a comparison with the indexed content.
_COMPARED = "INSERT INTO {index}({index}, rank) VALUES ('integrity-check', 1)"


class Index:
    """The search index, which can be rebuilt from the other tables."""

    def __init__(self, schema: Schema, path: Path | None, notice: Callable[[str], None]) -> None:
        self._schema, self._path, self._notice = schema, path, notice

    def check(self, db: sqlite3.Connection) -> None:
        """Raise if searching fails or does not find what it must."""
        index = self._schema.index
        if not index:
            return
        try:
            db.execute(f"SELECT rowid FROM {index} WHERE {index} MATCH 'x' LIMIT 1").fetchone()
            if self._schema.probe is None or self._schema.probe(Tx(db)):
                return
        except sqlite3.Error as error:
            if not self.may_be_hit_by(error):
                raise
        self.rebuild(db)

    def may_be_hit_by(self, error: BaseException) -> bool:
        """Whether only the search index may be damaged."""
        if not self._schema.index or not isinstance(error, sqlite3.Error):
            return False
        damaged = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CORRUPT
        message = str(error)
        return damaged or "fts5" in message or self._schema.index in message or message == "constraint failed"

    def mend(self, db: sqlite3.Connection) -> bool:
        index = self._schema.index
        parts = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE name GLOB ?", (f"{index}_*",))]
        try:
            db.execute(_COMPARED.format(index=index))
            sound = all(db.execute(f"PRAGMA quick_check('{name}')").fetchone()[0] == "ok" for name in parts)
        except sqlite3.Error:
            sound = False
        if not sound:
            self.rebuild(db)
        return not sound

    def rebuild(self, db: sqlite3.Connection) -> None:
        index = self._schema.index
        fill_index = f"INSERT INTO {index}({index}) VALUES ('rebuild')"
        try:
            _execute_all(db, [fill_index, _COMPARED.format(index=index)])
        except sqlite3.Error:
            # The index is too damaged for that. Its pages are abandoned, and reclaimed by the vacuum.
            create_index = next(sql for step in self._schema.migrations for sql in step if f"TABLE {index} " in sql)
            drop_index = f"DELETE FROM sqlite_master WHERE name = '{index}' OR tbl_name GLOB '{index}_*'"
            writer = db if self._path is None else connect(uri(self._path, "rw"))
            try:
                _execute_all(
                    writer,
                    ["PRAGMA writable_schema=ON", drop_index, "PRAGMA writable_schema=RESET", create_index, fill_index],
                )
                writer.execute("VACUUM")
            finally:
                if writer is not db:
                    writer.close()
        self._notice(f"The search index of {self._path or 'the database'} was damaged and has been made anew.")


def _execute_all(db: sqlite3.Connection, statements: Sequence[str]) -> None:
    with write_transaction(db):
        for sql in statements:
            db.execute(sql)


def explained(error: BaseException, path: Path | None) -> BaseException:
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(error, sqlite3.IntegrityError) and str(error).endswith(" runs.run_id"):
        return RunExists(str(path or ""))
    if not isinstance(error, sqlite3.Error) or code is None or isinstance(error, sqlite3.IntegrityError):
        return error
    code &= 0xFF
    where = str(path or "")
    lacking = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and _no_room(path)
    if lacking or code == sqlite3.SQLITE_FULL:
        return full(path)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreBusy(
            f"Another process has held the database for more than {BUSY_S_MAX:g} s.", where=where, hint="try again"
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreDamaged(
            "The database is damaged; it was left as it is.",
            where=where,
            hint="hermes sessions repair, which makes a copy first",
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return StoreReadOnly(
            "The database cannot be written to.",
            where=where,
            hint="check the rights of the file and its folder, or set HERMES_HOME to another one",
        )
    return StoreError(f"The database failed: {error}.", where=where)


def full(path: Path | None) -> StoreFull:
    return StoreFull("The disk is full; nothing was changed.", where=str(path), hint="free some space")


def _no_room(path: Path | None) -> bool:
    if path is None:
        return False
    with suppress(OSError):
        room = os.statvfs(path.parent)
        return room.f_bavail * room.f_frsize < FREE_BYTES_MIN
    return False
