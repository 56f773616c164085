"""Ways of splitting a text into pieces, for code whose result must not depend on how a stream is chunked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise
from typing import AnyStr

from hypothesis import strategies as st


def cut(whole: AnyStr, places: Iterable[int]) -> list[AnyStr]:
    """Split at these offsets."""
    return [whole[a:b] for a, b in pairwise([0, *sorted(places), len(whole)])]


def cuts(whole: AnyStr, pieces: int) -> Iterator[list[AnyStr]]:
    """All splits into exactly that many non-empty pieces."""
    return (cut(whole, places) for places in combinations(range(1, len(whole)), pieces - 1))


def all_cuts(whole: AnyStr) -> Iterator[list[AnyStr]]:
    """All splits into one, two and three pieces, and the one into single characters."""
    for pieces in (1, 2, 3):
        yield from cuts(whole, pieces)
    yield cut(whole, range(1, len(whole)))


def any_cut(data: st.DataObject, whole: AnyStr) -> list[AnyStr]:
    """A random split, which may have empty pieces."""
    return cut(whole, data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
