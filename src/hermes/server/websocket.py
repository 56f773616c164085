"""Responses over a WebSocket: one at a time, in order, each chained to the last even where it is not stored."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

from hermes.core.json_types import JsonObject
from hermes.core.limits import BODY_MEMORY_BYTES_MAX, SOCKET_PING_S, SOCKET_QUEUE_MAX, SOCKET_S_MAX
from hermes.server.errors import ApiError
from hermes.server.headers import common_headers
from hermes.server.keys import caller_of
from hermes.server.models import ResponseRequest
from hermes.server.outcome import Outcome
from hermes.server.prepared_response import PreparedResponse, prepare
from hermes.server.render_responses import socket_frame
from hermes.server.request_bodies import as_object, flag_of, parse
from hermes.server.response_record import transcript
from hermes.server.routes import route
from hermes.server.sse import ClientGone
from hermes.store.base import StoreError

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

log = logging.getLogger(__name__)


@route(
    "GET /v1/responses",
    "responses_websocket",
    "Responses over a WebSocket",
    scope="chat",
    status=101,
    faults=(426, 429),
    features="responses_websocket",
    begins_turns=True,
)
async def responses_websocket(context: ServerContext, request: web.Request) -> web.StreamResponse:
    if request.headers.get("Upgrade", "").lower() != "websocket":
        message = "GET /v1/responses is a WebSocket; ask with Upgrade: websocket, or POST."
        raise ApiError(426, message, "upgrade_required", headers={"Upgrade": "websocket", "Connection": "Upgrade"})
    # No compression: a small frame must not inflate to megabytes on the event loop.
    limit = context.options.max_body_bytes
    socket = web.WebSocketResponse(heartbeat=SOCKET_PING_S, max_msg_size=limit, compress=False)
    socket.headers.update(common_headers(request))
    await socket.prepare(request)
    await _Connection(context, request, socket).serve()
    return socket


class _Writer:
    ready = False

    def __init__(self, socket: web.WebSocketResponse, stall_s: float) -> None:
        self._socket, self._stall_s = socket, stall_s

    def write_now(self, data: bytes) -> None:
        """It is never ready."""
        raise NotImplementedError

    async def __aenter__(self) -> _Writer:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def hold(self) -> None:
        """Nothing to hold: the head is sent."""

    async def release(self) -> None: ...

    async def write(self, data: bytes, *, last: bool = False) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                for line in data.splitlines():
                    await self._socket.send_str(line.decode())
        except (ConnectionError, RuntimeError, TimeoutError) as error:
            raise ClientGone from error


class _Connection:
    """One socket: its queue, and the last response, for the next to continue from."""

    def __init__(self, context: ServerContext, request: web.Request, socket: web.WebSocketResponse) -> None:
        self._context, self._request, self._socket = context, request, socket
        self._waiting: asyncio.Queue[tuple[JsonObject, int]] = asyncio.Queue()
        self._memory: dict[str, JsonObject] = {}
        self._open = 0

    async def serve(self) -> None:
        """Accept requests until the socket is closed, its time is over, or the server stops."""
        working = asyncio.create_task(self._work())
        reading = asyncio.create_task(self._read())
        draining = asyncio.create_task(self._context.draining.wait())
        try:
            ends = [reading, draining, working]
            await asyncio.wait(ends, timeout=SOCKET_S_MAX, return_when=asyncio.FIRST_COMPLETED)
            if working.done():  # the client reads nothing, not even a close frame
                if self._request.transport is not None:
                    self._request.transport.abort()
            elif draining.done():
                # The response in progress is finished.
                while not working.done() and self._open and not self._socket.closed:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                await self._socket.close(code=WSCloseCode.SERVICE_RESTART)
            elif not reading.done():
                message = "A connection lasts an hour; open another one."
                await self._tell(ApiError(400, message, "websocket_connection_limit_reached"))
                await self._socket.close(code=WSCloseCode.OK)
        finally:
            tasks = (working, reading, draining)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            while not self._waiting.empty():
                self._context.body_memory.give_back(self._waiting.get_nowait()[1])

    async def _read(self) -> None:
        async for message in self._socket:
            try:
                await self._accept(message)
            except ApiError as error:
                await self._tell(error)

    async def _accept(self, message: WSMessage) -> None:
        """Queue a frame's request. Every frame counts against the rate limit, before it is parsed."""
        if (refusal := await self._context.rate_refusal(caller_of(self._request))) is not None:
            raise refusal
        if message.type is not WSMsgType.TEXT:
            raise ApiError(400, "Messages are JSON objects in text frames.", "invalid_body")
        if self._open > SOCKET_QUEUE_MAX:  # one of them is being answered
            reason = f"{SOCKET_QUEUE_MAX} requests wait on this connection already."
            raise ApiError(429, reason, "rate_limit_exceeded")
        size = len(message.data) if len(message.data) > BODY_MEMORY_BYTES_MAX else 0
        given = as_object(message.data)
        if size and not self._context.body_memory.take_now(size):
            reason = "Too many large requests are being answered; try again, or send smaller images and files."
            raise ApiError(429, reason, "rate_limit_exceeded")
        self._waiting.put_nowait((given, size))
        self._open += 1

    async def _work(self) -> None:
        while True:
            given, size = await self._waiting.get()
            try:
                await self._respond(given)
            except ApiError as error:
                await self._tell(error)
            except StoreError as error:
                message = self._context.redact(f"The store is out of reach: {error}")
                await self._tell(ApiError(503, message, "session_db_unavailable"))
            except ClientGone:
                return
            except Exception:
                log.exception("a response on a socket ended by a defect")
                await self._tell(ApiError(500, "The server had an internal error.", "internal_error"))
            finally:
                self._open -= 1
                self._context.body_memory.give_back(size)

    async def _respond(self, given: JsonObject) -> None:
        kind = given.pop("type", None)
        if kind != "response.create":
            raise ApiError(400, "The type of a message is response.create.", "invalid_value", "type")
        generate = flag_of(given.pop("generate", None), "generate", True)
        if not generate:
            given.setdefault("input", [])
        body = parse(given, ResponseRequest, strict=self._context.options.strict_parameters)
        if body.model.background:
            message = "A response on a WebSocket cannot run in the background; send it with POST."
            raise ApiError(400, message, "unsupported_parameter", "background")
        body.model.stream = True
        before = body.model.previous_response_id
        try:
            work = await prepare(self._context, self._request, body, self._memory, generate=generate)
        except ApiError as error:
            if error.code == "previous_response_not_found":
                error.status = 400
            raise
        if not generate:
            await self._warm_up(work)
            return
        try:
            await work.admit()
            write = _Writer(self._socket, self._context.options.write_stall_seconds)
            renderer, ended = await work.run(write, frame=socket_frame), await work.turn.streamed_outcome()
        except BaseException:
            self._memory.pop(before or "", None)
            raise
        finally:
            await work.turn.release()
        if ended.code is not None:
            self._memory.pop(before or "", None)
        else:
            self._remember(work, renderer.response, ended)

    async def _warm_up(self, work: PreparedResponse) -> None:
        """Answer without a turn. Its input becomes part of the history of whatever is chained to the answer."""
        record, write = work.record, _Writer(self._socket, self._context.options.write_stall_seconds)
        renderer = await record.renderer(self._context, frame=socket_frame)
        for data in renderer.begin():
            await write.write(data)
        data = renderer.finish(Outcome())
        chain = work.chain or {}
        history = list(work.turn.spec.history or ())
        if history:  # the session of the chain holds nothing of it
            record.session_id, record.run_id = None, None
        else:
            record.session_id, record.run_id = chain.get("session_id"), chain.get("run_id")
        stored = record.as_json(renderer.response, history or chain.get("conversation_history") or [])
        self._memory = {record.response_id: stored}
        if record.store:
            await self._context.stored_responses.put(record.response_id, stored)
        await write.write(data)

    def _remember(self, work: PreparedResponse, response: JsonObject, ended: Any) -> None:
        record = work.record
        history = transcript(record.history, record.user_message, ended.messages, ended.text)
        stored = record.as_json(response, history)
        if not work.turn.spec.persist:
            stored["run_id"] = None
        self._memory = {record.response_id: stored}

    async def _tell(self, error: ApiError) -> None:
        error.redact(self._context.redact)
        self._context.metrics.refused(error.status, error.code)
        with contextlib.suppress(ConnectionError, RuntimeError):
            await self._socket.send_json(
                {"type": "error", "status": error.status, **msgspec.to_builtins(error.envelope())}
            )
