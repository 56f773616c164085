"""Chat completions: the request read, a turn made of it, and its answer or its stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from hermes.core.spec import RunSpec
from hermes.core.text import text_of
from hermes.providers.chat_completions import reasoning_of
from hermes.server.content import check_said, content, newest, result
from hermes.server.errors import ApiError, answer, invalid
from hermes.server.idempotency import request_created_at
from hermes.server.models import ChatMessage, ChatRequest
from hermes.server.outcome import Outcome
from hermes.server.render_chat import ChatRenderer
from hermes.server.request_bodies import Body, read
from hermes.server.request_options import RequestOptions, parse_options
from hermes.server.routes import SESSION_ID_HEADER, TURN_FAULTS, TURN_HEADERS, header, route
from hermes.server.session_ids import _derive_chat_session_id
from hermes.server.shapes import ChatCompletion
from hermes.server.turns import Message, Turn, client_tools, parameters, with_unseen
from hermes.store.sessions import new_session_id
from hermes.tools.framework.arguments import schema_problem

if TYPE_CHECKING:
    from hermes.server.adapter import APIServerAdapter


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
    turn = await _turn(adapter, request, body)
    try:
        await turn.admit()
        completion_id, created = f"chatcmpl-{turn.spec.run_id.removeprefix('run_')}", int(request_created_at(request))
        model = body.model.model or adapter.model_name
        if not body.model.stream:
            return _completion(body, turn, await turn.finish(), completion_id, created, model)
        options = turn.options
        renderer = ChatRenderer(
            completion_id,
            model,
            created,
            usage=body.model.stream_options.include_usage if body.model.stream_options else None,
            reasoning=_shows_reasoning(body.model, options),
            progress=options.tool_progress,
            strict=options.strict,
        )
        headers = {**turn.headers(), **body.headers()}
        del body  # a stream may take long, and needs nothing more of it
        if (replaced := adapter.replaced_run(turn, streamed=True)) is not None:
            turn.run, who = replaced, (completion_id, model, created)
            return await adapter._write_sse_chat_completion(
                request, *who, replaced.queue, replaced.task, replaced.agent_ref, turn, renderer, headers
            )
        return await turn.stream(renderer, headers)
    finally:
        await turn.release()


def _completion(
    body: Body[ChatRequest], turn: Turn, ended: Outcome, completion_id: str, created: int, model: str
) -> web.Response:
    """The answer of a turn that was not streamed."""
    headers = turn.response_headers(ended, body)
    message: Message = {"role": "assistant", "content": ended.text, "refusal": None, "annotations": []}
    if ended.calls:
        message["content"] = ended.text or None
        message["tool_calls"] = ended.calls
    if ended.reasoning and _shows_reasoning(body.model, turn.options):
        message["reasoning_content"] = ended.reasoning
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": ended.finish_reason}
    completion: Message = {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "service_tier": "default",
        "choices": [choice],
        "usage": ended.chat_usage(),
    }
    if (flags := ended.flags()) is not None:
        completion["hermes"] = flags
    return answer(completion, 200, headers)


def _shows_reasoning(asked: ChatRequest, options: RequestOptions) -> bool:
    return options.reasoning if asked.include_reasoning is None else asked.include_reasoning


async def _turn(adapter: APIServerAdapter, request: web.Request, body: Body[ChatRequest]) -> Turn:
    """The turn that a request asks for."""
    asked = body.model
    _check_supported(asked)
    chars_max, files = adapter.option("max_text_chars"), (await adapter.app()).services.files
    parsed = await files.call_for(len(asked.messages), lambda: split_messages(asked.messages, chars_max))
    tools = client_tools(asked.tools, asked.tool_choice)
    options = parse_options(adapter, request, client_tools=bool(tools.schemas), user=asked.user)
    announces = asked.stream and options.tool_progress != "off"
    owner = adapter.owner_of(request)
    form = asked.response_format
    persist = asked.store or options.session_id is not None
    session_id = options.session_id or (
        _derive_chat_session_id(parsed.system, parsed.first, owner) if persist else new_session_id()
    )
    spec = RunSpec(
        user_message=parsed.prompt,
        user_name=parsed.name,
        session_id=session_id,
        history=parsed.history,
        base_id=session_id if persist else None,
        kind="chat",
        owner=owner,
        instructions=parsed.system,
        response_format=structure(form.type, form.json_schema) if form else None,
        client_tools=tools.schemas,
        tool_choice=tools.choice,
        allowed_tools=tools.allowed,
        results=parsed.results,
        persist=persist,
        stateless=options.session_id is None,
        continues=parsed.continues,
        verbatim=options.session_id is None,
        **options.fields(adapter, announces=announces),
        **parameters(adapter, body),
    )
    if not persist and spec.results:
        spec = spec.replace(history=await with_unseen(adapter, spec, parsed.history))
    if not options.session_id:
        return Turn(adapter, request, spec, options, bind=persist)
    if not (parsed.history and (options.seed or parsed.continues)):
        spec = spec.replace(history=None, base_id=None)
    return Turn(adapter, request, spec, options, ignored_messages=len(parsed.history))


def structure(kind: str, schema: Any) -> Message:
    """The form of an answer, as the core knows it."""
    if kind != "json_schema":
        return {"type": kind}
    if schema is None or schema.schema is None:
        raise invalid("response_format.json_schema", "A json_schema needs its schema.", "missing_required_parameter")
    if schema.strict and (fault := schema_problem(schema.schema)):
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
    for name in asked.UNSUPPORTED:
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
