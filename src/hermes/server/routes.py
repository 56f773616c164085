"""Every route, in one table: the router, the list of endpoints and the API's description are made of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
from aiohttp import web

from hermes.server import models


@dataclass(frozen=True, slots=True)
class Route:
    """One route. `handler` is a method of the adapter, `scope` what a key must have (None: no key is needed); several
    scopes have spaces between them, and all are needed; alternatives have `|` between them."""

    name: str
    method: str
    path: str
    handler: str
    scope: str | None
    summary: str
    body: type[msgspec.Struct] | None = None
    ok: int = 200
    faults: tuple[int, ...] = ()
    stream: bool = False

    @property
    def once(self) -> bool:
        """Whether an idempotency key is honoured."""
        return self.name in _ONCE

    @property
    def begins_turns(self) -> bool:
        """Whether a model is asked by it."""
        return self.name in _BEGIN_TURNS


_TURN = (404, 409, 429, 500, 502, 503, 504)
_CHAT, _READ, _WRITE, _RUNS, _JOBS = "chat", "sessions:read", "sessions:write", "runs", "jobs"
# Whoever may begin some kind of run; which kinds the key covers is asked once the run is known (`keys.RUN_SCOPES`).
_OF_RUN = "runs|chat|jobs"
_CHAT_IN_SESSION = f"{_CHAT} {_WRITE}"
_SESSION = "/api/sessions/{session_id}"
_RESPONSE = "/v1/responses/{response_id}"
_CONVERSATION = "/v1/conversations/{conversation_id}"
_RUN = "/v1/runs/{run_id}"
_JOB = "/api/jobs/{job_id}"

ROUTES: tuple[Route, ...] = (
    Route("health", "GET", "/health", "_handle_health", None, "Liveness check"),
    Route("health_v1", "GET", "/v1/health", "_handle_health", None, "Liveness check"),
    Route("health_detailed", "GET", "/health/detailed", "_handle_health_detailed", None, "Detailed health"),
    Route("health_ready", "GET", "/health/ready", "_handle_health_ready", None, "Readiness check", faults=(503,)),
    Route("ui", "GET", "/", "_handle_root", None, "Web page", faults=(404,)),
    Route("docs", "GET", "/docs", "_handle_docs", None, "API reference (HTML)", faults=(404,)),
    Route("openapi", "GET", "/openapi.json", "_handle_openapi", None, "OpenAPI description", faults=(404,)),
    Route("metrics", "GET", "/metrics", "_handle_metrics", "admin", "Prometheus metrics", faults=(404,)),
    Route("models", "GET", "/v1/models", "_handle_models", "any", "List models"),
    Route("model", "GET", "/v1/models/{model_id}", "_handle_model", "any", "Get a model", faults=(404,)),
    Route("capabilities", "GET", "/v1/capabilities", "_handle_capabilities", "any", "Server capabilities"),
    Route("skills", "GET", "/v1/skills", "_handle_skills", "any", "List skills"),
    Route("toolsets", "GET", "/v1/toolsets", "_handle_toolsets", "any", "List toolsets"),
    Route(
        "chat_completions",
        "POST",
        "/v1/chat/completions",
        "_handle_chat_completions",
        _CHAT,
        "Create a chat completion",
        models.ChatRequest,
        faults=_TURN,
        stream=True,
    ),
    Route(
        "responses",
        "POST",
        "/v1/responses",
        "_handle_responses",
        _CHAT,
        "Create a response",
        models.ResponseRequest,
        faults=_TURN,
        stream=True,
    ),
    Route(
        "responses_websocket",
        "GET",
        "/v1/responses",
        "_handle_responses_websocket",
        _CHAT,
        "Responses over a WebSocket",
        ok=101,
        faults=(426, 429, 503),
    ),
    Route(
        "response", "GET", _RESPONSE, "_handle_get_response", _CHAT, "Get a stored response", faults=(404,), stream=True
    ),
    Route("response_delete", "DELETE", _RESPONSE, "_handle_delete_response", _CHAT, "Delete a response", faults=(404,)),
    Route(
        "response_cancel",
        "POST",
        f"{_RESPONSE}/cancel",
        "_handle_cancel_response",
        _CHAT,
        "Cancel a response",
        faults=(404, 409),
    ),
    Route(
        "response_input_items",
        "GET",
        f"{_RESPONSE}/input_items",
        "_handle_response_input_items",
        _CHAT,
        "List the input items of a response",
        faults=(404,),
    ),
    Route(
        "responses_compact",
        "POST",
        "/v1/responses/compact",
        "_handle_compact",
        _CHAT,
        "Compact a conversation",
        models.CompactRequest,
        faults=_TURN,
    ),
    Route(
        "responses_input_tokens",
        "POST",
        "/v1/responses/input_tokens",
        "_handle_input_tokens",
        _CHAT,
        "Count the tokens of a response's input",
        models.ResponseRequest,
        faults=_TURN,
    ),
    Route(
        "conversations",
        "POST",
        "/v1/conversations",
        "_handle_create_conversation",
        _CHAT,
        "Create a conversation",
        models.ConversationRequest,
    ),
    Route("conversation", "GET", _CONVERSATION, "_handle_get_conversation", _CHAT, "Get a conversation", faults=(404,)),
    Route(
        "conversation_update",
        "POST",
        _CONVERSATION,
        "_handle_update_conversation",
        _CHAT,
        "Update a conversation",
        models.ConversationUpdate,
        faults=(404,),
    ),
    Route(
        "conversation_delete",
        "DELETE",
        _CONVERSATION,
        "_handle_delete_conversation",
        _CHAT,
        "Delete a conversation",
        faults=(404,),
    ),
    Route(
        "conversation_items",
        "GET",
        f"{_CONVERSATION}/items",
        "_handle_conversation_items",
        _CHAT,
        "List the items of a conversation",
        faults=(404,),
    ),
    Route(
        "conversation_items_add",
        "POST",
        f"{_CONVERSATION}/items",
        "_handle_add_conversation_items",
        _CHAT,
        "Add items to a conversation",
        models.ConversationItems,
        faults=(404,),
    ),
    Route(
        "conversation_item",
        "GET",
        f"{_CONVERSATION}/items/{{item_id}}",
        "_handle_get_conversation_item",
        _CHAT,
        "Get an item of a conversation",
        faults=(404,),
    ),
    Route(
        "conversation_item_delete",
        "DELETE",
        f"{_CONVERSATION}/items/{{item_id}}",
        "_handle_delete_conversation_item",
        _CHAT,
        "Delete an item of a conversation",
        faults=(404,),
    ),
    Route(
        "runs",
        "POST",
        "/v1/runs",
        "_handle_submit_run",
        _RUNS,
        "Start a run",
        models.RunRequest,
        202,
        (404, 409, 429, 503),
    ),
    Route("run_list", "GET", "/v1/runs", "_handle_list_runs", _OF_RUN, "List runs, newest first"),
    Route("run_status", "GET", _RUN, "_handle_get_run", _OF_RUN, "Get a run", faults=(404,)),
    Route("run_delete", "DELETE", _RUN, "_handle_delete_run", _OF_RUN, "Delete a finished run", faults=(404, 409)),
    Route(
        "run_events",
        "GET",
        f"{_RUN}/events",
        "_handle_run_events",
        _OF_RUN,
        "Stream the events of a run, replayed and live",
        faults=(404, 410),
        stream=True,
    ),
    Route("run_stop", "POST", f"{_RUN}/stop", "_handle_stop_run", _OF_RUN, "Stop a run", faults=(404, 409)),
    Route(
        "run_steer",
        "POST",
        f"{_RUN}/steer",
        "_handle_steer_run",
        _OF_RUN,
        "Send a message to a running turn",
        models.SteerRequest,
        202,
        (404, 409),
    ),
    Route(
        "run_approval",
        "POST",
        f"{_RUN}/approval",
        "_handle_approve_run",
        _OF_RUN,
        "Approve or deny a tool call",
        models.ApprovalRequest,
        faults=(404, 409),
    ),
    Route(
        "run_clarify",
        "POST",
        f"{_RUN}/clarify",
        "_handle_clarify_run",
        _OF_RUN,
        "Answer a question of the agent",
        models.ClarifyRequest,
        faults=(404, 409),
    ),
    Route("jobs", "GET", "/api/jobs", "_handle_list_jobs", _JOBS, "List scheduled jobs", faults=(503,)),
    Route(
        "job_create",
        "POST",
        "/api/jobs",
        "_handle_create_job",
        _JOBS,
        "Create a job",
        models.JobRequest,
        201,
        (403, 404, 503),
    ),
    Route("job", "GET", _JOB, "_handle_get_job", _JOBS, "Get a job", faults=(404, 503)),
    Route("job_update", "PATCH", _JOB, "_handle_update_job", _JOBS, "Update a job", models.JobPatch, faults=(404, 503)),
    Route("job_delete", "DELETE", _JOB, "_handle_delete_job", _JOBS, "Delete a job", faults=(404, 503)),
    Route("job_pause", "POST", f"{_JOB}/pause", "_handle_pause_job", _JOBS, "Pause a job", faults=(404, 503)),
    Route("job_resume", "POST", f"{_JOB}/resume", "_handle_resume_job", _JOBS, "Resume a job", faults=(404, 503)),
    Route(
        "job_run", "POST", f"{_JOB}/run", "_handle_run_job", _JOBS, "Run a job now", ok=202, faults=(404, 409, 429, 503)
    ),
    Route("job_runs", "GET", f"{_JOB}/runs", "_handle_job_runs", _JOBS, "List the runs of a job", faults=(404, 503)),
    Route("sessions", "GET", "/api/sessions", "_handle_list_sessions", _READ, "List sessions"),
    Route(
        "session_create",
        "POST",
        "/api/sessions",
        "_handle_create_session",
        _WRITE,
        "Create a session",
        models.SessionRequest,
        201,
        (409,),
    ),
    Route(
        "session_search",
        "GET",
        "/api/sessions/search",
        "_handle_search_sessions",
        _READ,
        "Search sessions",
        faults=(503,),
    ),
    Route(
        "session_import",
        "POST",
        "/api/sessions/import",
        "_handle_import_sessions",
        _WRITE,
        "Import sessions",
        models.ImportRequest,
    ),
    Route("session", "GET", _SESSION, "_handle_get_session", _READ, "Get a session", faults=(404,)),
    Route(
        "session_update",
        "PATCH",
        _SESSION,
        "_handle_patch_session",
        _WRITE,
        "Update a session",
        models.SessionPatch,
        faults=(404,),
    ),
    Route(
        "session_delete", "DELETE", _SESSION, "_handle_delete_session", _WRITE, "Delete a session", faults=(404, 409)
    ),
    Route(
        "session_messages",
        "GET",
        f"{_SESSION}/messages",
        "_handle_session_messages",
        _READ,
        "List the messages of a session",
        faults=(404,),
    ),
    Route(
        "session_export",
        "GET",
        f"{_SESSION}/export",
        "_handle_export_session",
        _READ,
        "Export a session",
        faults=(404,),
    ),
    Route(
        "session_files",
        "GET",
        f"{_SESSION}/files",
        "_handle_session_files",
        _READ,
        "List the files of a session",
        faults=(404,),
    ),
    Route(
        "session_file",
        "GET",
        f"{_SESSION}/files/{{file_id}}",
        "_handle_session_file",
        _READ,
        "Download a file of a session",
        faults=(404,),
    ),
    Route(
        "session_fork",
        "POST",
        f"{_SESSION}/fork",
        "_handle_fork_session",
        _WRITE,
        "Fork a session",
        models.ForkRequest,
        201,
        (404, 409),
    ),
    Route(
        "session_compact",
        "POST",
        f"{_SESSION}/compact",
        "_handle_compact_session",
        _WRITE,
        "Compact a session",
        models.SessionCompactRequest,
        faults=_TURN,
    ),
    Route(
        "session_chat",
        "POST",
        f"{_SESSION}/chat",
        "_handle_session_chat",
        _CHAT_IN_SESSION,
        "Send a message to a session",
        models.SessionChatRequest,
        faults=_TURN,
    ),
    Route(
        "session_chat_stream",
        "POST",
        f"{_SESSION}/chat/stream",
        "_handle_session_chat_stream",
        _CHAT_IN_SESSION,
        "Send a message to a session and stream the answer",
        models.SessionChatRequest,
        faults=_TURN,
        stream=True,
    ),
)
_BEGIN_TURNS = frozenset(
    {"chat_completions", "responses", "responses_websocket", "responses_compact", "runs", "job_run"}
    | {"session_chat", "session_chat_stream", "session_compact"}
)
_ONCE = frozenset(
    {"chat_completions", "responses", "responses_compact", "runs", "session_create", "session_fork", "session_chat"}
    | {"session_chat_stream", "session_compact", "session_import", "conversations", "job_create", "job_run"}
)
_BY_PLACE = {(route.method, route.path): route for route in ROUTES}


_PROFILE = re.compile(r"^/p/[^/]+(?=/)")


def route_at(request: web.Request) -> Route | None:
    """The route that a request was led to; None for one that did not come through the router."""
    route = getattr(getattr(request, "match_info", None), "route", None)
    resource = getattr(route, "resource", None)
    if not isinstance(resource, web.AbstractResource):
        return None
    place = _PROFILE.sub("", resource.canonical)
    return _BY_PLACE.get(("GET" if request.method == "HEAD" else request.method, place))
