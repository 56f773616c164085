"""MCP over HTTP: one JSON-RPC message per request, answered as JSON or as a stream. Loading it loads the SDK.

Nothing is kept between requests. The id of an MCP session, which `initialize` gives out, only tells which run a later
`notifications/cancelled` is about, at whichever worker or replica that arrives.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio
from aiohttp import web
from mcp.server.connection import Connection
from mcp.server.runner import modern_error_data, serve_one
from mcp.shared.exceptions import NoBackChannelError
from mcp.shared.inbound import (
    ERROR_CODE_HTTP_STATUS,
    MCP_PROTOCOL_VERSION_HEADER,
    InboundLadderRejection,
    classify_inbound_request,
    find_duplicated_routing_header,
)
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params, progress_token_from_params
from mcp.shared.transport_context import TransportContext
from mcp_types import HEADER_MISMATCH, INVALID_REQUEST, PARSE_ERROR, JSONRPCNotification, JSONRPCRequest
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from msgspec import to_builtins
from pydantic import ValidationError

from hermes.core.ids import random_hex
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.server.errors import ApiError, answer
from hermes.server.keys import caller_of
from hermes.server.mcp_server import Peer, make_server
from hermes.server.render_shared import sse_frame
from hermes.server.request_bodies import read_object
from hermes.server.sse import ClientGone, EventStream

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

SESSION_HEADER = "Mcp-Session-Id"
# What a client without the header speaks.
_FIRST_VERSION = "2025-03-26"
_SESSION = re.compile(r"mcp_([0-9a-f]{12})[0-9a-f]{20}")
_CANCELLED = -32800
_server = functools.cache(make_server)


async def respond(context: ServerContext, request: web.Request) -> web.StreamResponse:
    """The answer to one message."""
    try:
        message = await read_object(context, request)
    except ApiError as error:  # told as JSON-RPC has it
        error.redact(context.redact)
        code = PARSE_ERROR if error.code == "invalid_json" else INVALID_REQUEST
        return answer(_failure(None, code, error.message, to_builtins(error.envelope())), error.status, error.headers)
    if "method" in message and "id" in message:
        try:
            rpc_request = JSONRPCRequest.model_validate(message)
        except ValidationError:
            return _refused(None, INVALID_REQUEST, "This is no request of JSON-RPC 2.0.")
        return await _Exchange(context, request, rpc_request, message).respond()
    try:
        if "method" in message:
            await _notified(context, request, JSONRPCNotification.model_validate(message))
        elif not message.keys() & {"result", "error"}:  # answers are for a server that asks
            return _refused(None, INVALID_REQUEST, "This is no message of JSON-RPC 2.0.")
    except ValidationError:
        return _refused(None, INVALID_REQUEST, "This is no notification of JSON-RPC 2.0.")
    return web.Response(status=202)


async def _notified(context: ServerContext, request: web.Request, message: Any) -> None:
    """A client that keeps its stream open cancels by a notification."""
    if message.method != "notifications/cancelled":
        return
    run_id = _run_id(request, cancelled_request_id_from_params(message.params))
    if run_id is not None and not await context.cancel_mcp_call(run_id):
        await context.app.engine.peers.ask_all("cancel_mcp_call", run_id)


def _run_id(request: web.Request, request_id: object) -> str | None:
    """The run of a request of an MCP session: of the same owner, session and request always the same."""
    session = _SESSION.fullmatch(request.headers.get(SESSION_HEADER, ""))
    if session is None or request_id is None:
        return None
    data = f"{caller_of(request).owner} {session[0]} {type(request_id).__name__} {request_id}"
    return f"run_{session[1]}{hashlib.sha256(data.encode('utf-8', 'surrogatepass')).hexdigest()[:20]}"


def _failure(request_id: object, code: int, message: str, data: object = None) -> JsonObject:
    error = {"code": code, "message": message} | ({} if data is None else {"data": data})
    return {"jsonrpc": "2.0", "id": request_id, "error": error}


def _refused(request_id: object, code: int, message: str, data: object = None) -> web.Response:
    return answer(_failure(request_id, code, message, data), ERROR_CODE_HTTP_STATUS.get(code, 200))


class _Exchange:
    """One request and its answer. To the SDK it is the context of the request (its `DispatchContext`)."""

    can_send_request = False
    message_metadata = None

    def __init__(self, context: ServerContext, request: web.Request, rpc_request: Any, message: JsonMapping) -> None:
        self._context, self._request, self._rpc_request, self._message = context, request, rpc_request, message
        self.transport = TransportContext(kind="streamable-http", can_send_request=False, headers=request.headers)
        self.request_id = rpc_request.id
        self.cancel_requested = anyio.Event()
        self._progress_token = progress_token_from_params(rpc_request.params)
        accepted = request.headers.get("Accept", "*/*").lower()
        self._takes_stream = any(kind in accepted for kind in ("text/event-stream", "text/*", "*/*"))
        self._stream: EventStream | None = None
        version = request.headers.get(MCP_PROTOCOL_VERSION_HEADER)
        self._is_modern = version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS
        self._version = version or _FIRST_VERSION

    async def respond(self) -> web.StreamResponse:
        connection = self._connection()
        if isinstance(connection, InboundLadderRejection):
            return _refused(self.request_id, connection.code, connection.message, connection.data)
        run_id = None
        if not self._is_modern and self._rpc_request.method == "tools/call":
            run_id = _run_id(self._request, self.request_id)
        calls = self._context.mcp_calls
        # Another request of this id may come while it is looked for.
        if run_id is not None and (await self._context.app.engine.get(run_id) is not None or run_id in calls):
            return _refused(self.request_id, INVALID_REQUEST, f"The id {self.request_id!r} was used before.")
        work = asyncio.create_task(self._reply(connection, run_id))
        if run_id is not None:
            calls[run_id] = work
        try:
            return await self._carry(work)
        except ClientGone:
            assert self._stream is not None
            return self._stream.response
        finally:
            calls.pop(run_id or "", None)
            if not work.done():
                work.cancel()
                await asyncio.wait([work])
            if self._stream is not None:
                await self._stream.__aexit__(None, None, None)

    async def _carry(self, work: asyncio.Task[JsonObject]) -> web.StreamResponse:
        """Wait for the reply. Where it takes long the answer becomes a stream, which says that it is alive."""
        await asyncio.wait([work], timeout=self._context.keepalive_s if self._takes_stream else None)
        if not work.done():
            await self._open()
            await asyncio.wait([work])
        if work.cancelled():
            reply = _failure(self.request_id, _CANCELLED, "The request was cancelled.")
        else:
            reply = work.result()
        if self._stream is not None:
            await self._stream.write(sse_frame("message", reply), last=True)
            return self._stream.response
        status = 200
        if self._is_modern and "error" in reply:
            status = ERROR_CODE_HTTP_STATUS.get(reply["error"]["code"], 200)
        headers = {}
        if self._rpc_request.method == "initialize" and "result" in reply:
            headers[SESSION_HEADER] = f"mcp_{time.time_ns() // 1_000_000:012x}{random_hex(10)}"
        return answer(reply, status, headers)

    def _connection(self) -> Any:
        """What the SDK knows of the client; or why its request is refused."""
        if not self._is_modern:
            return Connection.from_envelope(self._version, None, None)
        if (name := find_duplicated_routing_header(self._request.headers.items())) is not None:
            return InboundLadderRejection(code=HEADER_MISMATCH, message=f"{name} header appears more than once")
        headers = {name.lower(): value for name, value in self._request.headers.items()}
        route = classify_inbound_request(self._message, headers=headers)
        if isinstance(route, InboundLadderRejection):
            return route
        return Connection.from_envelope(route.protocol_version, route.client_info, route.client_capabilities)

    async def _reply(self, connection: Any, run_id: str | None) -> JsonObject:
        rpc_request = self._rpc_request
        peer = Peer(self._context, lambda: self._request, run_id)
        try:
            result = await serve_one(
                _server(), self, rpc_request.method, rpc_request.params, connection=connection, lifespan_state=peer
            )
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001  (told by the code that JSON-RPC has for it)
            data = modern_error_data(error)
            return _failure(rpc_request.id, data.code, data.message, data.data)
        return {"jsonrpc": "2.0", "id": rpc_request.id, "result": result}

    # --- what the SDK sends meanwhile -------------------------------------------------------------------------------

    async def _open(self) -> EventStream:
        if self._stream is None:
            self._stream = self._context.socket_stream(self._request, {})
            await self._stream.__aenter__()
        return self._stream

    async def send_raw_request(self, method: str, params: Mapping[str, Any] | None, opts: object = None) -> JsonObject:
        raise NoBackChannelError(method)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: object = None) -> None:
        if self._takes_stream:
            stream = await self._open()
            await stream.write(sse_frame("message", {"jsonrpc": "2.0", "method": method, "params": dict(params or {})}))

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        if self._progress_token is not None:
            params = {"progressToken": self._progress_token, "progress": progress, "total": total, "message": message}
            await self.notify("notifications/progress", {k: v for k, v in params.items() if v is not None})
