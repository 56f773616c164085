"""A turn as a message of the Messages protocol, whole or as the events of its stream. Pure: the same log gives the same
bytes, so a resumed stream is a replay whose first frames are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from hermes.core.events import Event
from hermes.core.failures import CUT_CODES
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import RESUME_SEQ_STEP
from hermes.core.text import spaced_json
from hermes.server.errors import MessagesError
from hermes.server.outcome import Outcome
from hermes.server.render_shared import Progress, encode, sse_frame
from hermes.server.shapes import FinishReason, MessageAnswer, MessageUsage, StopReason
from hermes.server.sse import Item
from hermes.server.tool_types import object_of

PING = sse_frame("ping", {"type": "ping"})
_STOP_REASONS: dict[FinishReason, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
# kind of a block: the type of its deltas, and the field that holds their text
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
_DELTA = b"event: content_block_delta\nid: "


def usage_of(counts: JsonMapping) -> MessageUsage:
    read, written = counts.get("cache_read_tokens") or 0, counts.get("cache_write_tokens") or 0
    return MessageUsage(
        input_tokens=max(0, (counts.get("input_tokens") or 0) - read - written),
        output_tokens=counts.get("output_tokens") or 0,
        cache_creation_input_tokens=written,
        cache_read_input_tokens=read,
    )


def message_of(message_id: str, model: str, ended: Outcome, *, thinking: bool) -> MessageAnswer:
    """The whole answer of a turn that has something to show."""
    content: list[JsonObject] = []
    if thinking and ended.reasoning:
        content.append({"type": "thinking", "thinking": ended.reasoning, "signature": message_id})
    if ended.text:
        content.append({"type": "text", "text": ended.text})
    content += (_tool_use(call, object_of(call["function"]["arguments"])) for call in ended.calls)
    return MessageAnswer(
        id=message_id,
        model=model,
        content=content,
        **_stop(ended),
        usage=usage_of({**ended.usage, **ended.details}),
        hermes=ended.flags() or msgspec.UNSET,
    )


def _stop(ended: Outcome) -> JsonObject:
    """Why the message ends. That it was stopped at a sequence is known of providers which say so."""
    reason = _STOP_REASONS[ended.finish_reason]
    if reason == "end_turn" and ended.stop_sequence:
        return {"stop_reason": "stop_sequence", "stop_sequence": ended.stop_sequence}
    return {"stop_reason": reason, "stop_sequence": None}


def _tool_use(call: JsonMapping, arguments: JsonObject) -> JsonObject:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


class MessagesRenderer(Progress):
    """One streamed message. Every frame but a ping has a number; those up to `after` are left out.

    Each message of a turn with several is a block of its own. The server's tools have no blocks: they are told, if at
    all, by events of our own.
    """

    closing = b""

    def __init__(self, message_id: str, model: str, *, thinking: bool, after: int = 0) -> None:
        super().__init__()
        self._start = MessageAnswer(id=message_id, model=model, content=[], stop_reason=None, usage=usage_of({}))
        self._thinking, self._after = thinking, after
        self.ended = False
        self._seq = 0
        self._index = -1
        self._kind = ""
        self._message: str | None = None
        self._head = b""
        self._said = False

    def begin(self) -> Iterable[bytes]:
        out: list[bytes] = []
        self._emit("message_start", {"message": msgspec.to_builtins(self._start)}, out)
        yield b"".join((*out, PING))

    def feed(self, items: list[Item]) -> bytes:
        out: list[bytes] = []
        for item in items:
            if isinstance(item, str):
                self._add("text", item, None, out)
            elif item.type == "text.delta":
                self._add("text", item.data["text"], item.data["message_id"], out)
            elif (render := self._RENDER.get(item.type)) is not None and not self.ended:
                render(self, item, out)
        return b"".join(out)

    def finish(self, ended: Outcome) -> bytes:
        """The end, where it is not told by the log."""
        out: list[bytes] = []
        if not self.ended:
            if not self._said and ended.text:
                self._add("text", ended.text, None, out)
            self._end(ended, out)
        return b"".join(out)

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _add(self, kind: str, text: str, message_id: str | None, out: list[bytes]) -> None:
        if not text or self.ended:
            return
        if kind != self._kind or message_id != self._message:
            self._close(out)
            self._kind, self._message = kind, message_id
            self._said = self._said or kind == "text"
            block = {"type": kind, _DELTAS[kind][1]: "", **({"signature": ""} if kind == "thinking" else {})}
            self._open(block, out)
            name, field = _DELTAS[kind]
            delta = {"type": "content_block_delta", "index": self._index, "delta": {"type": name, field: "\0"}}
            self._head = f"\ndata: {spaced_json(delta)}".encode().partition(b'"\\u0000"')[0]
        self._seq += 1
        if self._seq > self._after:
            out += (_DELTA, str(self._seq).encode(), self._head, encode(text), b"}}\n\n")

    def _open(self, block: JsonObject, out: list[bytes]) -> None:
        self._index += 1
        self._emit("content_block_start", {"index": self._index, "content_block": block}, out)

    def _close(self, out: list[bytes]) -> None:
        if self._kind == "thinking":
            # What the provider signed is in the session; this names the message there.
            signature = {"type": "signature_delta", "signature": self._message or self._start.id}
            self._emit("content_block_delta", {"index": self._index, "delta": signature}, out)
        if self._kind:
            self._emit("content_block_stop", {"index": self._index}, out)
        self._kind = ""

    def _think(self, event: Event, out: list[bytes]) -> None:
        if self._thinking:
            self._add("thinking", event.data["text"], event.data["message_id"], out)

    def _call(self, call: JsonMapping, out: list[bytes]) -> None:
        self._open(_tool_use(call, {}), out)
        arguments = spaced_json(object_of(call["function"]["arguments"]))
        delta = {"type": "input_json_delta", "partial_json": arguments}
        self._emit("content_block_delta", {"index": self._index, "delta": delta}, out)
        self._emit("content_block_stop", {"index": self._index}, out)

    def tell(self, name: str, key: str, payload: JsonObject, out: list[bytes]) -> None:
        # It has its number also where it is not shown, so that numbers do not depend on who reads.
        if self.progress == "event":
            self._emit(name, payload, out)
        elif self.progress == "chunk":
            self._emit("ping", {"hermes": {key: payload}}, out)
        else:
            self._seq += 1

    # --- the end ----------------------------------------------------------------------------------------------------

    def _resumed(self, event: Event, out: list[bytes]) -> None:
        """Where text that was shown is lost, its numbers are not given to what follows."""
        if event.data.get("lost"):
            self._seq = (self._seq // RESUME_SEQ_STEP + 1) * RESUME_SEQ_STEP

    def _completed(self, event: Event, out: list[bytes]) -> None:
        data = event.data
        ended = Outcome(calls=data["pending_calls"], details=data["usage"], stop_sequence=data.get("stop_sequence"))
        self._end(ended, out)

    def _failed(self, event: Event, out: list[bytes]) -> None:
        data = event.data
        code, text = data.get("code") or "agent_incomplete", "x" * bool(data.get("text_length"))
        cut = code in CUT_CODES
        ended = Outcome(text, code, data["error"], cut, failed=not cut, own_limit=True, details=data["usage"])
        self._end(ended, out)

    def _cancelled(self, event: Event, out: list[bytes]) -> None:
        data = event.data
        code = "server_shutdown" if data["reason"] == "server_shutdown" else "interrupted"
        text = "x" * bool(data.get("text_length"))
        ended = Outcome(text, code, "The turn was stopped.", bool(text), interrupted=True, details=data["usage"])
        self._end(ended, out)

    def _end(self, ended: Outcome, out: list[bytes]) -> None:
        self.ended = True
        self._close(out)
        if ended.is_failure:
            # Without a number: where another server goes on with the turn, what follows has the next one.
            out.append(sse_frame("error", msgspec.to_builtins(MessagesError.of(ended.failure()))))
            return
        for call in ended.calls:
            self._call(call, out)
        usage = msgspec.to_builtins(usage_of({**ended.usage, **ended.details}))
        flags = {"hermes": flags} if (flags := ended.flags()) is not None else {}
        self._emit("message_delta", {"delta": _stop(ended), "usage": usage, **flags}, out)
        self._emit("message_stop", {}, out)

    def _emit(self, kind: str, payload: JsonObject, out: list[bytes]) -> None:
        self._seq += 1
        if self._seq > self._after:
            out.append(f"event: {kind}\nid: {self._seq}\ndata: {spaced_json({'type': kind, **payload})}\n\n".encode())

    _RENDER: dict[str, Callable[[Any, Event, list[bytes]], None]] = {  # noqa: RUF012  (a table)
        **Progress.RENDER,
        "reasoning.delta": _think,
        "run.resumed": _resumed,
        "run.completed": _completed,
        "run.failed": _failed,
        "run.cancelled": _cancelled,
    }
