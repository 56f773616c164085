"""The one middleware: what every request passes before its handler, and what becomes of its response."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from hermes.core.limits import HEADER_BYTES_MAX
from hermes.logs import REQUEST_ID
from hermes.runs.traces import TRACEPARENT
from hermes.server.errors import ApiError
from hermes.server.headers import common_headers
from hermes.server.routes import PASSED, route_at

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

CONTEXT: web.AppKey[ServerContext] = web.AppKey("context")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PREFLIGHT_KEPT_S = "600"
_CLIENT_GONE = 499
_PORT = re.compile(r":\d+$")


@web.middleware
async def serve_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Check head, host, origin and key, call the handler, and answer with the common headers; count all of it."""
    context = request.match_info.apps[-1][CONTEXT]  # of a profile, where it is one's
    began, status, headers = time.perf_counter(), 500, common_headers(request)
    try:
        refusal: ApiError | web.Response | None = head_fault(request) or check_gate(context, request, headers)
        response: web.StreamResponse | None = None
        if refusal is None:
            REQUEST_ID.set(headers["X-Request-Id"])
            TRACEPARENT.set(request.headers.get("traceparent", ""))
            try:
                response = await handler(request)
            except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
                refusal = _router_refusal(request.app[CONTEXT], request, error)
        if isinstance(refusal, ApiError):
            refusal.redact(context.redact)
            refusal = refusal.response()
        if response is None:
            response = refusal
        assert response is not None
        if not response.prepared:
            for name, value in headers.items():
                response.headers.setdefault(name, value)
        status = response.status
    except web.HTTPException as error:
        error.headers.update(headers)
        status = error.status
        raise
    except asyncio.CancelledError:
        status = _CLIENT_GONE
        raise
    finally:
        route = route_at(request)
        context.metrics.answered(route.path if route else None, request.method, status, time.perf_counter() - began)
    begins_turns = route is not None and route.begins_turns and isinstance(response, web.Response)
    if begins_turns and status >= 400 and "X-Hermes-Completed" not in response.headers:  # else a turn had begun
        context.metrics.refused(status, msgspec.json.decode(response.body)["error"]["code"])  # type: ignore[attr-defined]
    return response


def head_fault(request: web.Request) -> ApiError | None:
    """What is wrong with a head that nothing further in can work with."""
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


def _router_refusal(
    context: ServerContext, request: web.Request, error: web.HTTPNotFound | web.HTTPMethodNotAllowed
) -> ApiError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.method} is not possible at {request.path}; {allowed} is."
        return ApiError(405, message, "method_not_allowed", headers={"Allow": allowed})
    profile = request.path.split("/")[2] if request.path.startswith("/p/") else None
    known = profile is None or profile in context.options.profiles
    code = "not_found" if known else "profile_not_found"
    return ApiError(404, f"There is nothing at {request.method} {request.path}.", code)


def check_gate(context: ServerContext, request: web.Request, headers: dict[str, str]) -> ApiError | web.Response | None:
    """Let in whom the server lets in: by host, origin and key. The headers for browsers are added to `headers`.

    What the router refuses passes here as well. A preflight request is answered here.
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
