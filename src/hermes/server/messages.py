"""The Messages protocol: the request read, a turn made of it, its answer or its stream, and that stream again."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct

from hermes.core.json_types import JsonObject
from hermes.core.limits import USER_ID_CHARS_MAX
from hermes.core.text import text_of
from hermes.server.chat import ParsedMessages, build_turn
from hermes.server.errors import ApiError, MessagesError, answer, invalid, missing
from hermes.server.headers import VERSION_HEADER
from hermes.server.keys import RUN_SCOPES, caller_of
from hermes.server.messages_request import (
    NAMES,
    CountTokensRequest,
    MessagesRequest,
    Thread,
    parameters,
    read_conversation,
    response_format,
    shows_thinking,
    tools_of,
)
from hermes.server.query_params import ID_MAX, number_of
from hermes.server.render_messages import PING, MessagesRenderer, message_of
from hermes.server.request_bodies import Body, read
from hermes.server.request_options import parse_options
from hermes.server.responses import count_tokens
from hermes.server.routes import SESSION_ID_HEADER, TURN_FAULTS, TURN_HEADERS, header, route
from hermes.server.shapes import MessageAnswer, TokenCount
from hermes.server.sse import inline_sink, replay, run_events_to_end
from hermes.server.stored_result import conversation_until
from hermes.server.turn_spec import Tools
from hermes.server.turns import Turn
from hermes.store.base import RunRecord

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

_MESSAGE, _RUN = "msg_", "run_"
_HEADERS = (
    header(VERSION_HEADER, "the version of the protocol; any is taken"),
    SESSION_ID_HEADER,
    header("X-Hermes-Seed-History", "begin an empty session with the body's earlier messages", type="boolean"),
    *TURN_HEADERS,
)
_EXAMPLE: JsonObject = {"model": "hermes-agent", "messages": [{"role": "user", "content": "Which files are here?"}]}


@route(
    "POST /v1/messages",
    "messages",
    "Create a message",
    scope="chat",
    headers=_HEADERS,
    body=MessagesRequest,
    example={"max_tokens": 1024, **_EXAMPLE},
    answers=MessageAnswer,
    stream="`message_start`, `content_block_*`, `message_delta` and `message_stop` events with a number each",
    keepalive=PING,
    errors=MessagesError,
    faults=TURN_FAULTS,
    features="messages_api messages_streaming messages_client_tools",
    idempotent=True,
    begins_turns=True,
)
async def messages(context: ServerContext, request: web.Request) -> web.StreamResponse:
    body = await read(context, request, MessagesRequest)
    stream, model = body.model.stream, body.model.model
    turn, body = await _turn(context, request, body)
    try:
        await turn.admit()
        message_id = f"{_MESSAGE}{turn.spec.run_id.removeprefix(_RUN)}"
        if stream:
            renderer = MessagesRenderer(message_id, model, thinking=turn.spec.shows_reasoning)
            renderer.progress = turn.options.tool_progress
            headers = {**turn.headers(), **body.headers()}
            del body  # a stream may take long, and needs nothing more of it
            return await turn.stream(renderer, headers)
        ended = await turn.finish()
    finally:
        await turn.release()
    headers = turn.response_headers(ended, body, shows_failures=False)
    return answer(message_of(message_id, model, ended, thinking=turn.spec.shows_reasoning), 200, headers)


@route(
    "POST /v1/messages/count_tokens",
    "messages_count_tokens",
    "Count the tokens of a message's input",
    scope="chat",
    headers=_HEADERS,
    body=CountTokensRequest,
    example=_EXAMPLE,
    answers=TokenCount,
    errors=MessagesError,
    faults=TURN_FAULTS,
    features="messages_count_tokens",
)
async def messages_count_tokens(context: ServerContext, request: web.Request) -> web.StreamResponse:
    """What the model would be given for this request, as the agent counts it: with the agent's own prompt and tools."""
    turn, body = await _turn(context, request, await read(context, request, CountTokensRequest))
    return answer(TokenCount(input_tokens=await count_tokens(context, request, turn)), 200, body.headers())


class MessageQuery(Struct, kw_only=True):
    starting_after: (
        Annotated[int, Meta(ge=0, le=ID_MAX, description="the number of the last event that is known")] | None
    ) = None


