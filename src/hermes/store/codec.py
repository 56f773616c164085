"""Encoding of values into columns: text, JSON, data URLs as blobs, search text of scripts without spaces. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from hermes.core.json_types import JsonObject
from hermes.core.limits import (
    DATA_URL_CHARS_MAX,
    END_REASON_CHARS_MAX,
    PREVIEW_OF_SESSION_CHARS,
    SEARCHED_CHARS_MAX,
    SESSION_ID_CHARS_MAX,
    SESSION_TITLE_CHARS_MAX,
)
from hermes.core.text import whole_text

# Scripts that are written without spaces: each character is a word to the index, and a word is a phrase.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3100-\u318f\u31a0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff66-\uffdc\U0001b000-\U0001b16f"
    "\U00020000-\U0003ffff]"
)
_ZERO_WIDTH = "\u200b"
_ID_REFUSED = re.compile(r"[\x00-\x1f\x7f-\x9f/\\]|\.\.|^\.$|^[A-Za-z]:")
_RESERVED_IDS = {"search", "import"}
_ROLES = ("system", "user", "assistant", "tool")


# --- text and JSON ---------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Replace lone surrogates and NUL, which not every database can store."""
    return whole_text(text).replace("\x00", "\ufffd")


def clean_or_none(text: object) -> str | None:
    return None if text is None else clean(str(text))


def pack(value: object) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, TypeError, RecursionError, msgspec.MsgspecError):
        return _pack_anyhow(value)
    return _pack_anyhow(value) if "\\u0000" in text else text


def _pack_anyhow(value: object) -> str:
    """Encode a value that JSON cannot represent exactly, as closely as possible."""
    try:
        return json.dumps(cleaned(value), ensure_ascii=False)
    except RecursionError:
        placeholder = {"type": "text", "text": "[Nested too deeply to be stored.]"}
        return json.dumps([placeholder] if isinstance(value, list) else placeholder)


def pack_or_none(value: object) -> str | None:
    return pack(value) if value else None


def unpack(text: str | None) -> Any:
    return None if text is None else msgspec.json.decode(text)


