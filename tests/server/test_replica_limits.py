"""Limits of a key at several replicas that are asked at once: they hold for all of them together."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.model_server import Handler, Reply, Request
from support.replicas import Replicas, two_replicas
from support.waiting import until

from .clients import user

KEY = "q7Zr-4fJ0_pW2xLs9TnB6vYc1HdK8mGa"
ASKED = 16
Storage = dict[str, Any]


@pytest.fixture(params=["sqlite", "postgres"])
def storage(request: pytest.FixtureRequest) -> Storage:
    if request.param == "sqlite":
        return {}
    return {"storage": {"url": request.getfixturevalue("postgres_database")}}


class Model:
    """Answers when it may; `most` is how many were asked for at once."""

    def __init__(self, *, tokens: int = 10) -> None:
        self._reply = Reply(text="Hello.", usage={"input": tokens, "output": 1}, continues=False)
        self.requests_seen = self.at_work = self.most = 0
        self.go = asyncio.Event()

    async def __call__(self, _: Request) -> Reply:
        self.requests_seen += 1
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        await self.go.wait()
        self.at_work -= 1
        return self._reply


@asynccontextmanager
async def limited_replicas(folder: Path, model: Handler, storage: Storage, **limits: int) -> AsyncIterator[Replicas]:
    key = {"name": "alice", "key": KEY, "scopes": ["runs", "chat"], **limits}
    async with two_replicas(folder, model, api_server={"keys": [key]}, **storage) as server:
        yield server


async def clients(server: Replicas, count: int) -> list[aiohttp.ClientSession]:
    """Each with a connection of its own, to one replica and the other in turn."""
    first, _ = await server.client()
    return [(await server.client(other_than=first if at % 2 else None))[1] for at in range(count)]


async def ask(client: aiohttp.ClientSession, **fields: Any) -> int:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with client.post("/v1/chat/completions", json={**user("hi"), **fields}, headers=headers) as response:
        if response.status == 429:
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
            return 429
        await response.read()
        return response.status


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"store": False}], ids=["whole", "stream", "unkept"])
async def test_turns_that_are_waited_for_keep_to_key(
    home_folder: Path, storage: Storage, fields: dict[str, Any]
) -> None:
    model = Model()
    async with limited_replicas(home_folder, model, storage, max_concurrent=3) as server:
        asking = [asyncio.create_task(ask(client, **fields)) for client in await clients(server, ASKED)]
        await until(lambda: sum(task.done() for task in asking) == ASKED - 3 and model.at_work == 3)
        model.go.set()
        assert Counter(await asyncio.gather(*asking)) == {429: ASKED - 3, 200: 3}
        assert model.most == 3
        # Each begins as soon as the one before has ended, wherever that was.
        again = await clients(server, 6)
        for at in (0, 1, 2, 3):
            asking = [asyncio.create_task(ask(client, **fields)) for client in again[at : at + 3]]
            assert await asyncio.gather(*asking) == [200, 200, 200]


async def test_waiting_and_submitted_turns_have_places_in_common(home_folder: Path, storage: Storage) -> None:
    model = Model()
    async with limited_replicas(home_folder, model, storage, max_concurrent=3) as server:

        async def submit(client: aiohttp.ClientSession) -> int:
            headers = {"Authorization": f"Bearer {KEY}"}
            async with client.post("/v1/runs", json={"input": "hi"}, headers=headers) as response:
                return response.status

        asking = [
            asyncio.create_task((ask, submit)[at // 2 % 2](client))
            for at, client in enumerate(await clients(server, ASKED))
        ]
        await until(lambda: sum(task.done() and task.result() == 429 for task in asking) == ASKED - 3)
        model.go.set()
        counts = Counter(await asyncio.gather(*asking))
        assert counts[429] == ASKED - 3 and counts[200] + counts[202] == 3
        assert model.most <= 3


async def test_requests_keep_to_rate_of_key(home_folder: Path, storage: Storage) -> None:
    model = Model()
    model.go.set()
    async with limited_replicas(home_folder, model, storage, requests_per_minute=5) as server:
        asking = await clients(server, ASKED)
        started_at = time.monotonic()
        counts = Counter(await asyncio.gather(*map(ask, asking)))
        refilled = (time.monotonic() - started_at) * 5 / 60
        assert 5 <= counts[200] <= 5 + refilled and counts[200] + counts[429] == ASKED


async def test_tokens_of_turn_count_at_other_replica_once_it_has_ended(home_folder: Path, storage: Storage) -> None:
    model = Model(tokens=100_000)
    model.go.set()
    async with limited_replicas(home_folder, model, storage, tokens_per_minute=60_000) as server:
        first, other = await clients(server, 2)
        assert (await ask(first), await ask(other), await ask(first)) == (200, 429, 429)
        assert model.requests_seen == 1


async def test_place_of_replica_that_died_is_free_again(home_folder: Path, storage: Storage) -> None:
    model = Model()
    async with limited_replicas(home_folder, model, storage, max_concurrent=1) as server:
        first, other = await clients(server, 2)
        lost = asyncio.create_task(ask(first, store=False))
        await until(lambda: model.at_work == 1)
        assert await ask(other) == 429
        await server.gateways[0].end()
        with pytest.raises(aiohttp.ClientError):
            await lost
        model.go.set()
        assert await ask(other) == 200
