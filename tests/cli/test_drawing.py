"""How texts and events are drawn: Markdown line by line, nothing that steers the terminal, lines that fit."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from hermes.cli.markdown_lines import MarkdownLines
from hermes.cli.screen import Screen

WIDTH = 40


def drawn(text: str) -> list[str]:
    """The lines of a text without colours."""
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    lines = MarkdownLines()
    for line in text.split("\n"):
        console.print(*lines.line(line), sep="\n", end="\n" if not lines.is_open else "")
    console.print(*lines.end(), sep="\n")
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().rstrip().split("\n") if line.strip()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# Title #", ["Title"]),
        ("**bold** and *italic* and `code`", ["bold and italic and code"]),
        ("2*3*4, snake_case_name, a * b * c", ["2*3*4, snake_case_name, a * b * c"]),
        ("`**not bold**`", ["**not bold**"]),
        ("[a link](https://x.test/y)", ["a link (https://x.test/y)"]),
        ("- one\n  - two\n3. three", ["  • one", "    • two", "  3. three"]),
        ("- [x] done\n- [ ] open", ["  • ☑ done", "  • ☐ open"]),
        ("- " + "word " * 12, ["  • word word word word word word word", "    word word word word word"]),
        ("> quoted", ["  │ quoted"]),
        ("```\n# no **title**\n```\nafter", ["  # no **title**", "after"]),
        ("~~~\n```\n~~~", ["  ```"]),
        ("| a | b |\n|---|--:|\n| 1 | 22 |", ["  a    b", "  ─────────", "  1   22"]),
        ("| no table", ["| no table"]),
        (
            "```python\nprint('a long line of code', 'that goes on', end)\n```",
            ["  print('a long line of code', 'that", "  goes on', end)"],
        ),
        (f"```python\n{'x' * 60}\n```", [f"  {'x' * 38}", f"  {'x' * 22}"]),
        (f"```\n{'x' * 60}\n```", [f"  {'x' * 38}", f"  {'x' * 22}"]),
        (f"| a |\n|---|\n| {'y' * 60} |", ["  a", "  ─────────", f"  {'y' * 38}", f"  {'y' * 22}"]),
    ],
)
def test_markdown_rendering_per_line(text: str, expected: list[str]) -> None:
    lines = drawn(text)
    assert [re.sub("─+", "─" * 9, line) for line in lines] == expected


def screen(**more: Any) -> tuple[Screen, list[str]]:
    written: list[str] = []
    display = Screen(lambda: WIDTH, reasoning=True, quiet=False)
    display.emit = written.append
    display.begin()
    return display, written


def plain(written: list[str]) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(written))


def delta(text: str) -> dict[str, Any]:
    return {"event": "message.delta", "delta": text, "message_id": "m", "offset": 0}


def test_rendering_is_same_for_any_chunking() -> None:
    text = (
        "# A\n\nSome **bold** words.\n\n\n- one\n- two\n\n```python\nx = 1\n\ny = 2\n```\n\n| a |\n|---|\n| 1 |\n\nEnd."
    )
    outputs = set()
    for size in (1, 2, 3, 7, 1000):
        display, written = screen()
        for at in range(0, len(text), size):
            display.show(delta(text[at : at + size]))
            display.live(10)
        display.show({"event": "message.completed", "message_id": "m", "content": text, "phase": "final_answer"})
        outputs.add(plain(written))
    assert len(outputs) == 1
    assert "Some bold words.\n\n" in outputs.pop()


@pytest.mark.parametrize("text", ["\x1b[2Jgone", "\x1b]0;title\x07", "over\rwritten", "\x9b31m"])
def test_rendering_strips_terminal_escapes(text: str) -> None:
    display, written = screen()
    display.show(delta(f"{text}\n{text}"))
    call = {"tool": "terminal", "tool_call_id": "c", "preview": text, "arguments": {}, "iteration": 1}
    display.show({"event": "tool.started", **call})
    display.show({"event": "tool.output", "tool_call_id": "c", "stream": "stdout", "offset": 0, "text": text})
    live = display.live(20)
    settings = {"tool": "terminal", "tool_call_id": "c", "duration": 0.1, "error": False, "status": "ok"}
    display.show({"event": "tool.completed", **settings, "result": text, "result_chars": len(text)})
    display.show({"event": "warning", "level": "warn", "code": "x", "message": text})
    for output in ("".join(written), live):
        plain_text = re.sub(r"\x1b\[[0-9;]*m", "", output)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", plain_text), repr(plain_text)


def test_live_area_fits_its_rows() -> None:
    display, _ = screen()
    display.show(delta("word " * 2000))
    assert display.live(5).count("\n") <= 7
    display.show({"event": "tool.started", "tool": "t", "tool_call_id": "c", "preview": "p" * 500, "iteration": 1})
    assert max(map(len, plain([display.live(5)]).split("\n"))) <= WIDTH


def test_note_does_not_break_unfinished_line() -> None:
    display, written = screen()
    display.show(delta("One unfinished"))
    display.note("Next: something")
    display.show(delta(" line.\n"))
    assert "One unfinished line.\n" in plain(written)
