"""The documents name the test that keeps each promise: it exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:tests/[\w/]+/)?test_\w+\.py)(?:::(test_\w+))?`")


@pytest.mark.parametrize("document", ["security.md", "reliability.md"])
def test_documented_tests_exist(document: str) -> None:
    named = NAMED.findall((ROOT / "docs" / document).read_text())
    assert len(named) > 10
    for path, function in named:
        files = [ROOT / path] if "/" in path else list((ROOT / "tests").glob(f"*/{path}"))
        assert files and files[0].exists(), path
        assert not function or f"def {function}(" in files[0].read_text(), function


def test_every_module_is_listed_in_the_documentation() -> None:
    spec = importlib.util.spec_from_file_location("modules", ROOT / "scripts/modules.py")
    assert spec is not None and spec.loader is not None
    modules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(modules)
    assert modules.TARGET.read_text("utf-8") == modules.document(), "run `python scripts/modules.py`"
