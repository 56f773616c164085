"""Runs as objects, and a run's log as its events. Pure: records and events in, objects and frames out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from msgspec import UNSET, Struct, UnsetType

from hermes.agent.turn import COUNTS
from hermes.core.events import FINAL, Event, ShownStatus
from hermes.core.failures import CUT_CODES
from hermes.core.json_types import JsonObject
from hermes.core.limits import RUN_INPUT_SHOWN_CHARS
from hermes.core.spec import RunKind
from hermes.core.text import spaced_json, text_of
from hermes.server.outcome import usage_object
from hermes.server.render_shared import (
    approval_request,
    approval_responded,
    clarify_request,
    clarify_responded,
    encode,
    result_of,
    tool_output,
)
from hermes.server.shapes import Usage
from hermes.server.sse import Item
from hermes.store.base import RunRecord

Redact = Callable[[str], str]
# Events whose payload needs the message that they announce.
ROWS = FINAL | {"message.completed", "tool.finished"}
THOUGHTS = frozenset({"reasoning.completed"})
# Codes of runs that were never started, as the API names them.
_CODES = {
    "": "agent_error",
    "unknown": "agent_incomplete",
    "deadline": "turn_timeout",
    "crash_loop": "server_restarted",
}


class Run(Struct, kw_only=True, tag_field="object", tag="hermes.run"):
    ADMIN_ONLY: ClassVar = ("owner",)

    run_id: str
    kind: RunKind
    status: ShownStatus
    created_at: float
    started_at: float | None
    updated_at: float
    finished_at: float | None
    session_id: str
    response_id: str | None
    model: str | None
    last_event: str | None
    last_seq: int
    input: str | None
    output: str | None
    completed: bool
    partial: bool
    interrupted: bool
    error: str | None
    error_code: str | None
    pending_approvals: list[JsonObject]
    pending_question: JsonObject | None
    usage: Usage
    metadata: JsonObject
    owner: str | UnsetType = UNSET


def run_object(record: RunRecord, output: str | None, model_name: str) -> Run:
    """`output` is the run's final text."""
    spec, state = record.spec, record.state
    code = code_of(state.code) if state.status == "failed" else None
    approvals = [approval_request(Event(spec.run_id, "", 0, data)) for data in state.approvals.values()]
    questions = [clarify_request(Event(spec.run_id, "", 0, data)) for data in state.questions.values()]
    return Run(
        run_id=spec.run_id,
        kind=spec.kind,
        status="queued" if state.status == "interrupted" else state.status,
        created_at=record.created_at,
        started_at=state.started_at,
        updated_at=record.updated_at,
        finished_at=state.ended_at,
        session_id=spec.session_id,
        response_id=spec.response_id,
        model=(spec.route.name if spec.route else None) or model_name,
        last_event=public_name(state.last_event) if state.last_event else None,
        last_seq=state.last_seq,
        input=text_of(spec.user_message)[:RUN_INPUT_SHOWN_CHARS] or None,
        output=output or None,
        completed=state.status == "completed",
        partial=is_partial(state.status, output, code),
        interrupted=state.status == "cancelled",
        error=state.error or None,
        error_code=code,
        pending_approvals=[] if state.ended else approvals,
        pending_question=None if state.ended or not questions else questions[0],
        usage=Usage(**usage_object(state.usage)),
        metadata=dict(spec.metadata),
    )


def code_of(code: str) -> str:
    return _CODES.get(code, code)


def is_partial(status: str, output: str | None, code: str | None) -> bool:
    """Whether a run ended with less than it was asked for."""
    return status in ("failed", "cancelled") and (bool(output) or code in CUT_CODES)


def used_until(events: Sequence[Event], seq: int) -> list[Event]:
    """The usage events of a log up to a sequence number."""
    return [event for event in events if event.type == "usage" and event.seq <= seq]


