"""One server for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clients.server import Hermes, running


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hermes]:
    with running(tmp_path_factory.mktemp("home")) as server:
        yield server
