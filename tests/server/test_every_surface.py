"""What holds for a turn whatever protocol asks for it: rates, owners, idempotency, disconnects, approvals, resuming, metrics
and traces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from hermes.runs.traces import Traces
from support.model_server import Call, Reply
from support.waiting import until

from .clients import HeldModel, Json, frames, read_json
from .conftest import Api, Start
from .test_keys import ALL, ANNA, BEN, KEYS, bearer
from .test_metrics import read_samples

VERSION = {"anthropic-version": "2023-06-01"}


def _messages(**fields: Any) -> Json:
    return {"model": "hermes-agent", "messages": [{"role": "user", "content": "hi"}], **fields}


def _of_error(body: Json) -> str:
    return str(body["error"]["code"])


def _of_mcp(body: Json) -> str:
    return str(body["result"]["structuredContent"]["error"]["code"])


@dataclass(frozen=True)
class Surface:
    """A way to ask for a turn. `error` finds the code of a refusal; `keyed` says whether a repeated request is known by its
    key, `streams` whether the answer begins before the model has answered."""

    path: str
    body: Json
    headers: dict[str, str] = field(default_factory=dict)
    error: Callable[[Json], str] = _of_error
    rate_status: int = 429
    keyed: bool = True
    streams: bool = True

    def ask(self, api: Api, **headers: str) -> Any:
        return api.post(self.path, self.body, headers={**self.headers, **headers})


_ASK = {"name": "ask", "arguments": {"message": "hi"}, "_meta": {"progressToken": 1}}
SURFACES = {
    "chat": Surface("/v1/chat/completions", _messages(), streams=False),
    "chat-stream": Surface("/v1/chat/completions", _messages(stream=True)),
    "responses": Surface("/v1/responses", {"input": "hi"}, streams=False),
    "responses-stream": Surface("/v1/responses", {"input": "hi", "stream": True}),
    "messages": Surface("/v1/messages", _messages(max_tokens=100), VERSION, streams=False),
    "messages-stream": Surface("/v1/messages", _messages(max_tokens=100, stream=True), VERSION),
    "ollama": Surface("/api/chat", _messages(stream=False), streams=False),
    "ollama-stream": Surface("/api/chat", _messages()),
    "ollama-generate": Surface("/api/generate", {"model": "hermes-agent", "prompt": "hi"}),
    "mcp": Surface(
        "/mcp",
        {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": _ASK},
        {"Accept": "application/json, text/event-stream"},
        error=_of_mcp,
        rate_status=200,
        keyed=False,
    ),
}


@pytest.fixture(params=SURFACES.values(), ids=SURFACES)
def surface(request: pytest.FixtureRequest) -> Surface:
    chosen: Surface = request.param
    return chosen


async def read(response: aiohttp.ClientResponse) -> tuple[int, str]:
    return response.status, await response.text()


def last_object(text: str) -> Json:
    """The object of an answer, or the last one of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("{", "data: {"))]
    document: Json = json.loads(lines[-1])
    return document


async def the_run(api: Api, ended: bool = True) -> Json:
    async def look() -> list[Json]:
        async with api.get("/v1/runs") as response:
            return list((await read_json(response))["data"])

    [run] = await until(look, lambda value: value and (not ended or value[0]["finished_at"]))
    return dict(run)


async def test_rates_hold(start: Start, surface: Surface) -> None:
    keys = [{"name": "anna", "key": ANNA, "scopes": ALL, "tokens_per_minute": 1}]
    api = await start(Reply(text="Hello."), keys=keys, ollama=True)
    async with surface.ask(api, **bearer(ANNA)) as response:
        assert (await read(response))[0] == 200
    async with surface.ask(api, **bearer(ANNA)) as response:
        status, text = await read(response)
    assert status == surface.rate_status, text
    code = last_object(text).get("code") if surface.path.startswith("/api/") else surface.error(last_object(text))
    assert code == "rate_limit_exceeded"
    assert len(api.model.requests) == 1


async def test_turn_is_its_owners(start: Start, surface: Surface) -> None:
    api = await start(Reply(text="Hello."), keys=KEYS, ollama=True)
    async with surface.ask(api, **bearer(ANNA)) as response:
        assert (await read(response))[0] == 200
    run_id = (await the_run(api))["run_id"]
    for key, status in ((ANNA, 200), (BEN, 404)):
        async with api.get(f"/v1/runs/{run_id}", headers=bearer(key)) as response:
            assert response.status == status
        async with api.get("/v1/runs", headers=bearer(key)) as response:
            assert len((await read_json(response))["data"]) == (status == 200)


