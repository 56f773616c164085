"""The one asynchronous HTTP client: a pool per origin, server-sent events, time limits, TLS."""

from __future__ import annotations

import asyncio
import base64
import re
import socket
import ssl
import zlib
from asyncio.staggered import staggered_race
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import httptools
from multidict import CIMultiDict
from yarl import URL

from hermes.limits import (
    ANSWER_AHEAD_BYTES_MAX,
    ANSWER_BYTES_MAX,
    CONNECT_S_MAX,
    EVENT_BYTES_MAX,
    HEAD_BYTES_MAX,
    KEPT_ALIVE_S,
    NAMES_KEPT_S,
    NEXT_ADDRESS_S,
)

_P = TypeVar("_P", bound=asyncio.Protocol)


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
        if found := self.whole(chunk):
            return [("", data) for data in found]
        events = self._read(chunk) if chunk else []
        self._between = self._began and not (self._buffer or self._data or self._name or self._skip_lf)
        return events

    def whole(self, chunk: bytes) -> list[bytes]:
        """The data of a chunk that is nothing but whole events of one line, as most are; then it need not be fed."""
        if not self._between or not chunk.endswith(b"\n\n") or b"\r" in chunk or len(chunk) > EVENT_BYTES_MAX:
            return []
        return self._lines(chunk[:-2])

    @staticmethod
    def _lines(whole: bytes) -> list[bytes]:
        found = whole[6:].split(b"\n\ndata: ")
        return found if whole.startswith(b"data: ") and whole.count(b"\n") == 2 * len(found) - 2 else []

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

    def _quickly(self, chunk: bytes, events: list[tuple[str, bytes]]) -> bytes:
        """Take whole events of one line of data from the beginning of a chunk; what is left of it."""
        whole, end, _ = chunk.rpartition(b"\n\n")
        if end and len(chunk) <= EVENT_BYTES_MAX and (found := self._lines(whole)):
            events += [("", data) for data in found]
            return chunk[len(whole) + 2 :]
        return chunk


class Transport(Protocol):
    """What carries requests out."""

    def send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, timeouts: Timeouts
    ) -> AbstractAsyncContextManager[Answer]: ...


class Pending(Protocol):
    """A call in a thread: its outcome, and giving it up."""

    future: asyncio.Future[Any]

    def abandon(self) -> None: ...


class _Place(NamedTuple):
    """Where a URL leads, and what is asked for there."""

    scheme: str
    host: str
    port: int
    authority: str
    target: str
    url: str


@lru_cache(maxsize=256)
def _place(url: str) -> _Place:
    try:
        found = URL(url)
        host, port = found.raw_host, found.port
        if found.scheme not in ("http", "https") or not host or port is None:
            raise ValueError
    except (ValueError, UnicodeError):
        raise ConnectFailed("The address is no URL of http or https.") from None
    named = f"[{host}]" if ":" in host else host
    authority = named if found.is_default_port() else f"{named}:{port}"
    return _Place(found.scheme, host, port, authority, found.raw_path_qs, url)


# --- one connection --------------------------------------------------------------------------------------------------


_LONG_HEAD = "The head of the answer is too long."


