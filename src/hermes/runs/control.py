"""Control of a running run from outside: stop, steer, answer questions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Literal

from hermes.core.json_types import JsonMapping

StopReason = Literal["stop", "client_disconnected", "server_shutdown", "deadline"]


class Stopped(Exception):
    """Raised where the run works when it is to stop; `Stop` has the reason."""


class Stop:
    """A request to end a run; interrupts whatever the run is waiting for."""

    def __init__(self) -> None:
        self.reason: StopReason | None = None
        self.by = ""
        self._scopes: set[_Scope] = set()

    def request(self, reason: StopReason, by: str = "") -> None:
        """Request the stop; the first reason stays."""
        if self.reason is None:
            self.reason, self.by = reason, by
            for scope in tuple(self._scopes):
                scope.fire()

    def scope(self) -> _Scope:
        """`async with stop.scope():` interrupts the block when a stop is requested."""
        return _Scope(self, self._scopes)


class _Scope:
    """A section of a task that a stop may interrupt; other cancellations of the task still cancel it."""

    def __init__(self, stop: Stop, scopes: set[_Scope]) -> None:
        self._stop = stop
        self._scopes = scopes
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._fired = self._cancelled = False

    async def __aenter__(self) -> None:
        if self._stop.reason is not None:
            raise Stopped
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._scopes.add(self)

    def fire(self) -> None:
        self._fired = True
        # A task that requests its own stop is not waiting; it is interrupted at the end of the scope.
        if self._task is not None and self._task is not asyncio.current_task():
            self._cancelled = self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scopes.discard(self)
        if not self._fired or self._task is None:
            return
        from_outside = self._cancelled and self._task.uncancel() > self._cancelling
        if not from_outside and (kind is None or issubclass(kind, asyncio.CancelledError)):
            raise Stopped from error


class Questions:
    """Open questions of the run to a human. The first answer wins."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Future[JsonMapping]] = {}
        self._expected: dict[str, JsonMapping | None] = {}

    def expect(self, question_ids: Iterable[str]) -> None:
        """Accept answers to questions that will be asked again."""
        self._expected = dict.fromkeys(question_ids)

    def ask(self, question_id: str) -> asyncio.Future[JsonMapping]:
        future: asyncio.Future[JsonMapping] = asyncio.get_running_loop().create_future()
        self._open[question_id] = future
        if (answer := self._expected.pop(question_id, None)) is not None:
            future.set_result(answer)
        future.add_done_callback(lambda _: self._close(question_id, future))
        return future

    def _close(self, question_id: str, future: asyncio.Future[JsonMapping]) -> None:
        if self._open.get(question_id) is future:
            del self._open[question_id]

    def answer(self, question_id: str | None, data: JsonMapping) -> bool:
        """Answer a question; with no id, the oldest. False: it is not open."""
        open_ones = {key: future for key, future in self._open.items() if not future.done()}
        future = open_ones.get(question_id) if question_id is not None else next(iter(open_ones.values()), None)
        if future is None:
            if question_id is None or self._expected.get(question_id, data) is not None:
                return False
            self._expected[question_id] = data
            return True
        future.set_result(data)
        return True


class RunControls:
    def __init__(self) -> None:
        self.stop = Stop()
        self.seen: set[str] = set()
        self.steers: list[tuple[str, str]] = []
        self.approvals = Questions()
        self.clarifications = Questions()
