"""Values as they travel between processes: msgpack, or JSON for text that is no UTF-8."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from hermes.core.events import Event
from hermes.core.json_types import JsonObject

_MSGPACK, _JSON = b"m", b"j"
EncodedEvent = tuple[int, float, str, int, JsonObject]


def encode(value: object) -> bytes:
    try:
        return _MSGPACK + msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError, TypeError):
        return _JSON + json.dumps(msgspec.to_builtins(value, enc_hook=str)).encode()


def decode(data: bytes) -> Any:
    """Raises ValueError for what no `encode` has made."""
    if data[:1] == _MSGPACK:
        return msgspec.msgpack.decode(data[1:])
    if data[:1] == _JSON:
        return json.loads(data[1:])
    raise ValueError("this is no frame")


def encode_events(batch: Sequence[Event]) -> list[EncodedEvent]:
    return [(event.seq, event.ts, event.type, event.step, event.data) for event in batch]


def decode_events(run_id: str, encoded: Sequence[EncodedEvent]) -> list[Event]:
    return [Event(run_id, kind, step, data, seq, ts) for seq, ts, kind, step, data in encoded]
