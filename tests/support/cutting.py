"""Ways of cutting a text into pieces, for parts that must not care how a stream was cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise
from typing import AnyStr

from hypothesis import strategies as st


def cut(whole: AnyStr, places: Iterable[int]) -> list[AnyStr]:
    """The pieces between these places."""
    return [whole[a:b] for a, b in pairwise([0, *sorted(places), len(whole)])]


def cuts(whole: AnyStr, pieces: int) -> Iterator[list[AnyStr]]:
    """All divisions into exactly so many pieces, none of them empty."""
    return (cut(whole, places) for places in combinations(range(1, len(whole)), pieces - 1))


def all_cuts(whole: AnyStr) -> Iterator[list[AnyStr]]:
    """In one, two and three pieces, and into single characters."""
    for pieces in (1, 2, 3):
        yield from cuts(whole, pieces)
    yield cut(whole, range(1, len(whole)))


def any_cut(data: st.DataObject, whole: AnyStr) -> list[AnyStr]:
    """Some division, empty pieces among them."""
    return cut(whole, data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
