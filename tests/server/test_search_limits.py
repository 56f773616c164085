"""Searches over HTTP: they hold up no other read, have a time limit, and end when their client has gone."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from hermes.core.limits import SLOW_READERS_MAX
from hermes.store import search as search_module
from support.waiting import DEADLINE_S

from .clients import read_error, read_json
from .conftest import Api, Start

SEARCH = "/api/sessions/search?q=hi"
ENDLESS = "(WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n) > 0"


class Searches:
    """While it lasts, every search is endless."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self._began = monkeypatch, threading.Semaphore(0)
        monkeypatch.setattr(search_module, "title_condition", self._condition)

    def _condition(self, _: str) -> tuple[str, list[Any]]:
        self._began.release()
        return ENDLESS, []

    async def running(self) -> None:
        """Return when as many run as can run at once."""
        for _ in range(SLOW_READERS_MAX):
            assert await asyncio.to_thread(self._began.acquire, timeout=DEADLINE_S)

    def end(self) -> None:
        self._monkeypatch.undo()


@pytest.fixture
async def api(start: Start) -> Api:
    api = await start()
    async with api.post("/api/sessions", {"id": "s", "title": "hi there"}) as response:
        await read_json(response, 201)
    return api


def search(api: Api) -> asyncio.Task[Any]:
    return asyncio.create_task(api.get(SEARCH).__aenter__())


async def test_other_reads_do_not_wait_for_searches(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = Searches(monkeypatch)
    waiting = [search(api) for _ in range(40)]
    await searches.running()
    async with asyncio.timeout(DEADLINE_S):
        for path in ("/api/sessions", "/api/sessions/s", "/api/sessions/s/messages", "/v1/runs"):
            async with api.get(path) as response:
                await read_json(response)
    assert not any(waiting_task.done() for waiting_task in waiting)
    for search_task in waiting:
        search_task.cancel()


async def test_search_ends_on_disconnect(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = Searches(monkeypatch)
    waiting = [search(api) for _ in range(SLOW_READERS_MAX)]
    await searches.running()
    for search_task in waiting:
        search_task.cancel()
    searches.end()
    async with asyncio.timeout(DEADLINE_S), api.get(SEARCH) as response:
        assert [match["session_id"] for match in (await read_json(response))["data"]] == ["s"]


async def test_search_timeout_is_503_with_retry(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    Searches(monkeypatch)
    for module in ("hermes.store.engine", "hermes.store.sqlite.engine"):
        monkeypatch.setattr(f"{module}.SLOW_READ_S_MAX", 0.05)
    async with asyncio.timeout(DEADLINE_S), api.get(SEARCH) as response:
        error = await read_error(response, 503, "session_db_unavailable")
        assert (response.headers["Retry-After"], response.headers["x-should-retry"]) == ("1", "true")
    assert "no answer within 0.05 s" in error["message"]
    assert "out of reach" not in error["message"]
