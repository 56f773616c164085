"""Readiness while the server runs: what it stands on goes bad and gets well again."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hermes.server import readiness
from hermes.store.base import StoreError
from support.gateway import serving
from support.waiting import until

from .clients import read_json
from .conftest import Api

DATABASES = [("state_db", "state.db"), ("response_store", "response_store.db")]


async def looked_at(api: Api) -> tuple[int, dict[str, Any]]:
    """The status of /health/ready, and what its degraded checks say."""
    async with api.get("/health/ready") as response:
        body = await response.json()
    checks = body["readiness"]["checks"].items()
    if response.status != 200:
        assert body["error"]["code"] == "not_ready", body
    return response.status, {name: check["error"] for name, check in checks if check["status"] != "ok"}


@contextmanager
def deleted(path: Path) -> Iterator[None]:
    backup = path.with_name("kept")
    path.rename(backup)
    yield
    backup.rename(path)


@contextmanager
def replaced(path: Path) -> Iterator[None]:
    backup = path.with_name("kept")
    os.link(path, backup)
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)
    yield
    backup.replace(path)


@contextmanager
def without_log(path: Path) -> Iterator[None]:
    with deleted(path.with_name(f"{path.name}-wal")):
        yield


@contextmanager
def version(path: Path, change: Callable[[int], int]) -> Iterator[None]:
    with closing(sqlite3.connect(path)) as db:
        before = db.execute("PRAGMA user_version").fetchone()[0]
        db.execute(f"PRAGMA user_version={change(before)}")
        yield
        db.execute(f"PRAGMA user_version={before}")


@contextmanager
def newer(path: Path) -> Iterator[None]:
    with version(path, lambda known: known + 7):
        yield


@contextmanager
def older(path: Path) -> Iterator[None]:
    with version(path, lambda known: known - 1):
        yield


FILE_CAUSES = [
    (deleted, "was deleted"),
    (replaced, "was replaced"),
    (without_log, "-wal: The file was deleted"),
    (newer, "was written by a newer Hermes"),
    (older, "does not have the version"),
]


@pytest.fixture(autouse=True)
def always_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "CHECK_KEPT_S", 0.0)


@pytest.mark.parametrize(("name", "file"), DATABASES)
@pytest.mark.parametrize(("cause", "message"), FILE_CAUSES)
async def test_replaced_database_is_not_ready(
    api: Api, home_folder: Path, name: str, file: str, cause: Any, message: str
) -> None:
    assert await looked_at(api) == (200, {})
    with cause(home_folder / file):
        status, errors = await looked_at(api)
        assert (status, set(errors)) == (503, {name}) and message in errors[name], errors
        async with aiohttp.request("GET", f"{api.url}/health/ready") as response:
            body = await read_json(response, 503)
        assert body["readiness"]["checks"][name] == {"status": "degraded"}, "details are for admin keys"
    assert await looked_at(api) == (200, {})


async def test_replaced_database_is_not_read(api: Api, home_folder: Path) -> None:
    """Its WAL lies beside it under the same name: a new connection would mix the two files."""
    engine = api.app.store.blocking.engine
    await looked_at(api)
    engine._readers.idle = deque(maxlen=0)
    with replaced(home_folder / "state.db"), pytest.raises(StoreError, match="was replaced"):
        await api.app.store.sessions.get_session("s")
    assert await api.app.store.sessions.get_session("s") is None


async def test_dead_writer_is_reported_once_and_replaced(api: Api) -> None:
    assert await looked_at(api) == (200, {})
    engine = api.app.store.blocking.engine
    writer = engine._writer
    assert writer is not None
    engine._queue.put(None)
    writer.join()
    status, errors = await looked_at(api)
    assert (status, set(errors)) == (503, {"state_db"}) and "thread" in errors["state_db"]
    assert await looked_at(api) == (200, {})


async def test_unwritable_journal_is_not_ready(api: Api, home_folder: Path) -> None:
    assert await looked_at(api) == (200, {})
    folder = home_folder / "journal"
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("in its way")
    status, errors = await looked_at(api)
    assert (status, set(errors)) == (503, {"disk"}) and str(folder) in errors["disk"]
    folder.unlink()
    assert await looked_at(api) == (200, {})
    assert list(folder.iterdir()) == [], "a check leaves nothing behind"


async def test_unreachable_bus_is_not_ready(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away() -> None:
        raise ConnectionError("The bus cannot be reached.")

    with monkeypatch.context() as patch:
        patch.setattr(api.app.run_log.bus, "check", away)
        assert await looked_at(api) == (503, {"bus": "The bus cannot be reached."})
    assert await looked_at(api) == (200, {})


async def test_readiness_result_is_cached_briefly(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often readiness is asked for, a check writes once."""
    monkeypatch.setattr(readiness, "CHECK_KEPT_S", 3600.0)
    log = api.app.store.blocking.engine.path
    assert log is not None
    await looked_at(api)
    size = log.with_name(f"{log.name}-wal").stat().st_size
    for _ in range(5):
        await looked_at(api)
    assert log.with_name(f"{log.name}-wal").stat().st_size == size


async def test_readonly_disk_is_not_ready(tmp_path: Path) -> None:
    model = {"default": "m", "base_url": "http://127.0.0.1:9/v1", "api_key": "none"}
    async with serving(tmp_path / "home", model=model) as gateway:

        async def ready() -> Any:
            async with gateway.client.get("/health/ready") as response:
                checks = (await response.json())["readiness"]["checks"]
            return response.status, {name for name, check in checks.items() if check["status"] != "ok"}

        await until(ready, lambda value: value == (200, set()))
        pid = gateway.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        bad = (503, {"state_db", "response_store", "disk"})
        await until(ready, lambda value: value == bad)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        await until(ready, lambda value: value == (200, set()))
