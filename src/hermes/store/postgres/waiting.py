"""Connections that give up on a server that does not answer.

A server that hangs, or a network that loses everything behind a proxy, acknowledges at the level of TCP: neither
keepalives nor the server's own timeouts end the wait.
"""

from __future__ import annotations

import time
from asyncio import CancelledError
from collections.abc import Generator
from typing import Any

import psycopg
from psycopg.waiting import wait_async

from hermes.core import limits

_WAKE_S = 0.1


def _bounded(generator: Generator[Any, Any, Any], db: Any) -> Generator[Any, Any, Any]:
    """psycopg's wait with a time limit; psycopg wakes the generator several times a second."""
    until = time.monotonic() + limits.PG_ANSWER_S_MAX
    try:
        wanted = next(generator)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > until:
                close_now(db)
                raise psycopg.OperationalError(f"no answer within {limits.PG_ANSWER_S_MAX:g} s")
            wanted = generator.send(ready)
    except StopIteration as stop:
        return stop.value


class ThreadConnection(psycopg.Connection[Any]):
    def wait(self, gen: Any, interval: float = _WAKE_S, timeout: float | None = None) -> Any:
        return super().wait(_bounded(gen, self), interval)


class LoopConnection(psycopg.AsyncConnection[Any]):
    async def wait(self, gen: Any, interval: float = _WAKE_S, timeout: float | None = None) -> Any:  # noqa: ASYNC109
        """A cancelled wait closes the connection: an answer may be on its way, and cancelling the query could take
        arbitrarily long."""
        try:
            return await wait_async(_bounded(gen, self), self.pgconn.socket, interval)
        except CancelledError:
            close_now(self)
            raise


def close_now(db: Any) -> None:
    """Close a connection without a message to the server, whether or not its loop still runs."""
    if not db.closed:
        db._closed = True  # its finalizer would warn
        db.pgconn.finish()