def cleaned(value: object) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(str(key)): cleaned(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [cleaned(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float) else clean(str(value))


# --- content ---------------------------------------------------------------------------------------------------------

Blobs = dict[str, tuple[str, bytes]]
Content = str | list[JsonObject] | None


def text_of(content: Any) -> str | None:
    """The text of a message's content, for search."""
    return content if content is None or isinstance(content, str) else "\n".join(_texts_of(content))


def first_text_of(content: Any) -> str | None:
    """What a message begins with, for previews: the texts of attached files follow what was written."""
    if content is None or isinstance(content, str):
        return content
    return next((text for text in _texts_of(content) if text.strip()), None)


def _texts_of(parts: list[Any]) -> Iterator[str]:
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def columns_of(content: Content, blobs: Blobs) -> tuple[str | None, str | None]:
    """The columns `content` and `parts`; large data URLs go into `blobs`."""
    text = text_of(content)
    text = None if text is None else clean(text)
    return text, None if content is None or isinstance(content, str) else pack_content(content, blobs)


def pack_content(content: Content, blobs: Blobs) -> str | None:
    if content is None:
        return None
    packed = pack(content)
    return pack(_extract_blobs(content, blobs)) if '"data:' in packed or '"$blob"' in packed else packed


def content_of(text: str | None, parts: str | None, blob: Callable[[str], tuple[str, bytes]]) -> Content:
    return text if parts is None else unpack_content(parts, blob)


def unpack_content(packed: str | None, blob: Callable[[str], tuple[str, bytes]]) -> Content:
    value: Content = unpack(packed)
    return value if packed is None or '"$blob"' not in packed else _put_back(value, blob)


def _extract_blobs(value: object, blobs: Blobs) -> Any:
    if isinstance(value, str):
        if len(value) <= DATA_URL_CHARS_MAX or not value.startswith("data:"):
            return value
        media_type, data = _data_of(clean(value))
        digest = hashlib.sha256(media_type.encode() + b"\n" + data).hexdigest()
        blobs[digest] = (media_type, data)
        return {"$blob": digest}
    if isinstance(value, dict):
        fields = {key: _extract_blobs(item, blobs) for key, item in value.items()}
        return {"$blob": "", "value": fields} if "$blob" in value else fields
    return [_extract_blobs(item, blobs) for item in value] if isinstance(value, list | tuple) else value


def _put_back(value: object, blob: Callable[[str], tuple[str, bytes]]) -> Any:
    if isinstance(value, list):
        return [_put_back(item, blob) for item in value]
    if not isinstance(value, dict):
        return value
    digest = value.get("$blob")
    if digest:
        media_type, data = blob(digest)
        return f"data:{media_type},{base64.b64encode(data).decode()}" if media_type else data.decode()
    if digest == "":
        return {key: _put_back(item, blob) for key, item in value["value"].items()}
    return {key: _put_back(item, blob) for key, item in value.items()}


def _data_of(url: str) -> tuple[str, bytes]:
    """Media type and bytes. An empty type means that the bytes are the whole URL, which was not plain base64."""
    head, _, body = url[5:].partition(",")
    if head.endswith(";base64"):
        try:
            data = base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            return "", url.encode()
        if base64.b64encode(data).decode() == body:
            return head, data
    return "", url.encode()


# --- search ----------------------------------------------------------------------------------------------------------


def search_text(text: str | None) -> str | None:
    """The text with its words separated, if its script writes no spaces; otherwise None."""
    if text is None:
        return None
    head = text[:SEARCHED_CHARS_MAX]
    return spaced(head) if _UNSPACED.search(head) else None


def spaced(text: str) -> str:
    """Put a zero-width space around each character that is a word by itself."""
    return _UNSPACED.sub(lambda match: f"{_ZERO_WIDTH}{match[0]}{_ZERO_WIDTH}", text)


def unspaced(text: str) -> str:
    return text.replace(_ZERO_WIDTH, "")


# --- names -----------------------------------------------------------------------------------------------------------


class BadSessionId(ValueError):
    @classmethod
    def unusable(cls, session_id: str) -> BadSessionId:
        """For an id that is reserved or belongs to another owner; the message does not say which."""
        return cls(f"The session id '{session_id}' cannot be used; choose another one or leave it out.")


def checked_id(session_id: object) -> str:
    """Raise `BadSessionId` for an id that a caller may not give to a session."""
    if not isinstance(session_id, str) or not session_id:
        raise BadSessionId("A session id is a text of at least one character.")
    if len(session_id) > SESSION_ID_CHARS_MAX:
        raise BadSessionId(f"A session id has at most {SESSION_ID_CHARS_MAX} characters.")
    if _ID_REFUSED.search(session_id) or whole_text(session_id) != session_id:
        raise BadSessionId("A session id holds no control characters, slashes, '..' or drive letters.")
    if session_id in _RESERVED_IDS:
        raise BadSessionId.unusable(session_id)
    return session_id


def checked_role(role: object) -> str:
    if role not in _ROLES:
        raise ValueError(f"The role of a message is one of {', '.join(_ROLES)}.")
    return str(role)


def plain_title(title: object) -> str | None:
    """The title as it is stored: one line without invisible characters, None if empty. Raises ValueError if it is too
    long."""
    if title is None:
        return None
    line = _one_line(whole_text(str(title)))
    if len(line) > SESSION_TITLE_CHARS_MAX:
        raise ValueError(f"A title has at most {SESSION_TITLE_CHARS_MAX} characters; this one has {len(line)}.")
    return line or None


def _visible(char: str) -> bool:
    # Cc: control characters, Cf: zero-width and bidirectional marks.
    return char.isspace() or unicodedata.category(char) not in ("Cc", "Cf")


def numbered(title: str, number: int) -> str:
    tail = f" #{number}"
    return title[: SESSION_TITLE_CHARS_MAX - len(tail)].rstrip() + tail


def end_reason(reason: object) -> str:
    text = plain_words(reason)
    if not text or len(text) > END_REASON_CHARS_MAX:
        raise ValueError(f"A reason has 1 to {END_REASON_CHARS_MAX} characters.")
    return text


def plain_words(text: object) -> str:
    return _one_line(clean(str(text)))


def _one_line(text: str) -> str:
    if not text.isprintable():
        text = "".join(" " if char.isspace() else char for char in text if _visible(char))
    return " ".join(text.split())


def preview_of(text: str | None) -> str | None:
    return plain_words((text or "")[: 4 * PREVIEW_OF_SESSION_CHARS])[:PREVIEW_OF_SESSION_CHARS] or None
