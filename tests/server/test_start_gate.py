"""Turns of a burst start a few at a time, in order, and nobody waits for one that takes its time."""

from __future__ import annotations

import asyncio

import pytest

from hermes.core import limits
from hermes.server.start_gate import Start, StartGate
from support.model_server import Reply
from support.waiting import DEADLINE_S, idle

from .clients import user
from .conftest import Api

NEVER_S = 3600.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TURNS_STARTING_MAX", 2)
    monkeypatch.setattr(limits, "TURNS_STARTING_S_MAX", NEVER_S)


async def entering(gate: StartGate, count: int) -> list[asyncio.Task[Start]]:
    tasks: list[asyncio.Task[Start]] = [asyncio.ensure_future(gate.enter()) for _ in range(count)]
    await idle()
    return tasks


async def test_turns_beyond_the_maximum_wait_in_order() -> None:
    gate = StartGate()
    tasks = await entering(gate, 4)
    assert [task.done() for task in tasks] == [True, True, False, False]
    start = await tasks[0]
    start.leave()
    start.leave()
    await idle()
    assert [task.done() for task in tasks] == [True, True, True, False]
    tasks[3].cancel()


async def test_cancelled_turn_gives_its_place_to_the_next() -> None:
    gate = StartGate()
    tasks = await entering(gate, 4)
    tasks[2].cancel()
    (await tasks[0]).leave()
    await idle()
    assert tasks[3].done() and not tasks[3].cancelled()


async def test_turn_that_is_cancelled_when_it_is_let_in_gives_its_place_to_the_next() -> None:
    gate = StartGate()
    tasks = await entering(gate, 4)
    (await tasks[0]).leave()
    tasks[2].cancel()
    await idle()
    assert tasks[2].cancelled()
    assert tasks[3].done() and not tasks[3].cancelled()


async def test_turns_are_let_in_after_a_while_though_others_still_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TURNS_STARTING_S_MAX", 0.001)
    gate = StartGate()
    for task in await entering(gate, 20):
        await asyncio.wait_for(task, DEADLINE_S)


@pytest.mark.parametrize("stream", [True, False])
async def test_turns_waiting_for_their_model_do_not_block_others(api: Api, stream: bool) -> None:
    go = asyncio.Event()

    async def reply(_: object) -> Reply:
        await go.wait()
        return Reply(text="Hello.", continues=False)

    api.model.handler = reply
    requests = [asyncio.ensure_future(post(api, f"hi {n}", stream)) for n in range(5)]

    await api.model.until(lambda: len(api.model.requests) == 5)
    go.set()
    assert all("Hello." in text for text in await asyncio.gather(*requests))


async def test_rejected_turns_do_not_block_others(api: Api) -> None:
    for _ in range(5):
        async with api.post("/v1/chat/completions", {"messages": []}) as response:
            assert response.status == 400


async def post(api: Api, text: str, stream: bool) -> str:
    async with api.post("/v1/chat/completions", user(text, stream=stream)) as response:
        return str(await response.text())
