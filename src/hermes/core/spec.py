"""The RunSpec, frozen and stored with the run, and the controls that reach it later."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import msgspec

from hermes.core.ids import UNRECORDED, random_hex, scope_name
from hermes.core.json_types import JsonMapping, JsonObject

RunKind = Literal["chat", "response", "session", "run", "job", "cli", "subagent"]
Source = Literal["cli", "api_server", "cron", "subagent"]
OnDetach = Literal["cancel", "continue"]
ControlKind = Literal["interrupt", "cancel", "steer", "approve", "answer"]
Applied = Literal["applied", "not_active", "already_resolved", "unknown"]
Content = str | list[JsonObject]
_SETS = ("toolsets", "disabled_toolsets", "tool_policy", "allowed_models", "allowed_tools")


def new_run_id() -> str:
    """Starts with the time, so that runs of one time are stored together, and ends unguessable."""
    return f"run_{time.time_ns() // 1_000_000:012x}{random_hex(10)}"


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """Overrides of the model's route; None: as configured."""

    alias: str | None = None
    model: str | None = None
    provider: str | None = None
    base_url: str | None = None
    api_mode: str | None = None
    api_key: str | None = field(default=None, repr=False)
    extra_body: JsonMapping = field(default_factory=dict, repr=False)
    fallbacks: tuple[JsonMapping | str, ...] | None = field(default=None, repr=False)

    @property
    def name(self) -> str | None:
        return self.alias or (f"{self.provider}/{self.model}" if self.provider and self.model else None)


class RunSpec(msgspec.Struct, frozen=True):
    """One turn to be run.

    `compact`: no model turn; the conversation is summarized, with this focus. `count_only`: no model call; the result
    has the tokens of the first request. `verbatim`: the model gets `history` whatever the session holds. `continues`:
    there is no new message; the model continues its own last one. `toolsets_by_default`: nobody asked for these
    toolsets, so the session's own come first. `stateless`: nobody named the session, which is deleted after some days
    unless somebody does.

    `tool_policy` (toolsets) and `allowed_models` (names) are ceilings: whatever else the spec asks for stays within
    them, after a restart too. None is no ceiling.
    """

    user_message: Content
    session_id: str
    run_id: str = msgspec.field(default_factory=new_run_id)
    kind: RunKind = "run"
    source: Source = "api_server"
    owner: str = "default"
    session_key: str | None = None
    history: list[JsonObject] | None = None
    verbatim: bool = False
    continues: bool = False
    user_name: str | None = None
    instructions: str | None = None
    route: RouteChoice | None = None
    sampling: JsonMapping = msgspec.field(default_factory=dict)
    reasoning: JsonMapping | None = None
    # Whether its stream shows reasoning, where the same stream can be asked for again.
    shows_reasoning: bool = False
    response_format: JsonMapping | None = None
    max_output_tokens: int | None = None
    toolsets: frozenset[str] | None = None
    toolsets_by_default: bool = False
    disabled_toolsets: frozenset[str] = frozenset()
    tool_policy: frozenset[str] | None = None
    allowed_models: frozenset[str] | None = None
    client_tools: tuple[JsonMapping, ...] = ()
    allowed_tools: frozenset[str] | None = None
    results: tuple[JsonMapping, ...] = ()
    tool_choice: str | JsonMapping | None = None
    approvals: str | None = None
    answerable: bool = False
    max_iterations: int | None = None
    max_tool_calls: int | None = None
    on_detach: OnDetach = "continue"
    persist: bool = True
    stateless: bool = False
    compress: bool = True
    compact: str | None = None
    count_only: bool = False
    context_files: bool = True
    memory: bool = True
    deadline_seconds: float | None = None
    base_id: str | None = None
    response_id: str | None = None
    job_id: str | None = None
    parent: tuple[str, str] | None = None
    parent_session_id: str | None = None
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    workdir: str | None = None
    # A command that is run before the model is asked; the model is given its output.
    script: str | None = None

    @property
    def folder_id(self) -> str:
        """The id of the session's files. Where no record has the session's owner, each owner has another."""
        if self.persist:
            return self.session_id
        return f"{UNRECORDED}{scope_name(self.owner, self.session_id)}"

    def replace(self, **changes: Any) -> RunSpec:
        return msgspec.structs.replace(self, **changes)

    def within(self, toolsets: frozenset[str] | None, models: frozenset[str] | None) -> RunSpec:
        if toolsets is None and models is None:
            return self
        policy, allowed = narrowed(self.tool_policy, toolsets), narrowed(self.allowed_models, models)
        return self.replace(tool_policy=policy, allowed_models=allowed)

    def stored(self) -> JsonObject:
        """The spec as stored with the run, without credentials."""
        out = _set_fields(self, _DEFAULTS)
        if self.route is not None:
            out["route"] = _set_fields(self.route, _ROUTE_DEFAULTS)
        for name in _SETS:
            if name in out:
                out[name] = sorted(out[name])
        return out

    @classmethod
    def from_stored(cls, stored: JsonMapping) -> RunSpec:
        """Fields of a later version are ignored."""
        values = {name: value for name, value in stored.items() if name in cls.__struct_fields__}
        for name in _SETS:
            if values.get(name) is not None:
                values[name] = frozenset(values[name])
        if values.get("route") is not None:  # stored without any field where all have their defaults
            values["route"] = RouteChoice(**values["route"])
        if values.get("parent"):
            values["parent"] = tuple(values["parent"])
        for name in ("client_tools", "results"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)


def narrowed(first: frozenset[str] | None, second: frozenset[str] | None) -> frozenset[str] | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


# The fields that are stored, each with the value that need not be.
_DEFAULTS: JsonObject = {
    item.name: {} if item.default is msgspec.NODEFAULT else item.default for item in msgspec.structs.fields(RunSpec)
}
_ROUTE_DEFAULTS: JsonObject = {
    item.name: item.default for item in fields(RouteChoice) if item.name not in ("api_key", "extra_body", "fallbacks")
}


def _set_fields(record: object, defaults: JsonMapping) -> JsonObject:
    return {name: value for name, default in defaults.items() if (value := getattr(record, name)) != default}


@dataclass(frozen=True, slots=True)
class Control:
    """A request that reaches a run from outside. `credential` is the name of its key, if any."""

    control: ControlKind
    data: JsonMapping = field(default_factory=dict)
    by: str = "user"
    surface: str = ""
    credential: str = ""
    control_id: str = field(default_factory=lambda: f"ctl_{random_hex(8)}")
