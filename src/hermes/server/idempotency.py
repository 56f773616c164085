"""Equal requests that are under way at the same time are one piece of work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class _IdempotencyCache:
    """Merges equal requests in flight. What is kept beyond that, and across restarts, is the store's."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str], asyncio.Future[Any]] = {}

    async def get_or_set(self, key: str, fingerprint: str, compute: Callable[[], Awaitable[Any]]) -> Any:
        """The result of the work, begun by whoever came first. A waiter that leaves stops nobody's."""
        work = self._under_way.get((key, fingerprint))
        if work is None:
            work = asyncio.ensure_future(compute())
            self._under_way[key, fingerprint] = work
            work.add_done_callback(lambda done: self._forget(key, fingerprint, done))
        return await asyncio.shield(work)

    def _forget(self, key: str, fingerprint: str, done: asyncio.Future[Any]) -> None:
        self._under_way.pop((key, fingerprint), None)
        if not done.cancelled():
            done.exception()  # whoever waits is told; with nobody left it is no error of its own
