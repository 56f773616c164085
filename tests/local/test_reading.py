"""What the local model writes, however it is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes.local.reading import Reading, Repetition

# A model that writes `\\b` or `\\f` means these two characters.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\b\f"), max_size=40)


def read(text: str, cuts: list[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What comes while it is written, and what comes at its end."""
    reading = Reading("call_1")
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    live: list[dict[str, Any]] = []
    for start, end in pairwise(places):
        live += reading.feed(text[start:end])
    return live, list(reading.finish())


def text_of(deltas: list[dict[str, Any]]) -> str:
    return "".join(delta.get("content", "") for delta in deltas)


@given(TEXT, st.lists(st.integers(0, 10_000)), st.booleans())
def test_answer_is_read_for_any_chunking(text: str, cuts: list[int], ascii_only: bool) -> None:
    live, rest = read(json.dumps({"answer": text}, ensure_ascii=ascii_only), cuts)
    assert text_of(live) == text and rest == []


def test_answer_is_streamed() -> None:
    reading = Reading("call_1")
    texts = [text_of(list(reading.feed(piece))) for piece in ('{"ans', 'wer": "Hel', "lo", " \\u00", 'e9"', "}")]
    assert texts == ["", "Hel", "lo", " ", "é", ""]


@given(
    st.dictionaries(st.text(st.characters(codec="ascii", exclude_characters="\b\f"), max_size=5), TEXT),
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
    assert live == [] and json.loads(text_of(rest)) == {"city": "Rome", "people": 3}


ESCAPES = [
    (r"\d+\.\d", r"\d+\.\d"),
    (r"\bword\b", r"\bword\b"),
    (r"C:\\new\\f", r"C:\new\f"),
    (r"a\nb\t\"c\"", 'a\nb\t"c"'),
    (r"\user \u00e9", r"\user é"),
    (r"\frac{1}{2}", r"\frac{1}{2}"),
]


@pytest.mark.parametrize(("written", "expected"), ESCAPES)
def test_backslash_before_any_character_is_kept(written: str, expected: str) -> None:
    for cuts in ([], list(range(60))):
        live, rest = read(f'{{"answer": "{written}"}}', cuts)
        assert text_of(live) == expected and rest == []
    _, [delta] = read(f'{{"tool": "search_files", "arguments": {{"pattern": "{written}"}}}}', [])
    assert json.loads(delta["tool_calls"][0]["function"]["arguments"]) == {"pattern": expected}


def test_rest_of_started_answer_is_read() -> None:
    reading = Reading("call_1", continues=True)
    assert text_of([*reading.feed("day, Tues"), *reading.feed('day."}'), *reading.finish()]) == "day, Tuesday."


def loops_after(text: str) -> int | None:
    """Where in a text, fed in small pieces, a loop is noticed."""
    repetition = Repetition()
    return next((at for at in range(0, len(text), 3) if repetition.feed(text[at : at + 3])), None)


@pytest.mark.parametrize(
    "circle", ["Monday: pasta. ", "x", "0, ", "- [ ] wash the dishes\n- [ ] feed the cat\n", "== "]
)
def test_loop_is_noticed(circle: str) -> None:
    assert loops_after("A plan for the week. " + circle * 3_000) is not None


def test_long_loop_is_noticed_in_its_second_round() -> None:
    circle = " ".join(f"Dish {number} has {number * 7} beans." for number in range(60))
    at = loops_after(f"{circle} {circle} {circle}")
    assert at is not None and at < 2 * len(circle)


@pytest.mark.parametrize(
    "text",
    [
        " ".join(map(str, range(2_000))),
        "".join(f"| row {number} | yes | no | maybe |\n" for number in range(300)),
        "".join(f"def test_{number}():\n    assert f({number}) == {number * number}\n\n" for number in range(200)),
        "=" * 80 + "\n" + "-" * 80,
        "no no no no no " * 5,
    ],
    ids=["numbers", "table", "code", "ruler", "chorus"],
)
def test_text_with_a_pattern_is_no_loop(text: str) -> None:
    assert loops_after(text) is None
