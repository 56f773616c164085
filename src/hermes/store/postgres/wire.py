"""Statements sent over a connection in one round trip, by libpq's pipeline mode.

psycopg's cursors cost three times as much for each statement, most of it for waiting; a turn sends about twenty. Values go
as text whose type the server infers from the statement, as it does for a literal.
"""

from __future__ import annotations

import asyncio
import select
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg import errors, pq
from psycopg.adapt import Transformer

from hermes.core import limits
from hermes.core.limits import PG_PREPARED_MAX, PG_PREPARED_USES_MIN
from hermes.store.engine import Params
from hermes.store.postgres.waiting import close_now

Statement = tuple[bytes, Params]
_SYNC, _ABORTED = pq.ExecStatus.PIPELINE_SYNC, pq.ExecStatus.PIPELINE_ABORTED
_FAILED = (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.BAD_RESPONSE)
_TUPLES = pq.ExecStatus.TUPLES_OK
# How often statements were used: repeated ones are prepared.
_uses: Counter[bytes] = Counter()


class Row(tuple[Any, ...]):
    """A row of a result; each set of column names has a subclass with its `columns`."""

    __slots__ = ()
    columns: ClassVar[dict[str, int]] = {}

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, self.columns[key] if type(key) is str else key)

    def keys(self) -> Sequence[str]:
        return list(self.columns)


@lru_cache(maxsize=512)
def row_type(names: tuple[bytes, ...]) -> type[Row]:
    columns = {name.decode(): index for index, name in enumerate(names)}
    return type("Row", (Row,), {"__slots__": (), "columns": columns})


def make_rows(cursor: Any) -> Callable[[Sequence[Any]], Any]:
    """The row factory of psycopg's own cursors."""
    result: pq.abc.PGresult | None = cursor.pgresult
    if result is None or not result.nfields:
        return tuple
    return row_type(tuple([result.fname(index) or b"" for index in range(result.nfields)]))


def _encode(value: Any) -> bytes | None:
    if value is None:
        return None
    kind = type(value)
    if kind is str:
        text = str(value).encode()
        if b"\x00" in text:
            raise UnicodeEncodeError("utf-8", value, 0, 1, "PostgreSQL does not store NUL")
        return text
    if kind is bool:
        return b"t" if value else b"f"
    if kind is bytes:
        return f"\\x{value.hex()}".encode()
    return repr(value).encode() if kind is float else str(value).encode()


class Wire:
    """The statements of one connection: what is prepared, and what is sent but not answered."""

    def __init__(self, db: Any) -> None:
        self._pgconn: pq.abc.PGconn = db.pgconn
        self._transformer = Transformer(db)
        self._prepared: dict[bytes, bytes] = {}
        self._count = 0
        self._awaited: list[bool] = []
        self._new: list[bytes] = []
        self._results: list[pq.abc.PGresult] = []

    def begin(self, statements: Sequence[Statement]) -> None:
        encoded = [(sql, [_encode(value) for value in params]) for sql, params in statements]
        pgconn = self._pgconn
        pgconn.enter_pipeline_mode()
        # Each statement has a result that counts; its preparation has not.
        self._awaited, self._new, self._results = [], [], []
        for sql, values in encoded:
            if (name := self._prepared.get(sql)) is None and self._should_prepare(sql):
                self._count += 1
                name = self._prepared[sql] = b"h%d" % self._count
                self._new.append(sql)
                self._awaited.append(False)
                pgconn.send_prepare(name, sql)
            if name is not None:
                pgconn.send_query_prepared(name, values)
            else:
                pgconn.send_query_params(sql, values)
            self._awaited.append(True)
        pgconn.pipeline_sync()

    def _should_prepare(self, sql: bytes) -> bool:
        _uses[sql] += 1
        if len(_uses) > 4 * PG_PREPARED_MAX:
            _uses.clear()
        return len(self._prepared) < PG_PREPARED_MAX and _uses[sql] >= PG_PREPARED_USES_MIN

    def receive(self) -> bool:
        """Read what has arrived. True: everything has."""
        pgconn = self._pgconn
        pgconn.consume_input()
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:  # the end of one statement
                continue
            if result.status == _SYNC:
                return True
            self._results.append(result)
        return False

    def end(self, wanted: Sequence[int]) -> tuple[list[list[Any]], int]:
        """The rows of the wanted statements, by their positions, and how many rows the last one changed; raises the
        first error."""
        self._pgconn.exit_pipeline_mode()
        for result in self._results:
            if result.status in _FAILED or result.status == _ABORTED:
                for sql in self._new:
                    del self._prepared[sql]
                raise errors.error_from_result(result, "utf-8")
        answers = [result for result, counts in zip(self._results, self._awaited, strict=True) if counts]
        return [self._rows(answers[place]) for place in wanted], answers[-1].command_tuples or 0

    def _rows(self, result: pq.abc.PGresult) -> list[Any]:
        if result.status != _TUPLES or not result.ntuples:
            return []
        names = tuple([result.fname(index) or b"" for index in range(result.nfields)])
        self._transformer.set_pgresult(result)
        return self._transformer.load_rows(0, result.ntuples, row_type(names))


# The prepared statements of each open connection.
_wires: WeakKeyDictionary[Any, Wire] = WeakKeyDictionary()


def wire_of(db: Any) -> Wire:
    if (wire := _wires.get(db)) is None:
        wire = _wires[db] = Wire(db)
    return wire


async def send_on_loop(
    db: psycopg.AsyncConnection[Any], statements: Sequence[Statement], wanted: Sequence[int]
) -> tuple[list[list[Any]], int]:
    """Send statements and wait for all answers; returns those of `wanted` positions and the count of the last."""
    wire = wire_of(db)
    wire.begin(statements)
    try:
        while not await _exchange(wire, db.pgconn):
            pass
    except BaseException:  # unanswered statements make the connection unusable
        close_now(db)
        raise
    return wire.end(wanted)


async def _exchange(wire: Wire, pgconn: pq.abc.PGconn) -> bool:
    """Send what is unsent, and wait for an answer. True: everything has arrived."""
    loop, fd = asyncio.get_running_loop(), pgconn.socket
    ready: asyncio.Future[None] = loop.create_future()
    too_late = loop.call_later(limits.PG_ANSWER_S_MAX, _fail, ready)
    flushed = pgconn.flush() == 0
    loop.add_reader(fd, _set, ready)
    if not flushed:
        loop.add_writer(fd, _set, ready)
    try:
        await ready
    finally:
        too_late.cancel()
        loop.remove_reader(fd)
        if not flushed:
            loop.remove_writer(fd)
    return wire.receive()


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _fail(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_exception(_no_answer())


def _no_answer() -> psycopg.OperationalError:
    return psycopg.OperationalError(f"no answer within {limits.PG_ANSWER_S_MAX:g} s")


def send(
    db: psycopg.Connection[Any], statements: Sequence[Statement], wanted: Sequence[int]
) -> tuple[list[list[Any]], int]:
    """`send_on_loop` for a blocking connection."""
    wire, pgconn = wire_of(db), db.pgconn
    wire.begin(statements)
    try:
        done = False
        while not done:
            flushed = pgconn.flush() == 0
            poll = select.poll()
            poll.register(pgconn.socket, select.POLLIN | (0 if flushed else select.POLLOUT))
            if not poll.poll(limits.PG_ANSWER_S_MAX * 1000):
                raise _no_answer()
            done = wire.receive()
    except BaseException:
        close_now(db)
        raise
    return wire.end(wanted)
