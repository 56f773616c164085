"""Texts on which a pattern of `re` may have more than linear work, made from the pattern itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_SAMPLES = "aA0 _-./:=\"'\\<>()[]{},;|&$`~*+?!@#%^\n\t\x01\u200b"
_BRANCHES_MAX = 6
_BEGINNINGS_MAX = 2
_ENDS = ("", "\x01\n")


def attacks(pattern: re.Pattern[str]) -> list[tuple[str, str, str]]:
    """Triples of a prefix, a text to repeat, and a suffix."""
    tree = parser.parse(pattern.pattern, pattern.flags)
    attempts: dict[tuple[str, str, str], None] = {}
    for begin, repeated in _pumps(tree, ("",)):
        for end in _ENDS:
            attempts[begin, repeated, end] = None
    return list(attempts)


def _pumps(nodes: Any, before: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Prefix and text to repeat: each prefix of the pattern, and the body of each quantifier after what precedes it."""
    reached = before
    for index, (op, arg) in enumerate(nodes):
        here = _samples(op, arg)
        for inner in _inner(op, arg):
            yield from _pumps(inner, reached)
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT):
            for body in _whole(arg[2]):
                for begin in reached[:_BEGINNINGS_MAX]:
                    yield begin, body
                    yield "", begin + body
        reached = tuple(dict.fromkeys(a + b for a in reached for b in here))[:_BRANCHES_MAX]
        inside_word = op is ops.LITERAL and index + 1 < len(nodes) and nodes[index + 1][0] is ops.LITERAL
        for text in reached[:_BEGINNINGS_MAX]:
            if text and not inside_word:
                yield "", text
                yield "", text + " "
                yield "", text + "-"


def _inner(op: Any, arg: Any) -> list[Any]:
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT):
        return [arg[2]]
    if op is ops.BRANCH:
        return list(arg[1])
    if op is ops.SUBPATTERN:
        return [arg[3]]
    if op is ops.ATOMIC_GROUP:
        return [arg]
    return [arg[1]] if op in (ops.ASSERT, ops.ASSERT_NOT) and arg[0] > 0 else []


def _whole(nodes: Any) -> list[str]:
    texts = [""]
    for op, arg in nodes:
        texts = list(dict.fromkeys(a + b for a in texts for b in _samples(op, arg)))[:_BRANCHES_MAX]
    return [text for text in texts if text]


def _samples(op: Any, arg: Any) -> list[str]:
    """Short texts that a node matches."""
    if op is ops.LITERAL:
        return [chr(arg)]
    if op in (ops.NOT_LITERAL, ops.ANY, ops.IN):
        matcher = re.compile(_source(op, arg), re.S)
        fitting = [char for char in _SAMPLES if matcher.fullmatch(char)]
        named = [chr(value) for kind, value in (arg if op is ops.IN else ()) if kind is ops.LITERAL]
        return list(dict.fromkeys([*fitting[:1], *(char for char in named if char in fitting), *fitting[-1:]]))[:4]
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT):
        least, most, body = arg
        times = {int(least), int(least) + 1} if most > least else {int(least)}
        return [text * count for text in _whole(body) or [""] for count in sorted(times) if count < 100]
    if op is ops.BRANCH:
        return [text for branch in arg[1] for text in _whole(branch)[:3]][:_BRANCHES_MAX] or [""]
    if op is ops.SUBPATTERN:
        return _whole(arg[3]) or [""]
    if op is ops.ATOMIC_GROUP:
        return _whole(arg) or [""]
    return [""]


def _source(op: Any, arg: Any) -> str:
    if op is ops.ANY:
        return "."
    if op is ops.NOT_LITERAL:
        return f"[^{re.escape(chr(arg))}]"
    parts = ["^" if arg[0][0] is ops.NEGATE else ""]
    for kind, value in arg:
        if kind is ops.LITERAL:
            parts.append(re.escape(chr(value)))
        elif kind is ops.RANGE:
            parts.append(f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}")
        elif kind is ops.CATEGORY:
            name = str(value).rpartition("_")[2][0].lower()
            parts.append("\\" + (name.upper() if "_NOT_" in str(value) else name))
    return f"[{''.join(parts)}]"
