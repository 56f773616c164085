"""Encodes scripted replies in three protocols: bodies, server-sent events and errors. Without I/O."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2s
from typing import Any, Literal

Json = dict[str, Any]
Protocol = Literal["chat", "responses", "anthropic"]

PATHS: dict[str, Protocol] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "anthropic",
    "/anthropic/v1/messages": "anthropic",
}
DEFAULT_USAGE = {"input": 10, "output": 5}
# A fixed moment keeps a body the same from run to run, so that an offset into it stays an offset into it.
CREATED = 1_700_000_000


@dataclass
class Call:
    """A tool call of a reply; the arguments may be fragments, and need not be valid JSON. Those of a `custom` tool, which
    only responses have, are its text."""

    name: str
    arguments: str | list[str] | Json = "{}"
    id: str | None = None
    extra_content: Json | None = None
    custom: bool = False

    @property
    def fragments(self) -> list[str]:
        if isinstance(self.arguments, dict):
            return [dump(self.arguments)]
        return pieces(self.arguments)


@dataclass
class Reply:
    """One scripted answer and its faults."""

    text: str | list[str] = ""
    reasoning: str | list[str] = ""
    tool_calls: list[Call] = field(default_factory=list)
    # "stop", "length", "tool_calls" and "content_filter" are put in the protocol's words; anything else goes as it is.
    finish: str | None = None
    # The stop sequence that is reported.
    stop_sequence: str | None = None
    # Canonical counts: input (all of it), output (all of it), cached, cache_write, reasoning.
    usage: dict[str, int] | None = None
    signature: str = "c2lnbmF0dXJl"
    encrypted: str | None = None
    model: str | None = None
    reasoning_field: str = "reasoning_content"
    delay_s: float = 0.0
    gap_s: float = 0.0
    # The text goes on after what the request already holds of it, so an answer survives a cut. A conversation whose
    # last answer is the whole text leaves nothing to say: turn this off to give the same answer on every turn.
    continues: bool = True

    # Errors instead of an answer.
    status: int = 200
    error: Json | str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    quote_key: bool = False
    refuse_stream: bool = False
    reject_option: str | None = None
    reset_before_headers: bool = False

    # Transfers that go wrong; the offsets count bytes of the body.
    cut_at: int | None = None
    cut_clean: bool = False
    stall_at: int | None = None
    comments: bool = False
    packets: int | list[int] | None = None

    # Bodies that go wrong; events are counted from 0.
    malformed_at: int | None = None
    duplicate_index: bool = False
    missing_index: bool = False
    missing_id: bool = False
    error_event: Json | None = None
    no_done: bool = False
    no_usage: bool = False
    crlf: bool = False
    as_json: bool = False
    # The body itself, whatever the protocol: a proxy's error page, an empty answer.
    raw: bytes | str | None = None


@dataclass(frozen=True)
class Turn:
    """One message of a request, whatever the protocol; the roles are system, user, assistant, tool and call."""

    role: str
    text: str


@dataclass(frozen=True)
class Event:
    """One server-sent event; a piece is one that carries content."""

    data: Json | str
    name: str = ""
    piece: bool = False


@dataclass(frozen=True)
class SentCall:
    """A tool call as it is sent: with its id."""

    id: str
    name: str
    fragments: list[str]
    extra_content: Json | None
    custom: bool = False

    @property
    def arguments(self) -> str:
        return "".join(self.fragments)


@dataclass(frozen=True)
class Answer:
    """A reply resolved for one request: the text still to send, and the ids."""

    reply: Reply
    seed: str
    model: str
    reasoning: list[str]
    text: list[str]
    calls: list[SentCall]
    encrypted: str | None
    usage: dict[str, int] | None
    body: Json

    def finish(self, message: Mapping[str, str]) -> str:
        derived = "tool_calls" if self.calls else "stop"
        wanted = self.reply.finish or derived
        return message.get(wanted, wanted)


def dump(value: object) -> str:
    # Characters stay themselves, so that a cut can fall inside one.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def pieces(text: str | list[str]) -> list[str]:
    return [piece for piece in ([text] if isinstance(text, str) else text) if piece]


# --- What is asked -----------------------------------------------------------------------------------------------


def turns(protocol: Protocol, body: Json) -> list[Turn]:
    """The request's messages in order, the instructions first."""
    if protocol == "responses":
        request_items = body.get("input") or []
        items = [{"role": "user", "content": request_items}] if isinstance(request_items, str) else request_items
        instructions = body.get("instructions")
    else:
        items, instructions = body.get("messages") or [], body.get("system")
    turns = [turn for item in items if (turn := _turn(item)) is not None]
    return [Turn("system", _text_of(instructions)), *turns] if instructions else turns


