"""The run that a stream's head names is on record before the head is sent: after a crash it can be asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hermes.store.base import StoreError
from hermes.store.stores import AsyncStore
from support.gateway import SURELY_S
from support.model_server import Reply
from support.waiting import until

from .clients import Json, read_json, user
from .conftest import Api

STREAMS: dict[str, Json] = {
    "/v1/chat/completions": user("hi", stream=True),
    "/v1/responses": {"input": "hi", "stream": True},
    "/api/sessions/hall/chat/stream": {"message": "hi"},
}


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "key-1"}], ids=["plain", "keyed"])
@pytest.mark.parametrize("path", STREAMS)
async def test_stream_head_is_sent_after_run_is_recorded(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str, headers: dict[str, str]
) -> None:
    api.model.handler = lambda _: Reply(text="Hello.", continues=False)
    async with api.post("/api/sessions", {"id": "hall"}) as response:
        await read_json(response, 201)
    store: AsyncStore = api.app.store
    reached, go = asyncio.Event(), asyncio.Event()

    def slowly(method: Any) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            reached.set()
            await go.wait()
            return await method(*args, **options)

        return call

    for name in ("append", "create"):
        monkeypatch.setattr(store.runs, name, slowly(getattr(store.runs, name)), raising=False)
    task = asyncio.ensure_future(api.post(path, STREAMS[path], headers=headers).__aenter__())
    await reached.wait()
    # Time for a head that is sent too early; on a slow machine it may be missed, but nothing fails by that.
    await asyncio.wait([task], timeout=0.3)
    assert not task.done(), "the head was sent before the run was on record"
    go.set()
    async with await task as response:
        assert await store.runs.get(response.headers["X-Hermes-Run-Id"]) is not None
        assert "Hello." in await response.text()


async def test_model_is_asked_while_start_of_stream_is_stored(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    requested, append = asyncio.Event(), api.app.store.runs.append
    appended: list[str] = []

    async def answer(_: Any) -> Reply:
        requested.set()
        return Reply(text="Hello.", continues=False)

    async def after_question(run_id: str, token: int | None, events: Any, *args: Any, **options: Any) -> Any:
        async with asyncio.timeout(SURELY_S):
            await requested.wait()
        appended.extend(event.type for event in events)
        return await append(run_id, token, events, *args, **options)

    api.model.handler = answer
    monkeypatch.setattr(api.app.store.runs, "append", after_question, raising=False)
    async with api.post("/v1/chat/completions", user("hi", stream=True)) as response:
        assert "Hello." in await response.text()
    assert appended == WHOLE
    events = [event async for event in api.app.engine.subscribe(response.headers["X-Hermes-Run-Id"])]
    assert [event.type for event in events] == [*WHOLE[:2], "text.delta", *WHOLE[2:]]


@pytest.mark.parametrize("when", ["before the question", "after it"])
async def test_answer_to_run_that_could_not_be_stored_is_not_read(
    api: Api, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The run goes on without a record, and asks again."""
    requests: list[Any] = []

    async def fails(*_: Any, **__: Any) -> Any:
        if when == "after it":
            await until(lambda: requests)
        raise StoreError("The disk is full.")

    def answer(request: Any) -> Reply:
        requests.append(request)
        return Reply(text=f"Answer {len(requests)}.", continues=False)

    api.model.handler = answer
    monkeypatch.setattr(api.app.store.runs, "append", fails, raising=False)
    async with api.post("/v1/chat/completions", user("hi", stream=True)) as response:
        text = await response.text()
    assert text.count("Answer") == 1 and f"Answer {len(requests)}." in text


class Appends:
    """What is appended to the logs of runs: the types of the events of each transaction, of which some may fail."""

    def __init__(self, store: AsyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.types: list[list[str]] = []
        self.failing = 0
        append = store.runs.append

        async def noted(run_id: str, token: int | None, events: Any, *args: Any, **options: Any) -> Any:
            self.types.append([event.type for event in events])
            if self.failing:
                self.failing -= 1
                raise StoreError("The disk is full.")
            return await append(run_id, token, events, *args, **options)

        monkeypatch.setattr(store.runs, "append", noted, raising=False)


WHOLE = ["run.started", "model.started", "message.completed", "usage", "run.completed"]


async def test_plain_turn_is_one_transaction(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the client keeps the conversation and would ask again without an answer."""
    api.model.handler = lambda _: Reply(text="Hello.", continues=False)
    appends = Appends(api.app.store, monkeypatch)
    async with api.post("/v1/chat/completions", user("hi")) as response:
        await read_json(response)
    assert appends.types == [WHOLE]
    events = [event async for event in api.app.engine.subscribe(response.headers["X-Hermes-Run-Id"])]
    assert [event.seq for event in events] == [1, 2, 3, 4, 5, 6]
    assert [event.type for event in events] == [*WHOLE[:2], "text.delta", *WHOLE[2:]]


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/chat/completions", user("hi"), {"Idempotency-Key": "key-1"}),
        ("/v1/chat/completions", user("hi"), {"X-Hermes-Session-Id": "hall"}),
        ("/api/sessions/hall/chat", {"message": "hi"}, {}),
    ],
    ids=["keyed", "named", "session"],
)
async def test_other_turns_are_recorded_before_model_call(
    api: Api, path: str, body: Json, headers: dict[str, str]
) -> None:
    counts: list[int] = []

    async def answer(_: Any) -> Reply:
        counts.append(len(await api.app.store.runs.list()))
        return Reply(text="Hello.", continues=False)

    api.model.handler = answer
    async with api.post("/api/sessions", {"id": "hall"}) as response:
        await read_json(response, 201)
    async with api.post(path, body, headers=headers) as response:
        await read_json(response)
    assert counts == [1]


async def test_plain_turn_is_recorded_while_model_works(api: Api) -> None:
    statuses: list[str] = []

    async def answer(_: Any) -> Reply:
        result = await until(api.app.store.runs.list)
        statuses.append(result[0].state.status)
        return Reply(text="Hello.", continues=False)

    api.model.handler = answer
    await api.ask("hi")
    assert statuses == ["running"]


@pytest.mark.parametrize("listed", [False, True])
async def test_failed_start_record_is_written_with_end(api: Api, monkeypatch: pytest.MonkeyPatch, listed: bool) -> None:
    """Also when the runs are listed meanwhile, which records their starts."""
    appends = Appends(api.app.store, monkeypatch)
    appends.failing = 1

    async def answer(_: Any) -> Reply:
        if listed:
            async with api.get("/v1/runs") as response:
                assert (await read_json(response))["data"] == []
        await until(lambda: not appends.failing)
        return Reply(text="Hello.", continues=False)

    api.model.handler = answer
    async with api.post("/v1/chat/completions", user("hi")) as response:
        await read_json(response)
        assert "X-Hermes-Warning" not in response.headers
    assert appends.types == [WHOLE[:2], WHOLE]
    events = [event async for event in api.app.engine.subscribe(response.headers["X-Hermes-Run-Id"])]
    assert [event.seq for event in events] == [1, 2, 3, 4, 5, 6]
