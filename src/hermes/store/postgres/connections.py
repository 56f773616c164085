"""A transaction on a PostgreSQL connection, and the connections themselves: how they are set up, what their rows are.

The same repositories work on a blocking connection and on an event loop. On a loop their work runs in a greenlet: what
it asks of the connection is awaited by the task that runs it, so no thread takes part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import psycopg
from greenlet import getcurrent, greenlet
from psycopg.adapt import AdaptersMap
from psycopg.types.string import TextLoader

from hermes.core.text import whole_text
from hermes.store.dialect import translate
from hermes.store.engine import Params, Record, TimeUp
from hermes.store.engine import Tx as AnyTx
from hermes.store.postgres.commits import Marker
from hermes.store.postgres.wire import Statement, send, send_on_loop

R = TypeVar("R")
Connection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

# JSON is decoded by its users.
ADAPTERS = AdaptersMap(psycopg.adapters)
for _type in ("json", "jsonb"):
    ADAPTERS.register_loader(_type, TextLoader)


class Bridge(greenlet):  # type: ignore[misc]
    """A greenlet that runs the work of a transaction on an event loop."""

    tx: Tx | None = None
    engine: object = None


def _await(awaitable: Awaitable[R]) -> R:
    """In a bridge: let the task await this."""
    result: R = getcurrent().parent.switch(awaitable)
    return result


async def run_in_bridge(bridge: Bridge, work: Callable[[], R]) -> R:
    bridge.run = work
    answer: Any = bridge.switch()
    while not bridge.dead:
        try:
            value = await answer
        except BaseException as error:  # noqa: BLE001  (it belongs to whoever asked)
            answer = bridge.throw(error)
        else:
            answer = bridge.switch(value)
    result: R = answer
    return result


class Unencodable(Exception):
    """Text that cannot be sent as it is: the transaction is run again with such text replaced."""


class Tx(AnyTx):
    """A transaction. Statements without a needed outcome are sent with the next one that is waited for."""

    __slots__ = ("_clean", "_db", "_deferred", "_on_loop", "_prefetched", "_prefetching", "has_changes")
    backend = "postgres"

    def __init__(self, db: Connection, begin: str, *, on_loop: bool, clean: bool = False) -> None:
        """`clean`: replace text that PostgreSQL cannot store."""
        self._db: Any = db
        self._on_loop, self._clean = on_loop, clean
        self._deferred: list[Statement] = [(begin.encode(), ())]
        # Positions of deferred queries, and the answers of those that were sent, by statement and values.
        self._prefetching: dict[Statement, int] = {}
        self._prefetched: dict[Statement, list[Record]] = {}
        self.read_only, self.later = begin.endswith("READ ONLY"), []
        self.has_changes = False

    def execute(self, sql: str, params: Params = ()) -> None:
        self.has_changes = True
        self._defer(translate(sql), params)

    def _defer(self, statement: bytes, params: Params = ()) -> None:
        self._deferred.append((statement, params))

    def prefetch(self, sql: str, params: Params = ()) -> None:
        key = (translate(sql), tuple(params))
        self._prefetching[key] = len(self._deferred)
        self._deferred.append(key)

    def change(self, sql: str, params: Params = ()) -> int:
        self.has_changes = True
        return self._send([*self._deferred, (translate(sql), params)], rows=False)[1]

    def many(self, sql: str, rows: Sequence[Params]) -> None:
        self.has_changes = True
        statement = translate(sql)
        self._deferred += ((statement, params) for params in rows)

    def row(self, sql: str, params: Params = ()) -> Record | None:
        rows = self.rows(sql, params)
        return rows[0] if rows else None

    def rows(self, sql: str, params: Params = ()) -> list[Record]:
        self.has_changes = self.has_changes or not sql.startswith("SELECT")
        statement = translate(sql)
        if self._prefetching or self._prefetched:
            key = (statement, tuple(params))
            if key in self._prefetching:
                self.settle()
            if (answer := self._prefetched.pop(key, None)) is not None:
                return answer
        return self._send([*self._deferred, (statement, params)], rows=True)[0]

    def each(self, sql: str, params: Params = ()) -> Iterator[Record]:
        return iter(self.rows(sql, params))

    def value(self, sql: str, params: Params = (), default: object = None) -> Any:
        rows = self.rows(sql, params)
        return rows[0][0] if rows else default

    def next_value(self, counter: Literal["lease_token", "response_use"]) -> int:
        return int(self.value(f"SELECT nextval('{counter}')"))

    @property
    def backend_pid(self) -> int:
        pid: int = self._db.pgconn.backend_pid
        return pid

    def commit(self, marker: Marker | None) -> None:
        if marker is not None:
            sql, params = marker.next_statement()
            self._defer(translate(sql), params)
        self._send([*self._deferred, (b"COMMIT", ())], rows=False)

    def settle(self) -> None:
        """Wait for the outcome of everything so far."""
        if self._deferred:
            self._send(self._deferred, rows=False)

    def _send(self, statements: list[Statement], *, rows: bool) -> tuple[list[Record], int]:
        """Send the statements; returns the rows of the last one, if wanted, and how many it changed."""
        prefetching, self._prefetching, self._deferred = self._prefetching, {}, []
        wanted = [*prefetching.values(), *([len(statements) - 1] if rows else [])]
        if self._clean:
            statements = [(sql, [_clean(param) for param in params]) for sql, params in statements]
        try:
            if self._on_loop:
                answers, count = _await(send_on_loop(self._db, statements, wanted))
            else:
                answers, count = send(self._db, statements, wanted)
        except (UnicodeEncodeError, psycopg.DataError) as error:
            if self._clean or (isinstance(error, psycopg.DataError) and error.sqlstate is not None):
                raise
            raise Unencodable from error
        self._prefetched |= zip(prefetching, answers, strict=False)
        return answers[-1] if rows else [], count

    def nested(self, work: Callable[[Any], R]) -> R:
        callbacks = len(self.later)
        self._defer(b"SAVEPOINT part")
        self.settle()
        try:
            result = work(self)
            self.settle()
        except BaseException:
            del self.later[callbacks:]
            self._deferred, self._prefetching = [], {}
            if is_connected(self._db):
                self._send([(b"ROLLBACK TO part", ()), (b"RELEASE part", ())], rows=False)
            raise
        self._defer(b"RELEASE part")
        return result

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        self._defer(b"SAVEPOINT timed")
        self._defer(b"SET LOCAL statement_timeout = %d" % max(1, int(seconds * 1000)))
        self.settle()
        try:
            yield
            self.settle()
        except psycopg.errors.QueryCanceled:
            self._deferred, self._prefetching = [], {}
            raise TimeUp from None
        finally:
            if is_connected(self._db):  # the timeout goes with the savepoint
                self._defer(b"ROLLBACK TO timed")
                self._defer(b"RELEASE timed")


def _clean(param: object) -> object:
    """PostgreSQL does not accept lone surrogates and NUL."""
    return whole_text(param).replace("\x00", "\ufffd") if isinstance(param, str) else param


def is_connected(db: Any) -> bool:
    return not db.closed and not db.broken
