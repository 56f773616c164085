"""The one asynchronous HTTP client: a pool per origin, server-sent events, time limits, TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import aiohttp
import aiohttp.abc

from hermes.limits import ANSWER_BYTES_MAX, CONNECT_S_MAX, EVENT_BYTES_MAX


class TransportError(Exception):
    """The exchange did not come to its end. `answered`: bytes of an answer had come."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class ConnectFailed(TransportError):
    """No connection, or it was gone before any byte of an answer."""


class StreamBroken(TransportError):
    """The answer was cut, or is not what it says it is."""


class StaleStream(TransportError):
    """Silence past the limit."""


class RequestTimeout(TransportError):
    """The time for the whole exchange is used up."""


class TlsFailed(TransportError):
    """The other side's certificate could not be verified."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds for the whole exchange, and of silence."""

    total_s: float = 1800.0
    stale_s: float = 180.0


class SseDecoder:
    """Bytes of a `text/event-stream` in, `(event, data)` out, whatever the packets look like."""

    __slots__ = ("_began", "_between", "_buffer", "_data", "_name", "_size", "_skip_lf")

    def __init__(self) -> None:
        self._began = self._between = False
        self._size = 0
        self._buffer = b""
        self._name = ""
        self._data: list[bytes] = []
        self._skip_lf = False

    def feed(self, chunk: bytes) -> list[tuple[str, bytes]]:
        """The events that this chunk completes."""
        if self._between and b"\r" not in chunk and chunk.endswith(b"\n\n"):
            events: list[tuple[str, bytes]] = []
            if not self._quickly(chunk, events):
                return events
        events = self._read(chunk) if chunk else []
        self._between = self._began and not (self._buffer or self._data or self._name or self._skip_lf)
        return events

    def _read(self, chunk: bytes) -> list[tuple[str, bytes]]:
        # A line may end in two characters that come in two packets.
        skip, self._skip_lf = self._skip_lf and chunk[:1] == b"\n", chunk.endswith(b"\r")
        if skip:
            chunk = chunk[1:]
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events: list[tuple[str, bytes]] = []
        self._began = self._began or (self._buffer or chunk)[:1] != b"\xef"
        if self._began and not self._data and not self._name:
            chunk, self._buffer = self._quickly(self._buffer + chunk, events), b""
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        if not self._began and lines:
            self._began = True
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
        for line in lines:
            self._size += len(line)
            if not line:
                if self._data:
                    events.append((self._name, b"\n".join(self._data)))
                    self._data = []
                self._name = ""
                self._size = 0
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line.startswith(b"event:"):
                self._name = line[6:].strip().decode("utf-8", "replace")
            if self._size > EVENT_BYTES_MAX:
                break
        if self._size + len(self._buffer) > EVENT_BYTES_MAX:
            raise StreamBroken(f"An event is longer than {EVENT_BYTES_MAX} bytes.", answered=True)
        return events

    @staticmethod
    def _quickly(chunk: bytes, events: list[tuple[str, bytes]]) -> bytes:
        """Take whole events of one line of data from the beginning of a chunk; what is left of it."""
        whole, end, _ = chunk.rpartition(b"\n\n")
        if end and len(chunk) <= EVENT_BYTES_MAX:
            found = whole[6:].split(b"\n\ndata: ")
            if whole.startswith(b"data: ") and whole.count(b"\n") == 2 * len(found) - 2:
                events += [("", data) for data in found]
                return chunk[len(whole) + 2 :]
        return chunk


class Answer:
    """An answer being received. Leaving its context closes it; a connection that is not read to its end is dropped."""

    def __init__(self, response: aiohttp.ClientResponse, timeouts: Timeouts) -> None:
        self._response = response
        self._timeouts = timeouts
        self._loop = asyncio.get_running_loop()
        self._heard_at, self._stale = self._loop.time(), False
        if (connection := response.connection) is not None and connection.protocol is not None:
            # One timer that looks now and then, not one that is set anew for every packet.
            connection.protocol.read_timeout = None
        self._timer = self._loop.call_later(timeouts.stale_s, self._look)
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.is_stream = response.content_type == "text/event-stream"
        self.is_json = response.content_type == "application/json"

    async def read(self) -> bytes:
        """What has come since the last read, waiting for it; empty at the end."""
        try:
            data = await self._response.content.readany()
        except Exception as error:
            if self._stale:
                raise StaleStream(f"Nothing came for {self._timeouts.stale_s:g} s.", answered=True) from error
            raise _ours(error, answered=True, timeouts=self._timeouts) from error
        self._heard_at = self._loop.time()
        return data

    def _look(self) -> None:
        left_s = self._heard_at + self._timeouts.stale_s - self._loop.time()
        if left_s <= 0:
            self._stale = True
            self._response.close()
        else:
            self._timer = self._loop.call_later(left_s, self._look)

    def close(self) -> None:
        """The answer is of no use any more. A body read to its end has already given its connection back."""
        self._timer.cancel()
        self._response.close()

    async def body(self) -> bytes:
        """The whole body."""
        chunks: list[bytes] = []
        size = 0
        while chunk := await self.read():
            size += len(chunk)
            if size > ANSWER_BYTES_MAX:
                raise StreamBroken(f"The answer is longer than {ANSWER_BYTES_MAX} bytes.", answered=True)
            chunks.append(chunk)
        return b"".join(chunks)


