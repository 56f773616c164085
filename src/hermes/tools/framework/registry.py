"""The definition of a tool, what it is given, and the registry."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec

from hermes.core.errors import ServiceError
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import OFFERED_TOOLS_MAX, TOOL_TIMEOUT_S

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.core.stream_parts import ToolCall
    from hermes.core.threads import RunBlocking
    from hermes.guards.secrets import Secrets
    from hermes.settings.config import Settings
    from hermes.tools.framework.questions import Asking
    from hermes.tools.framework.resources import RunResources

Effect = Literal["read", "idempotent", "effect"]
Reconciled = Literal["done", "not_done", "unclear"]
Data = JsonMapping  # a JSON object that is only read
Answer = JsonObject
# What a tool is called with: an instance of its `ToolDef.arguments`, or a JSON object where it has none.
Args: TypeAlias = Any


class ToolError(ServiceError):
    """A refusal by a tool. `foreign`: its text comes from outside."""

    def __init__(self, message: str, code: str, hint: str = "", *, foreign: bool = False, **details: Any) -> None:
        super().__init__(message, code, hint, **details)
        self.foreign = foreign


@dataclass(slots=True)
class ToolContext:
    run_id: str
    call_id: str
    session_id: str
    owner: str
    session_key: str | None
    home: Home
    settings: Settings
    secrets: Secrets
    asking: Asking
    emit: Callable[[str, str], None]
    blocking: RunBlocking
    last_answer: Callable[[str, str], Answer | None]
    resources: RunResources
    # Whether the model accepts images, and the images that a call shows it beside its answer, as data URLs.
    sees_images: bool = False
    images: list[str] = field(default_factory=list)
    # Set by a call whose answer comes from outside although its tool's usually does not.
    foreign: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)
    prepared: Any = None
    # The tools of the run, and a way to call one of them from within a call; returns its answer as the model would get
    # it.
    tools: Mapping[str, ToolDef] = field(default_factory=dict)
    call: Callable[[ToolContext, ToolCall], Awaitable[str]] | None = None

    @property
    def redact(self) -> Callable[[str], str]:
        return redaction(self.secrets, self.settings)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of `ToolDef.prepare`: data for the `tool.started` event, and a value for `run`."""

    started: Data = field(default_factory=dict)
    value: Any = None


class ToolArguments(msgspec.Struct, omit_defaults=True):
    """The arguments of a tool; the model is given the JSON Schema of its fields. None is the default of what need not be
    given, and never sent."""

    def as_json(self) -> JsonObject:
        """The arguments without those at their defaults."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}


def object_schema(properties: JsonObject, *required: str) -> JsonObject:
    """The JSON Schema of an object with these properties and no others."""
    schema: JsonObject = {"type": "object", "properties": properties}
    return {**schema, **({"required": list(required)} if required else {}), "additionalProperties": False}


def struct_schema(struct: type[msgspec.Struct]) -> JsonObject:
    hints = get_type_hints(struct, include_extras=True)
    required = [field.name for field in msgspec.structs.fields(struct) if field.required]
    return object_schema({name: _type_schema(hint) for name, hint in hints.items()}, *required)


def _type_schema(hint: Any) -> JsonObject:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"type": "string", "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _type_schema(inner[0])}
    if origin in (Union, UnionType):
        return _type_schema(inner[0])
    if metadata := getattr(hint, "__metadata__", ()):
        schema, meta = _type_schema(inner[0]), metadata[0]
        unit = "Items" if schema["type"] == "array" else "Length"
        keywords = {"min_length": f"min{unit}", "max_length": f"max{unit}", "description": "description", **_BOUNDS}
        bounds = {keyword: getattr(meta, name) for name, keyword in keywords.items()}
        return schema | {keyword: bound for keyword, bound in bounds.items() if bound is not None}
    return {"type": _TYPES[hint]} if hint in _TYPES else struct_schema(hint)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ToolDef:
    """A tool, with its `arguments` or else their JSON Schema. `run` is a coroutine function, or a blocking function
    that is run in a thread. `prepare` comes before the `tool.started` event: guards, approvals, and what the event is
    to hold. `reconcile` finds out what became of an interrupted call, given its `tool.started`. Answers of a `foreign`
    tool come from outside and are framed as such. A `resumable` call is left open by a shutdown after which its run is
    resumed."""

    name: str
    description: str
    toolset: str
    arguments: type[ToolArguments] | None = None
    parameters: JsonObject = field(default_factory=dict)
    run: Callable[[ToolContext, Args], Answer | Awaitable[Answer]]
    effect: Effect | Callable[[Args], Effect] = "effect"
    scope: Callable[[Args], frozenset[str]] = lambda _: frozenset({"*"})
    timeout_s: float | None = TOOL_TIMEOUT_S
    available: Callable[[Settings], str | None] = lambda settings: None
    preview: Callable[[Args], str] = lambda args: json.dumps(msgspec.to_builtins(args), ensure_ascii=False)
    alone: bool = False
    foreign: bool = False
    resumable: bool = False
    prepare: Callable[[ToolContext, Args], Prepared | Awaitable[Prepared]] | None = None
    reconcile: Callable[[ToolContext, Args, Data], Reconciled | Awaitable[Reconciled]] | None = None

    def __post_init__(self) -> None:
        if self.arguments is not None:
            object.__setattr__(self, "parameters", struct_schema(self.arguments))

    def decode(self, args: JsonObject) -> Args:
        return args if self.arguments is None else msgspec.convert(args, self.arguments)

    def effect_of(self, args: Args) -> Effect:
        return self.effect if isinstance(self.effect, str) else self.effect(args)

    def scope_of(self, args: Args) -> frozenset[str]:
        return frozenset({"*"}) if self.alone else self.scope(args)


class Registry:
    def __init__(self, tools: Iterable[ToolDef] = ()) -> None:
        self._tools: dict[str, ToolDef] = {}
        self._offered: dict[tuple[frozenset[str], Settings], dict[str, ToolDef]] = {}
        for tool in tools:
            self.add(tool)

    def add(self, tool: ToolDef) -> None:
        if tool.name in self._tools:
            raise ValueError(f"A tool called {tool.name} is registered already.")
        self._tools[tool.name] = tool
        self._offered.clear()

    def get(self, name: str) -> ToolDef | None:
        return self._tools.get(name)

    def all(self) -> list[ToolDef]:
        return sorted(self._tools.values(), key=lambda tool: tool.name)

    def offered(self, toolsets: Iterable[str], settings: Settings) -> dict[str, ToolDef]:
        """The tools of these sets that are available, by name. Settings are replaced when they change, never modified."""
        key = frozenset(toolsets), settings
        if (tools := self._offered.get(key)) is None:
            if len(self._offered) >= OFFERED_TOOLS_MAX:
                self._offered.clear()
            tools = {t.name: t for t in self.all() if t.toolset in key[0] and t.available(settings) is None}
            self._offered[key] = tools
        return tools


def redaction(secrets: Secrets, settings: Settings) -> Callable[[str], str]:
    return secrets.redact if settings.security.redact_secrets else secrets.mask


def render(answer: Data) -> str:
    """An answer as JSON text. Anything but an object is a defect of the tool."""
    if not isinstance(answer, dict):
        raise TypeError(f"a tool answers with an object, not with {type(answer).__name__}")
    return json.dumps(answer, ensure_ascii=False)
