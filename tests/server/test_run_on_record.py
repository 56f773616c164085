"""The run that a stream's head names is on record before the head is sent: after a crash it can be asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hermes.store.bundle import AsyncStore
from support.model_server import Reply

from .clients import Json, told, user
from .conftest import Api

STREAMS: dict[str, Json] = {
    "/v1/chat/completions": user("hi", stream=True),
    "/v1/responses": {"input": "hi", "stream": True},
    "/api/sessions/hall/chat/stream": {"message": "hi"},
}


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "key-1"}], ids=["plain", "keyed"])
@pytest.mark.parametrize("path", STREAMS)
async def test_a_head_is_sent_when_its_run_is_on_record(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str, headers: dict[str, str]
) -> None:
    api.model.handler = lambda _: Reply(text="Hello.", continues=False)
    async with api.post("/api/sessions", {"id": "hall"}) as response:
        await told(response, 201)
    store: AsyncStore = api.app.store
    go = asyncio.Event()

    def slowly(method: Any) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            await go.wait()
            return await method(*args, **options)

        return call

    for name in ("append", "create"):
        monkeypatch.setattr(store.runs, name, slowly(getattr(store.runs, name)), raising=False)
    asked = asyncio.ensure_future(api.post(path, STREAMS[path], headers=headers).__aenter__())
    await asyncio.wait([asked], timeout=0.3)
    assert not asked.done(), "the head was sent before the run was on record"
    go.set()
    async with await asked as response:
        assert await store.runs.get(response.headers["X-Hermes-Run-Id"]) is not None
        assert "Hello." in await response.text()
