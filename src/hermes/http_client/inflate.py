"""Incremental decompression of a body, with a limit on its ratio."""

from __future__ import annotations

import zlib
from typing import Literal

from hermes.core.limits import INFLATED_PIECE_BYTES_MAX, INFLATED_RATIO_MAX, INFLATED_SMALL_BYTES

ENCODINGS = ("gzip", "x-gzip", "deflate")


def decompressor(encoding: str, data: bytes) -> zlib._Decompress:
    """For a body that begins with `data`: some servers send deflate without its zlib header."""
    bare = encoding == "deflate" and data[0] & 0x0F != 8
    return zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32)


class InflateError(Exception):
    """The text completes a sentence that begins with what was being inflated."""

    def __init__(self, reason: Literal["broken", "too_large"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Inflater:
    """One body in one of `ENCODINGS`: feed a piece, then read until it is empty."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._inflater: zlib._Decompress | None = None
        self._pending, self._has_more = b"", False
        self._received = self._returned = 0

    def feed(self, data: bytes) -> None:
        self._pending, self._has_more = data, bool(data)
        self._received += len(data)

    def read(self) -> bytes:
        """The next piece; empty if more input is needed. Raises InflateError."""
        if not self._has_more:
            return b""
        if self._inflater is None:
            self._inflater = decompressor(self._encoding, self._pending)
        try:
            piece = self._inflater.decompress(self._pending, INFLATED_PIECE_BYTES_MAX)
        except zlib.error:
            raise InflateError("broken", "cannot be decompressed") from None
        if self._inflater.unused_data:
            raise InflateError("broken", "goes on after the end of its compressed data")
        self._pending = self._inflater.unconsumed_tail
        self._has_more = len(piece) == INFLATED_PIECE_BYTES_MAX
        self._returned += len(piece)
        if self._returned > INFLATED_RATIO_MAX * max(self._received, INFLATED_SMALL_BYTES):
            raise InflateError("too_large", f"inflates to more than {INFLATED_RATIO_MAX} times its size")
        return piece

    def finish(self) -> None:
        """Raise InflateError if the data ended early."""
        if self._inflater is not None and not self._inflater.eof:
            raise InflateError("broken", "ends before its compressed data does")
