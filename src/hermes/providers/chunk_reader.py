"""Reads the chunks of a streamed answer: joined texts where possible, and the parts of every other event."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

import msgspec

from hermes.core.limits import JSON_VALUES_MAX
from hermes.core.stream_parts import Part
from hermes.core.text import whole_tree
from hermes.http_client.exchange import StreamBroken
from hermes.http_client.sse import SseDecoder
from hermes.providers.base import Provider, WireEvent, as_dict, as_str

LOOKS_MAX = 8
_FRAME, _END = b"data: ", b"\n\n"
_strings = msgspec.json.Decoder(list[str]).decode


class ChunkTemplate:
    """Fast path: where events differ only in their text, it is sliced out by position instead of decoding JSON. The
    position is learnt from one event with `read`, the provider's `texts`; after `LOOKS_MAX` failed attempts the
    template gives up."""

    __slots__ = ("_between", "_cut", "_head", "_looks", "_read", "_tail")

    def __init__(self, read: Callable[[Sequence[bytes], int], list[str]]) -> None:
        self._read = read
        self._head = self._tail = self._between = b""
        self._cut: Callable[[bytes], bytes] = bytes
        self._looks = LOOKS_MAX

    @property
    def looks(self) -> bool:
        return self._looks > 0

    def texts(self, chunk: bytes) -> tuple[list[str], int]:
        """The texts at the start of a chunk, and how many of its bytes hold them."""
        is_alike = bool(self._head) and chunk.startswith(self._head)
        if not is_alike and not self._look(chunk):
            return [], 0
        start = len(self._head)
        end = chunk.rfind(self._tail, start)
        if end < 0:
            return [], 0
        size = end + len(self._tail)
        inner = list(map(self._cut, chunk[: size - len(_END)].split(_END)))
        texts: list[str] = []
        if self._between.join(inner) == chunk[start:end]:
            # A quotation mark ends a text, so whatever is not alike does not pass for one.
            try:  # noqa: SIM105  (a context manager takes three calls for every token)
                texts = _strings(b'["%b"]' % b'","'.join(inner))
            except (msgspec.MsgspecError, UnicodeError):
                pass
        if len(texts) != len(inner):
            self._looks -= 1
            return [], 0
        if is_alike:
            self._looks = LOOKS_MAX
        return texts, size

    def _look(self, chunk: bytes) -> bool:
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
    """What precedes and follows a text at each place it may have in an event, in any JSON encoding of it."""
    for written in {msgspec.json.encode(text), json.dumps(text).encode()}:
        index = event.rfind(written)
        while index >= 0:
            yield event[:index], event[index + len(written) :]
            index = event.rfind(written, 0, index)


class ChunkReader:
    """The stream of one answer. With `joins` texts are returned apart from the other parts and may be joined. `over`:
    the provider has ended the stream; `done`: with `[DONE]`."""

    __slots__ = ("_decoder", "_ends", "_parts", "_template", "_texts", "done", "over")

    def __init__(self, provider: Provider, *, joins: bool) -> None:
        self._decoder = SseDecoder()
        self._parts, self._ends = provider.parts, provider.ends
        self._texts = provider.texts if joins else None
        self._template = ChunkTemplate(self._texts) if self._texts is not None else None
        self.over = self.done = False

    def text(self, chunk: bytes) -> str:
        """The text of a chunk that holds nothing else; if "" is returned, the chunk must be fed."""
        if self._template is None or self._texts is None or not self._decoder.between:
            return ""
        texts, size = self._template.texts(chunk)
        if size != len(chunk):
            events = self._decoder.whole(chunk)
            texts = self._texts(events, 0) if events else []
            if len(texts) != len(events):
                return ""
        return "".join(texts)

    def feed(self, chunk: bytes) -> Iterator[tuple[list[str], Sequence[Part]]]:
        """The content of a chunk, in order: texts, or the parts of one event."""
        template = self._template
        if template is not None and template.looks and (whole := self._decoder.with_buffered(chunk)) is not None:
            chunk = whole
            texts, size = template.texts(chunk)
            if not size and 1 < (end := chunk.find(_END) + 2) < len(chunk):  # an answer may begin with something else
                yield from self._events(chunk[:end])
                chunk = chunk[end:]
                texts, size = template.texts(chunk) if not self.over else ([], 0)
            if size:
                yield texts, ()
                chunk = chunk[size:]
        if chunk and not self.over:
            yield from self._events(chunk)

    def _events(self, chunk: bytes) -> Iterator[tuple[list[str], Sequence[Part]]]:
        names: list[str] = []
        if not (events := self._decoder.whole(chunk)):
            pairs = self._decoder.feed(chunk)
            names, events = [name for name, _ in pairs], [data for _, data in pairs]
        index = 0
        while index < len(events) and not self.over:
            if self._texts is not None and (texts := self._texts(events, index)):
                yield texts, ()
                index += len(texts)
                continue
            name, data = names[index] if names else "", events[index]
            index += 1
            if data == b"[DONE]":
                self.over = self.done = True
                return
            event = WireEvent(name, decode(data))
            self.over = bool(self._ends) and (name or as_str(as_dict(event.data).get("type"))) in self._ends
            yield [], self._parts(event)


def decode(data: bytes) -> object:
    """Decode a provider's JSON; raises `StreamBroken`."""
    # Lists and objects take many times as much memory as their text.
    if len(data) > JSON_VALUES_MAX and data.count(b",") + data.count(b"[") + data.count(b"{") > JSON_VALUES_MAX:
        raise StreamBroken(f"An event has more than {JSON_VALUES_MAX} fields and items.", answered=True)
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError) as error:
        fault = error
    try:
        # Halves of characters are legal in JSON, though they are no text.
        return whole_tree(json.loads(data))
    except (ValueError, RecursionError):
        raise StreamBroken(f"An event is not valid JSON: {fault}", answered=True) from None