class RunRenderer:
    """A run's log as its events. `used`: the usage before the first event."""

    closing = b": stream closed\n\n"

    def __init__(
        self, record: RunRecord, redact: Redact, *, names: bool, reasoning: bool, used: Iterable[Event] = ()
    ) -> None:
        spec = record.spec
        self._run_id, self._session_id = spec.run_id, spec.session_id
        self._client_tools = {str((tool.get("function") or tool).get("name")) for tool in spec.client_tools}
        self._redact, self._names, self._reasoning = redact, names, reasoning
        self._used = dict.fromkeys(COUNTS, 0)
        for event in used:
            self._usage(event)
        self.ended = False

    def begin(self) -> Iterable[bytes]:
        return ()

    def feed(self, items: list[Item]) -> bytes:
        out: list[bytes] = []
        for event in items:
            if isinstance(event, str):
                continue
            if event.type == "text.delta":
                out += self._delta(event, "message.delta", "delta")
            elif event.type == "reasoning.delta":
                if self._reasoning:
                    out += self._delta(event, "reasoning.delta", "text")
            elif (known := _EVENTS.get(event.type)) is not None:
                name, payload = known
                if (data := payload(self, event)) is not None:
                    out.append(self._frame(event, name, data))
            self.ended = self.ended or event.final
        return b"".join(out)

    def _delta(self, event: Event, name: str, field: str) -> tuple[bytes, bytes, bytes]:
        """Text deltas are the most frequent events: only their text is encoded."""
        data, named = event.data, f"event: {name}\n" if self._names else ""
        head = (
            f'id: {event.seq}\n{named}data: {{"event": "{name}", "run_id": "{self._run_id}", "seq": {event.seq}, '
            f'"timestamp": {event.ts!r}, "message_id": "{data["message_id"]}", "offset": {data["offset"]}, "{field}": '
        )
        return head.encode(), encode(data["text"]), b"}\n\n"

    def _frame(self, event: Event, name: str, payload: JsonObject) -> bytes:
        head = {"event": name, "run_id": self._run_id, "seq": event.seq, "timestamp": event.ts}
        named = f"event: {name}\n" if self._names else ""
        data = spaced_json({**head, **payload})
        return f"id: {event.seq}\n{named}data: {data}\n\n".encode()

    # --- payloads ---------------------------------------------------------------------------------------------------

    def _asked(self, event: Event) -> JsonObject:
        data = event.data
        names = ("message_id", "attempt", "model", "provider")
        return {"iteration": event.step, **{name: data.get(name) for name in names}}

    def _message(self, event: Event) -> JsonObject:
        data = event.data
        names = {call["name"] for call in data["tool_calls"]}
        # The client's calls end the turn; after others it goes on.
        phase = "commentary" if names and not names & self._client_tools else "final_answer"
        return {"message_id": data["message_id"], "content": text_of(data.get("content")), "phase": phase}

    def _thought(self, event: Event) -> JsonObject | None:
        text = event.data.get("reasoning")
        return {"message_id": event.data["message_id"], "text": text} if self._reasoning and text else None

    def _tool_started(self, event: Event) -> JsonObject:
        data = event.data
        payload = {"tool": data["name"], "tool_call_id": data["call_id"], "preview": data["preview"]}
        return {**payload, "arguments": data["args"], "iteration": event.step}

    def _tool_completed(self, event: Event) -> JsonObject:
        data = event.data
        return {
            "tool": data["name"],
            "tool_call_id": data["call_id"],
            "duration": data["duration_ms"] / 1000,
            "error": data["status"] != "ok",
            "status": data["status"],
            "result": result_of(data),
            "result_chars": data["chars"],
        }

    def _steered(self, event: Event) -> JsonObject | None:
        data = event.data
        return {"steer_id": data["control_id"], "text": data["data"]["text"]} if data["control"] == "steer" else None

    def _usage(self, event: Event) -> JsonObject | None:
        if event.data.get("task"):
            return None  # auxiliary calls are counted elsewhere
        for name in COUNTS:
            self._used[name] += event.data.get(name) or 0
        return {"usage": usage_object(self._used)}

    def _completed(self, event: Event) -> JsonObject:
        data = event.data
        return {
            "output": text_of(data.get("content")) or None,
            "usage": usage_object(data["usage"]),
            "completed": True,
            "partial": False,
            "session_id": self._session_id,
            "pending_calls": data["pending_calls"],
            "pending_steer": data.get("pending_steer"),
        }

    def _failed(self, event: Event) -> JsonObject:
        data, output = event.data, text_of(event.data.get("content")) or None
        code = code_of(data.get("code") or "")
        payload = {"error": self._redact(data["error"]), "error_code": code, "output": output}
        return {**payload, "usage": usage_object(data["usage"]), "partial": is_partial("failed", output, code)}

    def _cancelled(self, event: Event) -> JsonObject:
        output = text_of(event.data.get("content")) or None
        return {"reason": event.data["reason"], "output": output, "usage": usage_object(event.data["usage"])}


