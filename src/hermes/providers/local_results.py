"""Tool results for the embedded model: the content first, as plain text. Pure."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

# Fields of results that tell a small model nothing.
_NOISE = frozenset(
    {
        "cwd",
        "duration_ms",
        "total_lines",
        "truncated",
        "matched_by",
        "path",
        "total",
        "next_offset",
        "withheld",
        "session_id",
        "message_id",
        "source",
        "title",
        "tool_name",
        "context",
        "complete",
        "hint",
        "chars",
        "limit",
        "note",
        "backend",
        "final_url",
        "spill",
        "status",
        "url",
        "categories",
        "diff",
    }
)
# The only fields that are told of some tools' results, and what an empty result means.
_FIELDS = {
    "cronjob": ("jobs", "id", "prompt", "next_times", "removed"),
    "write_file": ("diagnostics",),
    "patch": ("diagnostics",),
}
# Words that ask for something of the rows of a table, and what gives it.
_COMPARED: tuple[tuple[str, Callable[[Iterable[float]], float]], ...] = (
    (
        "least|fewest|smallest|lowest|shortest|cheapest|youngest|lightest|slowest|weakest|coldest|nearest|minimum|"
        "(?:wenigst|kleinst|niedrigst|kürzest|billigst|günstigst|jüngst|leichtest|langsamst)e[nrsm]?",
        min,
    ),
    (
        "most|biggest|largest|highest|tallest|longest|greatest|heaviest|strongest|fastest|hottest|warmest|widest|deepest|"
        "farthest|richest|dearest|maximum|(?:meist|größt|höchst|längst|teuerst|schwerst|schnellst|stärkst|weitest)e[nrsm]?",
        max,
    ),
    ("total|sum|in all|altogether|together|summe|insgesamt|zusammen", sum),
)
_FAILURE = ("error", "hint")
NOTHING = "nothing was found"
_EMPTY = dict.fromkeys(("search_files", "session_search", "web_search", "web_extract", "skills_list"), NOTHING) | {
    "read_file": "the file is empty",
    "write_file": "the file was written",
    "patch": "the file was changed",
    "terminal": "the command worked and printed nothing",
    "cronjob": "there are no jobs",
    "memory": "nothing is kept",
}


def render_result(name: str, text: str, question: str = "") -> str:
    """A tool's answer as plain text, content first, without what is useless to a small model."""
    return f"[result] {content_of(name, text, question) or _EMPTY.get(name, 'done')}"


def is_silent(name: str, text: str) -> bool:
    return not content_of(name, text)


def content_of(name: str, text: str, question: str = "") -> str:
    """What a tool's answer says, in plain words, to somebody who asked this; empty if it says nothing."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = text
    return _file(answer, question) or _render(answer, frozenset(_FIELDS.get(name, ())))


def _file(answer: object, question: str) -> str:
    """A file that was read as a whole, without the numbers of its lines, which small models copy, and take for what is
    counted. A table comes with the number of its rows and, since they compare and add badly, with what is asked of its
    numbers. Empty if it is neither."""
    match answer:
        case {"path": str(path), "content": str(content), "truncated": False}:
            lines = [line.partition("|")[2] for line in content.split("\n")]
            if path.endswith((".csv", ".tsv")):
                rows = list(csv.reader(lines, delimiter="\t" if path.endswith(".tsv") else ","))
                lines += [f"{len(rows) - 1} rows of data", *_compared(rows, question)]
            return "\n".join(lines)
    return ""


def _compared(rows: list[list[str]], question: str) -> Iterator[str]:
    """For each word that asks for the most, the least or the sum: that of each column of numbers, in that word, with the
    first field of the row that has it."""
    for pattern, chosen in _COMPARED:
        if (word := re.search(rf"\b({pattern})\b", question, re.I)) is None:
            continue
        for at, name in enumerate(rows[0]):
            with suppress(ValueError, IndexError):
                numbers = [float(row[at]) for row in rows[1:]]
                number = chosen(numbers)
                of = f"{rows[1 + numbers.index(number)][0]}, " if chosen is not sum else ""
                yield f"{word[0]} {name}: {of}{number:.12g}"


def _render(value: object, fields: frozenset[str]) -> str:
    """`fields`: the only ones that are shown; without any, all except `_NOISE`."""
    if isinstance(value, list):
        return "\n".join(filter(None, (_render(item, fields) for item in value)))
    if not isinstance(value, dict):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if "path" in value and "line" in value:  # a hit of a search
        return f"{value['path']}:{value['line']}: {value.get('text', '')}"
    shown = (*fields, *_FAILURE) if value.get("error") else fields
    inner: dict[str, frozenset[str]] = {"diagnostics": frozenset()}
    names = [name for name in value if name in shown or (not fields and name not in _NOISE)]
    lines = {
        name: line
        for name in names
        if value[name] not in (0, "ok") and (line := _render(value[name] or "", inner.get(name, fields)))
    }
    return "\n".join(line if len(lines) == 1 else f"{name}: {line}" for name, line in lines.items())
