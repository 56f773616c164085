"""Connections to MCP servers: pipes to a child process, or HTTP through the URL guard. Importing it loads the SDK."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio
import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    ErrorData,
    Implementation,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    ToolListChangedNotification,
    jsonrpc_message_adapter,
)

from hermes import __version__
from hermes.core.json_types import JsonObject
from hermes.core.limits import MCP_END_S_MAX, MCP_MESSAGE_BYTES_MAX, MCP_PAGES_MAX, MCP_TOOLS_MAX
from hermes.guards.url_text import FetchFailed
from hermes.guards.urls import Opened, UrlGuard
from hermes.http_client.exchange import Timeouts
from hermes.sandbox.bubblewrap import Bubblewrap
from hermes.sandbox.piped import Program, Throttle, piped_process, sandboxed_process

__all__ = ["CONNECTION_CLOSED", "INVALID_PARAMS", "Client", "Lost", "MCPError"]

log = logging.getLogger(__name__)
# The SDK logs what servers send, and failures that are reported better here.
logging.getLogger("mcp").setLevel(logging.CRITICAL)
logging.getLogger("client").setLevel(logging.CRITICAL)
logging.getLogger("httpx2").setLevel(logging.WARNING)

# The SDK's message if the server no longer knows its session.
FORGOTTEN = "Session terminated"
# The SDK's streams of messages; it does not name their types.
Ends = tuple[Any, Any]
Streams = AbstractAsyncContextManager[Ends]
# The timeout of an exchange is that of the calls made over it.
_UNLIMITED, _BRIEF = Timeouts(86_400.0, 86_400.0), Timeouts(MCP_END_S_MAX, MCP_END_S_MAX)
_PASSED_NOTIFICATIONS = frozenset(
    f"notifications/{name}" for name in ("tools/list_changed", "subscriptions/acknowledged", "cancelled")
)
_REQUEST_HEADERS_DROPPED = frozenset({"host", "accept-encoding", "connection", "content-length", "transfer-encoding"})
_RESPONSE_HEADERS_DROPPED = frozenset({"content-encoding", "content-length", "transfer-encoding"})


class Lost(Exception):
    pass


@asynccontextmanager
async def connected(streams: Streams, changed: Callable[[], None], closed: Callable[[], None]) -> AsyncIterator[Client]:
    async def on_message(message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            changed()

    client_info = Implementation(name="hermes", version=__version__)
    client = Client(_declining(streams, closed), client_info=client_info, message_handler=on_message, cache=None)
    async with client:
        yield client


async def tools(client: Client) -> list[JsonObject]:
    listed: list[JsonObject] = []
    cursor: str | None = None
    for _ in range(MCP_PAGES_MAX):
        page = await client.list_tools(cursor=cursor)
        listed += (tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in page.tools)
        cursor = page.next_cursor
        if not cursor or len(listed) >= MCP_TOOLS_MAX:
            break
    return listed[:MCP_TOOLS_MAX]


async def watch(client: Client) -> None:
    """Subscribe to changes of the tool list, for servers that report them to subscribers only."""
    capability = client.server_capabilities.tools
    if capability is not None and capability.list_changed:
        with suppress(RuntimeError, MCPError):
            async with client.listen(tools_list_changed=True) as events:
                async for _ in events:
                    pass  # each also arrives as a notification


@asynccontextmanager
async def _declining(streams: Streams, closed: Callable[[], None]) -> AsyncIterator[Ends]:
    """The streams without requests of the server, each of which is declined before anything more is read, and without
    notifications that nothing here uses."""
    send, receive = anyio.create_memory_object_stream[Any](0)

    async def pump(read: Any, write: Any) -> None:
        try:
            with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                async with send:
                    async for item in read:
                        message = getattr(item, "message", None)
                        if isinstance(message, JSONRPCRequest):
                            await write.send(SessionMessage(_decline(message)))
                        elif not _is_chatter(message):
                            if isinstance(message, JSONRPCResponse):
                                _remove_output_schemas(message.result)
                            await send.send(item)
        finally:
            closed()

    async with send, receive, streams as (read, write), anyio.create_task_group() as group:
        group.start_soon(pump, read, write)
        yield receive, write
        group.cancel_scope.cancel()


def _is_chatter(message: object) -> bool:
    return isinstance(message, JSONRPCNotification) and message.method not in _PASSED_NOTIFICATIONS


def _decline(request: JSONRPCRequest) -> JSONRPCResponse | JSONRPCError:
    """Refuse sampling, elicitation and roots; answer a ping."""
    if request.method == "ping":
        return JSONRPCResponse(jsonrpc="2.0", id=request.id, result={})
    error = ErrorData(code=METHOD_NOT_FOUND, message="This client does not do that.")
    return JSONRPCError(jsonrpc="2.0", id=request.id, error=error)


def _remove_output_schemas(result: JsonObject) -> None:
    """The SDK would validate answers on our loop, with patterns that the server has chosen."""
    listed = result.get("tools")
    for tool in listed if isinstance(listed, list) else ():
        if isinstance(tool, dict):
            tool.pop("outputSchema", None)


# ---- a process of our own


@asynccontextmanager
async def over_pipes(
    argv: Sequence[str], env: Mapping[str, str], note: Callable[[str], None], sandbox: Bubblewrap | None
) -> AsyncIterator[Ends]:
    start: Any = piped_process if sandbox is None else partial(sandboxed_process, sandbox)
    async with AsyncExitStack() as stack:
        process = await stack.enter_async_context(
            start(argv, env, note, line_bytes_max=MCP_MESSAGE_BYTES_MAX, end_s=MCP_END_S_MAX)
        )
        incoming, read = anyio.create_memory_object_stream[Any](0)
        write, outgoing = anyio.create_memory_object_stream[Any](0)
        try:
            async with incoming, read, write, outgoing, anyio.create_task_group() as group:
                group.start_soon(_read, process, incoming)
                group.start_soon(_write, process, outgoing)
                yield read, write
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await stack.aclose()


async def _read(process: asyncio.subprocess.Process | Program, incoming: Any) -> None:
    assert process.stdout is not None
    throttle = Throttle()
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        async with incoming:
            while True:
                try:
                    line = await process.stdout.readline()
                except ValueError:
                    raise Lost(f"It sent a message of more than {MCP_MESSAGE_BYTES_MAX} bytes.") from None
                if not line:
                    return
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    log.debug("an MCP server wrote a line that is no message")
                    message = None
                if message is None or _is_chatter(message):
                    await throttle.spend(line)
                else:
                    await incoming.send(SessionMessage(message))


async def _write(process: asyncio.subprocess.Process | Program, outgoing: Any) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):
        async with outgoing:
            async for item in outgoing:
                process.stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await process.stdin.drain()


# ---- HTTP


@asynccontextmanager
async def over_http(
    url: str, headers: Mapping[str, str], guard: UrlGuard, note: Callable[[str], None]
) -> AsyncIterator[Ends]:
    async with (
        httpx2.AsyncClient(headers=dict(headers), transport=_Guarded(guard, note), timeout=None) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MCP_MESSAGE_BYTES_MAX) as streams,
    ):
        yield streams


class _Guarded(httpx2.AsyncBaseTransport):
    def __init__(self, guard: UrlGuard, note: Callable[[str], None]) -> None:
        self._guard, self._note = guard, note

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = await request.aread()
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in _REQUEST_HEADERS_DROPPED
        }
        opening = self._guard.open(
            str(request.url), trusted=True, method=request.method, headers=headers, body=body, bytes_max=None,
            timeouts=_BRIEF if request.method == "DELETE" else _UNLIMITED,
        )  # fmt: skip
        try:
            opened = await opening.__aenter__()
        except FetchFailed as error:
            raise httpx2.ConnectError(str(error), request=request) from error
        if opened.status >= 400:
            self._note(f"It answered a {request.method} with status {opened.status}.")
        response_headers = [
            (name, value) for name, value in opened.headers.items() if name.lower() not in _RESPONSE_HEADERS_DROPPED
        ]
        return httpx2.Response(opened.status, headers=response_headers, stream=_Body(opening, opened))


class _Body(httpx2.AsyncByteStream):
    """The body of a response. One that is no event stream is a single message, whose size is limited."""

    def __init__(self, opening: AbstractAsyncContextManager[Opened], opened: Opened) -> None:
        self._opening, self._opened = opening, opened
        self._endless = opened.headers.get("Content-Type", "").lower().startswith("text/event-stream")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            while piece := await self._opened.read():
                size += len(piece)
                if size > MCP_MESSAGE_BYTES_MAX and not self._endless:
                    raise httpx2.StreamError(f"a message of more than {MCP_MESSAGE_BYTES_MAX} bytes")
                yield piece
        except FetchFailed as error:
            raise httpx2.ReadError(str(error)) from error

    async def aclose(self) -> None:
        await self._opening.__aexit__(None, None, None)
