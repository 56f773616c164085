"""A message as a person types it, with the files and pictures that it names."""

from __future__ import annotations

import base64
import mimetypes
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

from hermes.cli.output import NotFound, Refused, UsageError
from hermes.core import home as homes
from hermes.core.formatting import size
from hermes.core.json_types import JsonObject
from hermes.core.limits import ATTACHED_BYTES_MAX
from hermes.core.spec import Content
from hermes.guards.path_lists import Lists
from hermes.guards.paths import PathRefused, read_inside

# `@path` as a word of its own, the path in quotes where it holds spaces.
_NAMED = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_AFTER_STDIN = "\nThe file stdin above is what this is about. {}"
_END = ".,;:!?)"
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".webp")
_PATH_CHARS_MAX = 4_096
_PICTURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


def message(text: str, images: Sequence[str | bytes] = (), piped: bytes = b"", *, named: bool = True) -> Content:
    """The content of a message: its words, pictures (paths or data), what was piped in, and with `named` the files of
    `@path`."""
    paths = [*dict.fromkeys(path for name in _names(text) if (path := _found(name)))] if named else []
    parts = [
        part("image", image) if isinstance(image, bytes) else _picture(Path(image).expanduser()) for image in images
    ]
    parts += [part(path.name, _read(path)) for path in paths]
    if piped:
        # The instruction stands before and after the text: small models follow what they read last.
        parts += [_piped_part(piped), {"type": "text", "text": _AFTER_STDIN.format(text)}]
    return [{"type": "text", "text": text}, *parts] if parts else text


def piped() -> bytes:
    """What was piped into standard input. Raises UsageError past the limit."""
    if sys.stdin is None or sys.stdin.isatty():
        return b""
    data = sys.stdin.buffer.read(ATTACHED_BYTES_MAX + 1)
    if len(data) > ATTACHED_BYTES_MAX:
        raise UsageError(
            f"The text on standard input is larger than {size(ATTACHED_BYTES_MAX)}.",
            hint="write it to a file and name the file in the prompt, so that tools read parts of it",
        )
    return data


def check_image(name: str) -> Path:
    """The file of an image. Raises where it is none."""
    path = Path(name).expanduser()
    _picture(path)
    return path


def pasted(text: str) -> str:
    """A pasted text; where it is nothing but the path of an image, as terminals paste a file that was dropped, `@path`."""
    name = text.strip().removeprefix("file://")
    if not name or "\n" in name or len(name) > _PATH_CHARS_MAX:
        return text
    for candidate in (unquote(name), name, re.sub(r"\\(.)", r"\1", name), name.strip("'\"")):
        path = Path(os.path.expanduser(candidate))
        if path.suffix.lower() in _IMAGE_SUFFIXES and path.is_file():
            return f'@"{path}" '
    return text


def missing(text: str) -> list[str]:
    """What is named like a file and is none, for a word to whoever mistyped it."""
    return [name for name in _names(text) if re.search(r"[./]", name.strip(_END)) and not _found(name)]


def _names(text: str) -> Iterator[str]:
    return (match[1] or match[2] for match in _NAMED.finditer(text))


def _found(name: str) -> Path | None:
    """The file of a name; a sign that ends the sentence is not of it."""
    tried = (Path(os.path.expanduser(one)) for one in (name, name.rstrip(_END)))
    return next((path for path in tried if path.is_file()), None)


def part(name: str, data: bytes) -> JsonObject:
    """A file as what it is: a picture, text, or something that only tools can read."""
    kind = next((kind for mark, kind in _PICTURES.items() if data.startswith(mark)), None)
    if kind is not None:
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}
    try:
        kind = None if b"\0" in data else data.decode() and "text/plain"
    except UnicodeDecodeError:
        kind = None
    kind = kind or mimetypes.guess_type(name)[0] or "application/octet-stream"
    return {"type": "file", "file": {"name": name, "media_type": kind, "data": data}}


def _piped_part(data: bytes) -> JsonObject:
    """Text in another encoding than UTF-8 is text all the same; only what holds NUL bytes is not."""
    content_part = part("stdin", data)
    if content_part["type"] == "file" and b"\0" not in data:
        content_part["file"]["media_type"] = "text/plain"
    return content_part


def _picture(path: Path) -> JsonObject:
    content_part = part(path.name, _read(path))
    if content_part["type"] != "image_url":
        raise UsageError(f"{path} is no picture of a known kind.", hint="a PNG, JPEG, GIF or WebP file")
    return content_part


def _root(path: Path) -> Path:
    """Where a named file may lead by links: its repository, or the working folder; elsewhere the folder it is in."""
    here, given = Path.cwd(), Path(os.path.abspath(path))
    root = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
    return root if given.is_relative_to(root) else given.parent


def _read(path: Path) -> bytes:
    try:
        data = read_inside(path, _root(path), ATTACHED_BYTES_MAX + 1, Lists(homes.resolve().path, Path.home()))
    except PathRefused as refused:
        raise Refused(f"{path} is not attached. {refused}", hint="its name without @") from None
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}.") from None
    if len(data) > ATTACHED_BYTES_MAX:
        raise UsageError(f"{path} is larger than {size(ATTACHED_BYTES_MAX)}.", hint="its name without @")
    return data
