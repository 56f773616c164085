"""Which replicas there are: each gives signs of life, with how many turns it has at work, and says when it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from hermes.bus.nats_connection import NatsConnection
from hermes.bus.peers import name_of
from hermes.core.limits import REPLICA_BEAT_S, REPLICA_COUNTS_S, REPLICA_GONE_S, REPLICA_LOOK_S
from hermes.core.processes import is_gone, this_process

if TYPE_CHECKING:
    from nats.aio.msg import Msg

log = logging.getLogger(__name__)


class _Sign(msgspec.Struct, array_like=True):
    """A sign of life. `counts` are turns at work by owner; one that is `new` is answered by all others at once."""

    holder: str
    counts: dict[str, int]
    new: bool = False
    leaves: bool = False


class _Member(msgspec.Struct):
    holder: str
    counts: dict[str, int]
    seen_at: float


class Members:
    """The other replicas. `on_gone` are called with the holder's text of one that is gone."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._subject = f"{connection.prefix}.alive"
        self._holder = this_process()
        self._members: dict[str, _Member] = {}
        self._counts: Counter[str] = Counter()
        self.on_gone: list[Callable[[str], None]] = []
        self._decoder = msgspec.msgpack.Decoder(_Sign)
        self._beating: asyncio.Task[None] | None = None
        self._subscription: Any = None
        self._changed: asyncio.TimerHandle | None = None
        self._told_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        client = self._connection.client
        assert client is not None
        self._subscription = await client.subscribe(self._subject, cb=self._receive)
        await self._connection.try_sync()
        await self._tell(new=True)
        self._beating = asyncio.create_task(self._beat())

    async def close(self) -> None:
        if self._beating is None:
            return
        self._beating.cancel()
        await asyncio.wait([self._beating, *self._tasks])
        if self._changed is not None:
            self._changed.cancel()
        self._beating = None
        await self._tell(leaves=True)
        with contextlib.suppress(Exception):
            await self._subscription.unsubscribe()

    def names(self) -> list[str]:
        """Of the replicas that are there, as `peers.name_of` gives them."""
        return list(self._members)

    # --- counts of turns: `SharedCounts` of the engine's admission ------------------------------------------------

    def put(self, owner: str | None, count: int) -> None:
        if owner is None:  # the sum of the others
            return
        self._counts[owner] = count
        if not count:
            del self._counts[owner]
        if self._changed is None and self._beating is not None:
            loop = asyncio.get_running_loop()
            self._changed = loop.call_at(max(loop.time(), self._told_at + REPLICA_COUNTS_S), self._tell_counts)

    def others(self, owner: str | None) -> int:
        members = self._members.values()
        if owner is None:
            return sum(sum(member.counts.values()) for member in members)
        return sum(member.counts.get(owner, 0) for member in members)

    def _tell_counts(self) -> None:
        self._changed, self._told_at = None, asyncio.get_running_loop().time()
        task = asyncio.create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- signs of life --------------------------------------------------------------------------------------------

    async def _tell(self, *, new: bool = False, leaves: bool = False) -> None:
        client = self._connection.client
        if client is None or not client.is_connected:
            return
        sign = _Sign(self._holder, {} if leaves else dict(self._counts), new, leaves)
        with contextlib.suppress(Exception):
            await client.publish(self._subject, msgspec.msgpack.encode(sign))

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        told_at = listened_at = loop.time()
        while True:
            await asyncio.sleep(REPLICA_LOOK_S)
            now = loop.time()
            # Nothing is to be concluded from silence while NATS is away, or while this process itself was stopped.
            if not self._connection.connected or now - listened_at > REPLICA_GONE_S:
                for member in self._members.values():
                    member.seen_at = now
            listened_at = now
            self._look(now - REPLICA_GONE_S)
            if now - told_at >= REPLICA_BEAT_S:
                told_at = now
                await self._tell()

    def _look(self, late: float) -> None:
        for name, member in tuple(self._members.items()):
            if member.seen_at < late or is_gone(member.holder):
                self._remove(name, member)

    def _remove(self, name: str, member: _Member) -> None:
        del self._members[name]
        log.info("the replica %s is gone", member.holder)
        for hear in self.on_gone:
            hear(member.holder)

    async def _receive(self, message: Msg) -> None:
        try:
            sign = self._decoder.decode(message.data)
        except msgspec.DecodeError as error:
            log.warning("a sign of life cannot be read: %s", error)
            return
        name = name_of(sign.holder)
        member = self._members.get(name)
        if sign.leaves:
            if member is not None:
                self._remove(name, member)
            return
        self._members[name] = _Member(sign.holder, sign.counts, asyncio.get_running_loop().time())
        if member is None:
            log.info("the replica %s is there", sign.holder)
        if sign.new:
            await self._tell()
