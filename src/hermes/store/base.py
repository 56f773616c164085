"""What the stores share with the rest of the house: their errors, the things they keep, and the interfaces."""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hermes.core.errors import HermesError
from hermes.core.events import Event, RunState
from hermes.core.spec import Control, RunSpec


class StoreError(HermesError):
    """Something is wrong with the store; `hint` says what to do about it."""

    exit_code = 69


class StoreBusy(StoreError):
    """Another process held the store for too long. Trying again may help."""

    exit_code = 4


class StoreTimeout(StoreBusy):
    """A search or another long read had no answer in time, or did not get its turn."""


class StoreFull(StoreError):
    """There is no room left on the disk."""


class StoreReadOnly(StoreError):
    """The store's file or folder cannot be written to."""


class StoreTooNew(StoreError):
    """The store was written by a newer Hermes."""


class StoreDamaged(StoreError):
    """The store's file is not what it should be. Nothing is repaired without being asked for."""

    exit_code = 74


class LeaseLost(StoreError):
    """A write under a token that is no longer the current one: somebody else holds the session now."""


class EventsExpired(HermesError):
    """The run's log was kept as long as it had to be, and is gone. Its status and answer are still there."""


class SessionExists(HermesError):
    """There is a session of that id already."""


class SessionNotFound(HermesError):
    """There is no session of that id for this owner. One of another owner answers exactly like an unknown one."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"There is no session {session_id!r}.")


class SessionBusy(HermesError):
    """The session was not free in time, too many wait for it already, or a turn of it is running."""

    exit_code = 4


@dataclass(slots=True)
class Row:
    """A message of a transcript. The store sets `id`, and names it in the events of `announced_in`, each in the given field.

    One that `continues` is the rest of the session's last message: that one is made longer, and this is kept for the log.
    """

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
    token_count: int | None = None
    model_only: bool = False
    position: int | None = None
    name: str | None = None
    digest: str | None = None
    id: int | None = None
    announced_in: tuple[tuple[Event, str], ...] = ()
    continues: bool = False

    def as_message(self) -> dict[str, Any]:
        """The canonical message that goes to a model."""
        content = self.content if self.api_content is None else self.api_content
        return self._message(content, "tool_calls", "tool_call_id", "tool_name", "opaque", "name")

    def as_given(self) -> dict[str, Any]:
        """The message as whoever said it would send it again."""
        return self._message(self.content, "tool_calls", "tool_call_id", "name")

    def _message(self, content: Any, *names: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": content}
        for name in names:
            if value := getattr(self, name):
                message[name] = value
        return message


@dataclass(slots=True)
class Partial:
    """The open end of a stream: text that is delivered and not yet a row, from `offset` on."""

    stream_id: str
    kind: str
    step: int
    text: str
    cuts: str
    last_seq: int
    form: str = ""
    offset: int = 0


@dataclass(slots=True)
class Tail:
    """The end of a stream as a journal holds it: deltas as number, time in milliseconds and text, from `offset` on."""

    stream_id: str
    kind: str
    step: int
    form: str
    offset: int
    deltas: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass(slots=True)
class RunRecord:
    """A run as it is stored: its spec, and the fold of its log."""

    spec: RunSpec
    state: RunState
    created_at: float
    updated_at: float = 0.0
    resumes: int = 0
    log_expired: bool = False
    holder: str = ""


class SessionStore(Protocol):
    """Conversations, as the turn sees them; `SessionDB` has many more methods."""

    async def get_session(self, session_id: str) -> dict[str, Any] | None: ...

    async def get_messages_as_conversation(self, session_id: str) -> list[dict[str, Any]]:
        """The live rows in order, as they go to a model; results stand in the order of their calls."""
        ...

    async def update_session(self, session_id: str, **fields: Any) -> None: ...

    async def add_file(self, session_id: str, name: str, **facts: Any) -> str:
        """Note a file that was received or delivered."""
        ...

    async def put_pending_calls(
        self, session_id: str, run_id: str | None, call_ids: Sequence[str], owner: str = "default"
    ) -> None:
        """Calls that the client is to answer."""
        ...

    async def put_compaction(
        self, session_id: str, owner: str, digest: str, first_kept: int, messages: Sequence[Mapping[str, Any]]
    ) -> None:
        """Remember what stands for messages of a client's own history: those up to this hash, but for the first few."""
        ...

    async def find_compaction(self, owner: str, digests: Sequence[str]) -> tuple[str, int, list[dict[str, Any]]] | None:
        """The last of these hashes for which a compaction is known, how many messages stay, and what follows them."""
        ...

    async def set_auto_title_if_empty(self, session_id: str, title: str) -> None: ...

    async def add_usage(
        self, session_id: str, usage: Mapping[str, Any], model: str, provider: str, task: str = ""
    ) -> None:
        """Count one model call."""
        ...


