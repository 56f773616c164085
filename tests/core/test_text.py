"""JSON that is spaced as `json.dumps` spaces it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hermes.core.text import spaced_json

SCALARS = st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=("Cs",)))
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), inner)
)


@given(TREES)
@settings(deadline=None)
def test_it_is_what_the_standard_library_writes(value: Any) -> None:
    assert spaced_json(value) == json.dumps(value, ensure_ascii=False)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_the_same_number(value: float) -> None:
    assert json.loads(spaced_json([value])) == [value]


def test_what_is_no_number_in_json_is_null() -> None:
    assert spaced_json([float("nan"), float("inf")]) == "[null, null]"
