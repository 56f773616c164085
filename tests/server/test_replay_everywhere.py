"""Replay: every reader of a log gets the same bytes, live or later, from any position, or an error if it has expired."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from support.model_server import Call, Reply
from support.waiting import DEADLINE_S, until

from .clients import HeldModel, Stream, read_error, read_json, user
from .conftest import Api, Start

RUNS = "/v1/runs"
CLOSED = ": stream closed"
WORDS = [f"word {n} " for n in range(16)]
TABLET = "sk-tablet-0123456789abcdef0123456789"
# The two ways to say where a reader stands.
PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "Last-Event-ID": lambda last: {"headers": {"Last-Event-ID": last}},
    "starting_after": lambda last: {"params": {"starting_after": last}},
    "both": lambda last: {"params": {"starting_after": last}, "headers": {"Last-Event-ID": "0"}},
}


def todo(number: int) -> Call:
    item = {"id": str(number), "content": "milk", "status": "pending"}
    return Call("todo", {"todos": [item]}, id=f"call_{number}")


def long_turn() -> HeldModel:
    """A turn of about sixty events, which come as they are let."""
    first, second = [todo(1), todo(2)], [todo(3)]
    return HeldModel(Reply(text=WORDS, tool_calls=first), Reply(text=WORDS, tool_calls=second), Reply(text=WORDS))


async def submitted(start: Start, held_model: HeldModel) -> tuple[Api, str]:
    agent = {"delta_window_ms": 0, "api_max_retries": 0}
    keys = [{"name": "tablet", "key": TABLET, "scopes": ["chat", "runs"]}]
    api = await start(settings={**held_model.settings, "agent": agent}, keys=keys)
    async with api.post(RUNS, {"input": "hi"}) as response:
        return api, (await read_json(response, 202))["run_id"]


async def blocks(response: aiohttp.ClientResponse) -> list[str]:
    """All of a stream, block by block, as it came."""
    assert response.status == 200, await response.text()
    return (await response.text()).split("\n\n")


def number_of(block: str) -> str:
    return block.partition("\n")[0].removeprefix("id: ")


async def stays(api: Api, path: str) -> list[str]:
    async with api.get(path) as response:
        return await blocks(response)


async def comes_back(
    api: Api, path: str, place: Callable[[str], dict[str, Any]], go_on: Callable[[], None]
) -> list[str]:
    """A reader whose connection is lost after every single event."""
    blocks: list[str] = []
    while not blocks or blocks[-1] != CLOSED:
        async with api.get(path, **(place(number_of(blocks[-1])) if blocks else {})) as response:
            block = await Stream(response).block()
        assert block is not None
        blocks.append(block)
        go_on()
    return blocks


@pytest.mark.parametrize("place", PLACES)
async def test_replay_after_every_disconnect_is_complete(start: Start, place: str) -> None:
    async with long_turn() as held_model:
        api, run_id = await submitted(start, held_model)
        path = f"{RUNS}/{run_id}/events"
        held_model.release(6)  # the pieces of calls, which are no events
        whole, pieced = await asyncio.gather(stays(api, path), comes_back(api, path, PLACES[place], held_model.release))
        assert whole == [*pieced, ""]
        assert len(pieced) > 60 and whole == await stays(api, path)
        for at, block in enumerate(pieced[:-1]):
            async with api.get(path, **PLACES[place](number_of(block))) as response:
                assert await blocks(response) == whole[at + 1 :], f"after {block}"


async def test_replay_is_owner_only_and_expires(start: Start) -> None:
    async with long_turn() as held_model:
        api, run_id = await submitted(start, held_model)
        path, other = f"{RUNS}/{run_id}/events", {"Authorization": f"Bearer {TABLET}"}
        await held_model.wait_for_request()
        async with api.get(path, headers=other) as response:
            await read_error(response, 404, "run_not_found")
        held_model.release_all()
        last = (await stays(api, path))[-3]
        for place in PLACES.values():
            request = place(number_of(last))
            async with api.get(path, **{**request, "headers": {**request.get("headers", {}), **other}}) as response:
                await read_error(response, 404, "run_not_found")
        api.app.store.blocking.runs.sweep({"": 1000.0}, {"run": 0.0}, 1000, now=time.time() + 10)
        for place in PLACES.values():
            async with api.get(path, **place("0")) as response:
                await read_error(response, 410, "events_expired")
        async with api.get(f"{RUNS}/{run_id}") as response:
            assert (await read_json(response))["output"] == "".join(WORDS)


async def test_run_can_be_followed_while_it_is_recorded(api: Api, monkeypatch: Any) -> None:
    api.model.script = [Reply(text="Hello.")]
    runs, looked_for = api.app.store.runs, asyncio.Event()
    get = runs.get

    def late(record: Any) -> Any:
        async def later(*args: Any, **named: Any) -> Any:
            await looked_for.wait()
            return await record(*args, **named)

        return later

    async def look(run_id: str) -> Any:
        run = await get(run_id)
        looked_for.set()
        return run

    monkeypatch.setattr(runs, "create", late(runs.create), raising=False)
    monkeypatch.setattr(runs, "append", late(runs.append), raising=False)
    monkeypatch.setattr(runs, "get", look, raising=False)
    coming = api.app.engine.creating
    task = asyncio.ensure_future(api.post("/v1/chat/completions", user("hi", stream=True)).__aenter__())
    run_id = next(iter(await until(lambda: coming)))
    async with asyncio.timeout(DEADLINE_S):
        async with api.get(f"/v1/runs/{run_id}/events") as response:
            assert response.status == 200, await response.text()
            assert "run.completed" in await response.text()
        async with await task as stream:
            assert stream.headers["X-Hermes-Run-Id"] == run_id
