"""Live events between the parts of one process: a bounded queue for each reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hermes.core.events import Event
from hermes.core.limits import QUEUE_BYTES_MAX, QUEUE_EVENTS_MAX

Sink = Callable[[Event], bool]


class Subscription:
    """What one reader has not yet taken: events whose numbers follow that of the last one it has, none left out.

    Where a number is missing, or past its limit, the queue is emptied (`overflowed`), and the reader must catch up from the
    store: `restart` before it reads, `join` when it has.

    A `sink` is given the events that come while the reader waits, and says which of them it has taken: `delivered_seq` is the
    number of the last. So a token gets to its client without a task that has to be woken for it.
    """

    __slots__ = (
        "_bytes",
        "_events",
        "_next",
        "_other_waiter",
        "_waiter",
        "closed",
        "delivered_seq",
        "overflowed",
        "sink",
    )

    def __init__(self, sink: Sink | None = None) -> None:
        self.sink, self.delivered_seq = sink, 0
        self._events: list[Event] = []
        self._bytes = 0
        # The number of the only event that can be put; 0 for any, while the reader catches up and nothing waits.
        self._next = 0
        self._waiter: asyncio.Future[None] | None = None
        self._other_waiter: asyncio.Future[None] | None = None
        self.overflowed = self.closed = False

    def put(self, event: Event) -> None:
        """Hand over one event; never waits. One that the reader has is dropped."""
        seq, expected = event.seq, self._next
        if seq != expected and expected:
            if seq > expected:
                self.overflow()
            return
        if self.overflowed:
            return
        self._next = seq + 1
        if self.sink is not None and self._waiter is not None and not self._events and self.sink(event):
            self.delivered_seq = seq
            return
        self._bytes += event.size
        if len(self._events) >= QUEUE_EVENTS_MAX or self._bytes > QUEUE_BYTES_MAX:
            self.overflow()
            return
        self._events.append(event)
        self.wake()

    def overflow(self) -> None:
        """Empty the queue: the reader must catch up from the store."""
        self._events, self._bytes, self._next = [], 0, 0
        self.overflowed = True
        self.wake()

    def restart(self, *, keep: bool) -> None:
        """The reader is about to catch up from the store. `keep`: what waits may not be there yet."""
        self.overflowed = False
        if not keep:
            self._events, self._bytes = [], 0
        if not self._events:
            self._next = 0

    def join(self, cursor: int) -> bool:
        """Whether what waits, or comes next, follows the event with this number, which is the last that the reader has. If
        not, the store must be read again."""
        if self.overflowed or (self._events and self._events[0].seq > cursor + 1):
            return False
        self._next = max(self._next, cursor + 1)
        return True

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._other_waiter is not None and not self._other_waiter.done():
            self._other_waiter.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Wait until something is there to be taken, but not longer. Nothing goes to the sink meanwhile: the reader may
        have to read something else first."""
        if self._events or self.overflowed or self.closed:
            return
        self._other_waiter = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([self._other_waiter], timeout=seconds)
        finally:
            self._other_waiter = None

    async def take(self) -> list[Event]:
        """All that is there, waiting for the first; empty when the queue has overflowed or nothing more will come."""
        if not self._events and not self.overflowed and not self.closed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events, self._bytes = self._events, [], 0
        return events


class MemoryBus:
    kind = "memory"
    # Whether runs of other processes are followed by this bus.
    follows = False

    def __init__(self) -> None:
        self._readers: dict[str, list[Subscription]] = {}

    async def check(self) -> None:
        """Raise what keeps events from their readers. In memory there is nothing that could be away."""

    def publish(self, run_id: str, event: Event) -> None:
        readers = self._readers.get(run_id)
        if readers:
            for reader in readers:
                reader.put(event)

    def subscribe(self, run_id: str, sink: Sink | None = None) -> Subscription:
        subscription = Subscription(sink)
        self._readers.setdefault(run_id, []).append(subscription)
        return subscription

    def unsubscribe(self, run_id: str, subscription: Subscription) -> None:
        readers = self._readers.get(run_id, [])
        if subscription in readers:
            readers.remove(subscription)
        if not readers:
            self._readers.pop(run_id, None)

    def close(self, run_id: str) -> None:
        """Nothing more will be published of a run: its readers need not wait."""
        for reader in self._readers.get(run_id, ()):
            reader.closed = True
            reader.wake()

    def release(self, run_id: str) -> None:
        """Nothing more will be published of a run here, but by another process."""

    def has_subscribers(self, run_id: str) -> bool:
        return run_id in self._readers

    @property
    def local(self) -> MemoryBus:
        """The bus for runs that no other process may follow."""
        return self

    # --- runs of other processes, for a bus that follows them ---

    @property
    def connected(self) -> bool:
        return True

    async def watch(self, run_id: str, subscription: Subscription) -> None:
        """Feed a subscription with what other processes publish of a run, until it is given back to `unwatch`."""
        raise NotImplementedError

    def unwatch(self, run_id: str, subscription: Subscription) -> None:
        raise NotImplementedError

    def cut(self) -> None:
        """Have all readers of other processes' runs look at the store."""

    async def recent(self, run_id: str, after: int, since: float = 0.0) -> list[Event]:
        """What was published of a run lately, by any process: events behind a number, not older than a time."""
        return []
