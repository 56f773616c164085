"""Health, models, skills, toolsets, workspaces and capabilities."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

import hermes
from hermes.core import limits as fixed
from hermes.core.errors import ConfigError
from hermes.core.json_types import JsonObject
from hermes.sandbox.choose import choose_backend, real_path
from hermes.server.errors import ApiError, Error, answer, error_object, invalid
from hermes.server.headers import VERSION_HEADER
from hermes.server.keys import SCOPES, caller_of
from hermes.server.readiness import OK, Readiness, readiness, runtime_state
from hermes.server.routes import ROUTES, route
from hermes.server.web_page import is_built
from hermes.services.models import listed as listed_models
from hermes.services.skills import find_skills
from hermes.tools.framework import toolsets as sets
from hermes.tools.mcp import PREFIX

if TYPE_CHECKING:
    from hermes.server.context import ServerContext
    from hermes.settings.config import Settings

PLATFORM = "hermes-agent"

# --- health ----------------------------------------------------------------------------------------------------------


class Health(Struct, kw_only=True):
    status: Literal["ok"] = "ok"
    platform: str = PLATFORM
    version: str = hermes.__version__


class DetailedHealth(Health, kw_only=True):
    pid: int
    uptime_seconds: float
    gateway_state: str | None
    platforms: JsonObject
    active_agents: int
    exit_reason: str | None
    updated_at: float | str | None
    gateway_busy: bool
    gateway_drainable: bool
    readiness: Readiness


class Ready(Struct, kw_only=True):
    status: Literal["ok"] = "ok"
    readiness: Readiness


class NotReady(Error, kw_only=True):
    """The server takes no work now, and why."""

    readiness: Readiness


@route("GET /health", "health", "Liveness check", scope=None)
@route("GET /v1/health", "health_v1", "Liveness check", scope=None)
async def health(context: ServerContext, request: web.Request) -> Health:
    return Health()


@route("GET /health/detailed", "health_detailed", "Detailed health", scope=None)
async def health_detailed(context: ServerContext, request: web.Request) -> DetailedHealth:
    state = await runtime_state(context)
    running = context.attached_app.engine.active if context.attached_app is not None else 0
    active = state.get("active_agents")
    return DetailedHealth(
        pid=os.getpid(),
        uptime_seconds=round(max(0.0, time.time() - context.started_at), 3),
        gateway_state=state.get("gateway_state"),
        platforms=state.get("platforms") or {},
        active_agents=running if active is None else active,
        exit_reason=state.get("exit_reason"),
        updated_at=state.get("updated_at"),
        gateway_busy=bool(active or running),
        gateway_drainable=state.get("gateway_state") == "running",
        readiness=await readiness(context, whole=_is_admin(context, request)),
    )


@route("GET /health/ready", "health_ready", "Readiness check", scope=None, refusals={503: NotReady})
async def health_ready(context: ServerContext, request: web.Request) -> Ready | web.Response:
    result = await readiness(context, whole=_is_admin(context, request))
    if result.status == OK:
        return Ready(readiness=result)
    failed = ", ".join(name for name, check in result.checks.items() if check.status != OK)
    error = error_object(503, f"The server is not ready: {failed}.", "not_ready")
    return answer(NotReady(error=error, readiness=result), 503, {"Retry-After": "1"})


def _is_admin(context: ServerContext, request: web.Request) -> bool:
    """Whether numbers and texts may be shown: to admin keys, and to everybody where there are no keys."""
    return context.check_auth(request) is None and caller_of(request).is_admin


# --- models, skills, toolsets ----------------------------------------------------------------------------------------


class Model(Struct, kw_only=True):
    """A name under which the agent can be asked."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "hermes"
    permission: list[Any] = []
    root: str
    parent: str | None
    # In answers to requests of the Messages protocol.
    type: Literal["model"] | UnsetType = UNSET
    display_name: str | UnsetType = UNSET
    created_at: str | UnsetType = UNSET
    lifecycle: Literal["active"] | UnsetType = UNSET


class ModelQuery(Struct, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=1000, description="how many models; without it all")] | None = None
    after_id: Annotated[str, Meta(description="begin behind this model")] | None = None
    before_id: Annotated[str, Meta(description="end before this model")] | None = None


class ModelList(Struct, kw_only=True, tag_field="object", tag="list"):
    """Models; the fields of a page are in answers to requests of the Messages protocol."""

    data: list[Model]
    first_id: str | UnsetType | None = UNSET
    last_id: str | UnsetType | None = UNSET
    has_more: bool | UnsetType = UNSET


