"""Fixtures of the agent's tests: a provider, a house, and retries that do not wait."""

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

from .house import House, product_tasks

MakeHouse = Callable[..., House]


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer() as made:
        yield made


@pytest.fixture
async def other() -> AsyncIterator[ModelServer]:
    """A second provider, to fall back to."""
    async with ModelServer() as made:
        yield made


@pytest.fixture
async def make_house(home_folder: Path) -> AsyncIterator[MakeHouse]:
    """Houses with the settings a test wants; nothing of theirs outlives the test."""
    made: list[House] = []

    def make(settings: dict[str, Any] | None = None) -> House:
        made.append(House(Home(home_folder), settings or {}))
        return made[-1]

    yield make
    for house in made:
        await house.close()
    assert product_tasks() == []


@pytest.fixture
def database() -> Iterator[SessionDB]:
    """The database of the home."""
    made = SessionDB()
    yield made
    made.close()


@pytest.fixture
async def house(make_house: MakeHouse) -> House:
    return make_house()


@pytest.fixture(autouse=True)
def one_tls_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the system's certificates takes longer than most of these tests, none of which speaks TLS."""
    monkeypatch.setattr(ssl, "create_default_context", _tls_context)


@cache
def _tls_context(**_: Any) -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries wait next to nothing."""
    monkeypatch.setattr(decisions, "RETRY_WAIT_S_MAX", 0.01)
