"""The OpenAI chat completions protocol, including the dialects of other servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from hermes.core.json_types import JsonObject, Message
from hermes.core.stream_parts import (
    Finish,
    FinishReason,
    Model,
    Opaque,
    Part,
    Reasoning,
    ReasoningForm,
    Text,
    ToolDelta,
    Usage,
)
from hermes.providers import base
from hermes.providers.registry import prefill_of
from hermes.providers.table import ModelFacts, facts_for, nearest_effort

API_MODE = "chat_completions"


class ChatCompletions(base.Provider):
    api_mode = API_MODE
    options = base.SAMPLING

    def request(self, route: base.Route, credential: base.Credential | None, prompt: base.Prompt) -> base.WireRequest:
        facts = facts_for(route.model)
        body: JsonObject = {
            "model": route.model,
            "messages": _messages(prompt, facts),
            "stream": prompt.stream,
            **(base.sampling_sent(prompt, self.capabilities(route.model)) if prompt.sampling else {}),
            **_limits(route, prompt, facts),
        }
        if prompt.prefill and (prefill := prefill_of(route)) is not None:
            body["messages"][-1] |= {
                name: value for name, value in prefill.message.items() if name not in prompt.dropped
            }
            body |= {name: value for name, value in prefill.body.items() if name not in prompt.dropped}
        if prompt.stream and "stream_options" not in prompt.dropped:
            body["stream_options"] = {"include_usage": True}
        if prompt.response_format is not None and "response_format" not in prompt.dropped:
            body["response_format"] = prompt.response_format
        if prompt.tools:
            body["tools"] = prompt.tools.encoded(_tool)
            if prompt.tool_choice is not None and "tool_choice" not in prompt.dropped:
                body["tool_choice"] = prompt.tool_choice
        else:
            body.pop("parallel_tool_calls", None)
        unsent = () if _takes_reasoning(prompt, facts) else ("reasoning_content",)
        return base.post(
            route,
            base.endpoint(route.base_url, "/chat/completions"),
            body,
            base.bearer(credential),
            without=base.left_out(prompt, body, {}, unsent),
        )

    def parts(self, event: base.WireEvent) -> Sequence[Part]:
        return _answer(event.data, event.whole) if type(event.data) is dict else ()

    @property
    def texts(self) -> Callable[[Sequence[bytes], int], list[str]]:
        return _texts


PROVIDER = ChatCompletions()


class _Delta(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    content: str


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta
    index: Literal[0] = 0
    finish_reason: None = None
    error: None = None
    usage: None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: tuple[_Choice]
    usage: None = None
    error: None = None
    object: Literal["chat.completion.chunk", ""] | None = None
    x_groq: None = None


_token, _chunks = msgspec.json.Decoder(_Chunk).decode, msgspec.json.Decoder(list[_Chunk]).decode
# Why an answer ended, what it cost, and that it did.
_CLOSING_CHUNKS = 3


def _alone(data: bytes) -> str | None:
    try:
        return _token(data).choices[0].delta.content
    except (msgspec.MsgspecError, UnicodeError):
        return None


def _texts(events: Sequence[bytes], start: int) -> list[str]:
    """The texts of consecutive chunks that hold nothing else, decoding only what is needed."""
    first, end = _alone(events[start]), len(events)
    if first is None or start + 1 == end:
        return [] if first is None else [first]
    while end > len(events) - _CLOSING_CHUNKS and _alone(events[end - 1]) is None:
        end -= 1
    try:  # all in one go
        chunks = _chunks(b"[%b]" % b",".join(events[start:end]))
    except (msgspec.MsgspecError, UnicodeError):
        chunks = []
    if len(chunks) == end - start:
        return [chunk.choices[0].delta.content for chunk in chunks]
    texts = [first]
    while start + len(texts) < len(events) and (text := _alone(events[start + len(texts)])) is not None:
        texts.append(text)
    return texts


# --- requests --------------------------------------------------------------------------------------------------------


def _tool(tool: base.ToolSchema) -> JsonObject:
    function = {"name": tool.name, "description": tool.full_description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _limits(route: base.Route, prompt: base.Prompt, facts: ModelFacts) -> JsonObject:
    """Output limit and reasoning effort, under the names this model accepts."""
    fields: JsonObject = {}
    limit = prompt.max_output or route.max_output_tokens
    other = "max_tokens" if facts.output_key == "max_completion_tokens" else "max_completion_tokens"
    if limit and not {facts.output_key, other} <= prompt.dropped:
        fields[other if facts.output_key in prompt.dropped else facts.output_key] = limit
    effort = base.requested_effort(prompt.reasoning)
    if facts.reasoning and effort and not prompt.dropped & {"reasoning", "reasoning_effort"}:
        level = nearest_effort(effort, facts.efforts)
        if level:
            fields["reasoning_effort"] = level
    return fields


def _messages(prompt: base.Prompt, facts: ModelFacts) -> list[Message]:
    wire: list[Message] = []
    if system := "\n\n".join(filter(str.strip, prompt.system)):
        wire.append({"role": "system", "content": system})
    images: list[JsonObject] = []
    for message in prompt.messages:
        role = message.get("role")
        if images and role != "tool":
            wire.append({"role": "user", "content": images})
            images = []
        if role == "assistant":
            wire.append(_assistant(message, facts, reasoning=_takes_reasoning(prompt, facts)))
            if own_images := _images(message.get("content")):
                images += ({"type": "text", "text": "Images from the message of the assistant:"}, *own_images)
        elif role == "tool":
            wire.append(_tool_result(message, images))
        else:
            wire.append({"role": "user", "content": _user_content(message.get("content"))})
        if message.get("name"):
            wire[-1]["name"] = message["name"]
    if images:
        wire.append({"role": "user", "content": images})
    if prompt.prefill:
        wire.append({"role": "assistant", "content": prompt.prefill})
    return wire


def _takes_reasoning(prompt: base.Prompt, facts: ModelFacts) -> bool:
    return facts.reasoning_content != "refused" and "reasoning_content" not in prompt.dropped


def reasoning_of(text: str) -> JsonObject:
    """The stored form of an assistant message's reasoning, to be sent again."""
    return {API_MODE: [{"kind": "reasoning_content", "data": text}]}


