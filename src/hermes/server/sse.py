"""Server-sent events: the one writer of a stream, and the loop that sends a turn's events through a renderer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import StreamWriter

from hermes.bus.memory import Sink
from hermes.core.events import VOLATILE, Event
from hermes.core.limits import AHEAD_BYTES_MAX
from hermes.store.base import EventsExpired

Item = str | Event
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
KEEPALIVE = b": keepalive\n\n"


class ClientGone(Exception):
    """The client has disconnected."""


class Renderer(Protocol):
    """One stream format: bytes from events. It knows nothing of sockets.

    `ended`: the events included the end. `closing` follows the last of them.
    """

    ended: bool
    closing: bytes

    def begin(self) -> Iterable[bytes]:
        """Sent at once, before any event."""
        ...

    def feed(self, items: list[Item]) -> bytes:
        """Empty where the events are not shown."""
        ...


class Writer(Protocol):
    """Where frames go. `ready`: some can be sent without waiting."""

    @property
    def ready(self) -> bool: ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *_: object) -> None: ...

    def hold(self) -> None:
        """Before it is entered: send nothing before it is released or ends."""

    def write_now(self, data: bytes) -> None:
        """Send frames to a reader that is ready for them."""

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send frames; waits while the reader is behind."""

    async def release(self) -> None: ...


class EventStream:
    """The writer of one stream: head, keepalives, back-pressure, and a timeout for readers that read nothing."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        *,
        keepalive_s: float,
        stall_s: float,
        among: set[EventStream] | None = None,
        keepalive: bytes = KEEPALIVE,
    ) -> None:
        self._request, self._keepalive = request, keepalive
        self._held: list[bytes] | None = None
        self._among: set[EventStream] = set() if among is None else among
        self.response = web.StreamResponse(status=200, headers={**HEADERS, **headers})
        self.response._send_headers_immediately = False  # the head is sent with the first data
        self._keepalive_s, self._stall_s = keepalive_s, stall_s
        self._loop = asyncio.get_running_loop()
        self._spoke_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._writer: StreamWriter | None = None
        self._transport: asyncio.Transport | None = None

    async def __aenter__(self) -> EventStream:
        if self._held is None:
            writer = await self._prepare()
            if type(writer) is StreamWriter:
                self._loop.call_soon(_send_head, writer)  # unless data is written first
        self._timer = self._loop.call_later(self._keepalive_s, self._keep)
        self._among.add(self)
        return self

    async def _prepare(self) -> AbstractStreamWriter | None:
        """Freeze the headers and make the head."""
        try:
            writer = await self.response.prepare(self._request)
        except (ConnectionError, RuntimeError) as error:
            raise ClientGone from error
        if type(writer) is StreamWriter and writer.chunked:
            self._writer = writer
        return writer

    async def __aexit__(self, *error: object) -> None:
        """After an error the connection is closed: an error response cannot follow the head."""
        self._among.discard(self)
        if any(error) and getattr(self.response, "prepared", False) and self._request.transport is not None:
            self._request.transport.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError, ClientGone):
                await self._keeping

    def hold(self) -> None:
        """Before it is entered: send nothing, not even the head, before it is released or ends."""
        self._held = []

    async def release(self) -> None:
        if self._held is not None:
            data, self._held = b"".join(self._held), None
            await self._prepare()
            await self.write(data)

    @property
    def ready(self) -> bool:
        """Whether frames can be sent without waiting: the head is out, and the reader keeps up."""
        transport = self._transport
        return (
            transport is not None and not transport.is_closing() and transport.get_write_buffer_size() < AHEAD_BYTES_MAX
        )

    def write_now(self, data: bytes) -> None:
        self._spoke_at = self._loop.time()
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))  # type: ignore[union-attr]

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Waits while the reader is behind, up to a timeout. `last` ends the stream."""
        if self.ready and not last:
            if data:  # an empty chunk would end the stream
                self.write_now(data)
            return
        if self._held is not None:
            self._held.append(data)
            if not last:
                return
            data, self._held = b"".join(self._held), None
            await self._prepare()
        self._spoke_at = self._loop.time()
        transport = self._request.transport
        idle = transport is not None and not transport.get_write_buffer_size() and len(data) < AHEAD_BYTES_MAX
        try:
            async with contextlib.nullcontext() if idle else asyncio.timeout(self._stall_s):
                ends = last and self._writer is not None
                await (self.response.write_eof(data) if ends else self.response.write(data))
                if self._writer is not None:
                    self._transport = self._writer.transport
                    await self._writer.drain()
        except (ConnectionError, RuntimeError) as error:
            raise ClientGone from error
        except TimeoutError:
            if transport is not None:
                transport.abort()
            raise ClientGone from None

    def _keep(self) -> None:
        """Send keepalives while nothing else is sent."""
        quiet_s = self._loop.time() - self._spoke_at
        if quiet_s >= self._keepalive_s and (self._keeping is None or self._keeping.done()):
            self._keeping = self._loop.create_task(self._say_alive())
        self._timer = self._loop.call_later(max(0.001, self._keepalive_s - quiet_s % self._keepalive_s), self._keep)

    async def _say_alive(self) -> None:
        with contextlib.suppress(ClientGone):
            await self.write(self._keepalive)


