"""Authentication: checks host, origin and API key of every routed request."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from aiohttp import web

from hermes.server.errors import ApiError
from hermes.server.middleware import CONTEXT, Handler, common_headers, with_headers
from hermes.server.routes import PASSED, route_at

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

PREFLIGHT_KEPT_S = "600"
_PORT = re.compile(r":\d+$")


@web.middleware
async def gate_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let in whom the profile that the request was routed to lets in. What the router refuses passes here as well."""
    return await pass_gate(request.match_info.apps[-1][CONTEXT], request, handler)


async def pass_gate(context: ServerContext, request: web.Request, handler: Handler) -> web.StreamResponse:
    refusal = _foreign_host(context, request)
    headers: dict[str, str] = {}
    origin = request.headers.get("Origin", "")
    if refusal is None and origin and not is_same_origin(context, request, origin):
        headers = context.cors_headers(origin) or {}
        refusal = None if headers else _foreign_origin()
    if refusal is not None:
        return _refused(request, refusal.response(), headers)
    if request.method == "OPTIONS" and headers:
        preflight = {**headers, **common_headers(request), "Access-Control-Max-Age": PREFLIGHT_KEPT_S}
        return web.Response(status=200, headers=preflight)
    if _needs_key(context, request) and (refusal := context.check_auth(request)) is not None:
        return _refused(request, refusal.response(), headers)
    request[PASSED] = context
    return await (with_headers(request, handler, headers) if headers else handler(request))


def _refused(request: web.Request, response: web.Response, headers: dict[str, str]) -> web.Response:
    """A refusal with what every answer carries: no other middleware sees it."""
    for name, value in {**common_headers(request), **headers}.items():
        response.headers.setdefault(name, value)
    return response


def _needs_key(context: ServerContext, request: web.Request) -> bool:
    route = route_at(request)
    if route is None or route.scope is None:
        return False
    return not (route.name == "metrics" and context.options.metrics_public)


def _foreign_host(context: ServerContext, request: web.Request) -> ApiError | None:
    if not context.is_open:
        return None
    _, host = seen_as(context, request)
    if is_own_host(context, host):
        return None
    message = f"The host {host!r} is not one of this server's; the setting api_server.allowed_hosts lists others."
    return ApiError(403, message, "host_not_allowed")


def _foreign_origin() -> ApiError:
    message = "This origin may not call the server; the setting api_server.cors_origins lists those that may."
    return ApiError(403, message, "origin_not_allowed")


def is_same_origin(context: ServerContext, request: web.Request, origin: str) -> bool:
    """Whether a page of the server's own is asking."""
    scheme, host = seen_as(context, request)
    return origin == f"{scheme}://{host}" and (not context.is_open or is_own_host(context, host))


def seen_as(context: ServerContext, request: web.Request) -> tuple[str, str]:
    """The scheme and the host that the client asked for; a proxy is believed only where it is one of the list."""
    if request.remote not in context.options.trusted_proxies:
        return request.scheme, request.host
    forwarded = [
        request.headers.get(name, "").split(",")[0].strip() for name in ("X-Forwarded-Proto", "X-Forwarded-Host")
    ]
    return forwarded[0] or request.scheme, forwarded[1] or request.host


def is_own_host(context: ServerContext, host: str) -> bool:
    """Whether a Host header is allowed: unknown ones are refused, which prevents DNS rebinding."""
    name = _PORT.sub("", host).strip("[]").rstrip(".").lower()
    if name in ("localhost", context.options.host.lower()) or name.endswith(".localhost"):
        return True
    allowed = context.options.allowed_hosts
    return name in allowed or host in allowed or _is_loopback(name)


@lru_cache(16)
def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