@route("GET /v1/models", "models", "List models", scope="any", features="model_routes")
async def models(context: ServerContext, request: web.Request, query: ModelQuery) -> ModelList:
    data, has_more = _page(list(models_of(context, request).values()), query)
    if VERSION_HEADER not in request.headers:
        return ModelList(data=data)
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    return ModelList(data=data, first_id=first_id, last_id=last_id, has_more=has_more)


def _page(models: list[Model], query: ModelQuery) -> tuple[list[Model], bool]:
    """The models that are asked for, and whether there are more in the direction of the question."""
    places = {model.id: place for place, model in enumerate(models)}
    for name, model_id in (("after_id", query.after_id), ("before_id", query.before_id)):
        if model_id is not None and model_id not in places:
            raise invalid(name, f"There is no model {model_id!r}.", "model_not_found")
    begin = 0 if query.after_id is None else places[query.after_id] + 1
    end = len(models) if query.before_id is None else places[query.before_id]
    within, limit = models[begin:end], query.limit or len(models)
    page = within[-limit:] if query.before_id is not None and query.after_id is None else within[:limit]
    return page, len(page) < len(within)


@route("GET /v1/models/{model_id}", "model", "Get a model", scope="any")
async def model(context: ServerContext, request: web.Request) -> Model:
    name = request.match_info["model_id"]
    model = models_of(context, request).get(name)
    if model is None:
        raise ApiError(404, f"There is no model {name!r}.", "model_not_found", "model")
    return model


def models_of(context: ServerContext, request: web.Request) -> dict[str, Model]:
    """The advertised name, every alias, and the models named in the settings of providers."""
    own = context.model_name
    roots: dict[str, tuple[str, str | None]] = {own: (own, None)}
    for alias, target in context.options.model_routes.items():
        roots.setdefault(alias, (target.model or own, own))
    for name, root in listed_models(context.settings).items():
        roots.setdefault(name, (root, None))
    allowed, created = caller_of(request).models, int(context.started_at)
    models = {
        name: Model(id=name, created=created, root=root, parent=parent)
        for name, (root, parent) in roots.items()
        if allowed is None or name in allowed
    }
    if VERSION_HEADER in request.headers:
        for name, model in models.items():
            model.type, model.display_name, model.lifecycle = "model", name, "active"
            model.created_at = datetime.fromtimestamp(created, UTC).isoformat()
    return models


class Skill(Struct, kw_only=True):
    name: str
    description: str
    category: str | None


class SkillList(Struct, kw_only=True, tag_field="object", tag="list"):
    data: list[Skill]


@route("GET /v1/skills", "skills", "List skills", scope="any", features="skills_api")
async def skills(context: ServerContext, request: web.Request) -> SkillList:
    app = context.app
    settings, owner = app.settings, caller_of(request).owner
    session_key = context.session_key(request)
    skills = await app.services.files.call(lambda: find_skills(settings, owner, session_key))
    return SkillList(
        data=[Skill(name=skill.name, description=skill.description, category=skill.category) for skill in skills]
    )


class Toolset(Struct, kw_only=True):
    """Tools that are switched on and off together."""

    name: str
    label: str
    description: str
    enabled: bool
    configured: bool
    available: bool
    tools: list[str]


class ToolsetList(Struct, kw_only=True, tag_field="object", tag="list"):
    data: list[Toolset]
    platform: str = "api_server"


@route("GET /v1/toolsets", "toolsets", "List toolsets", scope="any", features="toolsets_api")
async def toolsets(context: ServerContext, request: web.Request) -> ToolsetList:
    app = context.app
    settings, registry = app.settings, app.services.registry()
    await app.services.outside.sandboxes.ready(settings)
    own = context.options.toolsets
    enabled = sets.enabled_toolsets(settings, "api_server") if own is None else set(own)
    ceiling = caller_of(request).toolsets

    def toolset(name: str, label: str, tools: dict[str, str], configured: bool) -> Toolset:
        sentences = dict.fromkeys(text.partition(". ")[0].rstrip(".") + "." for text in tools.values())
        return Toolset(
            name=name,
            label=label,
            description=" ".join(sentences),
            enabled=name in enabled,
            configured=configured,
            available=name in enabled and configured and (ceiling is None or name in ceiling),
            tools=sorted(tools),
        )

    toolsets = {}
    for name in sets.DEFAULTS:
        tools = {tool.name: tool.description for tool in registry.all() if tool.toolset == name}
        label = name.replace("_", " ").capitalize()
        toolsets[name] = toolset(name, label, tools, bool(registry.offered([name], settings)))
    for server in app.services.mcp.states():  # their own descriptions are untrusted
        name, label = f"{PREFIX}{server['name']}", f"MCP server {server['name']}"
        toolsets[name] = toolset(name, label, dict.fromkeys(server["tools"], label), bool(server["tools"]))
    return ToolsetList(data=list(toolsets.values()))


