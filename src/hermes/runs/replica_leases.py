"""Leases of a replica as a whole: that its process is alive, and the leader's for housekeeping."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from hermes.core.limits import LEASE_RENEW_S, LEASE_TTL_S
from hermes.core.processes import this_process
from hermes.store.base import StoreError
from hermes.store.stores import AsyncLeases

log = logging.getLogger(__name__)
_LEADER = "leader"


def process_lease(holder: str) -> str:
    return f"process:{holder}"


class ReplicaLeases:
    """Held by `keep` until it is cancelled; `release` gives them back."""

    def __init__(self, leases: AsyncLeases, renew_more: Callable[[], Awaitable[None]] | None = None) -> None:
        self._leases, self._renew_more = leases, renew_more
        # The token of each lease, and until when it is certainly held, by the loop's clock.
        self._held: dict[str, tuple[int, float]] = {}

    @property
    def leads(self) -> bool:
        """Whether this replica does the work that only one replica does."""
        _, until = self._held.get(_LEADER, (0, 0.0))
        return asyncio.get_running_loop().time() < until

    async def keep(self) -> None:
        while True:
            await self.renew()
            await asyncio.sleep(LEASE_RENEW_S)

    async def renew(self) -> None:
        for name in (process_lease(this_process()), _LEADER):
            try:
                await self._renew(name)
            except StoreError as error:
                log.warning("the lease %s could not be renewed: %s", name, error)
        if self._renew_more is not None:
            with contextlib.suppress(StoreError):
                await self._renew_more()

    async def _renew(self, name: str) -> None:
        asked_at = asyncio.get_running_loop().time()
        token, _ = self._held.get(name, (None, 0.0))
        if token is not None and await self._leases.renew(name, token, LEASE_TTL_S):
            self._held[name] = token, asked_at + LEASE_TTL_S
            return
        self._held.pop(name, None)
        if (token := await self._leases.acquire(name, this_process(), LEASE_TTL_S)) is not None:
            self._held[name] = token, asked_at + LEASE_TTL_S

    async def release(self) -> None:
        held, self._held = self._held, {}
        for name, (token, _) in held.items():
            try:
                await self._leases.release(name, token)
            except StoreError as error:
                log.warning("the lease %s could not be released: %s", name, error)
