"""Every way of cutting a text into pieces, for parts that must not care how a stream was cut."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import AnyStr


def cuts(whole: AnyStr, pieces: int) -> Iterator[list[AnyStr]]:
    """All divisions into exactly so many pieces, none of them empty."""
    for places in combinations(range(1, len(whole)), pieces - 1):
        edges = (0, *places, len(whole))
        yield [whole[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def all_cuts(whole: AnyStr) -> Iterator[list[AnyStr]]:
    """In one, two and three pieces, and byte by byte."""
    for pieces in (1, 2, 3):
        yield from cuts(whole, pieces)
    yield [whole[i : i + 1] for i in range(len(whole))]
