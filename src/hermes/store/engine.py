"""The interface of a database engine: transactions, blocking and on an event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar, overload
from weakref import WeakSet

from hermes.core.limits import SLOW_READ_S_MAX
from hermes.core.threads import Threads
from hermes.store.base import MIGRATION, StoreError, StoreTimeout, StoreUnfinished

log = logging.getLogger(__name__)
R = TypeVar("R")
# Work is typed by what any transaction offers, so that the same repositories use both databases.
Work = Callable[[Any], R]
Params = Sequence[Any]
Backend = Literal["sqlite", "postgres"]
SET_META = "INSERT INTO state_meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
# The mark of an unfinished migration in its target.
MARK_SQL = f"SELECT value FROM state_meta WHERE key = '{MIGRATION}'"


class TimeUp(Exception):
    """The time limit of a read has passed."""


class Conflict(Exception):
    """Another transaction changed what this one has read: the engine rolls it back and runs its work again."""


class Record(Protocol):
    """A row of a result, with values by column name or position."""

    @overload
    def __getitem__(self, key: int | str) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def keys(self) -> Sequence[str]: ...


class Tx(ABC):
    """A transaction, or one consistent view for reading. SQL is written for SQLite; `hermes.store.dialect` has what
    differs."""

    __slots__ = ("later", "read_only")
    backend: Backend

    def __init__(self) -> None:
        self.read_only = False
        self.later: list[Callable[[], None]] = []

    @abstractmethod
    def execute(self, sql: str, params: Params = ()) -> None:
        """Run a statement without waiting for its outcome; it may fail as late as the next statement or the commit."""

    @abstractmethod
    def change(self, sql: str, params: Params = ()) -> int:
        """Run a statement and return how many rows it changed."""

    @abstractmethod
    def many(self, sql: str, rows: Sequence[Params]) -> None: ...

    @abstractmethod
    def row(self, sql: str, params: Params = ()) -> Record | None: ...

    @abstractmethod
    def rows(self, sql: str, params: Params = ()) -> list[Record]: ...

    @abstractmethod
    def each(self, sql: str, params: Params = ()) -> Iterator[Record]: ...

    @abstractmethod
    def prefetch(self, sql: str, params: Params = ()) -> None:
        """Send a query early whose result is needed later, where that saves a round trip. This transaction must not
        change its result in between."""

    @abstractmethod
    def value(self, sql: str, params: Params = (), default: object = None) -> Any: ...

    @abstractmethod
    def next_value(self, counter: Literal["lease_token", "response_use"]) -> int:
        """Increment a counter that never goes back."""

    @abstractmethod
    def nested(self, work: Callable[[Any], R]) -> R:
        """Run a part of the transaction that is rolled back alone if it fails."""

    @abstractmethod
    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Raise `TimeUp` if the reads inside take longer."""

    def after(self, act: Callable[[], None]) -> None:
        """Register a callback for after the commit; it is dropped on a rollback."""
        self.later.append(act)


class Maintenance(Protocol):
    """See `Upkeep` for what each operation does."""

    def backup(self, engine: Any, path: Path) -> None: ...
    def check(self, engine: Any, deep: bool, progress: Callable[[str], None]) -> list[str]: ...
    def optimize(self, engine: Any) -> dict[str, int]: ...
    def vacuum_if_worthwhile(self, engine: Any) -> bool: ...
    def give_back_space(self, engine: Any) -> None: ...
    def total_bytes(self, engine: Any) -> int: ...
    def sizes(self, engine: Any, seconds_max: float | None) -> dict[str, int]: ...


