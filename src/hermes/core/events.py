"""The events of a run's log, how durable each is, and the status that follows from them."""

from __future__ import annotations

import zlib
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec

from hermes.core.json_types import JsonObject
from hermes.core.limits import CUTS_COMPRESSED_BYTES_MIN

# The statuses that the API shows; an interrupted run is shown as queued.
ShownStatus = Literal[
    "queued", "running", "waiting_for_approval", "waiting_for_input", "stopping", "completed", "failed", "cancelled"
]
Status = Literal[ShownStatus, "interrupted"]

FINAL = frozenset({"run.completed", "run.failed", "run.cancelled"})
# Last events of a log, unless another process resumes an interrupted run.
ENDING = FINAL | {"run.interrupted"}
# Delivered at once; their content is stored a little later, always before the next durable event.
VOLATILE = frozenset({"text.delta", "reasoning.delta", "tool.drafted", "tool.output"})
DURABLE = FINAL | {
    "run.queued", "run.started", "run.resumed", "run.interrupted", "control.received",
    "model.started", "model.retrying", "model.switched", "reasoning.completed", "message.completed", "usage",
    "approval.requested", "approval.resolved", "clarify.requested", "clarify.resolved",
    "tool.started", "tool.finished", "subagent.started", "subagent.finished",
    "steer.applied", "context.compacted", "notice",
}  # fmt: skip


class Event(msgspec.Struct, eq=False):
    """One entry of the log. `seq` and `ts` are set when it enters the log."""

    run_id: str
    type: str
    step: int = 0
    data: JsonObject = msgspec.field(default_factory=dict)
    seq: int = 0
    ts: float = 0.0
    # The model's message that it announces, for live readers.
    message_row: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and self.as_dict() == other.as_dict()

    __hash__ = None  # type: ignore[assignment]

    def as_dict(self) -> JsonObject:
        head = {"run_id": self.run_id, "seq": self.seq, "ts": self.ts, "type": self.type, "step": self.step}
        return {**head, **self.data}

    @property
    def final(self) -> bool:
        return self.type in FINAL

    @property
    def size(self) -> int:
        """Roughly the bytes it takes in a reader's queue."""
        text = self.data.get("text")
        return 200 + (len(text) if isinstance(text, str) else 8 * len(self.data))


# --- status ----------------------------------------------------------------------------------------------------------

# Most events: they do not change the status of a running run.
_NEUTRAL = VOLATILE | {
    *("model.started", "reasoning.completed", "message.completed", "usage", "tool.started", "tool.finished")
}
_FINAL_STATUS: dict[str, Status] = {"run.completed": "completed", "run.failed": "failed", "run.cancelled": "cancelled"}


class RunState(msgspec.Struct):
    """The fold of a log: the only definition of a run's status."""

    status: Status = "queued"
    stopping: bool = False
    approvals: dict[str, JsonObject] = msgspec.field(default_factory=dict)
    questions: dict[str, JsonObject] = msgspec.field(default_factory=dict)
    controls: set[str] = msgspec.field(default_factory=set)
    started_at: float | None = None
    ended_at: float | None = None
    last_event: str = ""
    last_seq: int = 0
    model: str = ""
    provider: str = ""
    failure: str = ""
    code: str = ""
    error: str = ""
    usage: JsonObject = msgspec.field(default_factory=dict)
    final_row: int | None = None

    @property
    def ended(self) -> bool:
        return self.status in ("completed", "failed", "cancelled")

    def apply(self, event: Event) -> None:
        kind, data = event.type, event.data
        self.last_event, self.last_seq = kind, event.seq
        if kind in _NEUTRAL and self.status == "running":
            return
        if kind in VOLATILE or self.ended:
            return
        if kind == "control.received":
            self.controls.add(data["control_id"])
            self.stopping = self.stopping or data["control"] in ("interrupt", "cancel")
        elif kind == "run.started":
            self.started_at, self.model, self.provider = event.ts, data["model"], data["provider"]
        elif kind == "model.switched":
            self.model, self.provider = data["to"]["model"], data["to"]["provider"]
        elif kind == "approval.requested":
            self.approvals[data["approval_id"]] = data
        elif kind == "approval.resolved":
            self.approvals.pop(data["approval_id"], None)
        elif kind == "clarify.requested":
            self.questions[data["request_id"]] = data
        elif kind == "clarify.resolved":
            self.questions.pop(data["request_id"], None)
        elif kind in FINAL:
            self.ended_at = event.ts
            self.failure, self.code = data.get("failure") or "", data.get("code") or ""
            self.error = data.get("error") or ""
            self.usage = data.get("usage", {})
            self.final_row = data.get("row", data.get("partial_row"))
        self.status = self._status(kind)

    def _status(self, kind: str) -> Status:
        if kind in _FINAL_STATUS:
            return _FINAL_STATUS[kind]
        if kind == "run.interrupted":
            return "interrupted"
        if kind == "run.queued" or self.started_at is None:
            return "queued"
        if self.stopping:
            return "stopping"
        if self.approvals:
            return "waiting_for_approval"
        return "waiting_for_input" if self.questions else "running"


