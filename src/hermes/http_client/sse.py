"""Decoder of `text/event-stream`."""

from __future__ import annotations

from hermes.core.limits import EVENT_BYTES_MAX
from hermes.http_client.exchange import StreamBroken

_TAKEN_BACK_MAX = 64 * 1024


class SseDecoder:
    """Bytes of a `text/event-stream` in, `(event, data)` out, whatever the packets look like."""

    __slots__ = ("_began", "_buffer", "_data", "_name", "_pieces", "_pieces_size", "_size", "_skip_lf", "between")

    def __init__(self) -> None:
        # `between`: nothing is left of an event before the next chunk.
        self._began, self.between = False, True
        self._size = self._pieces_size = 0
        self._buffer = b""
        self._pieces: list[bytes] = []  # of a line that is longer than the packets, behind what is in the buffer
        self._name = ""
        self._data: list[bytes] = []
        self._skip_lf = False

    def feed(self, chunk: bytes) -> list[tuple[str, bytes]]:
        if whole := self.whole(chunk):
            return [("", data) for data in whole]
        events = self._read(chunk) if chunk else []
        self.between = self._began and not (self._buffer or self._pieces or self._data or self._name or self._skip_lf)
        return events

    def with_buffered(self, chunk: bytes) -> bytes | None:
        """A chunk with the start of its first event prepended, if that is all that is buffered."""
        if self.between:
            return chunk
        if self._data or self._name or self._skip_lf or not self._began:
            return None
        if len(self._buffer) + self._pieces_size > _TAKEN_BACK_MAX:
            return None
        self._join()
        before, self._buffer, self.between = self._buffer, b"", True
        return before + chunk

    def whole(self, chunk: bytes) -> list[bytes]:
        """The data of a chunk that consists of complete one-line events, as most do; it need not be fed then."""
        if not self.between or not chunk.endswith(b"\n\n") or b"\r" in chunk or len(chunk) > EVENT_BYTES_MAX:
            return []
        events = self._lines(chunk[:-2])
        self._began = self._began or bool(events)
        return events

    @staticmethod
    def _lines(whole: bytes) -> list[bytes]:
        lines = whole[6:].split(b"\n\ndata: ")
        return lines if whole.startswith(b"data: ") and whole.count(b"\n") == 2 * len(lines) - 2 else []

    def _read(self, chunk: bytes) -> list[tuple[str, bytes]]:
        # A line may end in two characters that come in two packets.
        skip, self._skip_lf = self._skip_lf and chunk[:1] == b"\n", chunk.endswith(b"\r")
        if skip:
            chunk = chunk[1:]
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._began and chunk and b"\n" not in chunk:
            self._pieces.append(chunk)
            self._pieces_size += len(chunk)
            self._check_size()
            return []
        self._join()
        events: list[tuple[str, bytes]] = []
        self._began = self._began or (self._buffer or chunk)[:1] != b"\xef"
        if self._began and not self._data and not self._name:
            chunk, self._buffer = self._quickly(self._buffer + chunk, events), b""
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        if not self._began and lines:
            self._began = True
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
        for line in lines:
            self._size += len(line)
            if not line:
                if self._data:
                    events.append((self._name, b"\n".join(self._data)))
                    self._data = []
                self._name = ""
                self._size = 0
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line.startswith(b"event:"):
                self._name = line[6:].strip().decode("utf-8", "replace")
            if self._size > EVENT_BYTES_MAX:
                break
        self._check_size()
        return events

    def _join(self) -> None:
        if self._pieces:
            self._buffer = b"".join((self._buffer, *self._pieces))
            self._pieces, self._pieces_size = [], 0

    def _check_size(self) -> None:
        if self._size + len(self._buffer) + self._pieces_size > EVENT_BYTES_MAX:
            raise StreamBroken(f"An event is longer than {EVENT_BYTES_MAX} bytes.", answered=True)

    def _quickly(self, chunk: bytes, events: list[tuple[str, bytes]]) -> bytes:
        """Decode complete one-line events at the start of a chunk; returns the rest."""
        whole, end, _ = chunk.rpartition(b"\n\n")
        if end and len(chunk) <= EVENT_BYTES_MAX and (lines := self._lines(whole)):
            events += [("", data) for data in lines]
            return chunk[len(whole) + 2 :]
        return chunk
