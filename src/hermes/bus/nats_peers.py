"""Between replicas: each answers the others at a subject of its own, as processes of one home do at a socket.

Who may publish there is for the credentials of NATS to say. What comes is bounded in size and checked before it is used.
An answer that is larger than a message is fetched in parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from hermes.bus import frames
from hermes.bus.nats_connection import NatsConnection
from hermes.bus.nats_members import Members
from hermes.bus.peers import Operation, PeerGone, Peers, Stream, is_name, name_of
from hermes.core.ids import random_hex
from hermes.core.limits import NATS_PART_BYTES, NATS_PARTS_KEPT_S, PEER_ANSWER_S_MAX, PEER_FRAME_BYTES_MAX, PEER_IDLE_S
from hermes.core.processes import this_process

if TYPE_CHECKING:
    from nats.aio.msg import Msg

log = logging.getLogger(__name__)
_END, _VALUE, _FAILED, _PARTS = 0, 1, 2, 3
_PART = "_part"


def _subject(connection: NatsConnection, name: str) -> str:
    """Of a name as `name_of` gives it: one token, without dots."""
    return f"{connection.prefix}.peer.{name.replace('.', '_')}"


class _Parts:
    """Answers that wait to be fetched."""

    def __init__(self) -> None:
        self._data: dict[str, tuple[float, bytes]] = {}

    def frame(self, kind: int, value: object) -> bytes:
        data = frames.encode([kind, value])
        if len(data) <= NATS_PART_BYTES:
            return data
        now, key = time.monotonic(), random_hex(16)
        self._data = {one: entry for one, entry in self._data.items() if now - entry[0] < NATS_PARTS_KEPT_S}
        self._data[key] = now, data
        return frames.encode([_PARTS, [key, -(-len(data) // NATS_PART_BYTES)]])

    async def part(self, key: str, number: int) -> bytes:
        return self._data[key][1][number * NATS_PART_BYTES : (number + 1) * NATS_PART_BYTES]


class NatsPeerServer:
    """Answers other replicas: `operations` with one value, `streams` with many."""

    def __init__(
        self, connection: NatsConnection, operations: Mapping[str, Operation], streams: Mapping[str, Stream]
    ) -> None:
        self._connection, self._streams, self._parts = connection, streams, _Parts()
        self._operations = {**operations, _PART: self._parts.part}
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscription: Any = None

    async def start(self) -> None:
        client = self._connection.client
        assert client is not None
        subject = _subject(self._connection, name_of(this_process()))
        self._subscription = await client.subscribe(subject, cb=self._asked)
        await self._connection.try_sync()

    async def close(self) -> None:
        if self._subscription is not None:
            with contextlib.suppress(Exception):
                await self._subscription.unsubscribe()
            self._subscription = None
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _asked(self, message: Msg) -> None:
        """Each is answered by itself: one that takes long holds up no other."""
        task = asyncio.create_task(self._answer(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Msg) -> None:
        try:
            name, arguments, *inbox = frames.decode(message.data)
            if inbox and name in self._streams:
                await message.respond(b"")
                await self._send_all(self._streams[name](*arguments), str(inbox[0]))
            elif message.reply:
                await message.respond(await self._value(name, arguments))
        except Exception as error:  # noqa: BLE001  (whoever asked has no answer in time)
            log.warning("another replica could not be answered: %s", type(error).__name__)

    async def _value(self, name: str, arguments: list[Any]) -> bytes:
        if name not in self._operations:
            return frames.encode([_FAILED, "there is no such operation"])
        try:
            value = await self._operations[name](*arguments)
        except Exception as error:  # noqa: BLE001  (told to whoever asked)
            return frames.encode([_FAILED, f"{type(error).__name__}: {error}"])
        return frames.encode([_VALUE, value]) if name == _PART else self._parts.frame(_VALUE, value)

    async def _send_all(self, values: AsyncGenerator[Any, None], inbox: str) -> None:
        """One at a time: each is asked for an acknowledgment, which fails at once where nobody reads any more."""
        from nats.errors import Error

        client = self._connection.client
        assert client is not None
        with contextlib.suppress(Error):
            async with contextlib.aclosing(values):
                async for value in values:
                    await client.request(inbox, self._parts.frame(_VALUE, value), timeout=NATS_PARTS_KEPT_S)
            await client.publish(inbox, frames.encode([_END, None]))


class NatsPeers(Peers):
    """Asks other replicas."""

    def __init__(self, connection: NatsConnection, members: Members) -> None:
        super().__init__(None)
        self._connection, self._members = connection, members

    def names(self) -> list[str]:
        return self._members.names()

    async def ask(self, name: str, operation: str, *arguments: Any) -> Any:
        return await self._value(name, await self._request(name, operation, arguments))

    async def _value(self, name: str, data: bytes) -> Any:
        try:
            kind, value = frames.decode(data)
            if kind == _PARTS:
                key, count = value
                if not 0 < count <= PEER_FRAME_BYTES_MAX // NATS_PART_BYTES:
                    raise ValueError("too many parts")
                parts = [await self.ask(name, _PART, key, number) for number in range(count)]
                kind, value = frames.decode(b"".join(parts))
        except (ValueError, TypeError) as error:
            raise PeerGone(f"the answer cannot be read: {error}") from error
        if kind != _VALUE:
            raise PeerGone(str(value))
        return value

    async def _request(self, name: str, operation: str, *arguments: object) -> bytes:
        client = self._connection.client
        if client is None or not client.is_connected:
            raise PeerGone("NATS is out of reach")
        if not is_name(name):
            raise PeerGone("this is no name of a replica")
        try:
            data = frames.encode([operation, *arguments])
            message = await client.request(_subject(self._connection, name), data, timeout=PEER_ANSWER_S_MAX)
        except Exception as error:  # all that NATS may say: nobody listens, no answer in time, too large, closed
            raise PeerGone(type(error).__name__) from error
        return message.data

    async def follow(self, name: str, stream: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        client = self._connection.client
        if client is None:
            return
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox)
        try:
            with contextlib.suppress(PeerGone, OSError):
                await self._request(name, stream, arguments, inbox)
                while True:
                    try:
                        message = await subscription.next_msg(PEER_IDLE_S)
                    except TimeoutError:
                        yield []
                        return
                    if not message.reply:
                        return
                    value = await self._value(name, message.data)
                    await message.respond(b"")
                    yield value
                    if not value:
                        return
        finally:
            with contextlib.suppress(Exception):
                await subscription.unsubscribe()
