"""Headers of every response, and those that browsers may send and read."""

from __future__ import annotations

import re

from aiohttp import web

from hermes.core.ids import random_hex

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Strict-Transport-Security": "max-age=31536000; includeSubDomains",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "X-XSS-Protection": "0",
    "Referrer-Policy": "no-referrer",
}
# Sent with every request of the Messages protocol.
VERSION_HEADER = "anthropic-version"
# Headers with which a request changes its turn.
_OPTIONS = "Session-Id Session-Key Seed-History Detach Approvals Tool-Progress Tool-Items Reasoning Toolsets Timeout"
OPTION_HEADERS = tuple(f"X-Hermes-{name}" for name in _OPTIONS.split())
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")
)
_REQUEST_HEADERS = (
    "Authorization",
    "api-key",
    "x-api-key",
    VERSION_HEADER,
    "anthropic-beta",
    "anthropic-dangerous-direct-browser-access",
    "Content-Type",
    "Idempotency-Key",
    "Last-Event-ID",
    "MCP-Protocol-Version",
    "Mcp-Method",
    "Mcp-Name",
    "Mcp-Session-Id",
    "X-Request-Id",
    *OPTION_HEADERS,
)
_RESPONSE_HEADERS = (
    "Mcp-Session-Id",
    "X-Request-Id",
    "request-id",
    "X-Hermes-Session-Id",
    "X-Hermes-Session-Key",
    "X-Hermes-Run-Id",
    "X-Hermes-Model",
    "X-Hermes-History",
    "X-Hermes-Completed",
    "X-Hermes-Partial",
    "X-Hermes-Error",
    "X-Hermes-Ignored",
    "X-Hermes-Warning",
    "Idempotency-Replayed",
    "Retry-After",
    "x-should-retry",
    *RATE_HEADERS,
)
CORS_HEADERS = {
    "Access-Control-Allow-Methods": "GET, POST, PATCH, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": ", ".join(_REQUEST_HEADERS),
    "Access-Control-Expose-Headers": ", ".join(_RESPONSE_HEADERS),
}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_HEADERS: web.RequestKey[dict[str, str]] = web.RequestKey("headers", dict)


def common_headers(request: web.Request) -> dict[str, str]:
    """The headers of every response to a request; the gate adds those of CORS."""
    headers = request.get(_HEADERS)
    if headers is None:
        given = request.headers.get("X-Request-Id", "")
        known = given if _REQUEST_ID.fullmatch(given) else f"req_{random_hex(16)}"
        headers = request[_HEADERS] = {**SECURITY_HEADERS, "X-Request-Id": known, "Server": "hermes"}
        if VERSION_HEADER in request.headers:
            headers["request-id"] = known
    return headers


def request_id(request: web.Request) -> str:
    """The client's own id where it is valid."""
    return common_headers(request)["X-Request-Id"]
