"""Disconnecting clients: detected in every phase of a turn, without a write to them, and recorded in its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hermes.core.spec import RunSpec
from hermes.server import application
from hermes.server.compat import CallbackRun, TurnQueue
from hermes.server.request_options import RequestOptions
from hermes.server.turns import Turn
from support.model_server import Call, Reply
from support.waiting import DEADLINE_S, idle, until

from .clients import HeldModel, Json, RawConnection, Stream, chat_text, frames, read_json, user
from .conftest import Api, Start
from .test_metrics import read_samples

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
# No keepalive finds out that a client is gone: only the connection can tell.
SILENT = {"keepalive_seconds": 3600}

BODIES: dict[str, tuple[str, Json]] = {
    "chat": (CHAT, user("hi")),
    "chat stream": (CHAT, user("hi", stream=True)),
    "response": (RESPONSES, {"input": "hi"}),
    "response stream": (RESPONSES, {"input": "hi", "stream": True}),
}


async def gone_fin(wire: RawConnection) -> None:
    await wire.close()


async def gone_reset(wire: RawConnection) -> None:
    wire.reset()


async def gone_half(wire: RawConnection) -> None:
    await wire.half_close()


WAYS: dict[str, Callable[[RawConnection], Awaitable[None]]] = {"fin": gone_fin, "reset": gone_reset, "half": gone_half}


async def send(api: Api, kind: str, **headers: str) -> RawConnection:
    path, body = BODIES[kind]
    wire = await RawConnection.open(api.url)
    await wire.request("POST", path, body, Authorization=api.client.headers["Authorization"], **headers)
    return wire


async def runs(api: Api) -> list[Json]:
    async with api.get("/v1/runs") as response:
        listed: list[Json] = (await read_json(response))["data"]
        return listed


async def the_run(api: Api) -> Json:
    """The only run there is, ended."""
    result = await until(lambda: runs(api), lambda value: value and value[0]["finished_at"])
    assert len(result) == 1
    return dict(result[0])


async def last_event(api: Api, run_id: str) -> Json:
    async with api.get(f"/v1/runs/{run_id}/events") as response:
        event: Json = frames(await response.text())[-1].data
        return event


async def rows(api: Api, session_id: str) -> list[Json]:
    async with api.get(f"/api/sessions/{session_id}/messages") as response:
        runs: list[Json] = (await read_json(response))["data"]
        return runs


async def noticed(model: HeldModel) -> None:
    """The provider sees that nobody wants its answer any more."""
    await model.until(lambda: model.open_streams == 0)
    assert model.requests[0].closed_early


class LostConnections:
    """The addresses of the clients whose connection the server has lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._peers: list[Any] = []
        lose = application._Connection.connection_lost

        def connection_lost(connection: Any, error: BaseException | None) -> None:
            self._peers.append(connection.transport.get_extra_info("peername"))
            lose(connection, error)

        monkeypatch.setattr(application._Connection, "connection_lost", connection_lost)

    async def leave(self, wire: RawConnection) -> None:
        """Reset a connection; the server has noticed that, and has done what it does about it at once."""
        address = wire.writer.get_extra_info("sockname")
        wire.reset()
        await until(lambda: address in self._peers)
        await idle()


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> LostConnections:
    return LostConnections(monkeypatch)


# ---- what ends with its client


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", BODIES)
async def test_disconnect_while_provider_is_silent(start: Start, kind: str, way: str) -> None:
    async with HeldModel(Reply(text="Hello.")) as model:
        api = await start(settings=model.settings, **SILENT)
        wire = await send(api, kind, X_Hermes_Session_Id="hall")
        await model.wait_for_request()
        await WAYS[way](wire)
        await noticed(model)
        run = await the_run(api)
        assert (run["status"], run["completed"], run["interrupted"]) == ("cancelled", False, True)
        event = await last_event(api, run["run_id"])
        assert (event["event"], event["reason"]) == ("run.cancelled", "client_disconnected")
        question, marker = await rows(api, "hall")
        assert (question["role"], question["content"]) == ("user", "hi")
        assert (marker["role"], marker["synthetic"]) == ("assistant", True)
        if "response" in kind:
            await check_response(api, run["response_id"], "")
        await wire.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", BODIES)
