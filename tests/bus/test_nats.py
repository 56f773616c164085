"""NATS between replicas: connection errors are reported; messages arrive once, or are detected as missing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.subscription import Subscription

from hermes.bus import frames, nats_bus, nats_peers
from hermes.bus.nats_bus import NatsBus, decode_batch, encode_batches
from hermes.bus.nats_client import DirectClient
from hermes.bus.nats_connection import BusError, NatsConnection, is_nats, namespace_of
from hermes.bus.nats_members import Members
from hermes.bus.nats_peers import NatsPeers, NatsPeerServer
from hermes.bus.nats_queue import NatsQueue
from hermes.bus.peers import PeerGone, name_of
from hermes.core.errors import ConfigError, HermesError
from hermes.core.events import Event
from hermes.core.processes import this_process
from support.nats_server import NatsServer, nats_server
from support.ports import refusing_port, reserved_port
from support.waiting import DEADLINE_S, idle, until

RUN = "run_1"


def delta(seq: int, text: str = "x") -> Event:
    data = {"message_id": "m", "offset": seq - 1, "text": text}
    return Event(RUN, "text.delta", 1, data, seq, round(time.time(), 3))


class ReplicaBus:
    """One replica's connection and bus."""

    def __init__(self, url: str, namespace: str) -> None:
        self.connection = NatsConnection(url, namespace)
        self.bus = NatsBus(self.connection)
        self.members = Members(self.connection)
        self.peers = NatsPeers(self.connection, self.members)

    async def open(self) -> ReplicaBus:
        await self.connection.connect()
        self.bus.start()
        return self

    async def close(self) -> None:
        await self.members.close()
        await self.bus.stop()
        await self.connection.close()