def _turn(item: Json) -> Turn | None:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return Turn("tool", _text_of(item.get("output")))
    if kind == "reasoning":
        return None
    if kind != "message":
        return Turn("call", str(item.get("name", kind)))
    content, role = item.get("content"), item.get("role", "user")
    if isinstance(content, list) and any(part.get("type") == "tool_result" for part in content):
        role = "tool"
    return Turn("system" if role == "developer" else role, _text_of(content))


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part for part in content if isinstance(part, dict)]
    return "".join(part.get("text") or _text_of(part.get("content")) for part in parts)


def already_said(text: str, turns: list[Turn]) -> str:
    """The longest prefix of the text that the conversation ends with, ignoring a request to continue; empty if none."""
    joined, best, asides = "", "", 0
    for turn in reversed([turn for turn in turns if turn.role != "system"]):
        if turn.role == "assistant":
            joined, asides = turn.text + joined, 0
        elif turn.role == "user" and not asides:
            asides = 1
        else:
            break
        if len(joined) > len(text):
            break
        # An answer cut twice stands in two messages, so the joined text counts as well.
        if text.startswith(joined):
            best = joined
    return best


def _rest(parts: list[str], skip: int) -> list[str]:
    remaining = []
    for part in parts:
        remaining.append(part[skip:])
        skip = max(0, skip - len(part))
    return [part for part in remaining if part]


def settle(protocol: Protocol, reply: Reply, body: Json) -> Answer:
    """Resolve a reply for a request; the result depends on these two only."""
    text, reasoning = pieces(reply.text), pieces(reply.reasoning)
    encrypted = reply.encrypted if "reasoning.encrypted_content" in (body.get("include") or []) else None
    if reply.continues and (repeated := already_said("".join(text), turns(protocol, body))):
        # Who goes on has thought already.
        text, reasoning, encrypted = _rest(text, len(repeated)), [], None
    calls = [[call.name, call.fragments] for call in reply.tool_calls]
    seed = blake2s(dump([protocol, body, reply.text, reply.reasoning, calls]).encode(), digest_size=10).hexdigest()
    return Answer(
        reply=reply,
        seed=seed,
        model=reply.model or str(body.get("model") or "scripted"),
        reasoning=reasoning,
        text=text,
        calls=[_said(protocol, seed, index, call) for index, call in enumerate(reply.tool_calls)],
        encrypted=encrypted,
        usage=None if reply.no_usage else {**DEFAULT_USAGE, **(reply.usage or {})},
        body=body,
    )


def _said(protocol: Protocol, seed: str, index: int, call: Call) -> SentCall:
    prefix = "toolu" if protocol == "anthropic" else "call"
    return SentCall(
        call.id or f"{prefix}_{seed}{index:02d}", call.name, call.fragments, call.extra_content, call.custom
    )


# --- Chat completions --------------------------------------------------------------------------------------------


def _chat_usage(usage: dict[str, int]) -> Json:
    return {
        "prompt_tokens": usage["input"],
        "completion_tokens": usage["output"],
        "total_tokens": usage["input"] + usage["output"],
        "prompt_tokens_details": {
            "cached_tokens": usage.get("cached", 0),
            "cache_write_tokens": usage.get("cache_write", 0),
        },
        "completion_tokens_details": {"reasoning_tokens": usage.get("reasoning", 0)},
    }


def _chat_call(answer: Answer, call: SentCall, arguments: str) -> Json:
    payload: Json = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    if not answer.reply.missing_id:
        payload["id"] = call.id
    if call.extra_content is not None:
        payload["extra_content"] = call.extra_content
    return payload


def _chat_call_deltas(answer: Answer) -> Iterator[Json]:
    for index, call in enumerate(answer.calls):
        place = {} if answer.reply.missing_index else {"index": 0 if answer.reply.duplicate_index else index}
        yield {**place, **_chat_call(answer, call, "")}
        for fragment in call.fragments:
            yield {**place, "function": {"arguments": fragment}}


def _chat_deltas(answer: Answer) -> Iterator[Json]:
    for piece in answer.reasoning:
        yield {answer.reply.reasoning_field: piece}
    for piece in answer.text:
        yield {"content": piece}
    for delta in _chat_call_deltas(answer):
        yield {"tool_calls": [delta]}


