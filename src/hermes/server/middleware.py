"""What every answer carries, whatever route gave it: security headers, and what a browser needs to be let in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from aiohttp import web

from hermes.server.errors import error_response

if TYPE_CHECKING:
    from hermes.server.adapter import APIServerAdapter

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
)
CORS_HEADERS = {
    "Access-Control-Allow-Methods": "GET, POST, PATCH, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": ", ".join(_REQUEST_HEADERS),
    "Access-Control-Expose-Headers": ", ".join(_RESPONSE_HEADERS),
}
PREFLIGHT_KEPT_S = "600"


@web.middleware
async def cors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let in the origins of the list and nobody else; what is no browser says no origin and passes."""
    adapter: APIServerAdapter | None = request.app.get("api_server_adapter")
    origin = request.headers.get("Origin", "")
    if adapter is None or not origin:
        return await handler(request)
    headers = adapter._cors_headers_for_origin(origin)
    if headers is None:
        words = "This origin may not call the server; the setting api_server.cors_origins lists those that may."
        return error_response(403, words, "origin_not_allowed")
    if request.method == "OPTIONS":
        return web.Response(status=200, headers={**headers, "Access-Control-Max-Age": PREFLIGHT_KEPT_S})
    return await _with_headers(request, handler, headers)


@web.middleware
async def security_headers_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The same headers on every answer, errors included."""
    return await _with_headers(request, handler, SECURITY_HEADERS)


async def _with_headers(request: web.Request, handler: Handler, headers: Mapping[str, str]) -> web.StreamResponse:
    """The handler's answer, or its refusal, with these headers."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.headers.update(headers)
        raise
    if not response.prepared:
        response.headers.update(headers)
    return response