async def test_repeated_request_is_one_turn(start: Start, surface: Surface) -> None:
    if not surface.keyed:
        pytest.skip("this protocol has no key for a request")
    api = await start(Reply(text="Hello."), ollama=True)
    texts = []
    for _ in range(2):
        async with surface.ask(api, **{"Idempotency-Key": "one"}) as response:
            status, text = await read(response)
            assert status == 200
            texts.append(text)
    assert texts[0] == texts[1] and len(api.model.requests) == 1


@pytest.mark.parametrize("detached", [False, True], ids=["left", "detached"])
async def test_turn_of_disconnected_client(start: Start, surface: Surface, detached: bool) -> None:
    """It is stopped, unless the client has said that it goes on alone."""
    async with HeldModel(Reply(text=["Hel", "lo."])) as held_model:
        api = await start(settings=held_model.settings, ollama=True)
        headers = {"X-Hermes-Detach": "true"} if detached else {}
        url, sent = api.url + surface.path, {**surface.headers, **headers}
        async with aiohttp.ClientSession(headers=dict(api.client.headers)) as client:
            asking = client.post(url, json=surface.body, headers=sent)
            if surface.streams:
                async with asking as response:
                    assert response.status == 200
                    await held_model.wait_for_request()
                    response.close()
            else:
                task = asyncio.create_task(_awaited(asking))
                await held_model.wait_for_request()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        if detached:
            held_model.release_all()
        run = await the_run(api)
        assert run["status"] == ("completed" if detached else "cancelled")
        held_model.release_all()


async def _awaited(asking: Any) -> None:
    async with asking as response:
        await response.read()


@pytest.mark.parametrize("choice", ["once", "deny"])
async def test_approval_is_answered_while_the_turn_waits(start: Start, surface: Surface, choice: str) -> None:
    settings = {"terminal": {"backend": "local"}, "approvals": {"mode": "manual"}}
    command = Call("terminal", {"command": "echo approved-$((40 + 2))"})
    api = await start(Reply(tool_calls=[command]), Reply(text="Done."), settings=settings, ollama=True)

    async def ask() -> tuple[int, str]:
        async with surface.ask(api, **{"X-Hermes-Approvals": "wait"}) as response:
            return await read(response)

    asking = asyncio.create_task(ask())

    async def waiting() -> bool:
        return (await the_run(api, ended=False))["status"] == "waiting_for_approval"

    await until(waiting)
    run_id = (await the_run(api, ended=False))["run_id"]
    async with api.post(f"/v1/runs/{run_id}/approval", {"choice": choice}) as response:
        await read_json(response)
    status, text = await asking
    assert status == 200 and "Done." in text
    result = next(turn.text for turn in api.model.requests[-1].turns if turn.role == "tool")
    assert ("approved-42" in result) is (choice == "once")


async def test_turn_can_be_followed_again(start: Start, surface: Surface) -> None:
    """The log of the run is whole, and any part of it is given again byte for byte."""
    api = await start(Reply(text=["Hel", "lo."]), ollama=True)
    async with surface.ask(api) as response:
        assert (await read(response))[0] == 200
    run_id = (await the_run(api))["run_id"]
    async with api.get(f"/v1/runs/{run_id}/events") as response:
        whole = await response.text()
    stream_frames = frames(whole)
    assert stream_frames[-1].data["event"] == "run.completed"
    middle = next(frame.id for frame in stream_frames if frame.id is not None)
    async with api.get(f"/v1/runs/{run_id}/events", headers={"Last-Event-ID": middle}) as response:
        rest = await response.text()
    assert rest and whole.endswith(rest) and rest != whole


async def test_turn_is_counted_and_traced(start: Start, surface: Surface) -> None:
    api = await start(Reply(text="Hello."), ollama=True)
    spans = InMemorySpanExporter()
    api.app.engine.listeners.append(Traces(SimpleSpanProcessor(spans)).hear)
    async with surface.ask(api, traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01") as response:
        assert (await read(response))[0] == 200
    run = await the_run(api)
    counted = await read_samples(api)
    assert counted["http_requests_total", "POST", surface.path, "200"] == 1
    assert counted["turns_total", run["kind"], "completed"] == 1
    [agent] = [span for span in spans.get_finished_spans() if "agent" in span.name]
    assert agent.parent is not None and agent.parent.span_id == 0xB7AD6B7169203331
