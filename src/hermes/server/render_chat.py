"""A turn as chat completion chunks. Pure: events in, frames out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hermes.core.events import Event
from hermes.core.json_types import JsonObject
from hermes.server.outcome import Outcome
from hermes.server.render_shared import DONE, Progress, encode, sse_frame
from hermes.server.sse import Item


class ChatRenderer(Progress):
    """One streamed chat completion. The constant parts of a chunk are encoded once."""

    ended, closing = False, b""  # `finish` ends the stream

    def __init__(
        self, completion_id: str, model: str, created: int, *, usage: bool | None = None, reasoning: bool = False
    ) -> None:
        self.head = {"id": completion_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._tail: JsonObject = {"usage": None} if usage else {}
        self._usage, self._reasoning = usage, reasoning
        super().__init__()
        # Whether the client is known to fail on our own events.
        self.strict = False
        self._text = self._around("content")
        self._thought = self._around("reasoning_content") if reasoning else (b"", b"")
        self._message: str | None = None
        self._has_text = False

    def begin(self) -> Iterable[bytes]:
        yield sse_frame("", self._chunk({"role": "assistant", "content": ""}))

    def feed(self, items: list[Item]) -> bytes:
        out: list[bytes] = []
        for item in items:
            if isinstance(item, str):
                if item:
                    self._say(item, None, out)
            elif item.type == "text.delta":
                self._say(item.data["text"], item.data["message_id"], out)
            elif (render := self._RENDER.get(item.type)) is not None:
                render(self, item, out)
        return b"".join(out)

    def finish(self, ended: Outcome) -> bytes:
        """The rest of the text, the client's calls, finish reason and usage."""
        out: list[bytes] = []
        if not self._has_text and ended.text:
            self._say(ended.text, None, out)
        for at, call in enumerate(ended.calls):
            function = call["function"]
            opened = {"index": at, "id": call["id"], "type": "function"}
            parts = (
                {**opened, "function": {"name": function["name"], "arguments": ""}},
                {"index": at, "function": {"arguments": function["arguments"]}},
            )
            out += (sse_frame("", self._chunk({"tool_calls": [part]})) for part in parts)
        last = self._chunk({}, ended.finish_reason)
        if (flags := ended.flags()) is not None:
            if ended.finish_reason == "error":
                last["error"] = ended.error_object()
                if self.strict:  # some clients expect an error in its own frame
                    out.append(sse_frame("", {"error": last["error"]}))
            elif self.strict:  # and others take any field of this name for one
                flags.pop("error", None)
            last["hermes"] = flags
        if self._usage is None:
            last["usage"] = ended.chat_usage()
        out.append(sse_frame("", last))
        if self._usage:
            out.append(sse_frame("", {**self.head, "choices": [], "usage": ended.chat_usage()}))
        out.append(DONE)
        return b"".join(out)

    def _chunk(self, delta: JsonObject, finish: str | None = None) -> JsonObject:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self.head, "choices": [choice], **self._tail}

    def _around(self, field: str) -> tuple[bytes, bytes]:
        """The encoded chunk before and after its text."""
        head, _, tail = sse_frame("", self._chunk({field: "\0"})).partition(b'"\\u0000"')
        return head, tail

    def _say(self, text: str, message_id: str | None, out: list[bytes]) -> None:
        if message_id != self._message:
            # A following message starts a new paragraph.
            if self._has_text and self._message is not None:
                text = "\n\n" + text
            self._message = message_id
        self._has_text = True
        head, tail = self._text
        out += (head, encode(text), tail)

    def _think(self, event: Event, out: list[bytes]) -> None:
        if self._reasoning:
            head, tail = self._thought
            out += (head, encode(event.data["text"]), tail)

    def tell(self, name: str, key: str, payload: JsonObject, out: list[bytes]) -> None:
        if self.progress == "event":
            out.append(sse_frame(name, payload))
        elif self.progress == "chunk":
            out.append(sse_frame("", {**self._chunk({}), "hermes": {key: payload}}))

    _RENDER: dict[str, Callable[[Any, Event, list[bytes]], None]] = {  # noqa: RUF012  (a table)
        **Progress.RENDER,
        "reasoning.delta": _think,
    }