def _user_content(content: object) -> str | list[JsonObject]:
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    return [
        _image(*image) if (image := base.image_of(part)) else {"type": "text", "text": part.get("text") or ""}
        for part in base.content_parts(content)
    ] or ""


def _image(url: str, detail: str | None) -> JsonObject:
    return {"type": "image_url", "image_url": {"url": url, "detail": detail} if detail else {"url": url}}


def _images(content: object) -> list[JsonObject]:
    return [_image(*image) for part in base.content_parts(content) if (image := base.image_of(part))]


def _tool_result(message: Message, images: list[JsonObject]) -> Message:
    """A result as text; its images go into `images`, because a tool message cannot hold them."""
    text = base.text_of(message.get("content"), "\n")
    if own_images := _images(message.get("content")):
        images.append({"type": "text", "text": f"Images from the result of {message.get('tool_name') or 'the tool'}:"})
        images.extend(own_images)
        text = text or "The result is the image in the next message."
    return {"role": "tool", "tool_call_id": message.get("tool_call_id") or "", "content": text}


def _assistant(message: Message, facts: ModelFacts, *, reasoning: bool) -> Message:
    calls = [_call(call, facts if i == 0 else None) for i, call in enumerate(message.get("tool_calls") or [])]
    wire: Message = {"role": "assistant", "content": base.text_of(message.get("content")) or (None if calls else "")}
    if calls:
        wire["tool_calls"] = calls
    opaque = base.opaque_items(message, API_MODE)
    if details := _joined_details([data for kind, data in opaque if kind == "reasoning_details"]):
        wire["reasoning_details"] = details
    # Some refuse a history in which an answer has lost the field, or has it empty.
    thoughts = base.reasoning_given(message) or (" " if facts.reasoning_content == "required" else "")
    if reasoning and thoughts:
        wire["reasoning_content"] = thoughts
    return wire


def _call(call: JsonObject, facts: ModelFacts | None) -> JsonObject:
    function = call.get("function") or {}
    wire: JsonObject = {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function.get("name") or "", "arguments": function.get("arguments") or "{}"},
    }
    extra = call.get("extra_content", facts.call_extra if facts else None)
    if extra is not None:
        wire["extra_content"] = extra
    return wire


def _joined_details(fragments: list[object]) -> list[JsonObject]:
    joined: list[JsonObject] = []
    for detail in (d for fragment in fragments if isinstance(fragment, list) for d in fragment if isinstance(d, dict)):
        last = joined[-1] if joined else {}
        same = detail.get("index") is not None and (last.get("type"), last.get("index")) == (
            detail.get("type"),
            detail["index"],
        )
        if not same or detail.get("type") == "reasoning.encrypted":
            joined.append(dict(detail))
            continue
        for key, value in detail.items():
            if key in ("text", "summary") and isinstance(value, str):
                last[key] = base.as_str(last.get(key)) + value
            elif value is not None:
                last[key] = value
    return joined


# --- answers ---------------------------------------------------------------------------------------------------------

_FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "end_turn": "stop",
    "eos": "stop",
    "stop_sequence": "stop",
    "function_call": "stop",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "content_filter": "content_filter",
    "safety": "content_filter",
    "recitation": "content_filter",
    "error": "error",
    "malformed_function_call": "error",
}


