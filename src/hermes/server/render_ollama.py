"""A turn as lines of JSON in the form of the Ollama protocol: events in, lines out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from hermes.core.json_types import JsonObject
from hermes.server.errors import OllamaError
from hermes.server.outcome import Outcome
from hermes.server.render_shared import encode
from hermes.server.sse import Item
from hermes.server.tool_types import object_of

# White space before a line changes nothing in it.
KEEPALIVE = b" "
_REASONS = {"length": "length"}


class OllamaAnswer(Struct, kw_only=True):
    """An answer, or a piece of one; with `done` the counts of the whole."""

    model: str
    created_at: str
    message: JsonObject | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaRenderer:
    """One chat, or one generated text: the form says which field of a line has the text."""

    ended, closing = False, b""  # it is `finish` that tells the end

    def __init__(self, model: str, created_at: str, form: Literal["message", "response"]) -> None:
        self._model, self._created_at, self._form = model, created_at, form
        self.thinking = False
        self._began_ns = time.perf_counter_ns()
        self._said = False
        self._message: str | None = None
        self._head, _, self._tail = encode(self._piece("\0")).partition(b'"\\u0000"')

    def begin(self) -> Iterable[bytes]:
        return ()

    def feed(self, items: list[Item]) -> bytes:
        out: list[bytes] = []
        for item in items:
            if isinstance(item, str):
                if item:
                    self._say(item, None, out)
            elif item.type == "text.delta":
                self._say(item.data["text"], item.data["message_id"], out)
            elif item.type == "reasoning.delta" and self.thinking:
                out += (encode(self._piece("", thinking=item.data["text"])), b"\n")
        return b"".join(out)

    def finish(self, ended: Outcome) -> bytes:
        """The rest of the text, the client's calls, how it ended, what it cost."""
        out: list[bytes] = []
        if not self._said and ended.text:
            self._say(ended.text, None, out)
        if ended.is_failure:
            return b"".join((*out, encode(OllamaError.of(ended.failure())), b"\n"))
        if ended.calls:
            out += (encode(self._piece("", calls=ended.calls)), b"\n")
        return b"".join((*out, encode(self._last(self._piece(""), ended)), b"\n"))

    def whole(self, ended: Outcome) -> OllamaAnswer:
        thought = ended.reasoning if self.thinking else ""
        return self._last(self._piece(ended.text, thinking=thought, calls=ended.calls), ended)

    def loaded(self) -> OllamaAnswer:
        piece = self._piece("")
        piece.done, piece.done_reason = True, "load"
        return piece

    def _piece(self, text: str, *, thinking: str = "", calls: list[JsonObject] | None = None) -> OllamaAnswer:
        piece = OllamaAnswer(model=self._model, created_at=self._created_at)
        if self._form == "response":
            piece.response, piece.thinking = text, thinking or UNSET
            return piece
        piece.message = {"role": "assistant", "content": text}
        if thinking:
            piece.message["thinking"] = thinking
        if calls:
            piece.message["tool_calls"] = [
                {
                    "id": call["id"],
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": object_of(call["function"]["arguments"]),
                    },
                }
                for call in calls
            ]
        return piece

    def _last(self, piece: OllamaAnswer, ended: Outcome) -> OllamaAnswer:
        piece.done, piece.done_reason = True, _REASONS.get(ended.finish_reason, "stop")
        piece.prompt_eval_count = ended.usage.get("input_tokens", 0)
        piece.eval_count = ended.usage.get("output_tokens", 0)
        piece.total_duration = piece.eval_duration = time.perf_counter_ns() - self._began_ns
        piece.load_duration = piece.prompt_eval_duration = 0
        return piece

    def _say(self, text: str, message_id: str | None, out: list[bytes]) -> None:
        if message_id != self._message:
            # A message that follows another one begins a paragraph of its own.
            if self._said and self._message is not None:
                text = "\n\n" + text
            self._message = message_id
        self._said = True
        out += (self._head, encode(text), self._tail, b"\n")
