"""The OpenAI Responses protocol, used without storage at the provider."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from hermes.core.json_types import JsonMapping, JsonObject, Message
from hermes.core.stream_parts import Finish, FinishReason, Model, Opaque, Part, Reasoning, Text, ToolDelta, Usage
from hermes.core.text import spaced_json
from hermes.providers import base
from hermes.providers.table import ModelFacts, facts_for, nearest_effort

API_MODE = "codex_responses"
_NO_TOOLS: frozenset[str] = frozenset()


class CodexResponses(base.Provider):
    api_mode = API_MODE
    options = base.SAMPLING - {"presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias"}
    ends = frozenset({"response.completed", "response.incomplete", "response.failed"})

    def request(self, route: base.Route, credential: base.Credential | None, prompt: base.Prompt) -> base.WireRequest:
        sampling = base.sampling_sent(prompt, self.capabilities(route.model))
        facts = facts_for(route.model)
        custom = frozenset(tool.name for tool in prompt.tools if tool.format) if facts.custom_tools else _NO_TOOLS
        verbosity = sampling.pop("verbosity", None)
        body: JsonObject = {
            "model": route.model,
            "input": _input(prompt, custom),
            "store": False,
            "stream": prompt.stream,
            **sampling,
            **_reasoning_fields(prompt, facts),
        }
        if instructions := "\n\n".join(tier for tier in prompt.system if tier.strip()):
            body["instructions"] = instructions
        limit = prompt.max_output or route.max_output_tokens
        if limit and not prompt.dropped & {"max_tokens", "max_output_tokens"}:
            body["max_output_tokens"] = limit
        if text := _text_fields(prompt, verbosity):
            body["text"] = text
        if prompt.tools:
            body["tools"] = prompt.tools.encoded(_custom_tool if custom else _tool)
            if prompt.tool_choice is not None and "tool_choice" not in prompt.dropped:
                body["tool_choice"] = _tool_choice(prompt.tool_choice, custom)
        else:
            body.pop("parallel_tool_calls", None)
        return base.post(
            route,
            base.endpoint(route.base_url, "/responses"),
            body,
            base.bearer(credential),
            without=base.left_out(prompt, body, {"verbosity": "text"}, grammars=facts.custom_tools),
        )

    def parts(self, event: base.WireEvent) -> Sequence[Part]:
        data = event.data
        if type(data) is not dict:
            return ()
        if event.whole:
            return _whole(data)
        kind = data.get("type")
        name = kind if type(kind) is str else event.name
        if (part := _DELTAS.get(name)) is not None:
            text = data.get("delta")
            return (part(text),) if type(text) is str and text else ()
        if (read := _EVENTS.get(name)) is not None:
            return read(data)
        return [base.server_error(data)] if data.get("error") and kind is None else ()


PROVIDER = CodexResponses()

# --- requests --------------------------------------------------------------------------------------------------------


def _tool(tool: base.ToolSchema) -> JsonObject:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.full_description,
        "parameters": tool.parameters,
        "strict": False,
    }


def _custom_tool(tool: base.ToolSchema) -> JsonObject:
    if not tool.format:
        return _tool(tool)
    return {"type": "custom", "name": tool.name, "description": tool.description, "format": tool.format}


def _tool_choice(choice: str | JsonMapping, custom: frozenset[str]) -> str | JsonObject:
    if isinstance(choice, str):
        return choice
    name = base.chosen_tool(choice)
    return {"type": "custom" if name in custom else "function", "name": name}


def _reasoning_fields(prompt: base.Prompt, facts: ModelFacts) -> JsonObject:
    """Effort and summary; encrypted items are requested whatever the effort, because only they can be replayed."""
    if not facts.reasoning:
        return {}
    fields: JsonObject = {}
    level = nearest_effort(base.requested_effort(prompt.reasoning) or "", facts.efforts)
    if "reasoning" not in prompt.dropped:
        fields["reasoning"] = {"effort": level} if level else {}
        if level != "none":
            fields["reasoning"]["summary"] = "auto"
    if "include" not in prompt.dropped:
        fields["include"] = ["reasoning.encrypted_content"]
    return fields


def _text_fields(prompt: base.Prompt, verbosity: object) -> JsonObject:
    if "text" in prompt.dropped:
        return {}
    fields: JsonObject = {}
    if prompt.response_format is not None and "response_format" not in prompt.dropped:
        schema = base.as_dict(prompt.response_format.get("json_schema"))
        fields["format"] = {**schema, "type": prompt.response_format.get("type", "text")}
    if verbosity is not None:
        fields["verbosity"] = verbosity
    return fields


def _input(prompt: base.Prompt, custom: frozenset[str]) -> list[JsonObject]:
    items: list[JsonObject] = []
    custom_calls: set[str] = set()
    for message in prompt.messages:
        role = message.get("role")
        if role == "assistant":
            answer = _assistant(message, custom)
            custom_calls.update(item["call_id"] for item in answer if item.get("type") == "custom_tool_call")
            items.extend(answer)
            if images := base.images_of(message.get("content")):
                items.append({"role": "user", "content": _content(images)})
        elif role == "tool":
            output, call_id = _content(message.get("content")), message.get("tool_call_id") or ""
            kind = "custom_tool_call_output" if call_id in custom_calls else "function_call_output"
            items.append({"type": kind, "call_id": call_id, "output": output})
        else:
            items.append({"role": "user", "content": _content(message.get("content"))})
    if prompt.prefill:
        items.append({"role": "assistant", "content": prompt.prefill})
    return items


def _content(content: object) -> str | list[JsonObject]:
    if not isinstance(content, list):
        return base.text_of(content)
    return [_part(part) for part in base.content_parts(content)]


def _part(part: JsonObject) -> JsonObject:
    image = base.image_of(part)
    if image is None:
        return {"type": "input_text", "text": part.get("text") or ""}
    return {"type": "input_image", "image_url": image[0], "detail": image[1] or "auto"}


def _assistant(message: Message, custom: frozenset[str]) -> list[JsonObject]:
    """The items of one answer: reasoning, then text, then calls."""
    opaque = base.opaque_items(message, API_MODE)
    # Nothing is stored on the other side, so an item that does not carry its own content cannot be looked up there.
    items = [
        {key: value for key, value in data.items() if key != "status"}
        for kind, data in opaque
        if kind == "reasoning" and isinstance(data, dict) and (data.get("encrypted_content") or data.get("content"))
    ]
    if text := base.text_of(message.get("content")):
        phases = [data for kind, data in opaque if kind == "phase"]
        items.append({"role": "assistant", "content": text, **({"phase": phases[-1]} if phases else {})})
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or "{}"
        item = {"type": "function_call", "call_id": call.get("id") or "", "name": name}
        if name in custom and (tool_input := _custom_input(arguments)) is not None:
            items.append({**item, "type": "custom_tool_call", "input": tool_input})
        else:
            items.append({**item, "arguments": arguments})
    return items


def _custom_input(arguments: str) -> str | None:
    try:
        text = base.as_dict(msgspec.json.decode(arguments)).get("input")
    except msgspec.MsgspecError:
        return None
    return text if isinstance(text, str) else None


# --- answers ---------------------------------------------------------------------------------------------------------

# The text of the second comes whole: its pieces are no JSON.
_CALLS = ("function_call", "custom_tool_call")
_INCOMPLETE: dict[str, FinishReason] = {"max_output_tokens": "length", "content_filter": "content_filter"}


_DELTAS: dict[str, Callable[[str], Part]] = {
    "response.output_text.delta": Text,
    "response.refusal.delta": Text,
    "response.reasoning_text.delta": Reasoning,
    "response.reasoning_summary_text.delta": partial(Reasoning, form="summary"),
}


def _summary_part(data: JsonObject) -> Sequence[Part]:
    index = data.get("summary_index")
    return (Reasoning("\n\n", "summary"),) if type(index) is int and index > 0 else ()


def _arguments_delta(data: JsonObject) -> Sequence[Part]:
    fragment = base.as_str(data.get("delta"))
    return (ToolDelta(index=base.as_index(data.get("output_index")), arguments=fragment),) if fragment else ()


def _item_added(data: JsonObject) -> Sequence[Part]:
    item = base.as_dict(data.get("item"))
    return (_call(item, base.as_index(data.get("output_index")), whole=False),) if item.get("type") in _CALLS else ()


def _created(data: JsonObject) -> Sequence[Part]:
    name = base.as_str(base.as_dict(data.get("response")).get("model"))
    return (Model(name),) if name else ()


def _ended(data: JsonObject) -> Sequence[Part]:
    response = data.get("response")
    if type(response) is not dict:
        return [base.server_error({})] if data.get("type") == "response.failed" else [Finish("stop")]
    return _ending(response)


_EVENTS: dict[str, Callable[[JsonObject], Sequence[Part]]] = {
    "response.reasoning_summary_part.added": _summary_part,
    "response.function_call_arguments.delta": _arguments_delta,
    "response.output_item.added": _item_added,
    "response.output_item.done": lambda data: _finished_item(
        base.as_dict(data.get("item")), base.as_index(data.get("output_index"))
    ),
    "response.created": _created,
    "response.completed": _ended,
    "response.incomplete": _ended,
    "response.failed": _ended,
    "error": lambda data: [base.server_error(data)],
}


def _call(item: JsonObject, index: int | None, whole: bool) -> ToolDelta:
    arguments = base.as_str(item.get("arguments"))
    if whole and item.get("type") == "custom_tool_call":
        arguments = spaced_json({"input": base.as_str(item.get("input"))})
    return ToolDelta(
        index=index,
        id=base.as_str(item.get("call_id")) or base.as_str(item.get("id")),
        name=base.as_str(item.get("name")),
        arguments=arguments,
        whole=whole,
    )


def _finished_item(item: JsonObject, index: int | None) -> Sequence[Part]:
    """What only a finished item holds; its text has come in deltas."""
    kind = item.get("type")
    if kind in _CALLS:
        return (_call(item, index, whole=True),)
    if kind == "reasoning":
        return (Opaque("reasoning", {key: value for key, value in item.items() if key != "status"}),)
    if kind == "message" and (phase := base.as_str(item.get("phase"))):
        return (Opaque("phase", phase),)
    return ()


def _whole(response: JsonObject) -> list[Part]:
    out: list[Part] = []
    items = response.get("output")
    for index, item in enumerate(base.as_list(items)):
        if type(item) is dict:
            out.extend(_item_text(item))
            out.extend(_finished_item(item, index))
    if type(items) is list or "status" in response or response.get("error"):
        out.extend(_ending(response))
    return out


def _item_text(item: JsonObject) -> list[Part]:
    out: list[Part] = []
    if item.get("type") == "reasoning":
        summaries = [base.as_str(base.as_dict(s).get("text")) for s in base.as_list(item.get("summary"))]
        if summary := "\n\n".join(text for text in summaries if text):
            out.append(Reasoning(summary, "summary"))
        out.extend(
            Reasoning(text)
            for c in base.as_list(item.get("content"))
            if (text := base.as_str(base.as_dict(c).get("text")))
        )
    elif item.get("type") == "message":
        contents = [base.as_dict(content) for content in base.as_list(item.get("content"))]
        out.extend(
            Text(text) for c in contents if (text := base.as_str(c.get("text")) or base.as_str(c.get("refusal")))
        )
    return out


def _ending(response: JsonObject) -> list[Part]:
    out: list[Part] = []
    if usage := _usage(base.as_dict(response.get("usage"))):
        out.append(usage)
    if name := base.as_str(response.get("model")):
        out.append(Model(name))
    status = response.get("status")
    if response.get("error") or status == "failed":
        out.append(base.server_error(response if response.get("error") else {}))
    elif status == "incomplete":
        reason = base.as_str(base.as_dict(response.get("incomplete_details")).get("reason"))
        out.append(Finish(_INCOMPLETE.get(reason, "unknown")))
    else:
        calls = any(base.as_dict(item).get("type") in _CALLS for item in base.as_list(response.get("output")))
        out.append(Finish("tool_calls" if calls else "stop"))
    return out


def _usage(usage: JsonObject) -> Usage | None:
    if not usage:
        return None
    prompt = base.as_dict(usage.get("input_tokens_details"))
    answer = base.as_dict(usage.get("output_tokens_details"))
    return Usage(
        input_tokens=base.token_count(usage.get("input_tokens")),
        output_tokens=base.token_count(usage.get("output_tokens")),
        total_tokens=base.token_count(usage.get("total_tokens")),
        cache_read_tokens=base.token_count(prompt.get("cached_tokens")),
        cache_write_tokens=base.token_count(prompt.get("cache_write_tokens")),
        reasoning_tokens=base.token_count(answer.get("reasoning_tokens")),
        cost_usd=base.money(usage.get("cost")),
    )
