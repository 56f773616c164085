"""TCP proxies between a replica and an engine, which can be cut, silenced, slowed down and made to lose packets."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

from hermes.cluster.engines import HOST

from . import packets

Mode = Literal["open", "cut", "silent"]
_CHUNK_BYTES = 64 * 1024


class Link:
    """`cut` resets what is connected and refuses what comes; `silent` drops all packets or, where they cannot be dropped,
    takes everything and passes nothing on until it is open again."""

    def __init__(self, port: int, target_port: int) -> None:
        self.port, self._target_port = port, target_port
        self._delay_s = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, HOST, self.port, limit=_CHUNK_BYTES)

    async def set_mode(self, mode: Mode) -> None:
        if mode == "cut":
            await self.close()
            return
        if self._server is None:
            await self.start()
        if packets.AVAILABLE:
            packets.drop(self.port, packets.ALL if mode == "silent" else 0)
        elif mode == "silent":
            self._open.clear()
        else:
            self._open.set()

    def set_slow(self, *, slow: bool) -> None:
        """50 ms in each direction, and 1 % of the packets lost where they can be dropped."""
        self._delay_s = 0.05 if slow else 0.0
        if packets.AVAILABLE:
            packets.drop(self.port, 1 if slow else 0)

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # it was cut meanwhile
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._open.wait()
            there, to_there = await asyncio.open_connection(HOST, self._target_port, limit=_CHUNK_BYTES)
            self._writers.add(to_there)
            try:
                await asyncio.gather(self._pass(reader, to_there), self._pass(there, writer))
            finally:
                self._writers.discard(to_there)
                to_there.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass  # the engine is away, or the link is cut
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one of them ends: then both directions do."""
        loop, last = asyncio.get_running_loop(), 0.0
        while data := await reader.read(_CHUNK_BYTES):
            await self._open.wait()
            if self._delay_s or last > loop.time():
                # Later chunks do not wait for the delay of earlier ones, and do not overtake them.
                last = max(last, loop.time() + self._delay_s)
                loop.call_at(last, _write, writer, data)
            else:
                writer.write(data)
                await writer.drain()
        raise ConnectionResetError


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(OSError):
        if not writer.transport.is_closing():
            writer.write(data)