async def test_disconnect_mid_answer(start: Start, kind: str, way: str) -> None:
    async with HeldModel(Reply(text=["Half", " an answer."])) as model:
        api = await start(settings=model.settings, **SILENT)
        wire = await send(api, kind, X_Hermes_Session_Id="hall")
        await model.wait_for_request()
        model.release()
        if "stream" in kind:
            await wire.read_until(b"Half")
        else:
            await until(lambda: texts(api), lambda value: "Half" in value)
        await WAYS[way](wire)
        await noticed(model)
        run = await the_run(api)
        assert (run["status"], run["output"]) == ("cancelled", "Half")
        assert (await last_event(api, run["run_id"]))["reason"] == "client_disconnected"
        _, answer = await rows(api, "hall")
        assert (answer["content"], answer["finish_reason"], answer["synthetic"]) == ("Half", "interrupted", False)
        if "response" in kind:
            await check_response(api, run["response_id"], "Half")
        await wire.close()


async def texts(api: Api) -> str:
    """All text that the first run has said so far."""
    (run,) = await runs(api)
    text = ""
    async with api.get(f"/v1/runs/{run['run_id']}/events") as response:
        stream = Stream(response)
        while True:
            event = (await stream.next()).data
            if event["event"] == "message.delta":
                return text + str(event["delta"])


async def check_response(api: Api, response_id: str, text: str) -> None:
    async def stored() -> Json:
        async with api.get(f"{RESPONSES}/{response_id}") as response:
            return await read_json(response)

    # The run has ended; its response is written right after it.
    payload = await until(stored, lambda value: value["status"] != "in_progress")
    assert (payload["status"], payload["incomplete_details"]) == ("incomplete", {"reason": "client_disconnected"})
    texts = [part["text"] for item in payload["output"] for part in item.get("content", [])]
    assert texts == ([text] if text else [])


async def test_disconnect_while_waiting_for_session(start: Start, lost: LostConnections) -> None:
    async with HeldModel(Reply(text="First."), Reply(text="Third.")) as model:
        api = await start(settings=model.settings)
        first = asyncio.create_task(api.post(CHAT, user("first"), headers={"X-Hermes-Session-Id": "hall"}))
        await model.wait_for_request()
        leases = api.app.engine.admissions.leases
        wire = await send(api, "chat stream", X_Hermes_Session_Id="hall")
        await until(lambda: leases.waiting("hall") == 2)
        await lost.leave(wire)
        await until(lambda: leases.waiting("hall") == 1)
        third = asyncio.create_task(api.post(CHAT, user("third"), headers={"X-Hermes-Session-Id": "hall"}))
        model.release_all()
        await read_json(await first)
        await read_json(await third)
        assert len(model.requests) == 2
        assert [row["content"] for row in await rows(api, "hall")] == ["first", "First.", "third", "Third."]


async def test_disconnect_with_open_question(start: Start) -> None:
    asking = Call("clarify", {"question": "Which room?"}, id="call_ask")
    async with HeldModel(Reply(tool_calls=[asking])) as model:
        api = await start(settings=model.settings)
        model.release_all()
        wire = await send(api, "chat stream", X_Hermes_Session_Id="hall", User_Agent="curl/8")
        await wire.read_until(b"hermes.clarify.request")
        wire.reset()
        run = await the_run(api)
        assert (run["status"], run["pending_question"]) == ("cancelled", None)
        stored_rows = await rows(api, "hall")
        assert [row["role"] for row in stored_rows] == ["user", "assistant", "tool", "assistant"]
        assert "interrupted" in stored_rows[2]["content"]


async def test_many_disconnects_are_noticed(start: Start) -> None:
    async with HeldModel(*[Reply(text="Hello.")] * 20) as model:
        api = await start(settings=model.settings, **SILENT)
        wires = [await send(api, kind) for kind in list(BODIES) * 5]
        await model.until(lambda: len(model.requests) == 20)
        for wire in wires:
            wire.reset()
        await model.until(lambda: model.open_streams == 0)
        result = await until(lambda: runs(api), lambda value: all(run["finished_at"] for run in value))
        assert {run["status"] for run in result} == {"cancelled"}


