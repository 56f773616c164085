"""What the stores share with the rest of the house: their errors, the things they keep, and the interfaces."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from hermes.core.errors import HermesError
from hermes.core.events import Event, RunState
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.spec import RunSpec


class StoreError(HermesError):
    """Something is wrong with the store; `hint` says what to do about it."""

    exit_code = 69


class StoreBusy(StoreError):
    """Another process held the store for too long. Trying again may help."""

    exit_code = 4


class StoreTimeout(StoreBusy):
    """A search or another long read had no answer in time, or did not get its turn."""


class StoreUnreachable(StoreBusy):
    """The database server does not answer. Trying again may help."""

    exit_code = 69


class StoreRuleBroken(StoreError):
    """A change that UNIQUE or FOREIGN KEY does not allow."""


class RunExists(StoreRuleBroken):
    """A run of that number is on record already: whoever else was asked for it was quicker."""

    def __init__(self, where: str = "") -> None:
        super().__init__("A run of this number is on record already (UNIQUE).", where=where)


class NoPlace(StoreError):
    """The owner of a run has as many without an end as it may have."""


class StoreFull(StoreError):
    """There is no room left on the disk."""


class StoreReadOnly(StoreError):
    """The store's file or folder cannot be written to."""


class StoreTooNew(StoreError):
    """The store was written by a newer Hermes."""


class StoreUnfinished(StoreError):
    """The store is a copy whose migration was interrupted."""

    exit_code = 78


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
        """The canonical message that goes to a model."""
        content = self.content if self.api_content is None else self.api_content
        return self._message(content, "tool_calls", "tool_call_id", "tool_name", "opaque", "name")

    def as_given(self) -> JsonObject:
        """The message as whoever said it would send it again."""
        return self._message(self.content, "tool_calls", "tool_call_id", "name")

    def _message(self, content: object, *names: str) -> JsonObject:
        message: JsonObject = {"role": self.role, "content": content}
        for name in names:
            if value := getattr(self, name):
                message[name] = value
        return message


# What a session knows of each model that was called in it.
_USAGE_KEYS = ("model", "provider", "task")
_USAGE_NUMBERS = (
    "calls",
    "input_tokens",
    "output_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "reasoning_tokens",
    "actual_cost_usd",
)
USAGE_FIELDS = (*_USAGE_KEYS, *_USAGE_NUMBERS)
# Set in `state_meta` when something was deleted: until SQLite's index has been merged, its words are still in the file.
PURGE_DUE = "purge_due"
# Set in `state_meta` of the target of a migration until its copy is complete.
MIGRATION = "migration"
# The columns of a message, in the order of the fields above; `parts` and `search_text` are made of its content.
MESSAGE_COLUMNS = tuple(item.name for item in fields(Row) if item.name not in ("id", "announced_in", "continues"))


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
    spec: RunSpec
    state: RunState
    created_at: float
    updated_at: float = 0.0
    resumes: int = 0
    log_expired: bool = False
    holder: str = ""


@dataclass(slots=True)
class OpenedSession:
    """A session that a turn holds, with the token of its lease and the runs in it that have no end.

    `history` is the conversation, once somebody has read it; of a session that was found by content, what the turn
    goes on from.
    """

    session_id: str
    token: int | None
    unfinished: Sequence[RunRecord]
    session: JsonMapping | None
    history: list[JsonObject] | None = None
