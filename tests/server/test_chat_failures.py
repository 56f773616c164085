"""Failed turns: the errors of chat completions, plain and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hermes.agent import decisions
from support.model_server import Call, Reply, Request
from support.waiting import until
from support.wire import body_bytes

from .clients import HeldModel, Json, Stream, chat_text, check_envelope, read_error, read_json, stream_of, user
from .conftest import Api, Start

CHAT = "/v1/chat/completions"
TODO = Call("todo", {"todos": [{"id": "1", "content": "tea", "status": "pending"}]})
FLAGS = {"completed", "partial", "failed", "interrupted", "error", "error_code"}
OVERFLOW = {"code": "context_length_exceeded", "message": "This model's maximum context length is 10 tokens."}
POLICY = {"code": "content_policy_violation", "message": "Your request was rejected by the safety system."}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits between attempts, and a lost connection is not tried again."""
    monkeypatch.setattr(decisions, "RETRY_WAIT_S_MAX", 0.01)
    monkeypatch.setenv("HERMES_STREAM_RETRIES", "0")


FAILURES: list[tuple[Reply, int, str]] = [
    (Reply(status=401, error="bad key"), 502, "provider_auth_failed"),
    (Reply(status=402, error="pay first"), 502, "provider_quota_exceeded"),
    (Reply(status=403, error="not you"), 502, "provider_rejected_request"),
    (Reply(status=404, error="no such model"), 502, "provider_model_not_found"),
    (Reply(status=400, error="nonsense"), 502, "provider_rejected_request"),
    (Reply(status=500, error="oops"), 502, "provider_unavailable"),
    (Reply(status=503, error="overloaded"), 502, "provider_unavailable"),
    (Reply(reset_before_headers=True), 502, "provider_unavailable"),
    (Reply(status=429, error="slow down", headers={"Retry-After": "7"}), 503, "provider_rate_limited"),
    (Reply(status=408, error="too late"), 504, "provider_timeout"),
    (Reply(status=504, error="too late"), 504, "provider_timeout"),
    (Reply(status=400, error=OVERFLOW), 400, "context_length_exceeded"),
    (Reply(status=400, error=POLICY), 400, "content_policy_violation"),
    (Reply(text="", finish="content_filter"), 400, "content_policy_violation"),
    (Reply(text=""), 502, "agent_incomplete"),
    (Reply(text="", finish="length"), 502, "agent_incomplete"),
]
NAMES = [f"{reply.status} {code}" for reply, _, code in FAILURES]


def check_flags(flags: Json, code: str, **known: bool) -> None:
    assert set(flags) == FLAGS
    assert flags["completed"] is False
    assert flags["error"]
    assert flags["error_code"] == code
    assert {name: flags[name] for name in known} == known


@pytest.mark.parametrize(("reply", "status", "code"), FAILURES, ids=NAMES)
async def test_chat_failure_without_text_is_http_error(api: Api, reply: Reply, status: int, code: str) -> None:
    api.model.handler = lambda _: reply
    async with api.post(CHAT, user()) as response:
        error = await read_error(response, status, code)
        headers = response.headers
    own = "output_truncated" if reply.finish == "length" else "content_filter" if reply.finish else code
    assert error["hermes"]["error_code"] in (code, own)
    assert set(error["hermes"]) >= FLAGS
    assert error["hermes"]["completed"] is False
    assert headers["X-Hermes-Completed"] == "false"
    assert headers["X-Hermes-Partial"] in ("true", "false")
    assert len(headers["X-Hermes-Error"]) <= 200
    assert headers["x-should-retry"] == "false"
    assert headers["X-Hermes-Run-Id"].startswith("run_")
    assert headers.get("Retry-After") == ("7" if status == 503 else None)


