"""Live events to readers in this process: each has its own bounded queue, whichever bus it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from hermes.bus.memory import MemoryBus, Subscription
from hermes.bus.nats_bus import NatsBus
from hermes.bus.nats_connection import NatsConnection
from hermes.core.events import Event
from support.waiting import DEADLINE_S, idle

QUEUE_EVENTS_MAX, QUEUE_BYTES_MAX = 1024, 1024 * 1024


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest, shared_nats: str, namespace: str) -> AsyncIterator[MemoryBus]:
    if request.param == "memory":
        yield MemoryBus()
        return
    connection = NatsConnection(shared_nats, namespace)
    await connection.connect()
    bus = NatsBus(connection)
    bus.start()
    yield bus
    await bus.stop()
    await connection.close()


def delta(seq: int, text: str = "x") -> Event:
    return Event("run_1", "text.delta", 1, {"text": text}, seq)


async def seqs(reader: Subscription) -> list[int]:
    return [event.seq for event in await asyncio.wait_for(reader.take(), DEADLINE_S)]


async def test_subscribers_get_events_from_subscription_on(bus: MemoryBus) -> None:
    bus.publish("run_1", delta(1))
    early, other = bus.subscribe("run_1"), bus.subscribe("run_2")
    bus.publish("run_1", delta(2))
    late = bus.subscribe("run_1")
    bus.publish("run_1", delta(3))
    assert (await seqs(early), await seqs(late)) == ([2, 3], [3])
    waiting = asyncio.ensure_future(seqs(other))
    await idle()
    other.wake()
    assert await waiting == []


async def test_waiting_subscriber_is_woken_by_event(bus: MemoryBus) -> None:
    reader = bus.subscribe("run_1")
    waiting = asyncio.ensure_future(seqs(reader))
    await idle()
    bus.publish("run_1", delta(1))
    bus.publish("run_1", delta(2))
    assert await waiting == [1, 2]


async def test_waiting_subscriber_can_be_woken_without_event() -> None:
    reader = Subscription()
    waiting = asyncio.ensure_future(reader.take())
    await idle()
    reader.wake()
    assert await asyncio.wait_for(waiting, DEADLINE_S) == []


async def test_cancelled_subscriber_can_wait_again() -> None:
    reader = Subscription()
    waiting = asyncio.ensure_future(reader.take())
    await idle()
    waiting.cancel()
    await asyncio.wait([waiting])
    reader.put(delta(1))
    assert await seqs(reader) == [1]


async def test_full_queue_is_emptied_and_marked_overflowed(bus: MemoryBus) -> None:
    slow, quick = bus.subscribe("run_1"), bus.subscribe("run_1")
    taken_seqs: list[int] = []
    for seq in range(1, QUEUE_EVENTS_MAX + 2):
        bus.publish("run_1", delta(seq))
        taken_seqs += await seqs(quick)
    assert (slow.overflowed, await seqs(slow)) == (True, [])
    assert taken_seqs == list(range(1, QUEUE_EVENTS_MAX + 2)) and not quick.overflowed


async def test_queue_holds_maximum_number_of_events() -> None:
    reader = Subscription()
    for seq in range(1, QUEUE_EVENTS_MAX + 1):
        reader.put(delta(seq))
    assert not reader.overflowed and len(await seqs(reader)) == QUEUE_EVENTS_MAX


async def test_queue_is_limited_by_bytes() -> None:
    reader = Subscription()
    reader.put(delta(1, "x" * (QUEUE_BYTES_MAX // 2)))
    assert not reader.overflowed
    reader.put(delta(2, "x" * (QUEUE_BYTES_MAX // 2)))
    assert reader.overflowed


async def test_overflowed_queue_takes_nothing_until_reset() -> None:
    reader = Subscription()
    for seq in range(QUEUE_EVENTS_MAX + 5):
        reader.put(delta(seq))
    assert await seqs(reader) == []
    reader.restart(keep=True)
    assert reader.join(4999)
    reader.put(delta(5000))
    assert await seqs(reader) == [5000]


async def test_left_out_number_sends_reader_to_store(bus: MemoryBus) -> None:
    reader = bus.subscribe("run_1")
    assert reader.join(2)
    for seq in (2, 3, 3, 4):  # what the reader has is dropped
        bus.publish("run_1", delta(seq))
    assert await seqs(reader) == [3, 4]
    bus.publish("run_1", delta(6))
    bus.publish("run_1", delta(7))
    assert (reader.overflowed, await seqs(reader)) == (True, [])
    reader.restart(keep=False)
    assert reader.join(7)
    bus.publish("run_1", delta(8))
    assert await seqs(reader) == [8]


async def test_event_during_store_read_reveals_a_gap(bus: MemoryBus) -> None:
    reader = bus.subscribe("run_1")
    bus.publish("run_1", delta(23))
    assert not reader.join(1)
    reader.restart(keep=True)
    assert not reader.join(21) and reader.join(22)
    assert await seqs(reader) == [23]
    bus.publish("run_1", delta(24))
    reader.restart(keep=False)  # it is in the store by now
    assert reader.join(24)
    bus.publish("run_1", delta(24))
    bus.publish("run_1", delta(25))
    assert await seqs(reader) == [25]


async def test_has_subscribers_follows_subscriptions(bus: MemoryBus) -> None:
    assert not bus.has_subscribers("run_1")
    first, two = bus.subscribe("run_1"), bus.subscribe("run_1")
    bus.unsubscribe("run_1", first)
    assert bus.has_subscribers("run_1")
    bus.unsubscribe("run_1", two)
    bus.unsubscribe("run_1", two)
    bus.unsubscribe("run_2", two)
    assert not bus.has_subscribers("run_1")


async def test_sink_receives_events_while_subscriber_is_idle(bus: MemoryBus) -> None:
    taken_seqs: list[int] = []

    def sink(event: Event) -> bool:
        if event.seq != 4:
            taken_seqs.append(event.seq)
        return event.seq != 4

    reader = bus.subscribe("run_1", sink)
    bus.publish("run_1", delta(1))
    assert (await seqs(reader), taken_seqs) == ([1], [])
    waiting = asyncio.ensure_future(reader.take())
    await idle()
    for seq in (2, 3, 4, 5):
        bus.publish("run_1", delta(seq))
    assert ([event.seq for event in await waiting], taken_seqs, reader.delivered_seq) == ([4, 5], [2, 3], 3)


async def test_sink_receives_nothing_behind_a_gap(bus: MemoryBus) -> None:
    seqs: list[int] = []
    reader = bus.subscribe("run_1", lambda event: seqs.append(event.seq) is None)
    waiting = asyncio.ensure_future(reader.take())
    await idle()
    reader.overflow()
    bus.publish("run_1", delta(1))
    assert (await waiting, seqs, reader.delivered_seq, reader.overflowed) == ([], [], 0, True)
