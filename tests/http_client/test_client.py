"""The HTTP client against servers that do what they should, and against those that do not."""

from __future__ import annotations

import asyncio
import base64
import gzip
import re
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from guards.stage import certificate
from hermes.core.limits import INFLATED_PIECE_BYTES_MAX
from hermes.core.threads import Threads
from hermes.http_client import client as module
from hermes.http_client import exchange
from hermes.http_client.client import HttpClient
from hermes.http_client.exchange import (
    Answer,
    ConnectFailed,
    RequestTimeout,
    StaleStream,
    StreamBroken,
    Timeouts,
    TlsFailed,
    TransportError,
)
from support.cutting import any_cut, cut
from support.ports import refusing_port
from support.waiting import DEADLINE_S, idle, until

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
PATIENT = Timeouts(DEADLINE_S, DEADLINE_S)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CLOSE, RESET = object(), object()
pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> Any:
    """The product runs on either loop."""
    return request.param()


@pytest.fixture
def one_tls_context() -> None:
    """Certificates are verified here."""


# --- the other side --------------------------------------------------------------------------------------------------


class RawServer:
    """A server, and what has happened at it."""

    def __init__(self) -> None:
        self.port = 0
        self.connections = self.closed = 0
        self.requests: list[bytes] = []
        self.faults: list[BaseException] = []
        self.writers: list[Writer] = []

    def url(self, path: str = "/", host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def read_request(self, reader: Reader) -> bytes:
        """One request."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        self.requests.append(head + (await reader.readexactly(int(length[1])) if length else b""))
        return self.requests[-1]


Part = Callable[[RawServer, Reader, Writer], Awaitable[None]]


@asynccontextmanager
async def serving(part: Part, *, unix: Path | None = None, **how: Any) -> AsyncIterator[RawServer]:
    """A server that plays a part with everyone who comes."""
    raw_server, tasks = RawServer(), set[asyncio.Task[Any]]()

    async def play(reader: Reader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        raw_server.writers.append(writer)
        raw_server.connections += 1
        try:
            await part(raw_server, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        except Exception as fault:
            raw_server.faults.append(fault)
        finally:
            raw_server.closed += 1
            writer.close()

    if unix is not None:
        server = await asyncio.start_unix_server(play, unix)
    else:
        server = await asyncio.start_server(play, how.pop("host", "127.0.0.1"), how.pop("port", 0), **how)
        raw_server.port = server.sockets[0].getsockname()[1]
    try:
        yield raw_server
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in raw_server.writers:
            writer.transport.abort()
        await idle()
        assert raw_server.faults == []


async def perform(writer: Writer, pieces: Any) -> bool:
    """Write the pieces one by one; returns whether the client is still connected."""
    for piece in pieces if isinstance(pieces, list | tuple) else [pieces]:
        if isinstance(piece, asyncio.Event):
            await piece.wait()
        elif piece is RESET:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
            return False
        elif piece is CLOSE:
            writer.close()
            return False
        else:
            writer.write(piece)
            await writer.drain()
            for _ in range(3):
                await asyncio.sleep(0)
    return True


def answers(*scripts: Any) -> Part:
    """To every request the next of these, to all further ones the last."""

    async def part(raw_server: RawServer, reader: Reader, writer: Writer) -> None:
        while True:
            await raw_server.read_request(reader)
            if not await perform(writer, scripts[min(len(raw_server.requests), len(scripts)) - 1]):
                return

    return part


async def silent(raw_server: RawServer, reader: Reader, writer: Writer) -> None:
    """Hear a request, say nothing, and wait for the other to leave."""
    await raw_server.read_request(reader)
    while await reader.read(65536):
        pass


class Pending:
    """A lookup whose answer the test gives."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.abandoned = False

    def abandon(self) -> None:
        self.abandoned = True


class Names:
    """Names with scripted addresses; what is asked of the system otherwise goes to a thread."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.known: dict[str, list[str] | Exception | None] = {}
        self.lookups: list[str] = []
        self.pending: list[Pending] = []

    def __call__(self, function: Callable[[], Any]) -> Any:
        assert isinstance(function, partial)
        if function.func is not socket.getaddrinfo:
            return self._threads.submit(function)
        host, port = function.args[:2]
        self.lookups.append(host)
        if host not in self.known:
            return self._threads.submit(function)
        self.pending.append(Pending())
        if self.known[host] is not None:
            self.tell(host, port)
        return self.pending[-1]

    def tell(self, host: str, port: int) -> None:
        addresses, future = self.known[host], self.pending[-1].future
        if isinstance(addresses, Exception):
            future.set_exception(addresses)
        else:
            future.set_result([(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, port)) for at in addresses or ()])


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads(2)
    yield threads
    threads.close()


@pytest.fixture
async def names(threads: Threads) -> Names:
    return Names(threads)


@pytest.fixture
async def http(names: Names) -> AsyncIterator[HttpClient]:
    client = HttpClient(names)
    yield client
    await client.close()


@pytest.fixture(autouse=True)
async def nothing_stays() -> AsyncIterator[None]:
    """No test leaves a task behind."""
    before = asyncio.all_tasks()
    yield
    await until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})  # type: ignore[operator]


async def ask(
    http: HttpClient, url: str, method: str = "GET", body: bytes = b"", limits: Timeouts = PATIENT, **headers: str
) -> tuple[int, bytes]:
    """Status and body."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.send(method, url, sent, body, limits) as answer:
        return answer.status, await answer.body()


async def failure(http: HttpClient, url: str, **more: Any) -> tuple[type[TransportError], bool]:
    """The kind of failure, and whether an answer had begun."""
    with pytest.raises(TransportError) as raised:
        await ask(http, url, **more)
    return type(raised.value), raised.value.answered


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n", more: bytes = b"") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n" + more + b"\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + end


def sized(body: bytes, *more: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *more, b"", body])


def fields(request: bytes) -> list[tuple[str, str]]:
    lines = request.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
    return [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]


# --- what is sent ----------------------------------------------------------------------------------------------------


