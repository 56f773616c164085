"""What the server is and can do: its health, the models and skills it offers, its features and limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

import hermes
from hermes.core import limits as fixed
from hermes.core.errors import ConfigError
from hermes.providers.routes import listed
from hermes.sandbox.choose import choose_backend
from hermes.server import status
from hermes.server.errors import ApiError, answer, error_body
from hermes.server.keys import CALLER, SCOPES
from hermes.server.readiness import OK, readiness
from hermes.server.routes import ROUTES
from hermes.tools import toolsets as sets
from hermes.tools.mcp import PREFIX
from hermes.tools.skill_files import find_skills

if TYPE_CHECKING:
    from hermes.server.adapter import APIServerAdapter
    from hermes.settings.config import Settings

PLATFORM = "hermes-agent"
Json = dict[str, Any]

# --- health ----------------------------------------------------------------------------------------------------------


async def health(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /health, /v1/health"""
    return answer({"status": "ok", "platform": PLATFORM, "version": hermes.__version__})


async def detailed(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /health/detailed"""
    state = await _state(adapter)
    found = await readiness(adapter, state, whole=_is_admin(adapter, request))
    running = adapter._app.engine.active if adapter._app is not None else 0
    active = state.get("active_agents")
    return answer(
        {
            "status": "ok",
            "platform": PLATFORM,
            "version": hermes.__version__,
            "pid": os.getpid(),
            "uptime_seconds": round(max(0.0, time.time() - adapter.started_at), 3),
            "gateway_state": state.get("gateway_state"),
            "platforms": state.get("platforms") or {},
            "active_agents": running if active is None else active,
            "exit_reason": state.get("exit_reason"),
            "updated_at": state.get("updated_at"),
            "gateway_busy": bool(active or running),
            "gateway_drainable": state.get("gateway_state") == "running",
            "readiness": found,
        }
    )


async def ready(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /health/ready"""
    found = await readiness(adapter, await _state(adapter), whole=_is_admin(adapter, request))
    if found["status"] == OK:
        return answer({"status": "ok", "readiness": found})
    poor = ", ".join(name for name, check in found["checks"].items() if check["status"] != OK)
    body = error_body(503, f"The server is not ready: {poor}.", "not_ready")
    return answer({**body, "readiness": found}, 503, {"Retry-After": "1"})


async def _state(adapter: APIServerAdapter) -> Json:
    """What the running server last wrote about itself; nothing where there is none."""
    home = adapter._app.home if adapter._app is not None else None
    with contextlib.suppress(OSError):
        return await asyncio.to_thread(status.read_runtime_status, home) or {}
    return {}


def _is_admin(adapter: APIServerAdapter, request: web.Request) -> bool:
    """Whether numbers and texts may be shown: to the full key, and to everybody where there is none."""
    return adapter._check_auth(request) is None and CALLER.get().is_admin


# --- models, skills, toolsets ----------------------------------------------------------------------------------------


async def models(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /v1/models"""
    return answer({"object": "list", "data": list(_models(adapter).values())})


async def model(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /v1/models/{model_id}"""
    name = request.match_info["model_id"]
    found = _models(adapter).get(name)
    if found is None:
        raise ApiError(404, f"There is no model {name!r}.", "model_not_found", "model")
    return answer(found)


def _models(adapter: APIServerAdapter) -> dict[str, Json]:
    """The advertised name, every alias with the model it stands for, and the models named of configured providers."""
    own = adapter.model_name
    found = {own: _model(adapter, own, own, None)}
    for alias, route in adapter.option("model_routes").items():
        target = route.get("model") if isinstance(route, dict) else None
        found.setdefault(str(alias), _model(adapter, str(alias), target or own, own))
    for name, model in listed(adapter.settings).items():
        found.setdefault(name, _model(adapter, name, model, None))
    allowed = CALLER.get().models
    return {name: told for name, told in found.items() if allowed is None or name in allowed}


def _model(adapter: APIServerAdapter, name: str, root: str, parent: str | None) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": int(adapter.started_at),
        "owned_by": "hermes",
        "permission": [],
        "root": root,
        "parent": parent,
    }


async def skills(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /v1/skills"""
    app = await adapter.app()
    settings, owner = app.settings, adapter.owner_of(request)
    session_key, refusal = adapter.session_key(request)
    if refusal is not None:
        raise refusal
    found = await app.services.files.call(lambda: find_skills(settings, owner, session_key))
    data = [{"name": skill.name, "description": skill.description, "category": skill.category} for skill in found]
    return answer({"object": "list", "data": data})


async def toolsets(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /v1/toolsets"""
    app = await adapter.app()
    settings, registry = app.settings, app.services.registry()
    await app.services.outside.sandboxes.ready(settings)
    own = adapter.option("toolsets")
    on = sets._get_platform_tools(settings.section(), "api_server") if own is None else set(own)
    ceiling = CALLER.get().toolsets
    known = {
        name: (
            {tool.name: tool.description for tool in registry.all() if tool.toolset == name},
            bool(registry.offered([name], settings)),
            name.replace("_", " ").capitalize(),
        )
        for name in sets.DEFAULTS
    }
    for server in app.services.mcp.states():  # what a server says of its tools is for the model, framed
        told = f"MCP server {server['name']}"
        known[f"{PREFIX}{server['name']}"] = (dict.fromkeys(server["tools"], told), bool(server["tools"]), told)
    data = [
        {
            "name": name,
            "label": label,
            "description": " ".join(
                dict.fromkeys(text.partition(". ")[0].rstrip(".") + "." for text in tools.values())
            ),
            "enabled": name in on,
            "configured": usable,
            "available": name in on and usable and (ceiling is None or name in ceiling),
            "tools": sorted(tools),
        }
        for name, (tools, usable, label) in known.items()
    ]
    return answer({"object": "list", "data": data, "platform": "api_server"})


# --- capabilities ----------------------------------------------------------------------------------------------------

# feature: the route without which there is no such thing
_BY_ROUTE = {
    "chat_completions": "chat_completions",
    "chat_completions_streaming": "chat_completions",
    "chat_client_tools": "chat_completions",
    "chat_structured_output": "chat_completions",
    "chat_sampling_parameters": "chat_completions",
    "file_input": "chat_completions",
    "responses_api": "responses",
    "responses_streaming": "responses",
    "responses_background": "responses",
    "responses_client_tools": "responses",
    "responses_resume": "response",
    "responses_cancel": "response_cancel",
    "responses_input_items": "response_input_items",
    "responses_compact": "responses_compact",
    "responses_input_tokens": "responses_input_tokens",
    "responses_websocket": "responses_websocket",
    "conversations_api": "conversations",
    "run_submission": "runs",
    "run_list": "run_list",
    "run_status": "run_status",
    "run_events_sse": "run_events",
    "run_events_resume": "run_events",
    "run_stop": "run_stop",
    "run_steer": "run_steer",
    "run_approval_response": "run_approval",
    "run_clarify": "run_clarify",
    "tool_progress_events": "chat_completions",
    "approval_events": "run_approval",
    "session_resources": "sessions",
    "session_search": "session_search",
    "session_message_paging": "session_messages",
    "session_chat": "session_chat",
    "session_chat_streaming": "session_chat_stream",
    "session_fork": "session_fork",
    "session_compact": "session_compact",
    "session_fork_at_message": "session_fork",
    "session_export": "session_export",
    "session_import": "session_import",
    "session_files": "session_files",
    "session_turn_lease": "session_chat",
    "detach": "chat_completions",
    "skills_api": "skills",
    "toolsets_api": "toolsets",
    "model_routes": "models",
    "jobs_api": "jobs",
    "jobs_admin": "job_create",
    "metrics": "metrics",
}
ABSENT = ("web_ui",)
_NEVER = (
    "admin_config_rw",
    "memory_write_api",
    "realtime_voice",
    "audio_api",
    "chat_logprobs",
    "chat_multiple_choices",
    "platform_events",
    "cron_fire_webhook",
)
_HEADERS = {
    "session_continuity_header": "X-Hermes-Session-Id",
    "session_key_header": "X-Hermes-Session-Key",
    "idempotency_header": "Idempotency-Key",
    "detach_header": "X-Hermes-Detach",
    "tool_progress_header": "X-Hermes-Tool-Progress",
}
_DESCRIPTION = (
    "The agent runs on the API-server host: its tools read, write and execute there, not on the client's machine. "
    "Functions that a request brings along are the client's to execute."
)
# limit: the option that holds it
_OPTIONS = {
    "max_body_bytes": "max_body_bytes",
    "max_text_chars": "max_text_chars",
    "max_event_bytes": "max_event_bytes",
    "max_concurrent_runs": "max_concurrent_runs",
    "session_wait_seconds": "session_wait_seconds",
    "run_queue_seconds": "run_queue_seconds",
    "turn_timeout_seconds": "turn_timeout_seconds",
    "write_stall_seconds": "write_stall_seconds",
    "keepalive_seconds": "keepalive_seconds",
    "responses_max_stored": "responses.max_stored",
    "responses_max_age_days": "responses.max_age_days",
    "runs_max_stored": "runs.max_stored",
    "runs_max_age_days": "runs.max_age_days",
}
_FIXED = {
    "max_header_bytes": fixed.HEADER_BYTES_MAX,
    "headers_seconds": fixed.HEADERS_S_MAX,
    "body_seconds": fixed.BODY_S_MAX,
    "max_content_parts": fixed.CONTENT_PARTS_MAX,
    "max_messages": fixed.MESSAGES_MAX,
    "max_client_tools": fixed.CLIENT_TOOLS_MAX,
    "max_metadata_pairs": fixed.METADATA_PAIRS_MAX,
    "max_stop_strings": fixed.STOP_STRINGS_MAX,
    "max_session_id_chars": fixed.SESSION_ID_CHARS_MAX,
    "max_session_key_chars": fixed.SESSION_KEY_CHARS_MAX,
    "max_title_chars": fixed.SESSION_TITLE_CHARS_MAX,
    "max_import_sessions": fixed.IMPORT_SESSIONS_MAX,
    "websocket_seconds": fixed.SOCKET_S_MAX,
    "websocket_ping_seconds": fixed.SOCKET_PING_S,
    "reader_lag_bytes": fixed.QUEUE_BYTES_MAX,
    "reader_lag_events": fixed.QUEUE_EVENTS_MAX,
    "pending_calls_seconds": fixed.PENDING_CALLS_KEPT_S,
    "max_inline_image_bytes": fixed.INLINE_IMAGE_BYTES_MAX,
}


async def capabilities(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /v1/capabilities"""
    settings = (await adapter.app()).settings
    return answer(
        {
            "object": "hermes.api_server.capabilities",
            "platform": PLATFORM,
            "model": adapter.model_name,
            "version": hermes.__version__,
            "auth": {
                "type": "bearer",
                "required": not adapter.is_open,
                "owner": adapter.owner_of(request),
                "scopes": [scope for scope in SCOPES if CALLER.get().opens(scope)],
            },
            "runtime": {
                "mode": "server_agent",
                "tool_execution": "server",
                "split_runtime": False,
                "sandbox": await asyncio.to_thread(_sandbox, settings),
                "description": _DESCRIPTION,
            },
            "features": _features(adapter),
            "limits": _limits(adapter, settings),
            "endpoints": {route.name: {"method": route.method, "path": route.path} for route in ROUTES},
        }
    )


def _features(adapter: APIServerAdapter) -> Json:
    routes = {route.name for route in ROUTES}
    return {
        **{feature: route in routes for feature, route in _BY_ROUTE.items()},
        **dict.fromkeys(("owner_isolation", "rate_limits", "idempotency"), True),
        "metrics": "metrics" in routes and adapter.option("metrics"),
        "openapi": adapter.option("docs"),
        **dict.fromkeys((*ABSENT, *_NEVER), False),
        "cors": bool(adapter._cors_origins),
        "profiles": bool(adapter.option("profiles")),
        "strict_models": adapter.option("strict_models"),
        "strict_parameters": adapter.option("strict_parameters"),
        "reasoning_streaming": adapter.option("show_reasoning"),
        **_HEADERS,
    }


def _limits(adapter: APIServerAdapter, settings: Settings) -> Json:
    own = {name: adapter.option(name) for name in ("approval_timeout_seconds", "drain_seconds")}
    return {
        **{name: adapter.option(option) for name, option in _OPTIONS.items()},
        **{name: settings.get(f"api_server.{name}") if value is None else value for name, value in own.items()},
        "clarify_timeout_seconds": settings.get("agent.clarify_timeout"),
        "idempotency_seconds": adapter.option("idempotency.ttl_hours") * 3600,
        **_FIXED,
    }


def _sandbox(settings: Settings) -> Json:
    """Where commands run; a backend that is named and not there runs none."""
    try:
        chosen = choose_backend(settings)
    except ConfigError:
        return {"backend": settings.get("terminal.backend"), "isolated": True}
    reason = {"reason": chosen.reason} if chosen.reason is not None else {}
    return {"backend": chosen.name, "isolated": chosen.isolated, **reason}
