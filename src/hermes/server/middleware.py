"""What every answer carries, whatever route gave it: security headers, and what a browser needs to be let in."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from aiohttp import web

from hermes.limits import HEADER_BYTES_MAX
from hermes.logs import REQUEST_ID
from hermes.runs.traces import TRACEPARENT
from hermes.server.endpoint import request_id
from hermes.server.errors import error_response

if TYPE_CHECKING:
    from hermes.server.adapter import APIServerAdapter

ADAPTER: web.AppKey[APIServerAdapter] = web.AppKey("adapter")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Strict-Transport-Security": "max-age=31536000; includeSubDomains",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "X-XSS-Protection": "0",
    "Referrer-Policy": "no-referrer",
}
_REQUEST_HEADERS = (
    "Authorization",
    "Content-Type",
    "Idempotency-Key",
    "Last-Event-ID",
    "X-Request-Id",
    "X-Hermes-Session-Id",
    "X-Hermes-Session-Key",
    "X-Hermes-Seed-History",
    "X-Hermes-Detach",
    "X-Hermes-Approvals",
    "X-Hermes-Tool-Progress",
    "X-Hermes-Tool-Items",
    "X-Hermes-Reasoning",
    "X-Hermes-Toolsets",
    "X-Hermes-Timeout",
)
_RESPONSE_HEADERS = (
    "X-Request-Id",
    "X-Hermes-Session-Id",
    "X-Hermes-Session-Key",
    "X-Hermes-Run-Id",
    "X-Hermes-Model",
    "X-Hermes-History",
    "X-Hermes-Completed",
    "X-Hermes-Partial",
    "X-Hermes-Error",
    "X-Hermes-Ignored",
    "Idempotency-Replayed",
    "Retry-After",
    "x-should-retry",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
CORS_HEADERS = {
    "Access-Control-Allow-Methods": "GET, POST, PATCH, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": ", ".join(_REQUEST_HEADERS),
    "Access-Control-Expose-Headers": ", ".join(_RESPONSE_HEADERS),
}
PREFLIGHT_KEPT_S = "600"


@web.middleware
async def head_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a head that nothing further in can work with, before anything reads a header."""
    refusal = _head_fault(request)
    if refusal is None:
        return await handler(request)
    refusal.headers.update(_common(request))
    return refusal


def _head_fault(request: web.Request) -> web.Response | None:
    size = hosts = 0
    for name, value in request.raw_headers:
        size += len(name) + len(value)
        hosts += name.lower() == b"host"
        if not value.isascii():
            try:
                value.decode()
            except UnicodeDecodeError:
                shown = name.decode("ascii", "replace")
                return error_response(400, f"The header {shown} is not UTF-8.", "bad_request", shown)
    if size > HEADER_BYTES_MAX:
        return error_response(431, f"The headers have more than {HEADER_BYTES_MAX} bytes.", "headers_too_large")
    if hosts != 1:
        return error_response(400, "The request must have one Host header.", "bad_request", "Host")
    return None


@web.middleware
async def cors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let in the origins of the list and nobody else; what is no browser says no origin and passes."""
    adapter: APIServerAdapter | None = request.app.get(ADAPTER) or request.app.get("api_server_adapter")
    origin = request.headers.get("Origin", "")
    if adapter is None or not origin or is_same_origin(adapter, request, origin):
        return await handler(request)
    headers = adapter._cors_headers_for_origin(origin)
    if headers is None:
        words = "This origin may not call the server; the setting api_server.cors_origins lists those that may."
        refusal = error_response(403, words, "origin_not_allowed")
        refusal.headers.update(_common(request))
        return refusal
    if request.method == "OPTIONS":
        kept = {**headers, **_common(request), "Access-Control-Max-Age": PREFLIGHT_KEPT_S}
        return web.Response(status=200, headers=kept)
    return await _with_headers(request, handler, headers)


@web.middleware
async def security_headers_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The same headers on every answer, errors included; the log tells for which request a line is."""
    REQUEST_ID.set(request_id(request))
    TRACEPARENT.set(request.headers.get("traceparent", ""))
    return await _with_headers(request, handler, _common(request))


@web.middleware
async def envelope_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What the router refuses is told like every other error."""
    adapter = request.app[ADAPTER]
    _, host = seen_as(adapter, request)
    if adapter.is_open and not is_own_host(adapter, host):
        words = f"The host {host!r} is not one of this server's; the setting api_server.allowed_hosts lists others."
        return error_response(403, words, "host_not_allowed")
    try:
        return await handler(request)
    except web.HTTPNotFound:
        profile = request.path.split("/")[2] if request.path.startswith("/p/") else None
        known = profile is None or profile in adapter.option("profiles")
        code = "not_found" if known else "profile_not_found"
        return error_response(404, f"There is nothing at {request.method} {request.path}.", code)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        words = f"{request.method} is not possible at {request.path}; {allowed} is."
        return error_response(405, words, "method_not_allowed", headers={"Allow": allowed})


def own_headers(adapter: APIServerAdapter, request: web.Request) -> dict[str, str]:
    """What a stream carries of all this: its head is sent before any middleware sees it again."""
    origin = request.headers.get("Origin", "")
    return {**_common(request), **(adapter._cors_headers_for_origin(origin) or {})}


def _common(request: web.Request) -> dict[str, str]:
    return {**SECURITY_HEADERS, "X-Request-Id": request_id(request), "Server": "hermes"}


def is_same_origin(adapter: APIServerAdapter, request: web.Request, origin: str) -> bool:
    """Whether a page of the server's own is asking."""
    scheme, host = seen_as(adapter, request)
    return origin == f"{scheme}://{host}" and (not adapter.is_open or is_own_host(adapter, host))


def seen_as(adapter: APIServerAdapter, request: web.Request) -> tuple[str, str]:
    """The scheme and the host that the client asked for; a proxy is believed only where it is one of the list."""
    if request.remote not in adapter.option("trusted_proxies"):
        return request.scheme, request.host
    told = [request.headers.get(name, "").split(",")[0].strip() for name in ("X-Forwarded-Proto", "X-Forwarded-Host")]
    return told[0] or request.scheme, told[1] or request.host


def is_own_host(adapter: APIServerAdapter, host: str) -> bool:
    """Whether a name by which the server was called is one that it may have: a strange one is a trick of a browser."""
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    name = name.strip("[]").rstrip(".").lower()
    if name in ("localhost", adapter._host.lower()) or name.endswith(".localhost"):
        return True
    if name in adapter.option("allowed_hosts") or host in adapter.option("allowed_hosts"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _with_headers(request: web.Request, handler: Handler, headers: Mapping[str, str]) -> web.StreamResponse:
    """The handler's answer, or its refusal, with these headers, unless it has its own."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.headers.update(headers)
        raise
    if not response.prepared:
        for name, value in headers.items():
            response.headers.setdefault(name, value)
    return response