async def test_plain_get(http: HttpClient) -> None:
    async with serving(answers(OK)) as raw_server:
        assert await ask(http, raw_server.url("/v1/models?a=b&c=%20d")) == (200, b"ok")
    assert raw_server.requests[0].startswith(b"GET /v1/models?a=b&c=%20d HTTP/1.1\r\n")
    sent = dict(fields(raw_server.requests[0]))
    assert sent == {
        "host": f"127.0.0.1:{raw_server.port}",
        "user-agent": "hermes",
        "accept": "*/*",
        "accept-encoding": "gzip, deflate",
    }


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
@pytest.mark.parametrize("body", [b"", b"{}", b"\0" * 300_000], ids=["empty", "short", "long"])
async def test_request_body_has_content_length(http: HttpClient, method: str, body: bytes) -> None:
    async with serving(answers(OK)) as raw_server:
        assert await ask(http, raw_server.url(), method, body) == (200, b"ok")
    head, _, sent = raw_server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(method.encode() + b" / HTTP/1.1\r\n") and sent == body
    assert [value for name, value in fields(head) if name == "content-length"] == [str(len(body))]


async def test_given_headers_override_defaults(http: HttpClient) -> None:
    async with serving(answers(OK)) as raw_server:
        headers = {"user-agent": "other", "ACCEPT": "text/plain", "X-Name": "größe"}
        async with http.send("GET", raw_server.url(), headers, b"", PATIENT):
            pass
    sent = fields(raw_server.requests[0])
    assert [pair for pair in sent if pair[0] != "host"] == [
        ("accept-encoding", "gzip, deflate"),
        ("user-agent", "other"),
        ("accept", "text/plain"),
        ("x-name", "größe"),
    ]


async def test_framing_headers_cannot_be_overridden(http: HttpClient) -> None:
    headers = {"content-LENGTH": "7", "Transfer-Encoding": "chunked", "CONNECTION": "close", "host": "evil.test"}
    async with (
        serving(answers(OK)) as raw_server,
        http.send("POST", raw_server.url(), headers, b"body", PATIENT) as answer,
    ):
        assert answer.status == 200
    sent = fields(raw_server.requests[0])
    assert [pair for pair in sent if pair[0] in {name.lower() for name in headers}] == [
        ("host", f"127.0.0.1:{raw_server.port}"),
        ("content-length", "4"),
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [(f"X{mark}Y", "a") for mark in "\r\n\0: \t"]
    + [("X", f"a{mark}b") for mark in ("\r", "\n", "\0", "\r\nHost: evil", "\ud800")]
    + [("", "a"), (" X", "a"), ("Größe", "a")],
)
async def test_header_injection_is_rejected_unsent(http: HttpClient, name: str, value: str) -> None:
    async with serving(answers(OK)) as raw_server:
        with pytest.raises(ConnectFailed, match="header"):
            async with http.send("GET", raw_server.url(), {name: value}, b"", PATIENT):
                pass
    assert raw_server.connections == 0


@pytest.mark.parametrize(
    ("url", "line", "host"),
    [
        ("http://here.test:{}", "/", "here.test:{}"),
        ("http://here.test:{}?q", "/?q", "here.test:{}"),
        ("http://here.test:{}/a#part", "/a", "here.test:{}"),
        ("http://here.test:{}/ü/a b?ö=ß d", "/%C3%BC/a%20b?%C3%B6=%C3%9F+d", "here.test:{}"),
        ("http://here.test:{}/%2F%3f?a=%26", "/%2F%3F?a=%26", "here.test:{}"),
        ("http://HERE.test:{}/", "/", "here.test:{}"),
        ("http://bücher.test:{}/", "/", "xn--bcher-kva.test:{}"),
        ("http://here.test:{}/a\r\nX: y", "/aX:%20y", "here.test:{}"),
    ],
)
async def test_urls_are_quoted(http: HttpClient, names: Names, url: str, line: str, host: str) -> None:
    names.known = {"here.test": ["127.0.0.1"], "xn--bcher-kva.test": ["127.0.0.1"]}
    async with serving(answers(OK)) as raw_server:
        assert await ask(http, url.format(raw_server.port)) == (200, b"ok")
    assert raw_server.requests[0].startswith(
        f"GET {line} HTTP/1.1\r\nHost: {host.format(raw_server.port)}\r\n".encode()
    )


def test_default_port_is_omitted_from_host() -> None:
    hosts = ["http://a.test:80/", "https://a.test:443/", "http://a.test:443/", "https://[::1]/", "http://[::1]:81/"]
    assert [module._endpoint(url).authority for url in hosts] == ["a.test", "a.test", "a.test:443", "[::1]", "[::1]:81"]


@pytest.mark.parametrize("url", ["", "/path", "ftp://a.test/", "http://", "http://a.test:99999/", "http://[::1/"])
async def test_invalid_url_is_rejected(http: HttpClient, url: str) -> None:
    assert await failure(http, url) == (ConnectFailed, False)


async def test_user_info_in_url_becomes_basic_auth(http: HttpClient) -> None:
    async with serving(answers(OK)) as raw_server:
        await ask(http, raw_server.url(host="me:p%40ss@127.0.0.1"))
        await ask(http, raw_server.url(host="me:p%40ss@127.0.0.1"), Authorization="Bearer key")
    sent_headers = [
        [v for n, v in fields(request) if n in ("host", "authorization")] for request in raw_server.requests
    ]
    here = f"127.0.0.1:{raw_server.port}"
    assert sent_headers == [[here, "Basic " + base64.b64encode(b"me:p@ss").decode()], [here, "Bearer key"]]


# --- bodies ----------------------------------------------------------------------------------------------------------

