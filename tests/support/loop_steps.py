"""How much one callback of the event loop does at most: calls made by code of Hermes, which no other load changes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Steps:
    """`most` is the largest number of calls in one callback, `all` that of all callbacks."""

    most: int = 0
    all: int = 0


@contextmanager
def loop_steps() -> Iterator[Steps]:
    """Count on this thread, which runs the loop; calls that other threads make are not counted."""
    steps, count = Steps(), 0
    run = asyncio.events.Handle._run

    def count_steps(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if event in ("call", "c_call") and "/src/hermes/" in frame.f_code.co_filename:
            count += 1

    def run_counted(handle: Any) -> None:
        nonlocal count
        count = 0
        run(handle)
        steps.most, steps.all = max(steps.most, count), steps.all + count

    asyncio.events.Handle._run = run_counted  # type: ignore[method-assign]
    sys.setprofile(count_steps)
    try:
        yield steps
    finally:
        sys.setprofile(None)
        asyncio.events.Handle._run = run  # type: ignore[method-assign]
