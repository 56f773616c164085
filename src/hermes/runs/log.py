"""A run's log: one writer, any number of readers, each from wherever it wants to begin."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hermes.bus.memory import MemoryBus
from hermes.guards.secrets import Secrets, StreamMask
from hermes.limits import PAGE_EVENTS_MAX, PARTIAL_EVENTS_MAX, PARTIAL_S_MAX
from hermes.runs.events import Cuts, Event, RunState
from hermes.store.base import Partial, Row, RunStore, SessionRecord


class _Stream:
    """A text that is growing: a message's text or reasoning, or a tool's output.

    `pieces` is all that was written, `length` how much of it was given out.
    """

    __slots__ = ("cuts", "dirty", "fixed", "form", "id", "kind", "last_seq", "length", "mask", "pieces", "step", "type")

    def __init__(
        self, id_: str, kind: str, type_: str, step: int, fixed: dict[str, Any], form: str, mask: StreamMask
    ) -> None:
        self.id, self.kind, self.type, self.step, self.fixed, self.form = id_, kind, type_, step, fixed, form
        self.mask = mask
        self.pieces: list[str] = []
        self.length = 0
        self.cuts = Cuts()
        self.last_seq = 0
        self.dirty = False

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def partial(self) -> Partial:
        given_out = self.text[: self.length]
        return Partial(self.id, self.kind, self.step, given_out, self.cuts.pack(), self.last_seq, self.form)


Pending = list[tuple[_Stream | None, Any]]


@dataclass(slots=True)
class _Commit:
    """Durable events on their way. `before` is the volatile text that came before them; `prepare` completes the events
    once that has been given out."""

    before: Pending
    events: Sequence[Event]
    rows: Sequence[Row]
    options: dict[str, Any]
    prepare: Callable[[], None] | None
    done: asyncio.Future[None]


class RunWriter:
    """The one writer of a run's log.

    Volatile text leaves at once, or is joined for up to `window_s` with what follows it; while a durable event is being
    committed it waits for that, so that every reader sees one order.
    """

    def __init__(
        self,
        run_id: str,
        store: RunStore,
        bus: MemoryBus,
        *,
        token: int | None = None,
        window_s: float = 0.02,
        secrets: Secrets | None = None,
        clock: Callable[[], float] = time.time,
        last_seq: int = 0,
    ) -> None:
        self.run_id = run_id
        self.token = token
        self.state = RunState()
        self.step = 0
        self._store, self._bus, self._clock, self._window_s = store, bus, clock, window_s
        self._secrets = secrets or Secrets()
        self._seq = last_seq
        self._streams: dict[str, _Stream] = {}
        self._pending: Pending = []
        self._commits: deque[_Commit] = deque()
        self._draining: asyncio.Task[None] | None = None
        self._join_timer: asyncio.TimerHandle | None = None
        self._partial_timer: asyncio.TimerHandle | None = None
        self._partial_task: asyncio.Task[None] | None = None
        self._unsaved = 0
        self._last_delta_at = float("-inf")
        self._loop = asyncio.get_running_loop()

    # --- volatile -----------------------------------------------------------------------------------------------

    def text(self, message_id: str, text: str) -> None:
        """Visible text of a message."""
        self._write(self._stream(message_id, "text", "text.delta", {"message_id": message_id}), text)

    def reasoning(self, message_id: str, text: str, form: str) -> None:
        """Reasoning of a message; its form is that of its beginning."""
        stream_id = f"{message_id}:reasoning"
        stream = self._streams.get(stream_id)
        if stream is None:
            fixed = {"message_id": message_id, "form": form}
            stream = self._stream(stream_id, "reasoning", "reasoning.delta", fixed, form)
        self._write(stream, text)

    def output(self, call_id: str, text: str, stream: str = "stdout") -> None:
        """Output of a running tool."""
        fixed = {"call_id": call_id, "stream": stream}
        self._write(self._stream(call_id, "tool", "tool.output", fixed, stream), text)

    def drafted(self, message_id: str, index: int, name: str) -> None:
        """The model has begun to write a call: shown live, kept nowhere."""
        self._pending.append((None, {"message_id": message_id, "index": index, "name": name}))
        self.flush()

    def text_of(self, message_id: str) -> str:
        """All text of an open message that was given out or is about to be."""
        stream = self._streams.get(message_id)
        return stream.text if stream else ""

    def reasoning_of(self, message_id: str) -> str:
        """The same for its reasoning."""
        return self.text_of(f"{message_id}:reasoning")

    def flush(self) -> None:
        """Give out what waits to be joined, unless a commit is under way: then it follows that."""
        if self._draining is None and self._pending:
            pending, self._pending = self._pending, []
            self._give_out(pending)

    def _stream(self, id_: str, kind: str, type_: str, fixed: dict[str, Any], form: str = "") -> _Stream:
        stream = self._streams.get(id_)
        if stream is None:
            stream = self._streams[id_] = _Stream(id_, kind, type_, self.step, fixed, form, self._secrets.stream())
        return stream

    def _write(self, stream: _Stream, text: str) -> None:
        text = stream.mask.feed(text)
        if text:
            self._accept(stream, text)

    def _accept(self, stream: _Stream, text: str) -> None:
        stream.pieces.append(text)
        now = self._loop.time()
        if not self._pending and self._draining is None and now - self._last_delta_at >= self._window_s:
            self._last_delta_at = now
            self._delta(stream, text)
            return
        if self._pending and self._pending[-1][0] is stream:
            self._pending[-1] = (stream, self._pending[-1][1] + text)
        else:
            self._pending.append((stream, text))
        if self._join_timer is None and self._draining is None:
            self._join_timer = self._loop.call_at(self._last_delta_at + self._window_s, self._join)

    def _join(self) -> None:
        self._join_timer = None
        self.flush()

    def _give_out(self, pending: Pending) -> None:
        self._last_delta_at = self._loop.time()
        for stream, content in pending:
            if stream is None:
                self._seq += 1
                self._deliver(Event(self.run_id, "tool.drafted", self.step, content, self._seq, self._now()))
            else:
                self._delta(stream, content)

    def _delta(self, stream: _Stream, text: str) -> None:
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
        stream.cuts.add(self._seq, len(text), ts)
        stream.length += len(text)
        stream.last_seq = self._seq
        stream.dirty = True
        self._deliver(event)
        self._unsaved += 1
        if self._partial_timer is None:
            self._partial_timer = self._loop.call_later(PARTIAL_S_MAX, self._save_soon)
        elif self._unsaved == PARTIAL_EVENTS_MAX:
            self._save_soon()

    def _save_soon(self) -> None:
        if self._partial_timer is not None:
            self._partial_timer.cancel()
            self._partial_timer = None
        if self._partial_task is None and self._unsaved and not self.state.ended:
            self._partial_task = self._loop.create_task(self._save_partials())

    async def _save_partials(self) -> None:
        try:
            await self.settle()
        finally:
            self._partial_task = None

    async def settle(self) -> None:
        """Bring the store level with what was given out."""
        partials = self._take_partials()
        if partials:
            await self._store.put_partials(self.run_id, self.token, partials)

    def _take_partials(self) -> list[Partial]:
        partials = [stream.partial() for stream in self._streams.values() if stream.dirty]
        for stream in self._streams.values():
            stream.dirty = False
        self._unsaved = 0
        return partials

    # --- durable ------------------------------------------------------------------------------------------------

    def event(self, type_: str, **data: Any) -> Event:
        """An event of the current step, not yet in the log. What concerns the whole run belongs to no step."""
        return Event(self.run_id, type_, 0 if type_.startswith("run.") else self.step, data)

    async def append(
        self,
        *events: Event,
        rows: Sequence[Row] = (),
        session: SessionRecord | None = None,
        closes: Sequence[str] = (),
        replaces: bool = False,
        annotate: tuple[int, str] | None = None,
        sync: bool = False,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Commit events with the rows they announce; then, and only then, readers see them."""
        before, self._pending = self._pending, []
        options = {"session": session, "closes": closes, "replaces": replaces, "annotate": annotate, "sync": sync}
        commit = _Commit(before, events, rows, options, prepare, self._loop.create_future())
        self._commits.append(commit)
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())
        await asyncio.shield(commit.done)

    async def emit(self, type_: str, *, rows: Sequence[Row] = (), sync: bool = False, **data: Any) -> Event:
        """Commit one event."""
        event = self.event(type_, **data)
        await self.append(event, rows=rows, sync=sync)
        return event

    async def complete(self, message_id: str, row: Row, *, after: Sequence[Event] = (), **data: Any) -> None:
        """Commit a whole message: its row, its completion and what goes with it. The row gets the text given out."""
        text, thought = (self._ended(stream_id) for stream_id in (message_id, f"{message_id}:reasoning"))
        content = text.text if text else ""
        row.content, row.reasoning = content, thought.text if thought else None
        done = self.event("message.completed", message_id=message_id, row=None, text_length=len(content), **data)
        row.told = (*row.told, (done, "row"))
        events = [done, *after]
        if thought is not None:
            form = {"chars": len(thought.text), "form": thought.form}
            events.insert(0, self.event("reasoning.completed", message_id=message_id, **form))

        def cuts() -> None:
            done.data["cuts"] = text.cuts.pack() if text else ""
            if thought is not None:
                events[0].data["cuts"] = thought.cuts.pack()

        closes = [stream.id for stream in (text, thought) if stream is not None]
        await self.append(*events, rows=[row], closes=closes, prepare=cuts)

    def _ended(self, stream_id: str) -> _Stream | None:
        """The stream with what its mask still held back."""
        stream = self._streams.get(stream_id)
        if stream is not None and (held := stream.mask.finish()):
            self._accept(stream, held)
        return stream

    def end_output(self, call_id: str) -> Sequence[str]:
        """The stream of a tool that has ended, to be closed by the commit that says so."""
        return [stream.id] if (stream := self._ended(call_id)) else ()

    async def _drain(self) -> None:
        try:
            while self._commits:
                commit = self._commits.popleft()
                self._give_out(commit.before)
                try:
                    await self._commit(commit)
                except Exception as error:  # noqa: BLE001  (the waiting caller is told)
                    if not commit.done.done():
                        commit.done.set_exception(error)
        finally:
            self._draining = None
        self.flush()

    async def _commit(self, commit: _Commit) -> None:
        if commit.prepare is not None:
            commit.prepare()
        for event in commit.events:
            self._seq += 1
            event.seq, event.ts = self._seq, self._clock()
        for stream_id in commit.options["closes"]:
            self._streams.pop(stream_id, None)
        await self._store.append(
            self.run_id, self.token, commit.events, commit.rows, partials=self._take_partials(), **commit.options
        )
        for event in commit.events:
            self.state.apply(event)
            self._deliver(event)
        if not commit.done.done():
            commit.done.set_result(None)

    # --- common -------------------------------------------------------------------------------------------------

    def _deliver(self, event: Event) -> None:
        self._bus.publish(self.run_id, event)

    def _now(self) -> float:
        return round(self._clock(), 3)

    async def close(self) -> None:
        """Leave nothing behind: timers and tasks of this log end here."""
        for timer in (self._join_timer, self._partial_timer):
            if timer is not None:
                timer.cancel()
        self._join_timer = self._partial_timer = None
        for task in (self._draining, self._partial_task):
            if task is not None:
                await asyncio.wait([task])


