"""Tool calls in the text of an answer: found, made and taken out, however the stream is cut; other text is left alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes.agent.assembler import Assembler, TextDelta
from hermes.agent.inline import InlineMarkup
from hermes.core.limits import LEAKED_CALL_CHARS_MAX, LEAKED_CALL_HEAD_CHARS_MAX
from hermes.core.stream_parts import Finish, Text, ToolDelta
from support.cutting import all_cuts, any_cut, cut

Calls = list[tuple[str, Any]]


def accept(name: str, args: dict[str, Any] | str) -> tuple[str, str] | None:
    return (name, args if isinstance(args, str) else json.dumps(args)) if name in ("f", "g") else None


def parsed(arguments: str) -> Any:
    """The arguments of a call; those that are no JSON are passed on as they are."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def read(pieces: list[str], *parts: ToolDelta, before: str = "") -> tuple[str, Calls, Assembler]:
    """Visible text and calls of an answer."""
    assembler = Assembler("run:1", before, accept=accept)
    deltas = [delta for piece in pieces for delta in assembler.feed(Text(piece))]
    deltas += [delta for part in (*parts, Finish("stop")) for delta in assembler.feed(part)]
    deltas += assembler.finish()
    message = assembler.message()
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    assert text == message.text
    assert len(text) == assembler.delivered
    calls = [(call.name, parsed(call.arguments)) for call in message.tool_calls]
    assert message.finish_reason == ("tool_calls" if calls else "stop")
    return text, calls, assembler


A1 = ("f", {"a": 1})
SECTION = "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>"
WIDE = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
BLOCKS: list[tuple[str, str, Calls]] = [
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [A1]),
    ('Look:<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>\nDone', "Look:\nDone", [A1]),
    ('<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', "", [A1]),
    ('<tool_call>{"name":"f","parameters":{"a":1}}</tool_call>', "", [A1]),
    ('<tool_call>{"function":{"name":"f","arguments":{"a":1}}}</tool_call>', "", [A1]),
    ('<tool_call>{"name":"f"}</tool_call>', "", [("f", {})]),
    ('<tool_call>{"name":"f","arguments":{"a":1}</tool_call>', "", [A1]),
    ('<tool_call>{"name":"f","arguments":{"a":1}}', "", [A1]),
    ('<tool_call>{"name":"f"}</tool_call>\n<tool_call>{"name":"g"}</tool_call>', "", [("f", {}), ("g", {})]),
    ('<tool_call>{"name":"f"}\n{"name":"g"}</tool_call>', "", [("f", {}), ("g", {})]),
    ('<tool_calls>[{"name":"f"},{"name":"g"}]</tool_calls>', "", [("f", {}), ("g", {})]),
    ('<function_call>{"name":"f","arguments":{"a":1}}</function_call>', "", [A1]),
    ('<function=f>{"a":1}</function>', "", [A1]),
    ("<function=f></function>", "", [("f", {})]),
    ("<function=f>\n<parameter=a>\nx\ny\n</parameter>\n</function>", "", [("f", {"a": "x\ny"})]),
    (
        "<tool_call>\n<function=f>\n<parameter=a>\n<b>\n</parameter>\n</function>\n</tool_call>",
        "",
        [("f", {"a": "<b>"})],
    ),
    ("<function=f><parameter=a>1</parameter><parameter=b>2", "", [("f", {"a": "1", "b": "2"})]),
    ('<invoke name="f"><parameter name="a">1</parameter></invoke>', "", [("f", {"a": "1"})]),
    (
        '<function_calls><invoke name="f"></invoke><invoke name="g"></invoke></function_calls>',
        "",
        [("f", {}), ("g", {})],
    ),
    ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "", [("f", {"a": "1"})]),
    ("<tool_call>f</tool_call>", "", [("f", {})]),
    ('[TOOL_CALLS][{"name":"f","arguments":{"a":1}}]', "", [A1]),
    ('[TOOL_CALLS] [{"name":"f"}] So [1].', "So [1].", [("f", {})]),
    ('[TOOL_CALLS]f[ARGS]{"a":1}', "", [A1]),
    ('[TOOL_CALLS]f{"a":1}g{}', "", [A1, ("g", {})]),
    ('<|tool_call|>[{"name":"f","arguments":{"a":1}}]<|/tool_call|>Yes', "Yes", [A1]),
    ('<|python_tag|>{"name":"f","parameters":{"a":1}}', "", [A1]),
    (SECTION + '{"a":1}<|tool_call_end|><|tool_calls_section_end|>', "", [A1]),
    (WIDE + 'f<｜tool▁sep｜>{"a":1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", [A1]),
    (WIDE + 'function<｜tool▁sep｜>f\n```json\n{"a":1}\n```<｜tool▁call▁end｜>', "", [A1]),
    ('`x` <tool_call>{"name":"f"}</tool_call>', "`x` ", [("f", {})]),
    ('```\ncode\n```\n<tool_call>{"name":"f"}</tool_call>', "```\ncode\n```\n", [("f", {})]),
    ('<think>hm</think><tool_call>{"name":"f"}</tool_call>', "", [("f", {})]),
]
# What is no call that can be made is taken out all the same.
UNUSABLE = [
    ('One <tool_call>{"name":"h","arguments":{}}</tool_call>two', "One two"),
    ("One <tool_call>{nonsense}</tool_call>two", "One two"),
    ('One <tool_call>{"arguments":{}}</tool_call>two', "One two"),
    ("One <function=h>{}</function>two", "One two"),
    ("One <tool_call>", "One "),
    ('One <tool_call>{"name":"f', "One "),
    ("[TOOL_CALLS][{", ""),
]
# Text that only speaks of such things.
PROSE = [
    "a < b, a <b> c, a[1] and [T]ext",
    "Models write <tool_call> before a call and </tool_call> behind it.",
    "The pair <tool_call></tool_call> holds it.",
    "Use <function=name> for that",
    "Use <function=name>, then <invoke name=x>.",
    "The token <|tool_call|> or <|tool_calls| is special, [TOOL_CALLS] too",
    '`<tool_call>{"name":"f"}</tool_call>` is a call',
    '```xml\n<tool_call>{"name":"f"}</tool_call>\n<function=f>{}</function>\n```\n',
    '~~~\n[TOOL_CALLS][{"name":"f"}]\n~~~\n</tool>',
    "<function>x</function> and <tool>y</tool>",
    "<|im_start|> <|tool",
    "<｜tool▁sep｜> and <｜tool",
]


