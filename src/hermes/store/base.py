"""What the stores share with the other packages: errors, records and interfaces."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from hermes.core.errors import HermesError
from hermes.core.events import Event, RunState
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.spec import RunSpec


class StoreError(HermesError):
    """`hint` says what to do about it."""

    exit_code = 69


class StoreBusy(StoreError):
    """Another process held the store for too long; a retry may help."""

    exit_code = 4


class StoreTimeout(StoreBusy):
    """A search or another long read was not answered, or not started, in time."""


class StoreUnreachable(StoreBusy):
    """The database server does not answer; a retry may help."""

    exit_code = 69


class StoreRuleBroken(StoreError):
    """A change violates UNIQUE or FOREIGN KEY."""


class RunExists(StoreRuleBroken):
    """A run of that id is stored already: another process was quicker."""

    def __init__(self, where: str = "") -> None:
        super().__init__("A run of this number is on record already (UNIQUE).", where=where)


class NoPlace(StoreError):
    """The owner of a run has reached its limit of unfinished runs."""


class StoreFull(StoreError):
    """The disk is full."""


class StoreReadOnly(StoreError):
    """The store's file or folder cannot be written to."""


class StoreTooNew(StoreError):
    """The store was written by a newer version of Hermes."""


class StoreUnfinished(StoreError):
    """The store is the target of a migration that was interrupted."""

    exit_code = 78


class StoreDamaged(StoreError):
    """The store's file is damaged. It is repaired only on request."""

    exit_code = 74


class LeaseLost(StoreError):
    """The lease token of a write is no longer current: somebody else holds the session."""


class EventsExpired(HermesError):
    """The run's log was deleted after its retention time. Its status and answer are still stored."""


class SessionExists(HermesError):
    """A session of that id exists already."""


class SessionNotFound(HermesError):
    """The owner has no session of that id. A session of another owner is reported exactly like an unknown one."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"There is no session {session_id!r}.")


class SessionBusy(HermesError):
    """The session was not free in time, too many requests wait for it, or one of its turns is running."""

    exit_code = 4


@dataclass(slots=True)
class Row:
    """A message of a transcript. The store sets `id`, and writes it to the given field of each event of `announced_in`.
    A row with `continues` extends the session's last message; the row itself is stored for the log only."""

    session_id: str
    role: str
    content: str | list[JsonObject] | None
    run_id: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    finish_reason: str | None = None
    reasoning: str | None = None
    opaque: JsonObject | None = None
    api_content: str | list[JsonObject] | None = None
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

    def as_message(self) -> JsonObject:
        """The canonical message that is sent to a model."""
        content = self.content if self.api_content is None else self.api_content
        return self._message(content, "tool_calls", "tool_call_id", "tool_name", "opaque", "name")

    def as_given(self) -> JsonObject:
        """The message as its author would send it again."""
        return self._message(self.content, "tool_calls", "tool_call_id", "name")

    def _message(self, content: object, *names: str) -> JsonObject:
        message: JsonObject = {"role": self.role, "content": content}
        for name in names:
            if value := getattr(self, name):
                message[name] = value
        return message


# The fields of a session's usage by model.
_USAGE_KEYS = ("model", "provider", "task")
_USAGE_TOKENS = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "reasoning_tokens")
USAGE_FIELDS = (*_USAGE_KEYS, "calls", *_USAGE_TOKENS, "actual_cost_usd")
# Set in `state_meta` when something was deleted: until SQLite's index has been merged, its words are still in the file.
PURGE_DUE = "purge_due"
# Set in `state_meta` of the target of a migration until its copy is complete.
MIGRATION = "migration"
# The columns of a message, in the order of the fields above; `parts` and `search_text` are made of its content.
MESSAGE_COLUMNS = tuple(item.name for item in fields(Row) if item.name not in ("id", "announced_in", "continues"))


@dataclass(slots=True)
class Partial:
    """The open end of a stream: text that is delivered but not yet a row, starting at `offset`."""

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
    """The end of a stream from a journal: deltas as number, time in milliseconds and text, starting at `offset`."""

    stream_id: str
    kind: str
    step: int
    form: str
    offset: int
    deltas: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass(slots=True)
class RunRecord:
    spec: RunSpec
    state: RunState
    created_at: float
    updated_at: float = 0.0
    resumes: int = 0
    log_expired: bool = False
    holder: str = ""


@dataclass(slots=True)
class OpenedSession:
    """A session that a turn holds, with its lease token and its unfinished runs. `history` is the conversation if it
    has been read; for a session that was matched by content, the history the turn continues from."""

    session_id: str
    token: int | None
    unfinished: Sequence[RunRecord]
    session: JsonMapping | None
    history: list[JsonObject] | None = None
