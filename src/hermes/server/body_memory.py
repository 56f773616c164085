"""Memory for request bodies: large ones are received into files, and only so many bytes are read back at once."""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from pathlib import Path
from typing import IO

from hermes.core.limits import BODY_MEMORY_BYTES_MAX


class Spool:
    """A body as it is received: in memory while it is small, then in an unnamed file."""

    def __init__(self, folder: Path | None, first: bytes = b"") -> None:
        self._folder = folder
        self._parts = [first]
        self._unwritten = self.size = len(first)
        self._file: IO[bytes] | None = None
        # A body that arrived in one piece.
        self.at_once = first

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    async def add(self, part: bytes) -> None:
        """Raises OSError."""
        self._parts.append(part)
        self.size += len(part)
        self._unwritten += len(part)
        if self._unwritten > BODY_MEMORY_BYTES_MAX:
            await asyncio.to_thread(self._write)

    def _write(self) -> IO[bytes]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  (closed with the request)
        self._file.writelines(self._parts)
        self._parts, self._unwritten = [], 0
        return self._file

    async def whole(self) -> bytes:
        """May be called again. Raises OSError."""
        if self._file is not None:
            return await asyncio.to_thread(self._read)
        if len(self._parts) > 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]

    def _read(self) -> bytes:
        file = self._write()
        file.seek(0)
        return file.read()


class Budget:
    """A first-in-first-out byte semaphore. An amount above the size is granted when nothing else is in use."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take_now(self, amount: int) -> bool:
        """Take the amount unless that means waiting."""
        if self._waiting or (self._used and self._used + amount > self._size):
            return False
        self._used += amount
        return True

    async def take(self, amount: int, wait_s: float) -> None:
        """Raises TimeoutError."""
        if self.take_now(amount):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (amount, turn)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.give_back(amount)
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._serve()
            raise

    def give_back(self, amount: int) -> None:
        self._used -= amount
        self._serve()

    def _serve(self) -> None:
        while self._waiting and (not self._used or self._used + self._waiting[0][0] <= self._size):
            amount, turn = self._waiting.popleft()
            if not turn.done():  # else its request was cancelled
                self._used += amount
                turn.set_result(None)
