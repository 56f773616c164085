"""`hermes mcp serve`: Hermes for an MCP host that starts it, over stdin and stdout. Loading it loads the SDK."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from mcp.shared.inbound import MCP_METHOD_HEADER, MCP_NAME_HEADER, MCP_PROTOCOL_VERSION_HEADER, NAME_BEARING_METHODS
from mcp.shared.inbound import encode_header_value as encoded
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, PROTOCOL_VERSION_META_KEY, jsonrpc_message_adapter

from hermes.app import App
from hermes.cli.agents import ServerAgent, ServerLost, ServerRefusal
from hermes.core.json_types import JsonObject
from hermes.logs import logging_to
from hermes.server.context import ServerContext
from hermes.server.mcp_server import serve_stdio, stdio_streams
from hermes.server.settings import Platform, load_gateway_config
from hermes.settings import config

if TYPE_CHECKING:
    from hermes.core.home import Home

_CANCELLED = "notifications/cancelled"


def serve(home: Home, server_url: str | None, *, verbose: bool) -> None:
    """Until the host closes stdin."""
    settings = config.load(home)
    settings.require_valid()
    work = _serve(home, settings) if server_url is None else _relay(settings, server_url.rstrip("/"))
    with logging_to(home, settings, verbose=verbose), suppress(asyncio.CancelledError):
        asyncio.run(_until_terminated(work))


async def _until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """Turns at work are stopped and on record when the process is asked to end."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await task


async def _serve(home: Home, settings: config.Settings) -> None:
    """As the user of this home, like `hermes chat`, with the options of the server."""
    app = App(home, settings)
    try:
        await app.services.files.call(app.store.blocking.open)
        context = ServerContext(load_gateway_config(settings).platforms[Platform.API_SERVER].extra)
        context.attach(app)
        app.engine.start_background_tasks(resume=False)
        await serve_stdio(context)
    finally:
        await app.close()


async def _relay(settings: config.Settings, url: str) -> None:
    """At a server: each message of the host is a request there, and what it answers goes back to the host."""
    server = ServerAgent(lambda: url, settings.variable("HERMES_API_KEY") or "")
    try:
        async with stdio_streams(settings.api_server.max_body_bytes) as (read, write):
            await _Relay(server, write).run(read)
    finally:
        await server.close()


class _Relay:
    def __init__(self, server: ServerAgent, write: Any) -> None:
        self._server, self._write = server, write
        self._headers: dict[str, str] = {}
        self._open: dict[object, asyncio.Task[None]] = {}

    async def run(self, read: Any) -> None:
        async with asyncio.TaskGroup() as group, self._write:
            async for item in read:
                message: JsonObject = item.message.model_dump(mode="json", by_alias=True, exclude_unset=True)
                if "method" not in message:
                    continue  # the server asks nothing, so that there is nothing to answer
                if message["method"] == _CANCELLED:
                    # The server stops what it does for a request whose connection is closed.
                    request_id = (message.get("params") or {}).get("requestId")
                    if isinstance(request_id, str | int) and request_id in self._open:
                        self._open[request_id].cancel()
                elif message["method"] == "initialize":  # what follows has the version that it agrees on
                    await self._post(message)
                else:
                    task = group.create_task(self._post(message))
                    if (request_id := message.get("id")) is not None:
                        self._open[request_id] = task
                        task.add_done_callback(partial(self._forget, request_id))
            for task in [*self._open.values()]:
                task.cancel()

    def _forget(self, request_id: object, task: asyncio.Task[None]) -> None:
        if self._open.get(request_id) is task:  # else the host has used the id again
            del self._open[request_id]

    async def _post(self, message: JsonObject) -> None:
        try:
            answered = False
            async for reply in self._server.messages("/mcp", message, self._headers | _routing(message)):
                answered = answered or "id" in reply
                if message["method"] == "initialize" and "result" in reply:
                    self._headers = {MCP_PROTOCOL_VERSION_HEADER: reply["result"]["protocolVersion"]}
                await self._send(reply)
            if not answered and "id" in message:
                raise ServerLost("The server has gone.")
        except (ServerLost, ServerRefusal) as error:
            if "id" in message:
                failure = {"code": INTERNAL_ERROR, "message": error.message}
                await self._send({"jsonrpc": "2.0", "id": message["id"], "error": failure})

    async def _send(self, reply: JsonObject) -> None:
        await self._write.send(SessionMessage(jsonrpc_message_adapter.validate_python(reply)))


def _routing(message: JsonObject) -> dict[str, str]:
    """The headers of a message that brings its version along, as clients without a handshake send it."""
    params = message.get("params") or {}
    meta = params.get("_meta")
    version = meta.get(PROTOCOL_VERSION_META_KEY) if isinstance(meta, dict) else None
    if not isinstance(version, str):
        return {}
    headers = {MCP_PROTOCOL_VERSION_HEADER: encoded(version), MCP_METHOD_HEADER: encoded(str(message["method"]))}
    if isinstance(name := params.get(NAME_BEARING_METHODS.get(message["method"], "")), str):
        headers[MCP_NAME_HEADER] = encoded(name)
    return headers
