"""Returns the space of deleted rows to the file system, a few pages at a time."""

from __future__ import annotations

import sqlite3
import time

from hermes.core.limits import FREE_PAGES_KEPT_MIN, UPKEEP_STEP_S
from hermes.store.engine import Tx as AnyTx
from hermes.store.sqlite.connections import Done, Tx

_INCREMENTAL = 2
# How much of a file may be free: returning space that is needed again at once is wasted work.
_FREE_SHARE = 16


def gives_back(db: sqlite3.Connection | AnyTx) -> bool:
    """Whether the file can shrink page by page; only a full vacuum changes that."""
    mode = db.value("PRAGMA auto_vacuum") if isinstance(db, AnyTx) else db.execute("PRAGMA auto_vacuum").fetchone()[0]
    return bool(mode == _INCREMENTAL)


def give_back(tx: Tx) -> Done:
    """Cut free pages off the file for a few milliseconds."""
    if not gives_back(tx):
        return "nothing"
    free, pages = int(tx.value("PRAGMA freelist_count")), int(tx.value("PRAGMA page_count"))
    surplus = free - max(FREE_PAGES_KEPT_MIN, (pages - free) // _FREE_SHARE)
    if surplus <= 0:
        return "nothing"
    until = time.monotonic() + UPKEEP_STEP_S
    while True:
        tx.execute("PRAGMA incremental_vacuum(1)")  # larger numbers free one page as well: sqlite3 steps only once
        surplus -= 1
        if surplus <= 0 or time.monotonic() > until:
            break
    return "more" if surplus > 0 else "all"


def vacuum(db: sqlite3.Connection) -> None:
    """Rewrite the whole file without free pages; it shrinks by itself afterwards."""
    db.execute(f"PRAGMA auto_vacuum={_INCREMENTAL}")
    db.execute("VACUUM")


def prepare(db: sqlite3.Connection) -> None:
    """Let a new file shrink by itself."""
    db.execute(f"PRAGMA auto_vacuum={_INCREMENTAL}")
