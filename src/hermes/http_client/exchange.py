"""One exchange over a connection: the streamed answer, and every way in which it can fail."""

from __future__ import annotations

import asyncio
import errno
import os
import zlib
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools
import msgspec
from multidict import CIMultiDict

from hermes.core.limits import ANSWER_AHEAD_BYTES_MAX, ANSWER_BYTES_MAX, HEAD_BYTES_MAX, INFLATED_PIECE_BYTES_MAX
from hermes.http_client.inflate import ENCODINGS, decompressor


class TransportError(Exception):
    """The exchange failed. `answered`: bytes of an answer had arrived."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class ConnectFailed(TransportError):
    """No connection, or it was closed before any byte of an answer."""


class StreamBroken(TransportError):
    """The answer was cut off, or is not what its headers say."""


class StaleStream(TransportError):
    pass


class RequestTimeout(TransportError):
    pass


class TlsFailed(TransportError):
    pass


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds for the whole exchange, and of silence."""

    total_s: float = 1800.0
    stale_s: float = 180.0


class Pool(Protocol):
    def opened(self, connection: Connection) -> None: ...

    def release(self, connection: Connection) -> None: ...

    def forget(self, connection: Connection) -> None: ...


_CUT_PACKED = "The compressed answer was cut."
_LONG_HEAD = "The head of the answer is too long."


class Connection(asyncio.Protocol):
    """A connection and its current exchange."""

    __slots__ = (
        "_body",
        "_fed",
        "_parser",
        "_pool",
        "_size",
        "answer",
        "closed",
        "idle_timer",
        "key",
        "method",
        "transport",
    )

    def __init__(self, pool: Pool, key: tuple[str, ...]) -> None:
        self._pool, self.key = pool, key
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        self._size = self._fed = 0
        self._body: list[bytes] = []
        self.answer: Answer | None = None
        self.transport: asyncio.Transport | None = None
        self.idle_timer: asyncio.TimerHandle | None = None
        self.method = ""
        self.closed = False

    def ask(self, method: str, answer: Answer, data: bytes) -> None:
        assert self.transport is not None
        self.method, self.answer, self._size, self._fed, self._body = method, answer, 0, 0, []
        if self.closed:
            answer.cut(None)
        else:
            self.transport.write(data)

    def drop(self) -> None:
        self.closed = True
        if self.idle_timer is not None:
            self.idle_timer.cancel()
        if self.transport is not None:
            self.transport.abort()

    # --- told by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.answer is None:  # nobody has asked for anything
            self.drop()
            return
        self._fed += len(data)
        fault = ""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            fault = "The server went over to another protocol."
        except httptools.HttpParserError as error:
            fault = f"The answer is no HTTP: {error}"
        self._pass_body_on()
        if fault:
            self._fail(fault)
        if self._fed > HEAD_BYTES_MAX:  # none of it was body
            self._fail(_LONG_HEAD)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._pool.forget(self)
        if self.answer is not None:
            self.answer.cut(error)

    def _fail(self, message: str) -> None:
        answer, self.answer = self.answer, None
        self.drop()
        if answer is not None:
            answer.fail(StreamBroken(message, answered=True) if answer.status else ConnectFailed(message))

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
            answer.start(status)
            if self.method == "HEAD":
                self._end(answer, reusable=False)

    def on_body(self, data: bytes) -> None:
        self._fed = 0
        self._body.append(data)

    def _pass_body_on(self) -> None:
        """Pass on what arrived together as one piece, however many chunks the server made of it."""
        if self._body:
            data, self._body = self._body[0] if len(self._body) == 1 else b"".join(self._body), []
            if self.answer is not None:
                self.answer.receive(data)

    def on_message_complete(self) -> None:
        self._pass_body_on()
        if self.answer is not None and self.answer.status:
            self._end(self.answer, reusable=self._parser.should_keep_alive())

    def _end(self, answer: Answer, *, reusable: bool) -> None:
        self.answer, self._fed = None, 0
        if reusable and not self.closed and not self.transport.get_write_buffer_size():  # type: ignore[union-attr]
            self._pool.release(self)
        else:
            self.drop()
        answer.finish()


