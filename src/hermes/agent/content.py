"""The user's message as it arrives: files in it become text, or lie in the upload folder and are named."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes.home import write_private
from hermes.ids import folder_name
from hermes.runs.spec import Content
from hermes.text import whole_tree

if TYPE_CHECKING:
    from hermes.agent.turn import Services
    from hermes.home import Home

_TEXT_TYPES = re.compile(r"text/|application/(json|xml|yaml|x-yaml|toml|javascript|x-sh)|\+(json|xml)$")


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that came with a message and was saved."""

    name: str
    path: Path
    bytes: int
    mime: str


async def received(
    content: Content, services: Services, session_id: str, redact: Callable[[str], str]
) -> tuple[Content, list[Upload]]:
    """The message with every file part turned into redacted text that can be stored, and what was saved on the way."""
    content = whole_tree(content)
    saved: list[Upload] = []
    if isinstance(content, str) or not any(part.get("type") == "file" for part in content):
        return content, saved
    parts: list[dict[str, Any]] = []
    for part in content:
        if part.get("type") != "file":
            parts.append(part)
            continue
        text = await services.files.call(partial(_as_text, part["file"], services, session_id, saved, redact))
        parts.append({"type": "text", "text": text})
    return parts, saved


def _as_text(
    file: dict[str, Any], services: Services, session_id: str, saved: list[Upload], redact: Callable[[str], str]
) -> str:
    name = re.sub(r"[^\w.@ -]", "_", os.path.basename(str(file.get("name") or "file"))).lstrip(".") or "file"
    data = _bytes(file["data"])
    if _TEXT_TYPES.search(str(file.get("media_type") or "")) and b"\0" not in data:
        return f"File {name}:\n{redact(data.decode('utf-8', 'replace'))}"
    folder = folder_of(services.home, session_id)
    path = folder / name
    count = 1
    while path.exists():
        path = folder / f"{count}-{name}"
        count += 1
    write_private(path, data)
    saved.append(Upload(name, path, len(data), str(file.get("media_type") or "application/octet-stream")))
    return f"The user attached the file {name} ({len(data)} bytes, {file.get('media_type')}); it is at {path}."


def folder_of(home: Home, session_id: str) -> Path:
    """Where the files of a session lie."""
    return home.uploads / folder_name(session_id)


def _bytes(data: str | bytes) -> bytes:
    if isinstance(data, bytes):
        return data
    encoded = data.partition(";base64,")[2] if data.startswith("data:") else data
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return data.encode()


_ATTACHED = re.compile(r"File [\w.@ -]+:\n")


def own_words(content: Content | None) -> str:
    """What the user has said in a message: without the text of files that came with it."""
    if isinstance(content, list):
        return text_of([part for part in content if not _ATTACHED.match(str(part.get("text", "")))])
    return content or ""


def text_of(content: Content | None) -> str:
    """The words of a message."""
    if isinstance(content, list):
        texts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "\n".join(str(part.get("text", "")) for part in texts)
    return content or ""
