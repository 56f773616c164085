"""Without a bus, one server at a time uses a schema: it holds an advisory lock on its own connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import psycopg

from hermes.core.errors import HermesError
from hermes.core.limits import PG_CHECK_S_MAX, PG_SERVER_LOCK_EVERY_S, PG_SERVER_LOCK_WAIT_S
from hermes.store.postgres.errors import refused_at_start
from hermes.store.postgres.opening import connect_loop, lock_key
from hermes.store.postgres.waiting import close_now

log = logging.getLogger(__name__)
_POLL_S = 0.05
# The server detects within seconds that the machine of a holder is dead.
_KEEPALIVES = (
    "SELECT set_config('tcp_keepalives_idle', '10', FALSE), set_config('tcp_keepalives_interval', '3', FALSE), "
    "set_config('tcp_keepalives_count', '3', FALSE)"
)


class DatabaseServed(HermesError):
    """Another server uses this database."""

    exit_code = 4


class _Lock:
    def __init__(self, url: str, schema: str, place: str) -> None:
        self._url, self._schema, self._place = url, schema, place
        self._db: psycopg.AsyncConnection[Any] | None = None

    async def acquire(self, timeout_s: float) -> bool:
        """Connect and take the lock, waiting for a holder that is about to end."""
        self.close()
        self._db = await connect_loop(self._url, self._schema)
        await self._db.execute(_KEEPALIVES)
        until = time.monotonic() + timeout_s
        while True:
            cursor = await self._db.execute("SELECT pg_try_advisory_lock(%s)", (lock_key(self._schema, "server"),))
            row = await cursor.fetchone()
            if row is not None and row[0]:
                return True
            if time.monotonic() > until:
                self.close()
                return False
            await asyncio.sleep(_POLL_S)

    async def keep(self) -> None:
        """Take the lock again whenever the connection was lost."""
        held = True
        while True:
            await asyncio.sleep(PG_SERVER_LOCK_EVERY_S)
            try:
                async with asyncio.timeout(PG_CHECK_S_MAX):
                    if self._db is not None:
                        await self._db.execute("SELECT 1")
                        continue
                    acquired = await self.acquire(0)
            except (psycopg.Error, TimeoutError):
                self.close()
                continue
            if held and not acquired:
                log.error("%s", _served(self._place))
            held = acquired

    def close(self) -> None:
        if self._db is not None:
            close_now(self._db)
            self._db = None


@contextlib.asynccontextmanager
async def held(url: str, schema: str, place: str) -> AsyncIterator[None]:
    lock = _Lock(url, schema, place)
    try:
        if not await lock.acquire(PG_SERVER_LOCK_WAIT_S):
            raise _served(place)
    except psycopg.Error as error:
        lock.close()
        raise refused_at_start(error, place) from None
    keeping = asyncio.create_task(lock.keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        lock.close()


def _served(place: str) -> DatabaseServed:
    return DatabaseServed(
        "Another server works on this database, and without a bus only one may.",
        where=place,
        hint="stop the other one, or give all of them bus.url (HERMES_NATS_URL): nats://…",
    )
