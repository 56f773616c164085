"""Live events between replicas: what is published within some milliseconds goes out as one message for each run.

A message is the number before that of its first event and the events; or, instead of an event that is too large, its number,
and readers find it in the store. Nothing waits for NATS: what cannot be sent is dropped, and readers see by the numbers that
something is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from hermes.bus.frames import EncodedEvent, decode_events, encode, encode_events
from hermes.bus.memory import MemoryBus, Subscription
from hermes.bus.nats_connection import NatsConnection
from hermes.core.events import Event
from hermes.core.limits import (
    NATS_API_S_MAX,
    NATS_EVENT_BYTES_MAX,
    NATS_FETCHED_MAX,
    NATS_OUTGOING_EVENTS_MAX,
    NATS_SEND_EVERY_S,
)

log = logging.getLogger(__name__)
_Batch = tuple[int, list[EncodedEvent] | int]
_decoder = msgspec.msgpack.Decoder(_Batch)


def decode_batch(data: bytes) -> _Batch:
    """Raises ValueError for what is no batch."""
    if data[:1] == b"m":
        batch: _Batch = _decoder.decode(memoryview(data)[1:])
    else:
        batch = msgspec.convert(json.loads(data[1:]), _Batch)
    return batch


def encode_batches(events: Sequence[Event]) -> list[bytes]:
    """The messages of a batch, none of them too large."""
    before = events[0].seq - 1
    data = encode((before, encode_events(events)))
    if len(data) <= NATS_EVENT_BYTES_MAX:
        return [data]
    if len(events) == 1:
        return [encode((before, events[0].seq))]
    half = len(events) // 2
    return [*encode_batches(events[:half]), *encode_batches(events[half:])]


class _Feed:
    """The subscription to one run's subject, which all its readers in this process share."""

    def __init__(self, ready: asyncio.Task[Any]) -> None:
        self.ready = ready
        self.readers: list[Subscription] = []


