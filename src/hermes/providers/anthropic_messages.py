"""The Anthropic Messages protocol: content blocks, strict alternation, signed thinking and cache marks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from hermes.core.json_types import JsonObject, Message
from hermes.core.stream_parts import Finish, FinishReason, Model, Opaque, Part, Reasoning, Text, ToolDelta, Usage
from hermes.providers import base
from hermes.providers.table import (
    Capabilities,
    ModelFacts,
    adaptive_thinking,
    budgeted_thinking,
    facts_for,
    output_limit,
)

API_MODE = "anthropic_messages"
_VERSION_HEADER = {"anthropic-version": "2023-06-01"}


class AnthropicMessages(base.Provider):
    api_mode = API_MODE
    options = frozenset(
        {"temperature", "top_p", "stop", "service_tier", "parallel_tool_calls", "user", "safety_identifier"}
    )
    ends = frozenset({"message_stop"})
    strips_prefill = True

    def request(self, route: base.Route, credential: base.Credential | None, prompt: base.Prompt) -> base.WireRequest:
        facts = facts_for(route.model)
        choice = _tool_choice(prompt, facts)
        limit = output_limit(facts, prompt.max_output, route.max_output_tokens, route.window_tokens)
        limit, thinking = _thinking(prompt, facts, limit, choice)
        body: JsonObject = {
            "model": route.model,
            "max_tokens": limit,
            "messages": _messages(prompt),
            "stream": prompt.stream,
            **_sampling(prompt, self.capabilities(route.model), thinking),
            **thinking,
        }
        if system := [{"type": "text", "text": tier} for tier in prompt.system if tier.strip()]:
            body["system"] = system
        if prompt.tools:
            body["tools"] = [_tool(tool) for tool in prompt.tools]
            if choice:
                body["tool_choice"] = choice
        if output_format := _output_format(prompt, facts):
            body["output_config"] = {**body.get("output_config", {}), "format": output_format}
        if facts.cache and "cache_control" not in prompt.dropped:
            _mark_for_cache(body, prompt.cache_ttl)
        without = base.left_out(prompt, body, _FIELDS)
        return base.post(route, _url(route.base_url), body, _secret(credential), _VERSION_HEADER, without)

    def listing(self, route: base.Route, credential: base.Credential | None) -> base.WireRequest:
        address = _url(route.base_url).removesuffix("/messages")
        return base.get(f"{address}/models?limit=1000", route, _secret(credential), _VERSION_HEADER)

    def parts(self, event: base.WireEvent) -> Sequence[Part]:
        data = event.data
        if type(data) is not dict:
            return ()
        kind = data.get("type")
        if event.whole and kind != "error":
            return [base.server_error(data)] if data.get("error") else _whole(data)
        read = _EVENTS.get(kind if type(kind) is str else event.name)
        return read(data) if read is not None else ()


PROVIDER = AnthropicMessages()

# --- requests: parameters --------------------------------------------------------------------------------------------

_CHOICES: dict[str, JsonObject] = {"auto": {"type": "auto"}, "none": {"type": "none"}, "required": {"type": "any"}}
_TIERS = {"auto": "auto", "default": "standard_only", "standard_only": "standard_only"}


def _secret(credential: base.Credential | None) -> dict[str, str]:
    return {"x-api-key": credential.reveal().strip()} if credential else {}


def _url(base_url: str) -> str:
    address = base_url.partition("?")[0].rstrip("/")
    return base.endpoint(base_url, "/messages" if address.endswith(("/v1", "/v1/messages")) else "/v1/messages")


def _tool(tool: base.ToolSchema) -> JsonObject:
    return {
        "name": tool.name,
        **({"description": described} if (described := tool.full_description) else {}),
        "input_schema": {"type": "object", **tool.parameters},
    }


def _tool_choice(prompt: base.Prompt, facts: ModelFacts) -> JsonObject | None:
    """The choice in this protocol's form; a forced one becomes free if the model rejects forced calls."""
    if not prompt.tools or "tool_choice" in prompt.dropped:
        return None
    choice: JsonObject | None = None
    if isinstance(prompt.tool_choice, str):
        choice = _CHOICES.get(prompt.tool_choice)
    elif prompt.tool_choice is not None:
        choice = {"type": "tool", "name": base.chosen_tool(prompt.tool_choice)}
    if _forced(choice) and not facts.forced_choice:
        choice = _CHOICES["auto"]
    one_at_a_time = prompt.sampling.get("parallel_tool_calls") is False and "parallel_tool_calls" not in prompt.dropped
    if one_at_a_time and (choice is None or choice["type"] != "none"):
        choice = {**(choice or _CHOICES["auto"]), "disable_parallel_tool_use": True}
    return dict(choice) if choice else None


