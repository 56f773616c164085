"""Commits from a run's log to its store, which of them can share a transaction, and where logs are published."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hermes.bus.memory import MemoryBus
from hermes.core.events import Event
from hermes.core.json_types import JsonMapping
from hermes.runs.journal import TailJournal
from hermes.runs.streams import Saver, Stream
from hermes.store.base import Row

# Volatile text in order, by its stream. Without a stream it is the data of a `tool.drafted`.
Pending = list[tuple[Stream | None, Any]]


class Commit(msgspec.Struct, eq=False):
    """A write to the store: durable events or, without any, texts that have grown. `closes` are the streams that end
    with it; `replaces` and `annotate` as in `Runs.append`. `prepare` completes the events once the text before them
    (`before`) has been published; `then` runs right after the commit. With `hold` it is committed together with what
    follows shortly, and nobody waits for it."""

    events: Sequence[Event] = ()
    rows: Sequence[Row] = ()
    session: JsonMapping | None = None
    closes: Sequence[str] = ()
    replaces: Sequence[int | None] = ()
    annotate: tuple[int, str] | None = None
    sync: bool = False
    prepare: Callable[[], None] | None = None
    then: Callable[[], None] | None = None
    hold: bool = False
    before: Pending = []
    done: asyncio.Future[None] | None = None

    @property
    def shares(self) -> bool:
        return bool(self.events) and not self.replaces and self.annotate is None

    def join(self, later: Commit) -> None:
        """Merge another commit of the same transaction into this one."""
        self.events, self.rows = [*self.events, *later.events], [*self.rows, *later.rows]
        self.closes = [*self.closes, *later.closes]
        self.session, self.annotate = later.session or self.session, later.annotate or self.annotate
        self.replaces, self.sync = later.replaces or self.replaces, later.sync or self.sync

    def follows(self) -> bool:
        """Whether it may share a transaction with the commit before it: no text comes between, or none that stays
        open."""
        if not self.before:
            return self.shares
        return self.shares and all(stream is not None and stream.id in self.closes for stream, _ in self.before)


class LogOutput(msgspec.Struct, eq=False):
    """Where the logs of a process go. With a `journal`, deltas are in a file before readers get them; text within
    `window_s` is joined to one delta."""

    bus: MemoryBus
    window_s: float = 0.02
    journal: TailJournal | None = None
    saver: Saver = msgspec.field(default_factory=Saver)
    clock: Callable[[], float] = time.time
