"""Fixtures of the bus tests: those of the agent's tests, a shared NATS server, and one per test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.conftest import harness, make_harness, one_tls_context, quick, server
from hermes.core.ids import random_hex
from support.nats_server import NatsServer, nats_server

__all__ = ["harness", "make_harness", "one_tls_context", "quick", "server"]


@pytest.fixture(scope="session")
def shared_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a shared NATS server; each test uses its own namespace."""
    if url := os.environ.get("HERMES_TEST_NATS_URL"):
        yield url
        return
    with nats_server(tmp_path_factory.mktemp("nats")) as running:
        yield running.url


@pytest.fixture
def namespace() -> str:
    return f"t{random_hex(8)}"


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[NatsServer]:
    """A NATS server that the test may stop."""
    with nats_server(tmp_path / "nats") as running:
        yield running
