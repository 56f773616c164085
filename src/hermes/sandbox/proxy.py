"""The egress proxy: the only way out of a sandbox. Each request passes the URL guard and needs a grant for its host."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, Literal, TypeVar

from hermes.core import limits
from hermes.guards.url_text import FetchFailed, Target, UrlRefused
from hermes.guards.urls import UrlGuard
from hermes.sandbox.proxy_messages import (
    FRAMING,
    Refused,
    Request,
    body_length,
    format_head,
    hop_by_hop,
    read_body,
    read_request,
)
from hermes.settings.config import Settings

log = logging.getLogger(__name__)

Authorize = Callable[[str, int], Awaitable[bool]]
_T = TypeVar("_T")
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_Meter = Callable[[int], None]

_AUTHORITY = re.compile(r"[^/?#\\@\[\]:]+:[0-9]{1,5}")
# accept() fails with these for a moment; any other error means that the listener is of no use any more.
_TRANSIENT = frozenset({errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EINTR})
_ACCEPT_RETRY_S = 1.0


class _Client(asyncio.StreamReaderProtocol):
    """A client's connection. `closed` is set once it has closed its side, `answered` once a response has started."""

    writer: asyncio.StreamWriter

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader(limit=limits.EGRESS_HEAD_BYTES_MAX)
        self.closed, self.answered = asyncio.Event(), False
        super().__init__(self.reader)

    async def attach(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: self, accepted)
        except BaseException:
            accepted.close()
            raise
        self.writer = asyncio.StreamWriter(transport, self, self.reader, loop)

    def eof_received(self) -> bool | None:
        self.closed.set()
        return super().eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
        super().connection_lost(error)

    async def unless_closed(self, work: Awaitable[_T]) -> _T:
        """The result, unless the client closes its side first; then the work is cancelled."""
        task, closed = asyncio.ensure_future(work), asyncio.ensure_future(self.closed.wait())
        try:
            await asyncio.wait({task, closed}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ConnectionResetError("the client has gone")
        finally:
            await _cancel(task, closed)


class EgressProxy:
    """An HTTP proxy on given listening sockets, for CONNECT and requests with an absolute http:// URL. `guard` returns
    the URL guard in force, `authorize(host, port)` whether the host is granted; it may take as long as a human needs,
    and is cancelled when the client goes away. `refused` gets the reason of every refusal."""

    def __init__(
        self, guard: Callable[[], UrlGuard], authorize: Authorize, refused: Callable[[str], None] = lambda _: None
    ) -> None:
        self._guard, self._authorize, self._refused = guard, authorize, refused
        self._slots = asyncio.Semaphore(limits.EGRESS_CONNECTIONS_MAX)
        self._serving: set[asyncio.Task[None]] = set()
        self.sent_bytes = self.received_bytes = 0

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled, or until the listener fails. Owns the listener and closes it at the end,
        with all its connections. Further connections wait in its backlog while all slots are taken."""
        loop, serving = asyncio.get_running_loop(), asyncio.current_task()
        assert serving is not None
        connections: set[asyncio.Task[None]] = set()
        self._serving.add(serving)
        listener.setblocking(False)

        def ended(task: asyncio.Task[None]) -> None:
            connections.discard(task)
            self._slots.release()

        try:
            while True:
                await self._slots.acquire()
                try:
                    client, _ = await loop.sock_accept(listener)
                except BaseException as error:
                    self._slots.release()
                    if not isinstance(error, OSError):
                        raise
                    if error.errno not in _TRANSIENT:
                        log.warning("the egress proxy stops: %s", error)
                        return
                    await asyncio.sleep(_ACCEPT_RETRY_S)
                    continue
                task = loop.create_task(self._serve_client(client))
                connections.add(task)
                task.add_done_callback(ended)
        finally:
            self._serving.discard(serving)
            listener.close()
            for task in connections:
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

    def close(self) -> None:
        for task in self._serving:
            task.cancel()

    # ---- one connection

    async def _serve_client(self, accepted: socket.socket) -> None:
        client = _Client()
        await client.attach(accepted)
        try:
            try:
                await self._exchange(client)
            except Refused as refusal:
                self._refused(str(refusal))
                if client.answered:
                    raise ConnectionResetError("the exchange has failed") from None
                await _refuse(refusal, client)
            client.writer.close()
        except (OSError, asyncio.IncompleteReadError):  # one side has closed, or was silent for too long
            client.writer.transport.abort()
        except BaseException:
            client.writer.transport.abort()
            raise

    async def _exchange(self, client: _Client) -> None:
        request = await read_request(client.reader)
        is_tunnel = request.method == "CONNECT"
        if is_tunnel and not _AUTHORITY.fullmatch(request.target):
            raise Refused(400, "Hermes: CONNECT needs host:port.")
        if not is_tunnel and not request.target.lower().startswith("http://"):
            raise Refused(400, "Hermes: this proxy takes CONNECT and absolute http:// URLs.")
        length = body_length(request)
        target = self._check(f"https://{request.target}" if is_tunnel else request.target)
        # Nothing of the request leaves the machine before this, not even as a question to a name server.
        if not await client.unless_closed(self._authorize(target.host, target.port)):
            raise Refused(403, f"Hermes: host {target.host} is not granted. Tell the user.")
        upstream = await client.unless_closed(self._connect(target))
        try:
            if is_tunnel:
                await self._tunnel(client, upstream)
            else:
                await self._forward(request, length, target, client, upstream)
            upstream[1].close()
        except BaseException:
            upstream[1].transport.abort()
            raise

    def _check(self, url: str) -> Target:
        try:
            target = self._guard().check(url)
        except UrlRefused as refused:
            raise Refused(403, f"Hermes: the URL is refused by the rule '{refused.rule}'. Tell the user.") from None
        if target.is_address:
            raise Refused(403, "Hermes: an IP address cannot be granted. Use a host name.")
        return target

    async def _connect(self, target: Target) -> _Streams:
        try:
            return await self._guard().connect(target)
        except UrlRefused as refused:
            status = 502 if refused.rule == "unresolvable" else 403
            raise Refused(status, f"Hermes: host {target.host} is refused by the rule '{refused.rule}'.") from None
        except FetchFailed as failed:
            status = 504 if failed.rule == "timeout" else 502
            raise Refused(status, f"Hermes: host {target.host}: {failed}") from None

    async def _tunnel(self, client: _Client, upstream: _Streams) -> None:
        client.answered = True
        client.writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        async with asyncio.timeout(limits.EGRESS_IDLE_S_MAX) as idle:
            up = asyncio.ensure_future(_copy(client.reader, upstream[1], self._meter(idle, "sent_bytes")))
            down = asyncio.ensure_future(_copy(upstream[0], client.writer, self._meter(idle, "received_bytes")))
            try:
                await asyncio.gather(up, down)
            finally:
                await _cancel(up, down)

    async def _forward(
        self, request: Request, length: int | None, target: Target, client: _Client, upstream: _Streams
    ) -> None:
        host = target.origin.removeprefix("http://")
        skipped = hop_by_hop(request.headers) | FRAMING
        headers = [header for header in request.headers if header[0].lower() not in skipped]
        headers += [("Host", host), ("Connection", "close")]
        if length is None:
            headers.append(("Transfer-Encoding", "chunked"))
        elif request.values("content-length"):
            headers.append(("Content-Length", str(length)))
        upstream[1].write(format_head(f"{request.method} {target.path} HTTP/{request.version}", headers))
        try:
            async with asyncio.timeout(limits.EGRESS_IDLE_S_MAX) as idle:
                body, meter = read_body(client.reader, length), self._meter(idle, "sent_bytes")
                sending = asyncio.ensure_future(_send_body(body, upstream[1], meter, is_chunked=length is None))
                responding = _respond(upstream[0], client, self._meter(idle, "received_bytes"))
                receiving = asyncio.ensure_future(client.unless_closed(responding))
                try:
                    await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
                    if sending.done():
                        sending.result()
                    await receiving
                finally:
                    await _cancel(sending, receiving)
        except TimeoutError:
            raise Refused(504, f"Hermes: host {target.host} was silent for {limits.EGRESS_IDLE_S_MAX:g} s.") from None

    def _meter(self, idle: asyncio.Timeout, counter: Literal["sent_bytes", "received_bytes"]) -> _Meter:
        """A counter of transferred bytes, each of which postpones the idle timeout."""
        loop = asyncio.get_running_loop()

        def carried(size: int) -> None:
            idle.reschedule(loop.time() + limits.EGRESS_IDLE_S_MAX)
            setattr(self, counter, getattr(self, counter) + size)

        return carried


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, meter: _Meter) -> None:
    """Copy to the end, and pass the end on, no faster than the writer takes it."""
    while data := await reader.read(limits.CHUNK_BYTES_MAX):
        meter(len(data))
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _send_body(
    body: AsyncIterator[bytes], writer: asyncio.StreamWriter, meter: _Meter, *, is_chunked: bool
) -> None:
    async for data in body:
        meter(len(data))
        writer.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)
        try:
            await writer.drain()
        except ConnectionError:  # the server may have answered before it had read everything
            return
    if is_chunked:
        writer.write(b"0\r\n\r\n")


async def _respond(reader: asyncio.StreamReader, client: _Client, meter: _Meter) -> None:
    status = 0
    while status < 200:  # interim responses come before the final one
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status_line, *lines = head[:-4].split("\r\n")
            status = int(status_line.split(" ", 2)[1])
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError):
            raise Refused(502, "Hermes: the server's response is not valid HTTP.") from None
        if status == 101:
            raise Refused(502, "Hermes: the server switched protocols without being asked to.")
        headers = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        skipped = hop_by_hop(headers)
        passed = [line for line, (name, _) in zip(lines, headers, strict=True) if name.lower() not in skipped]
        closing = ["Connection: close"] if status >= 200 else []
        client.answered = True
        client.writer.write("\r\n".join([status_line, *passed, *closing, "", ""]).encode("latin-1"))
    await _copy(reader, client.writer, meter)


async def _refuse(refusal: Refused, client: _Client) -> None:
    """Answer with the reason in the body and in the status line: of a refused CONNECT most clients show only that."""
    reason, text, writer = str(refusal), f"{refusal}\n".encode(), client.writer
    phrase = reason if refusal.status == 403 else HTTPStatus(refusal.status).phrase
    headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(text))), ("Connection", "close")]
    writer.write(format_head(f"HTTP/1.1 {refusal.status} {phrase}", headers) + text)
    await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
    # Closing with unread data would reset the connection, and the client might lose the answer.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limits.EGRESS_LINGER_S_MAX):
            while await client.reader.read(limits.CHUNK_BYTES_MAX):
                pass


# ---- how commands in a sandbox find the proxy, and what they reach through it

# Each sandbox has a network namespace of its own, so the port is free in every one.
PROXY_PORT = 3128
# The backends whose commands reach the network through the proxy only.
PROXIED = frozenset({"bubblewrap"})


def proxy_env(port: int = PROXY_PORT) -> dict[str, str]:
    url, direct = f"http://127.0.0.1:{port}", "localhost,127.0.0.1,::1"
    names = ("http_proxy", "https_proxy", "all_proxy")
    env = {name: url for lower in names for name in (lower, lower.upper())}
    return {**env, "no_proxy": direct, "NO_PROXY": direct, "NODE_USE_ENV_PROXY": "1"}


def network_of(settings: Settings, backend: str) -> str:
    every_host = settings.terminal.network
    if backend in PROXIED:
        return "HTTP and HTTPS to " + ("every public host" if every_host else "hosts that the user grants")
    return "with network" if every_host else "without network"
