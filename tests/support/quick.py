"""What happens at once, shown on a machine that may be busy: of several tries one is quick."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

_TRIES = 10


async def once_within(seconds: float, attempt: Callable[[], Awaitable[float]]) -> None:
    """Make an attempt, which says how long it took, until one took less than this."""
    took: list[float] = []
    while len(took) < _TRIES:
        took.append(await attempt())
        if took[-1] < seconds:
            return
    raise AssertionError(f"never within {seconds} s: {took}")
