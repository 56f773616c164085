"""The aiohttp application: every route of the table, the middleware around them, and the listener."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_protocol import RequestHandler

from hermes.core.ids import random_hex
from hermes.core.limits import HEADER_BYTES_MAX, HEADERS_S_MAX
from hermes.server.errors import ApiError, error_response
from hermes.server.handlers import ROUTES
from hermes.server.headers import SECURITY_HEADERS
from hermes.server.middleware import CONTEXT, serve_request
from hermes.server.peers import is_same_user
from hermes.server.routes import error_answer

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

_SLASHES = re.compile("/+")
_PROFILE_ROOT = re.compile("/p/[^/]+/")


def build(context: ServerContext, profiles: Mapping[str, ServerContext] | None = None) -> web.Application:
    """The application of a context, with those of other profiles mounted below it."""
    app = _routed(context, [serve_request])
    for name, other in (profiles or {}).items():
        # The page's files are relative to it, so its address ends with a slash.
        app.router.add_get(f"/p/{name}", partial(_redirect, f"{name}/"))
        app.add_subapp(f"/p/{name}", _routed(other, []))
    return app


async def _redirect(location: str, _: web.Request) -> web.Response:
    return web.Response(status=308, headers={"Location": location})


def _routed(context: ServerContext, middlewares: Sequence[Any]) -> web.Application:
    app = web.Application(middlewares=middlewares, client_max_size=0)  # `request_bodies` has its own limits
    app[CONTEXT] = context
    for route in ROUTES:
        path = route.path.replace("{model_id}", "{model_id:.+}")
        handler = partial(route.endpoint(), context)
        # A GET route answers HEAD as well.
        app.router.add_route(route.method, path, handler)
        if route.method == "GET":
            app.router.add_route("HEAD", path, handler)
    return app


class Runner(web.AppRunner):
    """Serves an application: parser errors get the error envelope, and slow requests a timeout."""

    def __init__(self, app: web.Application, *, shutdown_s: float = 5.0) -> None:
        super().__init__(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=shutdown_s,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
            auto_decompress=False,  # a body is inflated where it is read, so that of a refused request never is
        )

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server
        assert isinstance(server, _Server)
        server.is_open = self.app[CONTEXT].is_open
        make = server.request_factory

        def make_request(message: RawRequestMessage, *parts: Any) -> web.BaseRequest:
            path = message.url.raw_path
            if "//" in path or (path != "/" and path.endswith("/")):
                message = _plain_path(message)
            return make(message, *parts)

        server.request_factory = make_request
        return server


def _plain_path(message: RawRequestMessage) -> RawRequestMessage:
    """The request with single slashes in its path and none at its end, before anything is decided by the path.

    The page of a profile keeps its trailing slash.
    """
    plain = _SLASHES.sub("/", message.url.raw_path)
    if not _PROFILE_ROOT.fullmatch(plain):
        plain = plain.rstrip("/") or "/"
    url = message.url.with_path(plain, encoded=True, keep_query=True)
    return message._replace(path=url.raw_path_qs, url=url)


class _Server(web.Server):
    """`is_open`: no keys are configured, so only the user of this process is served."""

    is_open = False

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    """A connection with a deadline for the head of a request; knows whether its peer is the same user."""

    _head_timer: asyncio.TimerHandle | None = None
    _same_user: bool | None = None

    @property
    def is_same_user(self) -> bool:
        """Whether the peer is the user of this process, or root; looked up once."""
        if self._same_user is None:
            self._same_user = self.transport is not None and is_same_user(self.transport)
        return self._same_user

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(self._manager, _Server) and self._manager.is_open:
            _ = self.is_same_user  # early, before the peer closes its socket
        self._head_timer = self._loop.call_later(HEADERS_S_MAX, self._late)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waiting = not self._messages and not self._request_in_progress
        if self._head_timer is not None and not waiting:
            self._head_timer.cancel()
            self._head_timer = None
        elif self._head_timer is None and waiting:
            self._head_timer = self._loop.call_later(HEADERS_S_MAX, self._late)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def _late(self) -> None:
        self._head_timer = None
        if self.transport is not None and not self._messages and not self._request_in_progress:
            message = f"The head of the request did not arrive within {HEADERS_S_MAX:.0f} seconds."
            body = error_response(408, message, "request_timeout").body
            assert isinstance(body, bytes)
            headers = {"Content-Type": "application/json; charset=utf-8", "Content-Length": str(len(body))}
            headers |= _parser_headers()
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            self.transport.write(f"HTTP/1.1 408 Request Timeout\r\n{head}\r\n".encode() + body)
            self.transport.close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """What aiohttp refuses by itself, like a bad handshake, gets the error envelope."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400 and isinstance(request, web.Request):
            error = ApiError(resp.status, f"The request was refused: {resp.text}.", "bad_request")
            error.redact(request.app[CONTEXT].redact)
            resp = error_answer(request, error)
            resp.headers.update(_parser_headers())
            resp.force_close()
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if self.transport is not None and self._request_count and status >= 500:
            self.log_exception("internal error", exc_info=exc)
        if isinstance(exc, LineTooLong) or "too many" in str(exc).lower():
            status, text, code = 431, f"The headers have more than {HEADER_BYTES_MAX} bytes.", "headers_too_large"
        elif status >= 500:
            text, code = "The server had an internal error.", "internal_error"
        else:
            text, code = "Malformed HTTP request.", "bad_request"
            if "content-length" in str(exc).lower():
                text, code = "The Content-Length cannot be used.", "invalid_content_length"
        response = error_response(status, text, code, headers=_parser_headers())
        response.force_close()
        return response


def _parser_headers() -> dict[str, str]:
    """For errors found before there is a request object."""
    return {**SECURITY_HEADERS, "X-Request-Id": f"req_{random_hex(16)}", "Server": "hermes", "Connection": "close"}
