"""The queue of submitted runs between replicas: a JetStream work queue. A message only says that there is a run to look for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from hermes.bus.nats_connection import NatsConnection
from hermes.core.limits import NATS_RECONNECT_S, QUEUE_ACK_S

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js.client import JetStreamContext

log = logging.getLogger(__name__)
_CONSUMER = "replicas"
_UNACKNOWLEDGED_MAX = 1_000_000


class Delivery:
    """A message that is this replica's until it is acknowledged, given back, or not extended in time."""

    def __init__(self, message: Msg) -> None:
        self._message = message

    @property
    def count(self) -> int:
        """How often it was delivered, this time included."""
        return self._message.metadata.num_delivered or 1

    async def extend(self) -> None:
        with contextlib.suppress(Exception):  # then it comes again, and leads to nothing that is done twice
            await self._message.in_progress()

    async def ack(self) -> None:
        with contextlib.suppress(Exception):
            await self._message.ack()

    async def nak(self, delay: float) -> None:
        with contextlib.suppress(Exception):
            await self._message.nak(delay=delay)


class NatsQueue:
    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._subject = f"{connection.prefix}.runs"
        self._consumer: JetStreamContext.PullSubscription | None = None

    @property
    def connected(self) -> bool:
        return self._connection.connected

    async def put(self, run_id: str) -> bool:
        """Whether the queue has the message. One that is lost is put again later: the run is in the store."""
        if not self.connected:
            return False
        try:
            await self._connection.js.publish(self._subject, run_id.encode())
        except Exception as error:  # noqa: BLE001
            log.warning("a run could not be put into the queue: %s", type(error).__name__)
            return False
        return True

    async def take(self, wait_s: float) -> Delivery | None:
        """The next message; None where none comes in time, or NATS is away."""
        if not self.connected:
            return None
        try:
            if self._consumer is None:
                self._consumer = await self._subscribe()
            [message] = await self._consumer.fetch(1, timeout=wait_s)
            return Delivery(message)
        except TimeoutError:
            return None
        except Exception as error:  # noqa: BLE001  (a stream that was lost is made again with the next connection)
            log.warning("the queue of runs cannot be read: %s", type(error).__name__)
            self._consumer = None
            await asyncio.sleep(NATS_RECONNECT_S)
            return None

    async def _subscribe(self) -> JetStreamContext.PullSubscription:
        from nats.js.api import AckPolicy, ConsumerConfig

        config = ConsumerConfig(
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=QUEUE_ACK_S,
            max_ack_pending=_UNACKNOWLEDGED_MAX,
            max_deliver=-1,
        )
        stream = self._connection.runs_stream
        return await self._connection.js.pull_subscribe(self._subject, durable=_CONSUMER, stream=stream, config=config)

    async def size(self) -> int | None:
        """How many messages there are, delivered or not; None where NATS does not tell."""
        if not self.connected:
            return None
        try:
            return (await self._connection.js.stream_info(self._connection.runs_stream)).state.messages
        except Exception as error:  # noqa: BLE001
            log.debug("NATS: %s", type(error).__name__)
            return None
