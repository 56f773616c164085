"""Writes a run's log: volatile text is published at once, durable events after their commit, in one order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Any

from hermes.core.events import DURABLE, ENDING, Cuts, Event, RunState
from hermes.core.json_types import JsonMapping
from hermes.core.limits import HELD_S_MAX, PARTIAL_CHARS_MAX, START_HELD_S_MAX
from hermes.core.spec import RunSpec
from hermes.guards.secrets import Secrets
from hermes.runs.commits import Commit, LogOutput, Pending
from hermes.runs.streams import Stream
from hermes.store.base import LeaseLost, Partial, Row, RunExists
from hermes.store.runs import ClaimedSession, set_session_id
from hermes.store.stores import AsyncRuns


class LogEnded(Exception):
    """The log has its last event."""


def _mark_retrieved(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()


class RunWriter:
    """The only writer of a run's log. Volatile text is published at once, or joined for up to `window_s` with what
    follows; while a durable event is being committed it waits, so that every reader sees one order."""

    def __init__(
        self,
        run_id: str,
        store: AsyncRuns,
        output: LogOutput,
        *,
        secrets: Secrets | None = None,
        last_seq: int = 0,
        state: RunState | None = None,
    ) -> None:
        self.run_id = run_id
        self.token: int | None = None
        self.state = state or RunState()
        self.step = 0
        self.first_delta_at: float | None = None
        self.on_event: Callable[[Event], None] | None = None
        # The run itself, until the first commit has stored it; the limit of its owner, if the store counts; the lease
        # it then gets on a session that is created with it (holder and seconds); and the callback for that.
        self.creates: RunSpec | None = None
        self.owner_max = 0
        self.claims: tuple[str, float] | None = None
        self.on_created: Callable[[ClaimedSession | None], None] | None = None
        # Awaited with the tokens of a run that has ended, before its end is published.
        self.count_end: Callable[[int], Awaitable[None]] | None = None
        # Whether the model may be asked before the start of the run is stored; and whether that may be stored together with
        # the end of the run.
        self.start_may_lag = self.start_may_wait = False
        self.store, self.last_seq = store, last_seq
        # The last number before those of the transaction that is being committed.
        self._committed_seq: int | None = None
        # Whether the last event is being committed, or is stored.
        self.ending = False
        self.joins = output.window_s > 0
        self._bus, self._window_s, self._clock = output.bus, output.window_s, output.clock
        self._saver, self._journal = output.saver, output.journal
        self._secrets = secrets or Secrets()
        self._streams: dict[str, Stream] = {}
        self._pending: Pending = []
        self._commits: list[Commit] = []
        self._awaited = 0
        self._closed = False
        self._draining: asyncio.Task[None] | None = None
        self._join_timer: asyncio.TimerHandle | None = None
        self._held_timer: asyncio.TimerHandle | None = None
        self._saving: asyncio.Future[None] | None = None
        self._unsaved = 0
        # The id of the session that was claimed with the run.
        self._session_id: str | None = None
        # The error of commits that nobody waited for: the next append raises it.
        self._lost: Exception | None = None
        self._latest_ts = 0.0
        self._last_delta_at = -inf
        self._loop = asyncio.get_running_loop()
        # While it is unknown whether this process still has the run; the result is whether it has lost it.
        self._paused: asyncio.Future[bool] | None = None

    @property
    def journals(self) -> bool:
        return self._journal is not None and self._journal.works

    @property
    def shown_seq(self) -> int:
        """The last number that was published or is about to be, without text between events that are not stored yet."""
        return self.last_seq if self._committed_seq is None else self._committed_seq

    @property
    def lease_released(self) -> bool:
        """Whether the commit of the last event has released the session."""
        return self.token is not None and (self.state.ended or self.state.status == "interrupted")

    @property
    def holds_start(self) -> bool:
        """Whether nothing of the run is stored yet, and need not be before more has happened."""
        return self.start_may_wait and self.creates is not None

    @property
    def start_lags(self) -> bool:
        """Whether nothing of the run is stored yet, and need not be before the model is asked."""
        return self.start_may_lag and self.creates is not None

    # --- volatile -----------------------------------------------------------------------------------------------

    def text(self, message_id: str, text: str) -> None:
        stream = self._streams.get(message_id)
        if stream is None:
            stream = self._open(message_id, "text", "text.delta", {"message_id": message_id})
        self._write(stream, text)

    def reasoning(self, message_id: str, text: str, form: str) -> None:
        """The first form of a message's reasoning applies to all of it."""
        stream_id, fixed = f"{message_id}:reasoning", {"message_id": message_id, "form": form}
        stream = self._streams.get(stream_id) or self._open(stream_id, "reasoning", "reasoning.delta", fixed)
        self._write(stream, text)

    def output(self, call_id: str, text: str, name: str = "stdout") -> None:
        stream_id, fixed = f"{call_id}/{name}", {"call_id": call_id, "stream": name}
        self._write(self._streams.get(stream_id) or self._open(stream_id, "tool", "tool.output", fixed), text)

    def drafted(self, message_id: str, index: int, name: str) -> None:
        """The model has started to write a call: published live, never stored."""
        self._pending.append((None, {"message_id": message_id, "index": index, "name": name}))
        self.flush()

    def text_of(self, stream_id: str) -> str:
        """All text of an open stream that was published or is about to be, including what its mask holds back."""
        stream = self._streams.get(stream_id)
        return stream.text + stream.mask.held if stream and not stream.completed else ""

    def flush(self) -> None:
        """Publish text that waits to be joined, unless a durable event is being committed: then it follows that."""
        if not self._awaited and self._pending:
            pending, self._pending = self._pending, []
            self._publish(pending)

    def pause(self) -> None:
        """Publish nothing until `go_on`: another process may have taken the run over."""
        if self._paused is None:
            self._paused = self._loop.create_future()
            self._awaited += 1

    def go_on(self, *, lost: bool = False) -> None:
        """The run is still this process's, or `lost`: then nothing that waits is ever published."""
        if lost:
            self.pause()
        if self._paused is None:
            return
        if not self._paused.done():
            self._paused.set_result(lost)
        if not lost:
            self._paused = None
            self._awaited -= 1
            if self._draining is None:
                self.flush()

    def give_up_if_paused(self) -> None:
        if self._paused is not None:
            self.go_on(lost=True)

    def _open(self, id_: str, kind: str, type_: str, fixed: dict[str, str]) -> Stream:
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
            self._show(stream, self._numbered(stream, text))
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
            if stream is not None:
                self._show(stream, self._numbered(stream, content))
                continue
            self.last_seq += 1
            event = Event(self.run_id, "tool.drafted", self.step, content, self.last_seq, self._now())
            if self._journal is not None:
                self._journal.publish(event)
            else:
                self._bus.publish(self.run_id, event)

    def _numbered(self, stream: Stream, text: str) -> Event:
        """Assign a piece of text its number in the log."""
        seq = self.last_seq = self.last_seq + 1
        ts, size = self._now(), len(text)
        data = {**stream.fixed, "offset": stream.length, "text": text}
        event = Event(self.run_id, stream.type, stream.step, data, seq, ts)
        stream.cuts.add(seq, size, ts)
        stream.length += size
        stream.last_seq = seq
        return event

    def _show(self, stream: Stream, event: Event) -> None:
        """Publish a piece of text that is not stored, through the journal."""
        if self._journal is not None:
            self._journal.add(stream, event)
        else:
            self._bus.publish(self.run_id, event)
        size = len(event.data["text"])
        unsaved, self._unsaved = self._unsaved, self._unsaved + size
        if not unsaved:
            self._saver.add(self)
        elif unsaved <= PARTIAL_CHARS_MAX < self._unsaved and not self.ending and not self.journals:
            self._commits.append(Commit())
            self._begin_to_drain()

    def grown(self, saving: asyncio.Future[None]) -> tuple[int | None, list[Partial]] | None:
        """The token, and what has grown since the last save, to be stored until `saving` is done. None while another
        commit is on its way: the rest follows that."""
        if self._closed:  # whoever continues it has what is stored
            return None
        if self._draining is not None:
            self._saver.add(self)
        elif not self.ending and (partials := [stream.unsaved() for stream in self._unsaved_streams()]):
            self._saving = saving
            return self.token, partials
        return None

    def saved(self, partials: Sequence[Partial]) -> None:
        for partial in partials:
            if (stream := self._streams.get(partial.stream_id)) is not None:
                stream.saved(partial)
                self._release(stream)
        self._unsaved = 0
        if self._unsaved_streams():
            self._unsaved = 1
            self._saver.add(self)

    async def put_on_record(self) -> None:
        if self.creates is not None:
            await self.settle()

    async def settle(self) -> None:
        if not self.ending:
            await self._enqueue(Commit())
        elif self._draining is not None:
            await asyncio.wait([self._draining])

    def restore(self, partials: Sequence[Partial]) -> None:
        """Continue the open messages of an interrupted run."""
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
            stream.may_be_stored = True
            stream.saved(partial)

    # --- durable ------------------------------------------------------------------------------------------------

    def event(self, type_: str, **data: Any) -> Event:
        """An event of the current step, not yet in the log. Events about the whole run have no step."""
        return Event(self.run_id, type_, 0 if type_.startswith("run.") else self.step, data)

    async def append(
        self,
        *events: Event,
        rows: Sequence[Row] = (),
        session: JsonMapping | None = None,
        closes: Sequence[str] = (),
        sync: bool = False,
        hold: bool = False,
    ) -> None:
        """Commit events with the rows they announce; readers see them only then."""
        await self.commit(Commit(events, rows, session, closes, sync=sync, hold=hold))

    async def commit(self, commit: Commit) -> None:
        """The same of a commit that has more to it."""
        if (done := self.begin(commit)) is not None:
            await done

    def begin(self, commit: Commit) -> asyncio.Future[None] | None:
        """Commit without waiting; what is written meanwhile is published after it. None: it is held."""
        if self.ending:
            raise LogEnded(self.run_id)
        if self._lost is not None:
            error, self._lost = self._lost, None
            raise error
        for event in commit.events:
            assert event.type in DURABLE, "only these may be committed"
            if event.type in ENDING:
                self.ending = True
        commit.before, self._pending = self._pending, []
        self._awaited += 1
        if commit.hold:
            self._commits.append(commit)
            if self._held_timer is None:
                wait_s = START_HELD_S_MAX if self.holds_start else HELD_S_MAX
                self._held_timer = self._loop.call_later(wait_s, self._begin_to_drain)
            return None
        return self._enqueue(commit)

    def _enqueue(self, commit: Commit) -> asyncio.Future[None]:
        done = commit.done = self._loop.create_future()
        # An error that nobody waits for any more is not reported as unretrieved.
        done.add_done_callback(_mark_retrieved)
        self._commits.append(commit)
        self._begin_to_drain()
        return done

    def _begin_to_drain(self) -> None:
        if self._held_timer is not None:
            self._held_timer.cancel()
            self._held_timer = None
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())

    async def emit(self, type_: str, *, rows: Sequence[Row] = (), sync: bool = False, **data: Any) -> Event:
        event = self.event(type_, **data)
        await self.append(event, rows=rows, sync=sync)
        return event

    async def complete(
        self, message_id: str, row: Row, *, after: Sequence[Event] = (), hold: bool = False, **data: Any
    ) -> None:
        """Commit a whole message: its row, its completion and `after`. The row gets the published text."""
        text, reasoning = self._end_stream(message_id), self._end_stream(f"{message_id}:reasoning")
        row.content, row.reasoning = text.text if text else "", reasoning.text if reasoning else None
        done = self.event("message.completed", message_id=message_id, row=None, text_length=len(row.content), **data)
        streams = [(done, text)]
        if reasoning is not None:
            form = {"chars": len(reasoning.text), "form": reasoning.form}
            streams.insert(0, (self.event("reasoning.completed", message_id=message_id, row=None, **form), reasoning))
        closes: list[str] = []
        for event, stream in streams:
            row.announced_in = (*row.announced_in, (event, "row"))
            if stream is not None:
                stream.completed = True
                closes.append(stream.id)

        def add_cuts() -> None:
            for event, stream in streams:
                event.data["cuts"] = stream.cuts.compressed() if stream else ""

        events = [event for event, _ in streams]
        await self.commit(Commit([*events, *after], [row], closes=closes, prepare=add_cuts, hold=hold))

    def _end_stream(self, stream_id: str) -> Stream | None:
        """The stream, with what its mask still held back."""
        stream = self._streams.get(stream_id)
        if stream is not None and (text := stream.mask.finish()):
            self._accept(stream, text)
        return stream

    def end_output(self, call_id: str) -> Sequence[str]:
        """The streams of a tool that has ended, to be closed by the commit that says so."""
        ids = [stream.id for stream in self._streams.values() if stream.fixed.get("call_id") == call_id]
        for stream_id in ids:
            self._end_stream(stream_id)
        return ids

    async def _drain(self) -> None:
        try:
            while self._commits:
                if self._saving is not None:
                    await asyncio.wait([self._saving])
                    self._saving = None
                batch = self._next_batch()
                try:
                    await self._until_certain()
                    await (self._commit(batch) if batch[0].events else self._save_partials())
                except Exception as error:  # noqa: BLE001  (waiters get it)
                    if self._retry_start(batch, error):
                        self._awaited += len(batch)
                        return
                    if self.creates is not None:  # what follows the start of a run depends on it
                        batch, self._commits = [*batch, *self._commits], []
                    for commit in batch:
                        self._fail_commit(commit, error)
                    if all(commit.hold for commit in batch):
                        self._lost = error
                else:
                    for commit in batch:
                        if commit.done is not None and not commit.done.done():
                            commit.done.set_result(None)
                finally:
                    self._committed_seq = None
                    self._awaited -= len(batch) if batch[0].events else 0
        finally:
            self._draining = None
        if self._pending:
            self.flush()

    async def _until_certain(self) -> None:
        """Wait while it is unknown whether this process still has the run; raise LeaseLost if it has lost it."""
        if self._paused is not None and await asyncio.shield(self._paused):
            raise LeaseLost(f"The run {self.run_id} has lost its session.")

    def _retry_start(self, batch: list[Commit], error: Exception) -> bool:
        """Whether the start of a run that could not be stored is retried with what follows: nothing of the run can be
        stored without it."""
        following = self._commits
        retry = self.creates is not None and not any(commit.events for commit in following)
        retry = retry and not isinstance(error, RunExists)
        if retry := retry and all(commit.hold and not commit.before for commit in batch):
            self.last_seq = batch[0].events[0].seq - 1
            self._commits = batch
            for commit in following:
                self._fail_commit(commit, error)
        return retry

    def _next_batch(self) -> list[Commit]:
        """The next commit, and those after it that can share its transaction."""
        commits = self._commits
        batch = [commits.pop(0)]
        if batch[0].shares:
            # Callbacks of a commit may change what the next one contains.
            while commits and batch[-1].then is None and commits[0].follows():
                batch.append(commits.pop(0))
        return batch

    def _fail_commit(self, commit: Commit, error: Exception) -> None:
        for stream_id in commit.closes:
            if (stream := self._streams.get(stream_id)) is not None:
                stream.completed = False
        if any(event.type in ENDING for event in commit.events):
            self.ending = False
        if not commit.events and not self._closed:
            self._saver.add(self)
        if commit.done is not None and not commit.done.done():
            commit.done.set_exception(error)

    async def _commit(self, batch: list[Commit]) -> None:
        first = batch[0]
        if first.before:
            self._publish(first.before)
        self._committed_seq = self.last_seq
        joined = Commit()
        # Texts that start and end within the transaction are published with what is around them. They need no journal,
        # unless it fails.
        texts: dict[Commit, list[tuple[Stream, Event]]] = {}
        for commit in batch:
            for stream, text in commit.before if commit is not first else ():
                assert stream is not None
                texts.setdefault(commit, []).append((stream, self._numbered(stream, text)))
            if commit.prepare is not None:
                commit.prepare()
            for event in commit.events:
                self.last_seq += 1
                event.seq, event.ts = self.last_seq, self._clock()
            joined.join(commit)
        if self._session_id is not None:  # events made before that have another
            set_session_id(self._session_id, joined.events, joined.rows)
            if joined.session is not None:
                joined.session = {**joined.session, "id": self._session_id}
        partials: list[Partial] = []
        closes: list[str] = []
        if self._streams:
            partials = [stream.unsaved() for stream in self._unsaved_streams() if stream.id not in joined.closes]
        if joined.closes:  # the store does not know a text that was published and ended between two commits
            closes = [
                closed_id
                for closed_id in joined.closes
                if (open_stream := self._streams.get(closed_id)) is None or open_stream.may_be_stored
            ]
        try:
            claimed = await self.store.append(
                self.run_id,
                self.token,
                joined.events,
                joined.rows,
                session=joined.session,
                partials=partials,
                closes=closes,
                replaces=joined.replaces,
                annotate=joined.annotate,
                sync=joined.sync,
                creates=self.creates,
                claims=self.claims,
                owner_max=self.owner_max,
            )
        except LeaseLost:
            raise
        except Exception:
            await self._until_certain()
            for stream, event in (piece for pieces in texts.values() for piece in pieces):
                self._show(stream, event)
            raise
        if self.creates is not None:
            if claimed is not None:
                self.token = claimed.token
                self._session_id = claimed.session_id
            self.creates = self.claims = None
            if self.on_created is not None:
                self.on_created(claimed)
        if self.count_end is not None and joined.events and joined.events[-1].final:
            await self.count_end(joined.events[-1].data.get("usage", {}).get("total_tokens") or 0)
        for row in joined.rows:
            for event, _ in row.announced_in if row.role == "assistant" else ():
                event.message_row = row
            row.announced_in = ()
        for stream_id in joined.closes:
            if (stream := self._streams.pop(stream_id, None)) is not None:
                self._release(stream, closed=True)
        if self._streams or partials:
            self.saved(partials)
        for commit in batch:
            for _, event in texts.get(commit, ()):
                self._deliver(event)
            for event in commit.events:
                self.state.apply(event)
                self._deliver(event)
                if self.on_event is not None:
                    self.on_event(event)
            if commit.then is not None:
                commit.then()

    async def _save_partials(self) -> None:
        if partials := [stream.unsaved() for stream in self._unsaved_streams()]:
            await self.store.put_partials(self.run_id, self.token, partials)
            self.saved(partials)

    async def save_rest(self, token: int | None) -> None:
        """Save the texts of a log that was closed while the store was unavailable."""
        self.token = token
        await self._save_partials()
        for stream in self._streams.values():
            self._release(stream, closed=True)

    def _unsaved_streams(self) -> list[Stream]:
        return [stream for stream in self._streams.values() if stream.last_seq > stream.saved_seq]

    # --- common -------------------------------------------------------------------------------------------------

    def streams(self) -> list[Partial]:
        return [stream.partial(whole=True) for stream in self._streams.values() if stream.length]

    def _release(self, stream: Stream, *, closed: bool = False) -> None:
        """The journal need not keep what is stored."""
        if self._journal is not None:
            self._journal.release(stream, inf if closed else stream.saved_seq)

    def _deliver(self, event: Event) -> None:
        if self._journal is not None and self._journal.waiting:
            self._journal.flush()
        self._bus.publish(self.run_id, event)

    def _now(self) -> float:
        # The log's clock is monotonic even if the system's is set back.
        now = int(self._clock() * 1000) / 1000
        if now > self._latest_ts:
            self._latest_ts = now
        return self._latest_ts

    def drop_start(self) -> None:
        """Do not retry to store the start of the run."""
        self._commits = []
        if self._held_timer is not None:
            self._held_timer.cancel()
            self._held_timer = None

    async def close(self) -> None:
        """Cancel the timers and tasks of this log."""
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
