"""What one turn carries with it: its services, its route, its conversation, and what it has used so far."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hermes.agent.compress import size_of
from hermes.agent.model_lists import ModelLists
from hermes.core.limits import LARGE_PROMPT_TOKENS, STALE_LARGE_S, STALE_LOCAL_S
from hermes.core.stream_parts import Usage
from hermes.core.threads import Threads
from hermes.core.tokens import estimate
from hermes.http_client.client import HttpClient, Transport
from hermes.http_client.exchange import Timeouts
from hermes.providers.base import Capabilities, Credential, Message, Prompt, Provider, Route, ToolSchema
from hermes.providers.registry import capabilities_of, is_private, provider_for
from hermes.runs.engine import LiveRun
from hermes.store.base import Row
from hermes.tools.images import unseen
from hermes.tools.registry import Registry, ToolDef
from hermes.tools.session_state import SessionStates

if TYPE_CHECKING:
    from hermes.agent.content import Arrived
    from hermes.agent.media import MediaExporter
    from hermes.core.burst_cache import BurstCache
    from hermes.core.home import Home
    from hermes.settings.config import Settings
    from hermes.tools.mcp import Servers
    from hermes.tools.resources import ProcessResources

COUNTS = (
    "input_tokens",
    "output_tokens",
    "total_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "reasoning_tokens",
)


class RouteHealth:
    """What this process has found out about routes and keys: options they refuse, and when they may be asked again."""

    def __init__(self) -> None:
        self._dropped: dict[tuple[str, ...], set[str]] = {}
        self._rests: dict[object, float] = {}

    def dropped(self, route: Route) -> frozenset[str]:
        return frozenset(self._dropped.get(route.key, ()))

    def drop(self, route: Route, option: str) -> None:
        self._dropped.setdefault(route.key, set()).add(option)

    def rest(self, thing: object, seconds: float) -> None:
        self._rests[thing] = time.monotonic() + seconds

    def is_cooling_down(self, thing: object) -> bool:
        return self._rests.get(thing, 0.0) > time.monotonic()


@dataclass(frozen=True, slots=True)
class Services:
    """What belongs to the process and serves every run. `carrier` takes requests to where a route leads; `more_room`
    has a model of this machine take less of its memory."""

    home: Home
    settings: Callable[[], tuple[Settings, str | None]]
    http: HttpClient
    carrier: Callable[[Route, Callable[[str, str], None]], Transport]
    more_room: Callable[[], None]
    lists: ModelLists
    registry: Callable[[], Registry]
    threads: Threads
    files: Threads
    background: Callable[[Coroutine[Any, Any, None]], None]
    outside: ProcessResources
    mcp: Servers
    lately: BurstCache
    learnt: RouteHealth = field(default_factory=RouteHealth)
    desks: SessionStates = field(default_factory=SessionStates)
    jitter: Callable[[], float] = random.random

    def forget(self, session_ids: Collection[str]) -> None:
        """Let go of what the process has of sessions that are gone: their state, and their background processes."""
        self.desks.drop(session_ids)
        self.outside.processes.end(session_ids)


@dataclass(slots=True)
class Totals:
    """Tokens of a turn, over all its model calls."""

    calls: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    cost_usd: float | None = None

    def add(self, usage: dict[str, Any]) -> None:
        """One more call, or all those of a child."""
        self.calls += usage.get("calls", 1)
        for name in COUNTS:
            self.counts[name] += usage.get(name) or 0
        if usage.get("cost_usd") is not None:
            self.cost_usd = (self.cost_usd or 0.0) + usage["cost_usd"]

    def as_dict(self) -> dict[str, Any]:
        return {**self.counts, "cost_usd": self.cost_usd}


@dataclass(slots=True)
class Turn:
    """One turn at work. `given` is what a caller brought that has its own history. `begun` is the beginning of the
    message that the model goes on with, which is not among the messages until then."""

    live: LiveRun
    services: Services
    settings: Settings
    routes: list[Route]
    messages: list[Message]
    history_length: int = 0
    stored: bool = False
    given: Arrived | None = None
    user_row: Row | None = None
    user_message: Message | None = None
    message_id: str = ""
    said: Row | None = None
    begun: str = ""
    media: MediaExporter | None = None
    system: str = ""
    instructions: str = ""
    tools: dict[str, ToolDef] = field(default_factory=dict)
    client_tools: dict[str, ToolSchema] = field(default_factory=dict)
    schemas: tuple[ToolSchema, ...] = ()
    schemas_tokens: int = 0
    reasoning: Mapping[str, Any] | None = None
    at: int = 0
    stream: bool = True
    with_opaque: bool = True
    max_output: int | None = None
    nudges: list[str] = field(default_factory=list)
    options_told: set[str] = field(default_factory=set)
    totals: Totals = field(default_factory=Totals)
    counted_tokens: int = 0
    counted_messages: int = 0
    sized: list[Message] | None = None
    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def route(self) -> Route:
        return self.routes[self.at]

    @property
    def provider(self) -> Provider:
        return provider_for(self.route.api_mode)

    @property
    def capabilities(self) -> Capabilities:
        return capabilities_of(self.route)

    @property
    def window(self) -> int:
        return self.window_of(self.route)

    @staticmethod
    def window_of(route: Route) -> int:
        return route.window_tokens or capabilities_of(route).window

    @property
    def steps_max(self) -> int:
        return self.live.spec.max_iterations or int(self.settings.get("agent.max_turns"))

    @property
    def own_limit(self) -> bool:
        return self.live.spec.max_output_tokens is not None

    @property
    def wants_json(self) -> bool:
        return (self.live.spec.response_format or {}).get("type") in ("json_object", "json_schema")

    def equip(self, tools: dict[str, ToolDef]) -> None:
        """The server's tools for this turn; a client's tool hides a server's of the same name."""
        self.tools = tools
        own = tuple(tools.values())
        if not self.client_tools:
            self.schemas, self.schemas_tokens = _all_shown(own)
            return
        shown = [_shown(tool) for tool in own if tool.name not in self.client_tools]
        shown += ((schema, _tokens(schema)) for schema in self.client_tools.values())
        self.schemas, self.schemas_tokens = _in_order(shown)

    def prompt(self, *, tools: bool = True, tail: list[Message] | None = None, prefill: str = "") -> Prompt:
        spec = self.live.spec
        messages = self.messages if self.with_opaque else [_without_opaque(m) for m in self.messages]
        messages = messages if self.capabilities.images else unseen(messages)
        first = not any(m.get("role") == "assistant" for m in self.messages[self.history_length :])
        offered = self.schemas if tools and spec.tool_choice != "none" and self.capabilities.tools else ()
        choice = spec.tool_choice
        if offered and first and choice not in (None, "auto", "none"):
            offered = tuple(schema for schema in offered if schema.name in self.client_tools)
        else:
            choice = None
        limit = spec.max_output_tokens or self.max_output or self.route.max_output_tokens
        return Prompt(
            system=[text for text in (self.system, self.instructions) if text],
            messages=[*messages, *(tail or ())],
            tools=offered,
            sampling=dict(spec.sampling),
            reasoning=dict(self.reasoning) if self.reasoning else None,
            tool_choice=choice if choice is None or isinstance(choice, str) else dict(choice),
            response_format=dict(spec.response_format) if spec.response_format else None,
            max_output=limit,
            prefill=prefill,
            cache_ttl=self.settings.get("prompt_caching.cache_ttl"),
            stream=self.stream,
            dropped=self.services.learnt.dropped(self.route),
        )

    def take_in(self, row: Row) -> None:
        """Put what the model has said behind the other messages, with what it went on from."""
        message = row.as_message()
        if self.begun:
            message["content"] = f"{self.begun}{message['content'] or ''}"
            self.begun = ""
        self.messages.append(message)

    def fixed_tokens(self) -> int:
        """What goes along with the messages: prompt and schemas."""
        return estimate(self.system) + estimate(self.instructions) + self.schemas_tokens

    def prompt_tokens(self) -> int:
        """The provider's last count plus an estimate of what was added, or an estimate of all."""
        if self.counted_tokens:
            return self.counted_tokens + self._size(self.counted_messages)
        return self.fixed_tokens() + self._size(0)

    async def aside(self, function: Callable[[], Any]) -> Any:
        """The result of a function that goes through the messages, of which there may be very many."""
        return await self.services.files.call_for(len(self.messages), function)

    def _size(self, start: int) -> int:
        """What the messages from `start` on take. A list of messages only grows at its end, or is replaced by another:
        each message is estimated once."""
        if self.sized is not self.messages:
            self.sized, self.sizes = self.messages, {}
        end, tokens = self.sizes.get(start, (start, 0))
        if end < len(self.messages):
            tokens += size_of(self.messages[end:])
            self.sizes[start] = len(self.messages), tokens
        return tokens

    def timeouts(self) -> Timeouts:
        """How long the present route may take, in all and in silence."""
        route = self.route
        stale = route.stale_timeout_s
        if stale is None and is_private(route.base_url):
            stale = STALE_LOCAL_S
        if stale is None:
            stale = _seconds(self.settings, "HERMES_STREAM_STALE_TIMEOUT", 180.0)
            if self.prompt_tokens() > LARGE_PROMPT_TOKENS:
                stale = max(stale, STALE_LARGE_S)
        return Timeouts(route.request_timeout_s or _seconds(self.settings, "HERMES_API_TIMEOUT", 1800.0), stale)

    def credential(self) -> Credential | None:
        """The first key of the present route that is not resting."""
        usable = [c for c in self.route.credentials if c and not self.services.learnt.is_cooling_down(c)]
        return next(iter(usable or [c for c in self.route.credentials if c]), None)

    def usage_event(self, usage: Usage | None, text: str, task: str = "") -> dict[str, Any]:
        """The fields of a `usage` event: the provider's counts, or an estimate where it gave none."""
        known = usage or Usage()
        data: dict[str, Any] = {name: getattr(known, name) for name in COUNTS} | {"cost_usd": known.cost_usd}
        measured = known.input_tokens is not None or known.output_tokens is not None
        if data["input_tokens"] is None:
            data["input_tokens"] = 0 if measured else self.prompt_tokens()
        if data["output_tokens"] is None:
            data["output_tokens"] = 0 if measured else estimate(text)
        if data["total_tokens"] is None:
            data["total_tokens"] = data["input_tokens"] + data["output_tokens"]
        for name in COUNTS:
            data[name] = data[name] or 0
        who = {"model": self.route.model, "provider": self.route.provider, "task": task}
        return {**data, "measured": "provider" if measured else "estimate", **who}


@lru_cache(maxsize=4096)
def _shown(tool: ToolDef) -> tuple[ToolSchema, int]:
    """A tool as the model sees it, and what that takes of its window."""
    schema = ToolSchema(tool.name, tool.description, tool.parameters)
    return schema, _tokens(schema)


@lru_cache(maxsize=256)
def _all_shown(tools: tuple[ToolDef, ...]) -> tuple[tuple[ToolSchema, ...], int]:
    return _in_order([_shown(tool) for tool in tools])


def _in_order(shown: list[tuple[ToolSchema, int]]) -> tuple[tuple[ToolSchema, ...], int]:
    schemas = sorted((schema for schema, _ in shown), key=lambda schema: schema.name)
    return tuple(schemas), sum(tokens for _, tokens in shown)


def _tokens(schema: ToolSchema) -> int:
    return estimate({"n": schema.name, "d": schema.full_description, "p": schema.parameters})


def _without_opaque(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "opaque"}


def _seconds(settings: Settings, name: str, default: float) -> float:
    try:
        value = float(settings.variable(name) or "")
    except ValueError:
        return default
    return value if value > 0 else default