class _Connection(asyncio.Protocol):
    """A connection and the one exchange that it is used for at a time."""

    __slots__ = ("_client", "_fed", "_parser", "_size", "answer", "gone", "key", "method", "resting", "transport")

    def __init__(self, client: HttpClient, key: tuple[str, ...]) -> None:
        self._client, self.key = client, key
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        self._size = self._fed = 0
        self.answer: Answer | None = None
        self.transport: asyncio.Transport | None = None
        self.resting: asyncio.TimerHandle | None = None
        self.method = ""
        self.gone = False

    def ask(self, method: str, answer: Answer, data: bytes) -> None:
        """Begin an exchange."""
        assert self.transport is not None
        self.method, self.answer, self._size, self._fed = method, answer, 0, 0
        if self.gone:
            answer.cut(None)
        else:
            self.transport.write(data)

    def drop(self) -> None:
        """Use it no more."""
        self.gone = True
        if self.resting is not None:
            self.resting.cancel()
        if self.transport is not None:
            self.transport.abort()

    # --- told by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.answer is None:  # nobody has asked for anything
            self.drop()
            return
        self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("The server went over to another protocol.")
        except httptools.HttpParserError as error:
            self._fail(f"The answer is no HTTP: {error}")
        if self._fed > HEAD_BYTES_MAX:  # none of it was body
            self._fail(_LONG_HEAD)

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        self._client._forget(self)
        if self.answer is not None:
            self.answer.cut(error)

    def _fail(self, words: str) -> None:
        answer, self.answer = self.answer, None
        self.drop()
        if answer is not None:
            answer.fail(StreamBroken(words, answered=True) if answer.status else ConnectFailed(words))

    # --- told by the parser

    def on_message_begin(self) -> None:
        if self.answer is None:
            self.drop()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value)
        if self.answer is not None and not self.answer.status and self._size <= HEAD_BYTES_MAX:
            self.answer.headers.add(name.decode("latin-1"), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        status, answer = self._parser.get_status_code(), self.answer
        if answer is None:
            return
        if self._size > HEAD_BYTES_MAX:
            self._fail(_LONG_HEAD)
        elif status < 200:  # the answer itself follows
            answer.headers.clear()
        else:
            self._fed = 0
            answer.begun(status)
            if self.method == "HEAD":
                self._end(answer, reusable=False)

    def on_body(self, data: bytes) -> None:
        self._fed = 0
        if self.answer is not None:
            self.answer.came(data)

    def on_message_complete(self) -> None:
        if self.answer is not None and self.answer.status:
            self._end(self.answer, reusable=self._parser.should_keep_alive())

    def _end(self, answer: Answer, *, reusable: bool) -> None:
        self.answer, self._fed = None, 0
        if reusable and not self.gone and not self.transport.get_write_buffer_size():  # type: ignore[union-attr]
            self._client._rest(self)
        else:
            self.drop()
        answer.ended()


class Answer:
    """An answer being received. Leaving its context closes it; a connection that is not read to its end is dropped."""

    def __init__(self, connection: _Connection, timeouts: Timeouts, began_at: float, *, unpacks: bool) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.is_stream = self.is_json = False
        # Is given what comes while `read` waits, and says whether it has taken it: then nobody needs to be woken.
        self.sink: Callable[[bytes], bool] | None = None
        self._connection, self._timeouts, self._unpacks = connection, timeouts, unpacks
        self._packed = ""
        self._unpacker: Any = None
        self._loop = asyncio.get_running_loop()
        self._began_at, self._heard_at = began_at, self._loop.time()
        self._chunks: list[bytes] = []
        self._ahead = 0
        self._over = self._closed = self._paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer = self._loop.call_at(
            min(self._heard_at + timeouts.stale_s, began_at + timeouts.total_s), self._look
        )

    async def head(self) -> None:
        """Wait until the answer begins."""
        while not self.status and self._error is None:
            await self._wait()
        if self._error is not None and not self.status:
            raise self._error

    async def read(self) -> bytes:
        """What has come since the last read, waiting for it; empty at the end."""
        while not self._chunks and not self._over and self._error is None:
            await self._wait()
        if self._chunks:
            data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks, self._ahead = [], 0
            self._resume()
            return data
        if self._error is not None:
            raise self._error
        return b""

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

    def close(self) -> None:
        """The answer is of no use any more. One that has come to its end has already given its connection back."""
        self._timer.cancel()
        self._closed, self.sink = True, None
        if not self._over and self._error is None:
            self._connection.answer = None
            self._connection.drop()

    def _resume(self) -> None:
        if self._paused and not self._connection.gone:
            self._connection.transport.resume_reading()  # type: ignore[union-attr]
            self._heard_at = self._loop.time()
        self._paused = False

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- told by the connection

    def begun(self, status: int) -> None:
        """The head is there."""
        self.status, self._heard_at = status, self._loop.time()
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        self.is_stream, self.is_json = kind == "text/event-stream", kind == "application/json"
        packed = self.headers.get("Content-Encoding", "").strip().lower().removeprefix("identity")
        if self._unpacks and packed:
            self._packed = packed
            if packed not in ("gzip", "x-gzip", "deflate"):
                self.fail(StreamBroken("The answer is compressed in an unknown way.", answered=True))
        self._wake()

    def came(self, data: bytes) -> None:
        """A piece of the body."""
        self._heard_at = self._loop.time()
        if self._packed and not (data := self._unpacked(data)):
            return
        if self.sink is not None and self._waiter is not None and not self._chunks and self.sink(data):
            return
        self._chunks.append(data)
        self._ahead += len(data)
        if self._ahead > ANSWER_AHEAD_BYTES_MAX and not self._paused and not self._connection.gone:
            self._paused = True
            self._connection.transport.pause_reading()  # type: ignore[union-attr]
        self._wake()

    def _unpacked(self, data: bytes) -> bytes:
        out = b""
        try:
            while data and self._error is None:
                if self._unpacker is None or self._unpacker.eof:  # some send what is called deflate without its header
                    bare = self._packed == "deflate" and data[0] & 0x0F != 8
                    self._unpacker = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32)
                out += self._unpacker.decompress(data, ANSWER_BYTES_MAX + 1 - len(out))
                if len(out) > ANSWER_BYTES_MAX:
                    self.fail(StreamBroken(f"The answer is longer than {ANSWER_BYTES_MAX} bytes.", answered=True))
                data = self._unpacker.unused_data
        except zlib.error as error:
            self.fail(StreamBroken(f"The answer cannot be unpacked: {error}", answered=True))
        return out if self._error is None else b""

    def ended(self) -> None:
        """All of it is there."""
        if self._unpacker is not None and not self._unpacker.eof:
            self.fail(StreamBroken("The compressed answer was cut.", answered=True))
            return
        self._over = True
        self._resume()
        self._timer.cancel()
        self._wake()

    def cut(self, error: Exception | None) -> None:
        """The connection is gone. A body without a length ends so."""
        if self._over or self._error is not None:
            return
        framed = ",".join(self.headers.getall("Transfer-Encoding", [])).lower()
        whole = "Content-Length" not in self.headers and "chunked" not in framed
        if self.status and whole and error is None:
            self.ended()
        elif self.status:
            self.fail(StreamBroken(_plain(error) if error else "The answer was cut.", answered=True))
        else:
            self.fail(ConnectFailed(_plain(error) if error else "The connection was closed before an answer came."))

    def fail(self, error: Exception) -> None:
        """It will not come to its end."""
        if self._error is None and not self._over:
            self._error = error
            self._timer.cancel()
            self._connection.answer = None
            self._connection.drop()
            self._wake()

    def _look(self) -> None:
        """One timer that looks now and then, not one that is set anew for every packet."""
        now, limits = self._loop.time(), self._timeouts
        if self._paused or self._connection.transport.get_write_buffer_size():  # type: ignore[union-attr]
            self._heard_at = now  # what is silent is us, or has not heard us yet
        stale_s = self._heard_at + limits.stale_s - now
        left_s = self._began_at + limits.total_s - now
        if left_s <= 0:
            words = f"The exchange took longer than {limits.total_s:g} s."
            self.fail(RequestTimeout(words, answered=bool(self.status)))
        elif stale_s <= 0:
            self.fail(StaleStream(f"Nothing came for {limits.stale_s:g} s.", answered=bool(self.status)))
        else:
            self._timer = self._loop.call_later(min(stale_s, left_s), self._look)


