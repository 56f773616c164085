"""The Messages protocol: answers, streams, blocks, tools of the client, errors in its own envelope, and resumed streams."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any

import aiohttp
import msgspec
import pytest

from hermes.server.messages_request import MessagesRequest, parameters
from support.model_server import Call, ModelServer, Reply
from support.waiting import until

from .clients import Frame, HeldModel, Json, check_headers, frames, sent_messages
from .conftest import KEY, PROVIDER_KEY, Api, Start
from .test_keys import ANNA, BEN, KEYS, bearer

MESSAGES = "/v1/messages"
VERSION = {"anthropic-version": "2023-06-01"}
STRICT = {**VERSION, "X-Stainless-Lang": "python"}
LAMP = {"name": "lamp", "description": "Does lamp.", "input_schema": {"type": "object", "properties": {"room": {}}}}
HALL = Call("lamp", {"room": "hall"}, id="call_lamp")
TODO = Call("todo", {"todos": [{"id": "1", "content": "tea", "status": "pending"}]}, id="call_todo")
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 16).decode()


def user(content: Any = "hi", **fields: Any) -> Json:
    return {"model": "hermes-agent", "max_tokens": 100, "messages": [{"role": "user", "content": content}], **fields}


async def ask(api: Api, body: Json, **headers: str) -> Json:
    async with api.post(MESSAGES, body, headers={**VERSION, **headers}) as response:
        text = await response.text()
        assert response.status == 200, text
        check_headers(response.headers)
        assert response.headers["request-id"] == response.headers["X-Request-Id"]
        answer: Json = json.loads(text)
        return answer


async def streamed(api: Api, body: Json, headers: dict[str, str] = STRICT) -> list[Frame]:
    async with api.post(MESSAGES, {**body, "stream": True}, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream"
        return frames(await response.text())


async def read_messages_error(
    response: aiohttp.ClientResponse, status: int, kind: str, code: str, param: Any = ...
) -> Json:
    """The error object of a refusal in the protocol's own envelope."""
    body = json.loads(await response.text())
    assert response.status == status, body
    check_headers(response.headers)
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error", body
    assert body["request_id"] == response.headers["X-Request-Id"]
    error: Json = body["error"]
    assert (error["type"], error["code"]) == (kind, code), error
    assert error["message"] and (param is ... or error["param"] == param), error
    return error


def kinds(frames: list[Frame]) -> list[str]:
    for frame in frames:
        assert frame.data["type"] == frame.event
    return [str(frame.event) for frame in frames if frame.event != "ping"]


def accumulated(frames: list[Frame]) -> Json:
    """The message that the events of a stream come to, as a client puts it together."""
    message: Json = {}
    for frame in frames:
        data = frame.data
        if frame.event == "message_start":
            message = data["message"]
        elif frame.event == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append({**data["content_block"], "partial": ""})
        elif frame.event == "content_block_delta":
            block, delta = message["content"][data["index"]], data["delta"]
            names = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
            if delta["type"] == "input_json_delta":
                block["partial"] += delta["partial_json"]
            else:
                name = names[delta["type"]]
                block[name] += delta[name]
        elif frame.event == "content_block_stop":
            block = message["content"][data["index"]]
            partial = block.pop("partial")
            if block["type"] == "tool_use":
                block["input"] = json.loads(partial)
        elif frame.event == "message_delta":
            message |= {**data["delta"], "usage": data["usage"]}
    assert all("partial" not in block for block in message["content"])
    return message


# ---- answers


async def test_message_answer(api: Api) -> None:
    usage = {"input": 30, "output": 7, "cached": 20}
    api.model.script = [Reply(text="Hello.", usage=usage)]
    answer = await ask(api, user("hi", system="Be brief.", temperature=0.5, stop_sequences=["END"]))
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "hermes-agent",
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 10,
            "output_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 20,
        },
    }
    request = api.model.requests[0].body
    assert (request["temperature"], request["stop"]) == (0.5, ["END"])
    assert "Be brief." in json.dumps(request["messages"][0])


