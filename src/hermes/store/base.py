"""The interfaces of the stores, as the rest of the house sees them. All methods are coroutines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hermes.runs.events import Event, RunState
from hermes.runs.spec import RunSpec


class StoreError(Exception):
    """Something is wrong with the store."""


class LeaseLost(StoreError):
    """A write under a token that is no longer the current one: somebody else holds the session now."""


@dataclass(slots=True)
class Row:
    """A message of a transcript. The store sets `id`, and names it in the events of `told`, each in the given field."""

    session_id: str
    role: str
    content: str | list[dict[str, Any]] | None
    run_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    finish_reason: str | None = None
    reasoning: str | None = None
    opaque: dict[str, Any] | None = None
    api_content: str | list[dict[str, Any]] | None = None
    synthetic: bool = False
    active: bool = True
    compacted: bool = False
    timestamp: float = field(default_factory=time.time)
    id: int | None = None
    told: tuple[tuple[Event, str], ...] = ()

    def as_message(self) -> dict[str, Any]:
        """The canonical message that goes to a model."""
        content = self.content if self.api_content is None else self.api_content
        message: dict[str, Any] = {"role": self.role, "content": content}
        for name in ("tool_calls", "tool_call_id", "tool_name", "opaque"):
            if value := getattr(self, name):
                message[name] = value
        return message


@dataclass(slots=True)
class Partial:
    """The open end of a stream: text that is delivered and not yet a row."""

    stream_id: str
    kind: str
    step: int
    text: str
    cuts: str
    last_seq: int
    form: str = ""


@dataclass(slots=True)
class SessionRecord:
    """A stored conversation."""

    id: str
    source: str
    owner: str = "default"
    kind: str = "root"
    session_key: str | None = None
    parent_session_id: str | None = None
    title: str | None = None
    model: str | None = None
    instructions: str | None = None
    system_prompt: str | None = None
    prompt_digest: str | None = None
    started_at: float = field(default_factory=time.time)
    last_active: float = field(default_factory=time.time)
    counts: dict[str, int] = field(default_factory=dict)
    usage_by_model: dict[tuple[str, str, str], dict[str, int]] = field(default_factory=dict)


@dataclass(slots=True)
class RunRecord:
    """A run as it is stored: its spec, and the fold of its log."""

    spec: RunSpec
    state: RunState
    created_at: float


class SessionStore(Protocol):
    """Conversations."""

    async def get(self, session_id: str) -> SessionRecord | None: ...

    async def messages(self, session_id: str) -> list[Row]:
        """The live rows in order; results stand in the order of their calls."""
        ...

    async def update(self, session_id: str, **fields: Any) -> None: ...

    async def set_auto_title_if_empty(self, session_id: str, title: str) -> None: ...

    async def add_usage(self, session_id: str, usage: Mapping[str, Any]) -> None:
        """Count one model call, by the fields of a `usage` event."""
        ...


class RunStore(Protocol):
    """Runs and their logs."""

    async def create(self, spec: RunSpec) -> None: ...

    async def append(
        self,
        run_id: str,
        token: int | None,
        events: Sequence[Event],
        rows: Sequence[Row] = (),
        *,
        session: SessionRecord | None = None,
        partials: Sequence[Partial] = (),
        closes: Sequence[str] = (),
        replaces: bool = False,
        annotate: tuple[int, str] | None = None,
        sync: bool = False,
    ) -> None:
        """One transaction: the events and the rows they announce.

        `session` is made, or reopened and its empty fields filled. `partials` are written, those in `closes` removed.
        With `replaces` the session's live rows become archived ones before `rows` follow. `annotate` gives a row words
        that stand for it before the model. `sync` asks for a disk sync.
        """
        ...

    async def put_partials(self, run_id: str, token: int | None, partials: Sequence[Partial]) -> None: ...

    async def read(self, run_id: str, after: int, limit: int) -> list[Event]:
        """Events later than `after`, deltas among them, in order; at least one if there is one."""
        ...

    async def row(self, run_id: str, row_id: int) -> Row | None:
        """A message that the run's log announces."""
        ...

    async def get(self, run_id: str) -> RunRecord | None: ...

    async def list(
        self,
        *,
        owner: str | None = None,
        session_id: str | None = None,
        status: str | None = None,
        kind: str | None = None,
    ) -> list[RunRecord]: ...

    async def discard(self, run_id: str) -> None:
        """Forget a run that was not to be kept."""
        ...


class LeaseStore(Protocol):
    """Who may write to what, for how long."""

    async def acquire(self, name: str, holder: str, ttl_s: float) -> int | None: ...

    async def renew(self, name: str, token: int, ttl_s: float) -> bool: ...

    async def release(self, name: str, token: int) -> None: ...

    async def holder(self, name: str) -> str | None: ...


class Store(Protocol):
    """Everything that is kept, together."""

    @property
    def sessions(self) -> SessionStore: ...

    @property
    def runs(self) -> RunStore: ...

    @property
    def leases(self) -> LeaseStore: ...