async def stored(side: ReplicaBus, expected: list[int]) -> None:
    """Wait until the stream has these events, which it gets a moment after their readers."""

    async def seqs() -> list[int]:
        return [event.seq for event in await side.bus.recent(RUN, 0)]

    await until(seqs, lambda seqs: seqs == expected)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow NATS answers in time."""
    monkeypatch.setattr("hermes.bus.nats_connection.NATS_SYNC_S_MAX", DEADLINE_S)
    monkeypatch.setattr(nats_peers, "PEER_ANSWER_S_MAX", DEADLINE_S)


@pytest.fixture
async def buses(shared_nats: str, namespace: str) -> AsyncIterator[tuple[ReplicaBus, ReplicaBus]]:
    first, other = [await ReplicaBus(shared_nats, namespace).open() for _ in range(2)]
    yield first, other
    await first.close()
    await other.close()


# --- the connection ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["", "redis://x", "nats:", "nats://", "nats://h:x", "http://h:4222", "memory:x", "nats://a,b"]
)
def test_wrong_bus_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"bus\.url") as raised:
        is_nats(url)
    assert raised.value.exit_code == 78 and raised.value.hint


def test_bus_urls() -> None:
    assert not is_nats("memory:")
    assert all(map(is_nats, ("nats://h", "nats://u:p@h:4222", "tls://h:1", "nats://a:1, nats://b:2")))


def test_namespace_is_that_of_profile() -> None:
    assert (namespace_of("default", "default"), namespace_of("team", "work")) == ("default", "team-work")
    with pytest.raises(ConfigError):
        namespace_of("a.b", "default")


async def refusal(url: str, queue_copies: int = 1) -> HermesError:
    connection = NatsConnection(url, "t", queue_copies)
    try:
        await connection.connect()
    except HermesError as error:
        assert connection.client is None
        return error
    await connection.close()
    raise AssertionError("it was connected")


async def test_unreachable_nats_at_start() -> None:
    with refusing_port() as port:
        error = await refusal(f"nats://user:hunter2@127.0.0.1:{port}")
    assert isinstance(error, BusError) and error.exit_code == 69
    assert "out of reach" in str(error) and "hunter2" not in str(error) and error.hint


async def test_nats_without_jetstream(tmp_path: Path) -> None:
    with nats_server(tmp_path / "n", jetstream=False) as server:
        error = await refusal(server.url)
    assert isinstance(error, ConfigError) and "JetStream" in str(error) and "nats-server -js" in error.hint


async def test_refused_credentials(tmp_path: Path) -> None:
    with nats_server(tmp_path / "n", "--user", "u", "--pass", "hunter2") as server:
        error = await refusal(server.url.replace("nats://", "nats://u:wrong-word@"))
        assert isinstance(error, ConfigError) and "credentials" in str(error) and "wrong-word" not in str(error)
        connection = NatsConnection(server.url.replace("nats://", "nats://u:hunter2@"), "t")
        await connection.connect()
        await connection.check()
        assert "hunter2" not in connection.shown_url
        await connection.close()


async def test_user_without_rights_to_jetstream(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text('authorization { users [ { user: u, password: p, permissions: { publish: "hermes.>" } } ] }')
    with nats_server(tmp_path / "n", "-c", str(config)) as server:
        error = await refusal(server.url.replace("nats://", "nats://u:p@"))
    assert isinstance(error, ConfigError) and "does not let this user" in str(error) and "$JS.API" in error.hint


async def test_more_copies_of_the_queue_than_servers(own_nats: NatsServer) -> None:
    error = await refusal(own_nats.url, 3)
    assert isinstance(error, ConfigError) and "HERMES_RUNS_t" in str(error) and "bus.queue_copies" in error.hint


async def test_queue_goes_on_without_the_server_that_led_it(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        urls = [f"nats://127.0.0.1:{stack.enter_context(reserved_port())}" for _ in range(3)]
        options = [("--cluster_name", "c", "--cluster", url, "--routes", ",".join(urls)) for url in urls]
        servers = [
            stack.enter_context(nats_server(tmp_path / f"n{at}", *message)) for at, message in enumerate(options)
        ]
        connection = NatsConnection(",".join(server.url for server in servers), "t", 3)

        async def is_connected() -> bool:
            with contextlib.suppress(HermesError):  # the servers have not found each other yet
                await connection.connect()
            return connection.connected

        await until(is_connected)
        queue = NatsQueue(connection)
        assert await queue.put("first")
        info = await connection.js.stream_info(connection.runs_stream)
        assert info.config.num_replicas == 3 and info.cluster is not None
        next(server for server in servers if server.name == info.cluster.leader).stop()

        async def is_accepted() -> bool:
            return await queue.put("second")

        await until(is_accepted)
        deliveries: list[object] = []

        async def are_delivered() -> bool:
            if (delivery := await queue.take(1.0)) is not None:
                deliveries.append(delivery)
            return len(deliveries) == 2

        await until(are_delivered)
        await connection.close()


@pytest.mark.parametrize(
    ("version", "kind", "message"), [("2.10.0", BusError, "out of reach"), ("2.9.25", ConfigError, "too old")]
)
async def test_nats_that_stops_to_answer_during_start_or_is_too_old(
    monkeypatch: pytest.MonkeyPatch, version: str, kind: type[HermesError], message: str
) -> None:
    monkeypatch.setattr("hermes.bus.nats_connection.NATS_API_S_MAX", 0.05)
    about: dict[str, object] = {"server_id": "x", "version": version, "headers": True, "max_payload": 1_000_000}

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO " + json.dumps(about).encode() + b"\r\n")
        await reader.readuntil(b"PING\r\n")
        writer.write(b"PONG\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        error = await refusal(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert type(error) is kind and message in str(error) and error.hint
    assert error.exit_code == (69 if kind is BusError else 78)


async def test_replica_starts_with_nats_that_does_not_answer_for_a_while(
    own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is connected, it goes on by itself."""
    monkeypatch.setattr("hermes.bus.nats_connection.NATS_SYNC_S_MAX", 0.05)
    first, other = [await ReplicaBus(own_nats.url, "t").open() for _ in range(2)]
    first.members._holder, other.members._holder = "elsewhere:1:1.00", "elsewhere:2:2.00"
    await other.members.start()
    server = NatsPeerServer(first.connection, {}, {})
    own_nats.pause()
    await first.members.start()
    await server.start()
    own_nats.go_on()
    await until(lambda: first.members.names() and other.members.names())
    await server.close()
    for side in (first, other):
        await side.close()


