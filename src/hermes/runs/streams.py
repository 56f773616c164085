"""Growing texts: what of each was published, what is stored, and saving the rest now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from hermes.core.events import Cuts, Event, packed_size
from hermes.core.limits import JOURNALED_S_MAX, PARTIAL_S_MAX
from hermes.guards.secrets import StreamMask
from hermes.store.base import Partial, Tail

if TYPE_CHECKING:
    from hermes.runs.journal import JournalFile
    from hermes.runs.writer import RunWriter


class Stream(msgspec.Struct, eq=False):
    """A growing text: a message's text or reasoning, or an output of a tool. `pieces` is all that was written, `length`
    how much of it was published, `saved…` how much is stored for certain, `journal…` its position in the journal. It
    `may_be_stored` once a save was tried, since one that failed may have been carried out. It is `completed` when a
    commit that closes it is on its way."""

    id: str
    kind: str
    type: str
    step: int
    fixed: dict[str, str]
    mask: StreamMask
    pieces: list[str] = []
    cuts: Cuts = msgspec.field(default_factory=Cuts)
    length: int = 0
    last_seq: int = 0
    saved_seq: int = 0
    saved_length: int = 0
    saved_cuts: int = 0
    may_be_stored: bool = False
    journal: JournalFile | None = None
    journal_number: int = 0
    journal_seq: int = 0
    journal_ms: int = 0
    completed: bool = False

    @property
    def form(self) -> str:
        return self.fixed.get("form") or self.fixed.get("stream") or ""

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def partial(self, *, whole: bool = False) -> Partial:
        offset, start = (0, 0) if whole else (self.saved_length, self.saved_cuts)
        text, cuts = self.text[offset : self.length], self.cuts.pack(start)
        return Partial(self.id, self.kind, self.step, text, cuts, self.last_seq, self.form, offset)

    def unsaved(self) -> Partial:
        """What has grown since the last save, for the next one."""
        self.may_be_stored = True
        return self.partial()

    def saved(self, partial: Partial) -> None:
        self.saved_seq, self.saved_length = partial.last_seq, partial.offset + len(partial.text)
        self.saved_cuts += packed_size(partial.cuts)


class Saver:
    """Saves the grown texts of all runs together."""

    def __init__(self) -> None:
        self._due: dict[RunWriter, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, writer: RunWriter) -> None:
        """A text of this log has grown. With a journal there is more time."""
        self._due[writer] = None
        loop, wait_s = asyncio.get_running_loop(), JOURNALED_S_MAX if writer.journals else PARTIAL_S_MAX
        if self._timer is not None and self._timer.when() > loop.time() + wait_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = loop.call_later(wait_s, self.begin)

    def drop(self, writer: RunWriter) -> None:
        self._due.pop(writer, None)
        if not self._due and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due, self._due = self._due, {}
        task = asyncio.get_running_loop().create_task(self._save(due))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _save(self, writers: Iterable[RunWriter]) -> None:
        saving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        batches = [(writer, grown) for writer in writers if (grown := writer.grown(saving)) is not None]
        try:
            for store in {writer.store for writer, _ in batches}:
                store_batches = [(writer, grown) for writer, grown in batches if writer.store is store]
                try:
                    await store.put_grown([(writer.run_id, *grown) for writer, grown in store_batches])
                except Exception:  # noqa: BLE001  (unsaved text is saved with what follows)
                    for writer, _ in store_batches:
                        self.add(writer)
                else:
                    for writer, (_, partials) in store_batches:
                        writer.saved(partials)
        finally:
            saving.set_result(None)


def tails_of(events: Iterable[Event]) -> list[Tail]:
    """The deltas among events, by stream."""
    tails: dict[str, Tail] = {}
    for event in events:
        data = event.data
        if event.type == "text.delta":
            stream = data["message_id"], "text", ""
        elif event.type == "reasoning.delta":
            stream = f"{data['message_id']}:reasoning", "reasoning", data["form"]
        elif event.type == "tool.output":
            stream = f"{data['call_id']}/{data['stream']}", "tool", data["stream"]
        else:
            continue
        stream_id, kind, form = stream
        tail = tails.setdefault(stream_id, Tail(stream_id, kind, event.step, form, data["offset"]))
        tail.deltas.append((event.seq, round(event.ts * 1000), data["text"]))
    return list(tails.values())