async def test_stream_is_the_same_message(api: Api) -> None:
    api.model.script = [Reply(text=["Hel", "lo, ", "Wörld\n"])]
    events = await streamed(api, user())
    assert set(kinds(events)) == {"message_start", "content_block_start", "content_block_delta", "content_block_stop",
                                "message_delta", "message_stop"}  # fmt: skip
    assert (kinds(events)[0], kinds(events)[-1], events[1].event) == ("message_start", "message_stop", "ping")
    message = accumulated(events)
    assert message["content"] == [{"type": "text", "text": "Hello, Wörld\n"}]
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("end_turn", 5)
    numbers = [int(frame.id or 0) for frame in events if frame.event != "ping"]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_is_a_stop_reason(api: Api, stream: bool) -> None:
    api.model.script = [Reply(text="Hel", finish="length"), Reply(text="", finish="length")]
    for text in ("Hel", ""):
        message = accumulated(await streamed(api, user())) if stream else await ask(api, user())
        assert message["stop_reason"] == "max_tokens"
        assert "".join(block["text"] for block in message["content"]) == text
        assert api.model.requests[-1].body["max_tokens"] == 100


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["chat_completions", "anthropic_messages"])
async def test_stop_sequence_is_a_stop_reason(start: Start, mode: str, stream: bool) -> None:
    """Where the provider says which one it was, and it is one that was asked for."""
    async with ModelServer() as model:
        address = model.url if mode == "anthropic_messages" else f"{model.url}/v1"
        route = {"base_url": address, "api_mode": mode, "api_key": PROVIDER_KEY}
        api = await start(settings={"model": {"default": "test-model", **route}})

        async def stop(stop_sequence: str | None) -> tuple[str, str | None]:
            model.script = [Reply(text="One, two, ", stop_sequence=stop_sequence)]
            body = user("Count.", stop_sequences=["three", "four"])
            message = accumulated(await streamed(api, body)) if stream else await ask(api, body)
            return message["stop_reason"], message["stop_sequence"]

        assert await stop("three") == ("stop_sequence", "three")
        assert await stop("<|end|>") == ("end_turn", None)
        assert await stop(None) == ("end_turn", None)


async def test_messages_of_a_turn_are_blocks(api: Api) -> None:
    api.model.script = [Reply(text="Let me look.", tool_calls=[TODO]), Reply(text="Tea."), Reply(text="Yes.")]
    question = user("what?")
    events = await streamed(api, question)
    blocks = accumulated(events)["content"]
    assert blocks == [{"type": "text", "text": "Let me look."}, {"type": "text", "text": "Tea."}]
    assert not [frame for frame in events if str(frame.event).startswith("hermes")]
    again = [*question["messages"], {"role": "assistant", "content": blocks}, {"role": "user", "content": "sure?"}]
    await ask(api, {**question, "messages": again})
    # The session is found, and with it what the server's own tool did.
    roles = [message["role"] for message in api.model.requests[2].body["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]


async def test_server_tools_are_reported_to_clients_that_skip_unknown_events(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[TODO]), Reply(text="Tea.")] * 2
    events = await streamed(api, user(), {**VERSION, "User-Agent": "curl/8.0"})
    statuses = [frame.data["status"] for frame in events if frame.event == "hermes.tool.progress"]
    assert statuses == ["running", "completed"]
    in_pings = await streamed(api, user(), {**VERSION, "X-Hermes-Tool-Progress": "chunk"})
    pings = [frame.data["hermes"]["tool_progress"] for frame in in_pings if "hermes" in frame.data]
    assert [ping["status"] for ping in pings] == ["running", "completed"]


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_blocks(api: Api, stream: bool) -> None:
    api.model.script = [Reply(reasoning="Hm.", text="Yes."), Reply(reasoning="Hm.", text="No."), Reply(text="Sure.")]
    question = user("well?", thinking={"type": "enabled", "budget_tokens": 2000})
    answer = accumulated(await streamed(api, question)) if stream else await ask(api, question)
    thought, text_block = answer["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Hm.") and thought["signature"]
    assert text_block == {"type": "text", "text": "Yes."}
    hidden = {"type": "adaptive", "display": "omitted"}
    answer = accumulated(await streamed(api, user("so?", thinking=hidden)))
    assert [block["type"] for block in answer["content"]] == ["text"]
    history = [*question["messages"], {"role": "assistant", "content": [thought, text_block]}]
    await ask(api, {**question, "messages": [*history, {"role": "user", "content": "sure?"}]})
    assert sent_messages(api.model.requests[2]) == [("user", "well?"), ("assistant", "Yes."), ("user", "sure?")]


EFFORTS: list[tuple[Json, str | None]] = [
    ({}, None),
    ({"thinking": {"type": "adaptive"}}, None),
    ({"thinking": {"type": "disabled"}}, "none"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2_000}}, "low"),
    ({"thinking": {"type": "enabled", "budget_tokens": 10_000}}, "medium"),
    ({"thinking": {"type": "enabled", "budget_tokens": 32_000}}, "high"),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "max"),
]