@pytest.mark.parametrize(("text", "visible", "calls"), BLOCKS, ids=[text[:40] for text, _, _ in BLOCKS])
def test_leaked_call_is_parsed_for_any_chunking(text: str, visible: str, calls: Calls) -> None:
    for pieces in [*all_cuts(text)] if len(text) < 60 else [[text], cut(text, range(1, len(text))), *two(text)]:
        assert read(pieces)[:2] == (visible, calls), pieces


def two(text: str) -> list[list[str]]:
    return [cut(text, [at]) for at in range(1, len(text))]


@pytest.mark.parametrize(("text", "visible"), UNUSABLE)
def test_invalid_leaked_call_is_removed_from_text(text: str, visible: str) -> None:
    for pieces in all_cuts(text):
        shown_text, calls, assembler = read(pieces)
        assert (shown_text, calls, assembler.call_missing) == (visible, [], True), pieces


@pytest.mark.parametrize("text", PROSE)
def test_text_mentioning_a_call_is_kept(text: str) -> None:
    for pieces in [[text], cut(text, range(1, len(text))), *two(text)]:
        shown_text, calls, assembler = read(pieces)
        assert (shown_text, calls, assembler.call_missing) == (text, [], False), pieces


def test_leaked_calls_are_ignored_when_not_accepted() -> None:
    text = '<tool_call>{"name":"f"}</tool_call> [TOOL_CALLS][]'
    assembler = Assembler()
    assembler.feed(Text(text))
    assembler.finish()
    assert (assembler.message().text, assembler.message().tool_calls) == (text, [])


def test_leaked_duplicate_of_proper_call_runs_once() -> None:
    text = '<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call><tool_call>{"name":"g"}</tool_call>'
    shown_text, calls, _ = read([text], ToolDelta(0, "c1", "f", '{"a":1}'))
    assert (shown_text, sorted(calls, key=str)) == ("", [A1, ("g", {})])


def test_arguments_of_proper_call_do_not_mix_with_leaked_call() -> None:
    text = '<tool_call>{"name":"f"}</tool_call>'
    _, calls, _ = read([text], ToolDelta(name="g", arguments="{"), ToolDelta(arguments="}"))
    assert calls == [("f", {}), ("g", {})]


def test_leaked_call_ids_are_deterministic() -> None:
    text = '<tool_call>{"name":"f"}</tool_call>' * 2
    ids = [[call.id for call in read(pieces)[2].message().tool_calls] for pieces in ([text], [*text])]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2


def test_leaked_call_in_continued_code_block_is_text() -> None:
    text = '<tool_call>{"name":"f"}</tool_call>'
    assert read([text], before="```\n")[:2] == (text, [])
    assert read([text], before="see `")[:2] == (text, [])


def test_endless_leaked_call_becomes_text() -> None:
    text = '<tool_call>{"name": "' + "x" * (LEAKED_CALL_CHARS_MAX + 1)
    shown_text, calls, _ = read([text[at : at + 50_000] for at in range(0, len(text), 50_000)])
    assert (shown_text, calls) == (text, [])


_words = (
    '<tool_call> </tool_call> {"name":"f"} <function=f> </function> [TOOL_CALLS] <|tool_call |> <think> </think> <t < [ > f '
    "` ``` a <parameter=a> </parameter>"
)
_tokens = st.lists(st.sampled_from([*_words.split(), " ", "\n"]), max_size=14).map("".join)


@given(_tokens, st.data())
def test_leaked_call_chunking_does_not_change_result(text: str, data: st.DataObject) -> None:
    assert read(any_cut(data, text))[:2] == read([text])[:2]


@given(st.text(alphabet="ab <>/|`[]={}\n_", max_size=60))
def test_other_text_is_not_held_back_for_leaked_calls(text: str) -> None:
    markup = InlineMarkup(calls=True)
    delivered = ""
    for char in text:
        delivered += "".join(piece for _, piece in markup.feed(char))
        assert text.startswith(delivered)
    assert text[len(delivered) :] == "".join(piece for _, piece in markup.finish())
    assert len(text) - len(delivered) <= LEAKED_CALL_HEAD_CHARS_MAX


def test_plain_text_bypasses_leaked_call_parser() -> None:
    markup = InlineMarkup(calls=True)
    markup.feed("A line")
    assert all(markup.passes(token) for token in (" of", " plain", " words", ", and (more)."))
