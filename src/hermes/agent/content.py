"""Incoming messages: files become text or uploads, and delivered files become tags again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hermes.agent.media_tags import strip_rendered_media
from hermes.core.home import write_private
from hermes.core.ids import folder_name
from hermes.core.json_types import JsonObject
from hermes.core.limits import UPLOAD_NAME_BYTES_MAX
from hermes.core.text import decode_base64
from hermes.store.base import Row
from hermes.store.digests import continued, digest_of
from hermes.store.rows import row_of_message

if TYPE_CHECKING:
    from hermes.agent.turn import Services
    from hermes.core.home import Home

_TEXT_TYPES = re.compile(r"text/|application/(json|xml|yaml|x-yaml|toml|javascript|x-sh)|\+(json|xml)$")


class Upload(msgspec.Struct, frozen=True):
    """A file of a message, saved in the upload folder."""

    name: str
    path: Path
    bytes: int
    mime: str


class IncomingMessages(msgspec.Struct):
    """Messages as the model gets them; `originals` holds those that were changed, by the id of the new ones."""

    messages: list[JsonObject] = msgspec.field(default_factory=list)
    originals: dict[int, JsonObject] = msgspec.field(default_factory=dict)
    uploads: list[Upload] = msgspec.field(default_factory=list)

    def digests(self) -> list[str]:
        """For each message the hash over the conversation up to it."""
        digests: list[str] = []
        for message in self.messages:
            digest = digest_of(self.originals.get(id(message), message))
            digests.append(continued(digests[-1] if digests else None, digest))
        return digests

    def row(self, session_id: str, message: JsonObject) -> Row:
        row = row_of_message(session_id, message)
        if (original := self.originals.get(id(message))) is not None and row.role == "assistant":
            row.content, row.api_content = original["content"], row.content
        elif original is not None:
            row.digest = digest_of(original)
        return row


async def receive(
    messages: Sequence[JsonObject], services: Services, session_id: str, redact: Callable[[str], str]
) -> IncomingMessages:
    """The messages for the model and the store; the text of files in them is redacted."""
    incoming = IncomingMessages()
    for index in await services.files.call_for(len(messages), partial(_restore_tags, messages, incoming)):
        original, parts = messages[index], []
        for part in original["content"]:
            if part.get("type") == "file":
                read_text = partial(_as_text, part["file"], services, session_id, incoming.uploads, redact)
                part = {"type": "text", "text": await services.files.call(read_text)}
            parts.append(part)
        message = {**original, "content": parts}
        incoming.originals[id(message)] = original
        incoming.messages[index] = message
    return incoming


def _restore_tags(messages: Sequence[JsonObject], incoming: IncomingMessages) -> list[int]:
    """Add the messages, with delivered files as tags. Returns the indexes of those with files of the user."""
    with_files: list[int] = []
    for index, original in enumerate(messages):
        message, content = original, original.get("content")
        if isinstance(content, list) and any(part.get("type") == "file" for part in content):
            with_files.append(index)
        elif original.get("role") == "assistant" and isinstance(content, str):
            text = strip_rendered_media(content)
            if text is not None:
                message = {**original, "content": text}
                incoming.originals[id(message)] = original
        incoming.messages.append(message)
    return with_files


def _as_text(
    file: JsonObject, services: Services, session_id: str, uploads: list[Upload], redact: Callable[[str], str]
) -> str:
    name = _file_name(str(file.get("name") or "file"))
    data = _bytes(file["data"])
    if _TEXT_TYPES.search(str(file.get("media_type") or "")) and b"\0" not in data:
        return f"File {name}:\n{redact(data.decode('utf-8', 'replace'))}"
    folder = folder_of(services.home, session_id)
    path = folder / name
    count = 1
    while path.exists() and not _file_equals(path, data):
        path = folder / f"{count}-{name}"
        count += 1
    if not path.exists():
        write_private(path, data)
        uploads.append(Upload(name, path, len(data), str(file.get("media_type") or "application/octet-stream")))
    return f"The user attached the file {name} ({len(data)} bytes, {file.get('media_type')}); it is at {path}."


def _file_name(path: str) -> str:
    name = re.sub(r"[^\w.@ -]", "_", os.path.basename(path)).lstrip(".") or "file"
    stem, ending = os.path.splitext(name)
    ending = _truncate(ending, UPLOAD_NAME_BYTES_MAX // 2)
    return _truncate(stem, UPLOAD_NAME_BYTES_MAX - len(ending.encode())) + ending


def _truncate(text: str, bytes_max: int) -> str:
    return text.encode()[:bytes_max].decode("utf-8", "ignore")


def _file_equals(path: Path, data: bytes) -> bool:
    return path.stat().st_size == len(data) and path.read_bytes() == data


def folder_of(home: Home, session_id: str) -> Path:
    return home.uploads / folder_name(session_id)


def _bytes(data: str | bytes) -> bytes:
    if isinstance(data, bytes):
        return data
    encoded = data.partition(";base64,")[2] if data.startswith("data:") else data
    decoded = decode_base64(encoded)
    return data.encode() if decoded is None else decoded
