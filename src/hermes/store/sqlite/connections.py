"""Connections to SQLite: transactions, opening a file, waiting for other processes, pools of readers."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import random
import sqlite3
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from hermes.core import limits
from hermes.core.limits import BUSY_TIMEOUT_S, PROGRESS_STEPS
from hermes.core.text import whole_text
from hermes.core.threads import Threads
from hermes.store.base import StoreError
from hermes.store.engine import Params, Record, TimeUp
from hermes.store.engine import Tx as AnyTx

R = TypeVar("R")
# The progress of upkeep: nothing was due, a part is done, or everything.
Done = Literal["nothing", "more", "all"]
# sqlite3 looks for two adapter methods on every value of an unknown type, and None is unknown to it.
sqlite3.register_adapter(type(None), {}.get)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Schema:
    """The tables of one kind of file. `migrations[i]` brings version i to i + 1; `index` is a table that can be rebuilt
    from the others, `probe` a quick check of it; `upkeep` does a little work in an idle moment and returns its
    progress. A migration leaves its mark in a file that `has_marks`."""

    migrations: Sequence[Sequence[str]]
    index: str = ""
    probe: Callable[[Tx], bool] | None = None
    upkeep: Callable[[Tx], Done] | None = None
    has_marks: bool = False

    @property
    def version(self) -> int:
        return len(self.migrations)


# The counters, each in a row on a page that is written anyway.
_NEXT_VALUE = {
    "lease_token": "INSERT INTO leases VALUES ('', '', 1, 0) "
    "ON CONFLICT (name) DO UPDATE SET token = token + 1 RETURNING token",
    "response_use": "UPDATE counters SET value = value + 1 WHERE name = 'used' RETURNING value",
}


class Tx(AnyTx):
    __slots__ = ("_db", "_stop")
    backend = "sqlite"

    def __init__(self, db: sqlite3.Connection, stop: threading.Event | None = None) -> None:
        self._db, self._stop = db, stop
        self.read_only, self.later = False, []

    def execute(self, sql: str, params: Params = ()) -> None:
        self._run(sql, params)

    def change(self, sql: str, params: Params = ()) -> int:
        return self._run(sql, params).rowcount

    def many(self, sql: str, rows: Sequence[Params]) -> None:
        self._db.executemany(sql, rows)

    def row(self, sql: str, params: Params = ()) -> Record | None:
        row: Record | None = self._run(sql, params).fetchone()
        return row

    def rows(self, sql: str, params: Params = ()) -> list[Record]:
        return self._run(sql, params).fetchall()

    def each(self, sql: str, params: Params = ()) -> Iterator[Record]:
        return iter(self._run(sql, params))

    def value(self, sql: str, params: Params = (), default: object = None) -> Any:
        row = self._run(sql, params).fetchone()
        return default if row is None else row[0]

    def _run(self, sql: str, params: Params) -> sqlite3.Cursor:
        try:
            return self._db.execute(sql, params)
        except UnicodeEncodeError:  # a lone surrogate, which cannot be in the database
            return self._db.execute(sql, [whole_text(p) if isinstance(p, str) else p for p in params])

    def prefetch(self, sql: str, params: Params = ()) -> None:
        pass  # there are no round trips

    def next_value(self, counter: Literal["lease_token", "response_use"]) -> int:
        return int(self._run(_NEXT_VALUE[counter], ()).fetchone()[0])

    def nested(self, work: Callable[[Any], R]) -> R:
        callbacks = len(self.later)
        self._db.execute("SAVEPOINT part")
        try:
            result = work(self)
        except BaseException:
            del self.later[callbacks:]
            if self._db.in_transaction:
                self._db.execute("ROLLBACK TO part")
                self._db.execute("RELEASE part")
            raise
        self._db.execute("RELEASE part")
        return result

    @property
    def changes(self) -> int:
        return self._db.total_changes

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        watch(self._db, self._stop, time.monotonic() + seconds)
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
                raise TimeUp from None
            raise
        finally:
            watch(self._db, self._stop)


def watch(db: sqlite3.Connection, stop: threading.Event | None, until: float = math.inf) -> None:
    """Interrupt what this connection does once `stop` is set or the time is reached; with neither, stop watching."""
    if stop is None and until == math.inf:
        db.set_progress_handler(None, 0)
    else:
        db.set_progress_handler(
            lambda: (stop is not None and stop.is_set()) or time.monotonic() > until, PROGRESS_STEPS
        )


class Connection(sqlite3.Connection):
    """With a stamp it reads a file that nobody had open then, and leaves nothing beside it."""

    stamp: tuple[int, int] | None = None
    stale = False

    def as_it_was(self, path: Path | None) -> bool:
        return self.stamp is None or path is None or stamp_of(path) == self.stamp


def stamp_of(path: Path) -> tuple[int, int] | None:
    """The state of a file; None while it is in use."""
    if path.with_name(path.name + "-wal").exists() and path.with_name(path.name + "-wal").stat().st_size:
        return None
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def file_id(path: Path) -> tuple[int, int] | None:
    """Identifies a file among others of the same name; None if it does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def require_fts5() -> None:
    if not has_fts5():
        raise StoreError(
            "This Python's SQLite was built without full-text search (FTS5).",
            hint="use a Python whose sqlite3 module has FTS5, such as the one of the system or of python.org",
        )


