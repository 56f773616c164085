"""The state of one turn: services, route, conversation, and usage so far."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from hermes.agent.compress import size_of
from hermes.agent.model_lists import ModelLists
from hermes.core.json_types import JsonMapping, JsonObject, Message
from hermes.core.limits import LARGE_PROMPT_TOKENS, MESSAGES_AT_ONCE_MAX, STALE_LARGE_S, STALE_LOCAL_S
from hermes.core.stream_parts import Usage
from hermes.core.threads import Threads
from hermes.core.tokens import estimate
from hermes.http_client.client import HttpClient, Transport
from hermes.http_client.exchange import Timeouts
from hermes.providers.base import Credential, Prompt, Provider, Route, ToolSchema, ToolSchemas
from hermes.providers.registry import capabilities_of, is_private, provider_for
from hermes.providers.table import Capabilities
from hermes.runs.engine import LiveRun
from hermes.store.base import Row
from hermes.tools.framework.registry import Registry, ToolDef
from hermes.tools.framework.session_state import SessionStates
from hermes.tools.images import hide_tool_images

if TYPE_CHECKING:
    from hermes.agent.content import IncomingMessages
    from hermes.agent.media import MediaExporter
    from hermes.core.burst_cache import BurstCache
    from hermes.core.home import Home
    from hermes.settings.config import Settings
    from hermes.tools.framework.resources import ProcessResources
    from hermes.tools.mcp import Servers

R = TypeVar("R")
COUNTS = tuple(f"{kind}_tokens" for kind in ("input", "output", "total", "cache_read", "cache_write", "reasoning"))


class RouteHealth:
    """What this process knows of routes and keys: options they refuse, and when they may be used again."""

    def __init__(self) -> None:
        self._dropped: dict[tuple[str, ...], set[str]] = {}
        self._rests: dict[object, float] = {}

    def dropped(self, route: Route) -> frozenset[str]:
        return frozenset(self._dropped.get(route.key, ()))

    def drop(self, route: Route, option: str) -> None:
        self._dropped.setdefault(route.key, set()).add(option)

    def cool_down(self, target: object, seconds: float) -> None:
        self._rests[target] = time.monotonic() + seconds

    def is_cooling_down(self, target: object) -> bool:
        return bool(self._rests) and self._rests.get(target, 0.0) > time.monotonic()


@dataclass(frozen=True, slots=True)
class Services:
    """Process-wide services of every run. `transport_for` a route may send notices (code, message); `free_memory` asks
    a local model to use less memory."""

    home: Home
    settings: Callable[[], tuple[Settings, str | None]]
    http: HttpClient
    transport_for: Callable[[Route, Callable[[str, str], None]], Transport]
    free_memory: Callable[[], None]
    model_lists: ModelLists
    registry: Callable[[], Registry]
    threads: Threads
    files: Threads
    background: Callable[[Coroutine[object, object, None]], None]
    outside: ProcessResources
    mcp: Servers
    burst_cache: BurstCache
    route_health: RouteHealth = field(default_factory=RouteHealth)
    session_states: SessionStates = field(default_factory=SessionStates)
    jitter: Callable[[], float] = random.random

    def forget(self, session_ids: Collection[str]) -> None:
        self.session_states.drop(session_ids)
        self.outside.processes.end(session_ids)


class Totals(msgspec.Struct):
    """Tokens of a turn, over all its model calls."""

    calls: int = 0
    counts: dict[str, int] = msgspec.field(default_factory=dict.fromkeys(COUNTS, 0).copy)
    cost_usd: float | None = None

    def add(self, usage: JsonObject) -> None:
        self.calls += usage.get("calls", 1)
        for name in COUNTS:
            self.counts[name] += usage.get(name) or 0
        if usage.get("cost_usd") is not None:
            self.cost_usd = (self.cost_usd or 0.0) + usage["cost_usd"]

    def as_dict(self) -> JsonObject:
        return {**self.counts, "cost_usd": self.cost_usd}


@dataclass(slots=True)
class Turn:
    """One active turn. `incoming` is the history that the client sent. `prefix` is the beginning of the message that
    the model continues; it is not among the messages until then."""

    live: LiveRun
    services: Services
    settings: Settings
    routes: list[Route]
    messages: list[Message]
    history_length: int = 0
    stored: bool = False
    incoming: IncomingMessages | None = None
    user_row: Row | None = None
    user_message: Message | None = None
    message_id: str = ""
    last_answer: Row | None = None
    prefix: str = ""
    media: MediaExporter | None = None
    system: str = ""
    instructions: str = ""
    tools: dict[str, ToolDef] = field(default_factory=dict)
    client_tools: dict[str, ToolSchema] = field(default_factory=dict)
    schemas: ToolSchemas = field(default_factory=ToolSchemas)
    # What is sent with the messages: prompt, instructions and schemas.
    fixed_tokens: int = 0
    reasoning: JsonMapping | None = None
    stream: bool = True
    with_opaque: bool = True
    max_output: int | None = None
    nudges: list[str] = field(default_factory=list)
    ignored_options: set[str] = field(default_factory=set)
    totals: Totals = field(default_factory=Totals)
    counted_tokens: int = 0
    counted_messages: int = 0
    # Derived from the current route.
    route_index: int = field(init=False)
    route: Route = field(init=False)
    capabilities: Capabilities = field(init=False)
    window: int = field(init=False)
    _sized: list[Message] | None = None
    _sizes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        health = self.services.route_health
        self.use_route(1 if len(self.routes) > 1 and health.is_cooling_down(self.routes[0].key) else 0)

    def use_route(self, index: int) -> None:
        self.route_index, self.route = index, self.routes[index]
        self.capabilities = capabilities_of(self.route)
        self.window = self.route.window_tokens or self.capabilities.window

    @property
    def provider(self) -> Provider:
        return provider_for(self.route.api_mode)

    @property
    def steps_max(self) -> int:
        return self.live.spec.max_iterations or self.settings.agent.max_turns

    @property
    def own_limit(self) -> bool:
        return self.live.spec.max_output_tokens is not None

    @property
    def wants_json(self) -> bool:
        response_format = self.live.spec.response_format
        return response_format is not None and response_format.get("type") in ("json_object", "json_schema")

    def offer_tools(self, tools: dict[str, ToolDef]) -> None:
        """Set the server's tools for this turn; a client's tool hides a server's of the same name."""
        self.tools = tools
        if not self.client_tools:
            self.schemas = _schemas_of(tuple(tools.values()))
            return
        server_schemas = _schemas_of(tuple(tool for tool in tools.values() if tool.name not in self.client_tools))
        self.schemas = ToolSchemas(sorted((*server_schemas, *self.client_tools.values()), key=attrgetter("name")))

    def prompt(self, *, tools: bool = True, tail: Sequence[Message] = (), prefill: str = "") -> Prompt:
        spec, messages = self.live.spec, self.messages
        if not self.with_opaque:
            messages = [{name: value for name, value in m.items() if name != "opaque"} for m in messages]
        if not self.capabilities.images:
            messages = hide_tool_images(messages)
        choice = spec.tool_choice
        offered = self.schemas if tools and choice != "none" and self.capabilities.tools else ToolSchemas()
        is_forced = bool(offered) and choice not in (None, "auto", "none")
        # Only the first answer of the turn is bound to the client's choice, and only to the client's own tools.
        if is_forced and not any(m.get("role") == "assistant" for m in self.messages[self.history_length :]):
            offered = ToolSchemas(schema for schema in offered if schema.name in self.client_tools)
        else:
            choice = None
        return Prompt(
            system=[self.system, self.instructions] if self.instructions else [self.system],
            messages=[*messages, *tail] if tail else messages,
            tools=offered,
            sampling={**self.route.sampling, **spec.sampling} if self.route.sampling else spec.sampling,
            reasoning=self.reasoning or None,
            tool_choice=choice,
            response_format=spec.response_format or None,
            max_output=spec.max_output_tokens or self.max_output or self.route.max_output_tokens,
            prefill=prefill,
            cache_ttl=self.settings.prompt_caching.cache_ttl,
            stream=self.stream,
            dropped=self.services.route_health.dropped(self.route),
        )

    def add_answer(self, row: Row) -> None:
        message = row.as_message()
        if self.prefix:
            message["content"] = f"{self.prefix}{message['content'] or ''}"
            self.prefix = ""
        self.messages.append(message)

    def set_system(self, system: str) -> None:
        self.system = system
        self.fixed_tokens = estimate(system) + estimate(self.instructions) + self.schemas.tokens

    def prompt_tokens(self) -> int:
        """The provider's last count plus an estimate of what was added, or an estimate of everything. Each message is
        estimated once: the list only grows at its end, or is replaced by another."""
        start = self.counted_messages if self.counted_tokens else 0
        if self._sized is not self.messages:
            self._sized, self._sizes = self.messages, {}
        end, tokens = self._sizes.get(start, (start, 0))
        if end < len(self.messages):
            tokens += size_of(self.messages[end:])
            self._sizes[start] = len(self.messages), tokens
        return tokens + (self.counted_tokens or self.fixed_tokens)

    async def scan(self, function: Callable[[], R]) -> R:
        """Run a function over the messages, in a thread if there are very many."""
        if len(self.messages) <= MESSAGES_AT_ONCE_MAX:
            return function()
        return cast("R", await self.services.files.call(function))

    def timeouts(self) -> Timeouts:
        route = self.route
        stale = route.stale_timeout_s
        if stale is None and is_private(route.base_url):
            stale = STALE_LOCAL_S
        if stale is None:
            stale = self._seconds("HERMES_STREAM_STALE_TIMEOUT", 180.0)
            if self.prompt_tokens() > LARGE_PROMPT_TOKENS:
                stale = max(stale, STALE_LARGE_S)
        return Timeouts(route.request_timeout_s or self._seconds("HERMES_API_TIMEOUT", 1800.0), stale)

    def _seconds(self, variable: str, default: float) -> float:
        try:
            value = float(self.settings.variable(variable) or "")
        except ValueError:
            return default
        return value if value > 0 else default

    def credential(self) -> Credential | None:
        """The first key of the current route that is not cooling down, else the first."""
        first: Credential | None = None
        for credential in self.route.credentials:
            if credential and not self.services.route_health.is_cooling_down(credential):
                return credential
            first = first or credential
        return first or None

    def usage_event(self, usage: Usage | None, text: str, task: str = "") -> JsonObject:
        """The fields of a `usage` event: the provider's counts, or an estimate."""
        usage = usage or Usage()
        input_tokens, output_tokens = usage.input_tokens, usage.output_tokens
        measured = input_tokens is not None or output_tokens is not None
        input_tokens = (0 if measured else self.prompt_tokens()) if input_tokens is None else input_tokens
        output_tokens = (0 if measured else estimate(text)) if output_tokens is None else output_tokens
        return {
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "total_tokens": input_tokens + output_tokens if usage.total_tokens is None else usage.total_tokens,
            "cache_read_tokens": usage.cache_read_tokens or 0,
            "cache_write_tokens": usage.cache_write_tokens or 0,
            "reasoning_tokens": usage.reasoning_tokens or 0,
            "cost_usd": usage.cost_usd,
            "measured": "provider" if measured else "estimate",
            "model": self.route.model,
            "provider": self.route.provider,
            "task": task,
        }


@lru_cache(maxsize=256)
def _schemas_of(tools: tuple[ToolDef, ...]) -> ToolSchemas:
    schemas = (ToolSchema(tool.name, tool.description, tool.parameters) for tool in tools)
    return ToolSchemas(sorted(schemas, key=attrgetter("name")))
