"""A log has one text: whoever reads it, from wherever, live or later, gets the same bytes, or is told that it is gone."""

from __future__ import annotations

import asyncio
from typing import Any

from support.model_server import Reply

from .clients import user
from .conftest import Api


async def test_a_run_can_be_followed_as_soon_as_its_number_is_told(api: Api, monkeypatch: Any) -> None:
    api.model.script = [Reply(text="Hello.")]
    runs, looked_for = api.app.store.runs, asyncio.Event()
    create, get = runs.create, runs.get

    async def later(spec: Any) -> None:
        await looked_for.wait()
        await create(spec)

    async def look(run_id: str) -> Any:
        found = await get(run_id)
        looked_for.set()
        return found

    monkeypatch.setattr(runs, "create", later, raising=False)
    monkeypatch.setattr(runs, "get", look, raising=False)
    async with api.post("/v1/chat/completions", user("hi", stream=True)) as stream:
        run_id = stream.headers["X-Hermes-Run-Id"]
        async with api.get(f"/v1/runs/{run_id}/events") as response:
            assert response.status == 200, await response.text()
            assert "run.completed" in await response.text()