def fold(events: Iterator[Event] | list[Event]) -> RunState:
    state = RunState()
    for event in events:
        state.apply(event)
    return state


# --- cuts ------------------------------------------------------------------------------------------------------------


_COMPRESSED = ":"


class Cuts:
    """Where a text was cut into deltas: sequence number, length and time of each, packed.

    With the text itself they restore the very same events, so that the log keeps no second copy of a transcript.
    """

    __slots__ = ("_at_ms", "_packed", "_seq")

    def __init__(self) -> None:
        self._packed = bytearray()
        self._seq = 0
        self._at_ms = 0

    def __bool__(self) -> bool:
        return bool(self._packed)

    def add(self, seq: int, length: int, ts: float) -> None:
        """Times are stored in milliseconds, the resolution of `ts` in deltas."""
        passed_ms = max(0, round(ts * 1000) - self._at_ms)
        numbers = (seq - self._seq, length, passed_ms)
        if max(numbers) <= 0x7F:
            self._packed += bytes(numbers)
        else:
            for number in numbers:
                while number > 0x7F:
                    self._packed.append(0x80 | number & 0x7F)
                    number >>= 7
                self._packed.append(number)
        self._seq, self._at_ms = seq, self._at_ms + passed_ms

    @classmethod
    def load(cls, packed: str) -> Cuts:
        cuts = cls()
        seqs, _, times = _unpacked(packed)
        if seqs:
            cuts._packed, cuts._seq, cuts._at_ms = bytearray(b64decode(packed)), seqs[-1], times[-1]
        return cuts

    def pack(self, start: int = 0) -> str:
        """As text, for storing; only what was added since it had the size `start`, to be appended."""
        return b64encode(self._packed[start:]).decode()

    def compressed(self) -> str:
        """As compressed text, for storing once complete."""
        if len(self._packed) < CUTS_COMPRESSED_BYTES_MIN:
            return self.pack()
        return _COMPRESSED + b64encode(zlib.compress(self._packed, 1)).decode()

    @property
    def size(self) -> int:
        return len(self._packed)

    @staticmethod
    def join(packed: Sequence[str]) -> str:
        return packed[0] if len(packed) == 1 else b64encode(b"".join(map(b64decode, packed))).decode()

    @staticmethod
    def unpack(packed: str) -> Iterator[tuple[int, int, float]]:
        seqs, offsets, times = _unpacked(packed)
        for at, seq in enumerate(seqs):
            yield seq, offsets[at + 1] - offsets[at], times[at] / 1000


def packed_size(packed: str) -> int:
    return len(packed) // 4 * 3 - packed[-2:].count("=")


@lru_cache(maxsize=32)
def _unpacked(packed: str) -> tuple[array[int], array[int], array[int]]:
    """Numbers, offsets (with the end) and times in milliseconds. Cached, because a long log is read page by page."""
    seqs, offsets, times = array("q"), array("q", [0]), array("q")
    seq = at_ms = number = shift = 0
    triple: list[int] = []
    data = zlib.decompress(b64decode(packed[1:])) if packed.startswith(_COMPRESSED) else b64decode(packed)
    for byte in data:
        number |= (byte & 0x7F) << shift
        if byte & 0x80:
            shift += 7
            continue
        triple.append(number)
        number = shift = 0
        if len(triple) == 3:
            seq, at_ms = seq + triple[0], at_ms + triple[2]
            seqs.append(seq)
            offsets.append(offsets[-1] + triple[1])
            times.append(at_ms)
            triple.clear()
    return seqs, offsets, times


def deltas(
    run_id: str, step: int, type_: str, fixed: JsonObject, text: str, packed: str, after: int = 0
) -> Iterator[Event]:
    seqs, offsets, times = _unpacked(packed)
    for at in range(bisect_right(seqs, after), len(seqs)):
        data = {**fixed, "offset": offsets[at], "text": text[offsets[at] : offsets[at + 1]]}
        yield Event(run_id, type_, step, data, seqs[at], times[at] / 1000)