def _chat_events(answer: Answer) -> Iterator[Event]:
    counted = bool((answer.body.get("stream_options") or {}).get("include_usage")) and answer.usage is not None
    base: Json = {
        "id": f"chatcmpl-{answer.seed}",
        "object": "chat.completion.chunk",
        "created": CREATED,
        "model": answer.model,
    }

    def chunk(delta: Json, finish: str | None = None, piece: bool = False) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, **(_chat_stop(answer) if finish else {})}
        return Event({**base, "choices": [choice], **({"usage": None} if counted else {})}, piece=piece)

    yield chunk({"role": "assistant", "content": ""})
    for delta in _chat_deltas(answer):
        yield chunk(delta, piece=True)
    yield chunk({}, answer.finish({}))
    if counted and answer.usage is not None:
        yield Event({**base, "choices": [], "usage": _chat_usage(answer.usage)})
    if not answer.reply.no_done:
        yield Event("[DONE]")


def _chat_stop(answer: Answer) -> Json:
    """The finish reason in the form of vLLM, which adds this field."""
    return {} if answer.reply.stop_sequence is None else {"stop_reason": answer.reply.stop_sequence}


def _chat_plain(answer: Answer) -> Json:
    text = "".join(answer.text)
    message: Json = {"role": "assistant", "content": None if answer.calls and not text else text}
    if answer.reasoning:
        message[answer.reply.reasoning_field] = "".join(answer.reasoning)
    if answer.calls:
        message["tool_calls"] = [_chat_call(answer, call, call.arguments) for call in answer.calls]
    payload: Json = {
        "id": f"chatcmpl-{answer.seed}",
        "object": "chat.completion",
        "created": CREATED,
        "model": answer.model,
        "choices": [{"index": 0, "message": message, "finish_reason": answer.finish({}), **_chat_stop(answer)}],
    }
    if answer.usage is not None:
        payload["usage"] = _chat_usage(answer.usage)
    return payload


# --- Responses ---------------------------------------------------------------------------------------------------

_INCOMPLETE = {"length": "max_output_tokens"}


@dataclass(frozen=True)
class Item:
    """An output item as it begins and as it ends, and the pieces between."""

    added: Json
    completed: Json
    pieces: list[str]


def _responses_usage(usage: dict[str, int]) -> Json:
    return {
        "input_tokens": usage["input"],
        "input_tokens_details": {
            "cached_tokens": usage.get("cached", 0),
            "cache_write_tokens": usage.get("cache_write", 0),
        },
        "output_tokens": usage["output"],
        "output_tokens_details": {"reasoning_tokens": usage.get("reasoning", 0)},
        "total_tokens": usage["input"] + usage["output"],
    }


def _reasoning_item(answer: Answer) -> Item:
    text = "".join(answer.reasoning)
    base: Json = {"id": f"rs_{answer.seed}", "type": "reasoning", "summary": []}
    completed = {**base, "summary": [{"type": "summary_text", "text": text}] if text else []}
    if answer.encrypted:
        completed["encrypted_content"] = answer.encrypted
    return Item(base, completed, answer.reasoning)


def _message_item(answer: Answer, status: str) -> Item:
    base: Json = {"id": f"msg_{answer.seed}", "type": "message", "role": "assistant"}
    part = _text_part("".join(answer.text))
    added = {**base, "status": "in_progress", "content": []}
    return Item(added, {**base, "status": status, "content": [part]}, answer.text)


def _call_item(answer: Answer, index: int, call: SentCall) -> Item:
    prefix, kind, field = ("ctc", "custom_tool_call", "input") if call.custom else ("fc", "function_call", "arguments")
    base: Json = {"id": f"{prefix}_{answer.seed}{index:02d}", "type": kind, "call_id": call.id, "name": call.name}
    added = {**base, "status": "in_progress", field: ""}
    return Item(added, {**base, "status": "completed", field: call.arguments}, call.fragments)


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _stopped_short(answer: Answer) -> bool:
    return answer.finish({}) not in ("stop", "tool_calls", "completed")


def _items(answer: Answer) -> list[Item]:
    items = []
    if answer.reasoning or answer.encrypted:
        items.append(_reasoning_item(answer))
    if answer.text:
        items.append(_message_item(answer, "incomplete" if _stopped_short(answer) else "completed"))
    items += [_call_item(answer, index, call) for index, call in enumerate(answer.calls)]
    return items


