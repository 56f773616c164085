"""Responses: the object, its items, what the model gets, and how one response continues another."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from hermes.agent import decisions
from support.model_server import Call, ModelServer, Reply

from .clients import (
    HeldModel,
    Json,
    function,
    read_error,
    read_json,
    responses_tool,
    sent_messages,
    system_of,
    tool_names,
)
from .conftest import PROVIDER_KEY, Api, Start

PATH = "/v1/responses"
LAMP = responses_tool(function("lamp", room={"type": "string"}))
TODO = Call("todo", {"todos": [{"id": "1", "content": "tea", "status": "pending"}]}, id="call_todo")
HALL = Call("lamp", {"room": "hall"}, id="call_lamp")
NO_USAGE = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 0},
}
DEFAULTS: Json = {
    "object": "response", "status": "completed", "incomplete_details": None, "error": None, "model": "hermes-agent",
    "previous_response_id": None, "instructions": None, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
    "max_tool_calls": None, "max_output_tokens": None, "temperature": 1.0, "top_p": 1.0, "presence_penalty": 0,
    "frequency_penalty": 0, "top_logprobs": 0, "truncation": "disabled", "text": {"format": {"type": "text"}},
    "reasoning": {"effort": None, "summary": None}, "store": True, "background": False, "service_tier": "default",
    "metadata": {}, "safety_identifier": None, "prompt_cache_key": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits between attempts, and a lost connection is not tried again."""
    monkeypatch.setattr(decisions, "RETRY_WAIT_S_MAX", 0.01)
    monkeypatch.setenv("HERMES_STREAM_RETRIES", "0")


async def create(api: Api, input: Any = "hi", headers: dict[str, str] | None = None, **fields: Any) -> Json:
    """A response that is made without a stream."""
    async with api.post(PATH, {"input": input, **fields}, headers=headers) as response:
        return await read_json(response)


async def fetch(api: Api, response_id: str) -> Json:
    async with api.get(f"{PATH}/{response_id}") as response:
        return await read_json(response)


def text_of(response: Json) -> str:
    (part,) = response["output"][-1]["content"]
    return str(part["text"])


def message(role: str, text: str) -> Json:
    return {"type": "message", "role": role, "content": text}


# ---- the object


async def test_response_has_every_key(api: Api) -> None:
    api.model.script = [Reply(text=["Do", "ne."], usage={"input": 812, "output": 9, "cached": 640, "reasoning": 4})]
    response = await create(api)
    assert await fetch(api, response["id"]) == response
    assert re.fullmatch(r"resp_[0-9a-f]+", response.pop("id"))
    assert response.pop("completed_at") >= response.pop("created_at") > 1_700_000_000
    (item,) = response.pop("output")
    assert item.pop("id").startswith("msg_")
    content = [{"type": "output_text", "text": "Done.", "annotations": [], "logprobs": []}]
    expected = {"type": "message", "status": "completed", "role": "assistant", "phase": "final_answer"}
    assert item == {**expected, "content": content}
    assert response.pop("usage") == {
        "input_tokens": 812,
        "output_tokens": 9,
        "total_tokens": 821,
        "input_tokens_details": {"cached_tokens": 640, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 4},
    }
    assert response == DEFAULTS


ECHOED: Json = {
    "model": "my-model", "instructions": "Be brief.", "temperature": 0.5, "top_p": 0.9, "presence_penalty": 1,
    "frequency_penalty": -1, "max_output_tokens": 500, "max_tool_calls": 3, "truncation": "auto", "user": "me",
    "metadata": {"a": "b"}, "safety_identifier": "who", "prompt_cache_key": "k", "service_tier": "flex",
    "parallel_tool_calls": False, "reasoning": {"effort": "low", "summary": None}, "tool_choice": "none",
    "text": {"format": {"type": "text"}, "verbosity": "low"},
}  # fmt: skip


async def test_request_parameters_are_echoed(api: Api) -> None:
    api.model.script = [Reply(text="Done.")]
    response = await create(api, **ECHOED)
    assert {name: response.get(name) for name in ECHOED} == ECHOED
    body = api.model.requests[0].body
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        assert body[name] == ECHOED[name]
    assert "Be brief." in system_of(api.model.requests[0])


