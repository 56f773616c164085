"""A round-robin TCP proxy in front of replicas: each connection goes to the next one that accepts it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Sequence
from typing import cast

CONNECT_S_MAX = 2.0
SKIP_S = 1.0
# A replica that has closed its side waits so long for its client to do the same.
HALF_CLOSE_S_MAX = 5.0
CONNECTIONS_MAX = 8_192
_BUFFER_BYTES_MAX = 256 * 1024

Address = tuple[str, int]


class Proxy:
    """It reads nothing of what it carries. Where no replica accepts, the client's connection is closed."""

    def __init__(self, targets: Iterable[Address] = ()) -> None:
        self._targets: list[Address] = list(targets)
        self._next = 0
        self._skipped_until: dict[Address, float] = {}
        self._clients: set[_Client] = set()
        self._servers: list[asyncio.Server] = []

    def set_targets(self, targets: Iterable[Address]) -> None:
        """Connections that are open stay where they are."""
        self._targets = list(targets)
        self._skipped_until = {one: until for one, until in self._skipped_until.items() if one in self._targets}

    @property
    def connections(self) -> int:
        return len(self._clients)

    async def listen(self, sockets: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        self._servers += [await loop.create_server(lambda: _Client(self), sock=sock) for sock in sockets]

    async def close(self) -> None:
        """Accept nothing more, and cut what is open."""
        for server in self._servers:
            server.close()
        for client in list(self._clients):
            client.abort()
        await asyncio.gather(*(client.connecting for client in self._clients), return_exceptions=True)

    def admit(self, client: _Client) -> bool:
        if len(self._clients) >= CONNECTIONS_MAX:
            return False
        self._clients.add(client)
        return True

    def leave(self, client: _Client) -> None:
        self._clients.discard(client)

    async def connect(self, client: _Client) -> _Replica | None:
        """The next replica that accepts; None where none does."""
        loop = asyncio.get_running_loop()
        for address in self._candidates(loop.time()):
            with contextlib.suppress(OSError):
                async with asyncio.timeout(CONNECT_S_MAX):
                    _, replica = await loop.create_connection(lambda: _Replica(client), *address)
                self._skipped_until.pop(address, None)
                return replica
            self._skipped_until[address] = loop.time() + SKIP_S
        return None

    def _candidates(self, now: float) -> list[Address]:
        """All replicas in turn, those that have just refused after the others."""
        if not self._targets:
            return []
        start = self._next = (self._next + 1) % len(self._targets)
        turn = self._targets[start:] + self._targets[:start]
        return sorted(turn, key=lambda address: self._skipped_until.get(address, 0.0) > now)


class _Side(asyncio.Protocol):
    """One of the two connections that are joined: what it reads is written to the other, which may make it wait."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.other: _Side | None = None
        self.is_lost = self.has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # those of uvloop have another base
        self.transport.set_write_buffer_limits(high=_BUFFER_BYTES_MAX)
        with contextlib.suppress(OSError, AttributeError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        """Pass the end on; the other direction stays open until it ends too."""
        self.has_ended = True
        if self.other is None:
            return True
        self.other.write_eof()
        return not self.other.has_ended

    def write_eof(self) -> None:
        # Whoever is gone already is told by `connection_lost`.
        with contextlib.suppress(OSError, RuntimeError):
            if not self.transport.is_closing():
                self.transport.write_eof()

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self.other is None or self.other.is_lost:
            return
        # A reset is passed on as one; otherwise what is still to be written goes out first.
        if exc is not None:
            self.other.transport.abort()
        else:
            self.other.transport.close()


class _Client(_Side):
    """The connection that was accepted. What comes before a replica has it waits here, one read at most."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__()
        self._proxy = proxy
        self._early = b""
        self.connecting: asyncio.Task[None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        if not self._proxy.admit(self):
            self.transport.abort()
            return
        replica = await self._proxy.connect(self)
        if replica is None or self.is_lost:
            self.transport.close()
            if replica is not None:
                replica.transport.abort()
            return
        self.other = replica
        if self._early:
            self.transport.resume_reading()
            replica.transport.write(self._early)
            self._early = b""
        if self.has_ended:
            replica.write_eof()
        if replica.is_lost:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)
        else:
            self._early += data
            self.transport.pause_reading()

    def abort(self) -> None:
        self.connecting.cancel()
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._proxy.leave(self)
        super().connection_lost(exc)


class _Replica(_Side):
    def __init__(self, client: _Client) -> None:
        super().__init__()
        self.other: _Client = client
        self._cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.other.is_lost:
            self.transport.abort()

    def eof_received(self) -> bool:
        self._cut = asyncio.get_running_loop().call_later(HALF_CLOSE_S_MAX, self.transport.close)
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._cut is not None:
            self._cut.cancel()
        super().connection_lost(exc)
