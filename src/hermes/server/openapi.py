"""The OpenAPI 3.1 description, generated from the routes. Pure."""

from __future__ import annotations

import functools
import re

import msgspec

import hermes
from hermes.core.json_types import JsonObject
from hermes.core.limits import SESSION_ID_CHARS_MAX
from hermes.server.query_params import OFFSET_MAX
from hermes.server.readiness import Check
from hermes.server.render_run import Run
from hermes.server.render_session import Branch, Session
from hermes.server.routes import GROUPS, ROUTES, TURN_HEADERS, Route, header

_SCHEMAS = "#/components/schemas/{name}"
_JSON, _EVENTS = "application/json", "text/event-stream"
_ABOUT = """\
A self-hosted AI agent behind the protocols of OpenAI. A turn (one run of the agent on one input) may use tools on the
server's host before it answers.

A body is a JSON object. In it `null` counts as absent, except where it clears a field; true and false may also come as
0, 1 or one of the words true, false, yes, no, on, off; fields without effect are named in `X-Hermes-Ignored`. Every GET
also answers HEAD. Every error has the form of `Error`; codes are words for programs, messages are for people."""


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
_TURN_HEADERS = {
    "X-Hermes-Session-Id": "the session of the turn",
    "X-Hermes-Run-Id": "the run of the turn",
    "X-Hermes-Session-Key": "the session key that was sent",
    "X-Hermes-Model": "the model that served the turn; not on streams",
    "X-Hermes-History": "where the history came from",
    "X-Hermes-Ignored": "fields that had no effect",
    "X-Hermes-Warning": "codes of warnings, as in `hermes.warnings`; not on streams",
}
# path parameter: what it is, and its schema
PATHS: dict[str, tuple[str, JsonObject]] = {
    "model_id": ("the name of a model; it may hold slashes", {"minLength": 1}),
    "session_id": ("the id of a session", {"minLength": 1, "maxLength": SESSION_ID_CHARS_MAX}),
    "response_id": ("the id of a response", {"minLength": 1}),
    "conversation_id": ("the id of a conversation", {"minLength": 1}),
    "item_id": ("the id of an item", {"minLength": 1}),
    "run_id": ("the id of a run", {"minLength": 1}),
    "job_id": ("the id of a job", {"pattern": "^[0-9a-f]{12}$"}),
    "file_id": ("the id of a file", {"minLength": 1}),
    "memory_target": ("which memory", {"enum": ["memory", "user"]}),
    "skill_name": ("the name of a skill", {"minLength": 1}),
    "setting_name": ("the name of a setting, such as `agent.max_turns`", {"minLength": 1}),
    "mcp_name": ("the name of an MCP server", {"minLength": 1}),
    "message_id": ("the id of a message", {"minLength": 1}),
    "asset": ("the name of a file that the page asks for", {"minLength": 1}),
}
_LICENSE = {"name": "MIT", "identifier": "MIT"}
_REQUEST_ID = header("X-Request-Id", "an id of the client's own for this request: up to 128 of A-Z a-z 0-9 . _ -")
_ANYTHING: dict[str, JsonObject] = {_JSON: {"type": "object"}, "*/*": {}}


def faults_of(route: Route) -> list[int]:
    statuses = {*_ALWAYS, *route.faults, *route.refusals}
    if route.scope is not None:
        statuses.add(401)
    if route.scope not in (None, "any"):
        statuses.add(503)  # the store may be out of reach
    if route.body is not None:
        statuses.update(_WITH_BODY)
    if "{" in route.path:
        statuses.add(404)
    return sorted(statuses)


def _answers(route: Route) -> JsonObject:
    answers: JsonObject = {str(route.status): _success(route)}
    answers |= {str(status): {"description": about} for status, about in route.also.items()}
    for status in faults_of(route):
        answers[str(status)] = {"$ref": f"#/components/responses/{route.errors.__name__}{status}"}
    for status, kind in route.refusals.items():
        answers[str(status)] = {"description": FAULTS[status], "content": {_JSON: {"schema": _ref(kind)}}}
    return answers


