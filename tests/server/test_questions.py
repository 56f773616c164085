"""Questions to the user: sent where they can be answered, answered through the run, and never left open."""

from __future__ import annotations

import asyncio

import pytest

from support.model_server import Call, Reply
from support.waiting import until

from .clients import HeldModel, Json, Stream, pieces, read_error, read_json, sent_messages, stream_of, user
from .conftest import Api, Start

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASKS = Call("clarify", {"question": "Which room?", "choices": ["hall", "garden"]}, id="call_ask")
PLAIN = {"User-Agent": "curl/8.0"}
KINDS: dict[str, tuple[str, Json, str]] = {
    "chat": (CHAT, user("light", stream=True), "hermes.clarify.request"),
    "response": (RESPONSES, {"input": "light", "stream": True}, "hermes:clarify_request"),
}


async def answer(api: Api, run_id: str, **body: str) -> Json:
    async with api.post(f"/v1/runs/{run_id}/clarify", body) as response:
        return await read_json(response)


@pytest.mark.parametrize("kind", KINDS)
async def test_clarify_question_on_stream_is_answered_through_run(api: Api, kind: str) -> None:
    path, body, name = KINDS[kind]
    api.model.script = [Reply(tool_calls=[ASKS]), Reply(text="The hall it is.")]
    async with api.post(path, body, headers=PLAIN) as response:
        run_id = response.headers["X-Hermes-Run-Id"]
        stream = Stream(response)
        request = (await stream.until(lambda frame: frame.event == name))[-1].data
        assert (request["question"], request["choices"]) == ("Which room?", ["hall", "garden"])
        assert {"request_id", "tool_call_id", "expires_at"} <= set(request)
        if kind == "response":
            assert request["type"] == name
        async with api.get("/v1/runs?status=waiting_for_input") as listed:
            (run,) = (await read_json(listed))["data"]
        assert (run["run_id"], run["pending_question"]["request_id"]) == (run_id, request["request_id"])
        told_back = await answer(api, run_id, request_id=request["request_id"], answer="hall")
        assert told_back["object"] == "hermes.run.clarify_response"
        rest = await stream.rest()
    assert "The hall it is." in str(rest)
    assert "hall" in sent_messages(api.model.requests[1], "tool")[0][1]
    async with api.post(f"/v1/runs/{run_id}/clarify", {"answer": "garden"}) as response:
        await read_error(response, 409, "clarify_not_pending")


UNATTENDED: list[tuple[str, Json, dict[str, str]]] = [
    (CHAT, user("light"), PLAIN),
    (CHAT, user("light", stream=True), {**PLAIN, "X-Hermes-Tool-Progress": "off"}),
    (CHAT, user("light", stream=True), {"User-Agent": "OpenAI/Python 2"}),
    (CHAT, user("light", stream=True), {**PLAIN, "X-Hermes-Approvals": "deny"}),
    (RESPONSES, {"input": "light"}, PLAIN),
    (RESPONSES, {"input": "light", "stream": True}, {"X-Stainless-Lang": "python"}),
    (RESPONSES, {"input": "light", "stream": True}, {**PLAIN, "X-Hermes-Approvals": "deny"}),
]


@pytest.mark.parametrize("number", range(len(UNATTENDED)))
async def test_clarify_without_listener_is_answered_immediately(api: Api, number: int) -> None:
    path, body, headers = UNATTENDED[number]
    api.model.script = [Reply(tool_calls=[ASKS]), Reply(text="Then I choose.")]
    async with api.post(path, body, headers=headers) as response:
        text = await response.text()
    assert "Then I choose." in text
    assert "clarify" not in [line for line in text.split("\n") if line.startswith("event:")]
    assert len(sent_messages(api.model.requests[1], "tool")) == 1


async def test_clarify_on_plain_request_can_wait(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[ASKS]), Reply(text="The hall it is.")]
    turn = asyncio.create_task(
        api.client.post(api.url + CHAT, json=user("light"), headers={"X-Hermes-Approvals": "wait"})
    )

    async def waiting() -> list[Json]:
        async with api.get("/v1/runs?status=waiting_for_input") as response:
            runs: list[Json] = (await read_json(response))["data"]
            return runs

    [run] = await until(waiting)
    await answer(api, run["run_id"], answer="hall")
    assert (await read_json(await turn))["choices"][0]["message"]["content"] == "The hall it is."