async def test_tools_are_echoed_in_full(api: Api) -> None:
    api.model.script = [Reply(text="Done.")]
    (tool,) = (await create(api, tools=[{"type": "function", "name": "horn"}]))["tools"]
    assert tool == {"type": "function", "name": "horn", "description": None, "parameters": None, "strict": None}


async def test_ignored_parameters_are_named(api: Api) -> None:
    api.model.script = [Reply(text="Done.")]
    body = {"input": "x", "include": ["file_search_call.results"], "hologram": 1}
    async with api.post(PATH, body) as response:
        await read_json(response)
        assert {"hologram", "file_search_call.results"} <= set(
            re.split(r", ?|include[.:\[]|\]", response.headers["X-Hermes-Ignored"])
        ) or "include" in response.headers["X-Hermes-Ignored"]


# ---- items


async def test_server_tool_call_output_and_text_items(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[TODO]), Reply(text="Done.")]
    call, result, text = (await create(api))["output"]
    assert call["type"] == "function_call"
    assert call["id"].startswith("fc_")
    assert (call["call_id"], call["name"], call["status"]) == ("call_todo", "todo", "completed")
    assert json.loads(call["arguments"])["todos"][0]["content"] == "tea"
    assert result["type"] == "function_call_output"
    assert result["id"].startswith("fco_")
    assert (result["call_id"], result["status"]) == ("call_todo", "completed")
    assert json.loads(result["output"])["counts"]["pending"] == 1
    assert (text["type"], text["phase"]) == ("message", "final_answer")


async def test_each_text_item_has_phase(api: Api) -> None:
    api.model.script = [Reply(text="Let me see.", tool_calls=[TODO]), Reply(text="Done.")]
    response = await create(api)
    assert [item["type"] for item in response["output"]] == [
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]
    assert [item["phase"] for item in response["output"] if item["type"] == "message"] == ["commentary", "final_answer"]
    assert len({item["id"] for item in response["output"]}) == 4


@pytest.mark.parametrize(
    ("header", "types"),
    [
        ("function", ["function_call", "function_call_output", "message"]),
        ("mcp", ["mcp_call", "message"]),
        ("none", ["message"]),
    ],
)
async def test_server_tool_item_form_is_configurable(api: Api, header: str, types: list[str]) -> None:
    api.model.script = [Reply(tool_calls=[TODO]), Reply(text="Done."), Reply(text="Next.")]
    response = await create(api, headers={"X-Hermes-Tool-Items": header})
    assert [item["type"] for item in response["output"]] == types
    if header == "mcp":
        item = response["output"][0]
        assert item["id"].startswith("mcp_")
        known = {
            "server_label": "hermes",
            "name": "todo",
            "error": None,
            "approval_request_id": None,
            "status": "completed",
        }
        assert {name: item[name] for name in known} == known
        assert json.loads(item["output"])["counts"]["pending"] == 1
    # What the model remembers is the same in all three.
    await create(api, "next", previous_response_id=response["id"])
    assert [role for role, _ in sent_messages(api.model.requests[-1])] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]


@pytest.mark.parametrize("headers", [{"User-Agent": "OpenAI/Python 2"}, {"X-Stainless-Lang": "js"}])
async def test_strict_clients_see_server_tools_as_mcp_calls(api: Api, headers: dict[str, str]) -> None:
    api.model.script = [Reply(tool_calls=[TODO]), Reply(text="Done.")] * 2
    assert [item["type"] for item in (await create(api, headers=headers))["output"]] == ["mcp_call", "message"]
    assert [item["type"] for item in (await create(api, tools=[LAMP]))["output"]] == ["mcp_call", "message"]


@pytest.mark.parametrize("name", ["Lamp", "lamp_tool", "functions.lamp"])
async def test_client_call_with_repaired_name_is_one_open_item(api: Api, name: str) -> None:
    api.model.script = [Reply(tool_calls=[Call(name, {"room": "hall"}, id="call_lamp")])]
    response = await create(api, "light", tools=[LAMP])
    assert [(item["type"], item["name"]) for item in response["output"]] == [("function_call", "lamp")]


