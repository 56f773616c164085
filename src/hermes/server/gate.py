"""Which requests are let in, by host, origin and key; and the client's address behind proxies."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from aiohttp import web

from hermes.server.errors import ApiError
from hermes.server.routes import PASSED, route_at

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

PREFLIGHT_KEPT_S = "600"
_PORT = re.compile(r":\d+$")
# An IPv6 customer's network.
_NETWORK_BITS = 64


def check_gate(context: ServerContext, request: web.Request, headers: dict[str, str]) -> ApiError | web.Response | None:
    """Check host, origin and key; an answer ends the request. CORS headers are added to `headers`.

    Requests without a route pass here too. A preflight request is answered here.
    """
    if context.is_open and not is_own_host(context, host := seen_as(context, request)[1]):
        message = f"The host {host!r} is not one of this server's; the setting api_server.allowed_hosts lists others."
        return ApiError(403, message, "host_not_allowed")
    origin = request.headers.get("Origin")
    if origin and not is_same_origin(context, request, origin):
        allowed = context.cors_headers(origin)
        if allowed is None:
            message = "This origin may not call the server; the setting api_server.cors_origins lists those that may."
            return ApiError(403, message, "origin_not_allowed")
        headers |= allowed
        if request.method == "OPTIONS":
            return web.Response(status=200, headers={"Access-Control-Max-Age": PREFLIGHT_KEPT_S})
    route = route_at(request)
    needs_key = route is not None and route.scope is not None
    if needs_key and not (route.name == "metrics" and context.options.metrics_public):  # type: ignore[union-attr]
        refusal = context.check_auth(request)
        if refusal is not None:
            return refusal
    request[PASSED] = context
    return None


def is_same_origin(context: ServerContext, request: web.Request, origin: str) -> bool:
    """Whether the server's own page sends the request."""
    scheme, host = seen_as(context, request)
    return origin == f"{scheme}://{host}" and (not context.is_open or is_own_host(context, host))


def seen_as(context: ServerContext, request: web.Request) -> tuple[str, str]:
    """The scheme and host that the client used; forwarded headers count from trusted proxies only."""
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


def client_address(context: ServerContext, request: web.Request) -> str:
    """The client's address behind trusted proxies; of an IPv6 address its network."""
    remote, trusted = request.remote or "", context.options.trusted_proxies
    if remote in trusted:
        hops = [hop.strip() for hop in request.headers.get("X-Forwarded-For", "").split(",")]
        remote = next((hop for hop in reversed(hops) if hop and hop not in trusted), remote)
    try:
        address = ipaddress.ip_address(remote)
    except ValueError:
        return remote[:64]
    if address.version == 6:
        return str(ipaddress.ip_network((address, _NETWORK_BITS), strict=False))
    return remote