@pytest.mark.parametrize(("fields", "effort"), EFFORTS)
def test_thinking_sets_the_effort(fields: Json, effort: str | None) -> None:
    request = msgspec.convert(user(**fields), MessagesRequest)
    assert parameters(request).reasoning_effort == effort


async def test_prefilled_answer_is_continued(api: Api) -> None:
    api.model.script = [Reply(text="lo.")]
    body = user("greet")
    body["messages"].append({"role": "assistant", "content": "Hel"})
    await ask(api, body)
    assert sent_messages(api.model.requests[0])[:2] == [("user", "greet"), ("assistant", "Hel")]


# ---- blocks of requests


async def test_system_messages_stay_in_their_place(api: Api) -> None:
    api.model.script = [Reply(text="One."), Reply(text="Two.")]
    note = {"role": "system", "content": [{"type": "text", "text": "It is late."}, {"type": "tool_change"}]}
    body = user([{"type": "text", "text": "a"}], system=[{"type": "text", "text": "Be brief."}])
    body["messages"] = [{"role": "system", "content": "Be kind."}, *body["messages"], note]
    first = await ask(api, body)
    reminder = "<system-reminder>\nIt is late.\n</system-reminder>"
    assert sent_messages(api.model.requests[0]) == [("user", f"a\n{reminder}")]
    system = api.model.requests[0].body["messages"][0]["content"]
    assert "Be brief.\n\nBe kind." in system and "It is late." not in system
    again = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "b"}, note]
    async with api.post(MESSAGES, {**body, "messages": [*body["messages"], *again]}, headers=VERSION) as response:
        assert response.headers["X-Hermes-Ignored"] == "messages[2].content[1], messages[5].content[1]"
    assert sent_messages(api.model.requests[1])[1:] == [("assistant", "One."), ("user", f"b\n{reminder}")]
    async with api.get("/api/sessions") as response:
        assert len((await response.json())["data"]) == 1