async def test_client_tool_call_stays_open_and_output_continues(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[TODO, HALL]), Reply(text="It is on.")]
    created = await create(api, "light", tools=[LAMP])
    assert created["status"] == "completed"
    assert [item["type"] for item in created["output"]] == ["mcp_call", "function_call"]
    call = created["output"][-1]
    assert (call["call_id"], json.loads(call["arguments"])) == ("call_lamp", {"room": "hall"})
    output = {"type": "function_call_output", "call_id": "call_lamp", "output": "done"}
    async with api.post(
        PATH, {"input": "never mind", "previous_response_id": created["id"], "tools": [LAMP]}
    ) as response:
        await read_error(response, 400, "tool_output_missing")
    again = await create(api, [output], previous_response_id=created["id"], tools=[LAMP])
    assert text_of(again) == "It is on."
    results = {m["tool_call_id"] for m in api.model.requests[1].body["messages"] if m["role"] == "tool"}
    assert results == {"call_todo", "call_lamp"}
    assert again["previous_response_id"] == created["id"]


async def test_outputs_with_whole_transcript_sent_back(api: Api) -> None:
    api.model.script = [Reply(reasoning="Hm.", tool_calls=[HALL]), Reply(text="It is on.")]
    response = await create(api, "light", tools=[LAMP], store=False, reasoning={"summary": "auto"})
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"]
    output = {
        "type": "function_call_output",
        "call_id": "call_lamp",
        "output": [{"type": "input_text", "text": "done"}],
    }
    again = await create(api, [message("user", "light"), *response["output"], output], tools=[LAMP], store=False)
    assert text_of(again) == "It is on."
    assert [(role, text) for role, text in sent_messages(api.model.requests[1]) if role != "assistant"] == [
        ("user", "light"),
        ("tool", "done"),
    ]


async def test_output_items_can_be_sent_back_unchanged(api: Api) -> None:
    api.model.script = [Reply(text="Let me see.", tool_calls=[TODO]), Reply(text="Done."), Reply(text="Next.")]
    for form in ("function", "mcp"):
        api.model.script = [Reply(text="Let me see.", tool_calls=[TODO]), Reply(text="Done."), Reply(text="Next.")]
        response = await create(api, "one", headers={"X-Hermes-Tool-Items": form})
        await create(api, [message("user", "one"), *response["output"], message("user", "two")])
        messages = sent_messages(api.model.requests[-1])
        assert [text for role, text in messages if role in ("user", "assistant")] == [
            "one",
            "Let me see.",
            "Done.",
            "two",
        ]
        assert [role for role, _ in messages] == ["user", "assistant", "tool", "assistant", "user"]


async def test_system_items_join_system_prompt(api: Api) -> None:
    api.model.script = [Reply(text="Arr.")]
    items = [message("system", "Speak as a pirate."), message("developer", "Be brief."), "hello"]
    await create(api, items, instructions="Be kind.")
    system = system_of(api.model.requests[0])
    assert all(instruction in system for instruction in ("Speak as a pirate.", "Be brief.", "Be kind."))
    assert sent_messages(api.model.requests[0]) == [("user", "hello")]


async def test_item_reference_by_id(api: Api) -> None:
    api.model.script = [Reply(text="Four."), Reply(text="I did.")]
    response = await create(api, "two and two?")
    await create(
        api, [{"type": "item_reference", "id": response["output"][0]["id"]}, message("user", "did you say that?")]
    )
    assert sent_messages(api.model.requests[1]) == [("assistant", "Four."), ("user", "did you say that?")]


async def test_referenced_items_are_read_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.model.script = [Reply(text="One.", continues=False), Reply(text="Two.", continues=False), Reply(text="Fine.")]
    ids = [(await create(api, "x"))["output"][0]["id"] for _ in range(2)]
    added = await read_json(await api.post("/v1/conversations", {"items": [message("user", "kept")]}))
    body = await read_json(await api.get(f"/v1/conversations/{added['id']}/items"))
    ids.append(body["data"][0]["id"])
    reads: list[Any] = []
    store = type(api.context.stored_responses)
    find = store.find_items

    async def record_reads(self: Any, item_ids: Any, owner: str) -> Any:
        reads.append(item_ids)
        return await find(self, item_ids, owner)

    monkeypatch.setattr(store, "find_items", record_reads)
    await create(api, [{"type": "item_reference", "id": item_id} for item_id in ids * 50])
    assert len(reads) == 1
    text = "".join(text for _, text in sent_messages(api.model.requests[-1]))
    assert [text.count(word) for word in ("One.", "Two.", "kept")] == [50, 50, 50]


