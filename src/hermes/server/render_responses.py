"""A turn as a response: its items, its object, and its stream events. Pure: the same log gives the same bytes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hermes.core.events import Event
from hermes.core.failures import CODES, CUT_CODES, error_code
from hermes.core.ids import random_hex
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import RESUME_SEQ_STEP
from hermes.core.text import spaced_json
from hermes.server.errors import error_body
from hermes.server.event_size import shorten_outputs
from hermes.server.outcome import Outcome, usage_object
from hermes.server.render_shared import DONE, approval_request, clarify_request, encode, sse_frame
from hermes.server.sse import Item
from hermes.server.tool_types import CLIENT_TYPES, HOSTED_ITEMS, HOSTED_TYPES, HostedType, object_of

# Events of the log that bring their message along.
ROWS = frozenset({"tool.finished", "message.completed"})
_DELTA = "response.output_text.delta"


def socket_frame(_: str, payload: JsonObject) -> bytes:
    """A WebSocket message; messages are separated by a line break."""
    return spaced_json(payload).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class VisibleItems:
    """What a response shows: set by its request, the same for all its readers.

    `reported`: how the client knows a tool that is not a plain function.
    """

    tool_items: str = "function"
    reasoning: bool = False
    encrypted: bool = False
    extensions: bool = True
    client_tools: tuple[str, ...] = ()
    reported: Mapping[str, JsonObject] = field(default_factory=dict)


@dataclass(slots=True)
class _Open:
    """An item in progress."""

    item: JsonObject
    index: int
    pieces: list[str] = field(default_factory=list)
    head: bytes = b""

    @property
    def place(self) -> JsonObject:
        """The fields that locate the item in its events."""
        return {"item_id": self.item["id"], "output_index": self.index}


class ResponseRenderer:
    """Builds one response from its turn's events. With `handed_on` the next server ends it."""

    def __init__(
        self,
        template: JsonMapping,
        shows: VisibleItems | None = None,
        *,
        after: int = -1,
        frame: Callable[[str, JsonObject], bytes] = sse_frame,
        seal: Callable[[Any], str] | None = None,
        event_bytes_max: int | None = None,
    ) -> None:
        self._event_bytes_max = event_bytes_max
        self._template = dict(template)
        self._shows = shows or VisibleItems()
        self._after, self._frame, self._seal = after, frame, seal
        self.closing = DONE if frame is sse_frame else b""
        self._seq = -1
        self._out: list[bytes] = []
        self._items: list[JsonObject] = []
        self._text: _Open | None = None
        self._thought: _Open | None = None
        self._calls: dict[str, _Open] = {}
        self._message: str | None = None
        self._warnings: list[JsonObject] = []
        self._background = template["status"] == "queued"
        self.status: str = template["status"]
        self.ended = False
        self.handed_on = False
        self.response: JsonObject = dict(template)

    # --- the stream -------------------------------------------------------------------------------------------------

    def begin(self) -> Iterable[bytes]:
        self._life("response.created")
        yield self._taken()
        self._life("response.queued" if self._background else "response.in_progress")
        yield self._taken()

    def feed(self, items: list[Item]) -> bytes:
        for item in items:
            if isinstance(item, str):
                self._say(item, None)
            elif item.type == "text.delta":
                self._say(item.data["text"], item.data["message_id"])
            elif (render := self._RENDER.get(item.type)) is not None and not self.ended:
                render(self, item)
        return self._taken()

    def finish(self, ended: Outcome) -> bytes:
        """The end, where the log has none."""
        if not self.ended and not self.handed_on:
            for warning in ended.warnings:
                self.warn(warning["code"], warning["message"])
            if ended.text and all(item["type"] != "message" for item in self._items):
                self._say(ended.text, None)
            for call in ended.calls:
                self._client_call(call)
            self._end_as(ended)
        return self._taken()

    def warn(self, code: str, message: str) -> None:
        if all(warning["code"] != code for warning in self._warnings):
            self._warnings.append({"code": code, "message": message})

    def cut(self, reason: str) -> None:
        """End an unfinished response with what there is."""
        if not self.ended:
            self._close_all("incomplete")
            self._end("incomplete", reason=reason)

    # --- items ------------------------------------------------------------------------------------------------------

    def _say(self, text: str, message_id: str | None) -> None:
        if not text or self.ended:
            return
        if self._text is None or message_id != self._message:
            self._close_text("commentary")
            if not self._shows.encrypted:
                self._close_thought(None)
            self._message = message_id
            item_id = message_id or f"msg_{random_hex(12)}"
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item: JsonObject = {"type": "message", "id": item_id, "status": "in_progress", "role": "assistant"}
            self._text = opened = self._add({**item, "content": []})
            where = {**opened.place, "content_index": 0}
            self._emit("response.content_part.added", **where, part=part)
            opened.head = self._delta_head(where)
        opened = self._text
        opened.pieces.append(text)
        self._seq += 1
        if self._seq > self._after:
            if self._frame is sse_frame:
                head, tail = opened.head.split(b"\0", 1)
                self._out += (head, str(self._seq).encode(), tail, encode(text), b', "logprobs": []}\n\n')
            else:
                where = {**opened.place, "content_index": 0}
                self._out.append(self._framed(_DELTA, **where, delta=text, logprobs=[]))

    @staticmethod
    def _delta_head(where: JsonObject) -> bytes:
        """The frame before a delta's text, with 0 for its sequence number."""
        fixed = spaced_json(where)[1:-1]
        return f'event: {_DELTA}\ndata: {{"type": "{_DELTA}", "sequence_number": \0, {fixed}, "delta": '.encode()

    def _close_text(self, phase: str, status: str = "completed") -> None:
        opened, self._text = self._text, None
        if opened is None:
            return
        text = "".join(opened.pieces)
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        where = {**opened.place, "content_index": 0}
        self._emit("response.output_text.done", **where, text=text, logprobs=[])
        self._emit("response.content_part.done", **where, part=part)
        self._done(opened, status=status, phase=phase, content=[part])

    def _think(self, event: Event) -> None:
        if not (self._shows.reasoning or self._shows.encrypted):
            return
        opened = self._thought or self._begin_thought(event.data["message_id"])
        if not self._shows.reasoning:
            return
        where = {**opened.place, "summary_index": 0}
        if not opened.pieces:
            part = {"type": "summary_text", "text": ""}
            self._emit("response.reasoning_summary_part.added", **where, part=part)
        opened.pieces.append(event.data["text"])
        self._emit("response.reasoning_summary_text.delta", **where, delta=event.data["text"])

    def _begin_thought(self, message_id: str) -> _Open:
        item_id = f"rs_{message_id.removeprefix('msg_')}"
        self._thought = self._add({"type": "reasoning", "id": item_id, "status": "in_progress", "summary": []})
        return self._thought

    def _close_thought(self, sealed: str | None, status: str = "completed") -> None:
        opened, self._thought = self._thought, None
        if opened is None:
            return
        summary = []
        if opened.pieces:
            text = "".join(opened.pieces)
            summary = [{"type": "summary_text", "text": text}]
            where = {**opened.place, "summary_index": 0}
            self._emit("response.reasoning_summary_text.done", **where, text=text)
            self._emit("response.reasoning_summary_part.done", **where, part=summary[0])
        more = {"encrypted_content": sealed} if sealed is not None else {}
        self._done(opened, status=status, summary=summary, **more)

    def _reasoning_reported(self, event: Event) -> None:
        """Whole reasoning, as a replaced agent reports it."""
        if event.data.get("message_id") == "" and self._shows.reasoning and event.data.get("reasoning"):
            data = {"message_id": f"msg_{random_hex(12)}", "text": event.data["reasoning"]}
            self._think(Event("", "reasoning.delta", 0, data))
            self._close_thought(None)

    def _message_completed(self, event: Event) -> None:
        data = event.data
        if self._shows.encrypted:
            opaque = data.get("opaque")
            if opaque and self._thought is None:
                self._begin_thought(data["message_id"])
            self._close_thought(self._seal(opaque or {}) if self._seal else None)
        self._close_thought(None)
        calls = data["tool_calls"]
        self._close_text(
            "commentary" if calls else "final_answer", "incomplete" if data.get("partial") else "completed"
        )
        for call in calls:
            if call["name"] not in self._shows.client_tools:
                self._server_call(call["id"], call["name"], call["arguments"])

    def _server_call(self, call_id: str, name: str, arguments: str) -> None:
        if self._shows.tool_items == "none" or call_id in self._calls:
            return
        # A hosted tool that the client asked for, which this server tool stands in for.
        hosted = HOSTED_TYPES.get(self._shows.reported[name]["type"]) if name in self._shows.reported else None
        if hosted is not None:
            opened = self._hosted_call(hosted, call_id, name, arguments)
        elif self._shows.tool_items == "mcp":
            item: JsonObject = {
                "type": "mcp_call",
                "id": self._id("mcp", call_id),
                "server_label": "hermes",
                "name": name,
                "arguments": "",
                "output": None,
                "error": None,
                "approval_request_id": None,
                "status": "in_progress",
            }
            opened = self._add(item)
            self._emit("response.mcp_call.in_progress", **opened.place)
            self._emit("response.mcp_call_arguments.delta", **opened.place, delta=arguments)
            self._emit("response.mcp_call_arguments.done", **opened.place, arguments=arguments)
            opened.item["arguments"] = arguments
        else:
            opened = self._call(call_id, name, arguments)
        self._calls[call_id] = opened

    def _hosted_call(self, hosted: HostedType, call_id: str, name: str, arguments: str) -> _Open:
        item: JsonObject = {"type": hosted.call, "id": self._id(hosted.prefix, call_id), "status": "in_progress"}
        opened = self._add({**item, **hosted.fields[name](object_of(arguments))})
        for stage in ("in_progress", hosted.working):
            self._emit(f"response.{hosted.call}.{stage}", **opened.place)
        return opened

    def _client_call(self, call: JsonMapping) -> None:
        self._close_text("commentary")
        function = call["function"]
        self._call(call["id"], function["name"], function["arguments"])

    def _call(self, call_id: str, name: str, arguments: str) -> _Open:
        called = self._shows.reported.get(name) or {"type": "function", "name": name}
        kind = CLIENT_TYPES[called["type"]]
        payload = kind.pack(arguments)
        item = kind.item(called, self._id(kind.prefix, call_id), call_id)
        opened = self._add({**item, kind.payload: "" if kind.event else payload, "status": "in_progress"})
        if kind.event:
            named = {"name": item["name"]} if kind.payload == "arguments" else {}
            self._emit(f"{kind.event}.delta", **opened.place, delta=payload)
            self._emit(f"{kind.event}.done", **opened.place, **named, **{kind.payload: payload})
        self._done(opened, status="completed", **{kind.payload: payload})
        return opened

    def _tool_started(self, event: Event) -> None:
        """A call that no message has announced: only replaced agents report these."""
        data = event.data
        if data["call_id"] not in self._calls and not event.seq:
            self._close_text("commentary")
            arguments = data.get("raw") or spaced_json(data["args"])
            self._server_call(data["call_id"], data["name"], arguments)

    def _tool_finished(self, event: Event) -> None:
        data = event.data
        opened = self._calls.pop(data["call_id"], None)
        if opened is None:
            return
        output, well = _text_of(data.get("content")), data["status"] == "ok"
        if (hosted := HOSTED_ITEMS.get(opened.item["type"])) is not None:
            self._emit(f"response.{hosted.call}.completed", **opened.place)
            self._done(opened, status="completed" if well else "failed", **hosted.result(output))
            return
        if opened.item["type"] == "mcp_call":
            self._emit("response.mcp_call.completed" if well else "response.mcp_call.failed", **opened.place)
            error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": output}]}
            result = {"status": "completed", "output": output} if well else {"status": "failed", "error": error}
            self._done(opened, **result)
            return
        item = {"type": "function_call_output", "id": self._id("fco", data["call_id"]), "call_id": data["call_id"]}
        added = self._add({**item, "output": output, "status": "in_progress"})
        self._done(added, status="completed" if well or data["status"] != "interrupted" else "incomplete")

    def _id(self, kind: str, call_id: str) -> str:
        """A deterministic item id."""
        named = f"{self._template['id']} {call_id}"
        return f"{kind}_{hashlib.sha256(named.encode()).hexdigest()[:24]}"

    # --- life -------------------------------------------------------------------------------------------------------

    def _started(self, event: Event) -> None:
        if self._background and self.status == "queued":
            self.status = "in_progress"
            self._life("response.in_progress")

    def _resumed(self, event: Event) -> None:
        """Output indexes of lost text are not used again."""
        if event.data.get("lost"):
            self._seq = (self._seq // RESUME_SEQ_STEP + 1) * RESUME_SEQ_STEP - 1
            for message_id, offset in event.data["cut"].items() or [(None, 0)]:
                self._extend("hermes:resumed", {"item_id": message_id, "offset": offset})

    def _extend(self, kind: str, payload: JsonObject) -> None:
        if self._shows.extensions:
            self._emit(kind, **payload)

    def _completed(self, event: Event) -> None:
        for call in event.data["pending_calls"]:
            self._client_call(call)
        self._close_all("completed")
        self._end("completed", usage=event.data["usage"], at=event.ts)

    def _failed(self, event: Event) -> None:
        data = event.data
        ended = Outcome(
            text="x" * bool(data.get("text_length")),
            code=data.get("code") or "agent_incomplete",
            error=data["error"],
            failed=True,
            own_limit=self._template.get("max_output_tokens") is not None,
        )
        self._end_as(ended, usage=data["usage"])

    def _cancelled(self, event: Event) -> None:
        reason = event.data["reason"]
        self._close_all("incomplete")
        if reason in ("client_disconnected", "server_shutdown"):
            self._end("incomplete", reason=reason, usage=event.data["usage"])
        else:
            self._end("cancelled", reason="cancelled", usage=event.data["usage"])

    def _notice(self, event: Event) -> None:
        if event.data["code"] == "store_unavailable":
            self.warn(event.data["code"], event.data["message"])

    def _interrupted(self, _: Event) -> None:
        self.handed_on = True

    def _end_as(self, ended: Outcome, usage: JsonMapping | None = None) -> None:
        counts = {**ended.usage, **ended.details} if usage is None else usage
        if ended.code is None:
            self._close_all("completed")
            self._end("completed", usage=counts, at=time.time())
            return
        self._close_all("incomplete")
        if ended.code in CUT_CODES and ended.is_success:
            self._end("incomplete", reason=CODES[ended.code].incomplete_reason, usage=counts)
        elif ended.code == "interrupted":
            self._end("cancelled", reason="cancelled", usage=counts)
        elif ended.code == "server_shutdown":
            self._end("incomplete", reason="server_shutdown", usage=counts)
        else:
            self._end("failed", ended=ended, usage=counts)

    def _end(
        self,
        status: str,
        *,
        reason: str | None = None,
        ended: Outcome | None = None,
        usage: JsonMapping | None = None,
        at: float | None = None,
    ) -> None:
        self.status, self.ended = status, True
        changes: JsonObject = {"status": status, "usage": usage_object(usage or {})}
        if reason is not None:
            changes["incomplete_details"] = {"reason": reason}
        if at is not None:
            changes["completed_at"] = int(at)
        if self._warnings:
            changes["hermes"] = {"warnings": self._warnings}
        if ended is not None:
            failure = ended.failure()
            changes["error"] = {
                "code": error_code(failure.code).response_error,
                "message": failure.message,
                "type": failure.code,
            }
            envelope = error_body(error_code(failure.code).status, failure.message, failure.code)["error"]
            self._emit("error", code=failure.code, message=failure.message, param=None, error=envelope)
        self._template |= changes
        kind = {"completed": "response.completed", "failed": "response.failed"}.get(status, "response.incomplete")
        self._life(kind)
        self.response = self.snapshot()

    def _close_all(self, status: str) -> None:
        self._close_thought(None, status)
        self._close_text("final_answer", status)
        for opened in self._calls.values():
            if opened.item["type"] == "mcp_call":
                self._emit("response.mcp_call.failed", **opened.place)
            if opened.item["type"] != "function_call":
                self._done(opened, status="incomplete")
        self._calls.clear()

    def snapshot(self) -> JsonObject:
        return {**self._template, "status": self.status, "output": [dict(item) for item in self._items]}

    # --- frames -----------------------------------------------------------------------------------------------------

    def _add(self, item: JsonObject) -> _Open:
        opened = _Open(item, len(self._items))
        self._items.append(item)
        self._emit("response.output_item.added", output_index=opened.index, item=_streamed(item))
        return opened

    def _done(self, opened: _Open, **fields: Any) -> None:
        opened.item.update(fields)
        self._emit("response.output_item.done", output_index=opened.index, item=_streamed(opened.item))

    def _life(self, kind: str) -> None:
        shown = self.snapshot()
        shown["output"] = [_streamed(item) for item in shown["output"]]
        self._emit(kind, response=shown)
        if self._event_bytes_max is None or self._seq <= self._after:
            return
        excess_bytes = len(self._out[-1]) - self._event_bytes_max
        if excess_bytes > 0:
            shown["output"] = shorten_outputs(shown["output"], excess_bytes)
            self._out[-1] = self._framed(kind, response=shown)

    def _emit(self, kind: str, /, **payload: Any) -> None:
        self._seq += 1
        if self._seq > self._after:
            self._out.append(self._framed(kind, **payload))

    def _framed(self, kind: str, /, **payload: Any) -> bytes:
        return self._frame(kind, {"type": kind, "sequence_number": self._seq, **payload})

    def _taken(self) -> bytes:
        out, self._out = self._out, []
        return b"".join(out)

    _RENDER: dict[str, Callable[[ResponseRenderer, Event], None]] = {  # noqa: RUF012  (a table)
        "run.started": _started,
        "run.resumed": _resumed,
        "reasoning.delta": _think,
        "reasoning.completed": _reasoning_reported,
        "message.completed": _message_completed,
        "tool.started": _tool_started,
        "tool.finished": _tool_finished,
        "approval.requested": lambda self, event: self._extend("hermes:approval_request", approval_request(event)),
        "clarify.requested": lambda self, event: self._extend("hermes:clarify_request", clarify_request(event)),
        "run.completed": _completed,
        "run.failed": _failed,
        "run.cancelled": _cancelled,
        "notice": _notice,
        "run.interrupted": _interrupted,
    }


def _streamed(item: JsonObject) -> JsonObject:
    """An item as streams show it: there the output of a call is a list of parts."""
    if item["type"] == "function_call_output" and isinstance(item["output"], str):
        return {**item, "output": [{"type": "input_text", "text": item["output"]}]}
    return dict(item)


def _text_of(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return "" if content is None else str(content)
