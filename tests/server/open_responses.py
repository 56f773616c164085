"""The Open Responses specification of 2026-04-24 as JSON Schemas: the response object, its items, and every event."""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema_rs

Json = dict[str, Any]

STRING, INTEGER, NUMBER, BOOLEAN, ANY = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {},
)


def enum_of(*values: str) -> Json:
    return {"enum": list(values)}


def maybe(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def many(schema: Json) -> Json:
    return {"type": "array", "items": schema}


def thing(optional: Json | None = None, /, **required: Json) -> Json:
    """An object with these keys; further ones may be there."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def kind(name: str, optional: Json | None = None, /, **required: Json) -> Json:
    """A schema discriminated by `type`."""
    return thing(optional, type=enum_of(name), **required)


LOGPROBS = many(thing(token=STRING, logprob=NUMBER, bytes=many(INTEGER), top_logprobs=many(ANY)))
ANNOTATION = kind("url_citation", url=STRING, start_index=INTEGER, end_index=INTEGER, title=STRING)
PART = {
    "oneOf": [
        kind("input_text", text=STRING),
        kind("output_text", {"logprobs": LOGPROBS}, text=STRING, annotations=many(ANNOTATION)),
        kind("text", text=STRING),
        kind("summary_text", text=STRING),
        kind("reasoning_text", text=STRING),
        kind("refusal", refusal=STRING),
        kind("input_image", image_url=maybe(STRING), detail=enum_of("low", "high", "auto")),
        kind("input_file", {"filename": STRING, "file_url": STRING}),
    ]
}
STATE = enum_of("in_progress", "completed", "incomplete")
ITEM = {
    "oneOf": [
        kind(
            "message",
            {"phase": enum_of("commentary", "final_answer")},
            id=STRING,
            status=STATE,
            role=enum_of("user", "assistant", "system", "developer"),
            content=many(PART),
        ),
        kind("function_call", id=STRING, call_id=STRING, name=STRING, arguments=STRING, status=STATE),
        kind(
            "function_call_output",
            id=STRING,
            call_id=STRING,
            output={"oneOf": [STRING, many(PART)]},
            status=STATE,
        ),
        kind("reasoning", {"content": many(PART), "encrypted_content": STRING}, id=STRING, summary=many(PART)),
        kind("compaction", {"created_by": STRING}, id=STRING, encrypted_content=STRING),
    ]
}
USAGE = thing(
    input_tokens=INTEGER,
    output_tokens=INTEGER,
    total_tokens=INTEGER,
    input_tokens_details=thing(cached_tokens=INTEGER),
    output_tokens_details=thing(reasoning_tokens=INTEGER),
)
FUNCTION_TOOL = kind(
    "function", name=STRING, description=maybe(STRING), parameters=maybe({"type": "object"}), strict=maybe(BOOLEAN)
)
MODE = enum_of("none", "auto", "required")
CHOSEN = kind("function", {"name": STRING})
TOOL_CHOICE = {"oneOf": [CHOSEN, MODE, kind("allowed_tools", tools=many(CHOSEN), mode=MODE)]}
FORMAT = {
    "oneOf": [
        kind("text"),
        kind("json_object"),
        kind("json_schema", name=STRING, description=maybe(STRING), schema=ANY, strict=BOOLEAN),
    ]
}
EFFORTS = enum_of("none", "minimal", "low", "medium", "high", "xhigh")
RESPONSE = thing(
    id=STRING,
    object=enum_of("response"),
    created_at=INTEGER,
    completed_at=maybe(INTEGER),
    status=enum_of("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
    incomplete_details=maybe(thing(reason=STRING)),
    model=STRING,
    previous_response_id=maybe(STRING),
    instructions=maybe(STRING),
    output=many(ITEM),
    error=maybe(thing(code=STRING, message=STRING)),
    tools=many(FUNCTION_TOOL),
    tool_choice=TOOL_CHOICE,
    truncation=enum_of("auto", "disabled"),
    parallel_tool_calls=BOOLEAN,
    text=thing({"verbosity": enum_of("low", "medium", "high")}, format=FORMAT),
    top_p=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    top_logprobs=INTEGER,
    temperature=NUMBER,
    reasoning=maybe(thing(effort=maybe(EFFORTS), summary=maybe(enum_of("concise", "detailed", "auto")))),
    usage=maybe(USAGE),
    max_output_tokens=maybe(INTEGER),
    max_tool_calls=maybe(INTEGER),
    store=BOOLEAN,
    background=BOOLEAN,
    service_tier=STRING,
    metadata=ANY,
    safety_identifier=maybe(STRING),
    prompt_cache_key=maybe(STRING),
)
COMPACTED = thing(id=STRING, object=enum_of("response.compaction"), created_at=INTEGER, output=many(ITEM), usage=USAGE)
ERROR = thing({"headers": {"type": "object"}}, type=STRING, code=maybe(STRING), message=STRING, param=maybe(STRING))
REFUSAL = thing(error=ERROR)
SOCKET_ERROR = thing(
    type=enum_of("error"),
    status=INTEGER,
    error=thing({"type": STRING, "param": maybe(STRING)}, code=STRING, message=STRING),
)

_PLACE = {"item_id": STRING, "output_index": INTEGER}
_CONTENT = {**_PLACE, "content_index": INTEGER}
_SUMMARY = {**_PLACE, "summary_index": INTEGER}
_PAYLOADS: dict[str, tuple[Json, Json]] = {
    **{
        f"response.{life}": ({"response": RESPONSE}, {})
        for life in ("created", "queued", "in_progress", "completed", "failed", "incomplete")
    },
    "response.output_item.added": ({"output_index": INTEGER, "item": maybe(ITEM)}, {}),
    "response.output_item.done": ({"output_index": INTEGER, "item": maybe(ITEM)}, {}),
    "response.content_part.added": ({**_CONTENT, "part": PART}, {}),
    "response.content_part.done": ({**_CONTENT, "part": PART}, {}),
    "response.output_text.delta": ({**_CONTENT, "delta": STRING}, {"logprobs": LOGPROBS, "obfuscation": STRING}),
    "response.output_text.done": ({**_CONTENT, "text": STRING}, {"logprobs": LOGPROBS}),
    "response.reasoning_summary_part.added": ({**_SUMMARY, "part": PART}, {}),
    "response.reasoning_summary_part.done": ({**_SUMMARY, "part": PART}, {}),
    "response.reasoning_summary_text.delta": ({**_SUMMARY, "delta": STRING}, {"obfuscation": STRING}),
    "response.reasoning_summary_text.done": ({**_SUMMARY, "text": STRING}, {}),
    "response.function_call_arguments.delta": ({**_PLACE, "delta": STRING}, {"obfuscation": STRING}),
    "response.function_call_arguments.done": ({**_PLACE, "arguments": STRING}, {}),
    "error": ({"error": ERROR}, {}),
}
EVENTS = {
    name: thing(optional, type=enum_of(name), sequence_number=INTEGER, **required)
    for name, (required, optional) in _PAYLOADS.items()
}
# Item and event types that are not of the specification begin with the maker's name.
OWN = "hermes:"


@cache
def _validator(name: str) -> Any:
    return jsonschema_rs.validator_for({**EVENTS, **_WHOLE}[name])


_WHOLE = {"response object": RESPONSE, "compaction object": COMPACTED, "refusal": REFUSAL, "socket error": SOCKET_ERROR}


def faults(name: str, value: Any) -> list[str]:
    """What of a value is not as the schema of that name wants it."""
    return [
        f"{name} {list(error.instance_path)}: {error.message[:300]}" for error in _validator(name).iter_errors(value)
    ]


def event_faults(event: Json) -> list[str]:
    """What is wrong with an event of a stream."""
    name = event.get("type", "")
    if name.startswith(OWN):
        return [] if isinstance(event.get("sequence_number"), int) else [f"{name} has no sequence_number"]
    return faults(name, event) if name in EVENTS else [f"{name} is no event of the specification"]
