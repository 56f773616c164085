"""The API's description in OpenAPI 3.1, made of the tables that the server works with. Pure."""

from __future__ import annotations

import functools
import re
from typing import Any

import msgspec

import hermes
from hermes.server import chat, models, prepared_response, shapes
from hermes.server import shapes_kept as kept
from hermes.server.openapi_parameters import EXAMPLES, HEADERS, PATHS, QUERIES, REQUEST_ID, parameter
from hermes.server.routes import ROUTES, Route

Json = dict[str, Any]
_SCHEMAS = "#/components/schemas/{name}"
_JSON, _EVENTS = "application/json", "text/event-stream"
_ABOUT = """\
A self-hosted AI agent behind the protocols of OpenAI. A turn (one run of the agent on one input) may use tools on the
server's host before it answers.

A body is a JSON object. In it `null` counts as absent, except where it clears a field; true and false may also come as
0, 1 or one of the words true, false, yes, no, on, off; fields without effect are named in `X-Hermes-Ignored`. Every GET
also answers HEAD. Every error has the form of `Error`; codes are words for programs, messages are for people."""


# --- answers ---------------------------------------------------------------------------------------------------------

# route: what it answers with when all is well
ANSWERS: dict[str, type[msgspec.Struct]] = {
    "health": shapes.Health,
    "health_v1": shapes.Health,
    "health_detailed": shapes.DetailedHealth,
    "health_ready": shapes.Ready,
    "ui": shapes.About,
    "models": shapes.ModelList,
    "model": shapes.Model,
    "capabilities": shapes.Capabilities,
    "skills": shapes.SkillList,
    "toolsets": shapes.ToolsetList,
    "chat_completions": shapes.ChatCompletion,
    "responses": shapes.Response,
    "response": shapes.Response,
    "response_delete": shapes.ResponseDeleted,
    "response_cancel": shapes.Response,
    "response_input_items": shapes.ItemList,
    "responses_compact": shapes.Compaction,
    "responses_input_tokens": shapes.InputTokens,
    "conversations": shapes.Conversation,
    "conversation": shapes.Conversation,
    "conversation_update": shapes.Conversation,
    "conversation_delete": shapes.ConversationDeleted,
    "conversation_items": shapes.ItemList,
    "conversation_items_add": shapes.ItemList,
    "conversation_item": shapes.ConversationItem,
    "conversation_item_delete": shapes.Conversation,
    "jobs": kept.JobList,
    "job_create": kept.JobKept,
    "job": kept.JobKept,
    "job_update": kept.JobKept,
    "job_delete": kept.JobDeleted,
    "job_pause": kept.JobKept,
    "job_resume": kept.JobKept,
    "job_run": kept.JobStarted,
    "job_runs": kept.RunList,
    "runs": kept.RunStarted,
    "run_list": kept.RunList,
    "run_status": kept.Run,
    "run_delete": kept.RunDeleted,
    "run_stop": kept.RunStopping,
    "run_steer": kept.Steered,
    "run_approval": kept.ApprovalAnswer,
    "run_clarify": kept.ClarifyAnswer,
    "sessions": kept.SessionList,
    "session_create": kept.SessionAnswer,
    "session_search": kept.MatchList,
    "session_import": kept.Imported,
    "session": kept.SessionAnswer,
    "session_update": kept.SessionAnswer,
    "session_delete": kept.SessionDeleted,
    "session_messages": kept.MessageList,
    "session_files": kept.FileList,
    "session_fork": kept.SessionAnswer,
    "session_compact": kept.SessionCompacted,
    "session_chat": kept.SessionTurn,
}
FAULTS = {
    400: "Bad request.",
    401: "Missing or invalid API key.",
    403: "Forbidden for this key, origin or host.",
    404: "Not found.",
    408: "Request timeout.",
    409: "Conflict with the current state.",
    410: "The events are no longer stored.",
    413: "Request body too large.",
    415: "Unsupported media type: the body must be JSON.",
    426: "WebSocket upgrade required.",
    429: "Too many requests.",
    431: "Request headers too large.",
    500: "Internal server error.",
    502: "The model provider failed.",
    503: "Service unavailable: the server, its store or the model provider.",
    504: "The turn or the model provider timed out.",
}
_ALWAYS = (400, 403, 408, 431, 500)
_WITH_BODY = (413, 415)
# What further things that a request names may be missing, or kept no longer.
_FURTHER = {"response": (410,), "conversations": (404,), "session_create": (404,)}
_TURN_HEADERS = {
    "X-Hermes-Session-Id": "the session of the turn",
    "X-Hermes-Run-Id": "the run of the turn",
    "X-Hermes-Session-Key": "the session key that was sent",
    "X-Hermes-Model": "the model that served the turn; not on streams",
    "X-Hermes-History": "where the history came from",
    "X-Hermes-Ignored": "fields that had no effect",
    "X-Hermes-Warning": "codes of warnings, as in `hermes.warnings`; not on streams",
}
_OTHER_TYPES: dict[str, tuple[str, ...]] = {
    "ui": ("text/html",),
    "docs": ("text/html",),
    "openapi": (_JSON,),
    "metrics": ("text/plain",),
    "session_export": (_JSON, "application/jsonl", "text/markdown"),
    "session_file": ("*/*",),
}
_STREAMS = {
    "chat_completions": "chunks as `data:` frames, at the end `[DONE]`; tools at work as `hermes.tool.progress` events",
    "responses": "`response.*` events with a `sequence_number`, at the end `[DONE]`",
    "response": "the same events again from any place, then live, at the end `[DONE]`",
    "run_events": "the events of the run under their numbers, from any place, then live",
    "session_chat_stream": "events from `run.started` to `done`",
}
# route that makes something: the parameter that names it elsewhere, and where the answer has it
LINKS = {
    "responses": ("response_id", "/id"),
    "conversations": ("conversation_id", "/id"),
    "runs": ("run_id", "/run_id"),
    "job_create": ("job_id", "/job/id"),
    "session_create": ("session_id", "/session/id"),
}
_ANYTHING: dict[str, Json] = {_JSON: {"type": "object"}, "*/*": {}}