# ---- reasoning


async def test_reasoning_items_on_request(api: Api) -> None:
    asking: list[tuple[Json, dict[str, str]]] = [
        ({"reasoning": {"summary": "auto"}}, {}),
        ({}, {"X-Hermes-Reasoning": "on"}),
        ({"include": ["reasoning.encrypted_content"]}, {}),
    ]
    api.model.script = [Reply(text="Four.", reasoning="Two and two.", continues=False)] * 4
    assert [item["type"] for item in (await create(api))["output"]] == ["message"]
    for fields, headers in asking:
        item, _ = (await create(api, headers=headers, **fields))["output"]
        assert item["type"] == "reasoning"
        assert item["id"].startswith("rs_")
        assert item["status"] == "completed"
        if "include" not in fields:
            assert item["summary"] == [{"type": "summary_text", "text": "Two and two."}]
            assert "encrypted_content" not in item


async def test_encrypted_reasoning_round_trip(start: Start) -> None:
    async with ModelServer() as model:
        route = {"base_url": f"{model.url}/v1", "api_mode": "codex_responses", "api_key": PROVIDER_KEY}
        api = await start(settings={"model": {"default": "gpt-5", **route}})
        model.script = [Reply(text="Four.", reasoning="Two and two.", encrypted="c3RhdGU="), Reply(text="Five.")]
        response = await create(api, "2+2", include=["reasoning.encrypted_content"], store=False)
        sealed = response["output"][0]["encrypted_content"]
        assert sealed
        assert "c3RhdGU=" not in sealed
        await create(api, [message("user", "2+2"), *response["output"], message("user", "and 1?")], store=False)
        assert "c3RhdGU=" in str(model.requests[1].body["input"])
        assert [text for role, text in sent_messages(model.requests[1])] == ["2+2", "Four.", "and 1?"]


# ---- chains


async def test_ten_turn_chain_sends_each_message_once(api: Api) -> None:
    api.model.script = [Reply(text=f"answer {number}.") for number in range(10)]
    previous: Json = {}
    for number in range(10):
        previous = await create(api, f"question {number}?", **previous)
        previous = {"previous_response_id": previous["id"]}
    expected = []
    for number in range(10):
        expected += [("user", f"question {number}?")]
        assert sent_messages(api.model.requests[number]) == expected
        expected += [("assistant", f"answer {number}.")]


async def test_chain_carries_session_and_instructions(api: Api) -> None:
    api.model.script = [Reply(text=text, continues=False) for text in "abcd"]
    sessions, previous = [], None
    for fields in ({"instructions": "Be a pirate."}, {}, {"instructions": ""}, {}):
        body = {"input": "x", **fields, **({"previous_response_id": previous} if previous else {})}
        async with api.post(PATH, body) as response:
            previous = (await read_json(response))["id"]
            sessions.append(response.headers["X-Hermes-Session-Id"])
            history = response.headers["X-Hermes-History"]
    assert len(set(sessions)) == 1
    assert history.startswith("chain; messages=6")
    assert ["Be a pirate." in system_of(request) for request in api.model.requests] == [True, True, False, False]


async def test_continuing_from_earlier_response_forks_session(api: Api) -> None:
    api.model.script = [Reply(text=f"answer {number}.", continues=False) for number in range(4)]
    first = await create(api, "one")
    second = await create(api, "two", previous_response_id=first["id"])
    async with api.post(PATH, {"input": "other two", "previous_response_id": first["id"]}) as response:
        branch = await read_json(response)
        forked = response.headers["X-Hermes-Session-Id"]
    assert sent_messages(api.model.requests[2]) == [("user", "one"), ("assistant", "answer 0."), ("user", "other two")]
    async with api.post(PATH, {"input": "three", "previous_response_id": second["id"]}) as response:
        await read_json(response)
        assert response.headers["X-Hermes-Session-Id"] != forked
    assert [text for _, text in sent_messages(api.model.requests[3])] == [
        "one",
        "answer 0.",
        "two",
        "answer 1.",
        "three",
    ]
    api.model.script = [Reply(text="answer 4.")]
    await create(api, "other three", previous_response_id=branch["id"])
    expected = ["one", "answer 0.", "other two", "answer 2.", "other three"]
    assert [text for _, text in sent_messages(api.model.requests[4])] == expected


