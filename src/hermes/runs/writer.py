"""Writing a run's log: volatile text that leaves at once, durable events that are committed first, in one order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from hermes.bus.memory import MemoryBus
from hermes.core.events import DURABLE, Cuts, Event, RunState, packed_size
from hermes.core.limits import HELD_S_MAX, JOURNALED_S_MAX, PARTIAL_CHARS_MAX, PARTIAL_S_MAX, START_HELD_S_MAX
from hermes.core.spec import RunSpec
from hermes.guards.secrets import Secrets, StreamMask
from hermes.runs.journal import JournalFile, TailJournal
from hermes.store.base import Partial, Row
from hermes.store.stores import AsyncRuns


class LogEnded(Exception):
    """The log has its last event; nothing can follow it."""


class Stream:
    """A text that is growing: a message's text or reasoning, or one output of a tool.

    `pieces` is all that was written, `length` how much of it was given out, `saved…` how much the store knows, and
    `journal…` is its place in the journal.
    """

    __slots__ = (
        "completed",
        "cuts",
        "fixed",
        "form",
        "id",
        "journal",
        "journal_ms",
        "journal_number",
        "journal_seq",
        "kind",
        "last_seq",
        "length",
        "mask",
        "pieces",
        "saved_cuts",
        "saved_length",
        "saved_seq",
        "step",
        "type",
    )

    def __init__(self, id_: str, kind: str, type_: str, step: int, fixed: dict[str, Any], mask: StreamMask) -> None:
        self.id, self.kind, self.type, self.step, self.fixed, self.mask = id_, kind, type_, step, fixed, mask
        self.form: str = fixed.get("form") or fixed.get("stream") or ""
        self.pieces: list[str] = []
        self.length = self.last_seq = self.saved_seq = self.saved_length = self.saved_cuts = 0
        self.journal: JournalFile | None = None
        self.journal_number = self.journal_seq = self.journal_ms = 0
        self.completed = False  # a commit that closes it is on its way
        self.cuts = Cuts()

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def partial(self, *, whole: bool = False) -> Partial:
        """What the store does not know, or the whole."""
        offset, start = (0, 0) if whole else (self.saved_length, self.saved_cuts)
        text, cuts = self.text[offset : self.length], self.cuts.pack(start)
        return Partial(self.id, self.kind, self.step, text, cuts, self.last_seq, self.form, offset)

    def saved(self, partial: Partial) -> None:
        """The store knows this part."""
        self.saved_seq, self.saved_length = partial.last_seq, partial.offset + len(partial.text)
        self.saved_cuts += packed_size(partial.cuts)


Pending = list[tuple[Stream | None, Any]]


@dataclass(slots=True)
class _Commit:
    """Something on its way to the store: durable events, or, without any, the texts that have grown.

    `before` is the volatile text that came before the events; `prepare` completes them once that has been given out;
    `then` follows the commit before anything else does.
    """

    done: asyncio.Future[None]
    before: Pending = field(default_factory=list)
    events: Sequence[Event] = ()
    rows: Sequence[Row] = ()
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[], None] | None = None
    then: Callable[[], None] | None = None
    held: bool = False

    @property
    def joins(self) -> bool:
        """Whether it may share a transaction with others."""
        return bool(self.events) and not self.options["replaces"] and self.options["annotate"] is None

    @property
    def follows(self) -> bool:
        """Whether it may share a transaction with what is before it: no text comes between, or none that stays open."""
        closes = self.options["closes"] if self.joins else ()
        return self.joins and all(stream is not None and stream.id in closes for stream, _ in self.before)


def _seen(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()


class Saver:
    """Has the texts that have grown put into their stores, those of all runs together."""

    def __init__(self) -> None:
        self._due: dict[RunWriter, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, writer: RunWriter) -> None:
        """A text of this log has grown. While a journal has it, there is time."""
        self._due[writer] = None
        loop, wait_s = asyncio.get_running_loop(), JOURNALED_S_MAX if writer.journals else PARTIAL_S_MAX
        if self._timer is not None and self._timer.when() > loop.time() + wait_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = loop.call_later(wait_s, self.begin)

    def drop(self, writer: RunWriter) -> None:
        """This log has ended."""
        self._due.pop(writer, None)
        if not self._due and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def begin(self) -> None:
        """Save them now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due, self._due = self._due, {}
        task = asyncio.get_running_loop().create_task(self._save(due))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _save(self, due: Iterable[RunWriter]) -> None:
        saving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        found = [(writer, grown) for writer in due if (grown := writer.grown(saving)) is not None]
        try:
            for store in {writer.store for writer, _ in found}:
                own = [(writer, grown) for writer, grown in found if writer.store is store]
                try:
                    await store.put_grown([(writer.run_id, *grown) for writer, grown in own])
                except Exception:  # noqa: BLE001  (what is not saved now is saved with what follows)
                    for writer, _ in own:
                        self.add(writer)
                else:
                    for writer, (_, partials) in own:
                        writer.saved(partials)
        finally:
            saving.set_result(None)