async def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hermes.bus.nats_client", raising=False)
    monkeypatch.setitem(sys.modules, "nats.aio.client", None)
    error = await refusal("nats://127.0.0.1:4222")
    assert isinstance(error, ConfigError) and error.hint == "hermes install nats"


async def test_stream_of_other_owner_is_rejected(own_nats: NatsServer) -> None:
    connection = NatsConnection(own_nats.url, "t")
    await connection.connect()
    await connection.js.delete_stream(connection.runs_stream)
    await connection.js.add_stream(name=connection.runs_stream, subjects=["orders"])
    await connection.close()
    assert "not one of Hermes" in str(await refusal(own_nats.url))


async def test_reconnect_recreates_streams(own_nats: NatsServer) -> None:
    side = await ReplicaBus(own_nats.url, "t").open()
    changes: list[bool] = []
    side.connection.changes.append(lambda: changes.append(side.connection.connected))
    own_nats.stop(forget=True)
    await until(lambda: changes == [False])
    with pytest.raises(BusError, match="out of reach"):
        await side.bus.check()
    own_nats.start()
    await until(lambda: changes == [False, True])
    await side.bus.check()
    assert (await side.connection.js.stream_info(side.connection.events_stream)).state.messages == 0
    await side.close()


# --- live events ------------------------------------------------------------------------------------------------------


async def receive_until(subscription: Any, last: int) -> list[int]:
    """The numbers that come, up to this one."""
    seqs: list[int] = []
    async with asyncio.timeout(DEADLINE_S):
        while last not in seqs:
            seqs += [event.seq for event in await subscription.take()]
    return seqs


async def test_events_reach_reader_of_other_replica(buses: tuple[ReplicaBus, ReplicaBus]) -> None:
    first, other = buses
    reader = other.bus.subscribe(RUN)
    await other.bus.watch(RUN, reader)
    assert reader.join(0)
    sent = [delta(seq, text) for seq, text in enumerate(("a", "ä", "half \ud800", "", "z"), start=1)]
    for event in sent:
        first.bus.publish(RUN, event)
    events: list[Event] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(events) < len(sent):
            events += await reader.take()
    assert events == sent


async def test_sink_is_given_events_of_other_replica(buses: tuple[ReplicaBus, ReplicaBus]) -> None:
    first, other = buses
    seqs: list[int] = []

    def sink(event: Event) -> bool:
        seqs.append(event.seq)
        return True

    reader = other.bus.subscribe(RUN, sink)
    await other.bus.watch(RUN, reader)
    assert reader.join(0)
    waiting = asyncio.ensure_future(reader.take())
    await idle()
    for seq in (1, 2, 3):
        first.bus.publish(RUN, delta(seq))
    await until(lambda: seqs == [1, 2, 3])
    assert not waiting.done() and reader.delivered_seq == 3
    waiting.cancel()


async def test_readers_of_one_run_share_a_subscription(buses: tuple[ReplicaBus, ReplicaBus]) -> None:
    first, other = buses
    client = other.connection.client
    assert client is not None
    before = len(client._subs)
    readers = [other.bus.subscribe(RUN) for _ in range(3)]
    for reader in readers:
        await other.bus.watch(RUN, reader)
    assert len(client._subs) == before + 1 and all(reader.join(0) for reader in readers)
    first.bus.publish(RUN, delta(1))
    assert [await receive_until(reader, 1) for reader in readers] == [[1]] * 3
    for reader in readers:
        other.bus.unwatch(RUN, reader)
    await until(lambda: len(client._subs) == before)


async def test_missing_events_are_noticed_and_found_in_stream(buses: tuple[ReplicaBus, ReplicaBus]) -> None:
    first, other = buses
    for seq in (1, 2):
        first.bus.publish(RUN, delta(seq))
    assert first.connection.client is not None
    await until(lambda: not first.bus._outgoing)
    await first.connection.sync()
    reader = other.bus.subscribe(RUN)
    await other.bus.watch(RUN, reader)
    first.bus.publish(RUN, delta(3))
    async with asyncio.timeout(DEADLINE_S):
        await reader.wait(DEADLINE_S)
    assert not reader.join(0) and not reader.join(1)
    await stored(other, [1, 2, 3])
    assert [event.seq for event in await other.bus.recent(RUN, 1, time.time() - 60)] == [2, 3]
    assert reader.join(2) and await receive_until(reader, 3) == [3]


