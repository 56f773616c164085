"""The embedded model. Small models do not hold to tool formats by themselves: here they are shown how by example, and
what they write is bound to one object, a call or an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files

from hermes.core.json_types import JsonMapping, JsonObject, Message
from hermes.core.limits import LOCAL_OUTPUT_TOKENS_MAX
from hermes.local import CHOOSES
from hermes.providers import base
from hermes.providers.chat_completions import ChatCompletions
from hermes.providers.table import Capabilities

_CAPABILITIES = Capabilities(
    window=8_192,
    max_output=LOCAL_OUTPUT_TOKENS_MAX,
    images=False,
    parallel_calls=False,
    options=frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias"}),
    toolsets=frozenset({"file", "terminal", "web"}),
)
# What of a schema the model's words can be bound to; the rest is checked when the call is made.
_SCHEMA_KEYS = ("type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "additionalProperties")
_ANY: JsonObject = {"type": "object"}
_DEEP = 6
_NOISE = frozenset({"cwd", "duration_ms", "total_lines", "truncated", "matched_by", "path"})


class Local(ChatCompletions):
    api_mode = "local"

    def request(self, route: base.Route, credential: base.Credential | None, prompt: base.Prompt) -> base.WireRequest:
        tools = _offered(
            prompt.tools, " ".join(base.text_of(m.get("content")) for m in prompt.messages if m["role"] == "user")
        )
        answer = _answer_schema(prompt.response_format)
        body: JsonObject = {
            "messages": _messages(prompt, tools),
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_prompt": True,
            "temperature": 0,
            "max_tokens": prompt.max_output or route.max_output_tokens or LOCAL_OUTPUT_TOKENS_MAX,
            **base.sampling_sent(prompt, _CAPABILITIES),
        }
        if tools:
            body["json_schema"] = _choice(tools, answer, prompt.tool_choice)
        elif answer is not None:
            body["json_schema"] = answer
        chooses = {CHOOSES: "1"} if tools else {}
        return base.post(
            route,
            base.endpoint(route.base_url, "/v1/chat/completions"),
            body,
            {},
            chooses,
            base.left_out(prompt, body, {}),
        )

    def listing(self, route: base.Route, credential: base.Credential | None) -> base.WireRequest:
        return base.get(base.endpoint(route.base_url, "/v1/models"), route, {})

    def capabilities(self, model: str) -> Capabilities:
        return _CAPABILITIES


PROVIDER = Local()


@cache
def forms() -> JsonObject:
    """What the model is told and shown, chosen by measurement."""
    return json.loads(files("hermes.providers").joinpath("local_forms.json").read_text("utf-8"))  # type: ignore[no-any-return]


def _offered(tools: Iterable[base.ToolSchema], user_text: str) -> dict[str, tuple[str, JsonObject]]:
    """Tools by name: a line about each, and the schema of the arguments that a small model is to know. Those it is shown
    how to use come first; some only when the user's words call for them, since they would mislead it."""
    out: dict[str, tuple[str, JsonObject]] = {}
    order = {name: at for at, name in enumerate(forms()["tools"])}
    for tool in sorted(tools, key=lambda tool: order.get(tool.name, len(order))):
        form = forms()["tools"].get(tool.name, {})
        if form.get("hidden") or form.get("when", "") not in user_text:
            continue
        schema = _plain(tool.parameters)
        properties = schema.get("properties", {})
        names = [name for name in form.get("parameters", properties) if name in properties]
        narrowed = {name: form.get("fixed", {}).get(name, properties[name]) for name in names}
        schema |= {"properties": narrowed, "additionalProperties": False}
        schema["required"] = [name for name in form.get("required", schema.get("required", ())) if name in names]
        about = form.get("about") or f"{tool.name}({', '.join(names)}): {tool.description.split('. ')[0]}"
        out[tool.name] = about, schema
    return out


