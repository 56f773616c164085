"""A model provider to test against: an HTTP server on a real socket that answers from a script, and misbehaves on demand."""

import asyncio
import inspect
import itertools
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from .waiting import idle, until
from .wire import (
    PATHS,
    Call,
    Json,
    Protocol,
    Reply,
    Turn,
    body_bytes,
    dump,
    error_body,
    event_count,
    failure,
    plain_bytes,
    raw_bytes,
    stream_parts,
    turns,
)

__all__ = ["Call", "ModelServer", "Protocol", "Reply", "Request", "Turn", "body_bytes", "event_count"]

COMMENT_EVERY_S = 0.02
# A hard close: the peer gets a reset, not an end of file.
_LINGER_NOT = struct.pack("ii", 1, 0)


@dataclass
class Request:
    """A received request and the state of its response; numbers start at 1."""

    number: int
    path: str
    protocol: Protocol
    headers: Mapping[str, str]
    body: Json
    time: float = field(default_factory=time.monotonic)
    reply: Reply | None = None
    # Bytes of the body handed to the socket.
    sent: int = 0
    # The client left before the answer was whole.
    closed_early: bool = False

    @property
    def key(self) -> str:
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        return bearer or self.headers.get("x-api-key", "") or self.headers.get("api-key", "")

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def model(self) -> str:
        return str(self.body.get("model", ""))

    @property
    def turns(self) -> list[Turn]:
        return turns(self.protocol, self.body)


Handler = Callable[[Request], Reply | Awaitable[Reply]]


@dataclass(frozen=True)
class Delivery:
    """A response ready to be written: its head, and the body in parts that each may wait first."""

    status: int
    kind: str
    parts: list[tuple[float, bytes]]

    @property
    def size(self) -> int:
        return sum(len(data) for _, data in self.parts)