async def test_chain_of_other_session_is_conflict(api: Api) -> None:
    api.model.script = [Reply(text="a"), Reply(text="b")]
    created = await create(api, headers={"X-Hermes-Session-Id": "hall"})
    body = {"input": "x", "previous_response_id": created["id"]}
    async with api.post(PATH, body, headers={"X-Hermes-Session-Id": "garden"}) as response:
        await read_error(response, 400, "session_conflict")
    async with api.post(PATH, body, headers={"X-Hermes-Session-Id": "hall"}) as response:
        await read_json(response)


async def test_named_conversation_continues_and_restarts_when_response_is_gone(api: Api) -> None:
    api.model.script = [Reply(text=f"answer {number}.", continues=False) for number in range(4)]
    await create(api, "one", conversation="kitchen")
    second = await create(api, "two", conversation="kitchen")
    assert second["conversation"] == {"id": "kitchen"}
    assert len(sent_messages(api.model.requests[1])) == 3
    await create(api, "aside", conversation="kitchen", store=False)
    async with api.delete(f"{PATH}/{second['id']}") as response:
        assert await read_json(response) == {"id": second["id"], "object": "response", "deleted": True}
    await create(api, "three", conversation="kitchen")
    assert sent_messages(api.model.requests[3]) == [("user", "three")]


async def test_given_history_is_used_only_without_chain(api: Api) -> None:
    api.model.script = [Reply(text=f"answer {number}.", continues=False) for number in range(3)]
    history = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "so?"}]
    first = await create(api, "one", conversation_history=history)
    assert [text for _, text in sent_messages(api.model.requests[0])] == ["before", "so?", "one"]
    await create(api, "two", conversation_history=history, previous_response_id="resp_unknown")
    assert [text for _, text in sent_messages(api.model.requests[1])] == ["before", "so?", "two"]
    other = [{"role": "user", "content": "made up"}]
    await create(api, "three", conversation_history=other, previous_response_id=first["id"])
    assert [text for _, text in sent_messages(api.model.requests[2])] == ["before", "so?", "one", "answer 0.", "three"]


async def test_store_false_leaves_nothing(api: Api) -> None:
    api.model.script = [Reply(text="a", continues=False)] * 2
    created = await create(api, store=False)
    assert created["store"] is False
    for path in (f"{PATH}/{created['id']}", f"{PATH}/{created['id']}/input_items"):
        async with api.get(path) as response:
            await read_error(response, 404, "response_not_found")
    async with api.post(PATH, {"input": "x", "previous_response_id": created["id"]}) as response:
        await read_error(response, 404, "previous_response_not_found", "previous_response_id")
    async with api.get("/api/sessions") as response:
        assert (await read_json(response))["data"] == []
    await create(api, store=False, headers={"X-Hermes-Session-Id": "hall"})
    async with api.get("/api/sessions") as response:
        assert [session["id"] for session in (await read_json(response))["data"]] == ["hall"]


async def test_truncation_auto_cuts_long_history(api: Api) -> None:
    api.model.script = [Reply(text="a", continues=False)] * 3
    history = [{"role": ("user", "assistant")[n % 2], "content": f"m{n}"} for n in range(150)]
    for truncation, count in (("auto", 101), (None, 151), ("disabled", 151)):
        await create(api, "last", conversation_history=history, truncation=truncation)
        assert len(sent_messages(api.model.requests[-1])) == count
        assert sent_messages(api.model.requests[-1])[-2:] == [("assistant", "m149"), ("user", "last")]


async def test_truncation_keeps_calls_with_results(api: Api) -> None:
    api.model.script = [Reply(text="a")]
    call = {"type": "function_call", "call_id": "c1", "name": "lamp", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "on"}
    tail = [message(("user", "assistant")[n % 2], f"m{n}") for n in range(99)]
    await create(
        api, [message("user", "x"), call, result, message("assistant", "ok"), *tail[:-1], "last"], truncation="auto"
    )
    roles = [m["role"] for m in api.model.requests[0].body["messages"] if m["role"] != "system"]
    assert ("tool" in roles) == any(m.get("tool_calls") for m in api.model.requests[0].body["messages"])
    assert roles[0] != "tool"


