"""What a request asks for, and what of it is not done: the pieces that begin with an action, and the calls that do it."""

from __future__ import annotations

import pytest

from hermes.providers.local_plan import Call, misleading, remaining, steps

PIECES = [
    (
        "copy a.txt to b.txt, then delete a.txt",
        [("copy", "copy a.txt to b.txt", "b.txt"), ("delete", "delete a.txt", "a.txt")],
    ),
    (
        "please read a.txt and write its first line into the file sub/b.txt",
        [("", "please read a.txt", ""), ("write", "write its first line into the file sub/b.txt", "sub/b.txt")],
    ),
    (
        "write a script one.py that prints 1, run it and tell me what it prints",
        [
            ("write", "write a script one.py that prints 1", "one.py"),
            ("run", "run it", ""),
            ("show", "tell me what it prints", ""),
        ],
    ),
    ("in a.txt change red to blue", [("change", "in a.txt change red to blue", "a.txt")]),
    ("benenne a.txt in b.txt um und lösche c.txt", [("move", "benenne a.txt in b.txt um", "b.txt"), ("delete", "lösche c.txt", "c.txt")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "pieces"), PIECES)
def test_request_is_cut_before_deeds(text: str, pieces: list[tuple[str, str, str]]) -> None:
    assert [(step.action, step.text, step.file) for step in steps(text)] == pieces


@pytest.mark.parametrize(
    "text",
    [
        "what does main.py print when it is run?",
        "which port is set in config.json?",
        "write me a poem and make it sad",
        "how do I copy a.txt to b.txt?",
        "which file defines the function add and where is it?",
    ],
)
def test_texts_and_questions_need_no_call(text: str) -> None:
    assert remaining(text, []) == []


def call(command: str, *, worked: bool = True) -> Call:
    return Call("terminal", f'{{"command": "{command}"}}', worked)


def remaining_texts(text: str, *calls: Call) -> list[str]:
    return [step.text for step in remaining(text, list(calls))]


def test_only_matching_call_completes_a_step() -> None:
    text = "copy a.txt to b.txt, then delete a.txt"
    both = ["copy a.txt to b.txt", "delete a.txt"]
    assert (
        remaining_texts(text)
        == remaining_texts(text, call("cat a.txt b.txt"))
        == remaining_texts(text, call("cp a.txt b.txt", worked=False))
        == both
    )
    assert remaining_texts(text, call("cp a.txt b.txt")) == ["delete a.txt"]
    assert remaining_texts(text, call("cp a.txt b.txt && rm a.txt")) == []
    assert remaining_texts("rename a.txt to b.txt", Call("write_file", '{"path": "b.txt", "content": "x"}', True))


def test_remaining_steps_follow_uncompleted_ones() -> None:
    text = "make a folder x, copy a.txt into it and tell me what is in it"
    assert remaining_texts(text, call("mkdir x")) == ["copy a.txt into it", "tell me what is in it"]
    copied = Call("terminal", '{"command": "mkdir x && cp a.txt x/"}', worked=True, spoke=False)
    assert remaining_texts(text, copied) == ["tell me what is in it"]
    assert remaining_texts(text, copied, call("ls x")) == []


def test_shown_file_must_be_read_after_the_change() -> None:
    read, changed = Call("read_file", '{"path": "a.txt"}', True), Call("patch", '{"path": "a.txt"}', True, spoke=False)
    text = "change 1 to 2 in a.txt and then show me its first line"
    assert remaining_texts(text, read, changed) == ["show me its first line"]
    assert remaining_texts(text, changed, read) == []
    assert remaining_texts("find the file with ships and show it", Call("search_files", "ships", True)) == ["show it"]
    assert remaining_texts("write one.py that prints 1, run it and tell me what it prints", Call("write_file", "one.py", True), call("python3 one.py")) == []  # fmt: skip


def test_append_request_is_not_met_by_overwriting() -> None:
    text = "append the line x to a.txt"
    assert remaining_texts(text, Call("write_file", '{"path": "a.txt", "content": "x"}', True)) == [text]
    assert (
        remaining_texts(text, call("echo x > a.txt")) == [text] and remaining_texts(text, call("echo x >> a.txt")) == []
    )
    assert misleading(text) == {"write_file", "patch"} == misleading("rename a.txt to b.txt")
    assert misleading("change x to y in a.txt") == misleading("what is in a.txt?") == set()
    assert misleading("write x to a.txt") == {"patch"}


def test_long_text_costs_little() -> None:
    assert len(steps("write a file a.txt, " * 10_000)) < 100
    assert steps("in " + "a.b" * 100_000)