class ModelServer:
    """Answers each request with the next reply of `script`, or with the reply that `handler` returns."""

    def __init__(self, *script: Reply, handler: Handler | None = None, repeat: bool = False) -> None:
        self._script = list(script)
        self.handler = handler
        # Whether the last reply of the script answers all further requests.
        self.repeat = repeat
        # The body of the model list; None: the route is not found.
        self.models: list[dict[str, Any]] | None = None
        # If set, the list is returned only to requests with this key.
        self.listing_key = ""
        self.requests: list[Request] = []
        self.open_streams = 0
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._active: set[asyncio.Task[object]] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._tick = asyncio.Event()

    @property
    def script(self) -> list[Reply]:
        """The replies still to come."""
        return self._script

    @script.setter
    def script(self, replies: list[Reply]) -> None:
        self._script = list(replies)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> Self:
        # Image-laden requests are larger than what the framework takes by default.
        app = web.Application(client_max_size=1 << 30)
        for path in PATHS:
            app.router.add_post(path, self._serve)
        app.router.add_get("/v1/models", self._list)
        # Being cancelled is how a handler learns that its client has left.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.port = self._runner.addresses[0][1]
        self._stopping = False
        return self

    async def _list(self, request: web.Request) -> web.Response:
        if self.listing_key and request.headers.get("Authorization") != f"Bearer {self.listing_key}":
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        return web.json_response({"data": self.models or []}, status=404 if self.models is None else 200)

    async def stop(self) -> None:
        """Abort all responses, and close all sockets and tasks."""
        if self._runner is None:
            return
        self._stopping = True
        runner, self._runner = self._runner, None
        remaining = [*self._active, *self._connections]
        for task in self._active:
            task.cancel()
        await runner.cleanup()
        await asyncio.gather(*remaining, return_exceptions=True)
        # A connection that never asked anything is known to the runner alone, which cancels without waiting.
        await idle()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def until(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        """Wait until the condition holds; it is checked whenever a request arrives or a response ends."""
        async with asyncio.timeout(timeout):
            while not condition():
                await self._tick.wait()

    def _changed(self) -> None:
        self._tick.set()
        self._tick = asyncio.Event()

    async def _serve(self, raw: web.Request) -> web.StreamResponse:
        record = await self._record(raw)
        self._track(raw)
        self.open_streams += 1
        self._changed()
        try:
            return await self._answer(raw, record)
        except asyncio.CancelledError:
            record.closed_early = not self._stopping
            raise
        except ConnectionError:
            record.closed_early = True
            return web.Response()  # never sent: the connection is gone
        finally:
            self.open_streams -= 1
            self._changed()

    async def _record(self, raw: web.Request) -> Request:
        body = await _parsed(raw)
        record = Request(len(self.requests) + 1, raw.path, PATHS[raw.path], raw.headers, body)
        self.requests.append(record)
        return record

    def _track(self, raw: web.Request) -> None:
        current = asyncio.current_task()
        assert current is not None
        self._active.add(current)
        current.add_done_callback(self._active.discard)
        self._connections.add(raw.task)
        raw.task.add_done_callback(self._connections.discard)

    async def _answer(self, raw: web.Request, record: Request) -> web.StreamResponse:
        record.reply = reply = await self._next_reply(record)
        if reply.delay_s:
            await asyncio.sleep(reply.delay_s)
        if reply.reset_before_headers:
            _reset(raw)
            return web.Response()  # never sent: the connection is gone
        delivery = _delivery(record, reply)
        response = _head(record, reply, delivery)
        await response.prepare(raw)
        limit = _limit(reply, delivery)
        await _write(response, record, delivery, limit)
        # A body of known length is over with its last byte: the client leaves, and silence would hold nothing up.
        over = response.content_length is not None and record.sent >= delivery.size
        if reply.stall_at is not None and limit == _stall_limit(reply, delivery) and not over:
            await _stall(raw, response, reply)
        elif reply.cut_at is not None and not reply.cut_clean:
            await _abort(raw)
        return response

    async def _next_reply(self, record: Request) -> Reply:
        if self.handler is not None:
            try:
                reply = self.handler(record)
                return await reply if inspect.isawaitable(reply) else reply
            except Exception as error:
                return Reply(status=500, error=f"the test's handler failed: {error!r}")
        if not self._script:
            return Reply(status=500, error=f"the script is exhausted: request {record.number} has no reply")
        return self._script[0] if self.repeat and len(self._script) == 1 else self._script.pop(0)


async def _parsed(raw: web.Request) -> Json:
    try:
        body = json.loads(await raw.read())
    except ValueError:
        body = None
    if isinstance(body, dict):
        return body
    error = error_body(PATHS[raw.path], 400, "The body is not a JSON object.")
    raise web.HTTPBadRequest(text=dump(error), content_type="application/json")


def _delivery(record: Request, reply: Reply) -> Delivery:
    protocol, body, key = record.protocol, record.body, record.key
    failed = failure(protocol, reply, body, key)
    if failed is not None:
        status, error = failed
        if reply.raw is not None and status == reply.status:
            return Delivery(status, "text/html", [(0.0, raw_bytes(reply.raw))])
        return Delivery(status, "application/json", [(0.0, dump(error).encode())])
    if not record.stream or reply.as_json:
        return Delivery(200, "application/json", [(0.0, plain_bytes(protocol, reply, body, key))])
    return Delivery(200, "text/event-stream", _timed(stream_parts(protocol, reply, body, key), reply))


def _timed(parts: list[tuple[bool, bytes]], reply: Reply) -> list[tuple[float, bytes]]:
    """The parts, each with the pause before it: pauses are between pieces."""
    if reply.packets and not reply.gap_s:
        # Packets know nothing of events.
        return [(0.0, b"".join(data for _, data in parts))]
    timed, has_started = [], False
    for piece, data in parts:
        timed.append((reply.gap_s if piece and has_started else 0.0, data))
        has_started = has_started or piece
    return timed


def _head(record: Request, reply: Reply, delivery: Delivery) -> web.StreamResponse:
    naming = "request-id" if record.protocol == "anthropic" else "x-request-id"
    headers = {"Content-Type": delivery.kind, "Cache-Control": "no-cache", naming: f"req_{record.number}"}
    for name, value in reply.headers.items():
        # A name is the same in any case, and must not be sent twice.
        headers = {known: old for known, old in headers.items() if known.lower() != name.lower()} | {name: value}
    response = web.StreamResponse(status=delivery.status, headers=headers)
    if delivery.kind != "text/event-stream" and reply.cut_at is None:
        response.content_length = delivery.size
    return response


def _stall_limit(reply: Reply, delivery: Delivery) -> int | None:
    if reply.stall_at is None or not reply.comments:
        return reply.stall_at
    # A comment inside an event would break the event, so the stall waits for its end.
    ends = itertools.accumulate(len(data) for _, data in delivery.parts)
    return next((end for end in itertools.chain([0], ends) if end >= (reply.stall_at or 0)), delivery.size)


def _limit(reply: Reply, delivery: Delivery) -> int | None:
    """How much of the body is sent: up to the stall or the cut, whichever comes first."""
    limits = [limit for limit in (_stall_limit(reply, delivery), reply.cut_at) if limit is not None]
    return min(limits, default=None)


async def _write(response: web.StreamResponse, record: Request, delivery: Delivery, limit: int | None) -> None:
    assert record.reply is not None
    size = delivery.size if limit is None else min(limit, delivery.size)
    sizes = _sizes(record.reply.packets)
    for pause, data in delivery.parts:
        if size <= 0:
            return
        if pause:
            await asyncio.sleep(pause)
        for packet in _packets(data[:size], sizes):
            await response.write(packet)
            record.sent += len(packet)
            if sizes is not None:
                # Without a turn of the loop the kernel would hand the packets over as one.
                await asyncio.sleep(0)
        size -= len(data)


def _sizes(packets: int | list[int] | None) -> Iterator[int] | None:
    if not packets:
        return None
    return itertools.cycle([packets] if isinstance(packets, int) else packets)


def _packets(data: bytes, sizes: Iterator[int] | None) -> Iterator[bytes]:
    if sizes is None:
        yield data
        return
    start = 0
    while start < len(data):
        size = max(1, next(sizes))
        yield data[start : start + size]
        start += size


async def _stall(raw: web.Request, response: web.StreamResponse, reply: Reply) -> None:
    """Send nothing more until the client disconnects or the server stops.

    Either cancels this, but for a client that had left before the handler began: hence the look at the connection.
    """
    while raw.transport is not None and not raw.transport.is_closing():
        if reply.comments:
            await response.write(b": ping\n\n")
        await asyncio.sleep(COMMENT_EVERY_S)
    raise ConnectionResetError("the client has left")


async def _abort(raw: web.Request) -> None:
    """Close the connection in the middle of the transfer, all that was written having left."""
    transport = raw.transport
    if transport is not None:
        await until(lambda: transport.is_closing() or not transport.get_write_buffer_size())
        transport.abort()


def _reset(raw: web.Request) -> None:
    if raw.transport is None:
        return
    peer = raw.transport.get_extra_info("socket")
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    raw.transport.abort()