async def test_images_and_documents(api: Api) -> None:
    api.model.script = [Reply(text="Nice.")]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    notes = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "Milk."},
        "title": "List",
    }
    data = base64.b64encode(b"Bread.").decode()
    file = {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": data}}
    text = {"type": "text", "text": "What is this?", "cache_control": {"type": "ephemeral"}}
    search_result = {"type": "search_result", "title": "Tea", "source": "https://tea.example", "content": [text]}
    async with api.post(MESSAGES, user([image, linked, notes, file, search_result, text]), headers=VERSION) as response:
        assert response.status == 200, await response.text()
    parts = api.model.requests[0].body["messages"][-1]["content"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert urls[0].startswith("data:image/png;base64,") and urls[1] == "https://example.org/a.png"
    encoded = json.dumps(parts)
    assert all(part in encoded for part in ("List", "Milk.", "Bread.", "https://tea.example", "What is this?"))


async def test_context_of_a_document_without_title_is_sent(api: Api) -> None:
    api.model.script = [Reply(text="Nice.")]
    data = base64.encodebytes(b"Bread. " * 20).decode()  # in several lines
    source = {"type": "base64", "media_type": "text/plain", "data": data}
    await ask(api, user([{"type": "document", "source": source, "context": "From the baker."}]))
    [(_, text)] = sent_messages(api.model.requests[0])
    assert "From the baker." in text and "Bread. Bread." in text


async def test_output_format_of_earlier_clients(api: Api) -> None:
    api.model.script = [Reply(text='{"a": 1}')]
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    await ask(api, user(output_format=form))
    assert "response_format" in api.model.requests[0].body
    async with api.post(MESSAGES, user(output_format={**form, "schema": {"type": "nothing"}})) as response:
        await read_messages_error(response, 400, "invalid_request_error", "invalid_value", "output_format.schema")


BAD: list[tuple[Json, str, str]] = [
    ({"max_tokens": None}, "missing_required_parameter", "max_tokens"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user", "content": " "}]}, "empty_message", "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "unsupported_content_type",
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "invalid_type", "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
     "unsupported_content_type", "messages[0].content[0].source.type"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "ftp://x"}}]}]},
     "invalid_image_url", "messages[0].content[0].source.url"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "no", "content": "x"}]}]},
     "tool_call_not_found", "tool_call_id"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "lamp", "input": "x"}]}]}, "invalid_type", "messages[1].content[0].input"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {
        "type": "base64", "media_type": "image/png", "data": "a!b="}}]}]}, "invalid_content_part",
     "messages[0].content[0].source.data"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {
        "type": "base64", "media_type": "application/pdf", "data": "a!b="}}]}]}, "invalid_content_part",
     "messages[0].content[0].source.data"),
    ({"temperature": 1.5}, "invalid_value", "temperature"),
    ({"tools": [{"name": "lamp"}]}, "missing_required_parameter", "tools[0].input_schema"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "unsupported_tool_type", "tools[0].type"),
    ({"tools": [LAMP, LAMP]}, "invalid_value", "tools[1].name"),
    ({"tool_choice": {"type": "any"}}, "invalid_value", "tool_choice"),
    ({"thread": {"type": "continue"}}, "missing_required_parameter", "thread.previous_message_id"),
    ({"mcp_servers": [{"url": "https://x"}]}, "unsupported_parameter", "mcp_servers"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "invalid_value",
     "output_config.format.schema"),
]  # fmt: skip


async def test_bad_fields_are_named_in_the_envelope(api: Api, subtests: pytest.Subtests) -> None:
    for change, code, param in BAD:
        with subtests.test(param):
            async with api.post(MESSAGES, {**user(), **change}) as response:
                await read_messages_error(response, 400, "invalid_request_error", code, param)
    assert api.model.requests == []


async def test_fields_without_effect_are_named(api: Api) -> None:
    api.model.script = [Reply(text="Fine.")]
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    foreign = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, {"type": "text", "text": "a"}]
    body = user("x", top_k=3, speed="fast", tools=[search])
    body["messages"] += [{"role": "assistant", "content": foreign}, {"role": "user", "content": "y"}]
    async with api.post(MESSAGES, body, headers=VERSION) as response:
        assert response.status == 200, await response.text()
        ignored = response.headers["X-Hermes-Ignored"].split(", ")
    assert set(ignored) == {"top_k", "speed", "tools[0]", "messages[1].content[0]"}


async def test_parameter_that_the_provider_rejects_is_named_as_in_the_request(api: Api) -> None:
    api.model.handler = lambda _: Reply(text="Fine.", reject_option="stop")
    async with api.post(MESSAGES, user(stop_sequences=["END"]), headers=VERSION) as response:
        assert (response.status, response.headers["X-Hermes-Ignored"]) == (200, "stop_sequences")


# ---- the client's tools


