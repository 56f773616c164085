"""The MCP server: the methods of the protocol over `mcp_tools`, whatever carries them. Loading it loads the SDK."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    PARSE_ERROR,
    CallToolResult,
    ErrorData,
    GetPromptResult,
    JSONRPCError,
    JSONRPCNotification,
    ListPromptsResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ListToolsResult,
    Prompt,
    PromptArgument,
    PromptMessage,
    ReadResourceResult,
    Resource,
    ResourceTemplate,
    TextContent,
    TextResourceContents,
    Tool,
    ToolAnnotations,
    jsonrpc_message_adapter,
)
from multidict import CIMultiDict, CIMultiDictProxy
from pydantic import ValidationError
from yarl import URL

import hermes
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.line_reader import read_line
from hermes.runs.traces import TRACEPARENT
from hermes.server.mcp_tools import (
    TOOLS,
    URI_PREFIX,
    McpCall,
    read_resource,
    session_resources,
    skill_prompt,
    skill_prompts,
)
from hermes.server.request_bodies import without_lone_surrogates
from hermes.server.routes import error_of
from hermes.server.sse import ClientGone

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

log = logging.getLogger(__name__)
# The SDK logs what clients send.
logging.getLogger("mcp").setLevel(logging.CRITICAL)
_MARKDOWN = "text/markdown"
_INSTRUCTIONS = (
    "Hermes is an AI agent with tools, memory and sessions of its own. Give it work with `ask`, and go on in the same "
    "session by its session_id."
)


@dataclass(slots=True)
class Peer:
    """Who is at the other end: one HTTP request, or the process at the other end of the pipes."""

    context: ServerContext
    request: Callable[[], web.Request]
    run_id: str | None = None


def make_server(lifespan: Any = None) -> Any:
    """The server of the SDK. Its lifespan is a `Peer`."""
    server: Any = Server(
        "hermes",
        title="Hermes",
        version=hermes.__version__,
        instructions=_INSTRUCTIONS,
        on_list_tools=_list_tools,
        on_call_tool=_call_tool,
        on_list_resources=_list_resources,
        on_list_resource_templates=_list_templates,
        on_read_resource=_read_resource,
        on_list_prompts=_list_prompts,
        on_get_prompt=_get_prompt,
        get_tool_input_schema=lambda name: TOOLS[name].schema() if name in TOOLS else None,
        **({"lifespan": lifespan} if lifespan else {}),
    )
    server.middleware.clear()  # spans are made of what is on record of runs
    return server


def _call(ctx: Any) -> McpCall:
    peer: Peer = ctx.lifespan_context
    if isinstance(parent := (ctx.meta or {}).get("traceparent"), str):
        TRACEPARENT.set(parent)
    steps = 0

    async def report(text: str) -> None:
        nonlocal steps
        steps += 1
        await ctx.session.report_progress(steps, message=text)

    async def elicit(text: str, schema: JsonObject) -> JsonMapping | None:
        try:
            filled = await ctx.session.elicit_form(text, schema)
        except MCPError:
            return None
        return filled.content if filled.action == "accept" else None

    return McpCall(peer.context, peer.request(), report, peer.run_id, elicit if _has_forms(ctx.session) else None)


def _has_forms(session: Any) -> bool:
    """Whether the client can be asked, and has forms for its user. One that names no kind of them has forms."""
    offered = session.client_capabilities.elicitation if session.client_capabilities else None
    return bool(session.can_send_request and offered and (offered.form is not None or offered.url is None))


def _error(call: McpCall, error: Exception) -> MCPError:
    refusal = error_of(call.context, call.request, error)
    code = INVALID_PARAMS if refusal.status < 500 else INTERNAL_ERROR
    return MCPError(code=code, message=refusal.message, data=msgspec.to_builtins(refusal.envelope()))


@asynccontextmanager
async def _operation(ctx: Any) -> AsyncIterator[McpCall]:
    call = _call(ctx)
    try:
        yield call
    except (MCPError, ClientGone):
        raise
    except Exception as error:  # noqa: BLE001  (told by the code that JSON-RPC has for it)
        raise _error(call, error) from None


# --- tools -----------------------------------------------------------------------------------------------------------


async def _list_tools(ctx: Any, params: Any) -> ListToolsResult:
    """The tools that the key may call."""
    async with _operation(ctx) as call:
        tools = [tool for tool in TOOLS.values() if call.may(tool.scope)]
        return ListToolsResult(
            tools=[
                Tool(
                    name=tool.name,
                    description=tool.description,
                    input_schema=tool.schema(),
                    annotations=ToolAnnotations(read_only_hint=tool.read_only),
                )
                for tool in tools
            ]
        )


async def _call_tool(ctx: Any, params: Any) -> CallToolResult:
    """A refusal is a result too, with the envelope of the API's errors: the model is to read it."""
    call = _call(ctx)
    tool = TOOLS.get(params.name)
    if tool is None:
        raise MCPError(code=INVALID_PARAMS, message=f"There is no tool {params.name!r}.")
    try:
        document = await tool.call(call, params.arguments or {})
    except ClientGone:
        raise
    except Exception as error:  # noqa: BLE001  (told as the API would tell it)
        refusal = error_of(call.context, call.request, error)
        call.context.metrics.refused(refusal.status, refusal.code)
        return _result(refusal.message, msgspec.to_builtins(refusal.envelope()), is_error=True)
    text = document["answer"] if tool.name == "ask" else msgspec.json.encode(document).decode()
    return _result(text, document)


