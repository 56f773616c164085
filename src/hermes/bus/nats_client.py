"""A NATS client that hands the messages of some subscriptions to their receivers while it reads them.

nats-py wakes a task of the subscription for each message, which costs a viewer of another replica's run more than all
the rest of a token; and it looks at each message several times before that.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.protocol.parser import Parser

log = logging.getLogger(__name__)
_MSG, _CRLF = b"MSG ", b"\r\n"


class _DirectParser(Parser):
    """Takes whole messages for receivers from the beginning of what was read, and leaves the rest to nats-py."""

    async def parse(self, data: bytes = b"") -> None:
        rest = data if self.buf else self.nc.receive_all(data)
        if rest or self.buf:
            await super().parse(rest)


class DirectClient(Client):
    def __init__(self) -> None:
        super().__init__()
        self._receivers: dict[int, Callable[[bytes], None]] = {}
        self._ps = _DirectParser(self)

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
        self._hand_over(receive, bytes(data))

    def receive_all(self, data: bytes) -> bytes:
        """Hand over the whole messages that `data` begins with and that have receivers; what follows them."""
        at = 0
        with contextlib.suppress(ValueError):  # nats-py says what is wrong with it
            while data.startswith(_MSG, at) and (end := data.find(_CRLF, at)) >= 0:
                fields = data[at + len(_MSG) : end].split(b" ")  # subject, subscription, perhaps where to reply, size
                receive = self._receivers.get(int(fields[1])) if len(fields) == 3 else None
                begin = end + len(_CRLF)
                if receive is None or (following := begin + int(fields[2]) + len(_CRLF)) > len(data):
                    break
                at = following
                self._hand_over(receive, data[begin : following - len(_CRLF)])
        return data[at:] if at else data

    @staticmethod
    def _hand_over(receive: Callable[[bytes], None], data: bytes) -> None:
        try:
            receive(data)
        except Exception:  # one reader's fault must not end the connection
            log.exception("a message from NATS could not be received")
