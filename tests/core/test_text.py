"""JSON that is spaced as `json.dumps` spaces it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hermes.core.text import spaced_json

SCALARS = st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=("Cs",)))
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), inner),
    max_leaves=20,
)


@given(TREES)
def test_spaced_json_equals_json_dumps(value: Any) -> None:
    assert spaced_json(value) == json.dumps(value, ensure_ascii=False)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_spaced_json_numbers_round_trip(value: float) -> None:
    assert json.loads(spaced_json([value])) == [value]


def test_spaced_json_non_finite_is_null() -> None:
    assert spaced_json([float("nan"), float("inf")]) == "[null, null]"
