"""A chat that ends with the assistant's message is gone on with: the answer is the rest of that message."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hermes.providers import registry
from hermes.providers.base import Route
from hermes.providers.registry import Prefill
from support.model_server import Call, ModelServer, Reply

from .clients import Json, function, read_error, read_json
from .conftest import PROVIDER_KEY, Api, Start

CHAT = "/v1/chat/completions"
GO_ON = "Go on exactly where it ended"
TODO = Call("todo", {"todos": [{"id": "1", "content": "tea", "status": "pending"}]}, id="call_todo")


def message(role: str, content: Any, **more: Any) -> Json:
    return {"role": role, "content": content, **more}


def model_messages(api: Api) -> list[Json]:
    first, *rest = api.model.requests[-1].body["messages"]
    assert first["role"] == "system"
    return rest


async def ask(api: Api, *messages: Json, headers: Json | None = None, **fields: Any) -> tuple[Any, str]:
    body = {"messages": list(messages), **fields}
    async with api.post(CHAT, body, headers=headers or {}) as response:
        answer = await read_json(response)
        return answer["choices"][0]["message"]["content"], response.headers["X-Hermes-Session-Id"]


async def transcript(api: Api, session_id: str) -> list[tuple[str, Any]]:
    async with api.get(f"/api/sessions/{session_id}/messages") as response:
        return [(row["role"], row["content"]) for row in (await read_json(response))["data"]]


STORY, BEGUN = message("user", "a story"), message("assistant", "Once upon a ")


async def test_assistant_continuation_returns_rest(api: Api) -> None:
    api.model.script = [Reply(text="time."), Reply(text="The end.")]
    answer, first = await ask(api, STORY, BEGUN)
    assert answer == "time."
    question, partial, more = model_messages(api)
    assert (question, partial) == (STORY, BEGUN)
    assert more["role"] == "user"
    assert GO_ON in more["content"]
    whole = message("assistant", "Once upon a time.")
    assert await transcript(api, first) == [("user", "a story"), ("assistant", "Once upon a time.")]
    _, second = await ask(api, STORY, whole, message("user", "and?"))
    assert second == first
    assert model_messages(api) == [STORY, whole, message("user", "and?")]


async def test_assistant_continuation_extends_answer_in_session(api: Api) -> None:
    api.model.script = [Reply(text="Once upon a "), Reply(text="time"), Reply(text=" there was."), Reply(text="Yes.")]
    _, first = await ask(api, STORY)
    for partial, more in (("Once upon a ", "time"), ("Once upon a time", " there was.")):
        answer, session_id = await ask(api, STORY, message("assistant", partial))
        assert (answer, session_id) == (more, first)
    whole = ("assistant", "Once upon a time there was.")
    assert await transcript(api, first) == [("user", "a story"), whole]
    _, second = await ask(api, STORY, message(*whole), message("user", "and?"))
    assert second == first
    async with api.get(f"/api/sessions/{first}") as response:
        assert (await read_json(response))["session"]["message_count"] == 4


async def test_assistant_continuation_stream_has_only_rest(api: Api) -> None:
    api.model.script = [Reply(text="time.")]
    async with api.post(CHAT, {"messages": [STORY, BEGUN], "stream": True}) as response:
        frames = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: {")]
        run_id = response.headers["X-Hermes-Run-Id"]
    deltas = [choice["delta"].get("content") or "" for frame in frames for choice in frame["choices"]]
    assert "".join(deltas) == "time."
    events = [event async for event in api.app.engine.subscribe(run_id)]
    assert "".join(event.data["text"] for event in events if event.type == "text.delta") == "time."


async def test_assistant_continuation_drops_repetition(api: Api) -> None:
    beginning = "It was a dark and stormy night, and the rain fell in torrents"
    api.model.script = [Reply(text="and the rain fell in torrents, except at times.")]
    assert (await ask(api, STORY, message("assistant", beginning)))[0] == ", except at times."


async def test_assistant_continuation_with_tools(api: Api) -> None:
    api.model.script = [Reply(text="time", tool_calls=[TODO]), Reply(text="The end."), Reply(text="Yes.")]
    answer, first = await ask(api, STORY, BEGUN)
    assert answer == "The end."
    question, called, result = model_messages(api)
    assert (question, called["content"]) == (STORY, "Once upon a time")
    assert result["tool_call_id"] == called["tool_calls"][0]["id"] == "call_todo"
    whole = message("assistant", "Once upon a time\n\nThe end.")
    _, second = await ask(api, STORY, whole, message("user", "and?"))
    assert second == first
    assert [message["role"] for message in model_messages(api)] == ["user", "assistant", "tool", "assistant", "user"]


async def test_assistant_continuation_with_nothing_to_add(api: Api) -> None:
    api.model.script = [Reply(text="", finish="stop")]
    answer, session_id = await ask(api, STORY, message("assistant", "The end."))
    assert answer == ""
    assert await transcript(api, session_id) == [("user", "a story"), ("assistant", "The end.")]


@pytest.mark.parametrize("headers", [{}, {"X-Hermes-Session-Id": "tale"}])
async def test_assistant_continuation_failure_keeps_message(api: Api, headers: Json) -> None:
    api.model.script = [Reply(status=400), Reply(text="time.")]
    async with api.post(CHAT, {"messages": [STORY, BEGUN]}, headers=headers) as response:
        assert response.status == 502
        first = response.headers["X-Hermes-Session-Id"]
    assert (await transcript(api, first))[:2] == [("user", "a story"), ("assistant", "Once upon a ")]
    assert await ask(api, STORY, BEGUN, headers=headers) == ("time.", first)
    assert model_messages(api)[:2] == [STORY, BEGUN]
    assert await transcript(api, first) == [("user", "a story"), ("assistant", "Once upon a time.")]


async def test_assistant_continuation_without_session(api: Api) -> None:
    api.model.script = [Reply(text="time.")]
    assert (await ask(api, STORY, BEGUN, store=False))[0] == "time."
    assert model_messages(api)[:2] == [STORY, BEGUN]
    async with api.get("/api/sessions") as response:
        assert (await read_json(response))["data"] == []


async def test_assistant_continuation_in_named_session(api: Api) -> None:
    api.model.script = [Reply(text="Once upon a "), Reply(text="time."), Reply(text="Yes.")]
    named = {"X-Hermes-Session-Id": "tale"}
    await ask(api, STORY, headers=named)
    assert (await ask(api, STORY, BEGUN, headers=named))[0] == "time."
    assert model_messages(api)[:2] == [STORY, BEGUN]
    await ask(api, message("user", "and?"), headers=named)
    assert model_messages(api) == [STORY, message("assistant", "Once upon a time."), message("user", "and?")]


async def test_assistant_continuation_seeds_named_session(api: Api) -> None:
    api.model.script = [Reply(text="time.")]
    assert (await ask(api, STORY, BEGUN, headers={"X-Hermes-Session-Id": "tale"}))[0] == "time."
    assert await transcript(api, "tale") == [("user", "a story"), ("assistant", "Once upon a time.")]


@pytest.mark.parametrize("content", ["", " \n", None])
async def test_assistant_continuation_of_empty_message(api: Api, content: Any) -> None:
    api.model.script = [Reply(text="Once.")]
    assert (await ask(api, STORY, message("assistant", content)))[0] == "Once."
    assert model_messages(api) == [STORY]


@pytest.mark.parametrize(
    ("messages", "code", "param"),
    [
        ([message("system", "be brief")], "missing_user_message", "messages"),
        ([message("system", "be brief"), message("assistant", "Hello")], "missing_user_message", "messages"),
        (
            [
                STORY,
                message("assistant", None, tool_calls=[{"id": "c1", "type": "function", "function": {"name": "lamp"}}]),
            ],
            "tool_output_missing",
            "tool_call_id",
        ),
        (
            [STORY, message("assistant", [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}])],
            "unsupported_value",
            "messages[1].content",
        ),
    ],
)
async def test_invalid_assistant_continuation_is_rejected(
    api: Api, messages: list[Json], code: str, param: str
) -> None:
    async with api.post(CHAT, {"messages": messages, "tools": [function("lamp")]}) as response:
        error = await read_error(response, 400, code, param)
    if code == "missing_user_message":
        assert "'role': 'user'" in error["message"]


PREFIX = Prefill(message={"prefix": True})


@pytest.mark.parametrize(
    ("route", "how", "reply", "last", "more"),
    [
        (
            {"provider": "anthropic", "model": "claude-3-5-sonnet"},
            None,
            "time.",
            message("assistant", [{"type": "text", "text": "Once upon a"}]),
            {},
        ),
        (
            {"provider": "vllm"},
            None,
            "time.",
            BEGUN,
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
        ({"provider": "openai-like"}, PREFIX, "time.", {**BEGUN, "prefix": True}, {}),
        (
            {"provider": "openai-like"},
            replace(PREFIX, echoes=True),
            "Once upon a time.",
            {**BEGUN, "prefix": True},
            {},
        ),
    ],
)
async def test_assistant_continuation_uses_prefill_of_provider(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    route: Json,
    how: Prefill | None,
    reply: str,
    last: Json,
    more: Json,
) -> None:
    if how is not None:
        monkeypatch.setitem(registry._PREFILL_BY_HOST, "127.0.0.1", how)
    async with ModelServer(Reply(text=reply, continues=False)) as other:
        base_url = other.url if route["provider"] == "anthropic" else f"{other.url}/v1"
        told_route = {"model": "some-model", **route, "base_url": base_url, "api_key": PROVIDER_KEY}
        api = await start(model_routes={"other": told_route})
        assert (await ask(api, STORY, BEGUN, model="other"))[0] == "time."
        body = other.requests[-1].body
        assert body["messages"][-1] == last
        assert more.items() <= body.items()


@pytest.mark.parametrize(
    ("provider", "base_url", "message", "body", "echoes"),
    [
        ("mistral", "https://api.mistral.ai/v1", {"prefix": True}, {}, True),
        ("moonshot", "https://api.moonshot.ai/v1", {"partial": True}, {}, False),
        ("mine", "https://api.moonshot.cn/v1", {"partial": True}, {}, False),
        ("vllm", "http://10.0.0.7/v1", {}, {"continue_final_message": True, "add_generation_prompt": False}, False),
    ],
)
def test_prefill_form_by_provider(provider: str, base_url: str, message: Json, body: Json, echoes: bool) -> None:
    how = registry.prefill_of(Route(provider, "some-model", base_url, "chat_completions"))
    assert how == Prefill(message, body, echoes)
    assert registry.prefill_of(Route(provider, "some-model", base_url, "codex_responses")) is None
