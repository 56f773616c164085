"""The one way from the command to a terminal: standard output and error carry text, never what steers a terminal."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hermes.core.formatting import printable

_BEYOND_ASCII_CONTROL = re.compile("[\x7f-\x9f]")


class PlainStream:
    """A text stream without control characters, but for newlines and tabs. Its bytes and its file are the stream's own:
    what draws on the terminal takes those."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def plain_streams() -> Iterator[None]:
    """Whatever is printed meanwhile, by whomever, is plain."""
    before = sys.stdout, sys.stderr
    plain_streams = [PlainStream(stream) if stream is not None else None for stream in before]
    sys.stdout, sys.stderr = plain_streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def draw(text: str) -> None:
    """Write to the terminal of standard error what steers it, such as a return to the beginning of the line."""
    sys.stderr.flush()
    sys.stderr.buffer.write(text.encode())
    sys.stderr.buffer.flush()


def as_json(document: Any, **more: Any) -> str:
    """A document for a program. Every control character in it is written as an escape of JSON, so none is lost."""
    text = json.dumps(document, ensure_ascii=False, **more)
    return _BEYOND_ASCII_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