class NatsBus(MemoryBus):
    kind = "nats"
    follows = True

    def __init__(self, connection: NatsConnection) -> None:
        super().__init__()
        self.connection = connection
        connection.changes.append(self.cut)
        self._local = MemoryBus()
        self._local._readers = self._readers
        self._feeds: dict[str, _Feed] = {}
        # Runs of which events were published here, and what is to be sent of them.
        self._published: set[str] = set()
        self._outgoing: dict[str, list[Event]] = {}
        self._outgoing_events = 0
        self.dropped = 0
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sender: asyncio.Task[None] | None = None

    @property
    def local(self) -> MemoryBus:
        return self._local

    @property
    def connected(self) -> bool:
        return self.connection.connected

    async def check(self) -> None:
        await self.connection.check()

    def start(self) -> None:
        self._sender = asyncio.create_task(self._send())

    async def stop(self) -> None:
        """Send what is there, and end."""
        for task in (*self._tasks, *([self._sender] if self._sender is not None else [])):
            task.cancel()
            await asyncio.wait([task])
        self._sender = None
        with contextlib.suppress(Exception):
            async with asyncio.timeout(NATS_API_S_MAX):
                await self._send_batches()

    # --- publishing -----------------------------------------------------------------------------------------------

    def publish(self, run_id: str, event: Event) -> None:
        self._published.add(run_id)
        if readers := self._readers.get(run_id):
            for reader in readers:
                reader.put(event)
        if self._sender is None:
            return
        if self._outgoing_events >= NATS_OUTGOING_EVENTS_MAX:
            self.dropped += 1
            return
        self._outgoing_events += 1
        batch = self._outgoing.get(run_id)
        if batch is None:
            self._outgoing[run_id] = [event]
            self._wake.set()
        else:
            batch.append(event)

    def close(self, run_id: str) -> None:
        super().close(run_id)
        self._published.discard(run_id)

    def release(self, run_id: str) -> None:
        self._published.discard(run_id)
        for reader in self._readers.get(run_id, ()):
            reader.overflow()

    async def _send(self) -> None:
        """At once, but not more often than now and then: what many runs publish is sent, and read, together."""
        loop, sent_at = asyncio.get_running_loop(), 0.0
        while True:
            await self._wake.wait()
            if (wait_s := sent_at + NATS_SEND_EVERY_S - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            sent_at = loop.time()
            try:
                await self._send_batches()
            except Exception as error:  # noqa: BLE001  (readers see by the numbers that something is missing)
                log.warning("live events could not be sent to NATS: %s", type(error).__name__)

    async def _send_batches(self) -> None:
        self._wake.clear()
        outgoing, self._outgoing, count = self._outgoing, {}, self._outgoing_events
        self._outgoing_events = 0
        client = self.connection.client
        if client is None or not client.is_connected:
            self.dropped += count
            return
        for run_id, events in outgoing.items():
            for data in encode_batches(events):
                await client.publish(self.connection.events_subject(run_id), data)

    # --- following ------------------------------------------------------------------------------------------------

    async def watch(self, run_id: str, subscription: Subscription) -> None:
        feed = self._feeds.get(run_id)
        if feed is None:
            feed = self._feeds[run_id] = _Feed(self._spawn(self._subscribe(run_id)))
        feed.readers.append(subscription)
        try:
            await asyncio.wait([feed.ready])
        except BaseException:
            self.unwatch(run_id, subscription)
            raise

    def unwatch(self, run_id: str, subscription: Subscription) -> None:
        feed = self._feeds.get(run_id)
        if feed is None or subscription not in feed.readers:
            return
        feed.readers.remove(subscription)
        if not feed.readers:
            del self._feeds[run_id]
            self._spawn(self._unsubscribe(feed))

    async def _subscribe(self, run_id: str) -> Any:
        client = self.connection.client
        if client is None:
            return None

        try:
            subject = self.connection.events_subject(run_id)
            subscription = await client.subscribe_directly(subject, partial(self._receive, run_id))
        except Exception as error:  # noqa: BLE001  (the reader polls the store meanwhile)
            log.debug("NATS: %s", type(error).__name__)
            return None
        await self.connection.try_sync()
        return subscription

    async def _unsubscribe(self, feed: _Feed) -> None:
        subscription = await feed.ready
        if subscription is not None:
            with contextlib.suppress(Exception):
                if self.connection.client is not None:
                    await self.connection.client.unsubscribe_directly(subscription)

    def _receive(self, run_id: str, data: bytes) -> None:
        feed = self._feeds.get(run_id)
        if feed is None or run_id in self._published:  # what others say of a run that goes on here is late
            return
        try:
            _, encoded = decode_batch(data)
        except ValueError as error:
            log.warning("a message of run %s is no batch of events: %s", run_id, error)
            return
        if isinstance(encoded, int):
            for reader in feed.readers:
                reader.overflow()
            return
        for event in decode_events(run_id, encoded):
            for reader in feed.readers:
                reader.put(event)

    def cut(self) -> None:
        """Have all readers of other processes' runs look at the store: events may be missing."""
        for feed in self._feeds.values():
            for reader in feed.readers:
                reader.overflow()

    async def recent(self, run_id: str, after: int, since: float = 0.0) -> list[Event]:
        """As far as nothing is missing behind `after`; nothing where the stream cannot be asked."""
        batches: list[_Batch] = []
        try:
            async with asyncio.timeout(NATS_API_S_MAX):
                if await self._has_later(run_id, after):
                    for data in await self._stored(run_id, since):
                        with contextlib.suppress(ValueError):
                            batches.append(decode_batch(data))
        except Exception as error:  # noqa: BLE001  (the store is polled then)
            log.debug("NATS: %s", type(error).__name__)
            return []
        events: list[Event] = []
        for before, encoded in sorted(batches, key=lambda batch: batch[0]):
            if before > after or (isinstance(encoded, int) and encoded > after):
                break
            for event in () if isinstance(encoded, int) else decode_events(run_id, encoded):
                if event.seq > after + 1:
                    return events
                if event.seq > after:
                    events.append(event)
                    after = event.seq
        return events

    async def _has_later(self, run_id: str, after: int) -> bool:
        """Whether the stream holds events behind a number: one message tells."""
        if not self.connected:
            return False
        from nats.js.errors import NotFoundError

        try:
            last = await self.connection.js.get_last_msg(
                self.connection.events_stream, self.connection.events_subject(run_id)
            )
            _, encoded = decode_batch(last.data or b"")
        except NotFoundError:
            return False
        except ValueError:  # what follows may be good
            return True
        return (encoded if isinstance(encoded, int) else encoded[-1][0] if encoded else 0) > after

    async def _stored(self, run_id: str, since: float) -> list[bytes]:
        """What the stream holds of a run."""
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        js, stream = self.connection.js, self.connection.events_stream
        config = ConsumerConfig(
            filter_subject=self.connection.events_subject(run_id),
            deliver_policy=DeliverPolicy.BY_START_TIME if since else DeliverPolicy.ALL,
            opt_start_time=datetime.fromtimestamp(since, UTC) if since else None,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=2 * NATS_API_S_MAX,
            mem_storage=True,
        )
        created = await js.add_consumer(stream, config)
        consumer = await js.pull_subscribe_bind(created.name, stream)
        try:
            pending, messages = created.num_pending or 0, list[bytes]()
            while len(messages) < pending:
                wanted = min(NATS_FETCHED_MAX, pending - len(messages))
                messages += [message.data for message in await consumer.fetch(wanted, timeout=NATS_API_S_MAX)]
            return messages
        finally:
            with contextlib.suppress(Exception):
                await consumer.unsubscribe()
                await js.delete_consumer(stream, created.name)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
