"""The run log's events: the status they fold to, packed cuts, and replaying deltas from rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes.core.events import DURABLE, FINAL, VOLATILE, Cuts, Event, RunState, Status, deltas, fold
from hermes.store.base import Partial, Row
from hermes.store.replay import replay

# ---- the fold

STARTED: dict[str, Any] = {"model": "m", "provider": "p"}


def events(*steps: str | tuple[str, dict[str, Any]]) -> list[Event]:
    out = []
    for seq, step in enumerate(steps, 1):
        type_, data = (step, {}) if isinstance(step, str) else step
        data = {**STARTED, **data} if type_ == "run.started" else data
        out.append(Event("run_1", type_, 0, data, seq, 100.0 + seq))
    return out


def ask(name: str = "a") -> tuple[str, dict[str, Any]]:
    return "approval.requested", {"approval_id": name}


def resolved_event(name: str = "a") -> tuple[str, dict[str, Any]]:
    return "approval.resolved", {"approval_id": name}


QUESTION = ("clarify.requested", {"request_id": "q"})
ANSWER = ("clarify.resolved", {"request_id": "q"})
STEER = ("control.received", {"control_id": "c1", "control": "steer"})
STOP = ("control.received", {"control_id": "c2", "control": "interrupt"})
CANCEL = ("control.received", {"control_id": "c3", "control": "cancel"})

FOLDS: list[tuple[list[Any], Status]] = [
    ([], "queued"),
    (["run.queued"], "queued"),
    (["run.started"], "running"),
    (["run.queued", "run.started"], "running"),
    (["run.started", "model.started", "text.delta"], "running"),
    (["run.started", ask()], "waiting_for_approval"),
    (["run.started", ask(), "tool.output"], "waiting_for_approval"),
    (["run.started", ask(), resolved_event()], "running"),
    (["run.started", ask("a"), ask("b"), resolved_event("a")], "waiting_for_approval"),
    (["run.started", resolved_event("unknown")], "running"),
    (["run.started", QUESTION], "waiting_for_input"),
    (["run.started", QUESTION, ANSWER], "running"),
    (["run.started", QUESTION, ask()], "waiting_for_approval"),
    (["run.started", STEER], "running"),
    (["run.started", STOP], "stopping"),
    (["run.started", CANCEL, "model.started"], "stopping"),
    (["run.started", ask(), STOP], "stopping"),
    (["run.started", STOP, resolved_event(), "run.cancelled"], "cancelled"),
    (["run.started", "run.completed"], "completed"),
    (["run.started", STOP, "run.completed"], "completed"),
    (["run.started", "run.failed"], "failed"),
    (["run.queued", "run.cancelled"], "cancelled"),
    (["run.started", "run.interrupted"], "interrupted"),
    (["run.started", "run.interrupted", "run.resumed"], "running"),
    (["run.started", ask(), "run.interrupted", "run.resumed"], "waiting_for_approval"),
    (["run.started", "run.interrupted", "run.failed"], "failed"),
    (["run.started", "run.completed", "notice"], "completed"),
]


@pytest.mark.parametrize(("steps", "status"), FOLDS, ids=[str(i) + s for i, (_, s) in enumerate(FOLDS)])
def test_status_is_fold_of_log(steps: list[Any], status: Status) -> None:
    state = fold(events(*steps))
    assert (state.status, state.ended) == (status, status in ("completed", "failed", "cancelled"))


def test_fold_tracks_open_questions_and_end() -> None:
    usage = {"total_tokens": 3}
    state = fold(
        events(
            ("run.started", STARTED),
            STEER,
            QUESTION,
            ("model.switched", {"to": {"model": "m2", "provider": "p2"}}),
            ("run.failed", {"failure": "auth", "error": "no", "usage": usage}),
        )
    )
    assert (state.model, state.provider, state.started_at, state.ended_at) == ("m2", "p2", 101.0, 105.0)
    assert (state.failure, state.error, state.usage) == ("auth", "no", usage)
    assert (state.controls, list(state.questions)) == ({"c1"}, ["q"])
    assert (state.last_event, state.last_seq) == ("run.failed", 5)


def test_every_event_is_durable_or_volatile() -> None:
    assert not DURABLE & VOLATILE
    assert sorted(FINAL) == ["run.cancelled", "run.completed", "run.failed"]
    assert sorted(VOLATILE) == ["reasoning.delta", "text.delta", "tool.drafted", "tool.output"]


@given(st.lists(st.sampled_from([*sorted(DURABLE - {"control.received"}), "text.delta"]), max_size=12))
def test_final_status_is_never_left(types: list[str]) -> None:
    fields = {"approval_id": "a", "request_id": "q", "to": STARTED}
    state = RunState()
    for event in events(*((type_, {**STARTED, **fields}) for type_ in types)):
        before = state.status
        state.apply(event)
        assert before not in ("completed", "failed", "cancelled") or state.status == before


def test_event_as_dict() -> None:
    event = Event("run_1", "notice", 2, {"code": "x"}, 7, 1.5)
    assert event.as_dict() == {"run_id": "run_1", "seq": 7, "ts": 1.5, "type": "notice", "step": 2, "code": "x"}


# ---- cuts

# Numbers grow, as they do in a log; times go on, in milliseconds.
_steps = st.lists(st.tuples(st.integers(1, 70_000), st.integers(0, 400_000), st.integers(0, 10**7)), max_size=30)


def _grown(steps: list[tuple[int, int, int]]) -> list[tuple[int, int, float]]:
    seq, at_ms, out = 0, 1_700_000_000_000, []
    for ahead, length, later in steps:
        seq, at_ms = seq + ahead, at_ms + later
        out.append((seq, length, at_ms / 1000))
    return out


@given(_steps)
def test_packed_cuts_round_trip(steps: list[tuple[int, int, int]]) -> None:
    cuts = Cuts()
    marks = _grown(steps)
    for mark in marks:
        cuts.add(*mark)
    assert list(Cuts.unpack(cuts.pack())) == marks
    assert bool(cuts) == bool(marks)


def test_packed_cuts_with_clock_going_back() -> None:
    cuts = Cuts()
    for seq, ts in ((1, 10.0), (2, 9.0), (3, 10.5)):
        cuts.add(seq, 1, ts)
    assert list(Cuts.unpack(cuts.pack())) == [(1, 1, 10.0), (2, 1, 10.0), (3, 1, 10.5)]


def test_packed_cuts_are_small() -> None:
    cuts = Cuts()
    for i in range(1000):
        cuts.add(i + 1, 4, 1_700_000_000 + i * 0.02)
    assert len(cuts.pack()) < 4100


# ---- replay


def text_events(type_: str, fixed: dict[str, Any], pieces: list[str], seqs: list[int]) -> tuple[list[Event], str]:
    """The deltas of a text as they were delivered, and their cuts."""
    out, cuts, offset = [], Cuts(), 0
    for seq, piece in zip(seqs, pieces, strict=True):
        out.append(Event("run_1", type_, 1, {**fixed, "offset": offset, "text": piece}, seq, 5.0 + seq))
        cuts.add(seq, len(piece), 5.0 + seq)
        offset += len(piece)
    return out, cuts.pack()


_pieces = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8)


@given(_pieces, st.data())
@settings(deadline=None)
def test_replayed_deltas_equal_delivered_ones(pieces: list[str], data: st.DataObject) -> None:
    seqs = sorted(data.draw(st.sets(st.integers(1, 5000), min_size=len(pieces), max_size=len(pieces))))
    original, packed = text_events("text.delta", {"message_id": "m"}, pieces, seqs)
    text = "".join(pieces)
    for after in (0, *seqs):
        again = list(deltas("run_1", 1, "text.delta", {"message_id": "m"}, text, packed, after))
        assert again == [event for event in original if event.seq > after]


@given(_pieces, _pieces)
@settings(deadline=None)
def test_completed_message_is_replayed_from_row(thoughts: list[str], texts: list[str]) -> None:
    count, fixed = len(thoughts), {"message_id": "m", "form": "summary"}
    thought, thought_cuts = text_events("reasoning.delta", fixed, thoughts, list(range(3, 3 + count)))
    first = 3 + count
    deltas, cuts = text_events("text.delta", {"message_id": "m"}, texts, list(range(first, first + len(texts))))
    end = first + len(texts)
    ending = {"message_id": "m", "form": "summary", "cuts": thought_cuts}
    durable = [
        Event("run_1", "run.started", 0, STARTED, 1),
        Event("run_1", "model.started", 1, {"message_id": "m"}, 2),
        Event("run_1", "reasoning.completed", 1, ending, end),
        Event("run_1", "message.completed", 1, {"message_id": "m", "row": 9, "cuts": cuts}, end + 1),
        Event("run_1", "run.completed", 0, {"message_id": "m"}, end + 2),
    ]
    row = Row("s", "assistant", "".join(texts), reasoning="".join(thoughts), id=9)
    whole = sorted([*durable, *thought, *deltas], key=lambda event: event.seq)
    for after in range(end + 3):
        again = list(replay("run_1", durable, {9: row}.get, [], after))
        assert again == [event for event in whole if event.seq > after]


def test_open_streams_are_replayed_from_partials() -> None:
    text, text_cuts = text_events("text.delta", {"message_id": "m"}, ["Hel", "lo"], [4, 6])
    hidden = {"message_id": "m", "form": "raw"}
    thought, thought_cuts = text_events("reasoning.delta", hidden, ["hm"], [3])
    shown = {"call_id": "c", "stream": "stdout"}
    output, output_cuts = text_events("tool.output", shown, ["a", "b"], [5, 7])
    partials = [
        Partial("m", "text", 1, "Hello", text_cuts, 6),
        Partial("m:reasoning", "reasoning", 1, "hm", thought_cuts, 3, "raw"),
        Partial("c/stdout", "tool", 1, "ab", output_cuts, 7, "stdout"),
    ]
    durable = [Event("run_1", "run.started", 0, STARTED, 1), Event("run_1", "model.started", 1, {}, 2)]
    whole = sorted([*durable, *text, *thought, *output], key=lambda event: event.seq)
    for after in range(9):
        assert list(replay("run_1", durable, lambda _: None, partials, after)) == [e for e in whole if e.seq > after]


def test_message_without_deltas_or_row_is_replayed_as_event() -> None:
    event = Event("run_1", "message.completed", 1, {"message_id": "m", "row": 9, "cuts": ""}, 3)
    assert list(replay("run_1", [event], lambda _: None, [], 0)) == [event]
    assert list(replay("run_1", [event], {9: Row("s", "assistant", "", id=9)}.get, [], 0)) == [event]
