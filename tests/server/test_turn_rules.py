"""Rules that hold for turns whatever route began them: sessions in use, aliases, keys of memory, readers that stall."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import pytest

from support.model_server import Reply
from support.waiting import DEADLINE_S, until

from .clients import HeldModel, Json, RawConnection, read_error, read_json, stream_of, user
from .conftest import Api, Start
from .test_backpressure import Flood

CHAT, RESPONSES, RUNS = "/v1/chat/completions", "/v1/responses", "/v1/runs"
HALL = {"X-Hermes-Session-Id": "hall"}
TURNS: list[tuple[str, Json]] = [
    (CHAT, user("hi")),
    (CHAT, user("hi", stream=True)),
    (RESPONSES, {"input": "hi"}),
    (RESPONSES, {"input": "hi", "stream": True}),
    (RUNS, {"input": "hi"}),
    ("/api/sessions/hall/chat", {"message": "hi"}),
    ("/api/sessions/hall/chat/stream", {"message": "hi"}),
]


async def create_session(api: Api, session_id: str = "hall") -> None:
    await read_json(await api.post("/api/sessions", {"id": session_id}), 201)


async def finished(api: Api) -> Json:
    """The latest run, ended."""

    async def look() -> Json:
        async with api.get(RUNS) as response:
            runs = (await read_json(response))["data"]
        return dict(runs[0]) if runs else {}

    run: Json = await until(look, lambda value: value.get("finished_at"))
    return run


@pytest.mark.parametrize(("path", "body"), TURNS)
async def test_model_alias_on_every_route(start: Start, path: str, body: Json) -> None:
    api = await start(Reply(text="Hello."), model_routes={"fast": {"model": "small"}})
    await create_session(api)
    async with api.post(path, {**body, "model": "fast"}) as response:
        assert response.status in (200, 202), await response.text()
        await response.read()
    await finished(api)
    assert [request.model for request in api.model.requests] == ["small"]


@pytest.mark.parametrize(("path", "body"), TURNS)
async def test_session_key_is_echoed_on_every_route(start: Start, path: str, body: Json) -> None:
    api = await start(Reply(text="Hello."))
    await create_session(api)
    async with api.post(path, body, headers={"X-Hermes-Session-Key": "kitchen"}) as response:
        assert response.status in (200, 202), await response.text()
        assert response.headers["X-Hermes-Session-Key"] == "kitchen"
        await response.read()
    await finished(api)
    async with api.post(path, body, headers={"X-Hermes-Session-Key": "x" * 257}) as response:
        await read_error(response, 400, "invalid_session_key")


@pytest.mark.parametrize(("path", "body"), TURNS)
async def test_every_turn_is_a_run_with_kind(start: Start, path: str, body: Json) -> None:
    api = await start(Reply(text="Hello.", usage={"input": 30, "output": 4, "cached": 20}))
    await create_session(api)
    named = {**body, "metadata": {"room": "hall"}} if "/api/" not in path else body
    async with api.post(path, named) as response:
        text = await response.text()
        run_id = response.headers.get("X-Hermes-Run-Id") or (await response.json())["run_id"]
    run = await finished(api)
    kinds = {CHAT: "chat", RESPONSES: "response", RUNS: "run"}
    assert (run["run_id"], run["kind"], run["status"]) == (run_id, kinds.get(path, "session"), "completed"), text
    assert run["output"] == "Hello."
    assert run["usage"]["input_tokens_details"]["cached_tokens"] == 20
    assert run["metadata"] == named.get("metadata", {})
    assert (run["response_id"] is not None) == (path == RESPONSES)


async def test_waiting_turns_per_session_are_limited(start: Start) -> None:
    async with HeldModel(*[Reply(text="Hello.", continues=False)] * 3) as model:
        api = await start(settings={**model.settings, "sessions": {"turn_queue": 2}})
        turns = [asyncio.create_task(api.client.post(api.url + CHAT, json=user("hi"), headers=HALL))]
        await model.wait_for_request()
        turns += [asyncio.create_task(api.client.post(api.url + CHAT, json=user("hi"), headers=HALL)) for _ in range(2)]
        await until(lambda: api.app.engine.admissions.leases.waiting("hall") == 3)
        async with api.post(CHAT, user("hi"), headers=HALL) as response:
            await read_error(response, 409, "session_busy")
            assert int(response.headers["Retry-After"]) >= 1
        model.release_all()
        for answer in await asyncio.gather(*turns):
            await read_json(answer)


async def test_busy_session_can_be_renamed_and_forked_but_not_deleted(start: Start) -> None:
    async with HeldModel(Reply(text="Hello.")) as model:
        api = await start(settings=model.settings)
        turn = asyncio.create_task(api.client.post(api.url + CHAT, json=user("hi"), headers=HALL))
        await model.wait_for_request()
        async with api.delete("/api/sessions/hall") as response:
            await read_error(response, 409, "session_busy")
        async with api.patch("/api/sessions/hall", {"title": "The hall"}) as response:
            assert (await read_json(response))["session"]["title"] == "The hall"
        async with api.post("/api/sessions/hall/fork", {"id": "copy"}) as response:
            await read_json(response, 201)
        async with api.get("/api/sessions/copy/messages") as response:
            # Only turns that have ended are copied.
            assert (await read_json(response))["data"] == []
        model.release_all()
        await read_json(await turn)
        async with api.delete("/api/sessions/hall") as response:
            await read_json(response)


async def test_queued_run_fails_after_session_wait(start: Start) -> None:
    async with HeldModel(Reply(text="Hello.")) as model:
        api = await start(settings=model.settings, run_queue_seconds=1)
        turn = asyncio.create_task(api.client.post(api.url + CHAT, json=user("hi"), headers=HALL))
        await model.wait_for_request()
        async with api.post(RUNS, {"input": "x", "session_id": "hall"}) as response:
            run_id = (await read_json(response, 202))["run_id"]

        async def look() -> Json:
            async with api.get(f"{RUNS}/{run_id}") as response:
                return await read_json(response)

        run = await until(look, lambda value: value["finished_at"])
        assert (run["status"], run["error_code"]) == ("failed", "session_busy")
        async with api.get(f"{RUNS}/{run_id}/events") as response:
            events = [item.data["event"] for item in await stream_of(response)]
        assert events == ["run.queued", "run.failed"]
        model.release_all()
        await read_json(await turn)


# ---- readers that stall


async def test_stalled_stream_reader_is_disconnected(start: Start) -> None:
    async with Flood(40_000, ends=False) as model:
        settings = {**model.settings, "agent": {"api_max_retries": 0, "delta_window_ms": 0}}
        api = await start(settings=settings, write_stall_seconds=0.3)
        async with await RawConnection.open(api.url, receive_buffer=8192) as wire:
            await wire.request("POST", CHAT, user("hi", stream=True), Authorization=api.client.headers["Authorization"])
            await wire.head()
            await model.wait_for_request()
            await model.until(lambda: model.open_streams == 0)
            run = await finished(api)
    assert run["status"] == "cancelled"
    assert model.requests[0].closed_early


async def test_stalled_websocket_is_closed(start: Start) -> None:
    async with Flood(40_000, ends=False) as model:
        settings = {**model.settings, "agent": {"api_max_retries": 0, "delta_window_ms": 0}}
        api = await start(settings=settings, write_stall_seconds=0.3)
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        upgrade |= {
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
            "Authorization": api.client.headers["Authorization"],
        }
        request = b'{"type": "response.create", "input": "hi"}'
        async with await RawConnection.open(api.url, receive_buffer=8192) as wire:
            await wire.request("GET", RESPONSES, **upgrade)
            assert (await wire.head()).status == 101
            await wire.send(bytes([0x81, 0x80 | len(request), 0, 0, 0, 0]) + request)
            await model.wait_for_request()
            await model.until(lambda: model.open_streams == 0)
            async with asyncio.timeout(DEADLINE_S):
                with contextlib.suppress(ConnectionError):
                    while await wire.reader.read(65_536):
                        pass


async def test_websocket_is_pinged(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes.server.websocket.SOCKET_PING_S", 0.05)
    async with api.client.ws_connect(f"{api.url}{RESPONSES}", autoping=False) as socket:
        message = await socket.receive(timeout=DEADLINE_S)
        assert message.type is aiohttp.WSMsgType.PING
