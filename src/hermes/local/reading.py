"""What the local model writes, as it comes: an object that is either a call or an answer. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_ANSWER = re.compile(r'\s*\{\s*"answer"\s*:\s*"')
_BEGUN_CALL = re.compile(r'\s*\{\s*"tool"\s*:\s*"(\w+)"\s*,\s*"arguments"\s*:\s*(.*)', re.S)
_MAYBE_ANSWER_CHARS = 24
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|([^u]))|[^\\"]+|"')


class Reading:
    """Pieces of the object in; deltas of a chat completion out. An answer comes through while it is written."""

    def __init__(self, call_id: str) -> None:
        self._call_id = call_id
        self._held = ""
        self._half = ""
        self._mode = ""
        self.called = False

    def feed(self, text: str) -> Iterator[dict[str, Any]]:
        self._held += text
        if not self._mode and (begins := _ANSWER.match(self._held)):
            self._mode, self._held = "answer", self._held[begins.end() :]
        elif not self._mode and len(self._held) > _MAYBE_ANSWER_CHARS:
            self._mode = "whole"
        if self._mode == "answer" and (delta := self._decoded()):
            yield {"content": delta}

    def finish(self) -> Iterator[dict[str, Any]]:
        if self._mode in ("answer", "done"):
            return
        try:
            found = json.loads(self._held)
        except ValueError:  # it was cut: what there is of the call is told, so that it counts as cut
            if begun := _BEGUN_CALL.match(self._held):
                yield self._call(begun[1], begun[2])
            return
        if "tool" in found:
            yield self._call(found["tool"], json.dumps(found["arguments"], ensure_ascii=False))
        elif found:
            yield {"content": json.dumps(found.get("answer", found), ensure_ascii=False)}

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        self.called = True
        function = {"name": name, "arguments": arguments}
        return {"tool_calls": [{"index": 0, "id": self._call_id, "type": "function", "function": function}]}

    def _decoded(self) -> str:
        """The part of the string that is certain; an escape that is not whole yet waits."""
        pieces: list[str] = []
        at = 0
        while found := _ESCAPE.match(self._held, at):
            at = found.end()
            if found[0] == '"':
                self._mode = "done"
                break
            if found[1]:
                self._half += chr(int(found[1], 16))
                if len(self._half) == 1 and 0xD800 <= ord(self._half) < 0xDC00:
                    continue
                pieces.append(self._half.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
                self._half = ""
            else:
                pieces.append(_ESCAPES.get(found[2], found[2]) if found[2] else found[0])
        self._held = self._held[at:]
        return "".join(pieces)
