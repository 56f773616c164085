"""Live events to readers in this process: each has its own bounded queue."""

from __future__ import annotations

import asyncio

import pytest

from hermes.bus.memory import MemoryBus, Subscription
from hermes.core.events import Event

QUEUE_EVENTS_MAX, QUEUE_BYTES_MAX = 1024, 1024 * 1024


def delta(seq: int, text: str = "x") -> Event:
    return Event("run_1", "text.delta", 1, {"text": text}, seq)


async def seqs(reader: Subscription) -> list[int]:
    return [event.seq for event in await asyncio.wait_for(reader.take(), 2)]


async def test_every_reader_gets_every_event_from_its_subscription_on() -> None:
    bus = MemoryBus()
    bus.publish("run_1", delta(1))
    early, other = bus.subscribe("run_1"), bus.subscribe("run_2")
    bus.publish("run_1", delta(2))
    late = bus.subscribe("run_1")
    bus.publish("run_1", delta(3))
    assert (await seqs(early), await seqs(late)) == ([2, 3], [3])
    other.wake()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(other.take(), 0)


async def test_a_waiting_reader_is_woken_by_an_event() -> None:
    bus = MemoryBus()
    reader = bus.subscribe("run_1")
    waiting = asyncio.ensure_future(seqs(reader))
    await asyncio.sleep(0)
    bus.publish("run_1", delta(1))
    bus.publish("run_1", delta(2))
    assert await waiting == [1, 2]


async def test_a_waiting_reader_can_be_woken_without_one() -> None:
    reader = Subscription()
    waiting = asyncio.ensure_future(reader.take())
    await asyncio.sleep(0)
    reader.wake()
    assert await asyncio.wait_for(waiting, 2) == []


async def test_a_reader_that_is_given_up_can_wait_again() -> None:
    reader = Subscription()
    waiting = asyncio.ensure_future(reader.take())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    reader.put(delta(1))
    assert await seqs(reader) == [1]


async def test_a_full_queue_is_emptied_and_says_so() -> None:
    bus = MemoryBus()
    slow, quick = bus.subscribe("run_1"), bus.subscribe("run_1")
    taken: list[int] = []
    for seq in range(1, QUEUE_EVENTS_MAX + 2):
        bus.publish("run_1", delta(seq))
        taken += await seqs(quick)
    assert (slow.overflowed, await seqs(slow)) == (True, [])
    assert taken == list(range(1, QUEUE_EVENTS_MAX + 2)) and not quick.overflowed


async def test_as_many_events_as_fit_are_kept() -> None:
    reader = Subscription()
    for seq in range(1, QUEUE_EVENTS_MAX + 1):
        reader.put(delta(seq))
    assert not reader.overflowed and len(await seqs(reader)) == QUEUE_EVENTS_MAX


async def test_a_queue_is_full_by_bytes_too() -> None:
    reader = Subscription()
    reader.put(delta(1, "x" * (QUEUE_BYTES_MAX // 2)))
    assert not reader.overflowed
    reader.put(delta(2, "x" * (QUEUE_BYTES_MAX // 2)))
    assert reader.overflowed


async def test_after_an_overflow_nothing_is_queued_until_the_reader_has_caught_up() -> None:
    reader = Subscription()
    for seq in range(QUEUE_EVENTS_MAX + 5):
        reader.put(delta(seq))
    assert await seqs(reader) == []
    reader.overflowed = False
    reader.put(delta(5000))
    assert await seqs(reader) == [5000]


def test_a_run_is_watched_while_it_has_readers() -> None:
    bus = MemoryBus()
    assert not bus.has_subscribers("run_1")
    one, two = bus.subscribe("run_1"), bus.subscribe("run_1")
    bus.unsubscribe("run_1", one)
    assert bus.has_subscribers("run_1")
    bus.unsubscribe("run_1", two)
    bus.unsubscribe("run_1", two)
    bus.unsubscribe("run_2", two)
    assert not bus.has_subscribers("run_1")


async def test_a_sink_is_given_what_comes_while_its_reader_waits_for_nothing_else() -> None:
    taken: list[int] = []

    def sink(event: Event) -> bool:
        if event.seq != 4:
            taken.append(event.seq)
        return event.seq != 4

    bus = MemoryBus()
    reader = bus.subscribe("run_1", sink)
    bus.publish("run_1", delta(1))
    assert (await seqs(reader), taken) == ([1], [])
    waiting = asyncio.ensure_future(reader.take())
    await asyncio.sleep(0)
    for seq in (2, 3, 4, 5):
        bus.publish("run_1", delta(seq))
    assert ([event.seq for event in await waiting], taken, reader.delivered_seq) == ([4, 5], [2, 3], 3)