# --- the client ------------------------------------------------------------------------------------------------------


class Exchange:
    """`async with client.send(…) as answer`."""

    def __init__(
        self, client: HttpClient, method: str, url: str, headers: Mapping[str, str], body: bytes, timeouts: Timeouts
    ) -> None:
        self._client, self._timeouts = client, timeouts
        self._call: tuple[str, str, Mapping[str, str], bytes] | None = (method, url, headers, body)
        self._answer: Answer | None = None

    async def __aenter__(self) -> Answer:
        assert self._call is not None, "an exchange is entered once"
        call, self._call = self._call, None
        self._answer = await self._client._ask(*call, self._timeouts)
        return self._answer

    async def __aexit__(self, *_: object) -> None:
        if self._answer is not None:
            self._answer.close()


class HttpClient:
    """Connections of the running loop, kept for a while after an exchange. Made without I/O.

    `lookup` hands a function to a thread; names are looked up with it. With `unix` all of them lead to that socket.
    """

    _keeps = _unpacks = True

    def __init__(
        self,
        lookup: Callable[[Callable[[], Any]], Pending] | None = None,
        *,
        ca_bundle: str | None = None,
        proxy: str | None = None,
        unix: str | None = None,
    ) -> None:
        self._lookup, self._ca_bundle, self._unix = lookup, ca_bundle, unix
        self._proxy = proxy or None
        self._tls: ssl.SSLContext | None = None
        self._resting: dict[tuple[str, ...], list[_Connection]] = {}
        self._known: dict[tuple[str, int], tuple[float, list[tuple[str, int]]]] = {}
        self._asked: dict[tuple[str, int], tuple[Pending, int]] = {}

    def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes, timeouts: Timeouts) -> Exchange:
        """One exchange, to be entered with `async with`."""
        return Exchange(self, method, url, headers, body, timeouts)

    async def close(self) -> None:
        """Close every connection that is not in use."""
        for connections in self._resting.values():
            for connection in connections:
                connection.drop()
        self._resting.clear()
        await asyncio.sleep(0)

    # --- one exchange -------------------------------------------------------------------------------------------

    async def _ask(self, method: str, url: str, headers: Mapping[str, str], body: bytes, timeouts: Timeouts) -> Answer:
        place, began_at = _place(url), asyncio.get_running_loop().time()
        data = _head(method, place, headers, body, self._through(place)) + body

        async def over(connection: _Connection) -> Answer:
            answer = Answer(connection, timeouts, began_at, unpacks=self._unpacks)
            try:
                connection.ask(method, answer, data)
                await answer.head()
            except BaseException:
                answer.close()
                raise
            return answer

        key = (place.scheme, place.authority)
        if (rested := self._rested(key)) is not None:
            try:
                return await over(rested)
            except ConnectFailed:  # it may have been on its way out
                if method not in _REPEATABLE:
                    raise
        try:
            async with asyncio.timeout(min(self._connect_s(), timeouts.total_s)):
                opened = await self._open(place, partial(_Connection, self, key))
        except TimeoutError:
            if timeouts.total_s < self._connect_s():
                raise RequestTimeout(f"The exchange took longer than {timeouts.total_s:g} s.") from None
            raise ConnectFailed("No connection within the time allowed.") from None
        except ssl.SSLCertVerificationError:
            raise TlsFailed("The certificate could not be verified.") from None
        except (OSError, UnicodeError) as error:
            raise ConnectFailed(_plain(error)) from error
        return await over(opened)

    def _through(self, place: _Place) -> str | None:
        """The proxy that is told the whole address."""
        return self._proxy if place.scheme == "http" else None

    @staticmethod
    def _connect_s() -> float:
        return CONNECT_S_MAX

    # --- connections --------------------------------------------------------------------------------------------

    def _rested(self, key: tuple[str, ...]) -> _Connection | None:
        """A connection that is open and unused."""
        connections = self._resting.get(key)
        while connections:
            connection = connections.pop()
            if connection.resting is not None:
                connection.resting.cancel()
                connection.resting = None
            if not connection.gone and not connection.transport.is_closing():  # type: ignore[union-attr]
                return connection
        return None

    def _rest(self, connection: _Connection) -> None:
        """Keep a connection for the next exchange."""
        if self._keeps:
            self._resting.setdefault(connection.key, []).append(connection)
            connection.resting = asyncio.get_running_loop().call_later(KEPT_ALIVE_S, connection.drop)
        else:
            connection.drop()

    def _forget(self, connection: _Connection) -> None:
        if connection.resting is not None:
            connection.resting.cancel()
        with suppress(ValueError, KeyError):
            self._resting[connection.key].remove(connection)

    async def _open(self, place: _Place, make: Callable[[], _Connection]) -> _Connection:
        if self._unix is not None:
            return (await asyncio.get_running_loop().create_unix_connection(make, self._unix))[1]
        if self._proxy is None:
            return await self._dial(place, make)
        if place.scheme == "http":
            return await self._dial(_place(self._proxy), make)
        return await self._tunnel(place, make())

    async def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            assert self._lookup is not None
            self._tls = await self._lookup(partial(ssl.create_default_context, cafile=self._ca_bundle)).future
        return self._tls

    async def _dial(self, place: _Place, make: Callable[[], _P]) -> _P:
        """Connect to the first address that can be had; one that is silent for a moment is not waited for alone."""
        how: dict[str, Any] = {}
        if place.scheme == "https":
            how = {"ssl": await self._context(), "server_hostname": place.host.rstrip(".")}
        connect = partial(asyncio.get_running_loop().create_connection, make, **how)
        ways = [partial(connect, *at) for at in await self._addresses(place.host, place.port)]
        made, _, failed = await staggered_race(ways, NEXT_ADDRESS_S)
        if made is None:
            untrusted = (error for error in failed if isinstance(error, ssl.SSLCertVerificationError))
            raise next(untrusted, None) or (failed[-1] if failed else None) or OSError("the name has no address")
        return cast("_P", made[1])

    async def _addresses(self, host: str, port: int) -> list[tuple[str, int]]:
        """Where a name leads, as it was told within the last minute."""
        with suppress(ValueError):
            return [(str(ip_address(host)), port)]
        kept_until, found = self._known.get((host, port), (0.0, []))
        if asyncio.get_running_loop().time() > kept_until:
            told = await self._looked_up(host, port)
            found = list(dict.fromkeys((at[0], at[1]) for *_, at in told))
            self._known[host, port] = asyncio.get_running_loop().time() + NAMES_KEPT_S, found
        return found

    async def _looked_up(self, host: str, port: int) -> list[Any]:
        """What the system says of a name; it is asked once for all who want to know."""
        job, waiting = self._asked.get((host, port), (None, 0))
        if job is None:
            assert self._lookup is not None
            job = self._lookup(partial(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM))
        self._asked[host, port] = job, waiting + 1
        try:
            return list(await asyncio.shield(job.future))
        finally:
            _, waiting = self._asked.pop((host, port), (job, 1))
            if not job.future.done() and waiting == 1:
                job.abandon()
                job.future.cancel()
            elif waiting > 1:
                self._asked[host, port] = job, waiting - 1

    async def _tunnel(self, place: _Place, connection: _Connection) -> _Connection:
        """Through the proxy to the other side, and TLS with that."""
        assert self._proxy is not None
        loop, tls = asyncio.get_running_loop(), await self._context()
        tunnel = await self._dial(_place(self._proxy), _Tunnel)
        assert tunnel.transport is not None
        named = f"[{place.host}]" if ":" in place.host else place.host
        lines = [
            f"CONNECT {named}:{place.port} HTTP/1.1",
            f"Host: {named}:{place.port}",
            *_known("Proxy-Authorization", self._proxy),
        ]
        try:
            tunnel.transport.write("\r\n".join([*lines, "", ""]).encode())
            await tunnel.opened
            made = await loop.start_tls(tunnel.transport, connection, tls, server_hostname=place.host.rstrip("."))
        except BaseException:
            tunnel.transport.abort()
            raise
        assert made is not None
        connection.connection_made(made)
        return connection