DEFLATED = zlib.compress(b"text" * 50)
BARE = zlib.compressobj(wbits=-zlib.MAX_WBITS)
BARE_DEFLATED = BARE.compress(b"text" * 50) + BARE.flush()
GZIPPED = gzip.compress(b"text" * 50, mtime=0)
HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("chunks", "body"),
    [
        (sized(b"hello"), b"hello"),
        (sized(b""), b""),
        (chunked(b"he", b"llo"), b"hello"),
        (chunked(), b""),
        (chunked(b"hello", end=b"0\r\nX-Sum: 5\r\nContent-Type: text/event-stream\r\n\r\n"), b"hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: CHUNKED\r\n\r\n5;a=b\r\nhello\r\n0\r\n\r\n", b"hello"),
        ([HEAD + b"\r\n", b"hel", b"lo", CLOSE], b"hello"),
        ([HEAD + b"Transfer-Encoding: identity\r\n\r\nhello", CLOSE], b"hello"),
        ([b"HTTP/1.0 200 OK\r\n\r\nhello", CLOSE], b"hello"),
        ([HEAD + b"\r\n", CLOSE], b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + sized(b"hello"), b"hello"),
        (b"HTTP/1.1 103 Early Hints\r\nContent-Length: 9\r\nLink: x\r\n\r\n" * 3 + sized(b"hello"), b"hello"),
        (b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5  \r\nhello\r\n0\r\n\r\n", b"hello"),
        (b"HTTP/1.1 200 OK\r\nX: a\x01\r\n b\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (sized(GZIPPED, b"Content-Encoding: gzip"), b"text" * 50),
        (sized(GZIPPED + GZIPPED, b"Content-Encoding: X-GZIP"), b"text" * 100),
        (sized(DEFLATED, b"Content-Encoding: deflate"), b"text" * 50),
        (sized(BARE_DEFLATED, b"Content-Encoding: deflate"), b"text" * 50),
        (sized(b"hello", b"Content-Encoding: identity"), b"hello"),
        (sized(b"", b"Content-Encoding: gzip"), b""),
        ([HEAD + b"Content-Encoding: gzip\r\n\r\n" + GZIPPED, CLOSE], b"text" * 50),
    ],
)
async def test_body_is_read_for_any_chunking(http: HttpClient, chunks: Any, body: bytes) -> None:
    first, *rest = chunks if isinstance(chunks, list) else [chunks]
    ways = [cut(first, [place]) for place in range(1, len(first))] + [[first], cut(first, range(1, len(first)))]
    async with serving(answers(*[[*way, *rest] for way in ways])) as raw_server:
        for way in ways:
            async with http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer:
                assert (answer.status, await answer.body()) == (200, body), way
                assert not answer.is_stream and "X-Sum" not in answer.headers and "Link" not in answer.headers
                assert await answer.read() == b""
    assert raw_server.connections == (len(ways) if rest else 1)


@pytest.mark.parametrize(
    ("method", "raw_response"),
    [
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\nContent-Encoding: gzip\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nContent-Encoding: gzip\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\n\r\n"),
    ],
)
async def test_response_without_body_ends_at_once(http: HttpClient, method: str, raw_response: bytes) -> None:
    async with serving(answers(raw_response)) as raw_server:
        for _ in range(2):
            assert await ask(http, raw_server.url(), method) == (int(raw_response[9:12]), b"")


@pytest.mark.parametrize(
    ("kind", "stream", "json"),
    [
        (b"text/event-stream", True, False),
        (b"Text/Event-Stream ; charset=utf-8", True, False),
        (b"application/json;charset=utf-8", False, True),
        (b"text/plain", False, False),
    ],
)
async def test_response_headers_and_content_type(http: HttpClient, kind: bytes, stream: bool, json: bool) -> None:
    async with (
        serving(answers(sized(b"", b"Content-Type: " + kind, b"Set-Cookie: a", b"set-cookie: b"))) as raw_server,
        http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer,
    ):
        assert (answer.is_stream, answer.is_json) == (stream, json)
        assert answer.headers["CONTENT-TYPE"] == kind.decode()
        assert answer.headers.getall("Set-Cookie") == ["a", "b"]


@pytest.mark.parametrize(
    ("raw_response", "before"),
    [
        (sized(b"no gzip at all", b"Content-Encoding: gzip"), b""),
        (sized(GZIPPED[:-1], b"Content-Encoding: gzip"), b"text" * 50),
        (sized(GZIPPED[:-3] + b"abc", b"Content-Encoding: gzip"), None),
        (sized(GZIPPED + b"more", b"Content-Encoding: gzip"), None),
        (sized(DEFLATED[:-1], b"Content-Encoding: deflate"), b"text" * 50),
        (sized(b"hello", b"Content-Encoding: br"), b""),
        (sized(b"hello", b"Content-Encoding: gzip, br"), b""),
    ],
)
async def test_corrupt_compressed_body_is_not_passed_on(
    http: HttpClient, raw_response: bytes, before: bytes | None
) -> None:
    came = b""
    async with (
        serving(answers([raw_response[:-1], raw_response[-1:]])) as raw_server,
        http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer,
    ):
        with pytest.raises(StreamBroken) as raised:
            while data := await answer.read():
                came += data
        assert raised.value.answered
        assert (b"text" * 50).startswith(came) if before is None else came == before
        await until(lambda: raw_server.closed == 1)


async def test_decompression_bomb_is_limited(http: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ANSWER_BYTES_MAX", 100_000)
    bomb = sized(gzip.compress(b"x" * 10_000_000) + gzip.compress(b"y" * 65_536), b"Content-Encoding: gzip")
    async with serving(answers(bomb, bomb)) as raw_server:
        async with http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer:
            came = [piece async for piece in pieces(answer)]
        assert b"".join(came) == b"x" * 10_000_000 + b"y" * 65_536
        assert max(map(len, came)) <= INFLATED_PIECE_BYTES_MAX
        assert await failure(http, raw_server.url()) == (StreamBroken, True)


async def test_response_body_size_is_limited(http: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ANSWER_BYTES_MAX", 10)
    async with serving(answers(sized(b"x" * 10), sized(b"x" * 11))) as raw_server:
        assert await ask(http, raw_server.url()) == (200, b"x" * 10)
        assert await failure(http, raw_server.url()) == (StreamBroken, True)


# --- cuts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [CLOSE, RESET], ids=["close", "reset"])
@pytest.mark.parametrize("raw_response", [chunked(b"he", b"llo"), sized(b"hello")], ids=["chunked", "sized"])
async def test_truncated_response_is_an_error(http: HttpClient, raw_response: bytes, end: object) -> None:
    head = raw_response.index(b"\r\n\r\n") + 4
    expected = [(ConnectFailed, False) if at < head else (StreamBroken, True) for at in range(len(raw_response))]
    async with serving(answers(*[[raw_response[:at], end] for at in range(len(raw_response))])) as raw_server:
        assert [await failure(http, raw_server.url()) for _ in raw_response] == expected


async def test_truncated_response_delivers_received_bytes(http: HttpClient) -> None:
    async with (
        serving(answers([chunked(b"he", b"llo", end=b""), CLOSE])) as raw_server,
        http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer,
    ):
        await until(lambda: raw_server.closed == 1)
        came = b""
        with pytest.raises(StreamBroken):
            while data := await answer.read():
                came += data
        assert came == b"hello"
        with pytest.raises(StreamBroken):
            await answer.read()


@pytest.mark.parametrize("goodbye", [b"", b"SSH-2.0-server\r\n", RESET])
async def test_server_that_does_not_read_fails(http: HttpClient, goodbye: Any) -> None:
    async def part(raw_server: RawServer, reader: Reader, writer: Writer) -> None:
        await perform(writer, [goodbye])

    async with serving(part) as raw_server:
        for _ in range(20):
            assert await failure(http, raw_server.url()) == (ConnectFailed, False)


@pytest.mark.parametrize(
    ("raw_response", "outcome"),
    [
        (b"garbage\r\n\r\n", (ConnectFailed, False)),
        (b"HTTP/2 200 OK\r\n\r\n", (ConnectFailed, False)),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", (ConnectFailed, False)),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", (ConnectFailed, False)),
        (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", (ConnectFailed, False)),
        (b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n\0\0", (ConnectFailed, False)),
        (chunked(end=b"no length\r\n"), (StreamBroken, True)),
        (chunked(b"hello", end=b"5\r\nhello!!"), (StreamBroken, True)),
    ],
)
async def test_non_http_response_fails(http: HttpClient, raw_response: bytes, outcome: Any) -> None:
    async with serving(answers(raw_response)) as raw_server:
        assert await failure(http, raw_server.url()) == outcome
        await until(lambda: raw_server.closed == 1)


@pytest.mark.parametrize(
    "piece",
    [b"X: " + b"x" * 1000 + b"\r\n", b"x" * 1000, b": " + b"x" * 1000, b"X:\r\n\t" + b"\t" * 1000],
    ids=["many", "a name", "a value", "blanks"],
)
@pytest.mark.parametrize("where", [HEAD, b"HTTP/1.1 200 ", chunked(end=b"0\r\nY: 1\r\n"), chunked(end=b"5;")])
async def test_endless_response_head_is_rejected(http: HttpClient, where: bytes, piece: bytes) -> None:
    async def part(raw_server: RawServer, reader: Reader, writer: Writer) -> None:
        await raw_server.read_request(reader)
        writer.write(where)
        for _ in range(10_000):
            writer.write(piece)
            await writer.drain()
        raw_server.faults.append(AssertionError("all of it was taken"))

    async with serving(part) as raw_server:
        has_started = where.startswith(b"HTTP/1.1 200 OK\r\nTransfer")
        assert await failure(http, raw_server.url()) == (
            (StreamBroken, True) if has_started else (ConnectFailed, False)
        )


@pytest.mark.parametrize("more", [0, 100])
async def test_response_head_size_is_limited(http: HttpClient, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    monkeypatch.setattr(exchange, "HEAD_BYTES_MAX", 1000)
    raw_response = sized(b"y" * 5000, b"X: " + b"x" * (900 + more))
    async with serving(answers(raw_response)) as raw_server:
        if more:
            assert await failure(http, raw_server.url()) == (ConnectFailed, False)
        else:
            assert await ask(http, raw_server.url()) == (200, b"y" * 5000)


# --- time ------------------------------------------------------------------------------------------------------------

STALE, SHORT = Timeouts(30, 0.05), Timeouts(0.05, 30)
BEGUN = HEAD + b"Content-Length: 9\r\n\r\n"


@pytest.mark.parametrize(("limits", "kind"), [(STALE, StaleStream), (SHORT, RequestTimeout)])
@pytest.mark.parametrize(
    ("raw_response", "answered"), [(b"", False), (b"HTTP/1.1 2", False), (BEGUN, True), (BEGUN + b"x", True)]
)
async def test_idle_timeout(http: HttpClient, limits: Timeouts, kind: Any, raw_response: bytes, answered: bool) -> None:
    async with serving(answers([raw_response, asyncio.Event()])) as raw_server:
        assert await timeout(http, raw_server.url(), limits, answered) == (kind, answered)


async def timeout(http: HttpClient, url: str, limits: Timeouts, answered: bool) -> tuple[type[TransportError], bool]:
    """The failure of a request. An answer that had not begun in time, as it should have, has more time again."""
    for more in (1, 10, 100):
        outcome = await failure(http, url, limits=Timeouts(limits.total_s * more, limits.stale_s * more))
        if outcome[1] or not answered:
            break
    return outcome


async def test_total_timeout_of_endless_response(http: HttpClient) -> None:
    async def part(raw_server: RawServer, reader: Reader, writer: Writer) -> None:
        await raw_server.read_request(reader)
        writer.write(HEAD + b"\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.005)

    async with serving(part) as raw_server:
        assert await timeout(http, raw_server.url(), Timeouts(0.1, 30), True) == (RequestTimeout, True)


@asynccontextmanager
async def full(address: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """A port whose connections are neither accepted nor refused."""
    with socket.socket() as listening, socket.socket() as sock, socket.socket() as two:
        listening.bind((address, port))
        listening.listen(0)
        for waiting in (sock, two):
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(listening.getsockname())
        yield listening.getsockname()[1]


async def test_refused_connection_names_the_address(http: HttpClient) -> None:
    with refusing_port() as port, pytest.raises(ConnectFailed, match=rf"^127\.0\.0\.1:{port}: Connection refused$"):
        async with http.send("GET", f"http://user:secret@127.0.0.1:{port}/", {}, b"", PATIENT):
            pass


async def test_connect_timeout(http: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async with full() as port:
        url = f"http://127.0.0.1:{port}/"
        assert await failure(http, url, limits=SHORT) == (RequestTimeout, False)
        monkeypatch.setattr(module, "CONNECT_S_MAX", 0.05)
        assert await failure(http, url) == (ConnectFailed, False)
        assert await failure(http, f"https://127.0.0.1:{port}/") == (ConnectFailed, False)


async def test_connect_time_counts_towards_total_timeout(http: HttpClient, names: Names) -> None:
    names.known["slow.test"] = None
    async with serving(silent) as raw_server:
        loop = asyncio.get_running_loop()
        asking = asyncio.create_task(ask(http, raw_server.url(host="slow.test")))
        await until(lambda: names.lookups == ["slow.test"])
        asked_at = loop.time()
        await until(lambda: loop.time() > asked_at + 0.01)
        names.known["slow.test"] = ["127.0.0.1"]
        names.tell("slow.test", raw_server.port)
        await until(lambda: len(raw_server.requests) == 1)
        assert limited(http)._timer.when() < asked_at + 0.005 + PATIENT.total_s
        asking.cancel()
        await asyncio.wait([asking])


def limited(http: HttpClient, limits: Timeouts = PATIENT) -> Answer:
    """The only answer that is waited for, with these limits from now on: to come here may have taken any time."""
    [answer] = [connection.answer for connection in http._connections]
    assert answer is not None
    answer._timer.cancel()
    answer._timeouts = limits
    answer._look()
    return answer


async def pass_silence(answer: Answer) -> None:
    """Wait until the limit of silence was looked at twice, and nothing has come of it."""
    for _ in range(2):
        timer = answer._timer
        await until(lambda timer=timer: answer._timer is not timer or answer._error)  # type: ignore[misc]
    assert answer._error is None


MUCH = 8 * 1024 * 1024


async def test_unread_response_applies_backpressure(http: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ANSWER_AHEAD_BYTES_MAX", 1000)
    sent = 0

    async def part(raw_server: RawServer, reader: Reader, writer: Writer) -> None:
        nonlocal sent
        await raw_server.read_request(reader)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % (MUCH * 4))
        while sent < MUCH * 4:
            writer.write(b"%08d" % sent * 8192)
            sent += 65536
            await writer.drain()
        await reader.read()

    async with serving(part) as raw_server, http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer:
        await until(lambda: answer._paused)
        await pass_silence(limited(http, Timeouts(30, 0.05)))
        assert sent < MUCH * 4
        limited(http)
        came = b"".join([piece async for piece in pieces(answer)])
    assert came == b"".join(b"%08d" % at * 8192 for at in range(0, MUCH * 4, 65536))


async def pieces(answer: Answer) -> AsyncIterator[bytes]:
    while data := await answer.read():
        yield data


async def test_idle_timeout_excludes_backpressure(http: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ANSWER_AHEAD_BYTES_MAX", 10)
    async with (
        serving(answers([chunked(b"x" * 100, end=b""), asyncio.Event()])) as raw_server,
        http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer,
    ):
        await until(lambda: answer._paused)
        await pass_silence(limited(http, Timeouts(30, 0.3)))
        started_at = asyncio.get_running_loop().time()
        assert await answer.read() == b"x" * 100
        with pytest.raises(StaleStream):
            await answer.read()
        assert asyncio.get_running_loop().time() - started_at > 0.29


async def test_slow_request_upload_is_not_idle(http: HttpClient) -> None:
    may = asyncio.Event()

    async def part(raw_server: RawServer, reader: Reader, writer: Writer) -> None:
        await may.wait()
        await raw_server.read_request(reader)
        writer.write(OK)
        await reader.read()

    async with serving(part) as raw_server:
        asking = asyncio.create_task(ask(http, raw_server.url(), "POST", b"x" * MUCH * 4))
        await until(lambda: any(connection.answer for connection in http._connections))
        await pass_silence(limited(http, Timeouts(30, 0.05)))
        limited(http)
        may.set()
        assert await asking == (200, b"ok")


# --- the pool --------------------------------------------------------------------------------------------------------


async def test_connection_is_reused(http: HttpClient) -> None:
    async with serving(
        answers(OK, chunked(b"ok"), b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok")
    ) as raw_server:
        for _ in range(6):
            assert await ask(http, raw_server.url(), "POST", b"body") == (200, b"ok")
        assert (raw_server.connections, raw_server.closed) == (1, 0)
        await http.close()
        await until(lambda: raw_server.closed == 1)


@pytest.mark.parametrize(
    "raw_response",
    [
        sized(b"ok", b"Connection: close"),
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 200 OK\r\nContent-Le",
        OK + sized(b"evil"),
        OK + b"garbage",
        [OK, b"HTTP/1.1 408 Request Timeout\r\n\r\n"],
    ],
    ids=["close", "old", "half an answer", "another answer", "garbage", "later"],
)
async def test_unusable_connection_is_not_reused(http: HttpClient, raw_response: Any) -> None:
    async with serving(answers(raw_response)) as raw_server:
        for turn in range(1, 4):
            assert await ask(http, raw_server.url()) == (200, b"ok")
            await until(lambda turn=turn: raw_server.closed == turn)  # type: ignore[misc]
        assert raw_server.connections == 3


async def test_unread_response_closes_its_connection(http: HttpClient) -> None:
    async with serving(answers([chunked(b"hello", end=b""), asyncio.Event()])) as raw_server:
        for turn in (1, 2):
            async with http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer:
                assert await answer.read() == b"hello"
            await until(lambda: raw_server.connections == turn)  # noqa: B023


async def test_fully_received_response_keeps_its_connection(http: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ANSWER_AHEAD_BYTES_MAX", 10)
    async with serving(answers(sized(b"x" * 100))) as raw_server:
        for _ in range(3):
            async with http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer:
                await until(lambda: answer._over)
        assert await ask(http, raw_server.url()) == (200, b"x" * 100)
        assert raw_server.connections == 1


async def test_response_before_request_is_sent_closes_connection(http: HttpClient) -> None:
    async def part(raw_server: RawServer, reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await perform(writer, OK)
        await asyncio.Event().wait()

    async with serving(part) as raw_server:
        for turn in (1, 2):
            assert await ask(http, raw_server.url(), "POST", b"x" * MUCH * 4, PATIENT) == (200, b"ok")
            assert raw_server.connections == turn


async def test_connection_closed_by_server_is_not_reused(http: HttpClient) -> None:
    async with serving(answers([OK, CLOSE])) as raw_server:
        for turn in (1, 2, 3):
            assert await ask(http, raw_server.url(), "POST", b"body") == (200, b"ok")
            await until(lambda: not http._idle[next(iter(http._idle))])
            assert raw_server.connections == turn


@pytest.mark.parametrize(("method", "outcome"), [("GET", (200, b"ok")), ("POST", ConnectFailed)])
async def test_reused_connection_that_breaks_is_retried_if_safe(http: HttpClient, method: str, outcome: Any) -> None:
    async with serving(answers(OK, [CLOSE], OK)) as raw_server:
        assert await ask(http, raw_server.url()) == (200, b"ok")
        if outcome is ConnectFailed:  # it may have been heard
            assert await failure(http, raw_server.url(), method=method) == (ConnectFailed, False)
        else:
            assert await ask(http, raw_server.url(), method) == outcome
        assert raw_server.connections == (1 if outcome is ConnectFailed else 2)


async def test_idle_connection_is_closed_after_keep_alive(http: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_ALIVE_S", 0.02)
    async with serving(answers(OK)) as raw_server:
        assert await ask(http, raw_server.url()) == (200, b"ok")
        await until(lambda: raw_server.closed == 1)


async def test_connection_in_use_is_not_closed_by_keep_alive(http: HttpClient) -> None:
    may = asyncio.Event()
    async with serving(answers(OK, [BEGUN, may, b"123456789"])) as raw_server:
        assert await ask(http, raw_server.url()) == (200, b"ok")
        [[connection]] = http._idle.values()
        timer = connection.idle_timer
        async with http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer:
            assert timer is not None and timer.cancelled() and connection.idle_timer is None
            may.set()
            assert await answer.body() == b"123456789"
        assert raw_server.connections == 1


async def test_concurrent_requests_use_two_connections(http: HttpClient) -> None:
    async def part(raw_server: RawServer, reader: Reader, writer: Writer) -> None:
        while True:
            await raw_server.read_request(reader)
            await until(lambda: len(raw_server.requests) >= 2)
            writer.write(OK)

    async with serving(part) as raw_server:
        results = await asyncio.gather(*[ask(http, raw_server.url()) for _ in range(2)])
        assert results == [(200, b"ok")] * 2 and raw_server.connections == 2
        assert await ask(http, raw_server.url()) == (200, b"ok")
        assert (raw_server.connections, raw_server.closed) == (2, 0)
        await http.close()
        await until(lambda: raw_server.closed == 2)


async def test_connections_are_not_shared_between_origins(http: HttpClient, names: Names) -> None:
    names.known = {"one.test": ["127.0.0.1"], "two.test": ["127.0.0.1"]}
    async with serving(answers(OK)) as raw_server:
        for host in ("one.test", "two.test", "one.test"):
            assert await ask(http, raw_server.url(host=host)) == (200, b"ok")
        assert raw_server.connections == 2


@pytest.mark.parametrize("raw_response", [b"", BEGUN, BEGUN + b"x"], ids=["no answer", "a head", "a body"])
async def test_cancelled_request_leaves_nothing(http: HttpClient, raw_response: bytes) -> None:
    async def part(raw_server: RawServer, reader: Reader, writer: Writer) -> None:
        await raw_server.read_request(reader)
        await perform(writer, raw_response)
        assert await reader.read() == b""

    async with serving(part) as raw_server:
        asking = asyncio.create_task(ask(http, raw_server.url()))
        await until(lambda: len(raw_server.requests) == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: raw_server.closed == 1)


async def test_cancelled_connect_leaves_nothing(http: HttpClient) -> None:
    async def part(raw_server: RawServer, reader: Reader, writer: Writer) -> None:
        raw_server.requests.append(await reader.read(65536))  # the hello of TLS, that is not answered
        with suppress(ConnectionError):
            assert await reader.read() == b""

    async with full() as port, serving(part) as raw_server:
        for url in (f"http://127.0.0.1:{port}/", raw_server.url(scheme="https")):
            asking = asyncio.create_task(ask(http, url))
            if "https" in url:
                await until(lambda: len(raw_server.requests) == 1)
            else:
                await idle()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        await until(lambda: raw_server.closed == 1)


# --- proxies ---------------------------------------------------------------------------------------------------------


async def relay(reader: Reader, writer: Writer) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


def tunnel(to: Callable[[], int]) -> Part:
    """A proxy that lets everybody through."""

    async def part(raw_server: RawServer, reader: Reader, writer: Writer) -> None:
        await raw_server.read_request(reader)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", to())
        raw_server.writers.append(far_writer)
        writer.write(b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n")
        await asyncio.gather(relay(reader, far_writer), relay(far_reader, writer))

    return part


@pytest.fixture
async def through(names: Names) -> AsyncIterator[Callable[..., HttpClient]]:
    """Clients that go through a proxy."""
    clients: list[HttpClient] = []

    def make(proxy: str, **more: Any) -> HttpClient:
        clients.append(HttpClient(names, proxy=proxy, **more))
        return clients[-1]

    yield make
    for http in clients:
        await http.close()


MakeHttp = Callable[..., HttpClient]
KNOWN = "Basic " + base64.b64encode(b"me:p@ss").decode()


async def test_plain_request_through_proxy(through: MakeHttp, names: Names) -> None:
    async with serving(answers(OK)) as proxy:
        http = through(proxy.url(host="me:p%40ss@127.0.0.1"))
        for _ in range(2):
            assert await ask(http, "http://far.test/a?b=ü") == (200, b"ok")
        assert await ask(http, "http://far.test:81/") == (200, b"ok")
        assert await ask(through(proxy.url()), "http://far.test/") == (200, b"ok")
    lines = [request.partition(b"\r\n")[0] for request in proxy.requests]
    first = b"GET http://far.test/a?b=%C3%BC HTTP/1.1"
    assert lines == [first, first, b"GET http://far.test:81/ HTTP/1.1", b"GET http://far.test/ HTTP/1.1"]
    known = [dict(fields(request)).get("proxy-authorization") for request in proxy.requests]
    assert known == [KNOWN, KNOWN, KNOWN, None]
    assert [dict(fields(request))["host"] for request in proxy.requests[1:3]] == ["far.test", "far.test:81"]
    assert proxy.connections == 3 and names.lookups == []


@pytest.mark.parametrize(
    "raw_response",
    [
        b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 2\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\n\r\nspeaks too soon",
        b"garbage\r\n\r\n",
        b"x" * 70_000,
        [CLOSE],
        [b"HTTP/1.1 200", CLOSE],
        [RESET],
        [b"HTTP/1.1 200 OK\r\n\r\n", CLOSE],
        [b"HTTP/1.1 200 OK\r\n\r\n", RESET],
    ],
)
async def test_failed_proxy_tunnel(through: MakeHttp, names: Names, raw_response: Any) -> None:
    async with serving(answers(raw_response)) as proxy:
        assert await failure(through(proxy.url()), "https://far.test/") == (ConnectFailed, False)
        await until(lambda: proxy.closed == 1)
    assert proxy.requests[0].startswith(b"CONNECT far.test:443 HTTP/1.1\r\nHost: far.test:443\r\n")
    assert names.lookups == []


async def test_proxy_rejection_is_reported(through: MakeHttp) -> None:
    async with serving(answers(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")) as proxy:
        with pytest.raises(ConnectFailed, match="407 Proxy Authentication Required"):
            await ask(through(proxy.url()), "https://far.test/")


async def test_proxy_tunnel_timeout(through: MakeHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_S_MAX", 0.5)
    async with serving(silent) as proxy:
        assert await failure(through(proxy.url()), "https://far.test/") == (ConnectFailed, False)
        await until(lambda: proxy.closed == proxy.connections)  # which it need not have come to


async def test_request_through_proxy_tunnel(through: MakeHttp, names: Names, tmp_path: Path) -> None:
    tls, bundle = certificate(tmp_path, "far.test")
    async with serving(answers(OK), ssl=tls) as far, serving(tunnel(lambda: far.port)) as proxy:
        http = through(proxy.url(host="me:p%40ss@127.0.0.1"), ca_bundle=bundle)
        for _ in range(2):
            assert await ask(http, f"https://far.test:{far.port}/a") == (200, b"ok")
        assert await failure(http, f"https://other.test:{far.port}/") == (TlsFailed, False)
        assert await failure(through(proxy.url()), f"https://far.test:{far.port}/") == (TlsFailed, False)
        await until(lambda: proxy.closed == 2)
    assert far.requests[0].startswith(b"GET /a HTTP/1.1\r\n") and len(far.requests) == 2
    assert [dict(fields(request)).get("proxy-authorization") for request in proxy.requests] == [KNOWN, KNOWN, None]
    assert "proxy-authorization" not in dict(fields(far.requests[0]))
    assert names.lookups == []


async def test_proxy_over_tls(through: MakeHttp, names: Names, tmp_path: Path) -> None:
    names.known["near.test"] = ["127.0.0.1"]
    tls, bundle = certificate(tmp_path, "near.test")
    async with serving(answers(OK), ssl=tls) as proxy:
        http = through(proxy.url(host="near.test", scheme="https"), ca_bundle=bundle)
        assert await ask(http, "http://far.test/") == (200, b"ok")
    assert proxy.requests[0].startswith(b"GET http://far.test/ HTTP/1.1\r\n")
    async with serving(answers(OK), ssl=tls) as far, serving(tunnel(lambda: far.port), ssl=tls) as proxy:
        http = through(proxy.url(host="near.test", scheme="https"), ca_bundle=bundle)
        assert await ask(http, f"https://near.test:{far.port}/") == (200, b"ok")
        await http.close()
        await until(lambda: proxy.closed == 1)


# --- TLS -------------------------------------------------------------------------------------------------------------


async def test_certificate_is_verified(names: Names, http: HttpClient, tmp_path: Path) -> None:
    names.known = {"here.test": ["127.0.0.1"], "here.test.": ["127.0.0.1"], "there.test": ["127.0.0.1"]}
    tls, bundle = certificate(tmp_path, "here.test")
    knowing = HttpClient(names, ca_bundle=bundle)
    async with serving(answers(OK), ssl=tls) as raw_server:
        for host in ("here.test", "here.test", "here.test."):
            assert await ask(knowing, raw_server.url(host=host, scheme="https")) == (200, b"ok")
        assert await failure(knowing, raw_server.url(host="there.test", scheme="https")) == (TlsFailed, False)
        assert await failure(knowing, raw_server.url(scheme="https")) == (TlsFailed, False)
        assert await failure(http, raw_server.url(host="here.test", scheme="https")) == (TlsFailed, False)
        assert len(raw_server.requests) == 3
        await knowing.close()


async def test_server_without_tls_fails(http: HttpClient) -> None:
    async def part(raw_server: RawServer, reader: Reader, writer: Writer) -> None:
        await reader.read(100)
        await perform(writer, [b"HTTP/1.1 400 Bad Request\r\n\r\n"])

    async with serving(part) as raw_server:
        assert await failure(http, raw_server.url(scheme="https")) == (ConnectFailed, False)


async def test_missing_ca_bundle_fails(names: Names, tmp_path: Path) -> None:
    http = HttpClient(names, ca_bundle=str(tmp_path / "none.pem"))
    assert await failure(http, "https://127.0.0.1/") == (ConnectFailed, False)


async def test_large_bodies_over_tls(names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ANSWER_AHEAD_BYTES_MAX", 1000)
    names.known["here.test"] = ["127.0.0.1"]
    tls, bundle = certificate(tmp_path, "here.test")
    body = b"".join(b"%08d" % at for at in range(MUCH // 32))
    http = HttpClient(names, ca_bundle=bundle)
    async with serving(answers(sized(body)), ssl=tls) as raw_server:
        for _ in range(2):
            assert await ask(http, raw_server.url(host="here.test", scheme="https"), "POST", body) == (200, body)
        assert raw_server.connections == 1 and raw_server.requests[0].endswith(body)
        await http.close()


# --- names -----------------------------------------------------------------------------------------------------------


async def test_refusing_address_falls_back_to_next(http: HttpClient, names: Names) -> None:
    names.known["many.test"] = ["127.0.0.2", "127.0.0.3", "127.0.0.1"]
    async with serving(answers(OK)) as raw_server:
        assert await ask(http, raw_server.url(host="many.test")) == (200, b"ok")
    with refusing_port() as port:
        await http.close()
        http._resolved.clear()
        assert await failure(http, f"http://many.test:{port}/") == (ConnectFailed, False)


async def test_silent_address_is_raced_with_next(http: HttpClient, names: Names) -> None:
    names.known["many.test"] = ["127.0.0.2", "127.0.0.1"]
    async with serving(answers(OK)) as raw_server, full("127.0.0.2", raw_server.port):
        assert await ask(http, raw_server.url(host="many.test")) == (200, b"ok")


async def test_concurrent_dns_lookups_are_shared(
    http: HttpClient, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    names.known["slow.test"] = None
    async with serving(answers(OK)) as raw_server:
        asking = [asyncio.create_task(ask(http, raw_server.url(host="slow.test"))) for _ in range(4)]
        await until(lambda: [waiting for _, waiting in http._lookups.values()] == [4])
        asking[0].cancel()
        await asyncio.wait([asking[0]])
        names.known["slow.test"] = ["127.0.0.1"]
        names.tell("slow.test", raw_server.port)
        assert await asyncio.gather(*asking[1:]) == [(200, b"ok")] * 3
        await http.close()
        assert await ask(http, raw_server.url(host="slow.test")) == (200, b"ok")
        assert names.lookups == ["slow.test"] and not names.pending[0].abandoned and http._lookups == {}
        monkeypatch.setattr(module, "NAMES_KEPT_S", -1)
        http._resolved.clear()
        await http.close()
        assert await ask(http, raw_server.url(host="slow.test")) == (200, b"ok")
        await http.close()
        assert await ask(http, raw_server.url(host="slow.test")) == (200, b"ok")
        assert len(names.lookups) == 3


async def test_dns_lookup_without_waiters_is_abandoned(http: HttpClient, names: Names) -> None:
    names.known["slow.test"] = None
    asking = [asyncio.create_task(ask(http, "http://slow.test/")) for _ in range(2)]
    await until(lambda: [waiting for _, waiting in http._lookups.values()] == [2])
    for task, abandoned in zip(asking, (False, True), strict=True):
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and names.pending[0].abandoned == abandoned
    assert http._lookups == {} and names.pending[0].future.cancelled()
    names.known["slow.test"] = OSError("unknown")
    assert await failure(http, "http://slow.test/") == (ConnectFailed, False)
    assert len(names.lookups) == 2


async def test_dns_lookup_timeout(http: HttpClient, names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_S_MAX", 0.05)
    names.known["slow.test"] = None
    assert await failure(http, "http://slow.test/") == (ConnectFailed, False)
    assert names.pending[0].abandoned


@pytest.mark.parametrize(
    "lookup_error", [[], socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")]
)
async def test_failed_dns_lookup_is_not_cached(http: HttpClient, names: Names, lookup_error: Any) -> None:
    names.known["none.test"] = lookup_error
    for _ in range(2):
        assert await failure(http, "http://none.test/") == (ConnectFailed, False)
    assert http._lookups == {}


async def test_dns_is_not_asked_for_addresses(http: HttpClient, names: Names) -> None:
    async with serving(answers(OK)) as raw_server:
        for host in ("127.0.0.1", "localhost", "127.1"):
            assert await ask(http, raw_server.url(host=host)) == (200, b"ok")
    assert names.lookups == ["localhost", "127.1"]


# --- reading without waking ------------------------------------------------------------------------------------------


async def test_sink_receives_data_while_reader_waits(http: HttpClient) -> None:
    may = asyncio.Event()
    took: list[bytes] = []

    def sink(data: bytes) -> bool:
        took.append(data)
        return data != b"no"

    async with (
        serving(
            answers([chunked(b"before", end=b""), may, *(b"2\r\n%b\r\n" % x for x in (b"aa", b"bb", b"no"))])
        ) as raw_server,
        http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer,
    ):
        answer.sink = sink
        await until(lambda: bool(answer._chunks))
        assert (await answer.read(), took) == (b"before", [])
        may.set()
        assert (await answer.read(), took) == (b"no", [b"aa", b"bb", b"no"])


async def test_failure_is_raised_to_reader(http: HttpClient) -> None:
    async with (
        serving(answers([chunked(b"a", end=b""), asyncio.Event()])) as raw_server,
        http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer,
    ):
        assert await answer.read() == b"a"

        def sink(data: bytes) -> bool:
            raise AssertionError

        answer.sink = sink
        reading = asyncio.create_task(answer.read())
        await idle()
        answer.fail(LookupError("from elsewhere"))
        with pytest.raises(LookupError, match="from elsewhere"):
            await reading
        with pytest.raises(LookupError):
            await answer.read()


async def test_sink_can_fail_response(http: HttpClient) -> None:
    may = asyncio.Event()
    async with (
        serving(answers([chunked(end=b""), may, b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"])) as raw_server,
        http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer,
    ):
        took: list[bytes] = []

        def sink(data: bytes) -> bool:
            took.append(data)
            answer.fail(LookupError("no more"))
            return True

        answer.sink = sink
        asyncio.get_running_loop().call_soon(may.set)
        with pytest.raises(LookupError):
            await answer.read()
            assert took == [b"a"]
        await until(lambda: raw_server.closed == 1)


async def test_cancelled_reader_can_read_again(http: HttpClient) -> None:
    may = asyncio.Event()
    async with (
        serving(answers([chunked(end=b""), may, b"2\r\nab\r\n0\r\n\r\n"])) as raw_server,
        http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer,
    ):
        reading = asyncio.create_task(answer.read())
        await idle()
        reading.cancel()
        await asyncio.wait([reading])
        may.set()
        assert (await answer.read(), await answer.read()) == (b"ab", b"")


@given(st.data())
@settings(max_examples=60)
def test_sink_and_reader_get_everything_once_in_order_property(data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.binary(min_size=1, max_size=5), max_size=8))
    script = any_cut(data, chunked(*parts))
    takes = data.draw(st.lists(st.booleans(), max_size=12))
    pauses = data.draw(st.lists(st.integers(0, 6), max_size=12))
    came: list[bytes] = []

    def sink(piece: bytes) -> bool:
        if is_taken := bool(takes and takes.pop()):
            came.append(piece)
        return is_taken

    async def main() -> None:
        http = HttpClient()
        async with serving(answers(script)) as raw_server:
            async with http.send("GET", raw_server.url(), {}, b"", PATIENT) as answer:
                answer.sink = sink
                async for piece in pieces(answer):
                    came.append(piece)
                    for _ in range(pauses.pop() if pauses else 0):
                        await asyncio.sleep(0)
            await http.close()

    asyncio.run(main())
    assert b"".join(came) == b"".join(parts)


# --- sockets of this machine -----------------------------------------------------------------------------------------


async def test_unix_socket(tmp_path: Path) -> None:
    http = HttpClient(unix=str(tmp_path / "s"))
    assert await failure(http, "http://local/health") == (ConnectFailed, False)
    async with serving(answers(OK, OK, [OK[:-1], CLOSE]), unix=tmp_path / "s") as raw_server:
        for _ in range(2):
            assert await ask(http, "http://local/health", "POST", b"{}") == (200, b"ok")
        assert await failure(http, "http://local/health") == (StreamBroken, True)
        assert raw_server.connections == 1
    assert raw_server.requests[0].startswith(b"POST /health HTTP/1.1\r\nHost: local\r\n")
    await http.close()
