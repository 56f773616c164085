"""Shared by all wire protocols: routes, credentials, prompts, requests, and parsing of errors."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec

from hermes.core.failures import FailureFacts
from hermes.core.json_types import JsonMapping, JsonObject, Message
from hermes.core.limits import PROVIDER_WORDS_CHARS_MAX
from hermes.core.stream_parts import Part, ServerError
from hermes.core.tokens import estimate
from hermes.providers.table import Capabilities, capabilities_for

# The parameters of a call that a caller may set, under our names.
SAMPLING = frozenset(
    [
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "logit_bias",
        "verbosity",
        "service_tier",
        "prompt_cache_key",
        "parallel_tool_calls",
        "user",
        "safety_identifier",
    ]
)
# What a message may carry besides what every protocol knows.
MESSAGE_FIELDS = ("name", "reasoning_content")


class Credential:
    """A secret that is revealed only to the code that writes the outgoing header."""

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
    """Where a model is called: provider, model, address, protocol, credentials, and the operator's settings for it."""

    provider: str
    model: str
    base_url: str
    api_mode: str
    credentials: tuple[Credential, ...] = ()
    window_tokens: int | None = None
    max_output_tokens: int | None = None
    sampling: JsonMapping = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: JsonMapping = field(default_factory=dict)
    request_timeout_s: float | None = None
    stale_timeout_s: float | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The key of what is learnt about a route."""
        return (self.provider, self.base_url, self.api_mode, self.model)


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as it is offered to a model. With a `format` it takes text; as a function it has that as `input`."""

    name: str
    description: str
    parameters: JsonObject
    format: JsonObject | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def grammar(self) -> JsonObject | None:
        form = self.format or {}
        if form.get("type") != "grammar":
            return None
        return as_dict(form.get("grammar")) or form

    @property
    def full_description(self) -> str:
        """The description including the grammar, for protocols that do not enforce it."""
        if self.grammar is None:
            return self.description
        syntax, definition = self.grammar.get("syntax") or "lark", self.grammar.get("definition") or ""
        return f"{self.description}\n\nThe input must match this {syntax} grammar:\n{definition}".strip()


class ToolSchemas(tuple[ToolSchema, ...]):
    """The tools of a request, with cached derived forms: they are the same in many requests."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(schema.name for schema in self)

    @cached_property
    def tokens(self) -> int:
        return sum(estimate({"n": tool.name, "d": tool.full_description, "p": tool.parameters}) for tool in self)

    @cached_property
    def has_grammar(self) -> bool:
        return any(schema.grammar for schema in self)

    @cached_property
    def _encoded(self) -> dict[Callable[[ToolSchema], JsonObject], Encoded]:
        return {}

    def encoded(self, form: Callable[[ToolSchema], JsonObject]) -> Encoded:
        if form not in self._encoded:
            self._encoded[form] = Encoded(map(form, self))
        return self._encoded[form]


class Encoded(list[JsonObject]):
    """A list that is sent repeatedly, with its JSON."""

    @cached_property
    def raw(self) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(list(self)))


class Prompt(msgspec.Struct):
    """The input of one model call, in canonical form. `prefill` is the beginning of the assistant's answer if the route
    can continue one. `dropped` names optional parameters that this route has rejected before."""

    system: list[str] = msgspec.field(default_factory=list)
    messages: list[Message] = msgspec.field(default_factory=list)
    tools: ToolSchemas = ToolSchemas()
    sampling: JsonMapping = msgspec.field(default_factory=dict)
    reasoning: JsonMapping | None = None
    tool_choice: str | JsonMapping | None = None
    response_format: JsonMapping | None = None
    max_output: int | None = None
    prefill: str = ""
    cache_ttl: str = "5m"
    stream: bool = True
    dropped: frozenset[str] = frozenset()


class WireRequest(msgspec.Struct):
    """An outgoing request. `left_out` names the sampling parameters that the protocol or model does not support."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: JsonObject
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"WireRequest({self.method!r}, {self.url!r}, {self.body!r})"


class WireEvent(msgspec.Struct):
    """One decoded event of a stream or, with `whole`, a whole body."""

    name: str
    data: object
    whole: bool = False