async def test_clarify_timeout(start: Start) -> None:
    api = await start(settings={"agent": {"clarify_timeout": 0.1, "api_max_retries": 0}})
    api.model.script = [Reply(tool_calls=[ASKS]), Reply(text="Then I choose.")]
    async with api.post(CHAT, user("light", stream=True), headers=PLAIN) as response:
        assert "Then I choose." in str(await stream_of(response))


async def test_interrupt_closes_clarify_question(start: Start) -> None:
    async with HeldModel(Reply(tool_calls=[ASKS])) as model:
        model.release_all()
        api = await start(settings=model.settings)
        async with api.post(CHAT, user("light", stream=True), headers=PLAIN) as response:
            run_id = response.headers["X-Hermes-Run-Id"]
            stream = Stream(response)
            await stream.until(lambda frame: frame.event == "hermes.clarify.request")
            await read_json(await api.post(f"/v1/runs/{run_id}/stop"))
            await stream.rest()
        async with api.get(f"/v1/runs/{run_id}") as response:
            run = await read_json(response)
        assert (run["status"], run["pending_question"]) == ("cancelled", None)


# ---- leave to do something

SESSIONS = "/api/sessions/{}/chat/stream"
# surface: where the turn is asked for, how, and how it tells that leave is wanted
LEAVE: dict[str, tuple[str, Json, str]] = {
    "run": ("/v1/runs", {"input": "clean"}, "approval.request"),
    "chat": (CHAT, user("clean", stream=True), "hermes.approval.request"),
    "response": (RESPONSES, {"input": "clean", "stream": True}, "hermes:approval_request"),
    "session": (SESSIONS, {"message": "clean"}, "approval.request"),
}
# choice: who is on record for it, whether it was done, and whether the session's next turn, and another session's, asks
CHOICES: dict[str, tuple[str, bool, bool, bool]] = {
    "once": ("user", True, True, True),
    "session": ("user", True, False, True),
    "always": ("user", True, False, False),
    "deny": ("user", False, True, True),
    "": ("timeout", False, True, True),
}


async def cleaned(api: Api, surface: str, session: str, choice: str) -> tuple[str, Json | None]:
    """A turn that deletes a folder, and what it asked; whoever is asked makes this choice, or none."""
    (api.app.home.workspace / "build").mkdir(parents=True, exist_ok=True)
    call = Call("terminal", {"command": "rm -r build"})
    api.model.script = [Reply(tool_calls=[call]), Reply(text="So be it.", continues=False)]
    path, body, name = LEAVE[surface]
    headers = PLAIN if surface == "session" else {**PLAIN, "X-Hermes-Session-Id": session}
    following = api.post(path.format(session), body, headers=headers)
    if surface == "run":
        async with following as response:
            place = (await read_json(response, 202))["run_id"]
        following = api.get(f"/v1/runs/{place}/events?event_names=true")
    request: Json | None = None
    async with following as response:
        run_id = response.headers["X-Hermes-Run-Id"]
        async for frame in pieces(response):
            if frame.event == name:
                assert request is None, "one question, once"
                request = dict(frame.data)
                if choice:
                    decision = {"choice": choice, "approval_id": request["approval_id"]}
                    async with api.post(f"/v1/runs/{run_id}/approval", decision) as answer:
                        assert (await read_json(answer))["resolved"] == 1
    return run_id, request


async def on_record(api: Api, run_id: str) -> Json:
    """How the one question of a run was decided."""
    [event] = [event for event in await api.app.engine.durable(run_id) if event.type == "approval.resolved"]
    return dict(event.data)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("surface", LEAVE)
async def test_approval_choices_over_api(start: Start, surface: str, choice: str) -> None:
    api = await start(approval_timeout_seconds=300 if choice else 0.1)
    for session in ("hall", "attic"):
        await read_json(await api.post("/api/sessions", {"id": session}), 201)
    by, result, again, elsewhere = CHOICES[choice]
    run_id, request = await cleaned(api, surface, "hall", choice)
    assert request is not None and request["choices"] == ["once", "session", "always", "deny"]
    assert (api.app.home.workspace / "build").exists() is not result
    record = await on_record(api, run_id)
    assert (record["choice"], record["by"]) == (choice or "deny", by)
    assert (record["approval_id"], record["surface"]) == (request["approval_id"], "api" if choice else "")
    for session, asks in (("hall", again), ("attic", elsewhere)):
        run_id, request = await cleaned(api, surface, session, choice and "deny")
        assert (request is not None) is asks is (api.app.home.workspace / "build").exists()
        assert (await on_record(api, run_id))["by"] == (by if asks else "rule")
