"""Markdown drawn line by line, as it comes: what is on the screen never has to be drawn again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from hermes.core.limits import DRAWN_LINE_CHARS_MAX

_INLINE = re.compile(
    r"(?P<code>`+)(?P<literal>.+?)(?P=code)|(?P<strong>\*\*|__)(?=\S)(?P<bold>.+?)(?<=\S)(?P=strong)"
    r"|~~(?P<struck>.+?)~~|!?\[(?P<label>[^\]]*)\]\((?P<address>[^)\s]++)[^)]*+\)"
    r"|(?<![\w*])\*(?=[^\s*])(?P<star>[^*]+?)(?<=\S)\*(?![\w*])|(?<![\w_])_(?=\S)(?P<under>[^_]+?)(?<=\S)_(?!\w)"
)
_FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*([\w+#.-]*)")
_ITEM = re.compile(r"(\s*)(?:([-*+])|(\d{1,9})[.)])\s+(?:\[([ xX])\]\s+)?(.*)")
_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*\s*$")
_RULE = re.compile(r"\s*([-*_])(?:\s*\1){2,}\s*$")
_ROW = re.compile(r"\s*\|.*\|\s*$")
_CELLS = re.compile(r"(?<!\\)\|")
_HEADINGS = ("bold underline", "bold", "bold")


class MarkdownLines:
    """One text: whole lines in, what is to be drawn out."""

    def __init__(self) -> None:
        self._fence = ""
        self._language = ""
        self._rows: list[str] = []

    def line(self, text: str) -> Iterator[Any]:
        """What a further line looks like; the rows of a table wait for its end."""
        if self._fence:
            yield from self._code(text)
        elif len(text) > DRAWN_LINE_CHARS_MAX:
            yield from self.end()
            yield Text(text)
        elif _ROW.match(text):
            self._rows.append(text)
        else:
            yield from self.end()
            if match := _FENCE.match(text):
                self._fence, self._language = match[1], match[2]
            else:
                yield _block(text)

    @property
    def is_open(self) -> bool:
        return bool(self._fence or self._rows)

    def unfinished(self, text: str) -> Iterator[Any]:
        """What waits for its end, and a line of which there may be more to come."""
        yield from (Text(row, "dim") for row in self._rows)
        if text and len(text) > DRAWN_LINE_CHARS_MAX:
            yield Text(text, "cyan" if self._fence else "")
        elif text:
            yield Padding(Text(text, "cyan"), (0, 0, 0, 2), expand=False) if self._fence else _block(text)

    def end(self) -> Iterator[Any]:
        if self._rows:
            rows, self._rows = self._rows, []
            yield _table(rows)

    def _code(self, text: str) -> Iterator[Any]:
        if text.strip().startswith(self._fence) and not text.strip().strip(self._fence[0]):
            self._fence = ""
            return
        if self._language:
            shown = Syntax("", self._language, theme="ansi_dark").highlight(text)
            shown.rstrip()
            shown.no_wrap, shown.overflow = False, "fold"
        else:
            shown = Text(text, "cyan")
        yield Padding(shown, (0, 0, 0, 2), expand=False)


def inline(text: str, style: str = "") -> Text:
    out, at = Text(style=style), 0
    for match in _INLINE.finditer(text):
        out.append(text[at : match.start()])
        at = match.end()
        if match["literal"] is not None:
            out.append(match["literal"], "cyan")
        elif match["label"] is not None:
            label, address = match["label"] or match["address"], match["address"]
            out.append(label, "underline")
            if label != address:
                out.append(f" ({address})", "dim")
        else:
            kind = next(name for name in ("bold", "struck", "star", "under") if match[name] is not None)
            how = {"bold": "bold", "struck": "strike"}.get(kind, "italic")
            inner = inline(match[kind])
            inner.stylize(how)
            out.append_text(inner)
    return out.append(text[at:])


def _block(text: str) -> Any:
    if match := _HEADING.match(text):
        return inline(match[2], _HEADINGS[min(len(match[1]), len(_HEADINGS)) - 1])
    if _RULE.match(text):
        return Rule(style="dim")
    if match := _ITEM.match(text):
        box = {None: "", " ": "☐ "}.get(match[4], "☑ ")
        mark = f"{match[3]}." if match[3] else "•"
        return _hanging(f"{match[1]}  {mark} ", inline(box + match[5]))
    if text.lstrip().startswith(">"):
        return _hanging("  │ ", inline(text.lstrip()[1:].strip(), "italic"), "dim")
    return inline(text.rstrip())


def _hanging(mark: str, text: Text, style: str = "") -> Table:
    """A mark, and the text beside it however many lines it takes."""
    grid = Table.grid(padding=0)
    grid.add_column(width=len(mark), no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(mark, style), text)
    return grid


def _table(rows: list[str]) -> Padding | Text:
    cells = [[cell.strip().replace("\\|", "|") for cell in _CELLS.split(row.strip().strip("|"))] for row in rows]
    if len(cells) < 2 or not all(re.fullmatch(":?-+:?", cell) for cell in cells[1]):
        return Text("\n".join(rows))
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for at, name in enumerate(cells[0]):
        ends = cells[1][at] if at < len(cells[1]) else ""
        centred = ends.startswith(":") and ends.endswith(":")
        table.add_column(
            inline(name), overflow="fold", justify="center" if centred else "right" if ends.endswith(":") else "left"
        )
    for row in cells[2:]:
        table.add_row(*map(inline, row[: len(cells[0])]))
    return Padding(table, (0, 0, 0, 2), expand=False)
