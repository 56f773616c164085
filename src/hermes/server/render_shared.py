"""What the renderers share: frames of server-sent events, and payloads that several streams have."""

from __future__ import annotations

import msgspec

from hermes.core.events import Event
from hermes.core.json_types import JsonObject
from hermes.core.limits import RESULT_SHOWN_CHARS_MAX
from hermes.core.text import spaced_json, text_of

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


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
    """The result of a tool as it is shown; secrets were taken out of it before it was stored."""
    return text_of(data.get("content"))[:RESULT_SHOWN_CHARS_MAX]


def tool_output(event: Event) -> JsonObject:
    fields = {name: event.data[name] for name in ("stream", "offset", "text")}
    return {"tool_call_id": event.data["call_id"], **fields}


def approval_responded(event: Event) -> JsonObject:
    data = event.data
    return {"approval_id": data["approval_id"], "choice": data["choice"], "resolved": 1, "by": data["by"]}


def clarify_responded(event: Event) -> JsonObject:
    return {name: event.data[name] for name in ("request_id", "answered", "by")}