def _result(text: str, document: JsonObject, *, is_error: bool = False) -> CallToolResult:
    content = TextContent(type="text", text=text)
    return CallToolResult(content=[content], structured_content=document, is_error=is_error)


# --- resources and prompts -------------------------------------------------------------------------------------------


async def _list_resources(ctx: Any, params: Any) -> ListResourcesResult:
    async with _operation(ctx) as call:
        listed, cursor = await session_resources(call, params.cursor if params else None)
        resources = [Resource(**resource, mime_type=_MARKDOWN) for resource in listed]
        return ListResourcesResult(resources=resources, next_cursor=cursor)


async def _list_templates(ctx: Any, params: Any) -> ListResourceTemplatesResult:
    template = ResourceTemplate(
        uri_template=f"{URI_PREFIX}{{session_id}}",
        name="session",
        description="A session (conversation) as Markdown.",
        mime_type=_MARKDOWN,
    )
    return ListResourceTemplatesResult(resource_templates=[template])


async def _read_resource(ctx: Any, params: Any) -> ReadResourceResult:
    async with _operation(ctx) as call:
        uri = str(params.uri)
        text = await read_resource(call, uri)
        return ReadResourceResult(contents=[TextResourceContents(uri=uri, mime_type=_MARKDOWN, text=text)])


async def _list_prompts(ctx: Any, params: Any) -> ListPromptsResult:
    async with _operation(ctx) as call:
        task = PromptArgument(name="task", description="what to do with it", required=False)
        skills = await skill_prompts(call)
        prompts = [Prompt(name=skill.name, description=skill.description, arguments=[task]) for skill in skills]
        return ListPromptsResult(prompts=prompts)


async def _get_prompt(ctx: Any, params: Any) -> GetPromptResult:
    async with _operation(ctx) as call:
        description, text = await skill_prompt(call, params.name, (params.arguments or {}).get("task", ""))
        message = PromptMessage(role="user", content=TextContent(type="text", text=text))
        return GetPromptResult(description=description, messages=[message])


# --- over pipes ------------------------------------------------------------------------------------------------------


async def serve_stdio(context: ServerContext) -> None:
    """Serve the process at the other end of stdin and stdout, as the user of this home, until it closes them."""

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[Peer]:
        yield Peer(context, _detached_request)

    server = make_server(lifespan)
    async with stdio_streams(context.options.max_body_bytes) as (read, write):
        await server.run(read, write, server.create_initialization_options())


@asynccontextmanager
async def stdio_streams(line_bytes_max: int) -> AsyncIterator[tuple[Any, Any]]:
    """What the SDK reads messages from and writes them to. Reading can be cancelled, which the SDK's own cannot, and a
    line that is no message is answered."""
    reader, transport = asyncio.StreamReader(limit=line_bytes_max), None
    if stat.S_ISREG(os.fstat(0).st_mode):  # there is nothing to wait for
        reader.feed_data(await asyncio.to_thread(sys.stdin.buffer.read))
        reader.feed_eof()
    else:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    write: Any = None

    async def lines() -> AsyncIterator[str]:
        too_long = INVALID_REQUEST, f"A message has at most {line_bytes_max} bytes"
        while (line := await read_line(reader)) != b"":
            refusal = too_long if line is None else _line_refusal(line)
            if refusal is not None and line is not None and (replaced := without_lone_surrogates(line)) is not None:
                line, refusal = replaced, _line_refusal(replaced)
            if refusal is not None:
                code, message = refusal
                error = JSONRPCError(jsonrpc="2.0", id=None, error=ErrorData(code=code, message=message))
                await write.send(SessionMessage(error))
            elif line is not None and line.strip():
                yield line.decode(errors="replace")

    try:
        given: Any = lines()
        async with stdio_server(stdin=given) as (read, write):
            yield read, write
    finally:
        if transport is not None:
            with suppress(OSError):  # it may be closed
                os.set_blocking(0, True)  # a terminal is shared with others
            transport.close()


def _line_refusal(line: bytes) -> tuple[int, str] | None:
    """Why a line is no message of JSON-RPC; blank lines are passed over."""
    try:
        if line.strip():
            message = jsonrpc_message_adapter.validate_json(line.decode(errors="replace"), by_name=False)
            # A request with an id that is none is taken for a notification, which is never answered.
            if isinstance(message, JSONRPCNotification) and "id" in json.loads(line.decode(errors="replace")):
                return INVALID_REQUEST, "An id is a text or a whole number"
    except ValidationError as error:
        if any(fault["type"] == "json_invalid" for fault in error.errors(include_input=False, include_url=False)):
            return PARSE_ERROR, "The line is no JSON"
        return INVALID_REQUEST, "The line is no message of JSON-RPC 2.0"
    return None


def _detached_request() -> web.Request:
    """A request that came over no connection: of the home's own user, without any headers."""
    headers = CIMultiDictProxy(CIMultiDict[str]())
    message = RawRequestMessage(
        "POST", "/mcp", HttpVersion11, headers, (), False, None, False, False, URL("/mcp")
    )  # fmt: skip
    nowhere: Any = SimpleNamespace(ssl_context=None, peername=None, sockname=None, transport=None)
    task: Any = asyncio.current_task()
    return web.Request(
        message, EMPTY_PAYLOAD, nowhere, nowhere, task, asyncio.get_running_loop(), client_max_size=0
    )  # fmt: skip