def _forced(choice: JsonObject | None) -> bool:
    return choice is not None and choice["type"] in ("any", "tool")


def _thinking(prompt: base.Prompt, facts: ModelFacts, limit: int, choice: JsonObject | None) -> tuple[int, JsonObject]:
    """The output limit, and the fields that switch thinking on or off."""
    effort = base.requested_effort(prompt.reasoning)
    if prompt.dropped & {"thinking", "reasoning"}:
        return limit, {}
    if facts.thinking == "adaptive":
        return limit, adaptive_thinking(facts, effort, _forced(choice))
    # A budget goes with neither a forced call, nor a begun answer, nor a round of calls that was not thought over.
    if _forced(choice) or prompt.prefill or _unsigned_calls(prompt.messages):
        return limit, {}
    return budgeted_thinking(facts, effort, limit)


def _unsigned_calls(messages: list[Message]) -> bool:
    last = next((m for m in reversed(messages) if m.get("role") == "assistant"), {})
    return bool(last.get("tool_calls")) and not _thoughts(last)


# Where our parameters go here under another name.
_FIELDS = {
    "stop": "stop_sequences",
    "user": "metadata",
    "safety_identifier": "metadata",
    "parallel_tool_calls": "tools",
}


def _sampling(prompt: base.Prompt, capabilities: Capabilities, thinking: JsonObject) -> JsonObject:
    sampling = base.sampling_sent(prompt, capabilities)
    fields: JsonObject = {}
    if base.as_dict(thinking.get("thinking")).get("type") not in ("enabled", "adaptive"):
        # Of the two only one may be set, and the temperature ends at 1 here.
        if "temperature" in sampling:
            fields["temperature"] = min(1.0, sampling["temperature"])
        elif "top_p" in sampling:
            fields["top_p"] = sampling["top_p"]
    if "stop" in sampling and "stop_sequences" not in prompt.dropped:
        stops = [sampling["stop"]] if isinstance(sampling["stop"], str) else sampling["stop"]
        if stops := [stop for stop in stops if stop.strip()]:
            fields["stop_sequences"] = stops
    if tier := _TIERS.get(base.as_str(sampling.get("service_tier"))):
        fields["service_tier"] = tier
    person = sampling.get("safety_identifier") or sampling.get("user")
    if person and "metadata" not in prompt.dropped:
        fields["metadata"] = {"user_id": person}
    return fields


def _output_format(prompt: base.Prompt, facts: ModelFacts) -> JsonObject | None:
    """Only for strict schemas: the model cannot be held to others."""
    schema = base.as_dict((prompt.response_format or {}).get("json_schema"))
    if not facts.json_schema or not schema.get("strict") or prompt.dropped & {"response_format", "output_config"}:
        return None
    return {"type": "json_schema", "schema": schema.get("schema") or {}}


def _mark_for_cache(body: JsonObject, ttl: str) -> None:
    """Set at most four marks: the tools, the system text, and the last two user messages."""
    mark = {"type": "ephemeral", **({"ttl": ttl} if ttl == "1h" else {})}
    users = [m["content"] for m in body["messages"] if m["role"] == "user"]
    for blocks in (body.get("tools"), body.get("system"), *users[-2:]):
        if blocks:
            blocks[-1]["cache_control"] = dict(mark)


