"""A model that costs next to nothing: a raw socket that answers every request with the same prepared stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

CHUNK = {
    "id": "chatcmpl-bench",
    "object": "chat.completion.chunk",
    "created": 1790000000,
    "model": "bench",
    "choices": [{"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}],
}


def chunk_bytes() -> bytes:
    """One chunk as it is on the wire, without its frame."""
    return json.dumps(CHUNK).encode()


def stream_bytes(tokens: int) -> bytes:
    """A whole streamed answer."""
    last = {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {
        **CHUNK,
        "choices": [],
        "usage": {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": tokens + 10},
    }
    return frames([chunk_bytes()] * tokens + [json.dumps(last).encode(), json.dumps(usage).encode(), b"[DONE]"])


def frames(events: Iterable[bytes]) -> bytes:
    """Events as they are on the wire."""
    return b"".join(b"data: " + event + b"\n\n" for event in events)


class Answering(asyncio.Protocol):
    """Reads requests by their length and writes the stream."""

    def __init__(self, body: bytes) -> None:
        self._answer = self.headed(body)
        self._buffer = b""

    def headed(self, body: bytes) -> bytes:
        """A body with its head."""
        return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    def answer(self, body: bytes) -> bytes:
        """What a request is answered with."""
        return self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            _, _, length = head.partition(b"content-length:")
            size = int(length.split(b"\r\n")[0] or 0)
            if len(self._buffer) < end + 4 + size:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + size], self._buffer[end + 4 + size :]
            self._transport.write(self.answer(body))  # type: ignore[attr-defined]


async def serve(tokens: int) -> tuple[asyncio.Server, str]:
    """Start it; its base URL."""
    body = stream_bytes(tokens)
    server = await asyncio.get_running_loop().create_server(lambda: Answering(body), "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
