"""Server-sent events from bytes, whatever the packets look like."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes.http_client import sse
from hermes.http_client.exchange import StreamBroken
from hermes.http_client.sse import SseDecoder
from support.cutting import all_cuts, any_cut

Events = list[tuple[str, bytes]]


def decode(chunks: Iterable[bytes]) -> Events:
    decoder = SseDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


BODIES: list[tuple[str, bytes, Events]] = [
    ("one", b"data: x\n\n", [("", b"x")]),
    ("two", b"data: a\n\ndata: b\n\n", [("", b"a"), ("", b"b")]),
    ("named", b"event: e\ndata: x\n\n", [("e", b"x")]),
    ("name after data", b"data: x\nevent: e\n\n", [("e", b"x")]),
    ("a name holds for one event", b"event: e\ndata: a\n\ndata: b\n\n", [("e", b"a"), ("", b"b")]),
    ("carriage returns", b"event: e\rdata: x\r\r", [("e", b"x")]),
    ("both", b"event: e\r\ndata: x\r\n\r\n", [("e", b"x")]),
    ("mixed", b"data: a\r\n\ndata: b\n\r\ndata: c\r\r\n", [("", b"a"), ("", b"b"), ("", b"c")]),
    ("several lines", b"data: a\ndata: b\ndata:\ndata: c\n\n", [("", b"a\nb\n\nc")]),
    ("no space", b"data:x\n\n", [("", b"x")]),
    ("one space of two", b"data:  x\n\n", [("", b" x")]),
    ("colons", b'data: {"a": "b:c"}\n\n', [("", b'{"a": "b:c"}')]),
    ("comments", b": hi\n:\ndata: x\n: more\n\n: end\n\n", [("", b"x")]),
    ("other fields", b"id: 7\nretry: 10\ndata: x\nfoo: y\nbar\n\n", [("", b"x")]),
    ("a field that only begins like one", b"database: y\nevents: z\ndata: x\n\n", [("", b"x")]),
    ("a name without data is no event", b"event: e\n\ndata: x\n\n", [("", b"x")]),
    ("empty data", b"data:\n\n", [("", b"")]),
    ("blank lines", b"\n\n\ndata: x\n\n\n\n", [("", b"x")]),
    ("the end", b"data: [DONE]\n\n", [("", b"[DONE]")]),
    ("beyond ASCII", "event: größe\ndata: é😀\n\n".encode(), [("größe", "é😀".encode())]),
    ("unfinished", b"data: a\n\ndata: b\n", [("", b"a")]),
    ("a mark of byte order", b"\xef\xbb\xbfdata: x\n\n", [("", b"x")]),
]


@pytest.mark.parametrize(("body", "events"), [(b, e) for _, b, e in BODIES], ids=[name for name, _, _ in BODIES])
def test_sse_events_are_same_for_any_chunking(body: bytes, events: Events) -> None:
    for chunks in all_cuts(body):
        assert decode(chunks) == events, chunks


@given(
    st.lists(st.sampled_from([b"data: x", b"data:", b"event: e", b": c", b"\r", b"\n", b"\r\n", b""]), max_size=14),
    st.data(),
)
def test_sse_chunking_does_not_change_result_property(pieces: list[bytes], data: st.DataObject) -> None:
    body = b"".join(pieces)
    assert decode(any_cut(data, body)) == decode([body])


def read_quickly(chunks: Iterable[bytes]) -> Events:
    """The same by way of what needs no feeding, where there is something."""
    decoder, events = SseDecoder(), Events()
    for chunk in chunks:
        whole = decoder.whole(chunk)
        events += [("", data) for data in whole] if whole else decoder.feed(chunk)
    return events


@given(
    st.lists(
        st.sampled_from(
            [b"data: x\n\n", b"data: \n\n", b"data: y", b"data:z", b"event: e", b": c", b"\r", b"\n", b"\xef\xbb\xbf"]
        ),
        max_size=14,
    ),
    st.data(),
)
def test_sse_fast_path_equals_decoder_property(pieces: list[bytes], data: st.DataObject) -> None:
    for chunks in (pieces, any_cut(data, b"".join(pieces))):
        single = [bytes([byte]) for chunk in chunks for byte in chunk]
        assert read_quickly(chunks) == decode(chunks) == decode(single)


def test_sse_fast_path_handles_usual_chunks() -> None:
    decoder = SseDecoder()
    assert decoder.whole(b"\xef\xbb\xbfdata: a\n\n") == []  # a mark of byte order has to be taken off
    assert decoder.feed(b"\xef\xbb\xbfdata: a\n\n") == [("", b"a")]
    assert SseDecoder().whole(b"data: a\n\n") == [b"a"]
    assert decoder.whole(b"data: b\n\ndata: c\n\n") == [b"b", b"c"]
    assert [decoder.whole(chunk) for chunk in (b"data: b\n", b"event: e\ndata: b\n\n", b"data: b\r\n\r\n")] == [[]] * 3


def test_sse_empty_chunk_is_ignored() -> None:
    assert decode([b"", b"data: x\r", b"", b"\n\r", b"", b"\n", b""]) == [("", b"x")]


def test_sse_event_name_with_invalid_utf8() -> None:
    assert decode([b"event: \xff\ndata: x\n\n"]) == [("\ufffd", b"x")]


def test_sse_event_at_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 100)
    assert decode([b"data: " + b"x" * 90 + b"\n\n"] * 3) == [("", b"x" * 90)] * 3


@pytest.mark.parametrize(
    "chunks",
    [[b"x" * 60, b"x" * 60], [b"data: x\n"] * 100, [b"data: " + b"x" * 30 + b"\n"] * 10],
    ids=["a line", "many short lines", "many lines"],
)
def test_sse_event_over_size_limit_is_rejected(chunks: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 100)
    with pytest.raises(StreamBroken) as refused:
        decode(chunks)
    assert refused.value.answered
