"""Limits of owners among replicas: the store counts, so that all replicas together keep to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from hermes.core.limits import LEASE_TTL_S, OWNER_LIMITS_AWAY_S, OWNER_LIMITS_S_MAX
from hermes.store.base import StoreError, StoreUnreachable
from hermes.store.owner_limits import Outcome, OwnerBounds, Use
from hermes.store.stores import AsyncOwnerLimits

log = logging.getLogger(__name__)


class LocalRates(Protocol):
    """The rates as this process knows them."""

    def correct(self, owner: str, left: Mapping[str, float]) -> None: ...

    def spend(self, owner: str, tokens: int) -> None: ...


class SharedLimits:
    """Asks the store for one owner at a time; what is asked for meanwhile is asked for together."""

    def __init__(self, limits: AsyncOwnerLimits) -> None:
        self._limits = limits
        self.bounds: Callable[[str], OwnerBounds] = lambda owner: OwnerBounds()
        self.rates: LocalRates | None = None
        # The owner of each turn that has a place.
        self._places: dict[str, str] = {}
        self._asking: dict[str, list[tuple[Use, asyncio.Future[Outcome]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._away_until = 0.0

    async def use(self, owner: str, use: Use) -> Outcome:
        """Raises StoreError where the store does not tell, soon."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._away_until:
            raise StoreUnreachable("The store did not answer a moment ago.")
        answer: asyncio.Future[Outcome] = loop.create_future()
        if (pending := self._asking.get(owner)) is not None:
            pending.append((use, answer))
        else:
            self._asking[owner] = [(use, answer)]
            task = asyncio.create_task(self._ask(owner))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            async with asyncio.timeout(OWNER_LIMITS_S_MAX):
                outcome = await answer
        except TimeoutError:
            self._away_until = loop.time() + OWNER_LIMITS_AWAY_S
            raise StoreUnreachable("The store has not answered in time.") from None
        if self.rates is not None:
            self.rates.correct(owner, outcome.left)
        return outcome

    async def _ask(self, owner: str) -> None:
        while pending := self._asking[owner]:
            self._asking[owner] = []
            try:
                uses = [use for use, _ in pending]
                outcomes = await self._limits.use(owner, self.bounds(owner), uses, LEASE_TTL_S)
            except StoreError as error:
                for _, answer in pending:
                    if not answer.done():
                        answer.set_exception(error)
            else:
                for (_, answer), outcome in zip(pending, outcomes, strict=True):
                    if not answer.done():
                        answer.set_result(outcome)
        del self._asking[owner]

    async def take_place(self, owner: str, run_id: str) -> bool:
        """It is to be given back whatever comes of this, unless there is none."""
        self._places[run_id] = owner
        granted = (await self.use(owner, Use(takes_place=run_id))).granted
        if not granted:
            del self._places[run_id]
        return granted

    async def give_back(self, run_id: str) -> None:
        if run_id in self._places:
            await self.settle(run_id, self._places[run_id], 0)

    async def settle(self, run_id: str, owner: str, tokens: int) -> None:
        """A turn has ended: give its place back, and count its tokens."""
        place = run_id if self._places.pop(run_id, None) is not None else ""
        if not place and not (tokens and self.bounds(owner).tokens):
            return
        try:
            await self.use(owner, Use(frees_place=place, tokens=tokens))
        except StoreError as error:  # a place runs out by itself
            log.warning("the end of run %s was not counted for all replicas: %s", run_id, error)
            if self.rates is not None:
                self.rates.spend(owner, tokens)

    async def renew(self) -> None:
        if self._places:
            await self._limits.renew_places([(owner, run_id) for run_id, owner in self._places.items()], LEASE_TTL_S)