class Workspace(Struct, kw_only=True):
    path: str


class WorkspaceList(Struct, kw_only=True, tag_field="object", tag="list"):
    """Folders in which turns may work: they, and what lies in them, can be the `workdir` of a session, run or job."""

    data: list[Workspace]


@route("GET /api/workspaces", "workspaces", "List folders to work in", scope="sessions:read")
async def workspaces(context: ServerContext, request: web.Request) -> WorkspaceList:
    """Without one, turns work in a folder of their owner's own."""
    roots = context.settings.terminal.workspaces
    folders = await context.app.services.files.call(lambda: [path for path in map(real_path, roots) if path.is_dir()])
    return WorkspaceList(data=[Workspace(path=str(path)) for path in dict.fromkeys(folders)])


# --- capabilities ----------------------------------------------------------------------------------------------------

# Features that this server does not have.
_ABSENT = (
    "admin_config_rw memory_write_api realtime_voice audio_api chat_logprobs chat_multiple_choices platform_events "
    "cron_fire_webhook"
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
# Options that are limits; a dot becomes an underscore.
_OPTIONS = (
    "max_body_bytes max_text_chars max_event_bytes max_concurrent_runs session_wait_seconds run_queue_seconds "
    "turn_timeout_seconds write_stall_seconds keepalive_seconds responses.max_stored responses.max_age_days "
    "runs.max_stored runs.max_age_days"
)
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


class Endpoint(Struct, kw_only=True):
    method: str
    path: str


class Capabilities(Struct, kw_only=True, tag_field="object", tag="hermes.api_server.capabilities"):
    """What the server can do, within which limits, and where."""

    platform: str = PLATFORM
    model: str
    version: str = hermes.__version__
    auth: JsonObject
    runtime: JsonObject
    features: dict[str, bool | str]
    limits: dict[str, float | None]
    endpoints: dict[str, Endpoint]


@route("GET /v1/capabilities", "capabilities", "Server capabilities", scope="any")
async def capabilities(context: ServerContext, request: web.Request) -> Capabilities:
    settings = context.app.settings
    return Capabilities(
        model=context.model_name,
        auth={
            "type": "bearer",
            "required": not context.is_open,
            "owner": caller_of(request).owner,
            "scopes": [scope for scope in SCOPES if caller_of(request).opens(scope)],
        },
        runtime={
            "mode": "server_agent",
            "tool_execution": "server",
            "split_runtime": False,
            "sandbox": await asyncio.to_thread(_sandbox, settings),
            "description": _DESCRIPTION,
        },
        features={**_features(context), "web_ui": context.options.ui and await is_built()},
        limits=_limits(context, settings),
        endpoints={route.name: Endpoint(method=route.method, path=route.path) for route in ROUTES},
    )


def _features(context: ServerContext) -> dict[str, bool | str]:
    return {
        **{feature: True for route in ROUTES for feature in route.features.split()},
        **dict.fromkeys(("owner_isolation", "rate_limits", "idempotency"), True),
        "metrics": context.options.metrics,
        "openapi": context.options.docs,
        "ollama": context.options.ollama,
        **dict.fromkeys(_ABSENT.split(), False),
        "cors": bool(context.options.cors_origins),
        "profiles": bool(context.options.profiles),
        "strict_models": context.options.strict_models,
        "strict_parameters": context.options.strict_parameters,
        "reasoning_streaming": context.options.show_reasoning,
        **_HEADERS,
    }


def _limits(context: ServerContext, settings: Settings) -> dict[str, float | None]:
    values: dict[str, float | None] = {
        **{option.replace(".", "_"): attrgetter(option)(context.options) for option in _OPTIONS.split()},
        "approval_timeout_seconds": settings.api_server.approval_timeout_seconds,
        "drain_seconds": settings.api_server.drain_seconds,
        "clarify_timeout_seconds": settings.agent.clarify_timeout,
        "idempotency_seconds": context.options.idempotency.ttl_hours * 3600,
        **_FIXED,
    }
    # Typed clients expect integers without a fraction.
    return {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in values.items()}


def _sandbox(settings: Settings) -> JsonObject:
    """Where commands run."""
    try:
        chosen = choose_backend(settings)
    except ConfigError:
        return {"backend": settings.terminal.backend, "isolated": True}
    reason = {"reason": chosen.reason} if chosen.reason is not None else {}
    return {"backend": chosen.name, "isolated": chosen.isolated, **reason}