async def test_lost_message_makes_reader_catch_up(buses: tuple[ReplicaBus, ReplicaBus]) -> None:
    first, other = buses
    reader = other.bus.subscribe(RUN)
    await other.bus.watch(RUN, reader)
    assert reader.join(0)
    first.bus.publish(RUN, delta(1))
    assert await receive_until(reader, 1) == [1]
    first.bus.publish(RUN, delta(2))
    first.bus._outgoing.clear()
    first.bus.publish(RUN, delta(3))
    await until(lambda: reader.overflowed)
    assert not reader.join(1) and await other.bus.recent(RUN, 1) == []
    reader.restart(keep=True)
    assert reader.join(3)
    first.bus.publish(RUN, delta(4))
    assert await receive_until(reader, 4) == [4]


async def test_repeated_events_are_dropped(buses: tuple[ReplicaBus, ReplicaBus]) -> None:
    first, other = buses
    reader = other.bus.subscribe(RUN)
    await other.bus.watch(RUN, reader)
    assert reader.join(0) and first.connection.client is not None
    subject = f"{first.connection.prefix}.events.{RUN}"
    for seqs in ((1, 2), (1, 2), (2, 3)):
        [data] = encode_batches([delta(seq) for seq in seqs])
        await first.connection.client.publish(subject, data)
    assert await receive_until(reader, 3) == [1, 2, 3]


@pytest.mark.parametrize(
    "data", [b"", b"x", b"m", b"m\xc1", b"j{", frames.encode(1), frames.encode([1, [["a"]]]), frames.encode([0, []])]
)
async def test_bad_batch_does_not_end_subscription(buses: tuple[ReplicaBus, ReplicaBus], data: bytes) -> None:
    first, other = buses
    reader = other.bus.subscribe(RUN)
    await other.bus.watch(RUN, reader)
    assert reader.join(0) and first.connection.client is not None
    await first.connection.client.publish(f"{first.connection.prefix}.events.{RUN}", data)
    first.bus.publish(RUN, delta(1))
    assert await receive_until(reader, 1) == [1]
    await stored(other, [1])


def test_large_batch_is_split_and_large_event_is_a_reference() -> None:
    events = [delta(1, "a" * 200_000), delta(2, "b" * 200_000), delta(3, "c" * 300_000), delta(4)]
    batches = [decode_batch(data) for data in encode_batches(events)]
    assert [(before, rest if isinstance(rest, int) else [event[0] for event in rest]) for before, rest in batches] == [
        (0, [1]),
        (1, [2]),
        (2, 3),
        (3, [4]),
    ]


async def test_reference_sends_reader_to_store(buses: tuple[ReplicaBus, ReplicaBus]) -> None:
    first, other = buses
    reader = other.bus.subscribe(RUN)
    await other.bus.watch(RUN, reader)
    assert reader.join(0)
    first.bus.publish(RUN, delta(1, "x" * 300_000))
    await until(lambda: reader.overflowed)
    assert not reader.join(0)
    reader.restart(keep=True)
    assert reader.join(1)


async def test_publishing_without_nats_drops_and_wakes_readers(own_nats: NatsServer) -> None:
    first, other = [await ReplicaBus(own_nats.url, "t").open() for _ in range(2)]
    reader, local = other.bus.subscribe(RUN), first.bus.subscribe(RUN)
    await other.bus.watch(RUN, reader)
    assert reader.join(0)
    own_nats.stop(forget=True)
    await until(lambda: not first.connection.connected and reader.overflowed)
    first.bus.publish(RUN, delta(1))
    assert [event.seq for event in await local.take()] == [1]
    await until(lambda: first.bus.dropped == 1)
    assert await other.bus.recent(RUN, 0) == []
    reader.restart(keep=True)
    own_nats.start()
    # Readers must look at the store once more when NATS is back, and its streams too.
    await until(lambda: first.connection.connected and reader.overflowed)
    reader.restart(keep=True)
    first.bus.publish(RUN, delta(2))
    await reader.wait(DEADLINE_S)
    # The stream is empty now, and the event before this one was never sent.
    assert not reader.join(0) and reader.join(1)
    assert await receive_until(reader, 2) == [2]
    await first.close()
    await other.close()


