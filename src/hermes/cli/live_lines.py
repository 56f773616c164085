"""Lines that stay on a terminal, and below them what still moves, where there is no prompt."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

_TICK_S = 0.125
_REDRAW_S = 0.02


class LiveLines:
    """Draws on the terminal of a stream; what is given to it is drawn already."""

    def __init__(self, stream: Any) -> None:
        self._fd = stream.fileno()
        self._pending: list[str] = []
        self._moving = 0
        self._drawn_at = 0.0
        self.live: Callable[[int], str] = lambda height: ""

    @property
    def size(self) -> os.terminal_size:
        with suppress(OSError):
            size = os.get_terminal_size(self._fd)
            return size if size.columns else os.terminal_size((80, 24))
        return os.terminal_size((80, 24))

    def write(self, text: str) -> None:
        self._pending.append(text)

    def draw(self, *, now: bool = False) -> None:
        """Put down what was written, and what moves below it; at most so often that a reader can follow."""
        if not now and time.monotonic() - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = time.monotonic()
        self._put(self.live(max(1, self.size.lines - 2)).rstrip("\n"))

    def _put(self, live: str) -> None:
        back = f"\x1b[{self._moving}A" if self._moving else ""
        text, self._pending = "".join(self._pending), []
        self._moving = live.count("\n")
        data = f"\r{back}\x1b[J{text}{live}".replace("\n", "\r\n").encode("utf-8", "replace")
        with suppress(OSError):  # the terminal has gone
            while data:
                data = data[os.write(self._fd, data) :]

    @asynccontextmanager
    async def drawing(self) -> AsyncIterator[None]:
        """Clocks run meanwhile; at the end only what stays is left."""
        ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticking.cancel()
            self._put("")

    async def _tick(self) -> None:
        while True:
            self.draw(now=True)
            await asyncio.sleep(_TICK_S)
