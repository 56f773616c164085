"""The proxy: turns, dead replicas, half-close, back-pressure, and streams that pass untouched."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
import uvloop
from aiohttp import web

from hermes.cluster import proxy as proxies
from hermes.cluster.proxy import Address, Proxy
from support.ports import refusing_port, reserved_port
from support.waiting import DEADLINE_S, until

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """The tests run on both kinds of loop: transports differ in what they forgive."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


@asynccontextmanager
async def replica(handler: Handler, port: int = 0) -> AsyncIterator[Address]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await handler(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", port)
    try:
        yield server.sockets[0].getsockname()[:2]
    finally:
        server.close()


@asynccontextmanager
async def proxied(*targets: Address) -> AsyncIterator[tuple[Proxy, int]]:
    proxy, sock = Proxy(targets), socket.create_server(("127.0.0.1", 0))
    await proxy.listen([sock])
    try:
        yield proxy, sock.getsockname()[1]
    finally:
        await proxy.close()


def greeter(name: bytes) -> Handler:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(name)
        await writer.drain()

    return greet


async def read_all(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await reader.read()
    finally:
        writer.close()


async def test_connections_go_to_replicas_in_turn() -> None:
    async with replica(greeter(b"a")) as a, replica(greeter(b"b")) as b, proxied(a, b) as (proxy, port):
        answers = [await read_all(port) for _ in range(6)]
        assert sorted(answers) == [b"a"] * 3 + [b"b"] * 3
        assert answers[:2] * 3 == answers
        await until(lambda: proxy.connections == 0)


async def test_replica_that_refuses_is_passed_over_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "SKIP_S", 0.05)
    with reserved_port() as dead:
        async with replica(greeter(b"a")) as a, proxied(a, ("127.0.0.1", dead)) as (_, port):
            assert {await read_all(port) for _ in range(4)} == {b"a"}
            async with replica(greeter(b"b"), dead):
                await until(lambda: read_all(port), lambda answer: answer == b"b")


async def test_replica_that_has_refused_is_not_tried_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxies.SKIP_S == 1.0
    monkeypatch.setattr(proxies, "SKIP_S", DEADLINE_S)
    tried = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tried.append(1)

    with reserved_port() as dead:
        async with replica(greeter(b"a")) as a, proxied(a, ("127.0.0.1", dead)) as (_, port):
            await read_all(port)
            await read_all(port)  # one of the two was refused
            async with replica(note, dead):
                assert {await read_all(port) for _ in range(4)} == {b"a"}
    assert tried == []


async def test_without_a_replica_the_connection_is_closed() -> None:
    with refusing_port() as dead:
        async with proxied(("127.0.0.1", dead)) as (_, port), proxied() as (_, empty):
            assert await read_all(port) == b""
            assert await read_all(empty) == b""


async def test_targets_can_be_replaced() -> None:
    async with replica(greeter(b"a")) as a, replica(greeter(b"b")) as b, proxied(a) as (proxy, port):
        assert await read_all(port) == b"a"
        proxy.set_targets([b])
        assert {await read_all(port) for _ in range(3)} == {b"b"}


async def test_client_that_ends_its_side_still_gets_its_answer() -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%d" % len(await reader.read()))
        await writer.drain()

    async with replica(count) as a, proxied(a) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes(3_000_000))
        writer.write_eof()
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b"3000000"
        writer.close()


async def test_replica_that_ends_its_side_still_reads() -> None:
    total: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def answer_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"early")
        writer.write_eof()
        total.set_result(len(await reader.read()))

    async with replica(answer_first) as a, proxied(a) as (proxy, port), asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b"early"
        writer.write(bytes(1_000_000))
        writer.write_eof()
        assert await total == 1_000_000
        await until(lambda: proxy.connections == 0)
        writer.close()


async def test_connection_of_a_replica_that_dies_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "HALF_CLOSE_S_MAX", 0.1)
    for abort in (True, False):
        dies = asyncio.Event()

        async def wait(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            dies: asyncio.Event = dies,
            abort: bool = abort,
        ) -> None:
            writer.write(b"begin")
            await dies.wait()
            if abort:
                writer.transport.abort()

        async with replica(wait) as a, proxied(a) as (proxy, port), asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.readexactly(5) == b"begin"
            dies.set()
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            # Also where the client does not end its side.
            await until(lambda proxy=proxy: proxy.connections == 0)
            writer.close()


async def test_slow_reader_makes_the_sender_wait() -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while sent < 200_000_000:
            writer.write(bytes(100_000))
            await writer.drain()
            sent += 100_000

    async with replica(flood) as a, proxied(a) as (proxy, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)

        def waits() -> bool:
            return any(client.other and not client.other.transport.is_reading() for client in proxy._clients)

        await until(waits)
        held_at = sent
        assert held_at < 50_000_000
        # What was held back comes as soon as it is read: more of it than there is room for on the way.
        async with asyncio.timeout(DEADLINE_S):
            while sent < held_at + 50_000_000:
                assert await reader.read(65_536)
        writer.transport.abort()


async def test_too_many_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "CONNECTIONS_MAX", 1)

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"a")
        await reader.read()

    async with replica(wait) as a, proxied(a) as (_, port), asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.readexactly(1) == b"a"
        with contextlib.suppress(ConnectionError):
            assert await read_all(port) == b""
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def web_replica(routes: list[web.RouteDef]) -> AsyncIterator[Address]:
    application = web.Application()
    application.add_routes(routes)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][:2]
    finally:
        await runner.cleanup()


async def test_events_of_a_stream_pass_one_by_one() -> None:
    reached = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(20):
            await response.write(b"data: %d\n\n" % number)
            # The next event waits until the client has this one: nothing may be held back on the way.
            await asyncio.wait_for(reached.wait(), DEADLINE_S)
            reached.clear()
        return response

    async with (
        web_replica([web.get("/", stream)]) as a,
        proxied(a) as (_, port),
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/") as response,
    ):
        events = []
        async for line in response.content:
            if line.strip():
                events.append(int(line.removeprefix(b"data: ")))
                reached.set()
        assert events == list(range(20))


async def test_replica_learns_that_a_client_has_left() -> None:
    disconnected = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begin\n")
        with contextlib.suppress(ConnectionError):
            await until(lambda: request.transport is None or request.transport.is_closing())
        disconnected.set()
        return response

    async with web_replica([web.get("/", stream)]) as a, proxied(a) as (_, port), asyncio.timeout(DEADLINE_S):
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/") as response:
            assert await response.content.readline() == b"begin\n"
        await disconnected.wait()


async def test_websocket_passes_untouched() -> None:
    async def echo(request: web.Request) -> web.WebSocketResponse:
        websocket = web.WebSocketResponse()
        await websocket.prepare(request)
        async for message in websocket:
            await websocket.send_str(message.data.upper())
        return websocket

    async with (
        web_replica([web.get("/", echo)]) as a,
        proxied(a) as (_, port),
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{port}/") as websocket,
    ):
        for text in ("hello", "x" * 300_000):
            await websocket.send_str(text)
            assert await websocket.receive_str(timeout=DEADLINE_S) == text.upper()
