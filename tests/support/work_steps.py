"""How much work a call does, as a number that is the same on every machine.

Counted are the lines of Python that run, the calls of functions in C, and for those whose work grows with the text or list
that they belong to, its length. Work inside of C that this does not show (regular expressions, slices, JSON) is left to
tests that limit processor time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_CHARS_PER_STEP = 64
# Methods that look at all of their text, bytes or list; others stop at a limit, or at what they search for.
_WHOLE = frozenset(
    {"casefold", "copy", "decode", "encode", "expandtabs", "insert", "isascii", "lower", "partition", "remove"}
    | {"replace", "reverse", "rpartition", "rsplit", "sort", "split", "splitlines", "title", "translate", "upper"}
)


def steps_of(work: Callable[[], Any]) -> int:
    """The steps of a call on this thread; what other threads do is not counted."""
    count = 0

    def lines(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return lines

    def calls(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if event != "c_call":
            return
        count += 1
        if argument.__name__ in _WHOLE and isinstance(argument.__self__, str | bytes | bytearray | list):
            count += len(argument.__self__) // _CHARS_PER_STEP

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(lines)
    sys.setprofile(calls)
    try:
        work()
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])
    return count
