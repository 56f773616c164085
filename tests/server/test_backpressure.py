"""A reader that does not keep up costs the server next to nothing, and misses nothing."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from support.model_server import Reply, Request
from support.waiting import DEADLINE_S, until
from support.wire import stream_parts

from .clients import Frame, HeldModel, Json, RawConnection, frame
from .conftest import Start

DELTAS = 50_000
# What may wait in a connection: the mark at which writing pauses, and the largest single write on top of it.
BUFFERED_BYTES_MAX = 512 << 10
# The stream has some 12 MB; kept as objects it would be several times that.
GROWTH_BYTES_MAX = 40 << 20
BATCH = 500


class Flood(HeldModel):
    """A provider whose answer has very many pieces, made while they are sent, and perhaps no end."""

    def __init__(self, pieces: int = DELTAS, ends: bool = True) -> None:
        super().__init__()
        self._pieces, self._ends = pieces, ends
        # The bytes that the readers of its answers have taken.
        self.sent = 0

    async def _answer(self, raw: web.Request, record: Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(raw)
        head, piece, *tail = (data for _, data in stream_parts("chat", Reply(text="@@"), record.body))
        await response.write(head)
        for start in range(0, self._pieces, BATCH):
            batch = (piece.replace(b"@@", b"%05d " % number) for number in range(start, start + BATCH))
            data = b"".join(batch)
            await response.write(data)
            self.sent += len(data)
        if not self._ends:
            await asyncio.Event().wait()
        await response.write(b"".join(tail))
        return response


def resident() -> int:
    """The bytes of memory that this process really has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def connections() -> list[RequestHandler[Any]]:
    """The server's side of every connection."""
    return [held for held in gc.get_objects() if isinstance(held, RequestHandler)]


ROUTES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "count"}], "stream": True}),
    pytest.param("/v1/responses", {"input": "count", "stream": True}, marks=pytest.mark.long),
]


class Counter:
    """Reads a chunked stream of events and keeps nothing but how far the numbers in its text have come."""

    def __init__(self) -> None:
        self.bytes = self.numbers = 0
        self.over = False
        self._raw, self._text, self._said = b"", b"", ""

    def feed(self, data: bytes) -> None:
        assert data, "the stream broke off"
        self.bytes += len(data)
        self._raw += data
        at = 0
        while (end := self._raw.find(b"\r\n", at)) >= 0:
            length = int(self._raw[at:end], 16)
            if len(self._raw) < end + 4 + length:
                break
            self._text += self._raw[end + 2 : end + 2 + length]
            self.over = self.over or length == 0
            at = end + 4 + length
        self._raw = self._raw[at:]
        *blocks, self._text = self._text.split(b"\n\n")
        for block in blocks:
            self._take(frame(block.decode()))

    def _take(self, frame: Frame | None) -> None:
        if frame is None or frame.data == "[DONE]":
            return
        if frame.event == "response.output_text.delta":
            self._said += frame.data["delta"]
        elif frame.event is None:
            self._said += "".join(choice["delta"].get("content", "") for choice in frame.data["choices"])
        *whole, self._said = self._said.split(" ")
        for number in whole:
            assert int(number) == self.numbers, "a delta is missing, doubled or out of place"
            self.numbers += 1


@pytest.mark.parametrize(("path", "body"), ROUTES, ids=["chat", "responses"])
async def test_slow_reader_backpressure_loses_nothing(start: Start, path: str, body: Json) -> None:
    async with Flood() as model:
        settings = {**model.settings, "agent": {"api_max_retries": 0, "delta_window_ms": 0}}
        api = await start(settings=settings)
        # What such a turn itself needs is not what this is about.
        await api.ask("warm up")
        key = api.client.headers["Authorization"]
        async with await RawConnection.open(api.url, receive_buffer=8192) as wire:
            await wire.request("POST", path, body, Authorization=key)
            await wire.head()
            await model.wait_for_request(2)
            gc.collect()
            ours = [
                connection
                for connection in connections()
                if connection.transport is not None and connection._current_request is not None
            ]
            assert ours
            before, grown, buffered, counter = resident(), 0, 0, Counter()

            async def read(size: int) -> None:
                nonlocal grown, buffered
                counter.feed(await wire.reader.read(size))
                grown = max(grown, resident() - before)
                # The events that end a response hold its whole text, and are written as they are.
                if counter.numbers < DELTAS // 2:
                    buffered = max([buffered, *(h.transport.get_write_buffer_size() for h in ours if h.transport)])

            # Little is read while the provider says all it has to say: a byte of ten or so.
            while model.open_streams:
                if counter.bytes < model.sent // 10:
                    await read(4096)
                else:
                    await until(lambda: counter.bytes < model.sent // 10 or not model.open_streams)
            assert counter.bytes < 5_000_000
            async with asyncio.timeout(DEADLINE_S):
                while not counter.over:
                    await read(1 << 16)
    assert counter.numbers == DELTAS
    assert buffered < BUFFERED_BYTES_MAX
    assert grown < GROWTH_BYTES_MAX