async def test_stalled_nats_bounds_what_waits(own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_bus, "NATS_OUTGOING_EVENTS_MAX", 10)
    side = await ReplicaBus(own_nats.url, "t").open()
    for seq in range(1, 21):
        side.bus.publish(RUN, delta(seq))
    assert side.bus.dropped == 10
    await side.close()


async def test_event_published_here_ends_following(buses: tuple[ReplicaBus, ReplicaBus]) -> None:
    first, other = buses
    reader = other.bus.subscribe(RUN)
    await other.bus.watch(RUN, reader)
    assert reader.join(0)
    other.bus.publish(RUN, delta(4096))
    assert reader.overflowed
    reader.restart(keep=False)
    assert reader.join(4096)
    first.bus.publish(RUN, delta(1))
    await until(lambda: not first.bus._outgoing)
    other.bus.publish(RUN, delta(4097))
    assert await receive_until(reader, 4097) == [4097]


# --- peers ------------------------------------------------------------------------------------------------------------

VALUES = [None, 1, 1.5, "ä", "half \ud800 of a pair", {"a": [1, {"b": None}]}, 1 << 80, "x" * 3_000_000]


class Answering:
    """What a replica answers."""

    def __init__(self, connection: NatsConnection) -> None:
        self.closed = asyncio.Event()
        self.server = NatsPeerServer(connection, {"echo": self.echo, "fail": self.fail}, {"count": self.count})

    async def echo(self, value: Any) -> Any:
        return value if value != "large" else VALUES[-1]

    async def fail(self) -> None:
        raise RuntimeError("no")

    async def count(self, to: int, hang: bool) -> AsyncGenerator[list[Any], None]:
        try:
            for number in range(to):
                yield [number, "x" * 1_000_000]
            if hang:
                await asyncio.Event().wait()
        finally:
            self.closed.set()


@pytest.fixture
async def answering(buses: tuple[ReplicaBus, ReplicaBus]) -> AsyncIterator[Answering]:
    answering = Answering(buses[0].connection)
    await answering.server.start()
    yield answering
    await answering.server.close()


OWN = name_of(this_process())


@pytest.mark.parametrize("at", range(len(VALUES) - 1))
async def test_replica_value_round_trip(buses: tuple[ReplicaBus, ReplicaBus], answering: Answering, at: int) -> None:
    assert await buses[1].peers.ask(OWN, "echo", VALUES[at]) == VALUES[at]


@pytest.mark.parametrize("run_id", ["run.1", "*", ">", "a b", "x\r\nPUB y 0\r\n", "", "ä" * 200])
async def test_any_run_id_is_one_token_of_a_subject(buses: tuple[ReplicaBus, ReplicaBus], run_id: str) -> None:
    first, other = buses
    subject = first.connection.events_subject(run_id)
    assert subject.count(".") == 3 and subject.isascii() and not set(subject) & set("*> \r\n")
    reader, stranger = other.bus.subscribe(run_id), other.bus.subscribe("run_2")
    await other.bus.watch(run_id, reader)
    await other.bus.watch("run_2", stranger)
    assert reader.join(0) and stranger.join(0)
    event = delta(1)
    event.run_id = run_id
    first.bus.publish(run_id, event)
    assert await receive_until(reader, 1) == [1]
    assert not stranger._events


async def test_large_replica_answer_is_sent_in_parts(
    buses: tuple[ReplicaBus, ReplicaBus], answering: Answering
) -> None:
    assert await buses[1].peers.ask(OWN, "echo", "large") == VALUES[-1]


async def test_too_large_question_is_refused(buses: tuple[ReplicaBus, ReplicaBus], answering: Answering) -> None:
    with pytest.raises(PeerGone):
        await buses[1].peers.ask(OWN, "echo", VALUES[-1])