@pytest.mark.parametrize(("reply", "status", "code"), FAILURES, ids=NAMES)
async def test_chat_stream_failure_is_in_last_chunk(api: Api, reply: Reply, status: int, code: str) -> None:
    api.model.handler = lambda _: reply
    async with api.post(CHAT, user(stream=True)) as response:
        frames = await stream_of(response)
    assert frames[-1].data == "[DONE]"
    assert chat_text(frames) == ""
    ends = [f.data for f in frames[:-1] if f.data["choices"] and f.data["choices"][0]["finish_reason"]]
    assert [end["choices"][0]["finish_reason"] for end in ends] == ["error"]
    assert check_envelope(status, ends[0])["code"] == code
    assert ends[0]["hermes"]["completed"] is False


async def test_failed_turn_keeps_question_and_marks_turn(api: Api) -> None:
    api.model.script = [Reply(status=401, error="bad key"), Reply(text="Better.")]
    headers = {"X-Hermes-Session-Id": "hall"}
    async with api.post(CHAT, user("one"), headers=headers) as response:
        await read_error(response, 502, "provider_auth_failed")
    async with api.post(CHAT, user("two"), headers=headers) as response:
        await read_json(response)
    async with api.get("/api/sessions/hall/messages") as response:
        rows = (await read_json(response))["data"]
    assert [(row["role"], row["synthetic"]) for row in rows] == [
        ("user", False),
        ("assistant", True),
        ("user", False),
        ("assistant", False),
    ]
    assert rows[1]["content"].startswith("[The turn failed: ")
    assert "bad key" not in rows[1]["content"]


async def test_turn_timeout(start: Start) -> None:
    async with HeldModel(Reply(text="Hello.")) as model:
        api = await start(settings=model.settings, turn_timeout_seconds=0.3)
        async with api.post(CHAT, user()) as response:
            await read_error(response, 504, "turn_timeout")


async def test_turn_timeout_after_some_text(start: Start) -> None:
    async with HeldModel(Reply(text=["Half", " an answer."])) as model:
        api = await start(settings=model.settings, turn_timeout_seconds=300)
        asking = asyncio.create_task(api.client.post(api.url + CHAT, json=user()))
        await model.wait_for_request()
        model.release()
        [live] = api.app.engine.by_id.values()
        await until(lambda: live.log.first_delta_at)
        assert live.spec.deadline_seconds == 300 and live.deadline_timer is not None
        live.deadline_timer._run()  # its time is over now
        async with await asking as response:
            body = await read_json(response)
        check_flags(body["hermes"], "turn_timeout", partial=True, failed=True)
        assert body["choices"][0]["finish_reason"] == "error"
        assert body["choices"][0]["message"]["content"] == "Half"


async def test_client_can_shorten_turn_timeout(start: Start) -> None:
    async with HeldModel(Reply(text="Hello.")) as model:
        api = await start(settings=model.settings)
        async with api.post(CHAT, user(), headers={"X-Hermes-Timeout": "1"}) as response:
            await read_error(response, 504, "turn_timeout")


# ---- text, but no good end


@pytest.mark.parametrize(
    ("reply", "fields", "finish", "code"),
    [
        (Reply(text="Half an", finish="length"), {"max_tokens": 20}, "length", "output_truncated"),
        (Reply(text="", finish="length"), {"max_tokens": 20}, "length", "output_truncated"),
        (Reply(text="Half an", finish="content_filter"), {}, "content_filter", "content_filter"),
    ],
)
async def test_truncated_answer_is_marked(api: Api, reply: Reply, fields: Json, finish: str, code: str) -> None:
    api.model.handler = lambda _: reply
    async with api.post(CHAT, user("plain", **fields)) as response:
        body = await read_json(response)
        assert response.headers["X-Hermes-Completed"] == "false"
        assert response.headers["X-Hermes-Partial"] == "true"
        assert response.headers["X-Hermes-Error"]
    assert len(api.model.requests) == 1
    assert body["choices"][0]["finish_reason"] == finish
    assert body["choices"][0]["message"]["content"] == reply.text
    check_flags(body["hermes"], code, partial=True, failed=False, interrupted=False)
    async with api.post(CHAT, user("streamed", stream=True, **fields)) as response:
        frames = await stream_of(response)
    end = next(f.data for f in frames[:-1] if f.data["choices"] and f.data["choices"][0]["finish_reason"])
    assert end["choices"][0]["finish_reason"] == finish
    check_flags(end["hermes"], code, partial=True)
    assert "error" not in end


