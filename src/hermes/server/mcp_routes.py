"""The route at which MCP clients use Hermes (streamable HTTP). The SDK is loaded with the first request."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Literal

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from hermes.core.json_types import JsonObject
from hermes.server.errors import ApiError
from hermes.server.routes import TURN_HEADERS, header, route

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

_HEADERS = (
    header("MCP-Protocol-Version", "the version of the protocol that was agreed on"),
    header("Mcp-Session-Id", "the id that the answer to `initialize` gave; with it a request can be cancelled"),
    *(one for one in TURN_HEADERS if one["name"] not in ("X-Hermes-Tool-Progress", "X-Hermes-Tool-Items")),
)


class McpRequest(Struct, kw_only=True):
    """A request of JSON-RPC 2.0, or without an id a notification."""

    jsonrpc: Literal["2.0"]
    method: str
    id: str | int | UnsetType = UNSET
    params: JsonObject | UnsetType = UNSET


class McpAnswer(Struct, kw_only=True):
    jsonrpc: Literal["2.0"]
    id: str | int
    result: JsonObject | UnsetType = UNSET
    error: JsonObject | UnsetType = UNSET


class McpError(Struct, kw_only=True):
    """What JSON-RPC says of a message that could not be read; what the server refuses before that has `Error`."""

    error: JsonObject
    jsonrpc: Literal["2.0"] | UnsetType = UNSET
    id: str | int | UnsetType | None = UNSET


@route(
    "POST /mcp",
    "mcp",
    "Use Hermes as an MCP server",
    scope="any",
    headers=_HEADERS,
    body=McpRequest,
    example={"jsonrpc": "2.0", "id": 1, "method": "tools/list"},
    answers=McpAnswer,
    stream="notifications of progress and the answer, as `message` events",
    also={202: "A notification was received."},
    faults=(429, 503),
    refusals={400: McpError, 404: McpError, 413: McpError, 415: McpError},
    features="mcp_server",
)
async def mcp(context: ServerContext, request: web.Request) -> web.StreamResponse:
    """What each tool needs of a key's scopes is asked when it is called."""
    try:
        # Not on the event loop: the SDK takes a second of processor time to load.
        module = await context.app.services.files.call(lambda: import_module("hermes.server.mcp_http"))
    except ImportError:
        message = "MCP clients are not served here: the extra `mcp` is not installed (hermes install mcp)."
        raise ApiError(503, message, "mcp_unavailable") from None
    response: web.StreamResponse = await module.respond(context, request)
    return response