@pytest.mark.parametrize("operation", ["fail", "unknown", "count"])
async def test_failing_replica_operation_raises_peer_gone(
    buses: tuple[ReplicaBus, ReplicaBus], answering: Answering, operation: str
) -> None:
    with pytest.raises(PeerGone):
        await buses[1].peers.ask(OWN, operation)
    assert await buses[1].peers.ask(OWN, "echo", 1) == 1


@pytest.mark.parametrize("name", ["", "*", "peer-*", "a b\r\nPUB x 0"])
async def test_bad_replica_name_is_gone(buses: tuple[ReplicaBus, ReplicaBus], answering: Answering, name: str) -> None:
    with pytest.raises(PeerGone):
        await buses[1].peers.ask(name, "echo", 1)


async def test_unknown_replica_is_gone_at_once(buses: tuple[ReplicaBus, ReplicaBus]) -> None:
    """NATS says that nobody is there, and no answer is waited for."""
    nobody, peers = name_of("nobody:1:2.00"), buses[1].peers
    with pytest.raises(PeerGone, match="NoResponders"):
        await peers.ask(nobody, "echo", 1)
    with pytest.raises(PeerGone, match="NoResponders"):
        await peers._request(nobody, "count", [1, False], "inbox")
    assert [value async for value in peers.follow(nobody, "count", 1, False)] == []


@pytest.mark.parametrize("data", [b"", b"x", b"m\xc1", frames.encode(5), frames.encode(["echo", 5])])
async def test_bad_question_does_not_end_answers(
    buses: tuple[ReplicaBus, ReplicaBus], answering: Answering, data: bytes
) -> None:
    client = buses[1].connection.client
    assert client is not None
    await client.publish(nats_peers._subject(buses[1].connection, OWN), data)
    assert await buses[1].peers.ask(OWN, "echo", 1) == 1


async def test_replica_stream_is_followed_to_end(buses: tuple[ReplicaBus, ReplicaBus], answering: Answering) -> None:
    values = [value async for value in buses[1].peers.follow(OWN, "count", 3, False)]
    assert [number for number, _ in values] == [0, 1, 2] and len(values[0][1]) == 1_000_000


async def test_replica_stream_idle_keepalive(
    buses: tuple[ReplicaBus, ReplicaBus], answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_peers, "PEER_IDLE_S", 0.05)
    assert [value async for value in buses[1].peers.follow(OWN, "count", 0, True)] == [[]]


# --- members ----------------------------------------------------------------------------------------------------------


