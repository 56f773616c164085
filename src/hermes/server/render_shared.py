"""Shared by the renderers: SSE frames, and payloads of several streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from hermes.core.events import Event
from hermes.core.json_types import JsonObject
from hermes.core.limits import RESULT_SHOWN_CHARS_MAX
from hermes.core.text import spaced_json, text_of

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode
_EMOJI = {"terminal": "💻", "todo": "📝", "memory": "🧠", "clarify": "❓"}


def sse_frame(name: str, payload: JsonObject) -> bytes:
    """One event, spaced as `json.dumps` does it; without a name it has no `event:` line."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {spaced_json(payload)}\n\n".encode()


def approval_request(event: Event) -> JsonObject:
    data = event.data
    rules = list(data.get("rules") or ())
    return {
        "run_id": event.run_id,
        "approval_id": data["approval_id"],
        "tool_call_id": data["call_id"],
        "kind": data.get("kind") or "command",
        "command": data.get("subject"),
        "description": data.get("reason"),
        "pattern_keys": rules,
        "pattern_key": rules[0] if rules else None,
        "allow_permanent": "always" in data["choices"],
        "choices": data["choices"],
        "expires_at": data["expires_at"],
        "path": data.get("path") or [],
        **({"smart_denied": True} if (data.get("reviewer") or {}).get("decision") == "deny" else {}),
    }


def clarify_request(event: Event) -> JsonObject:
    data = event.data
    fields = {name: data[name] for name in ("request_id", "question", "choices", "expires_at")}
    return {"run_id": event.run_id, "tool_call_id": data["call_id"], **fields}


def result_of(data: JsonObject) -> str:
    """A tool's result as shown; it was redacted before it was stored."""
    return text_of(data.get("content"))[:RESULT_SHOWN_CHARS_MAX]


def tool_output(event: Event) -> JsonObject:
    fields = {name: event.data[name] for name in ("stream", "offset", "text")}
    return {"tool_call_id": event.data["call_id"], **fields}


def approval_responded(event: Event) -> JsonObject:
    data = event.data
    return {"approval_id": data["approval_id"], "choice": data["choice"], "resolved": 1, "by": data["by"]}


def clarify_responded(event: Event) -> JsonObject:
    return {name: event.data[name] for name in ("request_id", "answered", "by")}


class Progress:
    """Tool progress and agent questions in a stream whose protocol has no place for them.

    `progress`: as our own events, within chunks of the protocol, or not at all (`off`).
    """

    def __init__(self) -> None:
        self.progress = "event"
        self._labels: dict[str, str] = {}

    def tell(self, name: str, key: str, payload: JsonObject, out: list[bytes]) -> None:
        """Add a payload: under `name` as an event, under `key` in a chunk."""
        raise NotImplementedError

    def _started(self, event: Event, out: list[bytes]) -> None:
        name, call_id = event.data["name"], event.data["call_id"]
        self._labels[call_id] = label = event.data.get("preview") or name
        self._tell_progress(name, label, call_id, {"status": "running"}, out)

    def _finished(self, event: Event, out: list[bytes]) -> None:
        name, call_id = event.data["name"], event.data["call_id"]
        label = self._labels.pop(call_id, None)
        if label is None:
            return
        result = {"duration": event.data["duration_ms"] / 1000, "error": event.data["status"] != "ok"}
        self._tell_progress(name, label, call_id, {"status": "completed", **result}, out)

    def _tell_progress(self, tool: str, label: str, call_id: str, state: JsonObject, out: list[bytes]) -> None:
        payload = {"tool": tool, "emoji": _EMOJI.get(tool, "🔧"), "label": label, "toolCallId": call_id, **state}
        self.tell("hermes.tool.progress", "tool_progress", payload, out)

    RENDER: dict[str, Callable[[Any, Event, list[bytes]], None]] = {  # noqa: RUF012  (a table)
        "tool.started": _started,
        "tool.finished": _finished,
        "approval.requested": lambda self, event, out: self.tell(
            "hermes.approval.request", "approval_request", approval_request(event), out
        ),
        "clarify.requested": lambda self, event, out: self.tell(
            "hermes.clarify.request", "clarify_request", clarify_request(event), out
        ),
    }