def faults_of(route: Route) -> list[int]:
    """Every status with which a route may refuse, in order."""
    found = {*_ALWAYS, *route.faults, *_FURTHER.get(route.name, ())}
    if route.scope is not None:
        found.add(401)
    if route.scope not in (None, "any"):
        found.add(503)  # the store may be out of reach
    if route.body is not None:
        found.update(_WITH_BODY)
    if "{" in route.path:
        found.add(404)
    return sorted(found)


def _answers(route: Route) -> Json:
    answers: Json = {str(route.ok): _success(route)}
    for status in faults_of(route):
        answers[str(status)] = {"$ref": f"#/components/responses/Error{status}"}
    if route.name == "health_ready":
        answers["503"] = {"description": FAULTS[503], "content": {_JSON: {"schema": _ref(shapes.NotReady)}}}
    return answers


def _success(route: Route) -> Json:
    if route.ok == 101:
        return {"description": "The connection is a WebSocket now."}
    types: Json = {}
    if answer := ANSWERS.get(route.name):
        types[_JSON] = {"schema": _ref(answer)}
    for kind in _OTHER_TYPES.get(route.name, ()):
        types[kind] = {"schema": _ANYTHING.get(kind, {"type": "string"})}
    if route.stream:
        types[_EVENTS] = {"schema": {"description": _STREAMS[route.name]}}
    told: Json = {"description": route.summary, "content": types}
    if route.name in LINKS:
        name, where = LINKS[route.name]
        told["links"] = {
            target.name: {"operationId": target.name, "parameters": {name: f"$response.body#{where}"}}
            for target in ROUTES
            if f"{{{name}}}" in target.path
        }
    if route.name in HEADERS and route.body is not None:
        told["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in _TURN_HEADERS}
    return told


def _ref(kind: type[msgspec.Struct]) -> Json:
    return {"$ref": _SCHEMAS.format(name=kind.__name__)}


# --- the document ----------------------------------------------------------------------------------------------------


def group_of(route: Route) -> str:
    """The part of the API to which a route belongs."""
    part = route.path.removeprefix("/v1").removeprefix("/api").split("/")[1]
    return part if part in ("chat", "responses", "conversations", "runs", "sessions", "jobs") else "server"


def _operation(route: Route) -> Json:
    names = re.findall(r"{(\w+)}", route.path)
    parameters = [parameter("path", name, PATHS[name][0], {"type": "string", **PATHS[name][1]}) for name in names]
    told: Json = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [group_of(route)],
        "parameters": [*parameters, *QUERIES.get(route.name, ()), *HEADERS.get(route.name, ()), REQUEST_ID],
        "responses": _answers(route),
        "security": [] if route.scope is None else [{"key": []}, {"api_key": []}],
    }
    if route.scope is not None and route.scope != "any":
        ways = [" and ".join(f"`{one}`" for one in way.split()) for way in route.scope.split("|")]
        told["description"] = f"Needs a key with the scope {' or '.join(ways)}."
    if route.body is not None:
        needed = any(field.required for field in msgspec.structs.fields(route.body))
        content: Json = {"schema": _ref(route.body)}
        if example := EXAMPLES.get(route.name):
            content["example"] = example
        told["requestBody"] = {"required": needed, "content": {_JSON: content}}
    return told


_BODIES = tuple(dict.fromkeys(route.body for route in ROUTES if route.body is not None))
_REFUSED: dict[type[msgspec.Struct], tuple[str, ...]] = {
    models.ChatRequest: chat._UNSUPPORTED,
    models.ResponseRequest: prepared_response._UNSUPPORTED,
    models.RunRequest: ("tools",),
}


def _remarked(schemas: Json) -> Json:
    """The schemas with what types cannot say: fields that are always refused, and fields without effect."""
    for kind, names in _REFUSED.items():
        schemas[kind.__name__]["properties"] |= {
            name: {"type": "null", "description": "not supported"} for name in names
        }
    for body in _BODIES:
        for name in getattr(body, "WITHOUT_EFFECT", ()):
            schemas[body.__name__]["properties"][name]["description"] = "without effect"
    return schemas


@functools.cache
def document() -> Json:
    """The whole description. It is shared: nobody changes it."""
    paths: dict[str, Json] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    kinds = dict.fromkeys((*_BODIES, *ANSWERS.values(), shapes.Error, shapes.NotReady))
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS)
    error = {_JSON: {"schema": _ref(shapes.Error)}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Hermes",
            "version": hermes.__version__,
            "description": _ABOUT,
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in dict.fromkeys(map(group_of, ROUTES))],
        "paths": paths,
        "components": {
            "schemas": _remarked(schemas),
            "responses": {f"Error{status}": {"description": FAULTS[status], "content": error} for status in FAULTS},
            "headers": {
                name: {"description": about, "schema": {"type": "string"}} for name, about in _TURN_HEADERS.items()
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "the server's key"},
                "api_key": {"type": "apiKey", "in": "header", "name": "api-key", "description": "the same, otherwise"},
            },
        },
    }


@functools.cache
def encoded() -> bytes:
    """The same as JSON."""
    return msgspec.json.encode(document())
