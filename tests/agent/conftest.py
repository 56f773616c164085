"""Fixtures of the agent's tests: a provider, a harness, and retries without delays."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hermes.agent import decisions
from hermes.core.home import Home
from hermes.store.sessions import SessionDB
from support.model_server import ModelServer

from .harness import Clock, Harness, product_tasks

MakeHarness = Callable[..., Harness]


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer() as model:
        yield model


@pytest.fixture
async def other() -> AsyncIterator[ModelServer]:
    """A second provider, to fall back to."""
    async with ModelServer() as model:
        yield model


@pytest.fixture
async def make_harness(home_folder: Path) -> AsyncIterator[MakeHarness]:
    """Creates harnesses with the given settings; they are closed after the test."""
    harnesses: list[Harness] = []

    def make(settings: dict[str, Any] | None = None) -> Harness:
        harnesses.append(Harness(Home(home_folder), settings or {}))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        await harness.close()
    assert product_tasks() == []


@pytest.fixture
def database() -> Iterator[SessionDB]:
    """The database of the home."""
    db = SessionDB()
    yield db
    db.close()


@pytest.fixture
async def harness(make_harness: MakeHarness) -> Harness:
    return make_harness()


@pytest.fixture(autouse=True)
def one_tls_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the system's certificates takes longer than most of these tests, none of which speaks TLS."""
    monkeypatch.setattr(ssl, "create_default_context", _tls_context)


@cache
def _tls_context(**_: Any) -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries wait 10 ms at most."""
    monkeypatch.setattr(decisions, "RETRY_WAIT_S_MAX", 0.01)
