"""Chat completions: parses the request, builds a turn, and renders its answer or stream."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web
from msgspec import UNSET

from hermes.core.json_types import Message
from hermes.core.spec import RunSpec
from hermes.core.text import text_of
from hermes.server.content import check_not_empty, content, newest, result
from hermes.server.errors import ApiError, answer, invalid, missing
from hermes.server.idempotency import request_created_at
from hermes.server.keys import caller_of
from hermes.server.models import ChatMessage, ChatRequest
from hermes.server.render_chat import ChatRenderer
from hermes.server.request_bodies import Body, read
from hermes.server.request_options import parse_options
from hermes.server.routes import SESSION_ID_HEADER, TURN_FAULTS, TURN_HEADERS, header, route
from hermes.server.shapes import ChatAnswer, ChatCompletion, Choice
from hermes.server.turn_spec import Tools, build_spec, client_tools, with_unseen
from hermes.server.turns import Turn
from hermes.services.models import reasoning_of
from hermes.store.sessions import new_session_id
from hermes.tools.framework.arguments import schema_problem

if TYPE_CHECKING:
    from hermes.server.context import ServerContext


@dataclass(slots=True)
class ParsedMessages:
    """The messages of a request, split into system text, history and the new message."""

    system: str | None
    history: list[Message]
    prompt: Any
    results: tuple[Message, ...]
    first: str
    name: str | None = None
    continues: bool = False


@route(
    "POST /v1/chat/completions",
    "chat_completions",
    "Create a chat completion",
    scope="chat",
    headers=(
        SESSION_ID_HEADER,
        header("X-Hermes-Seed-History", "begin an empty session with the body's earlier messages", type="boolean"),
        *TURN_HEADERS,
    ),
    body=ChatRequest,
    example={
        "model": "hermes-agent",
        "messages": [{"role": "user", "content": "Which files are here?"}],
        "stream": False,
    },
    answers=ChatCompletion,
    stream="chunks as `data:` frames, at the end `[DONE]`; tools at work as `hermes.tool.progress` events",
    faults=TURN_FAULTS,
    features="chat_completions chat_completions_streaming chat_client_tools chat_structured_output "
    "chat_sampling_parameters file_input tool_progress_events detach",
    idempotent=True,
    begins_turns=True,
)
async def chat_completions(context: ServerContext, request: web.Request) -> web.StreamResponse:
    body = await read(context, request, ChatRequest)
    params, turn = body.model, await _turn(context, request, body)
    shows_reasoning = turn.options.reasoning if params.include_reasoning is None else params.include_reasoning
    try:
        await turn.admit()
        completion_id, created = f"chatcmpl-{turn.spec.run_id.removeprefix('run_')}", int(request_created_at(request))
        model = params.model or context.model_name
        if params.stream:
            usage = params.stream_options.include_usage if params.stream_options else None
            renderer = ChatRenderer(completion_id, model, created, usage=usage, reasoning=shows_reasoning)
            renderer.progress, renderer.strict = turn.options.tool_progress, turn.options.strict
            headers = {**turn.headers(), **body.headers()}
            del body, params  # frees memory during a long stream
            return await turn.stream(renderer, headers)
        ended = await turn.finish()
    finally:
        await turn.release()
    headers = turn.response_headers(ended, body)
    message = ChatAnswer(role="assistant", content=ended.text, refusal=None, annotations=[])
    if ended.calls:
        message.content, message.tool_calls = ended.text or None, ended.calls
    if ended.reasoning and shows_reasoning:
        message.reasoning_content = ended.reasoning
    completion = ChatCompletion(
        id=completion_id,
        object="chat.completion",
        created=created,
        model=model,
        service_tier="default",
        choices=[Choice(index=0, message=message, logprobs=None, finish_reason=ended.finish_reason)],
        usage=ended.chat_usage(),
        hermes=ended.flags() or UNSET,
    )
    return answer(completion, 200, headers)


async def _turn(context: ServerContext, request: web.Request, body: Body[ChatRequest]) -> Turn:
    params = body.model
    if params.n is not None and params.n != 1:
        raise invalid("n", "Only one choice is made: n must be 1.", "unsupported_value")
    if params.logprobs or params.top_logprobs:
        param = "logprobs" if params.logprobs else "top_logprobs"
        raise invalid(param, "logprobs is not supported.", "unsupported_parameter")
    if params.modalities is not None and params.modalities != ["text"]:
        raise invalid("modalities", 'The only modality is ["text"].', "unsupported_value")
    for name in params.UNSUPPORTED:
        if getattr(params, name) is not None:
            raise invalid(name, f"{name} is not supported.", "unsupported_parameter")
    split = partial(split_messages, params.messages, context.options.max_text_chars)
    parsed: ParsedMessages = await context.app.services.files.call_for(len(params.messages), split)
    form = params.response_format
    return await build_turn(
        context,
        request,
        body,
        parsed,
        client_tools(params.tools, params.tool_choice),
        response_format=structure(form.type, form.json_schema) if form else None,
        user=params.user,
        stream=params.stream,
        store=params.store,
    )


async def build_turn(
    context: ServerContext,
    request: web.Request,
    body: Body[Any],
    parsed: ParsedMessages,
    tools: Tools,
    *,
    response_format: Message | None,
    user: str | None,
    stream: bool,
    store: bool = True,
) -> Turn:
    """The turn of a request that brings its whole conversation along, whatever its protocol.

    `body` has the parameters for the model; `user` is the end user that a front end names.
    """
    caller = caller_of(request)
    options = parse_options(context, request, client_tools=bool(tools.schemas), user=user)
    named = options.session_id is not None
    persist = store or named
    session_id = options.session_id or (
        _derive_chat_session_id(parsed.system, parsed.first, caller.owner) if persist else new_session_id()
    )
    history: list[Message] | None = parsed.history
    if named and not (parsed.history and (options.seed or parsed.continues)):
        history = None
    spec = RunSpec(
        user_message=parsed.prompt,
        user_name=parsed.name,
        session_id=session_id,
        history=history,
        base_id=session_id if persist and history is not None else None,
        kind="chat",
        owner=caller.owner,
        instructions=parsed.system,
        response_format=response_format,
        client_tools=tools.schemas,
        tool_choice=tools.choice,
        allowed_tools=tools.allowed,
        results=parsed.results,
        on_detach="cancel",
        persist=persist,
        stateless=not named,
        continues=parsed.continues,
        verbatim=not named,
    )
    spec = build_spec(context, caller, options, body, spec, announces=stream and options.tool_progress != "off")
    if not persist and spec.results:
        spec = spec.replace(history=await with_unseen(context, spec, parsed.history))
    ignored_messages = len(parsed.history) if named else 0
    turn = Turn(context, request, spec, options, bind=persist and not named, ignored_messages=ignored_messages)
    turn.defer_session = (
        turn.bind
        and not (parsed.history or parsed.results)
        and isinstance(parsed.prompt, str)
        and spec.on_detach == "cancel"
        and options.recording is None
        # Notices of MCP servers are stored under the session's id.
        and not context.app.settings.mcp_servers
        and not context.is_agent_replaced()
    )
    return turn


def _derive_chat_session_id(system_prompt: str | None, first_user_message: str, owner: str = "default") -> str:
    """The session of a conversation without one: the same for the same opening of the same owner."""
    opening = [system_prompt, first_user_message, *([owner] if owner != "default" else [])]
    data = json.dumps(opening, ensure_ascii=True).encode()
    return f"api-{hashlib.sha256(data).hexdigest()[:32]}"


def structure(kind: str, schema: Any, where: str = "response_format.json_schema") -> Message:
    """A format of answers; `where` is the field of the request that has its schema."""
    if kind != "json_schema":
        return {"type": kind}
    if schema is None or schema.schema is None:
        raise invalid(where, "A json_schema needs its schema.", "missing_required_parameter")
    if schema.strict and (fault := schema_problem(schema.schema)):
        raise invalid(f"{where}.schema", f"The schema {fault}.")
    fields = {"name": schema.name, "schema": schema.schema, "strict": bool(schema.strict)}
    if schema.description:
        fields["description"] = schema.description
    return {"type": kind, "json_schema": fields}


# --- messages --------------------------------------------------------------------------------------------------------


def split_messages(messages: list[ChatMessage], text_chars_max: int, where: str = "messages") -> ParsedMessages:
    system: list[str] = []
    conversation: list[Message] = []
    indexes: list[int] = []
    for index, given in enumerate(messages):
        message = message_of(given, f"{where}[{index}]", text_chars_max)
        if given.role in ("system", "developer"):
            system.append(text_of(message["content"]))
        else:
            conversation.append(message)
            indexes.append(index)
    return split_conversation("\n".join(system) if system else None, conversation, indexes, where)


def split_conversation(
    system: str | None, conversation: list[Message], indexes: list[int], where: str = "messages"
) -> ParsedMessages:
    """`indexes`: each message's position in the request."""
    first_user: Message | None = None
    last_user = 0
    for index, message in zip(indexes, conversation, strict=True):
        if message["role"] == "user":
            first_user, last_user = first_user or message, index
    while conversation and conversation[-1]["role"] == "assistant":
        if _can_continue(indexes.pop(), conversation[-1], where):
            break
        conversation.pop()
    before, outputs, user_messages = newest(conversation)
    if first_user is None and not outputs:
        reason = f"No user message was found in {where}; send one, as {{'role': 'user', 'content': '...'}}."
        raise ApiError(400, reason, "missing_user_message", where)
    if user_messages:
        check_not_empty(user_messages[-1]["content"], f"{where}[{last_user}].content")
    prompt = user_messages[-1] if user_messages else {"content": ""}
    first = text_of(first_user["content"]) if first_user is not None else ""
    continues = not outputs and not user_messages
    return ParsedMessages(
        system, before, prompt["content"], tuple(map(result, outputs)), first, prompt.get("name"), continues
    )


def _can_continue(at: int, message: Message, where: str) -> bool:
    """Whether the last assistant message has text to continue; calls wait for their outputs."""
    if isinstance(message["content"], list):
        reason = "The assistant's last message is continued, which needs text content."
        raise invalid(f"{where}[{at}].content", reason, "unsupported_value")
    return bool(message["content"].strip() or message.get("tool_calls"))


def message_of(message: ChatMessage, where: str, text_chars_max: int) -> Message:
    system = message.role in ("system", "developer")
    if message.content is None:
        if message.role != "assistant":
            raise missing(f"{where}.content")
        text: Any = message.refusal or ""
    else:
        text = content(message.content, f"{where}.content", text_chars_max, text_only=system)
    plain: Message = {"role": message.role, "content": text}
    if message.name:
        plain["name"] = message.name
    if message.role == "assistant" and message.reasoning_content:
        plain["opaque"] = reasoning_of(message.reasoning_content)
    if message.role == "assistant" and message.tool_calls:
        plain["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in message.tool_calls
        ]
    if message.role == "tool":
        if not message.tool_call_id:
            raise missing(f"{where}.tool_call_id")
        plain["tool_call_id"] = message.tool_call_id
    return plain
