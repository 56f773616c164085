"""The content of messages as clients send it, normalized. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hermes.agent.media_tags import strip_rendered_media
from hermes.core.json_types import JsonMapping, JsonObject, Message
from hermes.core.limits import CONTENT_PARTS_MAX
from hermes.core.text import decode_base64
from hermes.server.errors import invalid

Content = str | list[JsonObject]
_TEXTS = ("text", "input_text", "output_text", "summary_text", "refusal")
_IMAGES = ("image_url", "input_image")
_FILES = ("file", "input_file")
_DETAILS = ("auto", "low", "high", "original")
_DATA_URL = re.compile(r"data:(?P<kind>[\w.+-]+/[\w.+-]+)?(?:;[\w.+=-]+)*;base64,", re.ASCII)


def content(value: object, where: str, text_chars_max: int, *, text_only: bool = False) -> Content:
    """Text, or a list of parts where there is more than text. `where` names the field."""
    if isinstance(value, str):
        return value if len(value) <= text_chars_max else _text(value, where, text_chars_max)
    if not isinstance(value, list):
        raise invalid(where, f"Invalid type for {where!r}: text or a list of parts is expected.", "invalid_type")
    if len(value) > CONTENT_PARTS_MAX:
        raise invalid(where, f"{where!r} has more than {CONTENT_PARTS_MAX} parts.", "array_above_max_length")
    return joined([part_of(part, f"{where}[{at}]", text_chars_max, text_only) for at, part in enumerate(value)])


def joined(parts: list[JsonObject]) -> Content:
    """Parts that are all text, as one text."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _text(value: object, where: str, chars_max: int) -> str:
    if not isinstance(value, str):
        raise invalid(where, f"Invalid type for {where!r}: text is expected.", "invalid_type")
    if len(value) > chars_max and len(strip_rendered_media(value) or value) > chars_max:
        raise invalid(where, f"{where!r} is longer than {chars_max} characters.", "string_above_max_length")
    return value


def part_of(part: object, where: str, chars_max: int, text_only: bool = False) -> JsonObject:
    if isinstance(part, str):
        return {"type": "text", "text": _text(part, where, chars_max)}
    if not isinstance(part, Mapping):
        raise invalid(where, f"Invalid type for {where!r}: an object is expected.", "invalid_type")
    kind = part.get("type")
    if kind in _TEXTS:
        text = part.get("refusal") if kind == "refusal" else part.get("text")
        return {"type": "text", "text": _text(text, f"{where}.text", chars_max)}
    if kind in _IMAGES and not text_only:
        return _image(part, where)
    if kind in _FILES and not text_only:
        return _file(part, where)
    message = "a list of parts holds objects with a type" if kind is None else f"the type {kind!r} is not supported"
    raise invalid(f"{where}.type", f"Unsupported content in {where!r}: {message}.", "unsupported_content_type")


def _image(part: JsonMapping, where: str) -> JsonObject:
    given = part.get("image_url")
    url, detail = (given.get("url"), given.get("detail")) if isinstance(given, Mapping) else (given, None)
    detail = detail if detail is not None else part.get("detail")
    place = f"{where}.image_url"
    if url is None and part.get("file_id"):
        raise invalid(f"{where}.file_id", "Files have no ids here; send the image itself.", "unsupported_content_type")
    if not isinstance(url, str) or not url:
        raise invalid(place, f"{place!r} must be an address or a data URL of an image.", "invalid_image_url")
    if url[:5].lower() == "data:":
        match = _DATA_URL.match(url)
        if match is None:
            raise invalid(place, f"{place!r} must be a data URL in base64.", "invalid_image_url")
        if not (match["kind"] or "").lower().startswith("image/"):
            raise invalid(
                place, f"{place!r} is a data URL of something else than an image.", "unsupported_content_type"
            )
        if decode_base64(url[match.end() :]) is None:
            raise invalid(place, f"The data URL of {place!r} is not valid base64.", "invalid_image_url")
    elif not re.match(r"https?://[^\s/]", url, re.IGNORECASE):
        raise invalid(place, f"{place!r} must begin with http://, https:// or data:image/.", "invalid_image_url")
    if detail is not None and detail not in _DETAILS:
        raise invalid(
            f"{where}.detail", f"The detail of an image is one of {', '.join(_DETAILS)}.", "invalid_content_part"
        )
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    return {"type": "image_url", "image_url": image}


def _file(part: JsonMapping, where: str) -> JsonObject:
    inner = part.get("file")
    given: JsonMapping = inner if isinstance(inner, Mapping) else part
    for name in ("file_id", "file_url"):
        if given.get(name):
            raise invalid(
                f"{where}.{name}",
                f"{name} is not supported; send the file itself as file_data.",
                "unsupported_content_type",
            )
    data, title = given.get("file_data"), given.get("filename")
    if not isinstance(data, str) or (match := _DATA_URL.match(data)) is None:
        raise invalid(f"{where}.file_data", "file_data must be a data URL in base64.", "invalid_content_part")
    if decode_base64(data[match.end() :]) is None:
        raise invalid(f"{where}.file_data", "The data URL of file_data is not valid base64.", "invalid_content_part")
    if title is not None and not isinstance(title, str):
        raise invalid(f"{where}.filename", "filename must be text.", "invalid_type")
    kind = match["kind"] or "application/octet-stream"
    return {"type": "file", "file": {"name": title or "file", "data": data, "media_type": kind}}


def check_not_empty(value: Content, where: str) -> None:
    """Refuse an empty new message. `where` names the field."""
    if isinstance(value, str) and not value.strip():
        message = f"{where!r} is empty or blank; send a message with text, an image or a file."
        raise invalid(where, message, "empty_message")


def newest(messages: Sequence[Message]) -> tuple[list[Message], list[Message], list[Message]]:
    """A conversation split in three: up to the last answer, outputs of calls after it, and user messages after it."""
    end = len(messages)
    while end and messages[end - 1]["role"] != "assistant":
        end -= 1
    before, new = list(messages[:end]), messages[end:]
    by_role: dict[str, list[Message]] = {"tool": [], "user": []}
    for message in new:
        if message["role"] in by_role:
            by_role[message["role"]].append(message)
    outputs, user_messages = by_role["tool"], by_role["user"]
    if len(user_messages) > 1:  # only the last is the prompt
        before, outputs, user_messages = [*before, *outputs, *user_messages[:-1]], [], user_messages[-1:]
    return before, outputs, user_messages


def result(output: Message) -> Message:
    return {name: value for name, value in output.items() if name != "role"}
