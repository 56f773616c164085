"""What a provider sends without end, or packs into very little, is cut off; it takes little of the server's memory."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from hermes.core.limits import CHATTER_LINE_BYTES, CHATTER_LINES_MAX, CHATTER_LINES_PER_S, EVENT_BYTES_MAX
from support.gateway import Gateway, serving
from support.model_server import ModelServer, Reply
from support.waiting import idle, until
from tools.commanding import new_mark, running

MB = 1024 * 1024
MEMORY_MB_MAX = 64
FLOOD_BYTES = 100 * MB
# Of a flood: what is read before it is cut off, and what is under way between two processes. Much less is packed.
TAKEN_BYTES_MAX, PACKED_BYTES_MAX = FLOOD_BYTES // 2, 10 * FLOOD_BYTES // 2_000
STREAM, WHOLE = "text/event-stream", "application/json"


def usual() -> Iterator[bytes]:
    text = {"choices": [{"index": 0, "delta": {"content": "Fine."}, "finish_reason": "stop"}]}
    yield b"data: " + json.dumps(text).encode() + b"\n\ndata: [DONE]\n\n"


def repeated(begin: bytes, piece: bytes, size: int = FLOOD_BYTES) -> Iterator[bytes]:
    yield begin
    block = piece * (MB // len(piece))
    for _ in range(size // len(block)):
        yield block


def packed(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """As gzip: a thousandth of it."""
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


CONTENT = b'data: {"choices":[{"index":0,"delta":{"content":"'


def event(repeated: bytes, begin: bytes = CONTENT) -> bytes:
    """An event that is about as large as one may be."""
    return begin + repeated * ((EVENT_BYTES_MAX - 1_000) // len(repeated)) + b'"}}]}\n\n'


TEXT = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"'
STOP = '"finish_reason":"stop"'
LONG_EVENT = "An event is longer than"
# What it sends, of which type and packed how; and what the client is told.
FLOODS: dict[str, tuple[str, bool, Callable[[], Iterator[bytes]], str]] = {
    "a line of an event": (STREAM, False, lambda: repeated(b"data: ", b"x"), LONG_EVENT),
    "many lines of one event": (STREAM, False, lambda: repeated(b"", b"data: x\n"), "nothing of an answer"),
    "a body": (WHOLE, False, lambda: repeated(TEXT, b"x"), "The answer is longer than"),
    "a packed line of an event": (STREAM, True, lambda: repeated(b"data: ", b"x", 10 * FLOOD_BYTES), LONG_EVENT),
    "a packed body": (WHOLE, True, lambda: repeated(TEXT, b"x", 10 * FLOOD_BYTES), "The answer is longer than"),
    "comments": (STREAM, False, lambda: repeated(b"", b": x\n\n"), "nothing of an answer"),
    "empty lines": (STREAM, False, lambda: repeated(b"", b"\n"), "nothing of an answer"),
    "packed empty lines": (STREAM, True, lambda: repeated(b"", b"\n", 10 * FLOOD_BYTES), "nothing of an answer"),
    "events of another kind": (STREAM, False, lambda: repeated(b"", b"data: {}\n\n"), "nothing of an answer"),
    "very many values": (STREAM, False, lambda: iter([event(b"[],", b'data: {"choices":[')]), "fields and items"),
    "very many short texts": (
        STREAM,
        False,
        lambda: iter([event(b'"ab",', b'data: {"choices":[')]),
        "fields and items",
    ),
    "a long text with a wide character": (
        STREAM,
        False,
        lambda: iter([event(b"x", CONTENT + "😀".encode())]),
        "truncated",
    ),
    "a long text of escapes": (STREAM, False, lambda: iter([event(rb"\ud83d\ude00"), *usual()]), STOP),
}


@dataclass
class Provider:
    """Where it listens, and how much of a flood it could send."""

    url: str = ""
    bytes_taken: int = 0


@asynccontextmanager
async def provider(kind: str, is_packed: bool, pieces: Callable[[], Iterator[bytes]]) -> AsyncIterator[Provider]:
    """Answers the first request as usual, and each further one with the flood."""
    provider, request_count = Provider(), 0
    answering: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal request_count
        answering.add(asyncio.current_task())  # type: ignore[arg-type]
        with closing(writer), suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(head.partition("content-length:")[2].split("\r\n")[0] or 0))
            if "/models" in head:
                return
            request_count += 1
            floods = request_count > 1
            encoding = "Content-Encoding: gzip\r\n" if floods and is_packed else ""
            head = (
                f"HTTP/1.1 200 OK\r\nContent-Type: {kind if floods else STREAM}\r\n{encoding}Connection: close\r\n\r\n"
            )
            writer.write(head.encode())
            writer.transport.set_write_buffer_limits(0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
            for piece in (packed(pieces()) if is_packed else pieces()) if floods else usual():
                writer.write(piece)
                await writer.drain()
                provider.bytes_taken += len(piece) if floods else 0

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        provider.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        yield provider
    finally:
        server.close()
        for task in answering:
            task.cancel()
        await asyncio.wait(answering)
        await idle()  # closed connections go with the next turn of the loop


def peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def bytes_written(pid: str) -> int:
    return int(Path(f"/proc/{pid}/io").read_text().partition("wchar:")[2].split()[0])


def command_line(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def ask(gateway: Gateway) -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with gateway.client.post("/v1/chat/completions", json=body) as response:
        return response.status, await response.text()


@pytest.mark.parametrize(
    "flood", [flood if not at % 4 else pytest.param(flood, marks=pytest.mark.long) for at, flood in enumerate(FLOODS)]
)
async def test_provider_flood_is_bounded(tmp_path: Path, flood: str) -> None:
    kind, is_packed, pieces, expected = FLOODS[flood]
    async with provider(kind, is_packed, pieces) as flooding:
        model = {"default": "test-model", "base_url": flooding.url, "api_key": "sk-provider-0123456789abcdef"}
        async with serving(tmp_path / "home", model=model, agent={"api_max_retries": 0}) as gateway:
            pid = gateway.process.pid
            assert (await ask(gateway))[0] == 200
            memory = peak_mb(pid)
            status, body = await ask(gateway)
            assert expected in body, (status, body[:600])
            assert status == (200 if expected in ("truncated", STOP) else 502)
            assert peak_mb(pid) - memory < MEMORY_MB_MAX
            assert flooding.bytes_taken < (PACKED_BYTES_MAX if is_packed else TAKEN_BYTES_MAX)


MCP_SERVER = Path(__file__).parent.parent / "tools" / "mcp_servers" / "rough.py"
SECONDS = 4.0
# How much can be read for one line of a throttle.
LINE_BYTES = {"stderr": CHATTER_LINE_BYTES, "stderr_lines": CHATTER_LINE_BYTES, "stdout_lines": 2, "notifications": 100}


@pytest.mark.parametrize(
    "mode",
    ["stderr_lines", *(pytest.param(m, marks=pytest.mark.long) for m in ("stderr", "stdout_lines", "notifications"))],
)
async def test_mcp_flood_is_bounded(tmp_path: Path, mode: str) -> None:
    pytest.importorskip("mcp")
    peaks = []
    async with ModelServer(handler=lambda _: Reply(text="Fine.")) as model:
        model_settings = {
            "default": "test-model",
            "base_url": f"{model.url}/v1",
            "api_key": "sk-provider-0123456789abcdef",
        }
        for arg in ("plain", mode):
            mark = new_mark()
            server = {"command": sys.executable, "args": [str(MCP_SERVER), arg, mark], "sandbox": False}
            settings = {"mcp_discovery_timeout": 30, "mcp_servers": {"s": server}}
            async with serving(tmp_path / arg, model=model_settings, **settings) as gateway:
                pid = gateway.process.pid
                assert (await ask(gateway))[0] == 200
                assert any(tool["function"]["name"] == "mcp_s_pid" for tool in model.requests[-1].body["tools"])
                if arg != "plain":
                    [flooding] = [pid for pid in running(mark) if "reaper.py" not in command_line(pid)]
                    await until(lambda pid=flooding: bytes_written(pid) > MB // 2)
                    started_at, before = time.monotonic(), bytes_written(flooding)
                    # Without a throttle it could write gigabytes meanwhile; a slow machine only lets it write less.
                    await asyncio.sleep(SECONDS)
                    taken = bytes_written(flooding) - before
                    lines = CHATTER_LINES_MAX + CHATTER_LINES_PER_S * (time.monotonic() - started_at)
                    assert taken < lines * LINE_BYTES[mode] + TAKEN_BYTES_MAX
                assert (await ask(gateway))[0] == 200
                peaks.append(peak_mb(pid))
    assert peaks[1] - peaks[0] < MEMORY_MB_MAX
