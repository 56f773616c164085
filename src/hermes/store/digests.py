"""Hashes that identify a conversation by its content. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from hermes.core.json_types import JsonMapping
from hermes.store.codec import clean, cleaned, pack, text_of

# Hashes without it cover the user's texts only.
VERSION = "2:"
_encode = msgspec.json.Encoder(order="deterministic").encode


def digest_of(message: JsonMapping) -> str:
    """The hash of a message's complete content."""
    content = _comparable_content(message.get("content"))
    extras: list[Any] = [message.get(name) or "" for name in ("tool_calls", "tool_call_id", "name")]
    if type(content) is str and not any(extras):  # the usual case
        return hashlib.sha256(f"{message.get('role')}\n{clean(content)}".encode()).hexdigest()
    fields = [message.get("role"), content, [_call(call) for call in extras[0] or ()], *extras[1:]]
    return hashlib.sha256(encoded(fields)).hexdigest()


def continued(digest: str | None, message_digest: str) -> str:
    return VERSION + hashlib.sha256(f"{digest or ''}{message_digest}".encode()).hexdigest()


def is_current(digest: str | None) -> bool:
    return digest is None or digest.startswith(VERSION)


def _comparable_content(content: object) -> Any:
    """Parts that are only text equal their joined text."""
    if isinstance(content, list) and any(not isinstance(p, str) and p.get("type") != "text" for p in content):
        return content
    return text_of(content) or ""


def _call(call: JsonMapping) -> list[Any]:
    function = call.get("function") or {}
    arguments: Any = function.get("arguments") or "{}"
    try:  # the same arguments may be formatted differently
        arguments = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, TypeError, UnicodeError, RecursionError):
        arguments = str(arguments)
    return [call.get("id"), function.get("name"), arguments]


def encoded(value: object) -> bytes:
    """A canonical encoding: equal values give equal bytes."""
    try:
        encoded = _encode(value)
        return _encode(cleaned(value)) if b"\\u0000" in encoded else encoded
    except (UnicodeEncodeError, TypeError, msgspec.MsgspecError):
        return _encode(cleaned(value))
    except RecursionError:
        return pack(value).encode()