async def test_disconnect_mid_body_starts_nothing(api: Api, lost: LostConnections) -> None:
    wire = await RawConnection.open(api.url)
    key = api.client.headers["Authorization"]
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\nContent-Length: 100"
    await wire.send(f"{head}\r\nExpect: 100-continue\r\n\r\n")
    assert (await wire.head()).status == 100
    await wire.send("{")
    await lost.leave(wire)
    assert await runs(api) == []
    assert api.model.requests == []


# ---- what goes on


GOES_ON: list[tuple[str, str, dict[str, str], Json]] = [
    ("header, chat", "chat", {"X_Hermes_Detach": "true"}, {}),
    ("header, stream", "chat stream", {"X_Hermes_Detach": "true"}, {}),
    ("header, response", "response stream", {"X_Hermes_Detach": "true"}, {}),
    ("setting", "chat stream", {}, {"on_disconnect": "detach"}),
    ("key of idempotency", "chat", {"Idempotency_Key": "once"}, {}),
    ("key, response", "response", {"Idempotency_Key": "once"}, {}),
]


@pytest.mark.parametrize(("kind", "headers", "options"), [row[1:] for row in GOES_ON], ids=[row[0] for row in GOES_ON])
async def test_detached_turn_continues_after_disconnect(
    start: Start, lost: LostConnections, kind: str, headers: dict[str, str], options: Json
) -> None:
    async with HeldModel(Reply(text=["Half", " an answer."])) as model:
        api = await start(settings=model.settings, **options)
        wire = await send(api, kind, X_Hermes_Session_Id="hall", **headers)
        await model.wait_for_request()
        model.release()
        await lost.leave(wire)
        assert model.open_streams == 1
        model.release_all()
        run = await the_run(api)
        assert (run["status"], run["output"]) == ("completed", "Half an answer.")
        assert [row["content"] for row in await rows(api, "hall")] == ["hi", "Half an answer."]
        if "response" in kind:

            async def get_stored() -> Json:
                async with api.get(f"{RESPONSES}/{run['response_id']}") as response:
                    return await read_json(response)

            await until(get_stored, lambda response: response["status"] == "completed")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/sessions/hall/chat", {"message": "hi"}), ("/api/sessions/hall/chat/stream", {"message": "hi"}),
     ("/v1/runs", {"input": "hi", "session_id": "hall"})],
)  # fmt: skip
async def test_session_turns_and_runs_continue_after_disconnect(
    start: Start, lost: LostConnections, path: str, body: Json
) -> None:
    async with HeldModel(Reply(text=["Half", " an answer."])) as model:
        api = await start(settings=model.settings)
        await read_json(await api.post("/api/sessions", {"id": "hall"}), 201)
        wire = await RawConnection.open(api.url)
        await wire.request("POST", path, body, Authorization=api.client.headers["Authorization"])
        await model.wait_for_request()
        await lost.leave(wire)
        assert model.open_streams == 1
        model.release_all()
        run = await the_run(api)
        assert (run["status"], run["output"]) == ("completed", "Half an answer.")


async def test_disconnect_of_run_reader_changes_nothing(start: Start, lost: LostConnections) -> None:
    async with HeldModel(Reply(text=["Half", " an answer."])) as model:
        api = await start(settings=model.settings)
        async with api.post(CHAT, user(stream=True)) as response:
            stream = Stream(response)
            model.release()
            await stream.until(lambda frame: chat_text([frame]) == "Half")
            watcher = await RawConnection.open(api.url)
            place = f"/v1/runs/{response.headers['X-Hermes-Run-Id']}/events"
            await watcher.request("GET", place, Authorization=api.client.headers["Authorization"])
            await watcher.read_until(b"Half")
            await lost.leave(watcher)
            model.release_all()
            assert chat_text(await stream.rest()) == " an answer."


# ---- a time of grace


