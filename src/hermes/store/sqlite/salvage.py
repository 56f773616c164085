"""Reads the rows of a damaged database, skipping unreadable pages."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hermes.store.dialect import placeholders
from hermes.store.sqlite.connections import Tx, uri

_ROWID_MAX = 2**63 - 1
# Tables without row ids are read by the keys that other tables refer to.
_NAMED_BY = {
    "session_model_usage": ("session_id", "SELECT id FROM sessions"),
    "prompts": (
        "sha256",
        "SELECT prompt_sha256 FROM sessions WHERE prompt_sha256 IS NOT NULL "
        "UNION SELECT instructions_sha256 FROM runs WHERE instructions_sha256 IS NOT NULL",
    ),
    "run_events": ("run_id", "SELECT run_id FROM runs"),
    "run_log": ("run_id", "SELECT run_id FROM runs"),
    "run_partials": ("run_id", "SELECT run_id FROM runs"),
    "run_controls": ("run_id", "SELECT run_id FROM runs"),
    "message_blobs": ("sha256", "SELECT sha256 FROM blobs"),
}


def open_damaged(path: Path) -> sqlite3.Connection:
    """A connection that reads a file even if it is shorter than its header says."""
    db = sqlite3.connect(uri(path, "ro"), uri=True, check_same_thread=False, isolation_level=None)
    db.execute("PRAGMA writable_schema=ON")
    return db


def copy_table(old: sqlite3.Connection, tx: Tx, table: str) -> tuple[int, bool]:
    """Copy the readable rows of a table: how many, and whether these are all."""
    columns_known = {row[1] for row in old.execute(f"PRAGMA table_info({table})")}
    names = [row[1] for row in tx.rows(f"PRAGMA table_info({table})") if row[1] in columns_known]
    if not names:
        return 0, True
    rows = _Rows(old, table, ", ".join(names))
    sql = f"INSERT OR IGNORE INTO {table} ({', '.join(names)}) VALUES ({placeholders(names)})"
    count = sum(max(0, tx.change(sql, row)) for row in rows.both_ways())
    if not rows.whole and table in _NAMED_BY:
        column, keys = _NAMED_BY[table]
        for (key,) in tx.rows(keys):
            count += sum(max(0, tx.change(sql, row)) for row in rows.of(column, key))
    return count, rows.whole


class _Rows:
    """The rows of a damaged table. `whole`: none was skipped."""

    def __init__(self, old: sqlite3.Connection, table: str, names: str) -> None:
        self._old, self._table, self._names = old, table, names
        self.whole = True

    def both_ways(self) -> Iterator[tuple[Any, ...]]:
        """From the first row on and, if the end is not reached, backwards from the last one."""
        try:
            self._old.execute(f"SELECT rowid FROM {self._table} LIMIT 0")
        except sqlite3.OperationalError:  # the table is empty
            yield from self._until_damage("", ())
            if not self.whole:
                keys = [row[1] for row in self._old.execute(f"PRAGMA table_info({self._table})") if row[5]]
                yield from self._until_damage(f"ORDER BY {', '.join(f'{key} DESC' for key in keys)}", ())
            return
        yield from self._by_rowid(1)
        if not self.whole:
            yield from self._by_rowid(-1)

    def of(self, column: str, key: object) -> Iterator[tuple[Any, ...]]:
        yield from self._until_damage(f"WHERE {column} = ?", (key,))

    def _until_damage(self, condition: str, params: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._old.execute(f"SELECT {self._names} FROM {self._table} {condition}", params)
        except sqlite3.DatabaseError:
            self.whole = False

    def _by_rowid(self, step: int) -> Iterator[tuple[Any, ...]]:
        at: int | None = -_ROWID_MAX if step > 0 else _ROWID_MAX
        last = 0 if step > 0 else None
        while at is not None:
            try:
                for row in self._from(at, step):
                    last = row[0]
                    yield row[1:]
            except sqlite3.DatabaseError:
                self.whole = False
                at = self._behind_damage(last, step)
                last = None if at is None else at - step
            else:
                return

    def _from(self, rowid: int, step: int) -> sqlite3.Cursor:
        sign, order = (">=", "ASC") if step > 0 else ("<=", "DESC")
        return self._old.execute(
            f"SELECT rowid, {self._names} FROM {self._table} WHERE rowid {sign} ? ORDER BY rowid {order}", (rowid,)
        )

    def _behind_damage(self, last: int | None, step: int) -> int | None:
        """A row id after unreadable pages, searched in growing steps, then back towards the damage."""
        if last is None:  # the last rows are unreadable: their ids are below a power of two
            probes = [_ROWID_MAX >> shift for shift in range(63)]
        else:
            probes = [last + step * (1 << shift) for shift in range(62) if 0 < last + step * (1 << shift) <= _ROWID_MAX]
        failed = last
        for probe in probes:
            if self._is_readable(probe, step):
                return probe if failed is None else self._nearest(failed, probe, step)
            failed = probe
        return None

    def _nearest(self, failed: int, readable: int, step: int) -> int:
        while abs(readable - failed) > 1:
            middle = (failed + readable) // 2
            if self._is_readable(middle, step):
                readable = middle
            else:
                failed = middle
        return readable

    def _is_readable(self, rowid: int, step: int) -> bool:
        try:
            return self._from(rowid, step).fetchone() is not None
        except sqlite3.DatabaseError:
            return False