def _response(answer: Answer, status: str, output: list[Json]) -> Json:
    # The request's options and tools are left out: an echo would only make the bodies long.
    return {
        "id": f"resp_{answer.seed}",
        "object": "response",
        "created_at": CREATED,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": answer.model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _responses_plain(answer: Answer) -> Json:
    short = _stopped_short(answer)
    response = _response(answer, "incomplete" if short else "completed", [item.completed for item in _items(answer)])
    if short:
        response["incomplete_details"] = {"reason": answer.finish(_INCOMPLETE)}
    if answer.usage is not None:
        response["usage"] = _responses_usage(answer.usage)
    return response


def _item_events(item: Item, index: int) -> Iterator[Event]:
    yield Event({"output_index": index, "item": item.added}, "response.output_item.added")
    place: Json = {"item_id": item.completed["id"], "output_index": index}
    inner = {"reasoning": _summary_events, "message": _text_events, "function_call": _arguments_events}
    inner["custom_tool_call"] = _input_events
    yield from inner[item.completed["type"]](item, place)
    yield Event({"output_index": index, "item": item.completed}, "response.output_item.done")


def _summary_events(item: Item, place: Json) -> Iterator[Event]:
    if not item.pieces:
        return
    where, part = {**place, "summary_index": 0}, item.completed["summary"][0]
    yield Event({**where, "part": {**part, "text": ""}}, "response.reasoning_summary_part.added")
    for piece in item.pieces:
        yield Event({**where, "delta": piece}, "response.reasoning_summary_text.delta", piece=True)
    yield Event({**where, "text": part["text"]}, "response.reasoning_summary_text.done")
    yield Event({**where, "part": part}, "response.reasoning_summary_part.done")


def _text_events(item: Item, place: Json) -> Iterator[Event]:
    where, part = {**place, "content_index": 0}, item.completed["content"][0]
    yield Event({**where, "part": _text_part("")}, "response.content_part.added")
    for piece in item.pieces:
        yield Event({**where, "delta": piece, "logprobs": []}, "response.output_text.delta", piece=True)
    yield Event({**where, "text": part["text"], "logprobs": []}, "response.output_text.done")
    yield Event({**where, "part": part}, "response.content_part.done")


def _arguments_events(item: Item, place: Json) -> Iterator[Event]:
    for piece in item.pieces:
        yield Event({**place, "delta": piece}, "response.function_call_arguments.delta", piece=True)
    named = {"name": item.completed["name"], "arguments": item.completed["arguments"]}
    yield Event({**place, **named}, "response.function_call_arguments.done")


def _input_events(item: Item, place: Json) -> Iterator[Event]:
    for piece in item.pieces:
        yield Event({**place, "delta": piece}, "response.custom_tool_call_input.delta", piece=True)
    yield Event({**place, "input": item.completed["input"]}, "response.custom_tool_call_input.done")


def _responses_events(answer: Answer) -> Iterator[Event]:
    response = _response(answer, "in_progress", [])
    yield Event({"response": response}, "response.created")
    yield Event({"response": response}, "response.in_progress")
    for index, item in enumerate(_items(answer)):
        yield from _item_events(item, index)
    final = _responses_plain(answer)
    yield Event({"response": final}, f"response.{final['status']}")


# --- Anthropic messages ------------------------------------------------------------------------------------------

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def _anthropic_usage(usage: dict[str, int]) -> Json:
    cached, written = usage.get("cached", 0), usage.get("cache_write", 0)
    payload: Json = {
        "input_tokens": usage["input"] - cached - written,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
        "output_tokens": usage["output"],
    }
    if "reasoning" in usage:
        payload["output_tokens_details"] = {"thinking_tokens": usage["reasoning"]}
    return payload


def _anthropic_message(answer: Answer, content: list[Json], stop: str | None, usage: Json | None) -> Json:
    payload: Json = {
        "id": f"msg_{answer.seed}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": stop,
        "stop_sequence": answer.reply.stop_sequence if stop else None,
    }
    return payload if usage is None else {**payload, "usage": usage}


def _tool_input(arguments: str) -> object:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _anthropic_plain(answer: Answer) -> Json:
    content: list[Json] = []
    if answer.reasoning:
        thought = "".join(answer.reasoning)
        content.append({"type": "thinking", "thinking": thought, "signature": answer.reply.signature})
    if answer.text:
        content.append({"type": "text", "text": "".join(answer.text)})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _tool_input(call.arguments)}
        for call in answer.calls
    ]
    usage = None if answer.usage is None else _anthropic_usage(answer.usage)
    return _anthropic_message(answer, content, answer.finish(_STOP_REASONS), usage)