def _plain(schema: object, depth: int = 0) -> JsonObject:
    if not isinstance(schema, dict) or depth > _DEEP:
        return dict(_ANY)
    out: JsonObject = {key: schema[key] for key in _SCHEMA_KEYS if key in schema}
    if isinstance(out.get("properties"), dict):
        out["properties"] = {name: _plain(value, depth + 1) for name, value in out["properties"].items()}
    if "items" in out:
        out["items"] = _plain(out["items"], depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in out:
            out[key] = [_plain(item, depth + 1) for item in out[key]]
    if not isinstance(out.get("additionalProperties", True), bool):
        out.pop("additionalProperties")
    return out


def _choice(
    tools: Mapping[str, tuple[str, JsonObject]], answer: JsonObject | None, tool_choice: str | JsonMapping | None
) -> JsonObject:
    """One of the calls, or an answer; a caller may ask for a call, or for this one."""
    chosen = base.chosen_tool(tool_choice) if isinstance(tool_choice, Mapping) else ""
    choices = [
        _object(tool={"const": name}, arguments=schema) for name, (_, schema) in tools.items() if chosen in ("", name)
    ]
    if tool_choice != "required" and chosen not in tools:
        choices.append(_object(answer=answer or {"type": "string"}))
    return {"oneOf": choices}


def _object(**properties: object) -> JsonObject:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _answer_schema(response_format: JsonMapping | None) -> JsonObject | None:
    if response_format is None or response_format.get("type") == "text":
        return None
    schema = (response_format.get("json_schema") or {}).get("schema")
    return schema if isinstance(schema, dict) else dict(_ANY)


def _messages(prompt: base.Prompt, tools: Mapping[str, tuple[str, JsonObject]]) -> list[Message]:
    """System text, examples, then the conversation; neighbours of one role become one message."""
    system = list(prompt.system)
    if tools:
        # What there is to use is told here, with how.
        system = [re.sub(r"^Tools: .*\n\n", "", text, flags=re.M) for text in system]
        lines = "\n".join(f"- {about}" for about, _ in tools.values())
        system.append(f"{forms()['form']}\nTools:\n{lines}")
    out: list[Message] = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    for role, text in [*_examples(tools), *_conversation(prompt.messages, bool(tools))]:
        if out and out[-1]["role"] == role:
            out[-1] = {"role": role, "content": f"{out[-1]['content']}\n{text}"}
        else:
            out.append({"role": role, "content": text})
    if prompt.prefill:
        out.append({"role": "assistant", "content": prompt.prefill})
    return out


def _examples(tools: JsonMapping) -> Iterable[tuple[str, str]]:
    """Turns with tools that are not there are not shown; without tools, none."""
    for shot in forms()["shots"] if tools else ():
        if shot.get("tool") and shot["tool"] not in tools:
            continue
        yield "user", shot["user"]
        if "tool" in shot:
            yield "assistant", _call(shot["tool"], shot["arguments"])
        if "result" in shot:
            yield "user", _result(shot["result"])
        if "answer" in shot:
            yield "assistant", _answer(shot["answer"])
    if tools:
        yield "user", forms()["begin"]


def _conversation(messages: Iterable[Message], tools: bool) -> Iterable[tuple[str, str]]:
    for message in messages:
        text = base.text_of(message.get("content"), "\n")
        if message["role"] == "assistant":
            if text:
                yield "assistant", _answer(text) if tools else text
            for call in message.get("tool_calls") or ():
                function = call["function"]
                yield "assistant", _call(function["name"], base.call_arguments(function["arguments"]))
        elif message["role"] == "tool":
            yield "user", _result(text)
        else:
            yield "user", text


def _call(name: str, arguments: JsonObject) -> str:
    return json.dumps({"tool": name, "arguments": arguments}, ensure_ascii=False)


def _answer(text: str) -> str:
    return json.dumps({"answer": text}, ensure_ascii=False)


def _result(text: str) -> str:
    """A tool's answer without what tells a small model nothing: empty fields, and the names of single ones."""
    try:
        answer = json.loads(text)
    except ValueError:
        return f"[result] {text}"
    if not isinstance(answer, dict):
        return f"[result] {text}"
    fields = {name: value for name, value in answer.items() if value and name not in _NOISE and value != "ok"}
    lines: list[str] = []
    for name, value in fields.items():
        line = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(line if len(fields) == 1 else f"{name}: {line}")
    return "[result] " + ("\n".join(lines) or "done, without output")