def _send_head(writer: StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, RuntimeError):
        writer.send_headers()


def inline_sink(renderer: Renderer, stream: Writer) -> Sink:
    """Sends text deltas at once to a reader that is waiting for nothing else."""

    def carry(event: Event) -> bool:
        if event.type not in VOLATILE or not stream.ready:
            return False
        try:
            data = renderer.feed([event])
        except Exception:  # noqa: BLE001  (a renderer's error must not end the run; the reader's own loop raises it again)
            return False
        if data:
            stream.write_now(data)
        return True

    return carry


def run_events(
    engine: Any, run_id: str, rows: frozenset[str] = frozenset(), after: int = 0, sink: Sink | None = None
) -> AsyncGenerator[list[Item], None]:
    """A run's log in batches; events of the types in `rows` bring their message rows."""
    batches: AsyncGenerator[list[Item], None] = engine.batches(run_id, after, sink)
    return _with_rows(engine, run_id, rows, batches) if rows else batches


async def run_events_to_end(
    engine: Any, run_id: str, rows: frozenset[str] = frozenset(), after: int = 0, sink: Sink | None = None
) -> AsyncGenerator[list[Item], None]:
    """The same for readers that learn of the end from the log alone: an end that could not be logged is made up."""
    ended = False
    async with contextlib.aclosing(run_events(engine, run_id, rows, after, sink)) as batches:
        async for batch in batches:
            ended = any(not isinstance(item, str) and item.final for item in batch[-1:])
            yield batch
    if not ended and (end := engine.unrecorded_end(run_id)) is not None:
        yield [end]


async def _with_rows(
    engine: Any, run_id: str, rows: frozenset[str], batches: AsyncGenerator[list[Any], None]
) -> AsyncGenerator[list[Item], None]:
    async with contextlib.aclosing(batches):
        async for batch in batches:
            for at, event in enumerate(batch):
                row_id = event.data.get("row", event.data.get("partial_row")) if event.type in rows else None
                if row_id is None:
                    continue
                row = event.message_row if event.message_row is not None else await engine.row(run_id, row_id)
                if row is not None:
                    message = {"content": row.content, "reasoning": row.reasoning, "opaque": row.opaque}
                    data = {**event.data, **message}
                    batch[at] = Event(event.run_id, event.type, event.step, data, event.seq, event.ts)
            yield batch


async def forward(
    source: AsyncGenerator[list[Item], None],
    renderer: Renderer,
    stream: Writer | None,
    on_end: Callable[[], Awaitable[None]] | None = None,
) -> bool:
    """Send the beginning and all events through the renderer; returns whether the end was among them.

    `on_end` runs before the end is sent. A held stream is released with the first event, which is on record by then.
    """
    ended = False
    for data in renderer.begin():
        if data and stream is not None:
            await stream.write(data)
    async with contextlib.aclosing(source):
        async for batch in source:
            if stream is not None:
                await stream.release()
            data = renderer.feed(batch)
            if renderer.ended and not ended:
                ended = True
                if on_end is not None:
                    await on_end()
            if data and stream is not None:
                await stream.write(data)
    return ended


async def replay(
    stream: EventStream,
    source: AsyncGenerator[list[Item], None],
    renderer: Renderer,
    *,
    on_end: Callable[[], Awaitable[None]] | None = None,
    over: bool = False,
) -> web.StreamResponse:
    """Stream the log of a run, as `run_events_to_end` gives it. `over`: it ended before the stream began."""
    with contextlib.suppress(ClientGone, EventsExpired):
        async with stream:
            if await forward(source, renderer, stream, on_end) or over:
                await stream.write(renderer.closing, last=True)
    return stream.response
