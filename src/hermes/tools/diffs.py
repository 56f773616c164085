"""Unified diffs of files that tools change: bounded in time and size, and without secrets."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hermes.core import limits
from hermes.tools import file_access as access
from hermes.tools.framework.registry import ToolContext

_CONTEXT = 3


def text_of(data: bytes) -> str:
    """A file's text with plain line ends; bytes that are no UTF-8 can be restored."""
    plain = data.removeprefix(access.BOM)
    return (plain.replace(b"\r\n", b"\n") if access.is_crlf(data) else plain).decode("utf-8", "surrogateescape")


def lines_of(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []


def unified_diff(old: list[str], new: list[str], names: tuple[str, str]) -> tuple[str, int, int]:
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    first = max(0, head - _CONTEXT)
    a, b = old[first : len(old) - max(0, tail - _CONTEXT)], new[first : len(new) - max(0, tail - _CONTEXT)]
    out, added, removed = [f"--- {names[0]}", f"+++ {names[1]}"], 0, 0
    for group in _groups(a, b, head - first, min(tail, _CONTEXT)):
        (_, a1, _, b1, _), (_, _, a2, _, b2) = group[0], group[-1]
        out.append(f"@@ -{first + a1 + 1},{a2 - a1} +{first + b1 + 1},{b2 - b1} @@")
        for kind, i1, i2, j1, j2 in group:
            if kind == "equal":
                out += (f" {line}" for line in a[i1:i2])
                continue
            added, removed = added + j2 - j1, removed + i2 - i1
            out += [f"-{line}" for line in a[i1:i2]] + [f"+{line}" for line in b[j1:j2]]
    return "\n".join(out), added, removed


def _groups(a: list[str], b: list[str], lead: int, trail: int) -> Iterable[list[tuple[str, int, int, int, int]]]:
    if max(len(a), len(b)) <= limits.COMPARED_LINES_MAX:
        return difflib.SequenceMatcher(None, a, b).get_grouped_opcodes(_CONTEXT)
    x, y = len(a) - trail, len(b) - trail  # comparing so many lines would take too long
    return [[("equal", 0, lead, 0, lead), ("replace", lead, x, lead, y), ("equal", x, len(a), y, len(b))]]


def printable(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def shorten(ctx: ToolContext, diff: str, chars_max: int = limits.DIFF_CHARS_MAX) -> str:
    """The diff without secrets, cut between lines, which no secret spans."""
    excerpt = diff[: 2 * chars_max]
    if len(excerpt) < len(diff):
        excerpt = excerpt[: excerpt.rfind("\n") + 1]
    excerpt = access.LineRedactor(ctx).text(printable(excerpt))
    if len(excerpt) <= chars_max and len(diff) <= 2 * chars_max:
        return excerpt
    return excerpt[: chars_max - 40] + "\n[the rest of the diff is left out]"
