"""Applies to every test: a HERMES_HOME of its own, and an environment without Hermes settings and API keys."""

import gc
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from support.engines import nats_url, own_nats, own_postgres, postgres_database, postgres_url

# Fixtures for all tests.
__all__ = ["nats_url", "own_nats", "own_postgres", "postgres_database", "postgres_url"]

_SPEAKING = ("HERMES_", "API_SERVER_", "OTEL_")
_KEYS = ("_API_KEY", "HF_TOKEN")

# The suite gives the same verdict every time, on a slow machine too.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

# Some tests hold both ends of hundreds of connections; the usual soft limit on open files is too low for that.
_FILES_WANTED = 8192


def pytest_configure() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, _FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def pytest_collection_finish() -> None:
    """Freeze the collected tests, so that the garbage collector does not scan thousands of them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def released_servers() -> Iterator[None]:
    """Let go of the test's servers: aiohttp caches a thousand handlers, and with them all that their servers hold."""
    yield
    if (module := sys.modules.get("aiohttp.web_app")) is not None:
        module._cached_build_middleware.cache_clear()


@pytest.fixture(autouse=True)
def home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own HERMES_HOME; it does not exist until something is written there."""
    for name in os.environ:
        if name.startswith(_SPEAKING) or name.endswith(_KEYS):
            monkeypatch.delenv(name)
    folder = tmp_path / "hermes-home"
    monkeypatch.setenv("HERMES_HOME", str(folder))
    return folder
