"""Turns of a burst start a few at a time.

The event loop does one stage of every request before the next stage of any, so that of 500 turns which come together none
would reach its model before the last is parsed. With a gate the first ones are answered while the last ones wait.
"""

from __future__ import annotations

import asyncio
from collections import deque

from aiohttp import web

from hermes.core import limits


class Start:
    """The place of one turn among those that are starting."""

    __slots__ = ("_gate",)

    def __init__(self, gate: StartGate) -> None:
        self._gate: StartGate | None = gate

    def leave(self) -> None:
        """The turn has asked its model, or will not. Once is enough; twice does no harm."""
        if self._gate is not None:
            gate, self._gate = self._gate, None
            gate.leave()


START: web.RequestKey[Start] = web.RequestKey("start")


class StartGate:
    """Lets turns in, in order of arrival, while fewer than `TURNS_STARTING_MAX` are starting.

    A turn that takes its time, for instance because it waits for its session, holds nobody up for long: as many again are
    let in every `TURNS_STARTING_S_MAX`.
    """

    def __init__(self) -> None:
        self._starting = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self) -> Start:
        if self._starting < limits.TURNS_STARTING_MAX:
            self._starting += 1
            return Start(self)
        loop = asyncio.get_running_loop()
        admitted = loop.create_future()
        self._waiting.append(admitted)
        if self._timer is None:
            self._timer = loop.call_later(limits.TURNS_STARTING_S_MAX, self._admit_more)
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # let in and cancelled at once
                self.leave()
            raise
        return Start(self)

    def leave(self) -> None:
        self._starting -= 1
        self._admit(limits.TURNS_STARTING_MAX - self._starting)

    def _admit(self, count: int) -> None:
        while count > 0 and self._waiting:
            admitted = self._waiting.popleft()
            if not admitted.done():
                admitted.set_result(None)
                self._starting += 1
                count -= 1

    def _admit_more(self) -> None:
        self._timer = None
        self._admit(limits.TURNS_STARTING_MAX)
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(limits.TURNS_STARTING_S_MAX, self._admit_more)