class _Tunnel(asyncio.Protocol):
    """What a proxy says to the wish for a connection."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._said = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._said += data
        if self.opened.done() or (b"\r\n\r\n" not in self._said and len(self._said) <= HEAD_BYTES_MAX):
            return
        status = self._said[:64].split(b"\r\n")[0].split(b" ", 2)
        if len(status) > 1 and status[1] == b"200" and self._said.endswith(b"\r\n\r\n"):
            self.opened.set_result(None)
        else:
            words = b" ".join(status[1:]).decode("latin-1") or "no answer"
            self.opened.set_exception(ConnectFailed(f"The proxy refused: {words}"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.opened.done():
            self.opened.set_exception(ConnectFailed("The proxy closed the connection."))


def _known(name: str, address: str) -> list[str]:
    """The header by which we are known to whom an address names a user."""
    url = URL(address)
    if url.user is None:
        return []
    return [f"{name}: Basic " + base64.b64encode(f"{url.user}:{url.password or ''}".encode()).decode()]


def _head(method: str, place: _Place, headers: Mapping[str, str], body: bytes, proxy: str | None) -> bytes:
    """The head of a request."""
    target = place.target if proxy is None else f"http://{place.authority}{place.target}"
    lines = [f"{method} {target} HTTP/1.1", f"Host: {place.authority}"]
    names = {name.lower() for name in headers}
    lines += [f"{name}: {value}" for name, value in _USUAL.items() if name.lower() not in names]
    lines += [f"{name}: {value}" for name, value in headers.items() if name.lower() not in _OURS]
    if body or method in ("POST", "PUT", "PATCH"):
        lines.append(f"Content-Length: {len(body)}")
    lines += _known("Authorization", place.url) if "authorization" not in names else ()
    lines += _known("Proxy-Authorization", proxy) if proxy is not None else ()
    if not all(map(_NAME.fullmatch, headers)) or any(map(_UNFIT.search, lines)):
        raise ConnectFailed("A header of the request has no fit name, or holds a line break.")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape")


_USUAL = {"User-Agent": "hermes", "Accept": "*/*", "Accept-Encoding": "gzip, deflate"}
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_UNFIT = re.compile("[\r\n\0\ud800-\udc7f\udd00-\udfff]")
_REPEATABLE = frozenset({"GET", "HEAD"})
_OURS = frozenset({"host", "content-length", "transfer-encoding", "connection"})


def _plain(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