class RunWriter:
    """The one writer of a run's log.

    Volatile text leaves at once, or is joined for up to `window_s` with what follows it; while a durable event is being
    committed it waits for that, so that every reader sees one order.
    """

    def __init__(
        self,
        run_id: str,
        store: AsyncRuns,
        bus: MemoryBus,
        *,
        token: int | None = None,
        window_s: float = 0.02,
        secrets: Secrets | None = None,
        clock: Callable[[], float] = time.time,
        last_seq: int = 0,
        state: RunState | None = None,
        saver: Saver | None = None,
        journal: TailJournal | None = None,
    ) -> None:
        self.run_id = run_id
        self.token = token
        self.state = state or RunState()
        self.step = 0
        self.first_delta_at: float | None = None
        self.on_event: Callable[[Event], None] = lambda event: None
        # The run itself, until the first commit has put it on record; and who is told of that.
        self.creates: RunSpec | None = None
        # Whether the start of the run may wait for its end, to be put on record with it.
        self.start_may_wait = False
        self.on_created: Callable[[], None] = lambda: None
        self.store, self._bus, self._clock, self._window_s = store, bus, clock, window_s
        self._secrets = secrets or Secrets()
        self._seq = last_seq
        self._streams: dict[str, Stream] = {}
        self._pending: Pending = []
        self._commits: list[_Commit] = []
        self._awaited = 0
        self._ending = self._closed = False
        self._draining: asyncio.Task[None] | None = None
        self._join_timer: asyncio.TimerHandle | None = None
        self._held_timer: asyncio.TimerHandle | None = None
        self._saver, self._journal = saver or Saver(), journal
        self._saving: asyncio.Future[None] | None = None
        self._unsaved = 0
        # Why events were not committed for which nobody waited: whoever appends next is told.
        self._lost: Exception | None = None
        self._told_at = 0.0
        self._last_delta_at = float("-inf")
        self._loop = asyncio.get_running_loop()

    @property
    def joins(self) -> bool:
        """Whether text that comes at one time is one delta."""
        return self._window_s > 0

    @property
    def journals(self) -> bool:
        """Whether what it gives out is in a journal."""
        return self._journal is not None and self._journal.works

    @property
    def last_seq(self) -> int:
        """The number of the last event that was given one."""
        return self._seq

    @property
    def ending(self) -> bool:
        """Whether the last event is on its way to the store, or there."""
        return self._ending

    @property
    def lease_released(self) -> bool:
        """Whether the commit of the last event has given the session back."""
        return self.token is not None and (self.state.ended or self.state.status == "interrupted")

    # --- volatile -----------------------------------------------------------------------------------------------

    def text(self, message_id: str, text: str) -> None:
        """Visible text of a message."""
        stream = self._streams.get(message_id)
        if stream is None:
            stream = self._open(message_id, "text", "text.delta", {"message_id": message_id})
        self._write(stream, text)

    def reasoning(self, message_id: str, text: str, form: str) -> None:
        """Reasoning of a message; its form is that of its beginning."""
        stream_id = f"{message_id}:reasoning"
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._open(stream_id, "reasoning", "reasoning.delta", {"message_id": message_id, "form": form})
        self._write(stream, text)

    def output(self, call_id: str, text: str, name: str = "stdout") -> None:
        """Output of a running tool."""
        stream_id = f"{call_id}/{name}"
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._open(stream_id, "tool", "tool.output", {"call_id": call_id, "stream": name})
        self._write(stream, text)

    def drafted(self, message_id: str, index: int, name: str) -> None:
        """The model has begun to write a call: shown live, kept nowhere."""
        self._pending.append((None, {"message_id": message_id, "index": index, "name": name}))
        self.flush()

    def text_of(self, stream_id: str) -> str:
        """All text of an open stream that was given out or is about to be, what its mask holds back included."""
        stream = self._streams.get(stream_id)
        return stream.text + stream.mask.held if stream and not stream.completed else ""

    def flush(self) -> None:
        """Give out what waits to be joined, unless a durable event is on its way: then it follows that."""
        if not self._awaited and self._pending:
            pending, self._pending = self._pending, []
            self._publish(pending)

    @property
    def holds_start(self) -> bool:
        """Whether nothing of the run is on record yet, and need not be before more has happened."""
        return self.start_may_wait and self.creates is not None

    def _open(self, id_: str, kind: str, type_: str, fixed: dict[str, Any]) -> Stream:
        if self.first_delta_at is None and kind != "tool":
            self.first_delta_at = self._clock()
        stream = self._streams[id_] = Stream(id_, kind, type_, self.step, fixed, self._secrets.stream())
        return stream

    def _write(self, stream: Stream, text: str) -> None:
        text = stream.mask.feed(text)
        if "\x00" in text:  # no store keeps it, and what was shown is what is stored
            text = text.replace("\x00", "\ufffd")
        if text:
            self._accept(stream, text)

    def _accept(self, stream: Stream, text: str) -> None:
        stream.pieces.append(text)
        now = self._loop.time()
        if not self._pending and not self._awaited and now - self._last_delta_at >= self._window_s:
            self._last_delta_at = now
            self._delta(stream, text)
            return
        if self._pending and self._pending[-1][0] is stream:
            self._pending[-1] = (stream, self._pending[-1][1] + text)
        else:
            self._pending.append((stream, text))
        if self._join_timer is None and not self._awaited:
            self._join_timer = self._loop.call_at(self._last_delta_at + self._window_s, self._join)

    def _join(self) -> None:
        self._join_timer = None
        self.flush()

    def _publish(self, pending: Pending) -> None:
        self._last_delta_at = self._loop.time()
        for stream, content in pending:
            if stream is None:
                self._seq += 1
                event = Event(self.run_id, "tool.drafted", self.step, content, self._seq, self._now())
                if self._journal is not None:
                    self._journal.publish(event)
                else:
                    self._bus.publish(self.run_id, event)
            else:
                self._delta(stream, content)

    def _delta(self, stream: Stream, text: str, later: list[Event] | None = None) -> None:
        """Give a piece of text its place in the log, and publish it: at once by way of the journal, or `later`."""
        self._seq += 1
        ts = self._now()
        event = Event(
            self.run_id,
            stream.type,
            stream.step,
            {**stream.fixed, "offset": stream.length, "text": text},
            self._seq,
            ts,
        )
        if self._journal is not None and later is None:
            self._journal.add(stream, event)
        stream.cuts.add(self._seq, len(text), ts)
        stream.length += len(text)
        stream.last_seq = self._seq
        if later is not None:
            later.append(event)
            return
        if self._journal is None:
            self._bus.publish(self.run_id, event)
        unsaved, self._unsaved = self._unsaved, self._unsaved + len(text)
        if not unsaved:
            self._saver.add(self)
        elif unsaved <= PARTIAL_CHARS_MAX < self._unsaved and not self._ending and not self.journals:
            self._enqueue(_Commit(self._loop.create_future()))

    def grown(self, saving: asyncio.Future[None]) -> tuple[int | None, list[Partial]] | None:
        """The token, and what has grown since the last time, to be put into the store until `saving` is done. None
        while something else is on its way there: the rest follows that."""
        if self._closed:  # whoever goes on with it has what is stored
            return None
        if self._draining is not None:
            self._saver.add(self)
        elif not self._ending and (partials := [stream.partial() for stream in self._grown()]):
            self._saving = saving
            return self.token, partials
        return None

    def saved(self, partials: Sequence[Partial]) -> None:
        """The store knows these."""
        for partial in partials:
            if (stream := self._streams.get(partial.stream_id)) is not None:
                stream.saved(partial)
                self._release(stream)
        self._unsaved = 0
        if self._grown():
            self._unsaved = 1
            self._saver.add(self)

    async def put_on_record(self) -> None:
        """Wait until the store knows of the run."""
        if self.creates is not None:
            await self.settle()

    async def settle(self) -> None:
        """Wait until the store knows all that was given out."""
        if not self._ending:
            await asyncio.shield(self._enqueue(_Commit(self._loop.create_future())))
        elif self._draining is not None:
            await asyncio.wait([self._draining])

    def restore(self, partials: Sequence[Partial]) -> None:
        """Go on with the open messages of a run that was cut off."""
        for partial in partials:
            message_id = partial.stream_id.removesuffix(":reasoning")
            if partial.kind == "text":
                stream = self._open(partial.stream_id, "text", "text.delta", {"message_id": message_id})
            elif partial.kind == "reasoning":
                fixed = {"message_id": message_id, "form": partial.form}
                stream = self._open(partial.stream_id, "reasoning", "reasoning.delta", fixed)
            else:
                continue
            stream.pieces, stream.length, stream.step = [partial.text], len(partial.text), partial.step
            stream.cuts, stream.last_seq = Cuts.load(partial.cuts), partial.last_seq
            stream.saved(partial)

    # --- durable ------------------------------------------------------------------------------------------------

    def event(self, type_: str, **data: Any) -> Event:
        """An event of the current step, not yet in the log. What concerns the whole run belongs to no step."""
        return Event(self.run_id, type_, 0 if type_.startswith("run.") else self.step, data)

    async def append(
        self,
        *events: Event,
        rows: Sequence[Row] = (),
        session: Mapping[str, Any] | None = None,
        closes: Sequence[str] = (),
        replaces: Sequence[int | None] = (),
        annotate: tuple[int, str] | None = None,
        sync: bool = False,
        prepare: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
        hold: bool = False,
    ) -> None:
        """Commit events with the rows they announce; then, and only then, readers see them.

        With `hold` they are committed together with what follows in a moment, and nobody waits for that.
        """
        if self._ending:
            raise LogEnded(self.run_id)
        if self._lost is not None:
            lost, self._lost = self._lost, None
            raise lost
        assert all(event.type in DURABLE for event in events), "only these may be committed"
        self._ending = any(event.final or event.type == "run.interrupted" for event in events)
        before, self._pending = self._pending, []
        options = {"session": session, "closes": closes, "replaces": replaces, "annotate": annotate, "sync": sync}
        self._awaited += 1
        commit = _Commit(self._loop.create_future(), before, events, rows, options, prepare, then, hold)
        done = self._enqueue(commit, hold=hold)
        if not hold:
            await asyncio.shield(done)

    def _enqueue(self, commit: _Commit, *, hold: bool = False) -> asyncio.Future[None]:
        self._commits.append(commit)
        # An outcome that nobody waits for any more is no error of its own.
        commit.done.add_done_callback(_seen)
        if not hold:
            self._begin_to_drain()
        elif self._held_timer is None:
            self._held_timer = self._loop.call_later(
                START_HELD_S_MAX if self.holds_start else HELD_S_MAX, self._begin_to_drain
            )
        return commit.done

    def _begin_to_drain(self) -> None:
        if self._held_timer is not None:
            self._held_timer.cancel()
            self._held_timer = None
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())

    async def emit(self, type_: str, *, rows: Sequence[Row] = (), sync: bool = False, **data: Any) -> Event:
        """Commit one event."""
        event = self.event(type_, **data)
        await self.append(event, rows=rows, sync=sync)
        return event

    async def complete(
        self, message_id: str, row: Row, *, after: Sequence[Event] = (), hold: bool = False, **data: Any
    ) -> None:
        """Commit a whole message: its row, its completion and what goes with it. The row gets the text given out."""
        text, thought = (self._ended(stream_id) for stream_id in (message_id, f"{message_id}:reasoning"))
        content = text.text if text else ""
        row.content, row.reasoning = content, thought.text if thought else None
        done = self.event("message.completed", message_id=message_id, row=None, text_length=len(content), **data)
        row.announced_in = (*row.announced_in, (done, "row"))
        events = [done, *after]
        if thought is not None:
            form = {"chars": len(thought.text), "form": thought.form}
            told = self.event("reasoning.completed", message_id=message_id, row=None, **form)
            row.announced_in = (*row.announced_in, (told, "row"))
            events.insert(0, told)

        def cuts() -> None:
            done.data["cuts"] = text.cuts.compressed() if text else ""
            if thought is not None:
                events[0].data["cuts"] = thought.cuts.compressed()

        for stream in (text, thought):
            if stream is not None:
                stream.completed = True
        closes = [stream.id for stream in (text, thought) if stream is not None]
        await self.append(*events, rows=[row], closes=closes, prepare=cuts, hold=hold)

    def _ended(self, stream_id: str) -> Stream | None:
        """The stream with what its mask still held back."""
        stream = self._streams.get(stream_id)
        if stream is not None and (held := stream.mask.finish()):
            self._accept(stream, held)
        return stream

    def end_output(self, call_id: str) -> Sequence[str]:
        """The streams of a tool that has ended, to be closed by the commit that says so."""
        ids = [stream.id for stream in self._streams.values() if stream.fixed.get("call_id") == call_id]
        for stream_id in ids:
            self._ended(stream_id)
        return ids

    async def _drain(self) -> None:
        """Carry out what is queued, one after the other."""
        try:
            while self._commits:
                if self._saving is not None:
                    await asyncio.wait([self._saving])
                    self._saving = None
                batch = self._batch()
                try:
                    await (self._commit(batch) if batch[0].events else self._save_partials())
                except Exception as error:  # noqa: BLE001  (whoever waits for it is told)
                    if self._try_again(batch, error):
                        self._awaited += len(batch)
                        return
                    for commit in batch:
                        self._failed(commit, error)
                    if all(commit.held for commit in batch):
                        self._lost = error
                else:
                    for commit in batch:
                        if not commit.done.done():
                            commit.done.set_result(None)
                finally:
                    self._awaited -= len(batch) if batch[0].events else 0
        finally:
            self._draining = None
        self.flush()

    def _try_again(self, batch: list[_Commit], error: Exception) -> bool:
        """Whether the start of a run that could not be put on record is tried again with what follows: nothing of the run
        can be without it."""
        waiting = self._commits
        again = self.creates is not None and not any(one.events for one in waiting)
        if again := again and all(one.held and not one.before for one in batch):
            self._seq = batch[0].events[0].seq - 1
            self._commits = batch
            for commit in waiting:
                self._failed(commit, error)
        return again

    def _batch(self) -> list[_Commit]:
        """The next commit, and those behind it that can be one transaction with it."""
        batch = [self._commits.pop(0)]
        while self._commits and batch[-1].joins and self._commits[0].follows:
            batch.append(self._commits.pop(0))
        return batch

    def _failed(self, commit: _Commit, error: Exception) -> None:
        for stream_id in commit.options.get("closes", ()):
            if (stream := self._streams.get(stream_id)) is not None:
                stream.completed = False
        if any(event.final or event.type == "run.interrupted" for event in commit.events):
            self._ending = False
        if not commit.events and not self._closed:
            self._saver.add(self)
        if not commit.done.done():
            commit.done.set_exception(error)

    async def _commit(self, batch: list[_Commit]) -> None:
        self._publish(batch[0].before)
        options = dict(batch[0].options)
        # Texts that begin and end within the transaction need no journal, and are given out with what is around them.
        texts: dict[int, list[Event]] = {}
        for at, commit in enumerate(batch):
            for stream, text in commit.before if at else ():
                assert stream is not None
                self._delta(stream, text, texts.setdefault(at, []))
            if commit.prepare is not None:
                commit.prepare()
            for event in commit.events:
                self._seq += 1
                event.seq, event.ts = self._seq, self._clock()
            options |= {name: value for name, value in commit.options.items() if value}
        events = [event for commit in batch for event in commit.events]
        closes = [stream_id for commit in batch for stream_id in commit.options["closes"]]
        options["closes"] = [one for one in closes if (own := self._streams.get(one)) is None or own.saved_seq]
        partials = [stream.partial() for stream in self._grown() if stream.id not in closes]
        rows = [row for commit in batch for row in commit.rows]
        if self.creates is not None:
            options["creates"] = self.creates
        try:
            await self.store.append(self.run_id, self.token, events, rows, partials=partials, **options)
        except BaseException:
            for event in (event for pieces in texts.values() for event in pieces):
                self._deliver(event)
            raise
        if self.creates is not None:
            self.creates = None
            self.on_created()
        for row in rows:
            for event, _ in row.announced_in if row.role == "assistant" else ():
                event.message_row = row
            row.announced_in = ()
        for stream_id in closes:
            if (stream := self._streams.pop(stream_id, None)) is not None:
                self._release(stream, closed=True)
        self.saved(partials)
        for at, commit in enumerate(batch):
            for event in texts.get(at, ()):
                self._deliver(event)
            for event in commit.events:
                self.state.apply(event)
                self._deliver(event)
                self.on_event(event)
            if commit.then is not None:
                commit.then()

    async def _save_partials(self) -> None:
        if partials := [stream.partial() for stream in self._grown()]:
            await self.store.put_partials(self.run_id, self.token, partials)
            self.saved(partials)

    async def save_rest(self, token: int | None) -> None:
        """Save the texts of a log that was closed while the store could not be written to."""
        self.token = token
        await self._save_partials()
        for stream in self._streams.values():
            self._release(stream, closed=True)

    def _grown(self) -> list[Stream]:
        return [stream for stream in self._streams.values() if stream.last_seq > stream.saved_seq]

    # --- common -------------------------------------------------------------------------------------------------

    def streams(self) -> list[Partial]:
        """The open streams, as far as they were given out."""
        return [stream.partial(whole=True) for stream in self._streams.values() if stream.length]

    def _release(self, stream: Stream, *, closed: bool = False) -> None:
        """The journal need not keep what the store knows."""
        if self._journal is not None:
            self._journal.release(stream, inf if closed else stream.saved_seq)

    def _deliver(self, event: Event) -> None:
        if self._journal is not None:
            self._journal.flush()
        self._bus.publish(self.run_id, event)

    def _now(self) -> float:
        # A clock that is set back does not set the log back.
        now = int(self._clock() * 1000) / 1000
        if now > self._told_at:
            self._told_at = now
        return self._told_at

    async def close(self) -> None:
        """Leave nothing behind: timers and tasks of this log end here."""
        self._closed = True
        self._saver.drop(self)
        if self._join_timer is not None:
            self._join_timer.cancel()
            self._join_timer = None
        if self._commits or self._held_timer is not None:
            self._begin_to_drain()
        if self._draining is not None:
            await asyncio.wait([self._draining])
        if self.state.ended:
            for stream in self._streams.values():
                self._release(stream, closed=True)
