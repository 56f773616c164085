"""A stored log read back: durable events with the deltas of their texts put in between again. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from operator import attrgetter

from hermes.runs.events import Event, deltas
from hermes.store.base import Partial, Row

_BY_SEQ = attrgetter("seq")


def replay(
    run_id: str,
    durable: Iterable[Event],
    row_of: Callable[[int], Row | None],
    partials: Iterable[Partial],
    after: int,
    behind: Iterable[Event] = (),
) -> Iterator[Event]:
    """Everything later than `after`, in order.

    A completed message gives its deltas from its row and its cuts, an open one from its partial. The events `behind`
    come later than all that is asked for; only the deltas before them are given.
    """
    kept = [event for event in durable if event.seq > after]
    streams: list[Iterable[Event]] = [kept]
    closing = [*kept, *behind]
    rows = {e.data["message_id"]: row_of(e.data["row"]) for e in closing if e.type == "message.completed"}
    for event in closing:
        data = event.data
        row = rows.get(data.get("message_id", ""))
        if row is None or not data.get("cuts"):
            continue
        fixed = {"message_id": data["message_id"]}
        if event.type == "message.completed":
            text = row.content if isinstance(row.content, str) else ""
            streams.append(deltas(run_id, event.step, "text.delta", fixed, text, data["cuts"], after))
        else:
            fixed["form"] = data["form"]
            streams.append(
                deltas(run_id, event.step, "reasoning.delta", fixed, row.reasoning or "", data["cuts"], after)
            )
    streams += (_open(run_id, partial, after) for partial in partials if partial.last_seq > after)
    return merge(*streams, key=_BY_SEQ)


def _open(run_id: str, partial: Partial, after: int) -> Iterable[Event]:
    fixed = {
        "text": {"message_id": partial.stream_id},
        "reasoning": {"message_id": partial.stream_id.removesuffix(":reasoning"), "form": partial.form},
        "tool": {"call_id": partial.stream_id.rpartition("/")[0], "stream": partial.form},
    }[partial.kind]
    kind = {"text": "text.delta", "reasoning": "reasoning.delta", "tool": "tool.output"}[partial.kind]
    return deltas(run_id, partial.step, kind, fixed, partial.text, partial.cuts, after)