def _same(*names: str) -> Callable[[RunRenderer, Event], JsonObject]:
    """A payload that is sent as the log has it."""
    return lambda _, event: {name: event.data.get(name) for name in names}


def _retrying(_: RunRenderer, event: Event) -> JsonObject:
    message, seconds = str(event.data.get("message") or ""), round(event.data.get("wait_seconds") or 0)
    if event.data.get("action") in ("retry", "reconnect"):
        message = f"{message.rstrip('.')}; trying again{f' in {seconds} s' if seconds else ''}"
    return {"level": "warn", "code": "model_retrying", "message": message}


def _subagent(*names: str) -> Callable[[RunRenderer, Event], JsonObject]:
    def payload(_: RunRenderer, event: Event) -> JsonObject:
        data = event.data
        fields = {"subagent_id": data["child_run_id"], "tool_call_id": data["call_id"]}
        fields |= {name: data.get(name) for name in names}
        return {**fields, "error": data["status"] != "completed"} if "status" in names else fields

    return payload


_RESUMED = "The server was restarted; the turn continues where its log ends."
_LOST = "The machine was restarted; of each open message the text up to the offset in `cut` is on record."


def _resumed(_: RunRenderer, event: Event) -> JsonObject:
    warning = {"level": "warn", "code": "resumed", "message": _LOST if event.data.get("lost") else _RESUMED}
    return {**warning, "cut": event.data["cut"]} if event.data.get("lost") else warning


# event of the log: its name, and its payload; `feed` handles text deltas itself
_EVENTS: dict[str, tuple[str, Callable[[RunRenderer, Event], JsonObject | None]]] = {
    "run.queued": ("run.queued", _same("session_id", "position")),
    "run.started": ("run.started", _same("kind", "session_id", "model")),
    "run.resumed": ("warning", _resumed),
    "model.started": ("model.started", RunRenderer._asked),
    "model.retrying": ("warning", _retrying),
    "notice": ("warning", _same("level", "code", "message")),
    "control.received": ("steer.accepted", RunRenderer._steered),
    "steer.applied": ("steer.applied", _same("steer_ids", "where")),
    "model.switched": ("model.fallback", _same("from", "to", "reason")),
    "reasoning.completed": ("reasoning.available", RunRenderer._thought),
    "message.completed": ("message.completed", RunRenderer._message),
    "tool.started": ("tool.started", RunRenderer._tool_started),
    "tool.output": ("tool.output", lambda _, event: tool_output(event)),
    "tool.finished": ("tool.completed", RunRenderer._tool_completed),
    "subagent.started": ("subagent.started", _subagent("goal")),
    "subagent.finished": ("subagent.completed", _subagent("status", "usage")),
    "approval.requested": ("approval.request", lambda _, event: approval_request(event)),
    "approval.resolved": ("approval.responded", lambda _, event: approval_responded(event)),
    "clarify.requested": ("clarify.request", lambda _, event: clarify_request(event)),
    "clarify.resolved": ("clarify.responded", lambda _, event: clarify_responded(event)),
    "context.compacted": (
        "context.compressed",
        _same("reason", "method", "tokens_before", "tokens_after", "messages_archived"),
    ),
    "usage": ("usage.updated", RunRenderer._usage),
    "run.completed": ("run.completed", RunRenderer._completed),
    "run.failed": ("run.failed", RunRenderer._failed),
    "run.cancelled": ("run.cancelled", RunRenderer._cancelled),
}


def public_name(kind: str) -> str:
    return {"text.delta": "message.delta"}.get(kind) or _EVENTS.get(kind, (kind,))[0]