async def test_strict_client_sees_no_error_in_truncated_stream(api: Api) -> None:
    """Some clients take any frame with a field `error` for a failure."""
    api.model.handler = lambda _: Reply(text="Half an", finish="length")
    strict = {"User-Agent": "node"}
    async with api.post(CHAT, user("streamed", stream=True, max_tokens=20), headers=strict) as response:
        frames = (await response.text()).split("\n\n")
    assert not any('"error":' in frame for frame in frames)
    (end,) = [json.loads(frame.removeprefix("data: ")) for frame in frames if '"hermes"' in frame]
    assert (end["choices"][0]["finish_reason"], end["hermes"]["error_code"]) == ("length", "output_truncated")


async def test_provider_truncation_is_continued(api: Api) -> None:
    text = "A rather long answer that comes in two parts."
    api.model.script = [Reply(text=text[:20], finish="length"), Reply(text=text)]
    async with api.post(CHAT, user()) as response:
        body = await read_json(response)
    assert body["choices"][0]["message"]["content"] == text
    assert "hermes" not in body


async def test_max_iterations_is_reported_with_summary(start: Start) -> None:
    def reply(request: Request) -> Reply:
        return Reply(tool_calls=[TODO]) if request.body.get("tools") else Reply(text="Not done yet.")

    api = await start(handler=reply, settings={"agent": {"max_turns": 2, "api_max_retries": 0}})
    async with api.post(CHAT, user()) as response:
        body = await read_json(response)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"] == "Not done yet."
    check_flags(body["hermes"], "max_iterations", partial=True, failed=False)


@pytest.fixture
def half() -> Any:
    """A provider that breaks off after some text, and is then gone."""
    reply = Reply(text=["Half an answer ", "and more"])

    def handle(request: Request) -> Reply:
        if request.number > 1:
            return Reply(status=500, error="gone")
        body = body_bytes(request.protocol, reply, request.body, request.key)
        return Reply(text=reply.text, cut_at=body.index(b"and more") - 60)

    return handle


async def test_failure_after_text_keeps_text(start: Start, half: Any) -> None:
    api = await start(handler=half)
    async with api.post(CHAT, user()) as response:
        body = await read_json(response)
        assert response.headers["x-should-retry"] == "false"
    assert body["choices"][0]["finish_reason"] == "error"
    assert body["choices"][0]["message"]["content"] == "Half an answer "
    assert "gone" not in body["choices"][0]["message"]["content"]
    check_flags(body["hermes"], "provider_unavailable", partial=True, failed=True)


async def test_failure_after_streamed_text_ends_stream_in_order(start: Start, half: Any) -> None:
    api = await start(handler=half)
    async with api.post(CHAT, user(stream=True)) as response:
        frames = await stream_of(response)
    assert chat_text(frames) == "Half an answer "
    end = next(f.data for f in frames[:-1] if f.data["choices"] and f.data["choices"][0]["finish_reason"])
    assert end["choices"][0]["finish_reason"] == "error"
    assert check_envelope(502, end)["code"] == "provider_unavailable"
    check_flags(end["hermes"], "provider_unavailable", failed=True)
    assert frames[-1].data == "[DONE]"


# ---- an agent that raises


