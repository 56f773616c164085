"""What the local model writes, as it comes: an object that is either a call or an answer. Pure."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

_ANSWER = re.compile(r'\s*\{\s*"answer"\s*:\s*"')
_BEGUN_CALL = re.compile(r'\s*\{\s*"tool"\s*:\s*"(\w+)"\s*,\s*"arguments"\s*:\s*(.*)', re.S)
_MAYBE_ANSWER_CHARS = 24
# A backslash before anything else stands for itself: nobody means a backspace by `\b`, nor a form feed by `\f`.
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "/": "/"}
_ESCAPE = re.compile(r'\\u([0-9a-fA-F]{4})|(?!\\u[0-9a-fA-F]{0,3}\Z)\\(.)|[^\\"]+|"', re.S)
_VALID_ESCAPE = re.compile(r'\\(?:u[0-9a-fA-F]{4}|["\\/nrt])|(\\)')
_WORD = re.compile(r"\w{1,16}|[^\w\s]{1,16}")
# A loop: of so many words nearly all have stood there before, together with the words before them.
_LOOP_WORDS, _LOOP_SHARE, _TOGETHER = 90, 0.95, 5


class Repetition:
    """Notices when a text goes round in circles."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, ...]] = set()
        self._last: deque[str] = deque(maxlen=_TOGETHER)
        self._repeats: deque[bool] = deque(maxlen=_LOOP_WORDS)
        self._open = ""

    def feed(self, text: str) -> bool:
        self._open += text
        words = list(_WORD.finditer(self._open))[:-1]  # the last one may go on
        for word in words:
            self._last.append(word[0])
            together = tuple(self._last)
            self._repeats.append(together in self._seen)
            self._seen.add(together)
        self._open = self._open[words[-1].end() :] if words else self._open
        return sum(self._repeats) >= _LOOP_SHARE * _LOOP_WORDS


class Reading:
    """Turns pieces of the object into deltas of a chat completion. An answer is passed on while it is written.

    `continues`: the beginning of an answer was given, and what comes is the rest of it.
    """

    def __init__(self, call_id: str, *, continues: bool = False) -> None:
        self._call_id = call_id
        self._buffer = ""
        self._half = ""
        self._mode = "answer" if continues else ""
        self.called = False

    def feed(self, text: str) -> Iterator[dict[str, Any]]:
        self._buffer += text
        if not self._mode and (begins := _ANSWER.match(self._buffer)):
            self._mode, self._buffer = "answer", self._buffer[begins.end() :]
        elif not self._mode and len(self._buffer) > _MAYBE_ANSWER_CHARS:
            self._mode = "whole"
        if self._mode == "answer" and (delta := self._decoded()):
            yield {"content": delta}

    def finish(self) -> Iterator[dict[str, Any]]:
        if self._mode in ("answer", "done"):
            return
        text = _VALID_ESCAPE.sub(lambda match: r"\\" if match[1] else match[0], self._buffer)
        try:
            value = json.loads(text)
        except ValueError:  # it was cut: what there is of the call is told, so that it counts as cut
            if match := _BEGUN_CALL.match(text):
                yield self._call(match[1], match[2])
            return
        if "tool" in value:
            yield self._call(value["tool"], json.dumps(value["arguments"], ensure_ascii=False))
        elif value:
            yield {"content": json.dumps(value.get("answer", value), ensure_ascii=False)}

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        self.called = True
        function = {"name": name, "arguments": arguments}
        return {"tool_calls": [{"index": 0, "id": self._call_id, "type": "function", "function": function}]}

    def _decoded(self) -> str:
        """Decode the string so far; an incomplete escape waits."""
        pieces: list[str] = []
        at = 0
        while match := _ESCAPE.match(self._buffer, at):
            at = match.end()
            if match[0] == '"':
                self._mode = "done"
                break
            if match[1]:
                self._half += chr(int(match[1], 16))
                if len(self._half) == 1 and 0xD800 <= ord(self._half) < 0xDC00:
                    continue
                pieces.append(self._half.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
                self._half = ""
            else:
                pieces.append(_ESCAPES.get(match[2], match[0]) if match[2] else match[0])
        self._buffer = self._buffer[at:]
        return "".join(pieces)