async def test_members_are_seen_counted_and_leave(
    buses: tuple[ReplicaBus, ReplicaBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = (side.members for side in buses)
    first._holder, other._holder = "elsewhere:1:1.00", "elsewhere:2:2.00"
    lost: list[str] = []
    other.on_gone.append(lost.append)
    await first.start()
    await other.start()
    await until(lambda: first.names() and other.names())
    assert other.names() == [name_of(first._holder)]
    first.put("alice", 2)
    first.put("bob", 1)
    first.put(None, 3)
    await until(lambda: other.others(None) == 3)
    assert (other.others("alice"), other.others("carol")) == (2, 0)
    first.put("alice", 0)
    await until(lambda: other.others(None) == 1)
    await first.close()
    await until(lambda: lost == ["elsewhere:1:1.00"])
    assert other.names() == [] and other.others(None) == 0


async def test_silent_member_is_gone(buses: tuple[ReplicaBus, ReplicaBus], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes.bus.nats_members.REPLICA_GONE_S", 1.0)
    first, other = (side.members for side in buses)
    first._holder = "elsewhere:1:1.00"
    await other.start()
    await first.start()
    await until(lambda: len(other.names()) == 1)
    assert first._beating is not None
    first._beating.cancel()
    await until(lambda: other.names() == [])


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03"])
async def test_bad_sign_of_life_is_ignored(buses: tuple[ReplicaBus, ReplicaBus], data: bytes) -> None:
    first, other = buses
    await other.members.start()
    client = first.connection.client
    assert client is not None
    await client.publish(f"{first.connection.prefix}.alive", data)
    first.members._holder = "elsewhere:1:1.00"
    await first.members.start()
    await until(lambda: len(other.members.names()) == 1)


# --- the queue --------------------------------------------------------------------------------------------------------


async def test_queued_message_is_delivered_once(buses: tuple[ReplicaBus, ReplicaBus]) -> None:
    queues = [NatsQueue(side.connection) for side in buses]
    for number in range(4):
        await queues[0].put(f"run_{number}")
    assert await queues[1].size() == 4
    deliveries = [await queues[number % 2].take(DEADLINE_S) for number in range(4)]
    # One that is delivered again later than this would not be noticed: the test can only pass too easily.
    assert await queues[0].take(0.1) is None
    for delivery in deliveries:
        assert delivery is not None and delivery.count == 1
        await delivery.extend()
        await delivery.ack()

    async def is_empty() -> bool:
        return await queues[0].size() == 0

    await until(is_empty)


async def test_negatively_acknowledged_message_is_redelivered(buses: tuple[ReplicaBus, ReplicaBus]) -> None:
    queue = NatsQueue(buses[0].connection)
    await queue.put("run_1")
    delivery = await queue.take(DEADLINE_S)
    assert delivery is not None
    given_back_at = time.monotonic()
    await delivery.nak(0.2)
    again = await queue.take(DEADLINE_S)
    assert again is not None and again.count == 2 and time.monotonic() - given_back_at > 0.1


async def test_queue_without_nats(own_nats: NatsServer) -> None:
    side = await ReplicaBus(own_nats.url, "t").open()
    queue = NatsQueue(side.connection)
    await queue.put("run_1")
    own_nats.stop(forget=True)
    await until(lambda: not side.connection.connected)
    await queue.put("run_2")
    assert await queue.take(5) is None and await queue.size() is None
    own_nats.start()
    await until(lambda: side.connection.connected)

    async def is_there() -> bool:
        return await queue.size() == 0

    await until(is_there)
    await queue.put("run_3")

    async def is_delivered() -> bool:
        return await queue.take(1) is not None

    await until(is_delivered)
    await side.close()


async def test_live_events_are_received_while_they_are_read(nats_url: str) -> None:
    nats, other = NatsConnection(nats_url, "direct"), NatsConnection(nats_url, "direct")
    await nats.connect()
    await other.connect()
    assert nats.client is not None and other.client is not None
    received: list[bytes] = []
    subscription = await nats.client.subscribe_directly("direct.test", received.append)
    await nats.sync()
    for text in (b"a", b"", b"c"):
        await other.client.publish("direct.test", text)
    await until(lambda: len(received) == 3)
    assert received == [b"a", b"", b"c"]
    # Nothing has gone through the subscription's own queue and task.
    assert subscription.delivered == 0
    await nats.client.unsubscribe_directly(subscription)
    assert not nats.client._receivers
    await nats.close()
    await other.close()


@pytest.mark.parametrize("size", [1, 7, 30, 100_000])
async def test_messages_are_received_however_they_are_cut(size: int) -> None:
    """Those with a receiver and others, in any order, one with a line break in it, one that says where to reply."""
    client, received = DirectClient(), list[tuple[str, bytes]]()

    async def process(subscription: Subscription, data: bytes) -> None:
        received.append((subscription.subject, data))

    client._receivers = {7: lambda data: received.append(("direct", data))}
    client._subs = {8: Subscription(client, 8, subject="other", cb=None)}
    sent = [(7, b"a"), (8, b"b"), (7, b""), (7, b"line\r\nMSG x 7 1\r\nz"), (8, b"c"), (7, b"d" * 50)]
    wire = b"PING\r\n" + b"".join(
        b"MSG some.subject %d %s%d\r\n%s\r\n" % (sid, b"_INBOX.1 " if data == b"" else b"", len(data), data)
        for sid, data in sent
    )
    client._process_ping = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    others = client._subs[8]._pending_queue
    for at in range(0, len(wire), size):
        await client._ps.parse(wire[at : at + size])
        while not others.empty():
            await process(client._subs[8], others.get_nowait().data)
    order = [("direct" if sid == 7 else "other", data) for sid, data in sent]
    if size == 100_000:  # what is not direct waits for its own task
        assert sorted(received) == sorted(order)
    else:
        assert received == order
    assert not client._ps.buf
