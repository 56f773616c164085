"""Fast path for streams: where chunks differ only in their text, it is cut out by its position instead of decoding JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

import msgspec

LOOKS_MAX = 8
_FRAME, _END = b"data: ", b"\n\n"
_strings = msgspec.json.Decoder(list[str]).decode


class ChunkTemplate:
    """Finds out from one event where the text stands in it. What has the same bytes around its text is read like it.

    `read` is how a provider reads texts. An answer whose events are never alike is soon left to it.
    """

    __slots__ = ("_between", "_cut", "_head", "_looks", "_read", "_tail")

    def __init__(self, read: Callable[[Sequence[bytes], int], list[str]]) -> None:
        self._read = read
        self._head = self._tail = self._between = b""
        self._cut: Callable[[bytes], bytes] = bytes
        self._looks = LOOKS_MAX

    @property
    def looks(self) -> bool:
        """Whether it is still of use to ask."""
        return self._looks > 0

    def texts(self, chunk: bytes) -> tuple[list[str], int]:
        """The texts that a chunk begins with, and how many of its bytes tell them."""
        known = bool(self._head) and chunk.startswith(self._head)
        if not known and not self._look(chunk):
            return [], 0
        start = len(self._head)
        end = chunk.rfind(self._tail, start)
        if end < 0:
            return [], 0
        size = end + len(self._tail)
        inner = list(map(self._cut, chunk[: size - len(_END)].split(_END)))
        found: list[str] = []
        if self._between.join(inner) == chunk[start:end]:
            # A quotation mark ends a text, so whatever is not alike does not pass for one.
            try:  # noqa: SIM105  (a context manager takes three calls for every token)
                found = _strings(b'["%b"]' % b'","'.join(inner))
            except (msgspec.MsgspecError, UnicodeError):
                pass
        if len(found) != len(inner):
            self._looks -= 1
            return [], 0
        if known:
            self._looks = LOOKS_MAX
        return found, size

    def _look(self, chunk: bytes) -> bool:
        """Find the place of the text in the first event of a chunk."""
        end = chunk.find(_END)
        event = chunk[len(_FRAME) : end]
        if self._looks <= 0 or end < 0 or not chunk.startswith(_FRAME) or b"\n" in event or b"\r" in event:
            return False
        if not (text := self._read([event], 0)):
            return False
        self._looks -= 1
        another = "+" if text[0] != "+" else "-"
        for before, after in _around(text[0], event):
            if self._read([b'%b"%b"%b' % (before, another.encode(), after)], 0) == [another]:
                self._head, self._tail = b'%b%b"' % (_FRAME, before), b'"%b%b' % (after, _END)
                self._between = self._tail + self._head
                self._cut = itemgetter(slice(len(self._head), len(_END) - len(self._tail)))
                return True
        return False


def _around(text: str, event: bytes) -> Iterator[tuple[bytes, bytes]]:
    """What stands before and behind a text wherever it may stand in an event, however that writes it."""
    for written in {msgspec.json.encode(text), json.dumps(text).encode()}:
        at = event.rfind(written)
        while at >= 0:
            yield event[:at], event[at + len(written) :]
            at = event.rfind(written, 0, at)