def _anthropic_blocks(answer: Answer) -> Iterator[tuple[Json, list[Json]]]:
    """Each content block as it begins, with its deltas."""
    if answer.reasoning:
        deltas: list[Json] = [{"type": "thinking_delta", "thinking": piece} for piece in answer.reasoning]
        if answer.reply.signature:
            deltas.append({"type": "signature_delta", "signature": answer.reply.signature})
        yield {"type": "thinking", "thinking": "", "signature": ""}, deltas
    if answer.text:
        yield {"type": "text", "text": ""}, [{"type": "text_delta", "text": piece} for piece in answer.text]
    for call in answer.calls:
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in ["", *call.fragments]]
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}, deltas


def _anthropic_events(answer: Answer) -> Iterator[Event]:
    usage = None if answer.usage is None else _anthropic_usage(answer.usage)
    # At the start the output is not yet counted; the sums stand in the message's last delta.
    first_usage = None if usage is None else {**usage, "output_tokens": 1}
    yield Event({"message": _anthropic_message(answer, [], None, first_usage)}, "message_start")
    yield Event({}, "ping")
    for index, (block, deltas) in enumerate(_anthropic_blocks(answer)):
        yield Event({"index": index, "content_block": block}, "content_block_start")
        for delta in deltas:
            yield Event({"index": index, "delta": delta}, "content_block_delta", piece=True)
        yield Event({"index": index}, "content_block_stop")
    ended: Json = {"delta": {"stop_reason": answer.finish(_STOP_REASONS), "stop_sequence": answer.reply.stop_sequence}}
    yield Event(ended if usage is None else {**ended, "usage": usage}, "message_delta")
    yield Event({}, "message_stop")


# --- Errors ------------------------------------------------------------------------------------------------------