# --- requests: messages ----------------------------------------------------------------------------------------------

_NOT_IN_IDS = re.compile(r"[^a-zA-Z0-9_-]")


def _messages(prompt: base.Prompt) -> list[Message]:
    """Alternating messages of blocks: adjacent ones of a role are merged, results come first."""
    wire: list[Message] = []
    for message in prompt.messages:
        role = message.get("role")
        if role == "assistant":
            _add(wire, "assistant", _assistant_blocks(message))
            _add(wire, "user", _content_blocks(base.images_of(message.get("content"))))
        else:
            _add(wire, "user", _result(message) if role == "tool" else _content_blocks(message.get("content")))
    for message in wire:
        if message["role"] == "user":
            message["content"].sort(key=lambda block: block["type"] != "tool_result")
    if wire and wire[0]["role"] == "assistant":
        wire.insert(0, {"role": "user", "content": [{"type": "text", "text": "(The conversation goes on.)"}]})
    _add(wire, "assistant", _text_blocks(prompt.prefill))
    if wire and wire[-1]["role"] == "assistant" and wire[-1]["content"][-1]["type"] == "text":
        # The beginning of an answer may not end in white space.
        last = wire[-1]["content"][-1]
        last["text"] = last["text"].rstrip()
    return wire


def _add(wire: list[Message], role: str, blocks: list[JsonObject]) -> None:
    if blocks and wire and wire[-1]["role"] == role:
        wire[-1]["content"].extend(blocks)
    elif blocks:
        wire.append({"role": role, "content": blocks})


def _text_blocks(text: str) -> list[JsonObject]:
    """Text as a block; none for blank text, which would be rejected."""
    return [{"type": "text", "text": text}] if text.strip() else []


def _content_blocks(content: object) -> list[JsonObject]:
    blocks: list[JsonObject] = []
    for part in base.content_parts(content):
        image = base.image_of(part)
        blocks.extend([_image(image[0])] if image else _text_blocks(part.get("text") or ""))
    return blocks


def _image(url: str) -> JsonObject:
    if inline := base.inline_data(url):
        return {"type": "image", "source": {"type": "base64", "media_type": inline[0], "data": inline[1]}}
    if url.startswith(("http://", "https://")):
        return {"type": "image", "source": {"type": "url", "url": url}}
    return {"type": "text", "text": "(An image that cannot be read.)"}


def _result(message: Message) -> list[JsonObject]:
    content = message.get("content")
    result = _content_blocks(content) if isinstance(content, list) else base.text_of(content)
    return [{"type": "tool_result", "tool_use_id": _wire_id(message.get("tool_call_id")), "content": result}]


def _assistant_blocks(message: Message) -> list[JsonObject]:
    blocks = [*_thoughts(message), *_text_blocks(base.text_of(message.get("content")))]
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        blocks.append(
            {
                "type": "tool_use",
                "id": _wire_id(call.get("id")),
                "name": function.get("name") or "",
                "input": base.call_arguments(function.get("arguments") or "{}"),
            }
        )
    return blocks


def _thoughts(message: Message) -> list[JsonObject]:
    """Thinking blocks as received; only signed ones are accepted back."""
    blocks: list[JsonObject] = []
    for kind, data in base.opaque_items(message, API_MODE):
        if kind == "signed_reasoning" and isinstance(data, dict) and data.get("signature"):
            blocks.append({"type": "thinking", "thinking": data.get("text") or "", "signature": data["signature"]})
        elif kind == "redacted_thinking" and isinstance(data, dict):
            blocks.append(dict(data))
    return blocks


def _wire_id(call_id: object) -> str:
    """Ids of other protocols may hold characters that this one rejects."""
    return _NOT_IN_IDS.sub("_", base.as_str(call_id)) or "call"


# --- answers ---------------------------------------------------------------------------------------------------------

_FINISH: dict[str, FinishReason] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}


def _message_start(data: JsonObject) -> Sequence[Part]:
    message = base.as_dict(data.get("message"))
    return [*_model(message), *_usage(base.as_dict(message.get("usage")), True)]