def _answer(data: JsonObject, whole: bool) -> list[Part]:
    choice = _first_choice(data.get("choices"))
    if data.get("error") or data.get("object") == "error":
        return [base.server_error(data)]
    if choice.get("error"):
        return [base.server_error(choice)]
    delta = base.as_dict(choice.get("message" if whole else "delta"))
    usage = _usage(data, choice)
    finish = base.as_str(choice.get("finish_reason"))
    out: list[Part] = []
    if (whole or finish or usage or delta.get("role")) and (model := base.as_str(data.get("model"))):
        out.append(Model(model))
    if delta:
        _delta(delta, whole, base.as_str(data.get("model")), out)
    if usage:
        out.append(usage)
    if finish:
        # As vLLM and SGLang say it; it may be the number of a token too.
        sequence = base.as_str(choice.get("stop_reason")) or base.as_str(choice.get("matched_stop"))
        out.append(Finish(_FINISH.get(finish.lower(), "unknown"), sequence))
    elif whole and delta:
        out.append(Finish("tool_calls" if any(type(part) is ToolDelta for part in out) else "stop"))
    return out


def _first_choice(choices: object) -> JsonObject:
    for choice in base.as_list(choices):
        if type(choice) is dict and not choice.get("index"):
            return choice
    return {}


def _delta(delta: JsonObject, whole: bool, model: str, out: list[Part]) -> None:
    _reasoning(delta, model, out)
    content = delta.get("content")
    if type(content) is str:
        if content:
            out.append(Text(content))
    elif type(content) is list:
        for part in content:
            _content_part(part, out)
    if refusal := base.as_str(delta.get("refusal")):
        out.append(Text(refusal))
    for position, call in enumerate(base.as_list(delta.get("tool_calls"))):
        if type(call) is dict:
            out.append(_tool_delta(call, position if whole else None, whole))


def _content_part(part: object, out: list[Part]) -> None:
    if type(part) is str and part:
        out.append(Text(part))
    elif type(part) is dict:
        thinking = part.get("thinking")
        inner = thinking if type(thinking) is list else [thinking]
        out.extend(
            Reasoning(text) for i in inner if (text := base.as_str(i) or base.as_str(base.as_dict(i).get("text")))
        )
        if text := base.as_str(part.get("text")) or base.as_str(part.get("refusal")):
            out.append(Text(text))


def _reasoning(delta: JsonObject, model: str, out: list[Part]) -> None:
    """Reasoning once, though servers may repeat the same text in several fields."""
    details = [d for d in base.as_list(delta.get("reasoning_details")) if type(d) is dict]
    form: ReasoningForm = "summary" if details and details[0].get("type") == "reasoning.summary" else "raw"
    text = base.as_str(delta.get("reasoning_content")) or base.as_str(delta.get("reasoning"))
    text = text or "".join(base.as_str(d.get("text")) or base.as_str(d.get("summary")) for d in details)
    if text:
        out.append(Reasoning(text, form))
        if not details and facts_for(model).reasoning_content == "required":
            out.append(Opaque("reasoning_content", text, joins=True))
    if details:
        out.append(Opaque("reasoning_details", details))


def _tool_delta(call: JsonObject, position: int | None, whole: bool) -> ToolDelta:
    function = base.as_dict(call.get("function"))
    arguments = function.get("arguments")
    if type(arguments) is dict:
        # Already parsed, hence all of them at once.
        arguments, whole = json.dumps(arguments, ensure_ascii=False), True
    extra = call.get("extra_content")
    if extra is None:
        extra = base.as_dict(call.get("model_extra")).get("extra_content")
    index = base.as_index(call.get("index"))
    return ToolDelta(
        index=position if index is None else index,
        id=base.as_str(call.get("id")),
        name=base.as_str(function.get("name")),
        arguments=base.as_str(arguments),
        extra=extra,
        whole=whole,
    )


def _usage(data: JsonObject, choice: JsonObject) -> Usage | None:
    usage = data.get("usage") or choice.get("usage")
    if not usage or type(usage) is not dict:
        usage = base.as_dict(choice.get("usage")) or base.as_dict(base.as_dict(data.get("x_groq")).get("usage"))
        if not usage:
            return None
    prompt = base.as_dict(usage.get("prompt_tokens_details"))
    completion = base.as_dict(usage.get("completion_tokens_details"))
    cached = None
    for name, counts in (("cached_tokens", prompt), ("prompt_cache_hit_tokens", usage), ("cached_tokens", usage)):
        if cached is None and name in counts:
            cached = base.token_count(counts[name])
    return Usage(
        base.token_count(usage.get("prompt_tokens")),
        base.token_count(usage.get("completion_tokens")),
        base.token_count(usage.get("total_tokens")),
        cached,
        base.token_count(prompt["cache_write_tokens"]) if "cache_write_tokens" in prompt else None,
        base.token_count(completion["reasoning_tokens"]) if "reasoning_tokens" in completion else None,
        base.money(usage["cost"]) if "cost" in usage else None,
    )
