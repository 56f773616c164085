"""The logs of all runs: their writers in this process, and reading them, live or stored, from wherever one wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

from hermes.bus.memory import MemoryBus, Sink
from hermes.bus.peers import Peers
from hermes.core.events import Event, RunState
from hermes.core.limits import PAGE_EVENTS_MAX, STORE_POLL_S
from hermes.guards.secrets import Secrets
from hermes.runs.commits import LogOutput
from hermes.runs.journal import JournalReader, TailJournal, left_behind
from hermes.runs.remote_runs import Elsewhere
from hermes.runs.writer import RunWriter
from hermes.store.base import RunRecord
from hermes.store.stores import AsyncRuns


class RunLog:
    """The logs of all runs: their writers in this process, and reading them, live or stored.

    A run that another process writes is followed there, and in the store where that process does not tell.
    """

    def __init__(
        self, bus: MemoryBus, *, window_s: float = 0.02, journal: Path | None = None, elsewhere: Elsewhere | None = None
    ) -> None:
        self.bus = bus
        self.elsewhere = elsewhere or Elsewhere(Peers(None))
        self._writers: dict[str, RunWriter] = {}
        # In a server: takes a run up that nobody carries on.
        self.resume: Callable[[RunRecord], Awaitable[None]] | None = None
        self._folder = journal
        self._ephemeral = LogOutput(bus, window_s)
        self._output = self._ephemeral
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

    async def close(self, run_id: str) -> None:
        """The run has ended, or died: whoever still reads it is sent to the store once more, and no further."""
        writer = self._writers.pop(run_id, None)
        if writer is not None:
            await writer.close()
        self.bus.close(run_id)

    async def absorb(self, store: AsyncRuns) -> None:
        """Put into the store what the journals of processes that are gone hold."""
        for journal in await asyncio.to_thread(left_behind, self._folder) if self._folder is not None else ():
            try:
                await store.absorb(journal.tails)
                journal.remove()
            finally:
                journal.close()

    def check_journal(self) -> None:
        """Raise OSError when the journal cannot be written. It blocks."""
        if self._journal is not None:
            self._journal.check()

    def shut(self) -> None:
        if self._journal is not None:
            self._journal.close()

    async def subscribe(self, run_id: str, store: AsyncRuns, after: int = 0) -> AsyncGenerator[Event, None]:
        """Every event later than `after`: stored ones first, then live ones, without gap or repetition."""
        async with aclosing(self.batches(run_id, store, after)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def batches(
        self, run_id: str, store: AsyncRuns, after: int = 0, sink: Sink | None = None
    ) -> AsyncGenerator[list[Event], None]:
        """The events in batches; those that the sink has consumed are left out."""
        live = self.bus.subscribe(run_id, sink)
        cursor, last = after, False
        try:
            while True:
                live.overflowed = False
                writer = self._writers.get(run_id)
                # Then all that there will be is in the store already.
                over = live.closed or writer is None or writer.state.ended
                page: list[Event] = []
                # What has no number yet will come by the bus.
                if writer is None or over or writer.last_seq > cursor:
                    page, full = await self._page(run_id, store, cursor)
                while page:
                    cursor = page[-1].seq
                    yield page
                    if page[-1].final:
                        return
                    # A page that is not full was the last: what came later has come by the bus.
                    page, full = await self._page(run_id, store, cursor) if full else ([], False)
                if over:
                    # Somebody else may be writing it: then there is more to come, or was by the time this is asked.
                    if live.closed or writer is not None or last:
                        return
                    carrier = await store.carrier(run_id)
                    last = carrier is None
                    if carrier is None:
                        continue
                    answered = False
                    async with aclosing(self.elsewhere.batches(run_id, cursor, carrier)) as batches:
                        async for batch in batches:
                            answered = True
                            if not batch:  # it was silent for long: it may have lost the run
                                break
                            cursor = batch[-1].seq
                            yield batch
                            if batch[-1].final:
                                return
                    if not answered and self.resume is not None and (record := await store.get(run_id)) is not None:
                        await self.resume(record)
                    if not answered and run_id not in self._writers:
                        await live.wait(STORE_POLL_S)
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
            self.bus.unsubscribe(run_id, live)

    async def _page(self, run_id: str, store: AsyncRuns, cursor: int) -> tuple[list[Event], bool]:
        """What follows a place in the log, as far as it was given out; and whether there may be more."""
        if (writer := self._writers.get(run_id)) is not None:
            # What gets its number from now on comes by the bus.
            last = writer.last_seq
            page = await store.read(run_id, cursor, PAGE_EVENTS_MAX, streams=writer.streams())
            return [event for event in page if event.seq <= last], len(page) == PAGE_EVENTS_MAX
        tails = await asyncio.to_thread(self._reader.tails, run_id) if self._reader is not None else ()
        page = await store.read(run_id, cursor, PAGE_EVENTS_MAX, tails=tails)
        return page, len(page) == PAGE_EVENTS_MAX
