"""A NATS client that hands the messages of some subscriptions to their receivers while it reads them.

nats-py wakes a task of the subscription for each message, which costs a viewer of another replica's run more than all
the rest of a token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

log = logging.getLogger(__name__)


class DirectClient(Client):
    def __init__(self) -> None:
        super().__init__()
        self._receivers: dict[int, Callable[[bytes], None]] = {}

    async def subscribe_directly(self, subject: str, receive: Callable[[bytes], None]) -> Subscription:
        """`receive` must not block, and is called in the order of the messages."""

        async def receive_message(message: Msg) -> None:  # where the client does not go by `_process_msg`
            receive(message.data)

        subscription = await self.subscribe(subject, cb=receive_message)
        self._receivers[subscription._id] = receive
        return subscription

    async def unsubscribe_directly(self, subscription: Subscription) -> None:
        self._receivers.pop(subscription._id, None)
        await subscription.unsubscribe()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: Any, headers: bytes) -> None:
        if (receive := self._receivers.get(sid)) is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        try:
            receive(bytes(data))
        except Exception:  # one reader's fault must not end the connection
            log.exception("a message from NATS could not be received")