@pytest.mark.parametrize("stream", [False, True])
async def test_client_tool_use_and_its_result(api: Api, stream: bool) -> None:
    api.model.script = [Reply(text="One moment.", tool_calls=[TODO, HALL]), Reply(text="It is on.")]
    question = user("light", tools=[LAMP], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    answer = accumulated(await streamed(api, question)) if stream else await ask(api, question)
    assert answer["stop_reason"] == "tool_use"
    call = {"type": "tool_use", "id": "call_lamp", "name": "lamp", "input": {"room": "hall"}}
    assert answer["content"] == [{"type": "text", "text": "One moment."}, call]
    assert api.model.requests[0].body["parallel_tool_calls"] is False
    result = {"type": "tool_result", "tool_use_id": "call_lamp", "content": [{"type": "text", "text": "done"}]}
    turn = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    after = await ask(api, {**question, "messages": [*question["messages"], *turn]})
    assert after["content"] == [{"type": "text", "text": "It is on."}]
    messages = api.model.requests[1].body["messages"]
    # The server's own call is there again although the client never saw it.
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["call_todo", "call_lamp"]
    assert {m["tool_call_id"] for m in messages if m["role"] == "tool"} == {"call_todo", "call_lamp"}


async def test_failed_tool_result_with_text_beside_it(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[HALL]), Reply(text="Pity.")]
    question = user("light", tools=[LAMP])
    answer = await ask(api, question)
    result = {"type": "tool_result", "tool_use_id": "call_lamp", "content": "no power", "is_error": True}
    blocks = [result, {"type": "text", "text": "Hurry."}]
    turn = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": blocks}]
    await ask(api, {**question, "messages": [*question["messages"], *turn]})
    assert sent_messages(api.model.requests[1])[-2:] == [("tool", "Error: no power"), ("user", "Hurry.")]


@pytest.mark.parametrize(("choice", "wire"), [
    ({"type": "any"}, "required"),
    ({"type": "tool", "name": "lamp"}, {"type": "function", "function": {"name": "lamp"}}),
])  # fmt: skip
async def test_tool_choice(api: Api, choice: Json, wire: Any) -> None:
    api.model.script = [Reply(text="Fine.", tool_calls=[HALL])]
    await ask(api, user("light", tools=[LAMP], tool_choice=choice))
    assert api.model.requests[0].body["tool_choice"] == wire


@pytest.mark.parametrize("stream", [False, True])
async def test_thread_continues_from_a_message(api: Api, stream: bool) -> None:
    api.model.script = [Reply(tool_calls=[TODO, HALL]), Reply(text="It is on."), Reply(text="No."), Reply(text="Yes.")]
    question = user("light", tools=[LAMP], system="Be brief.", thread={"type": "create"})
    answer = accumulated(await streamed(api, question)) if stream else await ask(api, question)
    result = {"type": "tool_result", "tool_use_id": "call_lamp", "content": "done"}

    def after(message: Json, content: Any) -> Json:
        return user(content, thread={"type": "continue", "previous_message_id": message["id"]})

    second = await ask(api, after(answer, [result]))
    assert second["content"] == [{"type": "text", "text": "It is on."}]
    for follow_up in ("sure?", "really?"):  # twice from the same place
        await ask(api, after(second, follow_up))
        request = api.model.requests[-1]
        roles = [message["role"] for message in request.body["messages"]]
        assert roles == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
        assert "Be brief." in request.turns[0].text and request.turns[-1].text == follow_up
        assert "lamp" in [tool["function"]["name"] for tool in request.body["tools"]]
    async with api.post(MESSAGES, after({"id": "msg_gone"}, "x")) as response:
        await read_messages_error(response, 404, "not_found_error", "message_not_found", "thread.previous_message_id")


# ---- errors


async def test_key_in_x_api_key(start: Start) -> None:
    api = await start(Reply(text="Hello."))
    async with aiohttp.ClientSession() as client:
        async with client.post(api.url + MESSAGES, json=user(), headers={"x-api-key": KEY}) as response:
            assert response.status == 200
        wrong = {"x-api-key": "wrong"}
        async with client.post(api.url + MESSAGES, json=user(), headers=wrong) as response:
            await read_messages_error(response, 401, "authentication_error", "invalid_api_key")
        two = {"x-api-key": KEY, "Authorization": "Bearer other"}
        async with client.post(api.url + MESSAGES, json=user(), headers=two) as response:
            await read_messages_error(response, 401, "authentication_error", "invalid_api_key")
        async with client.get(f"{api.url}/v1/models", headers={**VERSION, **wrong}) as response:
            await read_messages_error(response, 401, "authentication_error", "invalid_api_key")


