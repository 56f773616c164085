"""A store that takes no more writes while a turn runs: every stream ends by its grammar, and a whole answer is given."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.gateway import serving
from support.model_server import Call, ModelServer, Reply, Request
from support.waiting import DEADLINE_S, until

from .clients import Frame, Json, chat_text, read_error, read_json, stream_of, user
from .conftest import Api

CHAT, RESPONSES, SESSION = "/v1/chat/completions", "/v1/responses", "/api/sessions/hall/chat"
ANSWER = "A whole answer. " * 2000
CODE = "session_db_unavailable"
# How the store fails, and how it is mended: the file may not grow, or not be written to at all.
FAULTS = {
    "full": ("max_page_count = 1", "max_page_count = 1073741823"),
    "read-only": ("query_only = ON", "query_only = OFF"),
}
ROUTES: dict[str, tuple[str, Json]] = {
    "chat": (CHAT, user("hi")),
    "chat unstored": (CHAT, user("hi", store=False)),
    "response": (RESPONSES, {"input": "hi"}),
    "session": (SESSION, {"message": "hi"}),
}


class Disk:
    """The store's writer, made to fail and mended."""

    def __init__(self, api: Api, fault: str) -> None:
        self._engine = api.app.store.blocking.engine
        self._break, self._mend = FAULTS[fault]

    def fail(self) -> None:
        self._engine.exclusive(lambda db: db.execute(f"PRAGMA {self._break}").close())

    def mend(self) -> None:
        self._engine.exclusive(lambda db: db.execute(f"PRAGMA {self._mend}").close())


@pytest.fixture(params=FAULTS)
def disk(api: Api, request: pytest.FixtureRequest) -> Iterator[Disk]:
    disk = Disk(api, request.param)
    yield disk
    disk.mend()


def failing(api: Api, disk: Disk, reply: Reply) -> Callable[[Request], Any]:
    """A model during whose first answer the store fails, once the run is on record."""

    async def handler(_: Request) -> Reply:
        await until(lambda: not api.app.engine.creating)
        disk.fail()
        return reply

    return handler


async def streamed(api: Api, path: str, body: Json) -> list[Frame]:
    path, body = (f"{path}/stream", body) if path == SESSION else (path, {**body, "stream": True})
    async with api.post(path, body) as response:
        assert response.status == 200, await response.text()
        return await stream_of(response)


def end_of(path: str, frames: list[Frame]) -> tuple[str, str, Json]:
    """How a stream ended: its state, its text, and the last object that it tells. Its grammar is checked."""
    names = [frame.event for frame in frames]
    if path == CHAT:
        assert frames[-1].data == "[DONE]"
        last = next(frame.data for frame in reversed(frames[:-1]) if frame.data.get("choices"))
        return last["choices"][0]["finish_reason"], chat_text(frames), last
    if path == RESPONSES:
        assert frames[-1].data == "[DONE]"
        last = frames[-2].data
        text = "".join(frame.data["delta"] for frame in frames if frame.event == "response.output_text.delta")
        return last["type"], text, last["response"]
    assert names[-1] == "done"
    text = "".join(frame.data["delta"] for frame in frames if frame.event == "assistant.delta")
    return str(names[-2]), text, frames[-2].data


def warned(path: str, frames: list[Frame], last: Json) -> bool:
    """Whether a stream says that its turn is not kept."""
    if path == SESSION:
        return any(frame.event == "warning" and frame.data["code"] == "store_unavailable" for frame in frames)
    return [warning["code"] for warning in last["hermes"]["warnings"]] == ["store_unavailable"]


ENDS = {CHAT: "stop", RESPONSES: "response.completed", SESSION: "run.completed"}
FAILURES = {CHAT: "error", RESPONSES: "response.failed", SESSION: "run.failed"}


