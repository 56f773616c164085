"""A model that costs next to nothing: raw sockets that answer every request with a prepared stream, at any pace.

What the user says is what it answers: to `burst-500` it writes 500 tokens at once, to `paced-20-200` 200 at 20 a second,
to `tools-20` it asks for a file 20 times first. Every token is the same text, so that whoever reads can count them.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterable
from functools import cache

TOKEN = " qx"
CHUNK = {
    "id": "chatcmpl-bench",
    "object": "chat.completion.chunk",
    "created": 1790000000,
    "model": "bench",
    "choices": [{"index": 0, "delta": {"content": TOKEN}, "logprobs": None, "finish_reason": None}],
}
_ASKED = re.compile(rb"(burst|paced|tools)-(\d+)(?:-(\d+))?")
_WHOLE = re.compile(rb'"stream":\s*true')
TICK_S = 0.005


def chunk_bytes() -> bytes:
    """One chunk as it is on the wire, without its frame."""
    return json.dumps(CHUNK).encode()


def frames(events: Iterable[bytes]) -> bytes:
    """Events as they are on the wire."""
    return b"".join(b"data: " + event + b"\n\n" for event in events)


@cache
def end_bytes(tokens: int) -> bytes:
    """What follows the text of a streamed answer."""
    last = {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    used = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": tokens + 10}
    events = [json.dumps(last).encode(), json.dumps({**CHUNK, "choices": [], "usage": used}).encode(), b"[DONE]"]
    return frames(events)


@cache
def stream_bytes(tokens: int) -> bytes:
    """A whole streamed answer."""
    return frames([chunk_bytes()] * tokens) + end_bytes(tokens)


@cache
def plain_bytes(tokens: int) -> bytes:
    """A whole answer that is not streamed."""
    used = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": tokens + 10}
    choice = {"index": 0, "message": {"role": "assistant", "content": TOKEN * tokens}, "finish_reason": "stop"}
    return json.dumps({**CHUNK, "object": "chat.completion", "choices": [choice], "usage": used}).encode()


@cache
def call_bytes(step: int) -> bytes:
    """A streamed answer that asks for a file."""
    arguments = json.dumps({"path": "notes.txt", "offset": step + 1})
    call = {"index": 0, "id": f"call_{step}", "type": "function"}
    call["function"] = {"name": "read_file", "arguments": arguments}
    first = {**CHUNK, "choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]}
    ended = {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    return frames(json.dumps(chunk).encode() for chunk in (first, ended))


class Pace:
    """Writes one token to each stream of a rate in its turn: a timer for all of them, not one for each."""

    def __init__(self, per_s: int) -> None:
        self._slots: list[set[Answering]] = [set() for _ in range(max(1, round(1 / per_s / TICK_S)))]
        self._at = self._next = 0
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time()
        self._step_s = 1 / per_s / len(self._slots)
        self._tick()

    def add(self, stream: Answering) -> None:
        """One more, in the next slot."""
        self._next = (self._next + 1) % len(self._slots)
        self._slots[self._next].add(stream)

    def _tick(self) -> None:
        slot = self._slots[self._at]
        slot -= {stream for stream in slot if not stream.token()}
        self._at = (self._at + 1) % len(self._slots)
        self._due += self._step_s
        self._loop.call_at(self._due, self._tick)


_PACES: dict[int, Pace] = {}
_FRAME = b"%x\r\n%s\r\n" % (len(frames([chunk_bytes()])), frames([chunk_bytes()]))


class Answering(asyncio.Protocol):
    """Reads requests by their length and answers as their user says."""

    def __init__(self) -> None:
        self._buffer = b""
        self._left = self._tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            _, _, length = head.partition(b"content-length:")
            size = int(length.split(b"\r\n")[0] or 0)
            if len(self._buffer) < end + 4 + size:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + size], self._buffer[end + 4 + size :]
            self._answer(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._left = 0

    def _answer(self, body: bytes) -> None:
        match = _ASKED.search(body)
        kind, number, more = match.groups() if match else (b"burst", b"1", None)
        tokens = int(number)
        if kind == b"paced":
            self._tokens = self._left = int(more or 1)
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            if tokens not in _PACES:
                _PACES[tokens] = Pace(tokens)
            _PACES[tokens].add(self)
            return
        streamed = _WHOLE.search(body) is not None
        answer = stream_bytes(tokens) if streamed else plain_bytes(tokens)
        if kind == b"tools":
            done = body.count(b'"role":"tool"')
            answer = call_bytes(done) if done < tokens else stream_bytes(1)
        form = b"text/event-stream" if streamed else b"application/json"
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (form, len(answer), answer)
        )

    def token(self) -> bool:
        """Write the next token of a paced answer; False when that was the last."""
        if self._left <= 0:
            return False
        self._left -= 1
        self._transport.write(_FRAME)
        if self._left:
            return True
        last = end_bytes(self._tokens)
        self._transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last))
        return False


async def serve() -> tuple[asyncio.Server, str]:
    """Start it; its base URL."""
    server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0, backlog=4096)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


async def _main() -> None:
    server, url = await serve()
    sys.stdout.write(f"listening on {url}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_main())
