"""Fitting a conversation into a window: sizes, the plan, and what stands for the middle."""

from __future__ import annotations

import base64
import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes.agent.compress import (
    SUMMARY_MARK,
    Budget,
    Plan,
    estimate,
    extract,
    joined,
    plan,
    prune,
    size_of,
    transcript,
)
from hermes.core.json_types import Message


def user(text: str = "ask") -> Message:
    return {"role": "user", "content": text}


def assistant_message(text: str = "answer") -> Message:
    return {"role": "assistant", "content": text}


def calls(*ids: str, arguments: str = "{}") -> Message:
    tool_calls = [{"id": i, "type": "function", "function": {"name": "read_file", "arguments": arguments}} for i in ids]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def result(call_id: str, text: str = "result") -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call_id, "tool_name": "read_file"}


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Turns as they are stored: a user message, perhaps rounds of calls with their results, an answer."""
    messages: list[Message] = []
    number = 0
    for _ in range(draw(st.integers(1, 6))):
        messages.append(user("u" * draw(st.integers(1, 300))))
        for _ in range(draw(st.integers(0, 3))):
            ids = [f"c{number + i}" for i in range(draw(st.integers(1, 3)))]
            number += len(ids)
            messages.append(calls(*ids))
            messages += [result(i, "r" * draw(st.integers(0, 900))) for i in ids]
        messages.append(assistant_message("a" * draw(st.integers(1, 300))))
    return messages[: draw(st.sampled_from([len(messages), len(messages) - 1]))] or [user()]


_budgets = st.builds(Budget, st.integers(300, 6000), st.integers(100, 2000), protect_first=st.integers(0, 5))


def whole_pieces(messages: list[Message]) -> bool:
    """Whether every result here comes after its call here, and every call has all its results."""
    ids = [call["id"] for m in messages for call in m.get("tool_calls") or ()]
    return ids == [m["tool_call_id"] for m in messages if m["role"] == "tool"]


# ---- sizes


def test_token_estimate_of_text_uses_bytes() -> None:
    assert estimate("x" * 3600) == pytest.approx(1000, abs=1)
    assert estimate("é" * 1800) == pytest.approx(1000, abs=1)
    assert estimate("\ud800" * 36) > 0


def test_token_estimate_of_message_includes_tool_calls() -> None:
    assert estimate(user("x" * 360)) == pytest.approx(100, abs=6)
    assert estimate(calls("c1", arguments="y" * 720)) >= 200
    assert estimate({"role": "assistant", "content": None}) < 10
    parts = {"role": "user", "content": [{"type": "text", "text": "x" * 360}, {"type": "text", "text": "y" * 360}]}
    assert 200 <= estimate(parts) <= 230


def test_token_estimate_includes_schemas() -> None:
    assert estimate({"name": "f", "description": "x" * 3600, "parameters": {}}) >= 1000


def png(width: int, height: int) -> Message:
    """An image part whose header says how large the image is."""
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII5s", 13, b"IHDR", width, height, b"\x08\x02\0\0\0")
    data = header + b"\0" * (width * height // 100)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_token_estimate_of_image_is_not_by_text() -> None:
    image = png(2000, 2000)
    assert estimate(image) < len(image["image_url"]["url"]) / 3.6 / 2
    assert estimate({"role": "user", "content": [image]}) >= estimate(image)


def test_token_estimate_of_image_uses_dimensions() -> None:
    assert estimate(png(64, 64)) < estimate(png(2000, 2000))


@given(conversations())
@settings(deadline=None)
def test_token_estimate_grows_with_messages(messages: list[Message]) -> None:
    sizes = [size_of(messages[:n]) for n in range(len(messages) + 1)]
    assert sizes[0] == 0 and all(a < b for a, b in pairwise(sizes))


# ---- the budget


@pytest.mark.parametrize(
    ("window", "max_output", "total", "limit", "tail", "goal"),
    [
        (200_000, 8_192, 191_808, 143_856, 38_361, 105_495),
        (32_768, 32_768, 24_576, 18_432, 4_915, 13_517),
        (4_096, 4_096, 3_072, 2_304, 614, 1_690),
    ],
)
def test_context_budget_arithmetic(window: int, max_output: int, total: int, limit: int, tail: int, goal: int) -> None:
    budget = Budget(window, max_output)
    assert (budget.total, budget.limit, budget.tail, budget.goal) == (total, limit, tail, goal)


def test_context_budget_settings() -> None:
    budget = Budget(10_000, 1_000, threshold=0.5, target_ratio=0.1)
    assert (budget.total, budget.limit, budget.tail, budget.goal) == (9_000, 4_500, 900, 3_600)


# ---- the plan


@given(conversations(), _budgets)
def test_plan_is_lossless_and_keeps_calls_with_results(messages: list[Message], budget: Budget) -> None:
    compaction = plan(messages, budget)
    assert compaction.head + compaction.middle + compaction.tail == messages
    assert all(map(whole_pieces, (compaction.head, compaction.middle, compaction.tail)))


@given(conversations(), _budgets)
def test_plan_keeps_last_user_message_and_rest_in_tail(messages: list[Message], budget: Budget) -> None:
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    assert messages[last:] == plan(messages, budget).tail[-len(messages[last:]) :]


@given(conversations(), _budgets)
def test_plan_tail_fills_its_share(messages: list[Message], budget: Budget) -> None:
    compaction = plan(messages, budget)
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    extra = compaction.tail[: len(compaction.tail) - len(messages[last:])]
    assert not extra or size_of(compaction.tail) <= budget.tail
    if compaction.middle:
        before = messages[: len(messages) - len(compaction.tail)]
        at = max(i for i, m in enumerate(before) if m["role"] != "tool")
        assert size_of(before[at:] + compaction.tail) > budget.tail, "one more piece would have fitted"


@given(conversations(), _budgets)
def test_plan_protects_first_messages(messages: list[Message], budget: Budget) -> None:
    compaction = plan(messages, budget)
    assert len(compaction.head) >= budget.protect_first or not compaction.middle


def test_plan_protect_first_can_be_overridden() -> None:
    messages = [user(), assistant_message(), user(), assistant_message("x" * 9000), user(), assistant_message(), user()]
    assert len(plan(messages, Budget(1000, 100), protect_first=1).head) == 1
    assert plan(messages, Budget(1000, 100), protect_first=0).head == []


@pytest.mark.parametrize("messages", [[], [user()], [assistant_message()], [result("c1")]])
def test_small_conversation_has_no_middle(messages: list[Message]) -> None:
    compaction = plan(messages, Budget(4096, 512))
    assert compaction.middle == [] and compaction.head + compaction.tail == messages


# ---- pruning

LONG = "line of output\n" * 500


def test_prune_replaces_results_by_one_line() -> None:
    arguments = '{"path": "src/main.py",\n "limit": 5}'
    call_message = calls("c1", arguments=arguments)
    ((_, pruned),) = [prune([call_message, result("c1", LONG)])]
    assert pruned["tool_call_id"] == "c1" and pruned["role"] == "tool"
    line: str = pruned["content"]
    assert "\n" not in line and len(line) < 200
    assert "read_file" in line and "src/main.py" in line and str(len(LONG)) in line


def test_prune_only_shortens_results() -> None:
    messages = [user(LONG), calls("c1", arguments=LONG), result("c1", "short"), assistant_message(LONG)]
    assert prune(messages) == messages


def test_prune_is_idempotent() -> None:
    once = prune([calls("c1"), result("c1", LONG)])
    assert prune(once) == once


def test_prune_handles_multipart_and_orphaned_results() -> None:
    parts = {**result("c1"), "content": [{"type": "text", "text": LONG}]}
    lost = {"role": "tool", "content": LONG, "tool_call_id": "gone"}
    assert all(isinstance(m["content"], str) and len(m["content"]) < 200 for m in prune([parts, lost]))


@given(conversations())
@settings(deadline=None)
def test_prune_keeps_message_order(messages: list[Message]) -> None:
    pruned = prune(messages)
    assert [(m["role"], m.get("tool_call_id"), m.get("tool_calls")) for m in pruned] == [
        (m["role"], m.get("tool_call_id"), m.get("tool_calls")) for m in messages
    ]
    assert size_of(pruned) <= size_of(messages)


# ---- the summary without a model


def test_extract_has_user_messages_and_first_lines() -> None:
    text = extract(
        [user("Do\nthis"), calls("c1"), result("c1", LONG), assistant_message("Done.\nDetails"), user("Thanks")], 1000
    )
    assert text.splitlines() == ["User: Do this", "You: Done.", "User: Thanks"]


@given(conversations(), st.integers(0, 600))
@settings(deadline=None)
def test_extract_is_deterministic_and_bounded(messages: list[Message], chars_max: int) -> None:
    text = extract(messages, chars_max)
    assert text == extract(messages, chars_max) and len(text) <= chars_max


@pytest.mark.parametrize("content", ["", " ", "\n", None, [], [{"type": "image_url", "image_url": {"url": "u"}}]])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_extract_and_transcript_tolerate_empty_content(role: str, content: Any) -> None:
    messages: list[Message] = [user("Hello"), {"role": role, "content": content}]
    assert "Hello" in extract(messages, 100)
    assert "Hello" in transcript(messages, 100)


# ---- the transcript for whoever sums up


def test_transcript_names_roles_and_calls() -> None:
    text = transcript([user("Do this"), calls("c1", arguments='{"a": 1}'), result("c1", "fine")], 1000)
    assert all(part in text for part in ("user: Do this", 'read_file({"a": 1})', "tool: fine"))


def test_transcript_shortens_long_messages_only() -> None:
    text = transcript([user("Do this"), calls("c1"), result("c1", LONG), assistant_message("Done.")], 2_000)
    assert "Do this" in text and "Done." in text and "[…]" in text


@pytest.mark.parametrize(("count", "chars"), [(2, 9_000), (20, 600), (200, 400)])
def test_transcript_is_bounded(count: int, chars: int) -> None:
    assert len(transcript([user("x" * chars), assistant_message("y" * chars)] * count, 5_000)) <= 5_000


# ---- putting it together again


@given(conversations(), _budgets, st.none() | st.just("1. do it"))
def test_compacted_roles_alternate(messages: list[Message], budget: Budget, todo: str | None) -> None:
    compaction = plan(messages, budget)
    roles = [m["role"] for m in joined(compaction, "what was", todo)]
    assert all(a != b or a == "tool" for a, b in pairwise(roles)), roles
    assert ("user", "tool") not in pairwise(roles)


@given(conversations(), _budgets)
@settings(deadline=None)
def test_compaction_keeps_head_and_tail_unchanged(messages: list[Message], budget: Budget) -> None:
    compaction = plan(messages, budget)
    again = joined(compaction, "what was", None)
    assert again[: len(compaction.head)] == compaction.head
    assert not compaction.tail or again[-len(compaction.tail) :] == compaction.tail
    assert whole_pieces(again)


def test_compaction_summary_is_marked_and_followed_by_todo_list() -> None:
    compaction = Plan([user(), assistant_message()], [user(), assistant_message()], [user("now")])
    note = next(m for m in joined(compaction, "what was", "1. do it") if SUMMARY_MARK in m["content"])
    assert note["content"].index("what was") < note["content"].index("1. do it")
    assert "todo" not in str(joined(compaction, "what was", None))


def test_compaction_has_no_consecutive_assistant_messages() -> None:
    for head in ([], [user()], [user(), assistant_message()], [user(), calls("c1"), result("c1")]):
        for tail in (
            [user("now")],
            [assistant_message("then"), user("now")],
            [calls("c2"), result("c2"), assistant_message()],
        ):
            roles = [m["role"] for m in joined(Plan(head, [user()], tail), "what was", None)]
            assert all(a != b or a == "tool" for a, b in pairwise(roles)), roles