class Answer:
    """A response that is being received. Leaving its context closes it; a connection that is not read to its end is
    dropped."""

    def __init__(self, connection: Connection, timeouts: Timeouts, began_at: float, *, unpacks: bool) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.is_stream = self.is_json = False
        # Is given what comes while `read` waits, and says whether it has taken it: then nobody needs to be woken.
        self.sink: Callable[[bytes], bool] | None = None
        self._connection, self._timeouts, self._unpacks = connection, timeouts, unpacks
        self._packed = ""
        self._unpacker: Any = None
        # What is still to be unpacked; empty where the unpacker has more of what it was given, None where it has not.
        self._still_packed: bytes | None = None
        self._loop = asyncio.get_running_loop()
        self._began_at, self._heard_at = began_at, self._loop.time()
        self._chunks: list[bytes] = []
        self._ahead = 0
        self._over = self._paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer = self._loop.call_at(
            min(self._heard_at + timeouts.stale_s, began_at + timeouts.total_s), self._look
        )

    async def head(self) -> None:
        while not self.status and self._error is None:
            await self._wait()
        if self._error is not None and not self.status:
            raise self._error

    async def read(self) -> bytes:
        """What has arrived since the last read, waiting for it; empty at the end."""
        while True:
            while not self._chunks and self._still_packed is None and not self._over and self._error is None:
                await self._wait()
            if self._chunks:
                data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
                self._chunks, self._ahead = [], 0
            elif self._error is not None:
                raise self._error
            elif self._still_packed is not None:
                await asyncio.sleep(0)  # much can come out of little: others have their turn in between
                data = self._unpacked(b"")
            elif self._unpacker is not None and not self._unpacker.eof:
                raise StreamBroken(_CUT_PACKED, answered=True)
            else:
                return b""
            if self._still_packed is None:
                self._resume()
            if data:
                return data

    async def body(self, bytes_max: int | None = None) -> bytes:
        """The whole body. Raises StreamBroken if it is longer than `bytes_max`, or than any body may be."""
        bytes_max = ANSWER_BYTES_MAX if bytes_max is None else bytes_max
        chunks: list[bytes] = []
        size = 0
        while chunk := await self.read():
            size += len(chunk)
            if size > bytes_max:
                raise StreamBroken(f"The answer is longer than {bytes_max} bytes.", answered=True)
            chunks.append(chunk)
        return b"".join(chunks)

    def close(self) -> None:
        """Drop the connection, unless the answer is complete and has returned it already."""
        self._timer.cancel()
        self.sink = None
        if not self._over and self._error is None:
            self._connection.answer = None
            self._connection.drop()

    def _resume(self) -> None:
        if self._paused and not self._connection.closed:
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

    def start(self, status: int) -> None:
        self.status, self._heard_at = status, self._loop.time()
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        self.is_stream, self.is_json = kind == "text/event-stream", kind == "application/json"
        packed = self.headers.get("Content-Encoding", "").strip().lower().removeprefix("identity")
        if self._unpacks and packed:
            self._packed = packed
            if packed not in ENCODINGS:
                self.fail(StreamBroken("The answer is compressed in an unknown way.", answered=True))
        self._wake()

    def receive(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if self._packed and not (data := self._unpacked(data)):
            return
        if self.sink is not None and self._waiter is not None and not self._chunks and self.sink(data):
            return
        self._chunks.append(data)
        self._ahead += len(data)
        is_ahead = self._ahead > ANSWER_AHEAD_BYTES_MAX or self._still_packed is not None
        if is_ahead and not self._paused and not self._connection.closed:
            self._paused = True
            self._connection.transport.pause_reading()  # type: ignore[union-attr]
        self._wake()

    def _unpacked(self, data: bytes) -> bytes:
        """Decompress the next piece; `_still_packed` is what has to wait for the next call."""
        pending, out = self._still_packed is not None, b""
        data = (self._still_packed or b"") + data
        try:
            while (data or pending) and len(out) < INFLATED_PIECE_BYTES_MAX:
                pending = False
                if self._unpacker is None or self._unpacker.eof:
                    if not data:
                        break
                    self._unpacker = decompressor(self._packed, data)
                out += self._unpacker.decompress(data, INFLATED_PIECE_BYTES_MAX - len(out))
                data = self._unpacker.unconsumed_tail or self._unpacker.unused_data
        except zlib.error as error:
            self._still_packed = None
            self.fail(StreamBroken(f"The answer cannot be unpacked: {error}", answered=True))
            return b""
        self._still_packed = data if data or len(out) >= INFLATED_PIECE_BYTES_MAX else None
        return out

    def finish(self) -> None:
        if self._still_packed is None and self._unpacker is not None and not self._unpacker.eof:
            self.fail(StreamBroken(_CUT_PACKED, answered=True))
            return
        self._over = True
        self._resume()
        self._timer.cancel()
        self._wake()

    def cut(self, error: Exception | None) -> None:
        """The connection was closed. That ends a body without a length."""
        if self._over or self._error is not None:
            return
        framed = ",".join(self.headers.getall("Transfer-Encoding", [])).lower()
        whole = "Content-Length" not in self.headers and "chunked" not in framed
        if self.status and whole and error is None:
            self.finish()
        elif self.status:
            self.fail(StreamBroken(plain(error) if error else "The answer was cut.", answered=True))
        else:
            self.fail(ConnectFailed(plain(error) if error else "The connection was closed before an answer came."))

    def fail(self, error: Exception) -> None:
        if self._error is None and not self._over:
            self._error = error
            self._timer.cancel()
            self._connection.answer = None
            self._connection.drop()
            self._wake()

    def _look(self) -> None:
        """One periodic timer, instead of one that is reset for every packet."""
        now, limits = self._loop.time(), self._timeouts
        if self._paused or self._connection.transport.get_write_buffer_size():  # type: ignore[union-attr]
            self._heard_at = now  # time does not count while we are paused or the request is being sent
        stale_s = self._heard_at + limits.stale_s - now
        left_s = self._began_at + limits.total_s - now
        if left_s <= 0:
            message = f"The exchange took longer than {limits.total_s:g} s."
            self.fail(RequestTimeout(message, answered=bool(self.status)))
        elif stale_s <= 0:
            self.fail(StaleStream(f"Nothing came for {limits.stale_s:g} s.", answered=bool(self.status)))
        else:
            self._timer = self._loop.call_later(min(stale_s, left_s), self._look)


def plain(error: Exception) -> str:
    """The error as text. Event loops word a refused connection differently; the system's text is the same."""
    # Errors of TLS and of name lookup have numbers of their own.
    number = error.errno if isinstance(error, ConnectionError) or type(error) is OSError else None
    if number is not None and number in errno.errorcode:
        return os.strerror(number)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