async def test_agent_exception_is_500(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(**_: Any) -> Any:
        raise RuntimeError("Provider failed with sk-abcdefghijklmnopqrstuvwxyz0123456789")

    monkeypatch.setattr(api.adapter, "_run_agent", broken)
    async with api.post(CHAT, user()) as response:
        error = await read_error(response, 500, "agent_error")
    assert "Provider failed" in error["message"]
    assert "sk-abc" not in error["message"]
    async with api.post(CHAT, user(stream=True)) as response:
        frames = await stream_of(response)
    end = frames[-2].data
    assert end["choices"][0]["finish_reason"] == "error"
    assert "Provider failed" in check_envelope(500, end)["message"]
    assert "sk-abc" not in str(frames)
    assert frames[-1].data == "[DONE]"


# ---- stopped through its run


async def test_interrupted_turn_keeps_text(start: Start) -> None:
    async with HeldModel(*[Reply(text=["Half", " an answer."])] * 2) as model:
        api = await start(settings=model.settings)
        async with api.post(CHAT, user("streamed", stream=True)) as response:
            stream = Stream(response)
            model.release()
            await stream.until(lambda frame: chat_text([frame]) == "Half")
            async with api.post(f"/v1/runs/{response.headers['X-Hermes-Run-Id']}/stop") as stopped:
                assert (await read_json(stopped))["status"] == "stopping"
            rest = await stream.rest()
        end = next(f.data for f in rest[:-1] if f.data["choices"] and f.data["choices"][0]["finish_reason"])
        assert end["choices"][0]["finish_reason"] == "stop"
        check_flags(end["hermes"], "interrupted", interrupted=True)

        plain = asyncio.create_task(api.client.post(api.url + CHAT, json=user("plain")))
        await model.wait_for_request(2)
        async with api.get("/v1/runs?status=running") as response:
            (run,) = (await read_json(response))["data"]
        async with api.post(f"/v1/runs/{run['run_id']}/stop") as stopped:
            await read_json(stopped)
        await read_error(await plain, 409, "turn_cancelled")


# ---- clients that look for an error in a frame of its own only

BROKEN = [
    pytest.param([Reply(status=500, error="oops")], "", "provider_unavailable", id="refused"),
    pytest.param([Reply(text="Half", cut_at=10**6, error_event={})], "Half", "provider_unavailable", id="mid-text"),
    pytest.param(
        [Reply(tool_calls=[TODO]), Reply(status=401, error="x")], "", "provider_auth_failed", id="after tools"
    ),
]


@pytest.mark.parametrize("agent", ["Go-http-client/2.0", "node", "Bun/1.2", "OpenAI/JS 5.0"])
@pytest.mark.parametrize(("script", "text", "code"), BROKEN)
async def test_strict_client_gets_stream_error_as_own_frame(
    api: Api, agent: str, script: list[Reply], text: str, code: str
) -> None:
    api.model.script, api.model.repeat = list(script), True
    async with api.post(CHAT, user("x", stream=True), headers={"User-Agent": agent}) as response:
        frames = await stream_of(response)
    *before, error, finish, result = frames
    assert chat_text([*before, finish, result]) == text
    assert (error.event, list(error.data), error.data["error"]["code"]) == (None, ["error"], code)
    assert finish.data["choices"][0]["finish_reason"] == "error"
    assert finish.data["error"] == error.data["error"]
    assert result.data == "[DONE]"
    assert all(frame.event is None for frame in frames)


@pytest.mark.parametrize(("script", "text", "code"), BROKEN)
async def test_other_clients_get_stream_error_in_finish_chunk(
    api: Api, script: list[Reply], text: str, code: str
) -> None:
    api.model.script, api.model.repeat = list(script), True
    async with api.post(CHAT, user("x", stream=True), headers={"User-Agent": "curl/8.0"}) as response:
        frames = await stream_of(response)
    chunks = [frame.data for frame in frames[:-1] if frame.event is None]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert chunks[-1]["error"]["code"] == code


# ---- reasoning without an answer


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_only_answer_gives_labelled_excerpt(api: Api, path: str, stream: bool) -> None:
    api.model.script, api.model.repeat = [Reply(reasoning="It must be four.")], True
    body = {**(user("x") if path == CHAT else {"input": "x"}), "stream": stream}
    async with api.post(path, body, headers={"User-Agent": "curl/8.0"}) as response:
        text = (await response.text()).replace('": ', '":')
        assert response.status == 200, text
    assert "The model ended without an answer" in text
    assert "It must be four." in text
    assert ('"finish_reason":"stop"' if path == CHAT else '"status":"completed"') in text
    assert '"error":' not in text.replace('"error":null', "")
