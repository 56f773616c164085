"""What tools answered, as a person reads it: previews, readable text and diffs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hermes.cli.tool_text import diff_lines, file_diff, preview_lines, readable
from hermes.core.message_marks import foreign_frame


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"output": "a\nb\n", "exit_code": 0, "cwd": "/x", "duration_ms": 4}, "a\nb"),
        ({"output": "a", "exit_code": 2}, "a\n\nexit code: 2"),
        ({"matches": [{"path": "x.py", "line": 3}], "truncated": False}, "matches:\n  -\n    path: x.py\n    line: 3"),
        ({"done": True, "note": None, "text": "one\ntwo"}, "done: true\ntext:\n  one\n  two"),
        (["a", "b"], "- a\n- b"),
        ("plain", "plain"),
    ],
)
def test_readable_text_of_results(result: Any, text: str) -> None:
    assert readable(result if isinstance(result, str) else json.dumps(result)) == text


@pytest.mark.parametrize(
    ("result", "lines"),
    [
        ({"output": "a\nb\n", "exit_code": 0}, ["a", "b"]),
        ({"output": "\n".join("abcdef"), "exit_code": 1}, ["a", "… 4 more lines: /expand", "f", "exit code 1"]),
        ({"error": "There is no such file.", "code": "not_found"}, ["There is no such file."]),
        ({"status": "blocked", "by": "user", "reason": "The user did not allow it."}, []),
        ({"status": "blocked", "by": "rule", "reason": "This is never done."}, ["This is never done."]),
        ({"output": "\x1b[31mred\x1b[0m"}, ["red"]),
        ("", []),
    ],
)
def test_preview_of_results(result: Any, lines: list[str]) -> None:
    text = result if isinstance(result, str) else json.dumps(result)
    assert [line.plain for line in preview_lines(text, ": /expand")] == lines


def test_data_from_outside_is_shown_without_its_frame() -> None:
    framed = foreign_frame(json.dumps({"output": "a page\n", "exit_code": 0}), "0123456789abcdef")
    assert readable(framed) == "a page"
    assert [line.plain for line in preview_lines(framed)] == ["a page"]
    cut = foreign_frame("a long text", "0123456789abcdef")[:-30]
    assert readable(cut).startswith("a long text")


def test_diff_is_coloured_and_bounded() -> None:
    diff = "--- tea.txt\n+++ tea.txt\n@@ -1,2 +1,2 @@\n green\n-black\n+white"
    assert file_diff(json.dumps({"diff": diff}), {}) == diff
    lines = list(diff_lines(diff))
    assert [(line.plain, str(line.style)) for line in lines] == [
        ("+++ tea.txt", "bold"),
        ("@@ -1,2 +1,2 @@", "cyan"),
        (" green", "dim"),
        ("-black", "red"),
        ("+white", "green"),
    ]
    assert [line.plain for line in diff_lines(diff, 3, ": /expand")] == [
        "+++ tea.txt",
        "@@ -1,2 +1,2 @@",
        "… 3 more lines: /expand",
    ]


def test_new_file_is_a_diff_of_added_lines() -> None:
    result = json.dumps({"path": "a.txt", "created": True, "added": 2})
    assert file_diff(result, {"content": "one\ntwo\n"}) == "+++ a.txt\n+one\n+two"
    assert file_diff(result.replace("true", "false"), {"content": "one\n"}) == ""
