"""What every answer carries, whatever route gave it, and how the router's refusals are told."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from aiohttp import web

from hermes.core.ids import random_hex
from hermes.core.limits import HEADER_BYTES_MAX
from hermes.logs import REQUEST_ID
from hermes.runs.traces import TRACEPARENT
from hermes.server.errors import ApiError
from hermes.server.keys import Key

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

CONTEXT: web.AppKey[ServerContext] = web.AppKey("context")
# The key of a request that has shown one.
CALLER: web.RequestKey[Key] = web.RequestKey("caller", Key)
_ANYBODY = Key()
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
    "api-key",
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
    "X-Hermes-Warning",
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
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_KNOWN_ID = web.RequestKey("request_id", str)


def caller_of(request: web.Request) -> Key:
    """Whose request it is: that of the key it has shown, else that of whoever may come in without."""
    caller: Key = request.get(CALLER, _ANYBODY)
    return caller


def request_id(request: web.Request) -> str:
    """The id under which the request is known: the client's own where it can be used."""
    known = request.get(_KNOWN_ID)
    if known is None:
        given = request.headers.get("X-Request-Id", "")
        known = given if _REQUEST_ID.fullmatch(given) else f"req_{random_hex(16)}"
        request[_KNOWN_ID] = known
    return known


@web.middleware
async def head_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a head that nothing further in can work with, before anything reads a header."""
    fault = _head_fault(request)
    if fault is None:
        return await handler(request)
    refusal = _refusal(request, fault)
    refusal.headers.update(common_headers(request))
    return refusal


def _refusal(request: web.Request, error: ApiError) -> web.Response:
    error.redact(request.app[CONTEXT].redact)
    return error.response()


def _head_fault(request: web.Request) -> ApiError | None:
    size = hosts = 0
    for name, value in request.raw_headers:
        size += len(name) + len(value)
        hosts += name.lower() == b"host"
        if not value.isascii():
            try:
                value.decode()
            except UnicodeDecodeError:
                shown_name = name.decode("ascii", "replace")
                return ApiError(400, f"The header {shown_name} is not UTF-8.", "bad_request", shown_name)
    if size > HEADER_BYTES_MAX:
        return ApiError(431, f"The headers have more than {HEADER_BYTES_MAX} bytes.", "headers_too_large")
    if hosts != 1:
        return ApiError(400, "The request must have one Host header.", "bad_request", "Host")
    return None


@web.middleware
async def security_headers_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The same headers on every answer, errors included; the log tells for which request a line is."""
    REQUEST_ID.set(request_id(request))
    TRACEPARENT.set(request.headers.get("traceparent", ""))
    return await with_headers(request, handler, common_headers(request))


@web.middleware
async def envelope_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What the router refuses is told like every other error."""
    context = request.app[CONTEXT]
    try:
        return await handler(request)
    except web.HTTPNotFound:
        profile = request.path.split("/")[2] if request.path.startswith("/p/") else None
        known = profile is None or profile in context.options.profiles
        code = "not_found" if known else "profile_not_found"
        refusal = ApiError(404, f"There is nothing at {request.method} {request.path}.", code)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.method} is not possible at {request.path}; {allowed} is."
        refusal = ApiError(405, message, "method_not_allowed", headers={"Allow": allowed})
    return _refusal(request, refusal)


def own_headers(context: ServerContext, request: web.Request) -> dict[str, str]:
    """What a stream carries of all this: its head is sent before any middleware sees it again."""
    if origin := request.headers.get("Origin"):
        return {**common_headers(request), **(context.cors_headers(origin) or {})}
    return common_headers(request)


def common_headers(request: web.Request) -> dict[str, str]:
    return {**SECURITY_HEADERS, "X-Request-Id": request_id(request), "Server": "hermes"}


async def with_headers(request: web.Request, handler: Handler, headers: Mapping[str, str]) -> web.StreamResponse:
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