class RunLog:
    """The logs of all runs: their writers in this process, and reading them, live or stored."""

    def __init__(self, bus: MemoryBus, *, window_s: float = 0.02) -> None:
        self._bus = bus
        self._window_s = window_s
        self._writers: dict[str, RunWriter] = {}

    def open(self, run_id: str, store: RunStore, *, token: int | None, secrets: Secrets) -> RunWriter:
        """The writer of a run that begins."""
        writer = RunWriter(run_id, store, self._bus, token=token, window_s=self._window_s, secrets=secrets)
        self._writers[run_id] = writer
        return writer

    def writer(self, run_id: str) -> RunWriter | None:
        """The writer of a run that lives in this process."""
        return self._writers.get(run_id)

    def watched(self, run_id: str) -> bool:
        """Whether anybody reads the run."""
        return self._bus.watched(run_id)

    async def close(self, run_id: str) -> None:
        """The run has ended."""
        writer = self._writers.pop(run_id, None)
        if writer is not None:
            await writer.close()

    async def subscribe(self, run_id: str, store: RunStore, after: int = 0) -> AsyncIterator[Event]:
        """Every event later than `after`: stored ones first, then live ones, without gap or repetition."""
        async for batch in self.batches(run_id, store, after):
            for event in batch:
                yield event

    async def batches(self, run_id: str, store: RunStore, after: int = 0) -> AsyncIterator[list[Event]]:
        """The same, as many events at a time as there are."""
        live = self._bus.subscribe(run_id)
        cursor = after
        try:
            while True:
                live.overflowed = False
                if (writer := self._writers.get(run_id)) is not None:
                    await writer.settle()
                while page := await store.read(run_id, cursor, PAGE_EVENTS_MAX):
                    cursor = page[-1].seq
                    yield page
                    if _ends(page[-1]):
                        return
                if run_id not in self._writers and await _has_ended(run_id, store):
                    return
                while not live.overflowed:
                    fresh = [event for event in await live.take() if event.seq > cursor]
                    if not fresh:
                        continue
                    cursor = fresh[-1].seq
                    yield fresh
                    if _ends(fresh[-1]):
                        return
        finally:
            self._bus.unsubscribe(run_id, live)


async def _has_ended(run_id: str, store: RunStore) -> bool:
    """Whether nothing will be added to a log that nobody here writes."""
    record = await store.get(run_id)
    return record is None or record.state.ended or record.state.status == "interrupted"


def _ends(event: Event) -> bool:
    return event.final or event.type == "run.interrupted"
