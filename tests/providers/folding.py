"""What the translators' tests share: routes, prompts, and parts folded into an answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hermes.core.stream_parts import Finish, Model, Opaque, Part, Reasoning, ServerError, Text, ToolDelta, Usage
from hermes.providers.base import Credential, Prompt, Provider, Route, ToolSchema, ToolSchemas, WireEvent, WireRequest

KEY = Credential("sk-secret-value", "test")
WEATHER = ToolSchema("weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
PNG = "data:image/png;base64,iVBORw0KGgo="


def route(api_mode: str, model: str = "some-model", **fields: Any) -> Route:
    return Route("test", model, fields.pop("base_url", "https://host.test/v1"), api_mode, **fields)


def ask(provider: Provider, model: str = "some-model", *, key: Credential | None = KEY, **fields: Any) -> WireRequest:
    """The request for a prompt; fields that only a route has go to the route."""
    of_route = {k: fields.pop(k) for k in list(fields) if k in Route.__slots__ and k not in Prompt.__struct_fields__}
    fields.setdefault("messages", [{"role": "user", "content": "hi"}])
    fields["tools"] = ToolSchemas(fields.get("tools", ()))
    return provider.request(route(provider.api_mode, model, **of_route), key, Prompt(**fields))


def call(name: str = "weather", arguments: str = '{"city": "Oslo"}', id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


@dataclass
class Folded:
    """An answer put together from parts."""

    text: str = ""
    reasoning: str = ""
    forms: set[str] = field(default_factory=set)
    signatures: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    opaque: list[tuple[str, Any]] = field(default_factory=list)
    usage: Usage | None = None
    model: str = ""
    finish: str = ""
    error: ServerError | None = None


def fold(parts: Iterable[Part]) -> Folded:
    """Parts as an answer, by the plainest reading of what each part means."""
    folded = Folded()
    calls: dict[int | None, dict[str, Any]] = {}
    for part in parts:
        match part:
            case Text():
                folded.text += part.text
            case Reasoning():
                folded.reasoning += part.text
                folded.forms |= {part.form} if part.text else set()
                folded.signatures += [part.signature] if part.signature else []
            case ToolDelta():
                draft = calls.setdefault(part.index, {"id": "", "name": "", "arguments": "", "extra": None})
                draft["id"] = draft["id"] or part.id
                draft["name"] = draft["name"] or part.name
                draft["arguments"] = part.arguments if part.whole else draft["arguments"] + part.arguments
                draft["extra"] = draft["extra"] if part.extra is None else part.extra
            case Opaque():
                folded.opaque.append((part.kind, part.data))
            case Usage():
                folded.usage = folded.usage.updated(part) if folded.usage else part
            case Model():
                folded.model = part.name
            case Finish():
                folded.finish = part.reason
            case ServerError():
                folded.error = part
    folded.calls = [(d["id"], d["name"], json.loads(d["arguments"] or "{}"), d["extra"]) for d in calls.values()]
    return folded


def streamed(provider: Provider, *events: Any) -> Folded:
    return fold(part for event in events for part in provider.parts(WireEvent("", event)))


def whole(provider: Provider, body: Any) -> Folded:
    return fold(provider.parts(WireEvent("", body, whole=True)))