async def test_disconnect_grace_ends_abandoned_turn(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with HeldModel(Reply(text=["Half", " an answer."])) as model:
        api = await start(settings=model.settings, disconnect_grace_seconds=0.5)
        engine, open_streams = api.app.engine, list[int]()
        has_subscribers = engine.has_subscribers

        def look(run_id: str) -> bool:
            open_streams.append(model.open_streams)
            return has_subscribers(run_id)

        monkeypatch.setattr(engine, "has_subscribers", look)
        wire = await send(api, "response stream")
        model.release()
        await wire.read_until(b"Half")
        wire.reset()
        await noticed(model)
        assert set(open_streams) == {1}, "while it waits for another reader, the turn goes on"
        assert (await the_run(api))["status"] == "cancelled"


@pytest.mark.parametrize("by", ["run", "response"])
async def test_disconnect_grace_keeps_turn_with_reader(start: Start, by: str) -> None:
    async with HeldModel(Reply(text=["Half", " an answer."])) as model:
        api = await start(settings=model.settings, disconnect_grace_seconds=DEADLINE_S)
        wire = await send(api, "response stream")
        model.release()
        await wire.read_until(b"Half")
        (run,) = await runs(api)
        wire.reset()
        place = {"run": f"/v1/runs/{run['run_id']}/events", "response": f"{RESPONSES}/{run['response_id']}?stream=true"}
        async with api.get(place[by]) as response:
            stream = Stream(response)
            await stream.next()
            # What the server does about the disconnect is decided then.
            await until(lambda: read_samples(api), lambda now: now["disconnects_total", "detach"])
            assert model.open_streams == 1
            model.release_all()
            frames: list[Any] = await stream.rest()
        assert "an answer." in str(frames[-2:])
        assert (await the_run(api))["status"] == "completed"


# ---- found gone twice


async def test_disconnect_is_handled_once(api: Api) -> None:
    spec = RunSpec("hi", "hall", on_detach="cancel")
    turn = Turn(api.context, None, spec, RequestOptions())  # type: ignore[arg-type]
    closed, closes = asyncio.Event(), 0

    async def run() -> None:
        nonlocal closes
        try:
            await asyncio.Event().wait()
        finally:
            closes += 1
            await closed.wait()

    running = asyncio.create_task(run())
    turn.run = CallbackRun(TurnQueue(), running, None, spec, [])
    leaving = asyncio.create_task(turn.leave())
    for _ in range(5):
        await asyncio.sleep(0)
        leaving.cancel()
    await until(lambda: closes)
    leaving.cancel()
    await idle()
    assert not leaving.done(), "the run is half stopped"
    closed.set()
    await asyncio.wait([leaving])
    assert leaving.cancelled() and running.cancelled() and closes == 1


async def test_detached_turn_starts_after_its_client_disconnects(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.model.script = [Reply(text="Hello.")]
    spec, engine, goes_on = RunSpec("hi", "hall", on_detach="continue"), api.app.engine, asyncio.Event()
    begin = engine.start

    async def start(*args: Any) -> Any:
        await goes_on.wait()
        return await begin(*args)

    monkeypatch.setattr(engine, "start", start)
    turn = Turn(api.context, None, spec, RequestOptions())  # type: ignore[arg-type]
    turn.admission = await engine.admit(spec)
    serving = asyncio.create_task(turn.finish())
    for _ in range(5):
        await asyncio.sleep(0)
        serving.cancel()
    await idle()
    assert not serving.done(), "it has not begun yet, and is to go on"
    goes_on.set()
    await asyncio.wait([serving])
    assert serving.cancelled()
    await engine.wait(spec.run_id, DEADLINE_S)
    assert (await the_run(api))["status"] == "completed"


@pytest.mark.parametrize("detached", [True, False])
async def test_disconnect_before_first_store_of_response(
    start: Start, monkeypatch: pytest.MonkeyPatch, detached: bool
) -> None:
    async with HeldModel(Reply(text="Hello.")) as model:
        api = await start(settings=model.settings)
        responses_type, reached = type(api.context.stored_responses), asyncio.Event()
        put = responses_type.put

        async def stuck(*_: Any) -> None:
            monkeypatch.setattr(responses_type, "put", put)
            reached.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(responses_type, "put", stuck)
        wire = await send(api, "response stream", **({"X_Hermes_Detach": "true"} if detached else {}))
        await reached.wait()
        await model.wait_for_request()
        wire.reset()
        if detached:
            model.release_all()
        run = await the_run(api)
        assert run["status"] == ("completed" if detached else "cancelled"), run
        end = "completed" if detached else "incomplete"
        await until(lambda: response_of(api, run), lambda value: value["status"] == end)


async def response_of(api: Api, run: Json) -> Json:
    async with api.get(f"{RESPONSES}/{run['response_id']}") as response:
        return dict(await response.json()) if response.status == 200 else {"status": ""}
