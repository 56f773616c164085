"""Files in an answer: a tag `MEDIA:<path>` becomes an inline image, or a link to a copy of the file."""

from __future__ import annotations

import asyncio
import base64
import mimetypes
import os
import re
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from hermes.agent.content import Upload, folder_of
from hermes.agent.media_tags import BEGIN
from hermes.core import limits
from hermes.core.errors import HermesError
from hermes.core.home import make_private_folder, private_opener
from hermes.guards.paths import PathRefused, Paths
from hermes.tools.file_access import display_path, resolve_path

if TYPE_CHECKING:
    from hermes.agent.turn import Services
    from hermes.runs.engine import LiveRun
    from hermes.tools.framework.resources import RunResources

_CHARS = limits.MEDIA_TAG_CHARS_MAX - len(BEGIN)
_QUOTED = rf""""[^"\n]{{1,{_CHARS}}}+"|'[^'\n]{{1,{_CHARS}}}+'|`[^`\n]{{1,{_CHARS}}}+`"""
_CHAR = r"""[^\s"'`<>|]"""
_PLAIN = rf"""{_CHAR}{{1,{_CHARS}}}+(?=[\s"'`<>|]"""
_WHOLE = re.compile(rf"{BEGIN}(?:{_QUOTED}|{_PLAIN}))")
_LAST = re.compile(rf"{BEGIN}(?:{_QUOTED}|{_PLAIN}|\Z))")
_OPEN = re.compile(
    rf"""{BEGIN}(?:"[^"\n]{{0,{_CHARS}}}+|'[^'\n]{{0,{_CHARS}}}+|`[^`\n]{{0,{_CHARS}}}+|{_CHAR}{{0,{_CHARS}}}+)\Z"""
)
_REST = re.compile(rf"{BEGIN}{_CHAR}*+")
_TRAILING = ".,;:!?)]}*_"
_IMAGES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".gif": "gif", ".webp": "webp", ".bmp": "bmp"}


class MediaTagFilter:
    """Filters the text of a message on its way to `write`. `held` may become a tag; `export` returns the replacement of
    one."""

    def __init__(self, write: Callable[[str], None], export: Callable[[str], Awaitable[str | None]]) -> None:
        self.held = ""
        self._due: list[str] = []
        self._write, self._export = write, export

    def holds(self, text: str) -> bool:
        return bool(self.held or self._due) or BEGIN[0] in text

    async def feed(self, text: str, *, last: bool = False) -> None:
        """Write what is certainly no tag, and the replacements of tags. After a stop, the next call continues."""
        self.held += text
        at = 0
        try:
            await self._write_due()
            while at < len(self.held):
                begin, (at, tag) = at, _find_tag(self.held, at, last)
                if at > begin:
                    self._write(self.held[begin:at])
                if not tag:
                    return
                replacement = await self._replacement_of(tag)
                at += len(tag)
                self._due += (
                    replacement[n : n + limits.MEDIA_PIECE_CHARS]
                    for n in range(0, len(replacement), limits.MEDIA_PIECE_CHARS)
                )
                await self._write_due()
        finally:
            self.held = self.held[at:]  # once: slicing for each tag would be quadratic

    async def _write_due(self) -> None:
        """In pieces, because each takes time."""
        while self._due:
            self._write(self._due.pop(0))
            await asyncio.sleep(0)

    async def _replacement_of(self, tag: str) -> str:
        path = tag.removeprefix(BEGIN)
        if path[0] in "\"'`":
            return await self._export(path[1:-1]) or tag
        trimmed = path.rstrip(_TRAILING)
        for name in dict.fromkeys((path, trimmed)):
            if name and (url := await self._export(name)) is not None:
                return url + path[len(name) :]
        return tag


def _find_tag(text: str, at: int, last: bool) -> tuple[int, str]:
    while (at := text.find(BEGIN, at)) >= 0:
        if tag := (_LAST if last else _WHOLE).match(text, at):
            return at, tag[0]
        if not last and len(text) - at < limits.MEDIA_TAG_CHARS_MAX and _OPEN.match(text, at):
            return at, ""
        at = rest_match.end() if (rest_match := _REST.match(text, at)) else at + len(BEGIN)
    lengths = (n for n in range(len(BEGIN) - 1, 0, -1) if not last and text.endswith(BEGIN[:n]))
    return len(text) - next(lengths, 0), ""


class MediaExporter:
    """Makes the files that a turn's tools may read available to its client."""

    def __init__(self, live: LiveRun, services: Services, resources: Callable[[], RunResources]) -> None:
        self._live, self._services, self._resources = live, services, resources

    @property
    def resources(self) -> RunResources:
        return self._resources()

    def end(self) -> None:
        del self._resources

    async def exported(self, path: str) -> str | None:
        """An inline image, or a link to a copy; None if the file is not available."""
        try:
            await self._live.log.put_on_record()  # the file belongs to a session, whose id is known then
            paths = await self.resources.paths()
            name, data = await self._services.files.call(partial(self._take_file, paths, path))
            if isinstance(data, str):
                return f"![{name}]({data})"
            session_id = self._live.spec.session_id
            file_id = await self._live.store.sessions.add_file(
                session_id, data.name, bytes=data.bytes, mime=data.mime, direction="out", path=data.path
            )
            return f"[{name}](/api/sessions/{quote(session_id, safe='')}/files/{file_id})"
        except (PathRefused, OSError, HermesError):
            return None

    def _take_file(self, paths: Paths, path: str) -> tuple[str, str | Upload]:
        """The file's name for the model, and its data URL or a copy of it. Blocks."""
        real = paths.check(resolve_path(self, paths, path), "read")
        name = re.sub(r"[\[\]\\]", r"\\\g<0>", display_path(self, paths, real))
        with paths.open(str(real)) as file:
            size, kind = os.fstat(file.fileno()).st_size, _IMAGES.get(real.suffix.lower())
            if "\n" in name or size > limits.OUTGOING_BYTES_MAX:
                raise OSError
            if kind and size <= limits.INLINE_IMAGE_BYTES_MAX:
                return name, f"data:image/{kind};base64,{base64.b64encode(file.read(size)).decode()}"
            if not self._live.spec.persist:  # there is no session to keep it
                raise OSError
            copy = folder_of(self._services.home, self._live.spec.folder_id) / f"out_{secrets.token_hex(12)}"
            make_private_folder(copy.parent)
            with open(copy, "xb", opener=private_opener) as out:
                while size > out.tell() and (block := file.read(min(limits.BLOCK_BYTES, size - out.tell()))):
                    out.write(block)
                mime = mimetypes.guess_type(real.name)[0] or "application/octet-stream"
                return name, Upload(real.name, copy, out.tell(), mime)
