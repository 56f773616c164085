"""Clients that cost little: one raw connection each, which counts the tokens that come and when."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bench.provider import TOKEN

MARK = TOKEN.encode()
END = b"0\r\n\r\n"


@dataclass(slots=True)
class Seen:
    """One answer: how many tokens, when the first, the times between them, and how it ended."""

    tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    status: int = 0


class Client(asyncio.Protocol):
    """One connection to a server, used for one request after the other."""

    def __init__(self, keep: bool = False) -> None:
        self._keep = keep
        self.body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def ask(self, request: bytes) -> asyncio.Future[Seen]:
        """Send a request; what came of it."""
        self.seen = Seen()
        self._tail, self._end, self._size, self._chunked = b"", b"", -1, False
        self.body.clear()
        self._done: asyncio.Future[Seen] = asyncio.get_running_loop().create_future()
        self._began = self._last = time.perf_counter()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        seen, now = self.seen, time.perf_counter()
        if self._keep:
            self.body += data
        if not seen.status:
            head, _, data = (self._tail + data).partition(b"\r\n\r\n")
            if not _:
                self._tail = head
                return
            self._tail, seen.status = b"", int(head[9:12])
            lower = head.lower()
            self._chunked = b"transfer-encoding: chunked" in lower
            _, _, length = lower.partition(b"content-length:")
            self._size = int(length.split(b"\r\n")[0]) if length else -1
        if self._size >= 0:
            self._size -= len(data)
        if count := (self._tail + data).count(MARK):
            if not seen.tokens:
                seen.first_s = now - self._began
            else:
                seen.gaps.append(now - self._last)
            self._last = now
            seen.tokens += count
        # The rest of a mark, or of the end, may come in the next packet.
        self._tail, self._end = (self._tail + data)[1 - len(MARK) :], (self._end + data)[-len(END) :]
        over = self._end == END if self._chunked else self._size == 0
        if over and not self._done.done():
            seen.total_s = now - self._began
            self._done.set_result(seen)

    def connection_lost(self, exc: Exception | None) -> None:
        if hasattr(self, "_done") and not self._done.done():
            self._done.set_exception(exc or ConnectionError("The server closed the connection."))

    def close(self) -> None:
        """Leave."""
        self._transport.close()


async def connect(url: str, keep: bool = False) -> Client:
    """A connection to a server."""
    at = urlsplit(url)
    _, client = await asyncio.get_running_loop().create_connection(
        lambda: Client(keep), at.hostname or "", at.port or 80
    )
    return client


def post(path: str, body: Mapping[str, Any]) -> bytes:
    """A request with a body."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def get(path: str) -> bytes:
    """A request without one."""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


_said = itertools.count()


def conversation(say: str) -> dict[str, Any]:
    """The body of a request that brings its messages; no two are alike."""
    return {"model": "bench", "messages": [{"role": "user", "content": f"{say} ({next(_said)})"}]}


def chat(say: str, *, stream: bool = True) -> bytes:
    """A chat request."""
    return post("/v1/chat/completions", {**conversation(say), "stream": stream})