async def test_truncation_disabled_overflow_is_error(api: Api) -> None:
    error = {"code": "context_length_exceeded", "message": "This model's maximum context length is 10 tokens."}
    api.model.script = [Reply(status=400, error=error)]
    async with api.post(PATH, {"input": "x", "truncation": "disabled"}) as response:
        await read_error(response, 400, "context_length_exceeded")
    assert len(api.model.requests) == 1


async def test_max_tool_calls_forces_answer(api: Api) -> None:
    api.model.handler = lambda request: Reply(tool_calls=[TODO]) if tool_names(request) else Reply(text="Enough.")
    response = await create(api, max_tool_calls=2)
    assert [item["type"] for item in response["output"]].count("function_call") == 2
    assert text_of(response) == "Enough."


# ---- ends that are not good


@pytest.mark.parametrize(
    ("reply", "status", "kind", "code"),
    [
        (Reply(status=401, error="no"), 502, "provider_auth_failed", "server_error"),
        (Reply(status=400, error="no"), 502, "provider_rejected_request", "invalid_prompt"),
        (
            Reply(status=429, error="no", headers={"Retry-After": "7"}),
            503,
            "provider_rate_limited",
            "rate_limit_exceeded",
        ),
        (Reply(status=500, error="no"), 502, "provider_unavailable", "server_error"),
        (Reply(status=504, error="no"), 504, "provider_timeout", "server_error"),
    ],
)
async def test_failure_without_text_is_http_error_and_stored(
    api: Api, reply: Reply, status: int, kind: str, code: str
) -> None:
    api.model.handler = lambda _: reply
    async with api.post(PATH, {"input": "x"}) as response:
        error = await read_error(response, status, kind)
        assert response.headers["x-should-retry"] == "false"
    stored = await fetch(api, error["hermes"]["response_id"])
    assert (stored["status"], stored["completed_at"], stored["output"]) == ("failed", None, [])
    assert set(stored["error"]) == {"code", "message", "type"}
    assert (stored["error"]["code"], stored["error"]["type"]) == (code, kind)


@pytest.mark.parametrize(
    ("reply", "fields", "reason"),
    [
        (Reply(text="Half", finish="length"), {"max_output_tokens": 20}, "max_output_tokens"),
        (Reply(text="Half", finish="content_filter"), {}, "content_filter"),
    ],
)
async def test_truncated_answer_is_incomplete(api: Api, reply: Reply, fields: Json, reason: str) -> None:
    api.model.handler = lambda _: reply
    response = await create(api, **fields)
    assert (response["status"], response["incomplete_details"], response["error"]) == (
        "incomplete",
        {"reason": reason},
        None,
    )
    assert response["completed_at"] is None
    assert (text_of(response), response["output"][-1]["status"]) == ("Half", "incomplete")
    assert await fetch(api, response["id"]) == response


async def test_agent_exception_is_reported_and_stored(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(**_: Any) -> Any:
        raise RuntimeError("it broke")

    monkeypatch.setattr(api.adapter, "_run_agent", broken)
    async with api.post(PATH, {"input": "x"}) as response:
        error = await read_error(response, 500, "agent_error")
    assert "it broke" in error["message"]
    stored = await fetch(api, error["hermes"]["response_id"])
    assert (stored["status"], stored["error"]["type"]) == ("failed", "agent_error")


async def test_structured_output_is_checked(api: Api) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "name": "number", "strict": True, "schema": schema}
    api.model.script = [Reply(text="five", continues=False), Reply(text='{"n": 5}', continues=False)]
    response = await create(api, text={"format": form})
    assert text_of(response) == '{"n": 5}'
    assert response["text"]["format"]["type"] == "json_schema"


async def test_usage_is_null_until_end(start: Start) -> None:
    async with HeldModel(Reply(text="Done.")) as model:
        api = await start(settings=model.settings)
        response = await create(api, background=True)
        assert (response["status"], response["usage"], response["completed_at"]) == ("queued", NO_USAGE, None)
        model.release_all()