@pytest.mark.parametrize("route", ROUTES)
async def test_complete_answer_is_delivered_with_warning_on_full_disk(api: Api, disk: Disk, route: str) -> None:
    path, body = ROUTES[route]
    async with api.post("/api/sessions", {"id": "hall"}) as response:
        await read_json(response, 201)
    api.model.handler = failing(api, disk, Reply(text=ANSWER, continues=False))
    events = await streamed(api, path, body)
    end, text, last = end_of(path, events)
    assert (end, text) == (ENDS[path], ANSWER)
    unstored = route == "chat unstored"
    assert unstored or warned(path, events, last)
    disk.mend()
    async with api.post(path, body) as response:
        payload = await read_json(response)
        warnings = payload.get("hermes", {}).get("warnings", [])
        assert [warning["code"] for warning in warnings] == ([] if unstored else ["store_unavailable"])
        assert response.headers.get("X-Hermes-Warning") == (None if unstored else "store_unavailable")
    assert ANSWER in str(payload)


@pytest.mark.parametrize("route", [route for route in ROUTES if route != "chat unstored"])
async def test_turn_needing_store_fails_on_full_disk(api: Api, disk: Disk, route: str) -> None:
    path, body = ROUTES[route]
    async with api.post("/api/sessions", {"id": "hall"}) as response:
        await read_json(response, 201)
    call = Call("todo", {"todos": [{"id": "1", "content": "x" * 40_000, "status": "pending"}]})
    api.model.handler = failing(api, disk, Reply(tool_calls=[call], continues=False))
    events = await streamed(api, path, body)
    end, _, last = end_of(path, events)
    assert end == FAILURES[path]
    error = last["error_code"] if path == SESSION else last["error"]["type" if path == RESPONSES else "code"]
    assert error == CODE
    if path != CHAT:
        assert "error" in [frame.event for frame in events]
    disk.mend()
    async with api.post(path, body) as response:
        await read_error(response, 503, CODE)


@pytest.mark.parametrize("route", [route for route in ROUTES if route != "session"])
async def test_detached_cancel_turn_is_answered_without_store(api: Api, disk: Disk, route: str) -> None:
    path, body = ROUTES[route]
    api.model.handler = lambda _: Reply(text=ANSWER, continues=False)
    await api.ask("before")
    disk.fail()
    events = await streamed(api, path, body)
    end, text, last = end_of(path, events)
    assert (end, text) == (ENDS[path], ANSWER)
    assert route == "chat unstored" or warned(path, events, last)


async def test_run_ended_without_store_is_recorded_once_store_is_back(api: Api, disk: Disk) -> None:
    async with api.post("/api/sessions", {"id": "hall"}) as response:
        await read_json(response, 201)
    api.model.handler = failing(api, disk, Reply(text=ANSWER, continues=False))
    streamed_events = await streamed(api, SESSION, {"message": "hi"})
    run_id = streamed_events[0].data["run_id"]
    disk.mend()
    await api.app.engine.resume(run_id)
    async with api.get(f"/v1/runs/{run_id}/events") as response:
        events = [frame.data for frame in await stream_of(response)]
    assert (events[-1]["event"], events[-1]["error_code"]) == ("run.failed", CODE)
    assert len(api.model.requests) == 1, "the model was asked again"


LOG_READERS = {
    "run": ("/v1/runs", {"input": "hi"}),
    "background": (RESPONSES, {"input": "hi", "background": True}),
}