def error_fields(body: object) -> tuple[str, str, str]:
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
    """The delay that the provider asks for; a date is relative to the response's `Date`."""
    lower = {k.lower(): v for k, v in headers.items()}
    try:
        if "retry-after-ms" in lower:
            return max(0.0, float(lower["retry-after-ms"]) / 1000)
        value = lower.get("retry-after")
        if value is None:
            return None
        if value.strip().replace(".", "", 1).isdigit():
            return float(value)
        wait = parsedate_to_datetime(value) - parsedate_to_datetime(lower["date"])
        return max(0.0, wait.total_seconds())
    except (KeyError, ValueError, TypeError):
        return None


def refusal_facts(status: int, headers: Mapping[str, str], body: bytes) -> FailureFacts:
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


# --- what the translators share ------------------------------------------------------------------------------------

_CODES_BY_STATUS = {
    400: "invalid_request_error invalid_prompt context_length_exceeded content_policy_violation content_filter invalid_image "
    "invalid_image_format invalid_image_url invalid_base64_image image_too_large image_parse_error",
    401: "authentication_error invalid_api_key",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error model_not_found",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error rate_limit_exceeded insufficient_quota",
    500: "api_error server_error",
    503: "server_is_overloaded",
    504: "timeout_error",
    529: "overloaded_error",
}
STATUS_BY_CODE = {code: status for status, codes in _CODES_BY_STATUS.items() for code in codes.split()}


def server_error(body: JsonObject) -> ServerError:
    message, code, _ = error_fields(body)
    error = body.get("error")
    fields = error if isinstance(error, dict) else body
    kind = fields.get("type")
    if code in ("", "error"):
        code = kind if isinstance(kind, str) and kind != "error" else ""
    values = (fields.get("code"), fields.get("status"), fields.get("status_code"), body.get("status_code"))
    statuses = [int(s) for s in values if type(s) is int or (type(s) is str and re.fullmatch(r"[45][0-9]{2}", s))]
    status = next((s for s in statuses if 400 <= s < 600), STATUS_BY_CODE.get(code))
    return ServerError(status, "" if code == "invalid_request_error" else code, message)


@lru_cache(maxsize=64)
def endpoint(base_url: str, path: str) -> str:
    """The URL of a request; a base URL that names the endpoint already, or has a query, is respected."""
    base, question, query = base_url.partition("?")
    base = base.rstrip("/")
    return (base if base.endswith(path) else base + path) + question + query


def get(
    url: str, route: Route, secret: Mapping[str, str], own: Mapping[str, str] = MappingProxyType({})
) -> WireRequest:
    return WireRequest("GET", url, {"Accept": "application/json", **route.headers, **own, **secret}, {})


def bearer(credential: Credential | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {credential.reveal().strip()}"} if credential else {}


def left_out(
    prompt: Prompt,
    body: JsonObject,
    fields: Mapping[str, str],
    unsent: Sequence[str] = MESSAGE_FIELDS,
    grammars: bool = False,
) -> tuple[str, ...]:
    """The given parameters that are not in the body. `fields` maps some of them to body fields; `unsent` are fields of
    messages that the protocol does not support, as are `grammars` of tools unless set."""
    absent: list[str] = []
    for name, value in prompt.sampling.items():
        if value is not None and fields.get(name, name) not in body and (prompt.tools or name != "parallel_tool_calls"):
            absent.append(name)
    effort = requested_effort(prompt.reasoning) if prompt.reasoning is not None else None
    if effort not in (None, "", "none") and body.keys().isdisjoint(("reasoning", "reasoning_effort", "thinking")):
        absent.append("reasoning_effort")
    if not grammars and prompt.tools.has_grammar:
        absent.append("tools.format")
    if unsent:
        absent += [f"messages.{name}" for name in unsent if any(map(_MESSAGE_FIELDS[name], prompt.messages))]
    return tuple(sorted(absent))


def reasoning_given(message: Message) -> str:
    """The reasoning that a client sent with an assistant message, or that a chat completions model gave."""
    items = opaque_items(message, "chat_completions")
    return "".join(as_str(data) for kind, data in items if kind == "reasoning_content")


_MESSAGE_FIELDS: dict[str, Callable[[Message], object]] = {
    "name": lambda message: message.get("name"),
    "reasoning_content": reasoning_given,
}


def post(
    route: Route,
    url: str,
    body: JsonObject,
    secret: Mapping[str, str],
    own: Mapping[str, str] = MappingProxyType({}),
    without: tuple[str, ...] = (),
) -> WireRequest:
    """The request: the operator's settings override ours, and the credential overrides both."""
    if route.extra_body:
        body = {**body, **route.extra_body}
    accept = "text/event-stream" if body.get("stream") else "application/json"
    headers = (*own.items(), *route.headers.items(), *secret.items())
    return WireRequest("POST", url, _headers(accept, headers), body, without)


@lru_cache(maxsize=64)
def _headers(accept: str, headers: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    """Header names are case-insensitive; the last one wins."""
    usual = (("Content-Type", "application/json"), ("Accept", accept))
    return MappingProxyType(dict({name.lower(): (name, value) for name, value in (*usual, *headers)}.values()))


def sampling_sent(prompt: Prompt, capabilities: Capabilities) -> JsonObject:
    names = capabilities.options - prompt.dropped
    return {name: value for name, value in prompt.sampling.items() if value is not None and name in names}


def chosen_tool(choice: JsonMapping) -> str:
    return str(as_dict(choice.get("function")).get("name") or choice.get("name") or "")


def requested_effort(reasoning: JsonMapping | None) -> str | None:
    """None if not given, "none" for no reasoning, "" for reasoning at the model's default effort."""
    if reasoning is None:
        return None
    if reasoning.get("enabled") is False:
        return "none"
    effort = reasoning.get("effort")
    return effort if isinstance(effort, str) else ""


def content_parts(content: object) -> list[JsonObject]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    parts = content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, dict) and part.get("type") in ("text", "image_url")]


