"""Questions of the agent to its user: told where somebody can answer, answered through the run, and never left open."""

from __future__ import annotations

import asyncio

import pytest

from support.model_server import Call, Reply

from .clients import HeldModel, Json, Stream, refused, sent, stream_of, told, user
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
        return await told(response)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_question_is_told_on_a_stream_and_answered_through_the_run(api: Api, kind: str) -> None:
    path, body, name = KINDS[kind]
    api.model.script = [Reply(tool_calls=[ASKS]), Reply(text="The hall it is.")]
    async with api.post(path, body, headers=PLAIN) as response:
        run_id = response.headers["X-Hermes-Run-Id"]
        stream = Stream(response)
        asked = (await stream.until(lambda frame: frame.event == name))[-1].data
        assert (asked["question"], asked["choices"]) == ("Which room?", ["hall", "garden"])
        assert {"request_id", "tool_call_id", "expires_at"} <= set(asked)
        if kind == "response":
            assert asked["type"] == name
        async with api.get("/v1/runs?status=waiting_for_input") as listed:
            (run,) = (await told(listed))["data"]
        assert (run["run_id"], run["pending_question"]["request_id"]) == (run_id, asked["request_id"])
        told_back = await answer(api, run_id, request_id=asked["request_id"], answer="hall")
        assert told_back["object"] == "hermes.run.clarify_response"
        rest = await stream.rest()
    assert "The hall it is." in str(rest)
    assert "hall" in sent(api.model.requests[1], "tool")[0][1]
    async with api.post(f"/v1/runs/{run_id}/clarify", {"answer": "garden"}) as response:
        await refused(response, 409, "clarify_not_pending")


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
async def test_where_nobody_can_answer_a_question_is_answered_at_once(api: Api, number: int) -> None:
    path, body, headers = UNATTENDED[number]
    api.model.script = [Reply(tool_calls=[ASKS]), Reply(text="Then I choose.")]
    async with api.post(path, body, headers=headers) as response:
        text = await response.text()
    assert "Then I choose." in text
    assert "clarify" not in [line for line in text.split("\n") if line.startswith("event:")]
    assert len(sent(api.model.requests[1], "tool")) == 1


async def test_a_plain_request_may_wait_for_an_answer(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[ASKS]), Reply(text="The hall it is.")]
    turn = asyncio.create_task(
        api.client.post(api.url + CHAT, json=user("light"), headers={"X-Hermes-Approvals": "wait"})
    )
    async with asyncio.timeout(5):
        runs: list[Json] = []
        while not runs:
            async with api.get("/v1/runs?status=waiting_for_input") as response:
                runs = (await told(response))["data"]
    await answer(api, runs[0]["run_id"], answer="hall")
    assert (await told(await turn))["choices"][0]["message"]["content"] == "The hall it is."


async def test_an_old_question_is_left_unanswered(start: Start) -> None:
    api = await start(settings={"agent": {"clarify_timeout": 0.1, "api_max_retries": 0}})
    api.model.script = [Reply(tool_calls=[ASKS]), Reply(text="Then I choose.")]
    async with api.post(CHAT, user("light", stream=True), headers=PLAIN) as response:
        assert "Then I choose." in str(await stream_of(response))


async def test_a_stopped_turn_leaves_no_question(start: Start) -> None:
    async with HeldModel(Reply(tool_calls=[ASKS])) as model:
        model.let_all()
        api = await start(settings=model.settings)
        async with api.post(CHAT, user("light", stream=True), headers=PLAIN) as response:
            run_id = response.headers["X-Hermes-Run-Id"]
            stream = Stream(response)
            await stream.until(lambda frame: frame.event == "hermes.clarify.request")
            await told(await api.post(f"/v1/runs/{run_id}/stop"))
            await stream.rest()
        async with api.get(f"/v1/runs/{run_id}") as response:
            run = await told(response)
        assert (run["status"], run["pending_question"]) == ("cancelled", None)