@pytest.mark.parametrize("reader", LOG_READERS)
async def test_log_reader_gets_synthetic_end_without_store(api: Api, disk: Disk, reader: str) -> None:
    path, body = LOG_READERS[reader]
    reads = asyncio.Event()

    async def answer(request: Request) -> Reply:
        await reads.wait()
        disk.fail()
        return Reply(text=ANSWER, continues=False)

    api.model.handler = answer
    async with api.post(path, body) as response:
        told_of = await response.json()
    if reader == "run":
        events = f"{path}/{told_of['run_id']}/events"
    else:
        events = f"{path}/{told_of['id']}?stream=true"
    async with asyncio.timeout(DEADLINE_S), api.get(events) as response:
        assert response.status == 200
        reads.set()
        frames = await stream_of(response)
        text = await response.text()
    if reader == "run":
        assert (frames[-1].data["event"], frames[-1].data["error_code"]) == ("run.failed", CODE)
        assert text.endswith(": stream closed\n\n")
    else:
        assert end_of(RESPONSES, frames)[0] == "response.failed"
    disk.mend()
    async with asyncio.timeout(DEADLINE_S), api.get(events) as response:
        again = await stream_of(response)
    last = -1 if reader == "run" else -2
    assert again[last].data.get("event", again[last].data.get("type")) in ("run.failed", "response.failed")
    if reader == "run":
        assert int(again[-1].id or 0) > int(frames[-1].id or 0), "a number was used twice"
    assert len(api.model.requests) == 1, "the model was asked again"


async def test_reader_that_comes_after_an_unrecorded_end_gets_it(api: Api, disk: Disk) -> None:
    api.model.handler = failing(api, disk, Reply(text=ANSWER, continues=False))
    async with api.post("/v1/runs", {"input": "hi"}) as response:
        run_id = (await read_json(response, 202))["run_id"]
    await until(lambda: api.app.engine.unrecorded_end(run_id) and run_id not in api.app.engine.by_id)
    async with asyncio.timeout(DEADLINE_S), api.get(f"/v1/runs/{run_id}/events") as response:
        last = (await stream_of(response))[-1].data
    assert (last["event"], last["error_code"]) == ("run.failed", CODE)


# A home on a disk of 4 MiB, which nobody else sees.
SMALL_DISK = (
    "unshare",
    "-rm",
    "sh",
    "-c",
    'set -e; config=$(cat "$HERMES_HOME/config.yaml"); mount -t tmpfs -o size=4m none "$HERMES_HOME"; '
    'echo "$config" > "$HERMES_HOME/config.yaml"; exec "$@"',
    "sh",
)


async def test_disk_full_mid_stream(home_folder: Path) -> None:
    probe = [*SMALL_DISK[:4], f'mount -t tmpfs -o size=4m none "{home_folder.parent}"']
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    filler: Path | None = None

    async def answer(_: Request) -> Reply:
        assert filler is not None
        if not filler.exists():
            with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        return Reply(text=["A whole ", "answer. ", *["It goes on. "] * 50], gap_s=0.002, continues=False)

    whole = "A whole answer. " + "It goes on. " * 50
    async with ModelServer(handler=answer) as model:
        settings = {"model": {"default": "m", "base_url": f"{model.url}/v1", "api_key": "key-12345678"}}
        async with serving(home_folder, within=SMALL_DISK, terminal={"backend": "local"}, **settings) as gateway:
            disk = Path(f"/proc/{gateway.process.pid}/root{home_folder}")
            filler = disk / "filler"
            await gateway.post("/api/sessions", {"id": "hall"}, 201)
            for route in ("chat", "response", "session"):
                path, body = ROUTES[route]
                filler.unlink(missing_ok=True)
                stream = (f"{path}/stream", body) if path == SESSION else (path, {**body, "stream": True})
                async with gateway.client.post(stream[0], json=stream[1]) as response:
                    frames = await stream_of(response)
                end, text, last = end_of(path, frames)
                assert (end, text) == (ENDS[path], whole)
                assert warned(path, frames, last)
                filler.unlink()
                async with gateway.client.post(path, json=body) as response:
                    answer_text = await response.text()
                    assert (response.status, response.headers["X-Hermes-Warning"]) == (200, "store_unavailable")
                    assert whole.strip() in answer_text
            assert len(list((disk / "journal").iterdir())) < 10
            filler.unlink()
            run_id = response.headers["X-Hermes-Run-Id"]

            await until(lambda: gateway.get(f"/v1/runs/{run_id}"), lambda run: run["status"] == "failed")