async def test_errors_by_status(start: Start) -> None:
    keys = [{"name": "reader", "key": "sk-reader-0123456789abcdef0123456789", "scopes": ["sessions:read"]},
            {"name": "slow", "key": "sk-slow-0123456789abcdef0123456789ab", "scopes": ["chat"],
             "requests_per_minute": 1}]  # fmt: skip
    api = await start(keys=keys, strict_models=True, max_body_bytes=2000)
    async with api.post(MESSAGES, user(model="gone")) as response:
        await read_messages_error(response, 404, "not_found_error", "model_not_found", "model")
    async with api.post(MESSAGES, user("x" * 3000)) as response:
        await read_messages_error(response, 413, "request_too_large", "body_too_large")
    async with api.get("/v1/messages/batches", headers=VERSION) as response:
        await read_messages_error(response, 404, "not_found_error", "message_not_found")
    async with api.post("/v1/nothing", {}, headers=VERSION) as response:
        await read_messages_error(response, 404, "not_found_error", "not_found")
    async with api.post(MESSAGES, user(), headers={"Authorization": f"Bearer {keys[0]['key']}"}) as response:
        await read_messages_error(response, 403, "permission_error", "insufficient_scope")
    api.model.script = [Reply(text="Hello.")]
    slow = {"Authorization": f"Bearer {keys[1]['key']}"}
    await ask(api, user(), **slow)
    async with api.post(MESSAGES, user(), headers=slow) as response:
        await read_messages_error(response, 429, "rate_limit_error", "rate_limit_exceeded")
        assert int(response.headers["Retry-After"]) > 0


async def test_failed_turn(api: Api) -> None:
    api.model.script = [Reply(status=500, error="Broken."), Reply(status=500, error="Broken.")]
    async with api.post(MESSAGES, user()) as response:
        error = await read_messages_error(response, 502, "api_error", "provider_unavailable")
        assert error["hermes"]["failed"] is True and response.headers["x-should-retry"] == "false"
    events = await streamed(api, user())
    assert kinds(events) == ["message_start", "error"]
    assert (events[-1].data["error"]["type"], events[-1].data["error"]["code"]) == ("api_error", "provider_unavailable")


async def test_failure_after_text_is_an_error(api: Api) -> None:
    api.model.script = [Reply(text=["Hel", "lo"], error_event={"message": "Broken."})] * 2
    events = await streamed(api, user())
    assert kinds(events)[-2:] == ["content_block_stop", "error"]
    async with api.post(MESSAGES, user(), headers=VERSION) as response:
        assert response.status >= 500
        assert (await response.json())["type"] == "error"


async def test_flags_of_a_cut_answer_are_the_same_in_a_stream(api: Api) -> None:
    api.model.script = [Reply(text="Hel", finish="length")] * 2
    plain, events = await ask(api, user()), await streamed(api, user())
    [delta] = [frame.data for frame in events if frame.event == "message_delta"]
    assert delta["hermes"] == plain["hermes"] and (plain["hermes"]["partial"], plain["hermes"]["failed"]) == (
        True,
        False,
    )


# ---- tokens and models


async def test_count_tokens(api: Api) -> None:
    async def count(body: Json) -> int:
        async with api.post(f"{MESSAGES}/count_tokens", body, headers=VERSION) as response:
            counted = json.loads(await response.text())
            assert response.status == 200 and set(counted) == {"input_tokens"}, counted
            return int(counted["input_tokens"])

    short = {"model": "hermes-agent", "messages": [{"role": "user", "content": "hi"}]}
    few, many = await count(short), await count({**short, "system": "words " * 500})
    assert 0 < few < many - 400
    assert api.model.requests == []


