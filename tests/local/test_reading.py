"""What the local model writes, however it is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes.local.reading import Reading


def read(text: str, cuts: list[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What comes while it is written, and what comes at its end."""
    reading = Reading("call_1")
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    live: list[dict[str, Any]] = []
    for start, end in pairwise(places):
        live += reading.feed(text[start:end])
    return live, list(reading.finish())


def said(deltas: list[dict[str, Any]]) -> str:
    return "".join(delta.get("content", "") for delta in deltas)


@given(st.text(), st.lists(st.integers(0, 10_000)), st.booleans())
def test_answer_is_read_for_any_chunking(text: str, cuts: list[int], ascii_only: bool) -> None:
    text = text.encode("utf-8", "ignore").decode()
    live, rest = read(json.dumps({"answer": text}, ensure_ascii=ascii_only), cuts)
    assert said(live) == text and rest == []


def test_answer_is_streamed() -> None:
    reading = Reading("call_1")
    told = [said(list(reading.feed(piece))) for piece in ('{"ans', 'wer": "Hel', "lo", " \\u00", 'e9"', "}")]
    assert told == ["", "Hel", "lo", " ", "é", ""]


@given(
    st.dictionaries(st.text(st.characters(codec="ascii"), max_size=5), st.text(max_size=20)),
    st.lists(st.integers(0, 999)),
)
def test_tool_call_is_complete_at_end(arguments: dict[str, str], cuts: list[int]) -> None:
    live, rest = read(json.dumps({"tool": "read_file", "arguments": arguments}), cuts)
    assert live == []
    [delta] = rest
    [call] = delta["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("call_1", "read_file")
    assert json.loads(call["function"]["arguments"]) == arguments


def test_truncated_tool_call_is_reported_partially() -> None:
    _, rest = read('{"tool": "write_file", "arguments": {"path": "a.txt", "cont', [])
    assert rest[0]["tool_calls"][0]["function"] == {"name": "write_file", "arguments": '{"path": "a.txt", "cont'}


@pytest.mark.parametrize("text", ['{"to', '{"tool": "write', "", "{"])
def test_beginning_of_tool_call_is_nothing(text: str) -> None:
    assert read(text, []) == ([], [])


def test_object_answer_is_json_text() -> None:
    live, rest = read('{"answer": {"city": "Rome", "people": 3}}', [5, 14, 20])
    assert live == [] and json.loads(said(rest)) == {"city": "Rome", "people": 3}
