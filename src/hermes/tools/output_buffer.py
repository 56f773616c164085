"""Output of a command: decoded, streamed, and stored in bounded memory."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hermes.core import limits
from hermes.core.formatting import COLOURS
from hermes.core.home import make_private_folder, private_opener
from hermes.core.threads import RunBlocking
from hermes.guards.secrets import Secrets
from hermes.sandbox.quota import note_spill

# A CSI sequence; one that holds a text, with its end; any other.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-OQ-WYZ\\`-~]"
)
# An incomplete sequence.
_STRAY = re.compile(r"\x1b(?!\[[0-9;:]*m)|\x9b")
_UNFINISHED = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*\Z|\x1b[\]PX^_][^\x07\x1b]*\x1b?\Z|\x1b[ -/]*\Z")
_UNFINISHED_CHARS_MAX = 4096
_FILE_PIECE_CHARS = 256 * 1024


class OutputDecoder:
    """Decodes bytes: invalid ones are replaced, escape sequences removed, known secrets masked. `coloured` is the last
    text with its colour sequences, for people who watch; if there are none, or something in it was masked or is held
    back, the text itself."""

    def __init__(self, secrets: Secrets) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._mask, self._redact = secrets.stream(), secrets.redact
        self._pending = ""
        self.coloured = ""

    def feed(self, data: bytes, *, end: bool = False) -> str:
        """The text of these bytes. A possibly incomplete escape sequence or line end is returned with the next call."""
        whole = text = self._pending + self._decoder.decode(data, end)
        self._pending = ""
        if "\x1b" in text or "\x9b" in text:
            text = _ESCAPES.sub("", text)
            if (match := _UNFINISHED.search(text)) and not end and len(text) - match.start() < _UNFINISHED_CHARS_MAX:
                text, self._pending = text[: match.start()], match[0]
            text = text.replace("\x1b", "")
        if text.endswith("\r") and not end:
            text, self._pending = text[:-1], f"\r{self._pending}"
        text = self._mask.feed(text.replace("\r\n", "\n").replace("\x00", "\ufffd"))
        text = text + self._mask.finish() if end else text
        self.coloured = self._with_colours(whole, text) if COLOURS.search(whole) else text
        return text

    def _with_colours(self, whole: str, text: str) -> str:
        """The text with its colours, unless a colour sequence could split a secret."""
        coloured = _ESCAPES.sub(lambda match: match[0] if COLOURS.fullmatch(match[0]) else "", whole)
        coloured = _STRAY.sub("", coloured).replace("\r\n", "\n").replace("\x00", "\ufffd")
        return coloured if COLOURS.sub("", coloured) == text == self._redact(text) else text


class HeadAndTail:
    """Keeps the first two fifths and the last three fifths of a limit."""

    def __init__(self, chars_max: int) -> None:
        self.chars_max, self.total = chars_max, 0
        self._head_max = chars_max * 2 // 5
        self._head = self._tail = ""

    def add(self, text: str) -> None:
        self.total += len(text)
        room = self._head_max - len(self._head)
        self._head += text[:room]
        self._tail = (self._tail + text[room:])[self._head_max - self.chars_max :]

    @property
    def cut(self) -> int:
        return max(0, self.total - self.chars_max)

    def text(self, more: str = "") -> str:
        mark = f"\n[… {self.cut} characters left out{more} …]\n" if self.cut else ""
        return f"{self._head}{mark}{self._tail}"


class LiveOutput:
    def __init__(self, emit: Callable[[str, str], None], stream: str) -> None:
        self._emit, self._stream = emit, stream
        self._room = limits.COMMAND_SHOWN_CHARS_MAX
        self._line = ""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def open(self) -> bool:
        return self._room > 0

    def add(self, text: str) -> None:
        self._line += text if self.open else ""
        whole = self._line.rfind("\n") + 1
        if whole:
            self._out(whole)
        if len(self._line) >= limits.COMMAND_PIECE_CHARS:
            self._out(len(self._line))
        if self._line and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(limits.COMMAND_QUIET_S, self.flush)

    def flush(self) -> None:
        if self._line:
            self._out(len(self._line))

    def _out(self, chars: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        text, self._line = self._line[:chars], self._line[chars:]
        self._emit(self._stream, text[: self._room])
        self._room -= len(text)
        if not self.open:
            self._line = ""
            self._emit("info", "[There is more output than is shown here.]\n")


class Spill:
    """A file for the whole text up to a limit, redacted."""

    def __init__(self, path: Path, blocking: RunBlocking, redact: Callable[[str], str]) -> None:
        self.path, self._blocking, self._redact = path, blocking, redact
        self.started, self.whole = False, True
        self._room, self._buffer = limits.COMMAND_OUTPUT_BYTES_KEPT, ""

    async def add(self, text: str) -> None:
        self.started = True
        if self.whole:
            self._buffer += text
            if len(self._buffer) >= _FILE_PIECE_CHARS:
                await self.flush(self._buffer.rfind("\n") + 1)

    async def flush(self, chars: int = 0) -> None:
        """Write the buffer, or its first `chars` characters."""
        chars = chars or len(self._buffer)
        text, self._buffer = self._buffer[:chars], self._buffer[chars:]
        if text:
            await self._blocking(partial(self._append, text))

    def _append(self, text: str) -> None:
        data = self._redact(text).encode("utf-8", "replace")
        self.whole = self.whole and len(data) <= self._room
        data = data[: self._room]
        self._room -= len(data)
        size = len(data)
        make_private_folder(self.path.parent)
        with open(self.path, "ab", buffering=0, opener=private_opener) as file:
            while data:
                data = data[file.write(data) or 0 :]
        note_spill(self.path, size)


class CapturedOutput:
    def __init__(
        self,
        chars_max: int,
        secrets: Secrets,
        emit: Callable[[str, str], None],
        stream: str = "stdout",
        spill: Spill | None = None,
    ) -> None:
        self.ends, self.spill = HeadAndTail(chars_max), spill
        self._decoder, self._live = OutputDecoder(secrets), LiveOutput(emit, stream)

    async def add(self, data: bytes, *, end: bool = False) -> None:
        text = self._decoder.feed(data, end=end)
        if self.spill is not None and (self.spill.started or self.ends.total + len(text) > self.ends.chars_max):
            await self.spill.add(text if self.spill.started else self.ends.text() + text)
        self.ends.add(text)
        shown = self._decoder.coloured
        for at in range(0, len(shown) if self._live.open else 0, limits.COMMAND_PIECE_CHARS):
            self._live.add(shown[at : at + limits.COMMAND_PIECE_CHARS])
            await asyncio.sleep(0)
        if end:
            self._live.flush()
            if self.spill is not None:
                await self.spill.flush()

    def text(self) -> str:
        spill = self.spill
        if spill is None or not spill.started:
            return self.ends.text()
        part = "all of it is" if spill.whole else f"its first {limits.COMMAND_OUTPUT_BYTES_KEPT >> 20} MiB are"
        return self.ends.text(f"; {part} in {spill.path}")
