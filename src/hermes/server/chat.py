"""Chat completions: the request read, a turn made of it, and its answer or its stream."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from hermes.core.spec import RunSpec
from hermes.providers.chat_completions import reasoning_of
from hermes.server.content import check_said, content, newest, result, text_of
from hermes.server.errors import ApiError, answer, invalid
from hermes.server.idempotency import request_created_at
from hermes.server.models import ChatMessage, ChatRequest
from hermes.server.outcome import Outcome
from hermes.server.render_chat import ChatRenderer
from hermes.server.request_bodies import Body, read
from hermes.server.request_options import parse_options
from hermes.server.routes import SESSION_ID_HEADER, TURN_FAULTS, TURN_HEADERS, header, route
from hermes.server.session_ids import _derive_chat_session_id
from hermes.server.shapes import ChatCompletion
from hermes.server.sse import ClientGone, forward, inline_sink, items
from hermes.server.turns import Message, Turn, client_tools, ended_of, leave, parameters, with_unseen
from hermes.store.sessions import new_session_id
from hermes.tools.arguments import unusable

if TYPE_CHECKING:
    from hermes.server.adapter import APIServerAdapter

_UNSUPPORTED = ("audio", "functions", "function_call", "web_search_options")


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
    "POST",
    "/v1/chat/completions",
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
    features=(
        "chat_completions",
        "chat_completions_streaming",
        "chat_client_tools",
        "chat_structured_output",
        "chat_sampling_parameters",
        "file_input",
        "tool_progress_events",
        "detach",
    ),
    idempotent=True,
    begins_turns=True,
)
async def chat_completions(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    body = await read(adapter, request, ChatRequest)
    _check_supported(body.model)
    messages, chars_max = body.model.messages, adapter.option("max_text_chars")
    files = (await adapter.app()).services.files
    said = await files.call_for(len(messages), lambda: split_messages(messages, chars_max))
    turn = _turn(adapter, request, body, said)
    if not turn.spec.persist and turn.spec.results:
        turn.spec = turn.spec.replace(history=await with_unseen(adapter, turn.spec, turn.spec.history or []))
    try:
        await turn.admit()
        completion_id, created = f"chatcmpl-{turn.spec.run_id.removeprefix('run_')}", int(request_created_at())
        model = body.model.model or adapter.model_name
        if not body.model.stream:
            return _told(body, turn, await turn.run(), completion_id, created, model)
        task = asyncio.ensure_future(adapter._run_agent(**turn.arguments(streamed=True)))
        task.add_done_callback(lambda _: turn.queue.put(None))
        shown = _StreamOptions.of(body, turn)
        del body  # a stream may take long, and needs nothing more of it
        return await adapter._write_sse_chat_completion(
            request, completion_id, model, created, turn.queue, task, turn.agent_ref, shown
        )
    finally:
        await turn.release()


@dataclass(slots=True)
class _StreamOptions:
    """What a stream needs to know besides the arguments that it has by contract."""

    turn: Turn
    usage: bool | None
    reasoning: bool
    headers: dict[str, str]

    @classmethod
    def of(cls, body: Body[ChatRequest], turn: Turn) -> _StreamOptions:
        options, reasoning = body.model.stream_options, _reasoning(body.model, turn.parse_options.reasoning)
        return cls(turn, options.include_usage if options else None, reasoning, {**turn.headers(), **body.headers()})

    def renderer(self, completion_id: str, model: str, created: int) -> ChatRenderer:
        request_options = self.turn.parse_options
        return ChatRenderer(
            completion_id,
            model,
            created,
            usage=self.usage,
            reasoning=self.reasoning,
            progress=request_options.tool_progress,
            strict=request_options.strict,
        )


async def write_stream(
    adapter: APIServerAdapter,
    request: web.Request,
    completion_id: str,
    model: str,
    created: int,
    stream_q: Any,
    task: asyncio.Future[Any],
    agent_ref: list[Any] | None,
    shown: _StreamOptions | None,
) -> web.StreamResponse:
    """The stream of a chat completion, to its end or to that of the client."""
    turn = shown.turn if shown else None
    renderer = shown.renderer(completion_id, model, created) if shown else ChatRenderer(completion_id, model, created)
    stream = adapter.stream(request, shown.headers if shown else {})
    if turn is not None:
        turn.hold(stream)

    async def gone() -> None:
        await (turn.leave(task) if turn else leave(task, agent_ref))

    try:
        async with stream:
            for data in renderer.begin():
                await stream.write(data)
            sink = inline_sink(renderer, stream)
            async with contextlib.aclosing(
                items(stream_q, task, turn.admission if turn else None, sink=sink, stream=stream)
            ) as source:
                await forward(source, renderer, stream)
            await stream.write(renderer.finish(await ended_of(adapter, task, turn)), last=True)
    except ClientGone:
        await gone()
    except asyncio.CancelledError:
        await gone()
        raise
    return stream.response


def _told(
    body: Body[ChatRequest], turn: Turn, ended: Outcome, completion_id: str, created: int, model: str
) -> web.Response:
    """The answer of a turn that was not streamed."""
    headers = turn.response_headers(ended, body)
    message: Message = {"role": "assistant", "content": ended.text, "refusal": None, "annotations": []}
    if ended.calls:
        message["content"] = ended.text or None
        message["tool_calls"] = ended.calls
    if ended.reasoning and _reasoning(body.model, turn.parse_options.reasoning):
        message["reasoning_content"] = ended.reasoning
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": ended.finish_reason}
    told: Message = {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "service_tier": "default",
        "choices": [choice],
        "usage": ended.chat_usage(),
    }
    if (flags := ended.flags()) is not None:
        told["hermes"] = flags
    return answer(told, 200, headers)


def _reasoning(asked: ChatRequest, shown: bool) -> bool:
    return shown if asked.include_reasoning is None else asked.include_reasoning


def _turn(adapter: APIServerAdapter, request: web.Request, body: Body[ChatRequest], said: ParsedMessages) -> Turn:
    """The turn that a request asks for."""
    asked = body.model
    tools = client_tools(asked.tools, asked.tool_choice)
    request_options = parse_options(adapter, request, client_tools=bool(tools.schemas), user=asked.user)
    announces = asked.stream and request_options.tool_progress != "off"
    owner = adapter.owner_of(request)
    form = asked.response_format
    persist = asked.store or request_options.session_id is not None
    session_id = request_options.session_id or (
        _derive_chat_session_id(said.system, said.first, owner) if persist else new_session_id()
    )
    spec = RunSpec(
        user_message=said.prompt,
        user_name=said.name,
        session_id=session_id,
        history=said.history,
        base_id=session_id if persist else None,
        kind="chat",
        owner=owner,
        instructions=said.system,
        response_format=structure(form.type, form.json_schema) if form else None,
        client_tools=tools.schemas,
        tool_choice=tools.choice,
        allowed_tools=tools.allowed,
        results=said.results,
        persist=persist,
        stateless=request_options.session_id is None,
        continues=said.continues,
        verbatim=request_options.session_id is None,
        **request_options.fields(adapter, announces=announces),
        **parameters(adapter, body),
    )
    if not request_options.session_id:
        return Turn(adapter, request, spec, request_options, bind=persist)
    if not (said.history and (request_options.seed or said.continues)):
        spec = spec.replace(history=None, base_id=None)
    return Turn(adapter, request, spec, request_options, ignored_messages=len(said.history))


def structure(kind: str, schema: Any) -> Message:
    """The form of an answer, as the core knows it."""
    if kind != "json_schema":
        return {"type": kind}
    if schema is None or schema.schema is None:
        raise invalid("response_format.json_schema", "A json_schema needs its schema.", "missing_required_parameter")
    if schema.strict and (fault := unusable(schema.schema)):
        raise invalid("response_format.json_schema.schema", f"The schema {fault}.")
    told = {"name": schema.name, "schema": schema.schema, "strict": bool(schema.strict)}
    return {"type": kind, "json_schema": {**told, "description": schema.description} if schema.description else told}


def _check_supported(asked: ChatRequest) -> None:
    if asked.n is not None and asked.n != 1:
        raise invalid("n", "Only one choice is made: n must be 1.", "unsupported_value")
    if asked.logprobs or asked.top_logprobs:
        param = "logprobs" if asked.logprobs else "top_logprobs"
        raise invalid(param, "logprobs is not supported.", "unsupported_parameter")
    if asked.modalities is not None and asked.modalities != ["text"]:
        raise invalid("modalities", 'The only modality is ["text"].', "unsupported_value")
    for name in _UNSUPPORTED:
        if getattr(asked, name) is not None:
            raise invalid(name, f"{name} is not supported.", "unsupported_parameter")


# --- messages --------------------------------------------------------------------------------------------------------


def split_messages(messages: list[ChatMessage], text_chars_max: int, where: str = "messages") -> ParsedMessages:
    """The messages of a request, checked and parted."""
    system: list[str] = []
    told: list[tuple[int, Message]] = []
    for at, message in enumerate(messages):
        known = message_of(message, f"{where}[{at}]", text_chars_max)
        if message.role in ("system", "developer"):
            system.append(text_of(known["content"]))
        else:
            told.append((at, known))
    while told and told[-1][1]["role"] == "assistant" and not _begins(*told[-1], where):
        told.pop()
    users = [message for _, message in told if message["role"] == "user"]
    before, outputs, asked = newest([message for _, message in told])
    if not users and not outputs:
        words = f"No user message was found in {where}; send one, as {{'role': 'user', 'content': '...'}}."
        raise ApiError(400, words, "missing_user_message", where)
    if asked:
        check_said(asked[-1]["content"], f"{where}[{max(at for at, m in told if m['role'] == 'user')}].content")
    prompt = asked[-1] if asked else {"content": ""}
    first = text_of(users[0]["content"]) if users else ""
    system_text = "\n".join(system) if system else None
    continues = not outputs and not asked
    return ParsedMessages(
        system_text, before, prompt["content"], tuple(map(result, outputs)), first, prompt.get("name"), continues
    )


def _begins(at: int, message: Message, where: str) -> bool:
    """Whether the assistant's last message says anything that it can go on with; calls wait for their outputs."""
    if isinstance(message["content"], list):
        words = "The assistant's last message is gone on with, which only text can be."
        raise invalid(f"{where}[{at}].content", words, "unsupported_value")
    return bool(message["content"].strip() or message.get("tool_calls"))


def message_of(message: ChatMessage, where: str, text_chars_max: int) -> Message:
    """One message, plain: role and content, and tool fields where it has them."""
    system = message.role in ("system", "developer")
    if message.content is None:
        if message.role != "assistant":
            raise invalid(
                f"{where}.content", f"Missing required parameter: {f'{where}.content'!r}.", "missing_required_parameter"
            )
        said: Any = message.refusal or ""
    else:
        said = content(message.content, f"{where}.content", text_chars_max, text_only=system)
    known: Message = {"role": message.role, "content": said}
    if message.name:
        known["name"] = message.name
    if message.role == "assistant" and message.reasoning_content:
        known["opaque"] = reasoning_of(message.reasoning_content)
    if message.role == "assistant" and message.tool_calls:
        known["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in message.tool_calls
        ]
    if message.role == "tool":
        if not message.tool_call_id:
            raise invalid(
                f"{where}.tool_call_id",
                f"Missing required parameter: {f'{where}.tool_call_id'!r}.",
                "missing_required_parameter",
            )
        known["tool_call_id"] = message.tool_call_id
    return known