_DELTAS: dict[str, tuple[str, Callable[[str, int | None], Part]]] = {
    "text_delta": ("text", lambda text, _: Text(text)),
    "thinking_delta": ("thinking", lambda text, _: Reasoning(text)),
    "signature_delta": ("signature", lambda text, _: Reasoning("", signature=text)),
    "input_json_delta": ("partial_json", lambda text, index: ToolDelta(index=index, arguments=text)),
}


def _block_delta(data: JsonObject) -> Sequence[Part]:
    delta = base.as_dict(data.get("delta"))
    field, part = _DELTAS.get(base.as_str(delta.get("type")), ("", None))
    text = delta.get(field)
    return (part(text, base.as_index(data.get("index"))),) if part and type(text) is str and text else ()


def _message_delta(data: JsonObject) -> Sequence[Part]:
    usage = base.as_dict(data.get("usage"))
    # Some servers repeat the uncached input alone here; it says all only beside the counts of the cache.
    complete = any(base.token_count(usage.get(key)) is not None for key in _CACHE_KEYS)
    return [*_usage(usage, complete), *_finish(base.as_dict(data.get("delta")))]


_EVENTS: dict[str, Callable[[JsonObject], Sequence[Part]]] = {
    "message_start": _message_start,
    "content_block_start": lambda data: _block(
        base.as_dict(data.get("content_block")), base.as_index(data.get("index")), False
    ),
    "content_block_delta": _block_delta,
    "message_delta": _message_delta,
    "error": lambda data: [base.server_error(data)],
}
_CACHE_KEYS = ("cache_read_input_tokens", "cache_creation_input_tokens")


def _block(block: JsonObject, index: int | None, whole: bool) -> Sequence[Part]:
    kind = block.get("type")
    if kind == "text":
        text = base.as_str(block.get("text"))
        return (Text(text),) if text else ()
    if kind == "thinking":
        text, signature = base.as_str(block.get("thinking")), base.as_str(block.get("signature"))
        return (Reasoning(text, signature=signature),) if text or signature else ()
    if kind == "redacted_thinking":
        return (Opaque("redacted_thinking", block),)
    if kind == "tool_use":
        arguments = json.dumps(block["input"], ensure_ascii=False) if base.as_dict(block.get("input")) else ""
        call_id, name = base.as_str(block.get("id")), base.as_str(block.get("name"))
        return (ToolDelta(index=index, id=call_id, name=name, arguments=arguments, whole=whole),)
    return ()


def _whole(message: JsonObject) -> list[Part]:
    out = _model(message)
    for index, block in enumerate(base.as_list(message.get("content"))):
        out.extend(_block(base.as_dict(block), index, whole=True))
    return [*out, *_usage(base.as_dict(message.get("usage")), True), *_finish(message)]


def _model(message: JsonObject) -> list[Part]:
    name = base.as_str(message.get("model"))
    return [Model(name)] if name else []


def _finish(holder: JsonObject) -> list[Part]:
    reason = base.as_str(holder.get("stop_reason"))
    return [Finish(_FINISH.get(reason, "unknown"), base.as_str(holder.get("stop_sequence")))] if reason else []


def _usage(usage: JsonObject, with_input: bool) -> list[Part]:
    """Token counts; `input_tokens` excludes cached input in this protocol, so it is added."""
    fresh = base.token_count(usage.get("input_tokens"))
    read, written = (base.token_count(usage.get(key)) for key in _CACHE_KEYS)
    complete = with_input and fresh is not None
    counts = Usage(
        input_tokens=(fresh or 0) + (read or 0) + (written or 0) if complete else None,
        output_tokens=base.token_count(usage.get("output_tokens")),
        cache_read_tokens=read if complete else None,
        cache_write_tokens=written if complete else None,
        reasoning_tokens=base.token_count(base.as_dict(usage.get("output_tokens_details")).get("thinking_tokens")),
    )
    return [counts] if counts != Usage() else []
