"""Rebuilds the events of a stored log: durable events with the deltas of their texts between them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from heapq import merge
from operator import attrgetter

from hermes.core.events import Cuts, Event, deltas
from hermes.store.base import Partial, Row, Tail

_BY_SEQ = attrgetter("seq")


def replay(
    run_id: str,
    durable: Iterable[Event],
    row_of: Callable[[int], Row | None],
    partials: Iterable[Partial],
    after: int,
    later: Iterable[Event] = (),
) -> Iterator[Event]:
    """All events after `after`, in order. The deltas of a completed message come from its row and cuts, those of an
    open one from its partial, which may have been read before the message was completed. The events `later` follow
    everything that is wanted; they only contribute the deltas before them."""
    events = [event for event in durable if event.seq > after]
    streams: list[Iterable[Event]] = [events]
    closing = [*events, *later]
    rows = {e.data["message_id"]: row_of(e.data["row"]) for e in closing if e.type == "message.completed"}
    for event in closing:
        data = event.data
        row = rows.get(data.get("message_id", ""))
        if row is None or not data.get("cuts"):
            continue
        fields = {"message_id": data["message_id"]}
        if event.type == "message.completed":
            text = row.content if isinstance(row.content, str) else ""
            streams.append(deltas(run_id, event.step, "text.delta", fields, text, data["cuts"], after))
        else:
            fields["form"] = data["form"]
            streams.append(
                deltas(run_id, event.step, "reasoning.delta", fields, row.reasoning or "", data["cuts"], after)
            )
    closed = {closed_stream(event) for event in closing}
    streams += (
        _open(run_id, partial, after)
        for partial in partials
        if partial.last_seq > after and part_of(partial) not in closed
    )
    return merge(*streams, key=_BY_SEQ)


def closed_stream(event: Event) -> str | None:
    """The message or call whose streams an event closes."""
    if event.type == "message.completed":
        return str(event.data["message_id"])
    return str(event.data["call_id"]) if event.type == "tool.finished" else None


def part_of(partial: Partial) -> str:
    """The message or call that a stream belongs to."""
    if partial.kind == "tool":
        return partial.stream_id.rpartition("/")[0]
    return partial.stream_id.removesuffix(":reasoning")


def _open(run_id: str, partial: Partial, after: int) -> Iterable[Event]:
    fixed = {
        "text": {"message_id": partial.stream_id},
        "reasoning": {"message_id": part_of(partial), "form": partial.form},
        "tool": {"call_id": part_of(partial), "stream": partial.form},
    }[partial.kind]
    kind = {"text": "text.delta", "reasoning": "reasoning.delta", "tool": "tool.output"}[partial.kind]
    return deltas(run_id, partial.step, kind, fixed, partial.text, partial.cuts, after)


def joined(partials: Iterable[Partial], tails: Iterable[Tail]) -> list[Partial]:
    """Open streams of the database, extended by what a journal has beyond them."""
    streams = {partial.stream_id: partial for partial in partials}
    for tail in tails:
        stream = streams.get(tail.stream_id) or Partial(tail.stream_id, tail.kind, tail.step, "", "", 0, tail.form)
        if len(stream.text) < tail.offset:  # what came before is stored already
            continue
        new_deltas = [delta for delta in tail.deltas if delta[0] > stream.last_seq]
        if not new_deltas:
            continue
        cuts = Cuts.load(stream.cuts)
        for seq, ms, text in new_deltas:
            cuts.add(seq, len(text), ms / 1000)
        text = stream.text + "".join(text for _, _, text in new_deltas)
        streams[tail.stream_id] = replace(stream, text=text, cuts=cuts.pack(), last_seq=new_deltas[-1][0])
    return sorted(streams.values(), key=lambda partial: partial.last_seq)
