"""Limits how many turns start at once.

The event loop does one stage of every request before the next stage of any, so that of 500 turns which arrive together
none would reach its model before the last is parsed. With a gate the first ones are answered while the last ones wait.
"""

from __future__ import annotations

import asyncio
from collections import deque

from aiohttp import web

from hermes.core import limits


class Start:
    """The slot of one starting turn."""

    __slots__ = ("_gate", "_period")

    def __init__(self, gate: StartGate, period: int) -> None:
        self._gate: StartGate | None = gate
        self._period = period

    def leave(self) -> None:
        """The turn has asked its model, or will not. May be called again."""
        if self._gate is not None:
            gate, self._gate = self._gate, None
            gate.leave(self._period)


START: web.RequestKey[Start] = web.RequestKey("start")


class StartGate:
    """Lets turns in, in order of arrival, while fewer than `TURNS_STARTING_MAX` are starting.

    A slow turn, for instance one that waits for its session, does not block others for long: while turns wait, those
    let in before are no longer counted after `TURNS_STARTING_S_MAX`, when the next period begins.
    """

    def __init__(self) -> None:
        self._starting = self._period = 0
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self) -> Start:
        if self._starting < limits.TURNS_STARTING_MAX:
            self._starting += 1
            return Start(self, self._period)
        loop = asyncio.get_running_loop()
        admitted: asyncio.Future[int] = loop.create_future()
        self._waiting.append(admitted)
        if self._timer is None:
            self._timer = loop.call_later(limits.TURNS_STARTING_S_MAX, self._begin_period)
        try:
            return Start(self, await admitted)
        except asyncio.CancelledError:
            if not admitted.cancelled():  # admitted and cancelled at once
                self.leave(admitted.result())
            raise

    def leave(self, period: int) -> None:
        if period == self._period:
            self._starting -= 1
            if self._waiting:
                self._admit()

    def _admit(self) -> None:
        while self._starting < limits.TURNS_STARTING_MAX and self._waiting:
            admitted = self._waiting.popleft()
            if not admitted.done():
                admitted.set_result(self._period)
                self._starting += 1

    def _begin_period(self) -> None:
        self._timer = None
        self._period += 1
        self._starting = 0
        self._admit()
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(limits.TURNS_STARTING_S_MAX, self._begin_period)
