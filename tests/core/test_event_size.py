"""Outputs of tools cut to make an event shorter: the longest first, by as much as it takes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes.core.text import spaced_json
from hermes.server.event_size import shorten_outputs

Json = dict[str, Any]


def item(text: str, kind: str = "function") -> Json:
    if kind == "function":
        return {"type": "function_call_output", "output": [{"type": "input_text", "text": text}]}
    if kind == "mcp":
        return {"type": "mcp_call", "output": text, "error": None}
    return {"type": "mcp_call", "output": None, "error": {"type": "x", "content": [{"type": "text", "text": text}]}}


def output(item_data: Json) -> str:
    if item_data["type"] == "function_call_output":
        return str(item_data["output"][0]["text"])
    return str(item_data["output"] if item_data["error"] is None else item_data["error"]["content"][0]["text"])


@pytest.mark.parametrize("kind", ["function", "mcp", "error"])
def test_longest_outputs_are_shortened_first(kind: str) -> None:
    items = [
        item("a" * 10, kind),
        item("b" * 1000, kind),
        {"type": "message", "text": "m" * 900},
        item("c" * 800, kind),
    ]
    short = shorten_outputs(items, 1000)
    assert [len(output(one)) for one in (short[0], short[1], short[3])] == [10, 371, 371]
    assert ["truncated" in item for item in short] == [False, True, False, True]
    assert short[2] == items[2]
    assert output(items[1]) == "b" * 1000, "what was given stays"


def test_outputs_are_shortened_at_most_to_nothing() -> None:
    assert [output(item) for item in shorten_outputs([item("abc"), item("é")], 10_000)] == ["", ""]
    assert shorten_outputs([{"type": "message"}], 10_000) == [{"type": "message"}]


@given(
    st.lists(st.tuples(st.text(alphabet='aé€😀"\\\n\x00', max_size=80), st.sampled_from(["function", "mcp", "error"]))),
    st.integers(1, 600),
)
def test_shortening_saves_requested_bytes_property(texts: list[tuple[str, str]], excess: int) -> None:
    items = [item(text, kind) for text, kind in texts]
    short = shorten_outputs(items, excess)
    for before, after in zip(items, short, strict=True):
        assert output(before).startswith(output(after))
        assert after.get("truncated", False) == (output(before) != output(after))
    size, short_size = (len(spaced_json(item).encode()) for item in (items, short))
    least = sum(len(msgspec.json.encode(text)) for text, _ in texts) - 40 * len(texts)
    assert size - short_size >= min(excess, least)
