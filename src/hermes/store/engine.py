"""What a database offers to the repositories: transactions, blocking and on an event loop. `sqlite` and `postgres` have it."""

from __future__ import annotations

import asyncio
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, overload

from hermes.store.base import MIGRATION, StoreUnfinished

R = TypeVar("R")
Params = Sequence[Any]
Backend = Literal["sqlite", "postgres"]
# What an unfinished migration has noted in its target.
MARK_SQL = f"SELECT value FROM state_meta WHERE key = '{MIGRATION}'"


class TimeUp(Exception):
    """A read that was given a time has used it up."""


class Conflict(Exception):
    """Another transaction changed what this one has read: the engine rolls it back and runs its work again."""


class Record(Protocol):
    """A row of a result: its values by column name or by position, in order."""

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
        """Run a statement whose outcome nobody needs here; it may fail as late as the next statement or the commit."""

    @abstractmethod
    def change(self, sql: str, params: Params = ()) -> int:
        """Run a statement; how many rows it changed."""

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
        """Ask now for what this very query is asked for later, where that saves a round trip. Its answer must not change
        by what this transaction does in between."""

    @abstractmethod
    def value(self, sql: str, params: Params = (), default: object = None) -> Any: ...

    @abstractmethod
    def next_value(self, counter: Literal["lease_token", "response_use"]) -> int:
        """The next number of a counter, which grows for good."""

    @abstractmethod
    def nested(self, work: Callable[[Any], R]) -> R:
        """A part of a transaction that is undone alone when it fails."""

    @abstractmethod
    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Raise `TimeUp` when what is read inside takes longer."""

    def after(self, act: Callable[[], None]) -> None:
        """Have something done once the transaction counts; not at all if it is undone."""
        self.later.append(act)


class Maintenance(Protocol):
    """What care of a database means; `Upkeep` has the words for it."""

    def backup(self, engine: Any, path: Path) -> None: ...
    def check(self, engine: Any, deep: bool, progress: Callable[[str], None]) -> list[str]: ...
    def optimize(self, engine: Any) -> dict[str, int]: ...
    def vacuum_if_worthwhile(self, engine: Any) -> bool: ...
    def give_back_space(self, engine: Any) -> None: ...
    def total_bytes(self, engine: Any) -> int: ...
    def sizes(self, engine: Any, seconds_max: float | None) -> dict[str, int]: ...


class Engine(ABC):
    """One database, for all who use it in this process.

    `write` and `read` block; `submit_write` and `read_soon` are for an event loop. Work is a function of the transaction,
    and may run more than once before it counts.
    """

    backend: Backend
    # The database's file; None in memory and on a server.
    path: Path | None
    # The home whose folders hold the files of sessions; None where there is none.
    folder: Path | None
    read_only: bool
    # Set by what finishes or repairs a copy; whoever would use one is refused.
    takes_unfinished = False

    def __init__(self) -> None:
        self.notices: list[str] = []
        # Called with the ids of deleted sessions once that is committed, before the caller's `write` returns.
        self.deletion_listeners: list[Callable[[Sequence[str]], None]] = []

    def check_finished(self, mark: str | None, place: str) -> None:
        """Refuse a copy that is not complete: the next `migrate` may begin it anew, without what was added."""
        if mark is not None and not self.takes_unfinished:
            raise StoreUnfinished(
                f"The migration of {json.loads(mark)['source']} to this database was interrupted.",
                where=place,
                hint="finish it with hermes migrate (--from and --to as before), or name another database in storage.url",
            )

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
        """Run `work` on one consistent view of the database, or on the view that this thread has. Slow reads have
        connections of their own. Once `stop` is set, a statement that still runs is interrupted."""

    @abstractmethod
    def submit_write(self, work: Callable[[Tx], R], *, sync: bool = False) -> asyncio.Future[R]:
        """The same as `write`, for a loop; done whether it is awaited or not."""

    @abstractmethod
    async def read_soon(self, work: Callable[[Tx], R], *, slow: bool = False) -> R: ...

    @abstractmethod
    async def apply(self, function: Callable[[], R]) -> R:
        """Run something that uses this engine in a thread that no read waits for."""

    @abstractmethod
    def open(self) -> None:
        """Open the database now, so that what is wrong with it is told now."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether there is a database before it is opened, which makes it."""

    @abstractmethod
    async def check(self) -> None:
        """Raise what keeps the database from taking a change and keeping it."""

    @abstractmethod
    def shared(self) -> Engine:
        """Count one more user; each calls `release`, or `drop` from a finalizer."""

    @abstractmethod
    def drop(self) -> None: ...

    @abstractmethod
    def release(self) -> None: ...
