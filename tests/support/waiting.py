"""How tests wait: for a condition, with a deadline that only a hang reaches.

No test waits with a bare `sleep` for something to have happened. What must *not* happen is shown by an event that comes
after it, or by `idle`.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from asyncio import sleep
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")
# Less than the time limit of a test, and much more than a busy machine needs.
DEADLINE_S = 60.0
_POLL_S = 0.005
_SHOWN_CHARS = 2_000
_IDLE_ROUNDS = 30


async def until(
    condition: Callable[[], T | Awaitable[T]], accept: Callable[[T], Any] = bool, *, seconds: float = DEADLINE_S
) -> T:
    """Poll a function or coroutine function until `accept` is true of its result; return that result."""
    deadline = monotonic() + seconds
    while True:
        result: Any = condition()
        if inspect.isawaitable(result):
            result = await asyncio.wait_for(result, max(deadline - monotonic(), _POLL_S))
        if accept(result):
            return result
        if monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {condition!r} gave {repr(result)[:_SHOWN_CHARS]}")
        await sleep(_POLL_S)


def until_blocking(condition: Callable[[], T], accept: Callable[[T], Any] = bool, *, seconds: float = DEADLINE_S) -> T:
    """`until` for tests without an event loop."""
    deadline = monotonic() + seconds
    while not accept(result := condition()):
        if monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {condition!r} gave {repr(result)[:_SHOWN_CHARS]}")
        time.sleep(_POLL_S)
    return result


async def idle() -> None:
    """Run what is ready on this event loop, and what becomes ready by that. Threads and other processes are not waited for."""
    for _ in range(_IDLE_ROUNDS):
        await sleep(0)