class Engine(ABC):
    """One database, shared by all its users in this process. `write` and `read` block; `submit_write` and `read_soon`
    are for an event loop. Work is a function of the transaction, and may run more than once before it is committed."""

    backend: Backend
    # The database's file; None in memory and on a server.
    path: Path | None
    # The home whose folders hold the files of sessions; None where there is none.
    folder: Path | None
    read_only: bool
    # Set by operations that complete or repair an unfinished copy; other users are rejected.
    takes_unfinished = False
    # Guards the registries of engines and the counts of their users.
    registry_lock = threading.Lock()

    def __init__(self, place: str, threads: int) -> None:
        self.place = place
        self.notices: list[str] = []
        self._users = 0
        self._ready = self._closed = self._forked = False
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._callers = Threads(threads)
        _all.add(self)
        # Called with the ids of deleted sessions once that is committed, before the caller's `write` returns.
        self.deletion_listeners: list[Callable[[Sequence[str]], None]] = []

    def check_finished(self, mark: str | None) -> None:
        """Reject an incomplete copy: the next `migrate` may start it again and lose what was added."""
        if mark is not None and not self.takes_unfinished:
            raise StoreUnfinished(
                f"The migration of {json.loads(mark)['source']} to this database was interrupted.",
                where=self.place,
                hint="finish it with hermes migrate (--from and --to as before), or name another database in storage.url",
            )

    def _check_usable(self) -> None:
        if self._forked:
            raise StoreError(
                "The database was opened before this process was forked off, and cannot be used in it.",
                where=self.place,
                hint="start the process anew instead of forking it (for example the spawn method of multiprocessing)",
            )
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> StoreError:
        return StoreError("The database is closed.", where=self.place)

    def _nested_error(self) -> StoreError:
        return StoreError("This cannot be done in the middle of a transaction.", where=self.place)

    @staticmethod
    def _timeout_error() -> StoreTimeout:
        message = f"The store had no answer within {SLOW_READ_S_MAX:g} s: too much is searched at once."
        return StoreTimeout(message, hint="ask for less, or try again later")

    def _run_callbacks(self, tx: Tx) -> None:
        for act in tx.later:
            try:
                act()
            except Exception:
                log.exception("a callback after a commit to %s failed", self.place)

    def tell_deleted(self, session_ids: Sequence[str]) -> None:
        for listen in tuple(self.deletion_listeners):
            listen(session_ids)

    @property
    @abstractmethod
    def maintenance(self) -> Maintenance: ...

    @abstractmethod
    def write(self, work: Callable[[Tx], R], *, sync: bool = False) -> R:
        """Run `work` in a transaction, or in the one that this thread is in; returns after the commit."""

    @abstractmethod
    def read(self, work: Callable[[Tx], R], *, slow: bool = False, stop: threading.Event | None = None) -> R:
        """Run `work` on one consistent view of the database, or on the view that this thread has. Slow reads have their
        own connections. Setting `stop` interrupts the running statement."""

    @abstractmethod
    def submit_write(self, work: Callable[[Tx], R], *, sync: bool = False) -> asyncio.Future[R]:
        """Like `write`, for an event loop; it completes whether it is awaited or not."""

    @abstractmethod
    async def read_soon(self, work: Callable[[Tx], R], *, slow: bool = False) -> R: ...

    async def apply(self, function: Callable[[], R]) -> R:
        """Run a function that uses this engine in a thread that no read waits for."""
        self._check_usable()
        return await self._callers.call(function)  # type: ignore[no-any-return]

    @abstractmethod
    def open(self) -> None:
        """Open the database now, so that errors are raised now."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether the database exists; opening it creates it."""

    @abstractmethod
    async def check(self) -> None:
        """Raise the reason why the database cannot store a change."""

    def shared(self) -> Self:
        """Add one user; each calls `release`, or `drop` from a finalizer."""
        with Engine.registry_lock:
            self._check_usable()
            self._users += 1
        return self

    @abstractmethod
    def drop(self) -> None: ...

    @abstractmethod
    def release(self) -> None: ...


_all: WeakSet[Engine] = WeakSet()


def _after_fork() -> None:
    Engine.registry_lock = threading.Lock()
    for engine in _all:
        engine._forked = True


os.register_at_fork(after_in_child=_after_fork)
