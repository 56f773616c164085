"""A run at work in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from hermes.core.result import Result
from hermes.core.spec import RunSpec
from hermes.guards.secrets import Secrets
from hermes.runs.control import RunControls
from hermes.runs.resume import Resumption
from hermes.runs.writer import RunWriter
from hermes.store.base import OpenedSession
from hermes.store.stores import AsyncStore

STORE_UNAVAILABLE_NOTICE = ("store_unavailable", "The store is out of reach; this turn is not kept.")


class LiveRun(msgspec.Struct):
    spec: RunSpec
    store: AsyncStore
    log: RunWriter
    controls: RunControls
    secrets: Secrets
    deadline_at: float | None = None
    task: asyncio.Task[Result] | None = None
    # For a run that waits for its session: completes when that is acquired or given up.
    starting: asyncio.Task[None] | None = None
    owners: set[object] = msgspec.field(default_factory=set)
    notices: list[tuple[str, str]] = msgspec.field(default_factory=list)
    deadline_timer: asyncio.TimerHandle | None = None
    session_lost: bool = False
    resumption: Resumption | None = None
    waited_s: float = 0.0
    on_model_asked: Callable[[], None] | None = None
    opened: OpenedSession | None = None
    # Whether the model has been shown text from outside, and the hosts that the user has named; children inherit both.
    read_foreign: bool = False
    named_hosts: frozenset[str] = frozenset()

    @property
    def transcript_id(self) -> str:
        """The id that the rows are stored under: the session or, for an ephemeral run, the run itself."""
        return self.spec.session_id if self.spec.persist else self.spec.run_id

    @property
    def unrecorded(self) -> bool:
        """Whether nothing of it was recorded or shown."""
        return self.log.creates is not None and self.log.first_delta_at is None
