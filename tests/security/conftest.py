"""Fixtures of the security tests: those of the agent's tests, and canaries."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.conftest import harness, make_harness, one_tls_context, quick, server

from .canaries import canaries

__all__ = ["canaries", "harness", "make_harness", "one_tls_context", "quick", "server"]


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Delete the files of each test, since there are many."""
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)