def _success(route: Route) -> JsonObject:
    if route.status == 101:
        return {"description": "The connection is a WebSocket now."}
    types: JsonObject = {}
    if route.answers is not None:
        types[_JSON] = {"schema": _ref(route.answers)}
    for kind in route.types:
        types[kind] = {"schema": _ANYTHING.get(kind, {"type": "string"})}
    if route.stream:
        types[_EVENTS] = {"schema": {"description": route.stream}}
    answer: JsonObject = {"description": route.summary, "content": types}
    if route.link is not None:
        name, place = route.link
        answer["links"] = {
            target.name: {"operationId": target.name, "parameters": {name: f"$response.body#{place}"}}
            for target in ROUTES
            if f"{{{name}}}" in target.path
        }
    if route.body is not None and all(header in route.headers for header in TURN_HEADERS):
        answer["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in _TURN_HEADERS}
    return answer


def _ref(kind: type[msgspec.Struct]) -> JsonObject:
    return {"$ref": _SCHEMAS.format(name=kind.__name__)}


# --- the document ----------------------------------------------------------------------------------------------------


def _query_parameters(kind: type[msgspec.Struct]) -> list[JsonObject]:
    struct = msgspec.json.schema_components([kind])[1][kind.__name__]
    parameters = []
    for name, field in struct["properties"].items():
        # The type of a field that may be absent comes first, before null.
        schema, default = field.get("anyOf", [field])[0], field.pop("default", None)
        if "enum" in schema:
            schema["type"] = "string"
        if schema.get("maximum", 0) >= OFFSET_MAX:  # a bound of the store, not of the API
            del schema["maximum"]
        if default is not None:
            schema["default"] = default
        parameter = {"name": name, "in": "query", "description": schema.pop("description"), "schema": schema}
        parameters.append({**parameter, "required": True} if name in struct["required"] else parameter)
    return parameters


def _operation(route: Route) -> JsonObject:
    parameters: list[JsonObject] = []
    for name in re.findall(r"{(\w+)}", route.path):
        description, schema = PATHS[name][0], {"type": "string", **PATHS[name][1]}
        parameters.append({"name": name, "in": "path", "description": description, "schema": schema, "required": True})
    if route.query is not None:
        parameters += _query_parameters(route.query)
    operation: JsonObject = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.group],
        "parameters": [*parameters, *route.headers, _REQUEST_ID],
        "responses": _answers(route),
        "security": [] if route.scope is None else [{"key": []}, {"api_key": []}, {"x_api_key": []}],
    }
    if route.scope is not None and route.scope != "any":
        ways = [" and ".join(f"`{scope}`" for scope in way.split()) for way in route.scope.split("|")]
        operation["description"] = f"Needs a key with the scope {' or '.join(ways)}."
    if route.body is not None:
        required = any(field.required for field in msgspec.structs.fields(route.body))
        content: JsonObject = {"schema": _ref(route.body)}
        if route.example is not None:
            content["example"] = route.example
        operation["requestBody"] = {"required": required, "content": {_JSON: content}}
    return operation


def _body_schemas() -> JsonObject:
    """Request bodies, with the fields that are always refused and those without effect."""
    bodies = dict.fromkeys(route.body for route in ROUTES if route.body is not None)
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_SCHEMAS)
    for kind in bodies:
        properties = schemas[kind.__name__]["properties"]
        for name in getattr(kind, "UNSUPPORTED", ()):
            properties[name] = {"type": "null", "description": "not supported"}
        for name in getattr(kind, "WITHOUT_EFFECT", ()):
            properties[name]["description"] = "without effect"
    return schemas


def _answer_schemas() -> JsonObject:
    """Answers. Fields with a default are always sent; what only admins see is not described."""
    answers = dict.fromkeys(route.answers for route in ROUTES if route.answers is not None)
    refusals = dict.fromkeys(kind for route in ROUTES for kind in route.refusals.values())
    forms = dict.fromkeys(route.errors for route in ROUTES)
    _, schemas = msgspec.json.schema_components([*answers, *refusals, *forms], ref_template=_SCHEMAS)
    for schema in schemas.values():
        for name, field in schema["properties"].items():
            if "default" in field:
                del field["default"]
                schema["required"].append(name)
    for kind in (Run, Session, Branch, Check):
        for name in kind.ADMIN_ONLY:
            del schemas[kind.__name__]["properties"][name]
    return schemas


@functools.cache
def document() -> JsonObject:
    """The whole description, cached and shared: never change it."""
    paths: dict[str, JsonObject] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    errors = {
        f"{form.__name__}{status}": {"description": FAULTS[status], "content": {_JSON: {"schema": _ref(form)}}}
        for form in dict.fromkeys(route.errors for route in ROUTES)
        for status in FAULTS
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Hermes", "version": hermes.__version__, "description": _ABOUT, "license": _LICENSE},
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in GROUPS],
        "paths": paths,
        "components": {
            "schemas": {**_body_schemas(), **_answer_schemas()},
            "responses": errors,
            "headers": {
                name: {"description": about, "schema": {"type": "string"}} for name, about in _TURN_HEADERS.items()
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "the server's key"},
                "api_key": {"type": "apiKey", "in": "header", "name": "api-key", "description": "the same, otherwise"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "the same"},
            },
        },
    }


@functools.cache
def encoded() -> bytes:
    return msgspec.json.encode(document())