def connect(where: str) -> Connection:
    db = sqlite3.connect(
        where,
        factory=Connection,
        uri=where != ":memory:",
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )
    db.row_factory = sqlite3.Row
    add_functions(db)
    return db


def add_functions(db: sqlite3.Connection) -> None:
    db.create_function("clock", 0, lambda: time.time())  # noqa: PLW0108  (looked up at each call)
    db.create_function("sha256", 1, lambda text: hashlib.sha256(text.encode()).hexdigest(), deterministic=True)


def uri(path: Path, mode: str) -> str:
    return f"file:{urllib.parse.quote(str(path))}?mode={mode}"


@functools.cache
def has_fts5() -> bool:
    with sqlite3.connect(":memory:") as db:
        options = [row[0] for row in db.execute("PRAGMA compile_options")]
    db.close()
    return "ENABLE_FTS5" in options


def file_system_of(path: Path) -> str:
    """The type of the file system of a path; empty if unknown."""
    best, kind = "", ""
    real = os.path.realpath(path)
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            point = before.split()[4].replace("\\040", " ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, after.split()[0]
    return kind


def is_busy(error: BaseException) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF == sqlite3.SQLITE_BUSY


def patiently(db: sqlite3.Connection, sql: str) -> sqlite3.Cursor:
    """Wait for other processes, with a limit. The delays are short: SQLite's own grow to 100 ms, while two busy workers
    hold the lock for a millisecond each."""
    until, wait_s = time.monotonic() + limits.BUSY_S_MAX, limits.BUSY_WAIT_S_MIN
    db.execute("PRAGMA busy_timeout=0")
    try:
        while True:
            try:
                return db.execute(sql)
            except sqlite3.OperationalError as error:
                if not is_busy(error) or time.monotonic() > until:
                    raise
            time.sleep(random.uniform(wait_s / 2, wait_s))  # noqa: S311  (only to keep two processes out of step)
            wait_s = min(2 * wait_s, limits.BUSY_WAIT_S_MAX)
    finally:
        db.execute(f"PRAGMA busy_timeout={int(limits.BUSY_TIMEOUT_S * 1000)}")


@contextmanager
def write_transaction(db: sqlite3.Connection) -> Iterator[None]:
    patiently(db, "BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


class Readers:
    """A pool of read-only connections: at most `size`, opened when needed, and as many threads for callers on an event loop. `connect` opens
    a connection; `check_usable` raises if the database can no longer be used."""

    def __init__(
        self, size: int, connect: Callable[[], Connection], check_usable: Callable[[], None], *, niceness: int = 0
    ) -> None:
        self.threads = Threads(size, niceness=niceness)
        self.idle: list[Connection] = []
        self._size, self._connect, self._check_usable = size, connect, check_usable
        self._slots = threading.Semaphore(size)
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        with self._slots:
            self._check_usable()
            db = self.idle.pop() if self.idle else self._connect()
            try:
                yield db
            finally:
                if self._closed or db.stale:
                    db.close()
                else:
                    self.idle.append(db)

    def close(self, wait_s: float) -> None:
        """Close the connections, those in use when they are returned; waits for `wait_s` at most."""
        self._closed = True
        acquired = [self._slots.acquire(timeout=wait_s / self._size) for _ in range(self._size)]
        while self.idle:
            self.idle.pop().close()
        self._slots.release(max(1, sum(acquired)))  # waiting callers find that it is closed
        self.threads.close()
