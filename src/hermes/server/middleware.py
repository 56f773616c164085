"""The one middleware: checks before the handler, common headers and metrics after it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from hermes.core.limits import HEADER_BYTES_MAX
from hermes.logs import REQUEST_ID
from hermes.runs.traces import TRACEPARENT
from hermes.server.errors import ApiError, code_in
from hermes.server.gate import check_gate
from hermes.server.headers import common_headers
from hermes.server.keys import CALLER, SIGNED_IN
from hermes.server.routes import error_answer, route_at
from hermes.server.sign_in import find_sign_in
from hermes.server.start_gate import START, Start

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

CONTEXT: web.AppKey[ServerContext] = web.AppKey("context")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_CLIENT_GONE = 499


@web.middleware
async def serve_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    context = request.match_info.apps[-1][CONTEXT]  # the profile's, below /p/
    started_at, status, headers = time.perf_counter(), 500, common_headers(request)
    start: Start | None = None
    try:
        refusal: ApiError | web.Response | None = head_fault(request)
        if refusal is None and "Cookie" in request.headers:
            refusal = await find_sign_in(context, request)
        refusal = refusal or check_gate(context, request, headers)
        if refusal is None and CALLER in request:
            refusal = await context.shared_refusal(request)
        response: web.StreamResponse | None = None
        if refusal is None:
            REQUEST_ID.set(headers["X-Request-Id"])
            TRACEPARENT.set(request.headers.get("traceparent", ""))
            try:
                route = route_at(request)
                if route is not None and route.begins_turns:
                    request[START] = start = await context.start_gate.enter()
                response = await handler(request)
            except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
                refusal = _router_refusal(request.app[CONTEXT], request, error)
        if isinstance(refusal, ApiError):
            refusal.redact(context.redact)
            refusal = error_answer(request, refusal)
        if response is None:
            response = refusal
        assert response is not None
        if not response.prepared:
            for name, value in headers.items():
                response.headers.setdefault(name, value)
            if SIGNED_IN in request:  # a cookie does not keep caches from storing the response
                response.headers.setdefault("Cache-Control", "no-store")
        status = response.status
    except web.HTTPException as error:
        error.headers.update(headers)
        status = error.status
        raise
    except asyncio.CancelledError:
        status = _CLIENT_GONE
        raise
    finally:
        if start is not None:
            start.leave()
        route = route_at(request)
        context.metrics.answered(
            route.path if route else None, request.method, status, time.perf_counter() - started_at
        )
    begins_turns = route is not None and route.begins_turns and isinstance(response, web.Response)
    if begins_turns and status >= 400 and "X-Hermes-Completed" not in response.headers:  # else a turn was started
        context.metrics.refused(status, code_in(response.body))  # type: ignore[attr-defined]
    return response


def head_fault(request: web.Request) -> ApiError | None:
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
    # Batches of messages are not offered; their address is no id of a message.
    if isinstance(error, web.HTTPMethodNotAllowed) and not request.path.endswith("/v1/messages/batches"):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.method} is not possible at {request.path}; {allowed} is."
        return ApiError(405, message, "method_not_allowed", headers={"Allow": allowed})
    profile = request.path.split("/")[2] if request.path.startswith("/p/") else None
    known = profile is None or profile in context.options.profiles
    code = "not_found" if known else "profile_not_found"
    return ApiError(404, f"There is nothing at {request.method} {request.path}.", code)