class RunStore(Protocol):
    """Runs and their logs."""

    async def create(self, spec: RunSpec) -> None: ...

    async def adopt(self, run_id: str, holder: str) -> bool:
        """Make a run that its process has left one's own. False: somebody else was quicker."""
        ...

    async def append(
        self,
        run_id: str,
        token: int | None,
        events: Sequence[Event],
        rows: Sequence[Row] = (),
        *,
        session: Mapping[str, Any] | None = None,
        partials: Sequence[Partial] = (),
        closes: Sequence[str] = (),
        replaces: Sequence[int | None] = (),
        annotate: tuple[int, str] | None = None,
        sync: bool = False,
        creates: RunSpec | None = None,
    ) -> None:
        """One transaction: the events and the rows they announce. A last event gives the session's lease back.

        `creates` is the run itself, where this is the first that is put on record of it.
        `session` is made, or reopened and its empty fields filled. `partials` are written, those in `closes` removed.
        With `replaces` the model sees `rows` and nothing else from here on; it tells for each which of the rows that it
        saw before, by its place, this is. `annotate` gives a row words that stand for it before the model. `sync` asks for a disk sync.
        """
        ...

    async def put_partials(self, run_id: str, token: int | None, partials: Sequence[Partial]) -> None: ...

    async def put_grown(self, grown: Sequence[tuple[str, int | None, Sequence[Partial]]]) -> None:
        """The same for several runs, each with its token; those that have lost their session are left out."""
        ...

    async def partials(self, run_id: str) -> list[Partial]:
        """The open ends of the run's streams."""
        ...

    async def absorb(self, tails: Mapping[str, Sequence[Tail]]) -> None:
        """Keep what a process that is gone has left of the open streams of its runs."""
        ...

    async def read(
        self,
        run_id: str,
        after: int,
        limit: int,
        *,
        streams: Sequence[Partial] | None = None,
        tails: Sequence[Tail] = (),
    ) -> list[Event]:
        """Events later than `after`, deltas among them, in order; at least one if there is one.

        `streams` are the open ones where they are known; otherwise what is stored of them is used, with the `tails`
        that a journal has.
        """
        ...

    async def durable(self, run_id: str) -> list[Event]:
        """All events that were committed as such, without deltas."""
        ...

    async def rows(self, run_id: str) -> list[Row]:
        """The messages of the run that are live, in order."""
        ...

    async def row(self, run_id: str, row_id: int) -> Row | None:
        """A message that the run's log announces."""
        ...

    async def get(self, run_id: str) -> RunRecord | None: ...

    async def carrier(self, run_id: str) -> str | None:
        """The process that carries on a run; None where the run has an end, or waits for the next server."""
        ...

    async def list(
        self,
        *,
        owner: str | None = None,
        session_id: str | None = None,
        status: str | None = None,
        kind: str | None = None,
        limit: int | None = None,
        before: str | None = None,
    ) -> builtins.list[RunRecord]:
        """Runs, newest first; `before` is the id of the last one seen."""
        ...

    async def newest(self, session_id: str) -> str | None:
        """The id of the run that was begun last in a session."""
        ...

    async def unfinished(self, session_id: str | None = None) -> builtins.list[RunRecord]:
        """Runs without an end, oldest first."""
        ...

    async def discard(self, run_id: str) -> None:
        """Forget a run and, if it kept its rows under its own id, those too."""
        ...

    async def add_control(self, run_id: str, control: Control) -> bool:
        """Leave a control for whoever holds the run. False: it was left before."""
        ...

    async def controlled(self, run_ids: Sequence[str]) -> builtins.list[str]:
        """Which of these runs have controls that nobody has taken."""
        ...

    async def take_controls(self, run_id: str) -> builtins.list[Control]:
        """The controls that nobody has taken yet, oldest first; they are taken now."""
        ...


class LeaseStore(Protocol):
    """Who may write to what, for how long."""

    async def acquire(self, name: str, holder: str, ttl: float) -> int | None: ...

    async def renew(self, name: str, token: int, ttl: float) -> bool: ...

    async def release(self, name: str, token: int) -> None: ...

    async def holder(self, name: str) -> str | None: ...


@dataclass(slots=True)
class OpenedSession:
    """A session that a turn holds: the lease's token, runs that were begun in it and have no end, and the session. `said`
    is the conversation, once somebody has read it; of a session that was found by content, what the turn goes on from."""

    session_id: str
    token: int
    left: Sequence[RunRecord]
    session: Mapping[str, Any] | None
    said: list[dict[str, Any]] | None = None


class Store(Protocol):
    """What a run needs of all that is kept."""

    @property
    def sessions(self) -> SessionStore: ...

    @property
    def runs(self) -> RunStore: ...

    @property
    def leases(self) -> LeaseStore: ...

    def begin(self, spec: RunSpec, holder: str, ttl: float, *, bind: bool) -> asyncio.Future[OpenedSession | None]:
        """The lease on a turn's session, and what is to be known of that; None while somebody else has it.

        With `bind` it is the session that holds the spec's history, or one for it to begin in. A session of another
        owner raises `SessionNotFound`.
        """
        ...