async def test_models_in_the_form_of_the_protocol(api: Api) -> None:
    async with api.get("/v1/models", headers=VERSION) as response:
        listed = json.loads(await response.text())
    [model] = listed["data"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "hermes-agent", "hermes-agent")
    assert (model["type"], model["display_name"]) == ("model", "hermes-agent") and "T" in model["created_at"]
    async with api.get("/v1/models/hermes-agent", headers=VERSION) as response:
        assert json.loads(await response.text()) == model
    async with api.get("/v1/models") as response:
        plain = json.loads(await response.text())
    assert not {"has_more", "first_id"} & set(plain) and "display_name" not in plain["data"][0]


async def test_models_by_pages(start: Start) -> None:
    api = await start(model_routes={name: {"model": "m"} for name in "abcd"})

    async def page(query: str) -> tuple[list[str], bool]:
        async with api.get(f"/v1/models?{query}", headers=VERSION) as response:
            listed = json.loads(await response.text())
        names = [model["id"] for model in listed["data"]]
        assert (listed["first_id"], listed["last_id"]) == ((names[0], names[-1]) if names else (None, None))
        return names, listed["has_more"]

    assert await page("limit=2") == (["hermes-agent", "a"], True)
    assert await page("limit=2&after_id=a") == (["b", "c"], True)
    assert await page("limit=2&after_id=c") == (["d"], False)
    assert await page("limit=2&before_id=d") == (["b", "c"], True)
    assert await page("after_id=d") == ([], False)
    for query, param in (("after_id=gone", "after_id"), ("limit=0", "limit"), ("limit=many", "limit")):
        async with api.get(f"/v1/models?{query}", headers=VERSION) as response:
            error = json.loads(await response.text())["error"]
        assert (response.status, error["type"], error["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/messages/batches"),
        ("GET", "/v1/messages/batches"),
        ("GET", "/v1/messages/batches/msgbatch_1/results"),
        ("POST", "/v1/files"),
        ("POST", "/v1/complete"),
    ],
)
async def test_unsupported_messages_routes_are_not_found(api: Api, method: str, path: str) -> None:
    async with api.client.request(method, api.url + path, json={"requests": []}, headers=VERSION) as response:
        body = json.loads(await response.text())
    assert (response.status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")


# ---- idempotency, disconnects, resuming


async def test_idempotency_key(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    headers = {**VERSION, "Idempotency-Key": "one"}
    first, second = await ask(api, user(), **headers), await ask(api, user(), **headers)
    assert first == second and len(api.model.requests) == 1


async def test_stream_is_resumed_from_any_event(start: Start) -> None:
    texts = [f"word {n} " for n in range(6)]
    api = await start(
        Reply(reasoning="Hm.", text=texts, tool_calls=[TODO, HALL]),
        settings={"agent": {"delta_window_ms": 0, "api_max_retries": 0}},
    )
    body = user("go", tools=[LAMP], thinking={"type": "adaptive"}, stream=True)
    async with api.post(MESSAGES, body, headers=VERSION) as response:
        text = await response.text()
    blocks = [block for block in text.split("\n\n") if block and "event: ping" not in block]
    message_id = json.loads(blocks[0].split("data: ")[1])["message"]["id"]
    for place in (0, 1, 3, len(blocks) - 2):
        after = {"headers": {"Last-Event-ID": str(place)}}
        async with api.get(f"{MESSAGES}/{message_id}", **after) as response:
            assert response.status == 200
            again = [block for block in (await response.text()).split("\n\n") if block and "event: ping" not in block]
        assert again == blocks[place:]
    async with api.get(f"{MESSAGES}/{message_id}", params={"starting_after": "-1"}) as response:
        await read_messages_error(response, 400, "invalid_request_error", "invalid_value", "starting_after")
    async with api.get(f"{MESSAGES}/msg_unknown") as response:
        await read_messages_error(response, 404, "not_found_error", "message_not_found")


async def test_stream_is_resumed_by_its_owner_while_it_is_stored(start: Start) -> None:
    narrow = {"name": "narrow", "key": "sk-narrow-0123456789abcdef0123456789", "scopes": ["sessions:read"]}
    api = await start(Reply(text="Hello."), keys=[*KEYS, narrow])
    answer = await ask(api, user(), **bearer(ANNA))
    path = f"{MESSAGES}/{answer['id']}"
    async with api.get(path, headers=bearer(ANNA)) as response:
        assert accumulated(frames(await response.text()))["content"] == answer["content"]
    async with api.get(path, headers=bearer(BEN)) as response:
        await read_messages_error(response, 404, "not_found_error", "message_not_found")
    thread = {"type": "continue", "previous_message_id": answer["id"]}
    async with api.post(MESSAGES, user(thread=thread), headers=bearer(BEN)) as response:
        await read_messages_error(response, 404, "not_found_error", "message_not_found", "thread.previous_message_id")
    async with api.get(path, headers=bearer(narrow["key"])) as response:
        await read_messages_error(response, 403, "permission_error", "insufficient_scope")
    api.app.store.blocking.runs.sweep({"": 1000.0}, {"chat": 0.0}, 1000, now=time.time() + 10)
    async with api.get(path, headers=bearer(ANNA)) as response:
        await read_messages_error(response, 410, "invalid_request_error", "events_expired")


async def test_running_stream_is_followed_after_a_disconnect(start: Start) -> None:
    async with HeldModel(Reply(text=["one ", "two ", "three"])) as held_model:
        api = await start(settings={**held_model.settings, "agent": {"delta_window_ms": 0, "api_max_retries": 0}})
        headers = {**VERSION, "X-Hermes-Detach": "true"}
        async with api.post(MESSAGES, user("go", stream=True), headers=headers) as response:
            run_id = response.headers["X-Hermes-Run-Id"]
        async with api.get(f"{MESSAGES}/{run_id.replace('run_', 'msg_')}") as response:
            held_model.release_all()
            message = accumulated(frames(await response.text()))
    assert message["content"] == [{"type": "text", "text": "one two three"}]
    assert message["stop_reason"] == "end_turn"


async def test_disconnect_stops_the_turn(start: Start) -> None:
    async with HeldModel(Reply(text=["one ", "two"])) as model:
        api = await start(settings=model.settings)
        model.release()
        async with api.post(MESSAGES, user("go", stream=True), headers=VERSION) as response:
            run_id = response.headers["X-Hermes-Run-Id"]
            await response.content.readany()

        async def status() -> str:
            async with api.get(f"/v1/runs/{run_id}") as response:
                return str((await response.json())["status"])

        await until(status, lambda value: value == "cancelled")


async def test_approval_is_asked_for_in_the_stream(start: Start) -> None:
    risky = Call("terminal", {"command": "rm -rf build"})
    api = await start(Reply(tool_calls=[risky]), Reply(text="Done."), settings={"terminal": {"backend": "local"}})
    async with api.post(MESSAGES, user("go", stream=True), headers={**VERSION, "User-Agent": "curl/8"}) as response:
        text = ""
        while "hermes.approval.request" not in text or not text.endswith("\n\n"):
            text += (await response.content.readany()).decode()
        frame = next(frame for frame in frames(text) if frame.event == "hermes.approval.request")
        path = f"/v1/runs/{frame.data['run_id']}/approval"
        async with api.post(path, {"choice": "deny"}) as approval_response:
            assert approval_response.status == 200
        rest = await response.text()
    assert "message_stop" in rest


async def test_quiet_stream_is_kept_alive_by_pings(start: Start) -> None:
    async with HeldModel(Reply(text="Late.")) as model:
        api = await start(settings=model.settings, keepalive_seconds=0.1)
        text = ""
        async with api.post(MESSAGES, user("go", stream=True), headers=VERSION) as response:
            while text.count("event: ping") < 3:
                text += (await response.content.readany()).decode()
            model.release_all()
            text += await response.text()
    assert "Late." in text and ": keepalive" not in text


async def test_two_questions_at_once_have_sessions_of_their_own(api: Api) -> None:
    texts = iter(("A.", "B."))

    async def reply(_: Any) -> Reply:
        await until(lambda: len(api.model.requests) == 2)
        return Reply(text=next(texts))

    api.model.handler = reply
    answers = await asyncio.gather(ask(api, user("same")), ask(api, user("same")))
    assert {answer["content"][0]["text"] for answer in answers} == {"A.", "B."}
