"""Renders the log as calls to an embedding program's functions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from hermes.core.events import Event
from hermes.core.json_types import JsonObject
from hermes.core.limits import THOUGHT_CHARS_MAX
from hermes.core.spec import Control

log = logging.getLogger(__name__)

Callback = Callable[..., object]
UNANSWERED = object()


@dataclass(slots=True)
class Callbacks:
    """The functions to call. The first exception of a function is logged, later ones are ignored."""

    stream_delta: Callback | None = None
    stream: Callback | None = None
    reasoning: Callback | None = None
    tool_start: Callback | None = None
    tool_complete: Callback | None = None
    tool_progress: Callback | None = None
    approval: Callback | None = None
    clarify: Callback | None = None
    event: Callback | None = None
    _args: dict[str, tuple[str, object]] = field(default_factory=dict)
    _thoughts: dict[str, str] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)

    @property
    def any(self) -> bool:
        listeners = (self.stream_delta, self.stream, self.reasoning, self.tool_start, self.tool_complete)
        return any((*listeners, self.tool_progress, self.approval, self.clarify, self.event))

    def notify(self, event: Event, content: str | None) -> object:
        """Render one event; `content` is the text of the row it announces. Returns what an answering function
        returned."""
        if self.event is not None:
            self._call("event", event.as_dict())
        tell = self._RENDER.get(event.type)
        return tell(self, event.data, content) if tell is not None else None

    def _text(self, data: JsonObject, _: str | None) -> None:
        self._call("stream_delta", data["text"])
        self._call("stream", data["text"])

    def _on_reasoning(self, data: JsonObject, _: str | None) -> None:
        self._call("reasoning", data["text"])
        thought = self._thoughts.get(data["message_id"], "")
        if len(thought) < THOUGHT_CHARS_MAX:
            self._thoughts[data["message_id"]] = (thought + data["text"])[:THOUGHT_CHARS_MAX]

    def _on_reasoning_completed(self, data: JsonObject, _: str | None) -> None:
        if thought := self._thoughts.pop(data["message_id"], ""):
            self._call("tool_progress", "reasoning.available", tool_name="_thinking", preview=thought)

    def _on_message(self, data: JsonObject, _: str | None) -> None:
        if data["tool_calls"]:
            self._call("stream_delta", None)

    def _on_tool_started(self, data: JsonObject, _: str | None) -> None:
        call_id, name, args = data["call_id"], data["name"], data["args"]
        self._args[call_id] = (name, args)
        self._call("tool_start", call_id, name, args)
        self._call("tool_progress", "tool.started", tool_name=name, preview=data["preview"], args=args)

    def _on_tool_finished(self, data: JsonObject, content: str | None) -> None:
        name, args = self._args.pop(data["call_id"], (data["name"], {}))
        self._call("tool_complete", data["call_id"], name, args, content or "")
        outcome = {"duration": data["duration_ms"] / 1000, "is_error": data["status"] != "ok"}
        self._call("tool_progress", "tool.completed", tool_name=name, preview=None, args=args, **outcome)

    def _ask_approval(self, data: JsonObject, _: str | None) -> object:
        return self._call("approval", data) if self.approval is not None else "deny"

    def _ask_question(self, data: JsonObject, _: str | None) -> object:
        return self._call("clarify", data["question"], data["choices"]) if self.clarify is not None else UNANSWERED

    def _call(self, name: str, *args: object, **kwargs: object) -> object:
        function = getattr(self, name)
        if function is None:
            return None
        try:
            return function(*args, **kwargs)
        except Exception:
            if name not in self._failed:
                self._failed.add(name)
                log.exception("the callback %s failed", name)
            return None

    _RENDER = {  # noqa: RUF012  (a table of methods, not state)
        "text.delta": _text,
        "reasoning.delta": _on_reasoning,
        "reasoning.completed": _on_reasoning_completed,
        "message.completed": _on_message,
        "tool.started": _on_tool_started,
        "tool.finished": _on_tool_finished,
        "approval.requested": _ask_approval,
        "clarify.requested": _ask_question,
    }


def answer_to(event: Event, answer: object) -> Control | None:
    if answer is None or event.type not in ("approval.requested", "clarify.requested"):
        return None
    if answer is UNANSWERED:
        return Control("answer", {"id": event.data["request_id"], "answer": None}, surface="callback")
    if event.type == "approval.requested":
        return Control("approve", {"id": event.data["approval_id"], "choice": str(answer)}, surface="callback")
    return Control("answer", {"id": event.data["request_id"], "answer": str(answer)}, surface="callback")
