"""The PostgreSQL engine: transactions on connection pools, retried after conflicts and lost connections."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import psycopg
from greenlet import getcurrent

from hermes.core.limits import (
    BUSY_S_MAX,
    PG_AWAY_S_MAX,
    PG_CHECK_S_MAX,
    PG_CONFLICTS_MAX,
    PG_POOL_MAX,
    PG_POOL_MIN,
    PG_RETRY_WAIT_S_MAX,
    PG_RETRY_WAIT_S_MIN,
    PG_THREAD_POOL_MAX,
    SLOW_READ_S_MAX,
    SLOW_READERS_MAX,
)
from hermes.store.base import StoreError, StoreUnreachable
from hermes.store.engine import Conflict, Engine, Maintenance, Work
from hermes.store.postgres import opening
from hermes.store.postgres.commits import END_BACKEND, Marker, Markers
from hermes.store.postgres.connections import Bridge, Unencodable, is_connected, run_in_bridge
from hermes.store.postgres.connections import Tx as PostgresTx
from hermes.store.postgres.errors import STALE, explained, is_conflict, is_lost, unreachable
from hermes.store.postgres.pools import LoopPool, ThreadPool
from hermes.store.postgres.waiting import close_now

R = TypeVar("R")
# What a transaction has read stays valid for it; if another one has changed it since, it is retried.
_WRITE = "BEGIN ISOLATION LEVEL REPEATABLE READ"
_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


class _Retries:
    """How often and how long a failed transaction is retried."""

    def __init__(self, place: str, away_s: float | None = None) -> None:
        """`away_s`: how long to wait for an unreachable server, if not as long as for a busy one."""
        now = time.monotonic()
        self._place, self._until = place, now + BUSY_S_MAX
        self._away_until = self._until if away_s is None else min(self._until, now + away_s)
        self._wait_s, self._conflicts = PG_RETRY_WAIT_S_MIN, 0
        self.clean = False

    def wait_s(self, error: BaseException) -> float:
        """The delay before the next attempt; raises if there is none."""
        if isinstance(error, Unencodable):
            self.clean = True
            return 0.0
        conflict = is_conflict(error)
        self._conflicts += conflict
        again = conflict and self._conflicts < PG_CONFLICTS_MAX
        lost = is_lost(error)
        if not (again or lost) or time.monotonic() > (self._away_until if lost else self._until):
            raise explained(error, self._place) from error
        wait_s = random.uniform(self._wait_s / 2, self._wait_s)  # noqa: S311  (only to keep replicas out of step)
        self._wait_s = min(2 * self._wait_s, PG_RETRY_WAIT_S_MAX)
        return wait_s


class PostgresEngine(Engine):
    """One schema of one database. Each event loop has a pool; threads share another."""

    backend = "postgres"
    path = None
    read_only = False

    def __init__(self, url: str, schema: str, place: str, folder: Path | None = None) -> None:
        super().__init__(place, PG_POOL_MIN)
        self.url, self.schema, self.folder = url, schema, folder
        self._pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopPool] = weakref.WeakKeyDictionary()
        self._slow: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._pool: ThreadPool | None = None
        self.markers = Markers()
        self._tasks: set[asyncio.Task[Any]] = set()
        # The error of the last transaction on a loop that could not reach the server.
        self._loss: BaseException | None = None

    @property
    def maintenance(self) -> Maintenance:
        from hermes.store.postgres import maintenance

        return maintenance

    # --- blocking -----------------------------------------------------------------------------------------------

    def write(self, work: Work[R], *, sync: bool = False) -> R:
        if (tx := self._current_tx()) is not None:
            return tx.nested(work)
        return self._run(work, _WRITE)

    def read(self, work: Work[R], *, slow: bool = False, stop: threading.Event | None = None) -> R:
        if (tx := self._current_tx()) is not None:
            return work(tx)
        return self._run(work, _READ)

    def _current_tx(self) -> PostgresTx | None:
        current = getcurrent()
        if isinstance(current, Bridge) and current.engine is self:
            return current.tx
        return getattr(self._thread, "tx", None)

    def _run(self, work: Work[R], begin: str) -> R:
        retries = _Retries(self.place, PG_AWAY_S_MAX)
        while True:
            attempt = _Attempt(self, work, begin, on_loop=False, clean=retries.clean)
            try:
                with self._connection() as db:
                    try:
                        self._thread.tx = attempt.begin(db)
                        attempt.run()
                    except BaseException:
                        with suppress(psycopg.Error):
                            if is_connected(db):
                                db.execute("ROLLBACK")
                        raise
                    finally:
                        self._thread.tx = None
                return attempt.finish()
            except (psycopg.Error, Conflict, Unencodable) as error:
                if attempt.marker is not None:
                    if is_lost(error) and self._is_committed(attempt.marker):
                        return attempt.finish()
                    self.markers.put(attempt.marker)
                time.sleep(retries.wait_s(error))

    def _is_committed(self, marker: Marker) -> bool:
        retries = _Retries(self.place)
        while True:
            try:
                with self._connection() as db:
                    db.execute(END_BACKEND, (marker.backend_pid,))
                    answer = db.execute(*marker.question).fetchone()
                return bool(answer and answer[0])
            except psycopg.Error as error:
                with _unknown_outcome(self.place):
                    wait_s = retries.wait_s(error)
                time.sleep(wait_s)

    def run_outside_transaction(self, statements: Sequence[str]) -> None:
        if self._current_tx() is not None:
            raise self._nested_error()
        try:
            with self._connection() as db:
                for statement in statements:
                    db.execute(statement)
        except psycopg.Error as error:
            raise explained(error, self.place) from error

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[Any]]:
        pool = self._thread_pool()
        db = pool.take(BUSY_S_MAX)
        try:
            yield db
        except BaseException as error:
            _drop_useless(pool, db, error)
            raise
        finally:
            pool.put(db)

    def _thread_pool(self) -> ThreadPool:
        self.open()
        with self._lock:
            self._check_usable()
            if self._pool is None:
                self._pool = ThreadPool(partial(opening.connect_thread, self.url, self.schema), PG_THREAD_POOL_MAX)
            return self._pool

    # --- on an event loop ---------------------------------------------------------------------------------------

    def submit_write(self, work: Work[R], *, sync: bool = False) -> asyncio.Future[R]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[R] = loop.create_future()
        task = loop.create_task(self._run_on_loop(work, _WRITE))
        self._tasks.add(task)

        def settle(task: asyncio.Task[R]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                done.cancel()
                return
            error = task.exception()
            if done.done():
                return
            if error is None:
                done.set_result(task.result())
            else:
                done.set_exception(error)

        task.add_done_callback(settle)
        return done

    async def read_soon(self, work: Work[R], *, slow: bool = False) -> R:
        if not slow:
            return await self._run_on_loop(work, _READ)
        loop = asyncio.get_running_loop()
        limit = self._slow.setdefault(loop, asyncio.Semaphore(SLOW_READERS_MAX))
        try:
            async with asyncio.timeout(SLOW_READ_S_MAX), limit:
                return await self._run_on_loop(work, _READ)
        except TimeoutError:
            if self._loss is not None:
                raise unreachable(self.place, self._loss) from None
            raise self._timeout_error() from None

    async def _run_on_loop(self, work: Work[R], begin: str) -> R:
        retries = _Retries(self.place)
        while True:
            attempt = _Attempt(self, work, begin, on_loop=True, clean=retries.clean)
            try:
                async with self._connection_on_loop() as db:
                    try:
                        bridge = Bridge()
                        bridge.tx, bridge.engine = attempt.begin(db), self
                        await run_in_bridge(bridge, attempt.run)
                        self._loss = None
                    except BaseException:
                        with suppress(psycopg.Error):
                            if is_connected(db):
                                await db.execute("ROLLBACK")
                        raise
                return attempt.finish()
            except (psycopg.Error, Conflict, Unencodable) as error:
                if attempt.marker is not None:
                    if is_lost(error) and await self._is_committed_on_loop(attempt.marker):
                        return attempt.finish()
                    self.markers.put(attempt.marker)
                self._loss = error if is_lost(error) else None
                await asyncio.sleep(retries.wait_s(error))

    async def _is_committed_on_loop(self, marker: Marker) -> bool:
        retries = _Retries(self.place)
        while True:
            try:
                async with self._connection_on_loop() as db:
                    await db.execute(END_BACKEND, (marker.backend_pid,))
                    answer = await (await db.execute(*marker.question)).fetchone()
                return bool(answer and answer[0])
            except psycopg.Error as error:
                with _unknown_outcome(self.place):
                    wait_s = retries.wait_s(error)
                await asyncio.sleep(wait_s)

    @asynccontextmanager
    async def _connection_on_loop(self, timeout_s: float | None = None) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        self._check_usable()
        pool = self._pools.get(asyncio.get_running_loop()) or await self._loop_pool()
        db = await pool.take(BUSY_S_MAX if timeout_s is None else timeout_s)
        try:
            yield db
        except BaseException as error:
            _drop_useless(pool, db, error)
            raise
        finally:
            pool.put(db)

    async def _loop_pool(self) -> LoopPool:
        if not self._ready:
            await self.apply(self.open)
        loop = asyncio.get_running_loop()
        if (pool := self._pools.get(loop)) is None:
            connect = partial(opening.connect_loop, self.url, self.schema)
            pool = self._pools[loop] = LoopPool(connect, PG_POOL_MAX)
            weakref.finalize(loop, pool.idle.close)
        return pool

    # --- its life -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        self._check_usable()
        if not self._ready:
            self.check_finished(opening.make_ready(self.url, self.schema, self.place))
            self._ready = True

    def exists(self) -> bool:
        self._check_usable()
        return self._ready or opening.has_tables(self.url, self.schema, self.place)

    async def check(self) -> None:
        try:
            async with asyncio.timeout(PG_CHECK_S_MAX), self._connection_on_loop() as db:
                await opening.check_writable(db, self.place)
        except TimeoutError as error:
            raise unreachable(self.place, TimeoutError(f"no answer within {PG_CHECK_S_MAX:g} s")) from error
        except psycopg.Error as error:
            raise unreachable(self.place, error) from error

    @classmethod
    def of(cls, url: str, schema: str, place: str, folder: Path | None = None) -> PostgresEngine:
        """The engine of a schema, shared by all who ask; each gives it back with `release`."""
        with Engine.registry_lock:
            if (engine := _engines.get((url, schema))) is None:
                engine = _engines[url, schema] = cls(url, schema, place, folder)
            engine._users += 1
            return engine

    def drop(self) -> None:
        self.release()

    def release(self) -> None:
        with Engine.registry_lock:
            self._users -= 1
            if self._users > 0 or self._closed:
                return
            _engines.pop((self.url, self.schema), None)
            self._closed = True
        if self._forked:
            return
        for pool in self._pools.values():
            pool.idle.close()
        if self._pool is not None:
            self._pool.idle.close()
        self._callers.close()


class _Attempt(Generic[R]):
    """One attempt to run the work of a transaction."""

    def __init__(self, engine: PostgresEngine, work: Work[R], begin: str, *, on_loop: bool, clean: bool) -> None:
        self._engine, self._work, self._begin = engine, work, begin
        self._on_loop, self._clean = on_loop, clean
        # Set once COMMIT is sent for a transaction with changes.
        self.marker: Marker | None = None
        self._tx: PostgresTx
        self._result: R

    def begin(self, db: Any) -> PostgresTx:
        self._tx = PostgresTx(db, self._begin, on_loop=self._on_loop, clean=self._clean)
        return self._tx

    def run(self) -> None:
        # Taken before the transaction has its snapshot: a marker that is used concurrently would conflict.
        markers = self._engine.markers
        marker = markers.take()
        try:
            self._result = self._work(self._tx)
        except BaseException:
            markers.put(marker)
            raise
        if self._tx.has_changes and not self._tx.read_only:
            self.marker = marker
            marker.backend_pid = self._tx.backend_pid
        else:
            markers.put(marker)
        self._tx.commit(self.marker)

    def finish(self) -> R:
        """What follows the commit."""
        if self.marker is not None:
            self._engine.markers.put(self.marker)
        self._engine._run_callbacks(self._tx)
        return self._result


@contextmanager
def _unknown_outcome(place: str) -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        message = "The connection to PostgreSQL was lost during a commit: whether the change was made is not known."
        raise StoreUnreachable(message, where=place, hint="look before trying it again") from error


def _drop_useless(pool: LoopPool | ThreadPool, db: Any, error: BaseException) -> None:
    if is_lost(error):
        close_now(db)
        pool.idle.drop_all()  # they were made to the same server
    elif isinstance(error, STALE):
        close_now(db)


_engines: dict[tuple[str, str], PostgresEngine] = {}
os.register_at_fork(after_in_child=_engines.clear)