class Exchange:
    """`async with client.send(…) as answer`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        timeouts: Timeouts,
    ):
        self._session = session
        self._call: tuple[str, str, dict[str, str], bytes] | None = (method, url, dict(headers), body)
        self._timeouts = timeouts
        self._answer: Answer | None = None

    async def __aenter__(self) -> Answer:
        assert self._call is not None, "an exchange is entered once"
        (method, url, headers, body), self._call = self._call, None
        limits = aiohttp.ClientTimeout(
            total=self._timeouts.total_s, sock_connect=CONNECT_S_MAX, sock_read=self._timeouts.stale_s
        )
        try:
            response = await self._session.request(
                method, url, headers=headers, data=body or None, timeout=limits, allow_redirects=False
            )
        except Exception as error:
            raise _ours(error, answered=False, timeouts=self._timeouts) from error
        self._answer = Answer(response, self._timeouts)
        return self._answer

    async def __aexit__(self, *_: object) -> None:
        if self._answer is not None:
            self._answer.close()


class Transport(Protocol):
    """What carries requests out."""

    def send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, timeouts: Timeouts
    ) -> AbstractAsyncContextManager[Answer]: ...


class Pending(Protocol):
    """A call in a thread: its outcome, and giving it up."""

    future: asyncio.Future[Any]

    def abandon(self) -> None: ...


class _Resolver(aiohttp.abc.AbstractResolver):
    """Looks names up in threads of our own: the loop's are never used."""

    def __init__(self, lookup: Callable[[Callable[[], Any]], Pending]) -> None:
        self._lookup = lookup

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[aiohttp.abc.ResolveResult]:
        job = self._lookup(partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM))
        try:
            found = await job.future
        except asyncio.CancelledError:
            job.abandon()
            raise
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            aiohttp.abc.ResolveResult(hostname=host, host=at[0], port=at[1], family=kind, proto=proto, flags=flags)
            for kind, _, proto, _, at in found
        ]

    async def close(self) -> None:
        """There is nothing to close."""


class HttpClient:
    """A pool of connections on the running loop. Made without I/O; the pool opens with the first request.

    `lookup` hands a function to a thread; names are looked up with it.
    """

    def __init__(
        self,
        lookup: Callable[[Callable[[], Any]], Pending],
        *,
        ca_bundle: str | None = None,
        proxy: str | None = None,
    ) -> None:
        self._lookup = lookup
        self._ca_bundle = ca_bundle
        self._proxy = proxy
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The pool, opened when first used."""
        if self._session is None:
            context = ssl.create_default_context(cafile=self._ca_bundle)
            connector = aiohttp.TCPConnector(
                limit=0, ssl=context, resolver=_Resolver(self._lookup), ttl_dns_cache=60, keepalive_timeout=30
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                auto_decompress=True,
                trust_env=False,
                proxy=self._proxy or None,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent",),
                headers={"User-Agent": "hermes"},
            )
        return self._session

    def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes, timeouts: Timeouts) -> Exchange:
        """One exchange, to be entered with `async with`."""
        return Exchange(self.session, method, url, headers, body, timeouts)

    async def close(self) -> None:
        """Close every connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _ours(error: Exception, *, answered: bool, timeouts: Timeouts) -> Exception:
    """The library's exception as one of ours; a stranger stays itself."""
    if isinstance(error, TransportError):
        return error
    if isinstance(error, aiohttp.ClientConnectorCertificateError | ssl.SSLCertVerificationError):
        return TlsFailed("The certificate could not be verified.")
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return ConnectFailed("No connection within the time allowed.")
    if isinstance(error, aiohttp.SocketTimeoutError):
        return StaleStream(f"Nothing came for {timeouts.stale_s:g} s.", answered=answered)
    if isinstance(error, asyncio.TimeoutError):
        return RequestTimeout(f"The exchange took longer than {timeouts.total_s:g} s.", answered=answered)
    if isinstance(error, aiohttp.ClientConnectorError) or (not answered and isinstance(error, OSError)):
        return ConnectFailed(_plain(error))
    if isinstance(error, aiohttp.ClientError | OSError):
        return StreamBroken(_plain(error), answered=True) if answered else ConnectFailed(_plain(error))
    return error


def _plain(error: Exception) -> str:
    reason = getattr(error, "os_error", None) or error
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
