"""A backtracking matcher for patterns of `re` that counts its steps.

The time of `re` cannot be counted from Python, and measuring it says more of the machine than of the pattern. This
matcher walks the tree that `re` itself compiles, tries the same alternatives in the same order, and counts one step for
each character that it looks at and each alternative that it tries. It finds what `re` finds, which callers check.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

Next = Callable[[int], "int | None"]
Match = Callable[[int, Next], "int | None"]
_CATEGORIES: dict[Any, Callable[[str, bool], bool]] = {
    ops.CATEGORY_DIGIT: lambda char, a: char.isdecimal() and (not a or char.isascii()),
    ops.CATEGORY_SPACE: lambda char, a: char.isspace() and (not a or char in " \t\n\r\f\v"),
    ops.CATEGORY_WORD: lambda char, a: (char.isalnum() or char == "_") and (not a or char.isascii()),
}
_OPPOSITES = {
    ops.CATEGORY_NOT_DIGIT: ops.CATEGORY_DIGIT,
    ops.CATEGORY_NOT_SPACE: ops.CATEGORY_SPACE,
    ops.CATEGORY_NOT_WORD: ops.CATEGORY_WORD,
}


class Matcher:
    """A compiled pattern. `steps` is the work on the last text."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._text = ""
        self._groups: dict[int, tuple[int, int]] = {}
        self._match = self._sequence(parser.parse(pattern.pattern, pattern.flags), pattern.flags)
        self.steps = 0

    def finditer(self, text: str) -> Iterator[tuple[int, int]]:
        """The spans that `re` would find, in order."""
        self._text, self.steps = text, 0
        start, empty_at = 0, -1
        while start <= len(self._text):
            self.steps += 1
            self._groups.clear()
            # An empty match is not found again where it was.
            end = self._match(start, lambda at, refused=empty_at: None if at == refused else at)  # type: ignore[misc]
            if end is None:
                start += 1
                continue
            yield start, end
            empty_at = end if end == start else -1
            start = end

    # --- the tree, node by node -----------------------------------------------------------------------------------

    def _sequence(self, nodes: Any, flags: int) -> Match:
        matches = [self._node(op, arg, flags) for op, arg in nodes]

        def run(at: int, then: Next, index: int = 0) -> int | None:
            if index == len(matches):
                return then(at)
            return matches[index](at, lambda end: run(end, then, index + 1))

        return matches[0] if len(matches) == 1 else run

    def _node(self, op: Any, arg: Any, flags: int) -> Match:
        if (matches_one := self._one(op, arg, flags)) is not None:

            def char(at: int, then: Next) -> int | None:
                return then(at + 1) if matches_one(at) else None

            return char
        make: dict[Any, Callable[[Any, int], Match]] = {
            ops.MAX_REPEAT: self._greedy,
            ops.MIN_REPEAT: self._lazy,
            ops.POSSESSIVE_REPEAT: self._possessive,
            ops.BRANCH: self._branch,
            ops.SUBPATTERN: self._group,
            ops.ATOMIC_GROUP: self._atomic,
            ops.ASSERT: lambda arg, flags: self._look(arg, flags, True),
            ops.ASSERT_NOT: lambda arg, flags: self._look(arg, flags, False),
            ops.AT: self._position,
            ops.GROUPREF: self._reference,
        }
        return make[op](arg, flags)

    def _one(self, op: Any, arg: Any, flags: int) -> Callable[[int], bool] | None:
        """A test of one character, for the nodes that match exactly one."""
        folded, ascii_only = bool(flags & re.I), bool(flags & re.A)
        test: Callable[[str], bool]
        if op is ops.LITERAL or op is ops.NOT_LITERAL:
            chars = {chr(arg).lower(), chr(arg).upper()} if folded else {chr(arg)}
            wanted = op is ops.LITERAL
            test = lambda char: (char in chars) is wanted  # noqa: E731
        elif op is ops.ANY:
            dotall = bool(flags & re.S)
            test = lambda char: dotall or char != "\n"  # noqa: E731
        elif op is ops.IN:
            negated = arg[0][0] is ops.NEGATE
            items = arg[1:] if negated else arg

            def test(char: str) -> bool:
                forms = (char, char.lower(), char.upper()) if folded else (char,)
                return any(_contains(item, form, ascii_only) for item in items for form in forms) is not negated
        else:
            return None

        known = functools.cache(test)

        def look(at: int) -> bool:
            self.steps += 1
            return at < len(self._text) and known(self._text[at])

        return look

    def _greedy(self, arg: Any, flags: int) -> Match:
        least, most, body = arg
        matches_one = self._one(*body[0], flags) if len(body) == 1 else None
        if matches_one is not None:

            def run(at: int, then: Next) -> int | None:
                end = self._run(matches_one, at, most)
                while end - at >= least:
                    self.steps += 1
                    if (match_end := then(end)) is not None:
                        return match_end
                    end -= 1
                return None

            return run
        inner = self._sequence(body, flags)

        def again(at: int, then: Next, count: int = 0) -> int | None:
            self.steps += 1
            if most is ops.MAXREPEAT or count < most:
                groups = dict(self._groups)
                more = lambda end: None if end == at and count >= least else again(end, then, count + 1)  # noqa: E731
                if (end := inner(at, more)) is not None:
                    return end
                self._groups = groups
            return then(at) if count >= least else None

        return again

    def _run(self, matches_one: Callable[[int], bool], at: int, most: Any) -> int:
        end, stop = at, len(self._text) if most is ops.MAXREPEAT else at + most
        while end < stop and matches_one(end):
            end += 1
        return end

    def _lazy(self, arg: Any, flags: int) -> Match:
        least, most, body = arg
        inner = self._sequence(body, flags)
        single = len(body) == 1 and self._one(*body[0], flags) is not None

        def again(at: int, then: Next, count: int = 0) -> int | None:
            while True:
                self.steps += 1
                if count >= least and (result := then(at)) is not None:
                    return result
                if most is not ops.MAXREPEAT and count >= most:
                    return None
                if not single:
                    break
                end = inner(at, lambda end: end)
                if end is None:
                    return None
                at, count = end, count + 1
            return inner(at, lambda end: None if end == at else again(end, then, count + 1))

        return again

    def _possessive(self, arg: Any, flags: int) -> Match:
        greedy = self._greedy(arg, flags)

        def run(at: int, then: Next) -> int | None:
            end = greedy(at, lambda end: end)
            return None if end is None else then(end)

        return run

    def _branch(self, arg: Any, flags: int) -> Match:
        branches = [self._sequence(branch, flags) for branch in arg[1]]

        def run(at: int, then: Next) -> int | None:
            groups = dict(self._groups)
            for branch in branches:
                self.steps += 1
                if (result := branch(at, then)) is not None:
                    return result
                self._groups = dict(groups)
            return None

        return run

    def _group(self, arg: Any, flags: int) -> Match:
        number, added, removed, body = arg
        inner = self._sequence(body, (flags | added) & ~removed)
        if number is None:
            return inner

        def run(at: int, then: Next) -> int | None:
            def close(end: int) -> int | None:
                span = self._groups.get(number)
                self._groups[number] = at, end
                if (result := then(end)) is None and span is not None:
                    self._groups[number] = span
                elif result is None:
                    self._groups.pop(number, None)
                return result

            return inner(at, close)

        return run

    def _atomic(self, arg: Any, flags: int) -> Match:
        inner = self._sequence(arg, flags)

        def run(at: int, then: Next) -> int | None:
            end = inner(at, lambda end: end)
            return None if end is None else then(end)

        return run

    def _look(self, arg: Any, flags: int, wanted: bool) -> Match:
        direction, body = arg
        inner = self._sequence(body, flags)
        back = body.getwidth()[0] if direction < 0 else 0

        def run(at: int, then: Next) -> int | None:
            self.steps += 1
            groups = dict(self._groups)
            is_match = at >= back and inner(at - back, lambda end: end) is not None
            if not wanted:
                self._groups = groups
            return then(at) if is_match is wanted else None

        return run

    def _position(self, where: Any, flags: int) -> Match:
        def is_word(at: int) -> bool:
            text = self._text
            return 0 <= at < len(text) and _CATEGORIES[ops.CATEGORY_WORD](text[at], bool(flags & re.A))

        def holds(at: int) -> bool:
            text = self._text
            if where is ops.AT_BEGINNING:
                return at == 0 or bool(flags & re.M and text[at - 1] == "\n")
            if where is ops.AT_END:
                ends = at == len(text) or text[at:] == "\n" if at >= len(text) - 1 else False
                return ends or bool(flags & re.M and text[at] == "\n")
            if where is ops.AT_BEGINNING_STRING:
                return at == 0
            if where is ops.AT_END_STRING:
                return at == len(text)
            return (is_word(at - 1) != is_word(at)) is (where is ops.AT_BOUNDARY)

        def run(at: int, then: Next) -> int | None:
            self.steps += 1
            return then(at) if holds(at) else None

        return run

    def _reference(self, number: int, flags: int) -> Match:
        def run(at: int, then: Next) -> int | None:
            self.steps += 1
            if number not in self._groups:
                return None
            start, end = self._groups[number]
            self.steps += end - start
            return then(at + end - start) if self._text.startswith(self._text[start:end], at) else None

        return run


def _contains(item: tuple[Any, Any], char: str, ascii_only: bool) -> bool:
    op, arg = item
    if op is ops.LITERAL:
        return ord(char[0]) == arg
    if op is ops.RANGE:
        return bool(arg[0] <= ord(char[0]) <= arg[1])
    if arg in _OPPOSITES:
        return not _CATEGORIES[_OPPOSITES[arg]](char, ascii_only)
    return _CATEGORIES[arg](char, ascii_only)


_matcher = functools.cache(Matcher)


def steps_to_search(pattern: re.Pattern[str], text: str) -> int:
    """The steps to find every match, as `sub` and `finditer` do."""
    matcher = _matcher(pattern)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 50 * len(text))  # a repeated group is matched by as many calls within each other
    try:
        spans = list(matcher.finditer(text))
    finally:
        sys.setrecursionlimit(limit)
    assert spans == [match.span() for match in pattern.finditer(text)], (pattern.pattern, text[:80])
    return matcher.steps
