"""What an admin sees of a server: its settings, keys and MCP servers; and which settings can be changed from afar."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web
from msgspec import UNSET, Struct

from hermes.core.json_types import JsonObject
from hermes.guards.secrets import redact_tree
from hermes.server.errors import ApiError, missing
from hermes.server.keys import SCOPES, caller_of
from hermes.server.models import SettingPatch
from hermes.server.routes import route
from hermes.services import settings as services

if TYPE_CHECKING:
    from hermes.server.context import ServerContext
    from hermes.settings.schema import McpServer

# --- settings --------------------------------------------------------------------------------------------------------


class Setting(Struct, kw_only=True):
    """A setting. `source` is where its value comes from: flag, environment, .env, file or default; `where` the line or
    variable. Secrets are masked. `expected` says what fits, `choices` are words that do. Those that are `editable` can
    be changed over the API."""

    key: str
    description: str
    value: Any
    source: str
    where: str | None
    default: Any
    expected: str
    choices: list[str]
    secret: bool
    editable: bool


class SettingProblem(Struct, kw_only=True):
    severity: str
    key: str
    message: str
    where: str
    hint: str


class SettingList(Struct, kw_only=True, tag_field="object", tag="list"):
    """All settings, and what is wrong with them."""

    data: list[Setting]
    problems: list[SettingProblem]


@route("GET /api/settings", "settings", "List settings", scope="admin", features="settings_api")
async def settings(context: ServerContext, request: web.Request) -> SettingList:
    current = context.settings
    problems = [asdict(problem) for problem in current.problems]
    names = SettingProblem.__struct_fields__
    return SettingList(
        data=[_setting(context, row) for row in services.rows(current)],
        problems=[
            SettingProblem(**redact_tree({name: one[name] for name in names}, context.redact)) for one in problems
        ],
    )


@route("PATCH /api/settings/{setting_name}", "setting_update", "Change a setting", scope="admin", example={"value": 50})
async def change_setting(context: ServerContext, request: web.Request, body: SettingPatch) -> Setting:
    """null takes it out of the files."""
    if body.value is UNSET:
        raise missing("value")
    name, by = request.match_info["setting_name"], caller_of(request).credential or "api"
    change = partial(services.change, context.settings, name, body.value, by=by)
    return _setting(context, await context.app.services.files.call(change))


def _setting(context: ServerContext, row: JsonObject) -> Setting:
    return Setting(**redact_tree(row, context.redact))


# --- keys ------------------------------------------------------------------------------------------------------------


class KeyObject(Struct, kw_only=True, tag_field="object", tag="hermes.key"):
    """A key, without what it is. 0 and null: no bound. `source` is the setting or variable that holds it."""

    name: str
    scopes: list[str]
    max_concurrent: int
    requests_per_minute: int
    tokens_per_minute: int
    toolsets: list[str] | None
    models: list[str] | None
    source: str
    current: bool


class KeyList(Struct, kw_only=True, tag_field="object", tag="list"):
    data: list[KeyObject]


@route("GET /api/keys", "keys", "List API keys", scope="admin", features="keys_api")
async def keys(context: ServerContext, request: web.Request) -> KeyList:
    sources = {entry.get("name"): entry.get("key_env") or "api_server.keys" for entry in context.options.keys}
    own = caller_of(request).credential
    return KeyList(
        data=[
            KeyObject(
                name=key.owner,
                scopes=[scope for scope in SCOPES if key.opens(scope)],
                max_concurrent=key.max_concurrent,
                requests_per_minute=key.requests_per_minute,
                tokens_per_minute=key.tokens_per_minute,
                toolsets=None if key.toolsets is None else sorted(key.toolsets),
                models=None if key.models is None else sorted(key.models),
                source=sources.get(key.owner, "api_server.key"),
                current=key.owner == own,
            )
            for key in context.keyring.keys
        ]
    )


# --- MCP servers -----------------------------------------------------------------------------------------------------


class McpServerObject(Struct, kw_only=True, tag_field="object", tag="hermes.mcp_server"):
    """A configured MCP server. `state`: `off`, `idle` (connected when first needed), or how the connection is."""

    name: str
    enabled: bool
    state: str
    error: str | None
    tools: list[str]
    unfit: dict[str, str]
    target: str
    approval: str
    sandbox: bool


class McpServerList(Struct, kw_only=True, tag_field="object", tag="list"):
    data: list[McpServerObject]


@route("GET /api/mcp", "mcp_servers", "List MCP servers", scope="admin", features="mcp_api")
async def mcp_servers(context: ServerContext, request: web.Request) -> McpServerList:
    states = {state["name"]: state for state in context.app.services.mcp.states()}
    configured = context.settings.mcp_servers
    return McpServerList(data=[_server(context, name, one, states.get(name)) for name, one in configured.items()])


@route("POST /api/mcp/{mcp_name}/test", "mcp_test", "Connect an MCP server anew", scope="admin")
async def test_mcp_server(context: ServerContext, request: web.Request) -> McpServerObject:
    """Its state once the attempt has succeeded or failed."""
    name, configured = request.match_info["mcp_name"], context.settings.mcp_servers
    if name not in configured:
        raise ApiError(404, f"There is no MCP server {name!r}.", "mcp_server_not_found")
    state = await context.app.services.mcp.test(name, context.settings)
    return _server(context, name, configured[name], state)


def _server(context: ServerContext, name: str, server: McpServer, state: JsonObject | None) -> McpServerObject:
    known = state or {"state": "idle" if server.enabled else "off", "error": None, "tools": [], "unfit": {}}
    facts = {
        "name": name,
        "target": server.url or " ".join([server.command or "", *server.args]).strip(),
        "state": known["state"],
        "error": known["error"] or None,
        "tools": known["tools"],
        "unfit": known["unfit"],
    }
    shown = redact_tree(facts, context.redact)
    return McpServerObject(**shown, enabled=server.enabled, approval=server.approval, sandbox=server.sandbox)