@route(
    "GET /v1/messages/{message_id}",
    "message_stream",
    "Stream a message again, replayed and live",
    scope="chat",
    headers=(
        header("Last-Event-ID", "the number of the last event that is known", type="integer", minimum=0),
        header("X-Hermes-Tool-Progress", "how a stream reports tool calls", enum=["event", "chunk", "off"]),
    ),
    stream="the events of the message under their numbers, from any place, then live",
    keepalive=PING,
    errors=MessagesError,
    faults=(410,),
    features="messages_resume",
)
async def message_stream(context: ServerContext, request: web.Request, query: MessageQuery) -> web.StreamResponse:
    last_seen = request.headers.get("Last-Event-ID", "").strip()
    after = max(number_of(last_seen, "Last-Event-ID") if last_seen else 0, query.starting_after or 0)
    message_id = request.match_info["message_id"]
    record = await _record(context, request, message_id, "message_id")
    if record.log_expired:
        raise ApiError(410, "The events of this message are not kept any more.", "events_expired")
    spec = record.spec
    model = (spec.route.name if spec.route else None) or context.model_name
    renderer = MessagesRenderer(message_id, model, thinking=spec.shows_reasoning, after=after)
    renderer.progress = parse_options(context, request).tool_progress
    headers = {"X-Hermes-Run-Id": spec.run_id, "X-Hermes-Session-Id": spec.session_id}
    stream = context.stream(request, headers)
    source = run_events_to_end(context.app.engine, spec.run_id, sink=inline_sink(renderer, stream))
    return await replay(stream, source, renderer, over=record.state.ended)


async def _record(context: ServerContext, request: web.Request, message_id: str, where: str) -> RunRecord:
    """The run that made a message; that of somebody else is as good as none."""
    caller = caller_of(request)
    record = await context.app.engine.get(f"{_RUN}{message_id.removeprefix(_MESSAGE)}")
    known = record is not None and record.spec.kind == "chat" and caller.may_see(record.spec.owner)
    if record is None or not known or not message_id.startswith(_MESSAGE):
        raise ApiError(404, f"There is no message {message_id!r}.", "message_not_found", where)
    if (refusal := context.scope_refusal(caller, RUN_SCOPES[record.spec.kind])) is not None:
        raise refusal
    return record


async def _continue_thread(
    context: ServerContext, request: web.Request, thread: Thread, parsed: ParsedMessages, tools: Tools | None
) -> Tools:
    """Put what was said up to a message before what is said now; without tools of its own the turn has those of before."""
    where = "thread.previous_message_id"
    if not thread.previous_message_id:
        raise missing(where)
    spec = (await _record(context, request, thread.previous_message_id, where)).spec
    earlier = await conversation_until(context.database(), spec.session_id, spec.run_id, with_it=True)
    parsed.history = [*earlier, *parsed.history]
    parsed.first = next((text_of(message["content"]) for message in earlier if message["role"] == "user"), parsed.first)
    parsed.system = spec.instructions if parsed.system is None else parsed.system
    return Tools(tuple(dict(tool) for tool in spec.client_tools)) if tools is None else tools


async def _turn(context: ServerContext, request: web.Request, body: Body[Any]) -> tuple[Turn, Body[Any]]:
    """The turn that is asked for, and the body with the parameters that every turn has."""
    params: CountTokensRequest = body.model
    for name in params.UNSUPPORTED:
        if getattr(params, name):
            raise invalid(name, f"{name} is not supported.", "unsupported_parameter")
    split = partial(read_conversation, params, context.options.max_text_chars)
    parsed: ParsedMessages
    parsed, ignored = await context.app.services.files.call_for(len(params.messages), split)
    tools, hosted = tools_of(params)
    if params.thread is not None and params.thread.type == "continue":
        given = tools if params.tools is not None else None
        tools = await _continue_thread(context, request, params.thread, parsed, given)
    plain = Body(parameters(params), body.raw, [*body.ignored, *hosted, *ignored], NAMES)
    user = params.metadata.user_id if params.metadata else None
    if user is not None and len(user) > USER_ID_CHARS_MAX:  # an object that names device and session, not a user
        user = None
        plain.ignored.append("metadata.user_id")
    turn = await build_turn(
        context, request, plain, parsed, tools, response_format=response_format(params), user=user, stream=params.stream
    )
    turn.spec = turn.spec.replace(shows_reasoning=shows_thinking(params, turn.options.reasoning))
    return turn, plain
