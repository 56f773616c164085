"""The logs of all runs: their writers in this process, and reading them, live or stored, from any cursor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from hermes.bus.memory import MemoryBus, Sink, Subscription
from hermes.bus.peers import Peers
from hermes.core.events import ENDING, Event, RunState
from hermes.core.limits import PAGE_EVENTS_MAX, PEER_IDLE_S, STORE_POLL_S
from hermes.core.processes import is_gone
from hermes.guards.secrets import Secrets
from hermes.runs.commits import LogOutput
from hermes.runs.journal import JournalReader, LeftBehind, TailJournal, left_behind, writer_of
from hermes.runs.remote_runs import Elsewhere
from hermes.runs.streams import tails_of
from hermes.runs.writer import RunWriter
from hermes.store.base import RunRecord, Tail
from hermes.store.stores import AsyncRuns


class RunLog:
    """The logs of all runs. A run of another process is followed there, or in the store if that process does not
    answer."""

    def __init__(
        self, bus: MemoryBus, *, window_s: float = 0.02, journal: Path | None = None, elsewhere: Elsewhere | None = None
    ) -> None:
        self.bus = bus
        self.elsewhere = elsewhere or Elsewhere(Peers(None))
        self._writers: dict[str, RunWriter] = {}
        # Runs that ended here while the store was unavailable: their unrecorded end, and the log so far.
        self.unrecorded_ends: dict[str, tuple[Event, RunWriter]] = {}
        # In a server: resumes a run without a process.
        self.resume: Callable[[RunRecord], Awaitable[None]] | None = None
        self._folder = journal
        self._ephemeral = LogOutput(bus.local, window_s)
        self._output = LogOutput(bus, window_s, saver=self._ephemeral.saver)
        self._journal: TailJournal | None = None
        self._reader: JournalReader | None = None
        if journal is not None:
            self._journal = TailJournal(journal, bus, self._ephemeral.saver.begin)
            self._output = LogOutput(bus, window_s, self._journal, self._ephemeral.saver)
            self._reader = JournalReader(journal)

    def open(
        self,
        run_id: str,
        store: AsyncRuns,
        *,
        secrets: Secrets,
        last_seq: int = 0,
        state: RunState | None = None,
        persist: bool = True,
    ) -> RunWriter:
        output = self._output if persist else self._ephemeral
        writer = RunWriter(run_id, store, output, secrets=secrets, last_seq=last_seq, state=state)
        self._writers[run_id] = writer
        return writer

    def writer(self, run_id: str) -> RunWriter | None:
        return self._writers.get(run_id)

    def has_subscribers(self, run_id: str) -> bool:
        return self.bus.has_subscribers(run_id)

    async def release(self, writer: RunWriter) -> None:
        """Another process continues the run: its readers here follow it there."""
        if await self._close(writer):
            self.bus.release(writer.run_id)

    async def close(self, writer: RunWriter) -> None:
        """The run has ended or died: its readers read the store once more."""
        if await self._close(writer):
            self.bus.close(writer.run_id)

    async def _close(self, writer: RunWriter) -> bool:
        """False: another writer of the run exists here, because it was resumed."""
        if self._writers.get(writer.run_id) is writer:
            del self._writers[writer.run_id]
        await writer.close()
        return writer.run_id not in self._writers

    async def absorb(self, store: AsyncRuns) -> None:
        """Move the journals of dead processes to the store."""
        for journal in await asyncio.to_thread(left_behind, self._folder) if self._folder is not None else ():
            try:
                tails = journal.tails
                if self.bus.follows:
                    tails = {run_id: tails[run_id] for run_id in tails if await self._is_left(run_id, journal, store)}
                await store.absorb(tails)
                journal.remove()
            finally:
                journal.close()

    @staticmethod
    async def _is_left(run_id: str, journal: LeftBehind, store: AsyncRuns) -> bool:
        """Whether nobody has adopted a run since the journal was written; otherwise its content is stale. A process
        that only has the session's lease so far is about to look for this journal."""
        record = await store.get(run_id)
        return record is not None and journal.writer in ("", writer_of(record.holder))

    async def absorb_from(self, run_id: str, store: AsyncRuns, holder: str) -> None:
        """Move to the store what a process has shown of a run that it may believe to own: it may be suspended, or cut
        off from the store. Its journal has it or, if that is on another disk, the bus."""
        if not self.bus.follows:
            return
        tails = await asyncio.to_thread(self._reader.tails, run_id, holder) if self._reader is not None else []
        if tails:
            await store.absorb({run_id: tails})
        partials, record = await store.partials(run_id), await store.get(run_id)
        last = max([record.state.last_seq if record else 0, *(partial.last_seq for partial in partials)])
        if shown := tails_of(await self.bus.recent(run_id, last)):
            await store.absorb({run_id: shown})

    def check_journal(self) -> None:
        """Raise OSError if the journal cannot be written. Blocks."""
        if self._journal is not None:
            self._journal.check()

    def shut(self) -> None:
        if self._journal is not None:
            self._journal.close()

    async def subscribe(self, run_id: str, store: AsyncRuns, after: int = 0) -> AsyncGenerator[Event, None]:
        """Every event after `after`: stored ones first, then live ones, without gaps or repetitions."""
        async with aclosing(self.batches(run_id, store, after)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def batches(
        self, run_id: str, store: AsyncRuns, after: int = 0, sink: Sink | None = None
    ) -> AsyncGenerator[list[Event], None]:
        """The events in batches, without those that the sink has consumed."""
        live = self.bus.subscribe(run_id, sink)
        followed = False
        cursor, last, quiet = after, False, False
        try:
            while True:
                cursor = max(cursor, live.delivered_seq)
                writer = self._writers.get(run_id)
                live.restart(keep=writer is None)
                if writer is not None or self.bus.follows:
                    live.closed = False  # a run closed here may continue, here or in another process
                if self.bus.follows and writer is None and not followed:
                    followed = True
                    await self.bus.watch(run_id, live)
                # Everything is in the store already. A log that is closed while the store is read has got its last
                # events meanwhile: the store is read once more.
                closed = live.closed
                over = writer is None or writer.state.ended
                page: list[Event] = []
                # Unnumbered events will come through the bus.
                if writer is None or over or writer.last_seq > cursor:
                    page, full = await self._page(run_id, store, cursor)
                while page:
                    cursor = page[-1].seq
                    yield page
                    if page[-1].final:
                        return
                    # A page that is not full was the last: later events came through the bus.
                    page, full = await self._page(run_id, store, cursor) if full else ([], False)
                if over:
                    # Another process may be writing it: then more may come.
                    if closed or writer is not None or last or run_id in self.unrecorded_ends:
                        return
                    carrier = await store.carrier(run_id)
                    last = carrier is None
                    if carrier is None:
                        continue
                    if followed and (quiet or is_gone(carrier)):
                        await self._resume_if_left(run_id, store)
                    source = (
                        self._followed(run_id, cursor, live)
                        if followed
                        else self.elsewhere.batches(run_id, cursor, carrier)
                    )
                    quiet = True
                    async with aclosing(source) as batches:
                        async for batch in batches:
                            quiet = False
                            if not batch:  # it was silent for long: it may have lost the run
                                break
                            cursor = batch[-1].seq
                            yield batch
                            if batch[-1].final:
                                return
                    if quiet and not followed:
                        await self._resume_if_left(run_id, store)
                        if run_id not in self._writers:
                            await live.wait(STORE_POLL_S)
                    continue
                if not live.join(cursor):
                    continue
                while not live.overflowed and not live.closed:
                    events = await live.take()
                    cursor = max(cursor, live.delivered_seq)
                    # They are in order: mostly all of them are new.
                    new_events = events
                    if events and events[0].seq <= cursor:
                        new_events = [event for event in events if event.seq > cursor]
                    if not new_events:
                        continue
                    cursor = new_events[-1].seq
                    yield new_events
                    if new_events[-1].final:
                        return
        finally:
            if followed:
                self.bus.unwatch(run_id, live)
            self.bus.unsubscribe(run_id, live)

    async def _followed(self, run_id: str, cursor: int, live: Subscription) -> AsyncGenerator[list[Event], None]:
        """What another process publishes of a run after the stored part, until something is missing, nothing came for
        long, or the run continues here."""
        # What was published before this process had subscribed is in no store or journal that can be read here.
        if events := await self.bus.recent(run_id, cursor):
            cursor = events[-1].seq
            yield events
        if not live.join(cursor):
            if run_id not in self._writers:  # what is missing may not be in the store yet
                await asyncio.sleep(STORE_POLL_S)
            return
        if not self.bus.connected:
            await live.wait(STORE_POLL_S)
            return
        while not live.overflowed and not live.closed and run_id not in self._writers:
            timer = asyncio.get_running_loop().call_later(PEER_IDLE_S, live.wake)
            try:
                events = await live.take()
            finally:
                timer.cancel()
            if not events and live.delivered_seq <= cursor:
                return
            cursor = max(cursor, live.delivered_seq)
            new_events = [event for event in events if event.seq > cursor]
            if new_events:
                cursor = new_events[-1].seq
                yield new_events
                if new_events[-1].type in ENDING:
                    return

    async def _resume_if_left(self, run_id: str, store: AsyncRuns) -> None:
        if self.resume is not None and (record := await store.get(run_id)) is not None:
            await self.resume(record)

    async def _page(self, run_id: str, store: AsyncRuns, cursor: int) -> tuple[list[Event], bool]:
        """The published events after a cursor, and whether there may be more."""
        if (writer := self._writers.get(run_id)) is not None:
            # Later events come through the bus.
            last = writer.shown_seq
            page = await store.read(run_id, cursor, PAGE_EVENTS_MAX, streams=writer.streams())
            return [event for event in page if event.seq <= last], len(page) == PAGE_EVENTS_MAX
        tails: Sequence[Tail] = ()
        if self._reader is not None:
            # Of a process that has lost the run, only what was moved to the store is in the log.
            holder = await store.carrier(run_id) if self.bus.follows else None
            tails = await asyncio.to_thread(self._reader.tails, run_id, holder)
        page = await store.read(run_id, cursor, PAGE_EVENTS_MAX, tails=tails)
        return page, len(page) == PAGE_EVENTS_MAX
