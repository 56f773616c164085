"""The assembler: a stream of parts becomes deltas and a message, however the stream was cut."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes.agent.assembler import (
    Assembler,
    Overlap,
    ReasoningDelta,
    TextDelta,
    ToolDrafted,
)
from hermes.agent.inline import InlineMarkup
from hermes.core.stream_parts import (
    Assembled,
    Finish,
    FinishReason,
    Model,
    Opaque,
    Part,
    Reasoning,
    ServerError,
    Text,
    ToolCall,
    ToolDelta,
    Usage,
)
from hermes.providers.base import WireEvent
from hermes.providers.registry import provider_for
from support.cutting import all_cuts, any_cut, cuts

# Numbers of the contract, not of the code.
HELD_CHARS_MAX = 24
OVERLAP_CHARS_MIN, OVERLAP_CHARS_MAX = 12, 200


@dataclass
class Run:
    """What one pass through an assembler gave."""

    text: str
    reasoning: str
    drafted: list[ToolDrafted]
    message: Assembled
    assembler: Assembler


def run(parts: Iterable[Part], *, identity: str = "run:1", before: str = "", again: str = "") -> Run:
    assembler = Assembler(identity, before, again)
    deltas = [delta for part in parts for delta in assembler.feed(part)]
    deltas += assembler.finish()
    return Run(
        "".join(d.text for d in deltas if isinstance(d, TextDelta)),
        "".join(d.text for d in deltas if isinstance(d, ReasoningDelta)),
        [d for d in deltas if isinstance(d, ToolDrafted)],
        assembler.message(),
        assembler,
    )


def read(pieces: Iterable[str], **fields: str) -> tuple[str, str]:
    """Visible text and reasoning of a stream of text."""
    completed = run((Text(piece) for piece in pieces), **fields)
    return completed.text, completed.reasoning


def calls(*parts: Part, identity: str = "run:1") -> list[ToolCall]:
    return run(parts, identity=identity).message.tool_calls


# ---- inline reasoning: text, what is visible, what is reasoning

TAGGED = [
    ("<think>hm</think>Yes", "Yes", "hm"),
    ("<thinking>hm</thinking>Yes", "Yes", "hm"),
    ("<reasoning>hm</reasoning>Yes", "Yes", "hm"),
    ("<thought>hm</thought>Yes", "Yes", "hm"),
    ("<REASONING_SCRATCHPAD>hm</REASONING_SCRATCHPAD>Yes", "Yes", "hm"),
    ("<reasoning_scratchpad>hm</Reasoning_ScratchPad>Yes", "Yes", "hm"),
    ("<ThInK>hm</tHiNk>Yes", "Yes", "hm"),
    ("<think>a</think><think>b</think>c", "c", "ab"),
    ("<think></think>Yes", "Yes", ""),
    ("One\n<think>hm</think>two", "One\ntwo", "hm"),
    ("One\r\n<think>hm</think>two", "One\r\ntwo", "hm"),
    ("<think>never closed", "", "never closed"),
    ("One\n<think>no </thin end", "One\n", "no </thin end"),
    ("<think>a</thinking>b</think>c", "c", "a</thinking>b"),
    ("<think>a <think> b</think>c", "c", "a <think> b"),
    ("<thinking>a</think>b</thinking>c", "c", "a</think>b"),
    ("x <think>y</think> z", "x <think>y</think> z", ""),
    ("a < b\n<b>\n<thin\n", "a < b\n<b>\n<thin\n", ""),
    ("<think", "<think", ""),
    ("< think>a", "< think>a", ""),
    ("```\n<think>x</think>\n```\n<think>hm</think>b", "```\n<think>x</think>\n```\nb", "hm"),
    ("~~~xml\n<think>x\n~~~\n<think>hm</think>b", "~~~xml\n<think>x\n~~~\nb", "hm"),
    ("  ```py\n<think>\n  ```\n<think>q</think>", "  ```py\n<think>\n  ```\n", "q"),
    ("a ```\n<think>q</think>b", "a ```\nb", "q"),
]


@pytest.mark.parametrize(("text", "visible", "reasoning"), TAGGED, ids=[t[:30] for t, _, _ in TAGGED])
def test_think_tags_are_parsed_for_any_chunking(text: str, visible: str, reasoning: str) -> None:
    for pieces in all_cuts(text):
        assert read(pieces) == (visible, reasoning), pieces


STRAYS = [
    ("hm, so</think>Yes", "hm, soYes"),
    ("</think>\n\nYes", "Yes"),
    ("hm\n</THINKING>\nYes", "hm\n\nYes"),
    ("<think>a</think>b</think>c", "bc"),
    ("a </reasoning> b </thought> c", "a  b  c"),
    ("x <think>y</think> z</think>!", "x <think>y</think> z!"),
    ("Write `</think>` to end it.", "Write `</think>` to end it."),
    ("`a` </think>b", "`a` b"),
    ("```\n</think>\n```\n", "```\n</think>\n```\n"),
    ("a </thin b", "a </thin b"),
]


@pytest.mark.parametrize(("text", "visible"), STRAYS)
def test_unmatched_closing_tag_is_dropped_outside_code(text: str, visible: str) -> None:
    for pieces in all_cuts(text):
        assert read(pieces)[0] == visible, pieces


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        pytest.param("```\n~~~\n<think>x</think>\n```\n", "```\n~~~\n<think>x</think>\n```\n", id="other mark"),
        pytest.param("````\n```\n<think>x</think>\n````\n", "````\n```\n<think>x</think>\n````\n", id="shorter mark"),
        pytest.param("```\n```py\n<think>x</think>\n```\n", "```\n```py\n<think>x</think>\n```\n", id="with a word"),
    ],
)
def test_code_fence_closes_only_with_matching_mark(text: str, visible: str) -> None:
    assert read([text]) == (visible, "")


@pytest.mark.parametrize("letter", ["İ", "ẞ", "K", "ǅ", "🧠"])
def test_think_tag_with_characters_that_lowercase_longer(letter: str) -> None:
    text = f"<think>{letter * 3}</think>Yes"
    for pieces in all_cuts(text):
        assert read(pieces) == ("Yes", letter * 3), pieces


_tokens = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<ThOught>", "</thought>", "<th", "</", "<", ">", "\n", "```", "~~~", " ", "a"]
    ),
    max_size=14,
).map("".join)


@given(_tokens, st.data())
def test_chunking_does_not_change_result(text: str, data: st.DataObject) -> None:
    assert read(any_cut(data, text)) == read([text])


@given(_tokens)
@settings(deadline=None)
def test_held_back_text_is_bounded(text: str) -> None:
    for end in range(len(text) + 1):
        split = InlineMarkup()
        split.feed(text[:end])
        assert sum(len(piece) for _, piece in split.finish()) <= HELD_CHARS_MAX


@pytest.mark.parametrize("tag", ["<REASONING_SCRATCHPAD", "<think>a</think", "<thinking>a</thinking", "\n\n<though"])
def test_held_back_text_is_flushed_at_end(tag: str) -> None:
    completed = run([Text(char) for char in f"Hello\n{tag}"])
    assert completed.text + completed.reasoning == f"Hello\n{tag}".replace("<think>", "").replace("<thinking>", "")


def test_think_tag_after_continued_text_needs_own_line() -> None:
    assert read(["<think>x</think>"], before="so far") == ("<think>x</think>", "")
    assert read(["<think>x</think>y"], before="so far\n") == ("y", "x")
    assert read(["<think>x</think>"], before="```\ncode\n") == ("<think>x</think>", "")


# ---- line breaks at the beginning


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("\n\nHello\n\nworld\n", "Hello\n\nworld\n"),
        ("\r\n\r\nHello", "Hello"),
        ("\n  \n    code", "    code"),
        ("  Hello", "  Hello"),
        ("\n", ""),
        (" \n \n", ""),
        ("<think>a</think>\n\nHello", "Hello"),
        ("\n<think>a</think>\nHello", "Hello"),
        ("Hello", "Hello"),
        ("Hello\n", "Hello\n"),
    ],
)
def test_leading_newlines_are_dropped(text: str, visible: str) -> None:
    for pieces in all_cuts(text):
        completed = run(Text(piece) for piece in pieces)
        assert (completed.text, completed.message.text) == (visible, visible), pieces


def test_continued_message_keeps_leading_newlines() -> None:
    assert read(["\n\nand on"], before="Begun") == ("\n\nand on", "")


# ---- what is delivered is what is stored

_words = st.text(alphabet="ab <>/think\n`", max_size=12)
_parts = st.lists(
    st.one_of(
        st.builds(Text, _words),
        st.builds(Reasoning, _words, st.sampled_from(["raw", "summary"]), st.sampled_from(["", "sig"])),
        st.builds(
            ToolDelta,
            st.none() | st.integers(0, 3),
            st.sampled_from(["", "c1", "c2"]),
            st.sampled_from(["", "f", "get_", "x"]),
            st.sampled_from(["", "{", '{"a": 1}', "}"]),
            st.none() | st.just({"k": 1}),
            st.booleans(),
        ),
        st.builds(Opaque, st.just("item"), st.integers()),
        st.builds(Usage, st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)),
        st.builds(Model, st.sampled_from(["", "m"])),
        st.builds(Finish, st.sampled_from(["stop", "tool_calls", "length", "unknown"])),
        st.builds(ServerError, st.none(), st.just(""), st.just("lost")),
    ),
    max_size=15,
)


@given(_parts, st.sampled_from(["", "some text of twelve and more", "x\n"]))
def test_delivered_text_equals_message_and_call_ids_are_unique(parts: list[Part], before: str) -> None:
    assembler = Assembler("run:1", before)
    text = reasoning = ""
    for part in [*parts, None]:
        for delta in assembler.finish() if part is None else assembler.feed(part):
            text += delta.text if isinstance(delta, TextDelta) else ""
            reasoning += delta.text if isinstance(delta, ReasoningDelta) else ""
        message = assembler.message()
        assert (text, reasoning) == (message.text, message.reasoning)
        assert assembler.delivered == len(text)
        ids = [call.id for call in message.tool_calls]
        assert all(ids) and len(set(ids)) == len(ids)
        assert all(call.name and call.arguments.strip() for call in message.tool_calls)
        assert message.complete <= (assembler.error is None)


def test_text_after_tool_call_is_delivered_and_stored() -> None:
    completed = run([Text("One"), ToolDelta(0, "c1", "f", "{}"), Text(" two"), Finish("tool_calls")])
    assert (completed.text, completed.message.text) == ("One two", "One two")
    assert [call.name for call in completed.message.tool_calls] == ["f"]


def test_reasoning_deltas_keep_their_form() -> None:
    assembler = Assembler()
    assert list(assembler.feed(Reasoning("hm", "summary"))) == [ReasoningDelta("hm", "summary")]
    assert list(assembler.feed(Reasoning(""))) == []
    assert assembler.message().reasoning == "hm"


def test_signature_closes_reasoning_block() -> None:
    parts = [Reasoning("a"), Reasoning("b", signature="s1"), Reasoning("c"), Reasoning("", signature="s2")]
    assert run(parts).message.opaque == [
        {"kind": "signed_reasoning", "data": {"text": "ab", "signature": "s1"}},
        {"kind": "signed_reasoning", "data": {"text": "c", "signature": "s2"}},
    ]


def test_opaque_items_keep_order() -> None:
    opaque = run([Opaque("item", {"id": 1}), Text("x"), Opaque("item", {"id": 2})]).message.opaque
    assert opaque == [{"kind": "item", "data": {"id": 1}}, {"kind": "item", "data": {"id": 2}}]


# ---- which call a fragment belongs to

FRAGMENTS: list[tuple[str, list[ToolDelta], list[tuple[str, str, str]]]] = [
    (
        "by index, interleaved",
        [
            ToolDelta(0, "a", "f"),
            ToolDelta(1, "b", "g"),
            ToolDelta(0, arguments='{"x":'),
            ToolDelta(1, arguments='{"y":'),
            ToolDelta(0, arguments="1}"),
            ToolDelta(1, arguments="2}"),
        ],
        [("a", "f", '{"x":1}'), ("b", "g", '{"y":2}')],
    ),
    (
        "by id where there is no index",
        [
            ToolDelta(id="a", name="f", arguments='{"x":'),
            ToolDelta(id="b", name="g", arguments="{}"),
            ToolDelta(id="a", arguments="1}"),
        ],
        [("a", "f", '{"x":1}'), ("b", "g", "{}")],
    ),
    (
        "with neither it is the latest call's",
        [ToolDelta(0, "a", "f"), ToolDelta(id="b", name="g"), ToolDelta(arguments="{}")],
        [("a", "f", "{}"), ("b", "g", "{}")],
    ),
    (
        "a new id on a used index opens a call",
        [ToolDelta(0, "a", "f", "{}"), ToolDelta(0, "b", "g", '{"y":'), ToolDelta(0, arguments="2}")],
        [("a", "f", "{}"), ("b", "g", '{"y":2}')],
    ),
    (
        "the same id on the same index does not",
        [ToolDelta(0, "a", "f", '{"x":'), ToolDelta(0, "a", "f", "1}")],
        [("a", "f", '{"x":1}')],
    ),
    (
        "an id that comes late is the call's",
        [ToolDelta(0, name="f"), ToolDelta(0, "a", arguments="{}")],
        [("a", "f", "{}")],
    ),
    (
        "a repeated full name is ignored",
        [ToolDelta(0, "a", "get_weather"), ToolDelta(0, name="get_weather", arguments="{}")],
        [("a", "get_weather", "{}")],
    ),
    (
        "a continued name is appended",
        [ToolDelta(0, "a", "get_"), ToolDelta(0, name="wea"), ToolDelta(0, name="ther", arguments="{}")],
        [("a", "get_weather", "{}")],
    ),
    (
        "but not once there are arguments",
        [ToolDelta(0, "a", "get", "{"), ToolDelta(0, name="_weather", arguments="}")],
        [("a", "get", "{}")],
    ),
    (
        "a name that is finished is repeated without index and id",
        [ToolDelta(name="f", arguments='{"x":'), ToolDelta(name="f", arguments="1}")],
        [("", "f", '{"x":1}')],
    ),
    (
        "indexes may have holes and any order",
        [ToolDelta(5, "a", "f", "{}"), ToolDelta(2, "b", "g", "{}")],
        [("a", "f", "{}"), ("b", "g", "{}")],
    ),
    (
        "all arguments at once replace the fragments",
        [ToolDelta(0, "a", "f", '{"x":'), ToolDelta(0, "a", "f", '{"x":1}', whole=True)],
        [("a", "f", '{"x":1}')],
    ),
    (
        "no arguments are no arguments",
        [ToolDelta(0, "a", "f"), ToolDelta(1, "b", "g", " \n"), ToolDelta(2, "c", "h", "", whole=True)],
        [("a", "f", "{}"), ("b", "g", "{}"), ("c", "h", "{}")],
    ),
    ("a call that never gets a name is none", [ToolDelta(0, "a", arguments="{}")], []),
]


@pytest.mark.parametrize(("fragments", "expected"), [(f, e) for _, f, e in FRAGMENTS], ids=[n for n, _, _ in FRAGMENTS])
def test_tool_call_fragments_are_joined(fragments: list[ToolDelta], expected: list[tuple[str, str, str]]) -> None:
    rows = [(call.id, call.name, call.arguments) for call in calls(*fragments)]
    assert [(name, arguments) for _, name, arguments in rows] == [(name, args) for _, name, args in expected]
    assert all(actual == wanted for (actual, *_), (wanted, *_) in zip(rows, expected, strict=True) if wanted)


def test_tool_call_without_id_gets_deterministic_id() -> None:
    parts = [ToolDelta(0, name="f"), ToolDelta(1, name="f")]
    first, second = (call.id for call in calls(*parts, identity="run_1:3"))
    assert re.fullmatch(r"call_[0-9a-f]{24}", first)
    assert first != second
    assert [call.id for call in calls(*parts, identity="run_1:3")] == [first, second]
    assert calls(*parts, identity="run_1:4")[0].id != first


def test_duplicate_tool_call_id_is_made_unique() -> None:
    first, two = calls(ToolDelta(0, "same", "f"), ToolDelta(1, "same", "g"))
    assert (first.id, first.name, two.name) == ("same", "f", "g")
    assert two.id != "same"


def test_tool_call_extra_content_is_kept_and_replayed() -> None:
    extra = {"google": {"thought_signature": "abc"}}
    (call,) = calls(ToolDelta(0, "a", "f", extra=extra), ToolDelta(0, arguments="{}"))
    assert call.extra == extra
    assert call.as_dict() == {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
        "extra_content": extra,
    }


def test_tool_drafted_is_emitted_once_name_is_known() -> None:
    parts = [ToolDelta(0, "a"), ToolDelta(0, name="f"), ToolDelta(0, arguments="{}"), ToolDelta(1, "b", "g")]
    completed = run(parts)
    assert completed.drafted == [ToolDrafted(0, "f"), ToolDrafted(1, "g")]
    assert completed.assembler.drafting == ("f", "g")


# ---- usage, model, finish


def test_last_usage_wins_per_field() -> None:
    usage = [Usage(10, 1, cache_read_tokens=5), Usage(output_tokens=7), Usage(total_tokens=17, cost_usd=0.5)]
    assert run(usage).message.usage == Usage(10, 7, 17, 5, None, None, 0.5)
    assert run([Usage(3), Usage(0)]).message.usage == Usage(0)
    assert run([Text("x")]).message.usage is None


def test_last_model_name_wins() -> None:
    assert run([Model("a"), Model(""), Model("b")]).message.model == "b"


CALL = ToolDelta(0, "a", "f", "{}")
ERROR = ServerError(500, "", "x")


@pytest.mark.parametrize(
    ("parts", "reason", "complete"),
    [
        ([Text("x"), Finish("stop")], "stop", True),
        ([CALL, Finish("stop")], "tool_calls", True),
        ([CALL, Finish("unknown")], "tool_calls", True),
        ([CALL, Finish("tool_calls")], "tool_calls", True),
        ([Text("x"), Finish("tool_calls")], "stop", True),
        ([CALL, Finish("length")], "length", True),
        ([CALL, Finish("content_filter")], "content_filter", True),
        ([Text("x"), Finish("length")], "length", True),
        ([Text("x"), Finish("error")], "error", True),
        ([Text("x")], "unknown", False),
        ([CALL], "unknown", False),
        ([Text("x"), Finish("stop"), ERROR], "stop", False),
    ],
)
def test_finish_reason_and_completeness(parts: list[Part], reason: FinishReason, complete: bool) -> None:
    message = run(parts).message
    assert (message.finish_reason, message.complete) == (reason, complete)


def test_stream_error_is_remembered() -> None:
    assembler = run([Text("x"), ERROR]).assembler
    assert (assembler.error, assembler.finished) == (ERROR, False)


# ---- going on after a break

TAIL = "The quick brown fox jumps over the lazy dog."


def removed(before: str, pieces: Iterable[str]) -> str:
    overlap = Overlap(before)
    return "".join([*(overlap.feed(piece) for piece in pieces), overlap.finish()])


@pytest.mark.parametrize("size", [OVERLAP_CHARS_MIN, OVERLAP_CHARS_MIN + 1, 30, len(TAIL)])
def test_repeated_tail_is_removed_for_any_chunking(size: int) -> None:
    text = TAIL[-size:] + " And on."
    for pieces in all_cuts(text):
        assert removed("Long ago. " + TAIL, pieces) == " And on.", pieces


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (TAIL, TAIL[-OVERLAP_CHARS_MIN + 1 :] + " And on."),
        (TAIL, TAIL[:20] + " And on."),
        (TAIL, TAIL[4:25]),
        (TAIL, "Something else"),
        ("short", "short and on"),
        ("", "anything"),
    ],
    ids=["too short", "not the end", "from the middle", "other", "short before", "nothing before"],
)
def test_non_repetition_is_kept(before: str, text: str) -> None:
    for pieces in all_cuts(text):
        assert removed(before, pieces) == text, pieces


def test_longest_repetition_is_removed() -> None:
    before = "ab" * 40
    assert removed(before, ["ab" * 10 + "c"]) == "c"
    assert removed("x" * 30, ["x" * 40]) == "x" * 10


def test_repetition_is_searched_in_last_characters_only() -> None:
    before = "".join(chr(0x4E00 + i) for i in range(300))
    exact = before[-OVERLAP_CHARS_MAX:]
    assert removed(before, [exact + "!"]) == "!"
    assert removed(before, [before[-OVERLAP_CHARS_MAX - 1 :] + "!"]) == before[-OVERLAP_CHARS_MAX - 1 :] + "!"


@given(st.text(alphabet="abc", max_size=40), st.text(alphabet="abc", max_size=30), st.integers(0, 30))
@settings(deadline=None)
def test_only_repetitions_are_removed_property(before: str, text: str, at: int) -> None:
    remaining = removed(before, [text[:at], text[at:]])
    overlap = text[: len(text) - len(remaining)]
    assert text.endswith(remaining) and before.endswith(overlap)
    assert not overlap or OVERLAP_CHARS_MIN <= len(overlap) <= OVERLAP_CHARS_MAX
    longest = max((n for n in range(12, len(text) + 1) if before.endswith(text[:n])), default=0)
    assert len(overlap) == longest


def test_assembler_does_not_deliver_repetition() -> None:
    for pieces in cuts(TAIL[-20:] + " And on.", 2):
        completed = run([Text(piece) for piece in pieces], before=TAIL)
        assert (completed.text, completed.message.text, completed.assembler.delivered) == (" And on.", " And on.", 8)


def test_pure_repetition_leaves_nothing() -> None:
    assert read([TAIL[-20:]], before=TAIL) == ("", "")


# ---- white space that the model was not shown and writes again


@pytest.mark.parametrize(
    ("again", "text", "remaining"),
    [
        ("\n\n", "\n\nNext", "Next"),
        ("\n\n", "\nNext", "Next"),
        ("\n\n", "\n\n\nNext", "\nNext"),
        ("\n\n", "Next", "Next"),
        ("  ", " Next", "Next"),
        (" ", "\nNext", "\nNext"),
        ("\n", "a\nb", "a\nb"),
    ],
)
def test_repeated_whitespace_is_not_delivered_twice(again: str, text: str, remaining: str) -> None:
    for pieces in all_cuts(text):
        assert read(pieces, before="Begun" + again, again=again) == (remaining, ""), pieces


@pytest.mark.parametrize("text", ['{"a": "}\\\\\\" {", "b": [{}]}', '{"a": {"b": 1}}', '["]"]', '{"a": "\\\\"}'])
def test_tool_name_may_repeat_in_every_fragment(text: str) -> None:
    """Without index and id, the next call begins where the arguments of the last one are complete."""
    for pieces in all_cuts(text):
        parts = [ToolDelta(name="look", arguments=piece) for piece in [*pieces, *pieces]]
        assert [call.arguments for call in calls(*parts)] == [text, text]


def test_deeply_nested_arguments_in_fragments() -> None:
    [call] = calls(*[ToolDelta(name="look", arguments='{"a": ')] * 3_000)
    assert call.arguments == '{"a": ' * 3_000


def test_opaque_string_items_stay_separate() -> None:
    assembler = Assembler()
    for data in ("commentary", "final_answer"):
        assembler.feed(Opaque("phase", data))
    assert [item["data"] for item in assembler.message().opaque] == ["commentary", "final_answer"]


def test_reasoning_content_pieces_become_one_item() -> None:
    provider, assembler = provider_for("chat_completions"), Assembler()
    for text in ("First ", "then."):
        chunk = {"model": "deepseek-reasoner", "choices": [{"index": 0, "delta": {"reasoning_content": text}}]}
        for part in provider.parts(WireEvent("", chunk)):
            assembler.feed(part)
    assert assembler.message().opaque == [{"kind": "reasoning_content", "data": "First then."}]
