"""Connections that are used again: a pool for an event loop, and one for threads.

A connection is made when none is idle. There are no tasks or threads behind a pool, so a loop can end at any time, and a
server that is away is asked again by whoever needs it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import psycopg

from hermes.core.limits import PG_IDLE_S_MAX, PG_POOL_MIN
from hermes.store.base import StoreBusy
from hermes.store.postgres.waiting import close_now

C = TypeVar("C", psycopg.Connection[Any], psycopg.AsyncConnection[Any])


class _Idle(Generic[C]):
    """Idle connections, the one used last at the end."""

    def __init__(self) -> None:
        self._connections: list[tuple[C, float]] = []
        self.closed = False

    def pop(self) -> C | None:
        while self._connections:
            db, _ = self._connections.pop()
            if not db.closed and not db.broken:
                return db
            close_now(db)
        return None

    def put(self, db: C) -> None:
        if self.closed or db.closed or db.broken:
            close_now(db)
            return
        now = time.monotonic()
        self._connections.append((db, now))
        while len(self._connections) > PG_POOL_MIN and now - self._connections[0][1] > PG_IDLE_S_MAX:
            close_now(self._connections.pop(0)[0])

    def drop_all(self) -> None:
        """Close them: their server is lost."""
        while self._connections:
            close_now(self._connections.pop()[0])

    def close(self) -> None:
        self.closed = True
        self.drop_all()


def _all_in_use(seconds: float) -> StoreBusy:
    return StoreBusy(f"All connections to PostgreSQL have been in use for more than {seconds:g} s.", hint="try again")


class LoopPool:
    """For the coroutines of one event loop."""

    def __init__(self, connect: Callable[[], Awaitable[psycopg.AsyncConnection[Any]]], size: int) -> None:
        self.idle: _Idle[psycopg.AsyncConnection[Any]] = _Idle()
        self._connect, self._slots = connect, asyncio.Semaphore(size)

    async def take(self, timeout_s: float) -> psycopg.AsyncConnection[Any]:
        if self._slots.locked():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._slots.acquire()
            except TimeoutError:
                raise _all_in_use(timeout_s) from None
        else:
            await self._slots.acquire()
        try:
            return self.idle.pop() or await self._connect()
        except BaseException:
            self._slots.release()
            raise

    def put(self, db: psycopg.AsyncConnection[Any]) -> None:
        self.idle.put(db)
        self._slots.release()


class ThreadPool:
    """For threads that may block."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], size: int) -> None:
        self.idle: _Idle[psycopg.Connection[Any]] = _Idle()
        self._connect, self._slots, self._lock = connect, threading.Semaphore(size), threading.Lock()

    def take(self, timeout_s: float) -> psycopg.Connection[Any]:
        if not self._slots.acquire(timeout=timeout_s):
            raise _all_in_use(timeout_s)
        try:
            with self._lock:
                db = self.idle.pop()
            return db or self._connect()
        except BaseException:
            self._slots.release()
            raise

    def put(self, db: psycopg.Connection[Any]) -> None:
        with self._lock:
            self.idle.put(db)
        self._slots.release()
