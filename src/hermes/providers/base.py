"""What all wire protocols share: routes, credentials, prompts, requests, and how a refusal is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

from hermes.agent.failures import PROVIDER_WORDS_CHARS_MAX, FailureFacts
from hermes.agent.parts import Part

Message = dict[str, Any]
JsonObject = dict[str, Any]


class Credential:
    """A secret that shows itself only to the code that writes the outgoing header."""

    __slots__ = ("_value", "label")

    def __init__(self, value: str, label: str = "") -> None:
        self._value = value
        self.label = label

    def reveal(self) -> str:
        return self._value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Credential) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return f"Credential({self.label or '***'})"


@dataclass(frozen=True, slots=True)
class Route:
    """Where a model is asked: provider, model, address, protocol, credentials, and what the operator set for it."""

    provider: str
    model: str
    base_url: str
    api_mode: str
    credentials: tuple[Credential, ...] = ()
    window_tokens: int | None = None
    max_output_tokens: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    request_timeout_s: float | None = None
    stale_timeout_s: float | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What things learnt about a route are remembered under."""
        return (self.provider, self.base_url, self.api_mode, self.model)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a model takes and gives. `options` are the sampling parameters its protocol can carry."""

    window: int = 32_768
    max_output: int = 8_192
    images: bool = True
    tools: bool = True
    reasoning: bool = False
    prefill: bool = False
    cache: bool = False
    parallel_calls: bool = True
    options: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as it is offered to a model."""

    name: str
    description: str
    parameters: JsonObject


@dataclass(slots=True)
class Prompt:
    """All that one model call says, in canonical form.

    `prefill` is the beginning of the assistant's answer where the route can go on from one. `dropped` names optional
    parameters that this route has refused before.
    """

    system: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    tools: list[ToolSchema] = field(default_factory=list)
    sampling: JsonObject = field(default_factory=dict)
    reasoning: JsonObject | None = None
    tool_choice: str | JsonObject | None = None
    response_format: JsonObject | None = None
    max_output: int | None = None
    prefill: str = ""
    cache_ttl: str = "5m"
    stream: bool = True
    dropped: frozenset[str] = frozenset()


@dataclass(slots=True)
class WireRequest:
    """A request as it goes out. The credential is put into `headers` last, by the translator."""

    method: str
    url: str
    headers: dict[str, str]
    body: JsonObject


@dataclass(slots=True)
class WireEvent:
    """One decoded event of a stream, or, with `whole`, a whole body."""

    name: str
    data: Any
    whole: bool = False


class Provider(Protocol):
    """One wire protocol. Every method is a function of its arguments."""

    api_mode: str

    def request(self, route: Route, credential: Credential | None, prompt: Prompt) -> WireRequest: ...

    def parts(self, event: WireEvent) -> Iterable[Part]: ...

    def facts(self, status: int, headers: Mapping[str, str], body: bytes) -> FailureFacts: ...

    def capabilities(self, model: str) -> Capabilities: ...


def error_fields(body: Any) -> tuple[str, str, str]:
    """Message, code and parameter of an error body, in any of the shapes that are in use."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, str):
        return error, "", ""
    if not isinstance(error, dict):
        return "", "", ""
    detail = error.get("message") or error.get("detail") or ""
    message = detail if isinstance(detail, str) else str(detail)
    upstream = error.get("metadata")
    if isinstance(upstream, dict) and isinstance(upstream.get("raw"), str):
        message = f"{message}: {upstream['raw']}"
    code = error.get("code")
    if not isinstance(code, str) or not code:
        kind = error.get("type")
        code = kind if isinstance(kind, str) and kind != "invalid_request_error" else ""
    param = error.get("param")
    return message, code, param if isinstance(param, str) else ""


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """How long the provider asks to wait; a date is read against the answer's own `Date`."""
    lower = {k.lower(): v for k, v in headers.items()}
    try:
        if "retry-after-ms" in lower:
            return max(0.0, float(lower["retry-after-ms"]) / 1000)
        given = lower.get("retry-after")
        if given is None:
            return None
        if given.strip().replace(".", "", 1).isdigit():
            return float(given)
        now = parsedate_to_datetime(lower["date"])
        return max(0.0, (parsedate_to_datetime(given) - now).total_seconds())
    except (KeyError, ValueError, TypeError):
        return None


def refusal_facts(status: int, headers: Mapping[str, str], body: bytes) -> FailureFacts:
    """The facts of an answer whose status is an error."""
    text = body.decode("utf-8", "replace")
    try:
        message, code, param = error_fields(json.loads(text))
    except ValueError:
        message, code, param = text, "", ""
    return FailureFacts(
        phase="headers",
        status=status,
        code=code,
        param=param,
        message=message or text[:PROVIDER_WORDS_CHARS_MAX],
        retry_after_s=retry_after_seconds(headers),
    )
