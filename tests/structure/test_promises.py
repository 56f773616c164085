"""The documents name the test that keeps each promise: it exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:tests/[\w/]+/)?test_\w+\.py)(?:::(test_\w+))?`")


@pytest.mark.parametrize("document", ["security.md", "reliability.md"])
def test_every_test_that_a_document_names_exists(document: str) -> None:
    named = NAMED.findall((ROOT / "docs" / document).read_text())
    assert len(named) > 10
    for path, function in named:
        files = [ROOT / path] if "/" in path else list((ROOT / "tests").rglob(path))
        assert files and files[0].exists(), path
        assert not function or f"def {function}(" in files[0].read_text(), function