def text_of(content: object, separator: str = "") -> str:
    if isinstance(content, str):
        return content
    return separator.join(part.get("text") or "" for part in content_parts(content) if part.get("type") == "text")


def image_of(part: JsonObject) -> tuple[str, str | None] | None:
    image = part.get("image_url") if part.get("type") == "image_url" else None
    if isinstance(image, str):
        return image, None
    return (str(image.get("url") or ""), image.get("detail")) if isinstance(image, dict) else None


def images_of(content: object) -> list[JsonObject]:
    return [part for part in content_parts(content) if part.get("type") == "image_url"]


def inline_data(url: str) -> tuple[str, str] | None:
    match = _DATA_URL.fullmatch(url)
    return ("image/jpeg" if match[1] == "image/jpg" else match[1], match[2]) if match else None


_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.-]+)*;base64,(.*)", re.S)


def call_arguments(text: str) -> JsonObject:
    """A call's arguments as an object; anything else is shown as it was written."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return {"arguments": text}
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def opaque_items(message: Message, api_mode: str) -> list[tuple[str, object]]:
    items = (message.get("opaque") or {}).get(api_mode) or []
    return [(item.get("kind", ""), item.get("data")) for item in items if isinstance(item, dict)]


def token_count(value: object) -> int | None:
    if type(value) is int:
        return value if value >= 0 else None
    return int(value) if type(value) is float and value.is_integer() and value >= 0 else None


def money(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value < 2**53 else None


def as_dict(value: object) -> JsonObject:
    return value if type(value) is dict else {}


def as_list(value: object) -> list[Any]:
    return value if type(value) is list else []


def as_str(value: object) -> str:
    return value if type(value) is str else ""


def as_index(value: object) -> int | None:
    return value if type(value) is int else None


class Provider(ABC):
    """One wire protocol. All methods are pure. `options` are the sampling parameters it supports; `ends` the events
    that end a stream; `strips_prefill`: trailing white space of a prefill is not sent."""

    api_mode: ClassVar[str]
    options: ClassVar[frozenset[str]]
    ends: ClassVar[frozenset[str]] = frozenset()
    strips_prefill: ClassVar[bool] = False

    @abstractmethod
    def request(self, route: Route, credential: Credential | None, prompt: Prompt) -> WireRequest: ...

    @abstractmethod
    def parts(self, event: WireEvent) -> Sequence[Part]: ...

    @property
    def texts(self) -> Callable[[Sequence[bytes], int], list[str]] | None:
        """A function for the texts of the events from an index on, up to the first that holds more than text, which
        `parts` must parse. None if no event is text alone."""
        return None

    def listing(self, route: Route, credential: Credential | None) -> WireRequest:
        return get(endpoint(route.base_url, "/models"), route, bearer(credential))

    def capabilities(self, model: str) -> Capabilities:
        return capabilities_for(model, self.options)