# The type and the code of each status.
_OPENAI_ERRORS: dict[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    402: ("insufficient_quota", "insufficient_quota"),
    403: ("permission_error", "permission_denied"),
    404: ("invalid_request_error", "model_not_found"),
    408: ("timeout", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    422: ("invalid_request_error", None),
    429: ("requests", "rate_limit_exceeded"),
    503: ("service_unavailable", "server_overloaded"),
    529: ("service_unavailable", "overloaded"),
}
_ANTHROPIC_ERRORS: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_body(protocol: Protocol, status: int, message: str, **fields: Any) -> Json:
    """An error in the provider's format; `fields` override those of the error object."""
    if protocol == "anthropic":
        error = {"type": _ANTHROPIC_ERRORS.get(status, "api_error"), "message": message}
        known = {name: value for name, value in fields.items() if name not in ("param", "code")}
        return {"type": "error", "error": {**error, **known}, "request_id": f"req_{status:06d}"}
    kind, code = _OPENAI_ERRORS.get(status, ("server_error", None))
    return {"error": {"message": message, "type": kind, "param": None, "code": code, **fields}}


def failure(protocol: Protocol, reply: Reply, body: Json, key: str = "") -> tuple[int, Json] | None:
    """Status and body if this reply is an error for this request."""
    if reply.refuse_stream and body.get("stream"):
        message = "stream: streaming is not supported by this model"
        return 400, error_body(protocol, 400, _quoting(message, reply, key), param="stream", code="unsupported_value")
    if reply.reject_option and _holds(body, reply.reject_option):
        option = reply.reject_option
        message = f"Unsupported parameter: '{option}' is not supported with this model."
        if protocol == "anthropic":
            message = f"{option}: Extra inputs are not permitted"
        quoted = _quoting(message, reply, key)
        return 400, error_body(protocol, 400, quoted, param=option, code="unsupported_parameter")
    if reply.status == 200:
        return None
    fields = dict(reply.error) if isinstance(reply.error, dict) else {}
    message = reply.error if isinstance(reply.error, str) else f"scripted error {reply.status}"
    quoted = _quoting(str(fields.pop("message", message)), reply, key)
    return reply.status, error_body(protocol, reply.status, quoted, **fields)


def _quoting(message: str, reply: Reply, key: str) -> str:
    return f"{message} (the API key was: {key})" if reply.quote_key else message


def _holds(body: object, option: str) -> bool:
    """Whether an option stands in the body; a dot leads into an object."""
    for name in option.split("."):
        if not isinstance(body, dict) or name not in body:
            return False
        body = body[name]
    return True


def _event_error(protocol: Protocol, answer: Answer, key: str) -> Json:
    fields = dict(answer.reply.error_event or {})
    status, message = (529, "Overloaded") if protocol == "anthropic" else (500, "The server had an error")
    quoted = _quoting(str(fields.pop("message", message)), answer.reply, key)
    return error_body(protocol, status, quoted, **fields)


def _failed_response(answer: Answer, error: Json) -> Json:
    response = _response(answer, "failed", [])
    return {**response, "error": {"code": error["code"] or "server_error", "message": error["message"]}}


def _error_events(protocol: Protocol, answer: Answer, key: str) -> list[Event]:
    error_body = _event_error(protocol, answer, key)
    if protocol == "anthropic":
        return [Event(error_body, "error")]
    if protocol == "chat":
        return [Event(error_body)]
    error = error_body["error"]
    error_data = {"code": error["code"] or "server_error", "message": error["message"], "param": error["param"]}
    return [Event(error_data, "error"), Event({"response": _failed_response(answer, error)}, "response.failed")]


# --- Whole bodies ------------------------------------------------------------------------------------------------

_STREAMS: dict[Protocol, Callable[[Answer], Iterator[Event]]] = {
    "chat": _chat_events,
    "responses": _responses_events,
    "anthropic": _anthropic_events,
}
_PLAIN: dict[Protocol, Callable[[Answer], Json]] = {
    "chat": _chat_plain,
    "responses": _responses_plain,
    "anthropic": _anthropic_plain,
}


def stream_events(protocol: Protocol, reply: Reply, body: Json, key: str = "") -> list[Event]:
    """The events of a streamed answer, in order."""
    answer = settle(protocol, reply, body)
    events = list(_STREAMS[protocol](answer))
    if reply.error_event is None:
        return events
    # The stream breaks off in the open, right after its last piece.
    last = max((index for index, event in enumerate(events) if event.piece), default=0)
    return [*events[: last + 1], *_error_events(protocol, answer, key)]


def encode(protocol: Protocol, event: Event, number: int, reply: Reply) -> bytes:
    """One event as bytes, its empty line included."""
    if isinstance(event.data, str):
        data = event.data
    else:
        kind = {"type": event.name} if event.name else {}
        order = {"sequence_number": number} if protocol == "responses" else {}
        data = dump({**kind, **event.data, **order})
    if number == reply.malformed_at:
        data = data[: len(data) // 2]
    lines = [f"event: {event.name}"] if event.name else []
    end = "\r\n" if reply.crlf else "\n"
    return (end.join([*lines, f"data: {data}"]) + end + end).encode()


def stream_parts(protocol: Protocol, reply: Reply, body: Json, key: str = "") -> list[tuple[bool, bytes]]:
    """The streamed body event by event, each with whether it is a piece."""
    if reply.raw is not None:
        return [(False, raw_bytes(reply.raw))]
    events = enumerate(stream_events(protocol, reply, body, key))
    return [(event.piece, encode(protocol, event, number, reply)) for number, event in events]


def raw_bytes(raw: bytes | str) -> bytes:
    return raw.encode() if isinstance(raw, str) else raw


def body_bytes(protocol: Protocol, reply: Reply, request_json: Json, key: str = "") -> bytes:
    """The whole streamed body, byte for byte what the server sends when nothing cuts it."""
    return b"".join(data for _, data in stream_parts(protocol, reply, request_json, key))


def event_count(protocol: Protocol, reply: Reply, request_json: Json) -> int:
    """How many events the streamed body has, `[DONE]` included."""
    return len(stream_events(protocol, reply, request_json))


def plain_bytes(protocol: Protocol, reply: Reply, request_json: Json, key: str = "") -> bytes:
    """The body of an answer that is not streamed."""
    if reply.raw is not None:
        return raw_bytes(reply.raw)
    answer = settle(protocol, reply, request_json)
    if reply.error_event is None:
        payload = _PLAIN[protocol](answer)
    else:
        error_body = _event_error(protocol, answer, key)
        payload = _failed_response(answer, error_body["error"]) if protocol == "responses" else error_body
    data = dump(payload).encode()
    return data if reply.malformed_at is None else data[: len(data) // 2]
