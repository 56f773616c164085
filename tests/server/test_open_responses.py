"""Open Responses (2026-04-24): requests of the specification's kinds, answered and streamed by its schemas."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from hermes.agent import decisions
from support.model_server import Call, Reply
from support.waiting import DEADLINE_S

from .clients import Frame, HeldModel, Json, function, read_error, read_json, responses_tool, sent_messages, stream_of
from .conftest import Api, Start
from .open_responses import event_faults, faults

PATH = "/v1/responses"
WEATHER = responses_tool(function("get_weather", location={"type": "string"}))
ASKED = Call("get_weather", ['{"location": ', '"San Francisco"}'], id="call_1")
TODO = Call("todo", {"todos": [{"id": "1", "content": "tea", "status": "pending"}]}, id="call_todo")
HEART = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
FINAL = ("response.completed", "response.failed", "response.incomplete")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits between attempts, and a lost connection is not tried again."""
    monkeypatch.setattr(decisions, "RETRY_WAIT_S_MAX", 0.01)
    monkeypatch.setenv("HERMES_STREAM_RETRIES", "0")


def message_item(role: str, content: Any) -> Json:
    return {"type": "message", "role": role, "content": content}


async def plain(api: Api, **body: Any) -> Json:
    async with api.post(PATH, {"model": "hermes-agent", **body}) as response:
        assert response.content_type == "application/json"
        payload = await read_json(response)
    assert faults("response object", payload) == []
    return payload


async def streamed(api: Api, **body: Any) -> list[Json]:
    async with api.post(PATH, {"model": "hermes-agent", **body, "stream": True}) as response:
        return checked(await stream_of(response))


def checked(frames: list[Frame]) -> list[Json]:
    """The events of a stream that is as the specification wants it."""
    assert frames[-1].data == "[DONE]", "the last event is the literal [DONE]"
    events = [frame.data for frame in frames[:-1]]
    assert [frame.event for frame in frames[:-1]] == [event["type"] for event in events]
    assert all(frame.id is None for frame in frames)
    check_events(events)
    return events


def check_events(events: list[Json]) -> None:
    """Schemas, numbers, the life of the response and of each item."""
    assert [fault for event in events for fault in event_faults(event)] == []
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))
    types = [event["type"] for event in events]
    assert types[0] == "response.created"
    assert "response.in_progress" in types[1:3]
    assert [kind in FINAL for kind in types] == [False] * (len(types) - 1) + [True]
    if "error" in types:
        assert types[-2:] == ["error", "response.failed"]
    check_lives(events)


def check_lives(events: list[Json]) -> None:
    """Each item is added, gets its parts and deltas, and is done; the object holds what was streamed."""
    final = events[-1]["response"]
    items: dict[int, list[str]] = {}
    ended: dict[int, Json] = {}
    for event in events:
        if "output_index" in event:
            assert event["output_index"] not in ended, "a finished item is not touched again"
            items.setdefault(event["output_index"], []).append(event["type"].removeprefix("response."))
            if event["type"] == "response.output_item.done":
                ended[event["output_index"]] = event["item"]
    for index, kinds in items.items():
        assert (kinds[0], kinds[-1]) == ("output_item.added", "output_item.done")
        middle = list(dict.fromkeys(kinds[1:-1]))
        wanted = {
            "message": ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"],
            "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
            "reasoning": ["reasoning_summary_part.added", "reasoning_summary_text.delta",
                          "reasoning_summary_text.done", "reasoning_summary_part.done"],
        }  # fmt: skip
        assert middle == wanted.get(ended[index]["type"], [])
    assert [ended[index] for index in sorted(ended)] == final["output"]
    # An item that was cut is the last, and its response is not complete either.
    cut = [index for index, item in ended.items() if item.get("status") == "incomplete"]
    assert cut in ([], [max(ended, default=0)])
    if cut:
        assert final["status"] in ("incomplete", "failed", "cancelled")


KINDS: list[tuple[str, list[Reply], Json, list[str]]] = [
    ("text", [Reply(text="Hello there, friend.")], {"input": [message_item("user", "Say hello in exactly 3 words.")]}, ["message"]),
    ("string", [Reply(text="On track.")], {"input": "Write a one-sentence status update."}, ["message"]),
    ("system prompt", [Reply(text="Ahoy.")], {"input": [message_item("system", "You are a pirate."), message_item("user", "Hello.")]},
     ["message"]),
    ("developer", [Reply(text="Hi.")], {"input": [message_item("developer", "Be brief."), message_item("user", "Hello.")]}, ["message"]),
    ("tool", [Reply(tool_calls=[ASKED])], {"input": "Weather?", "tools": [WEATHER]}, ["function_call"]),
    ("image", [Reply(text="A heart.")],
     {"input": [message_item("user", [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": HEART}])]},
     ["message"]),
    ("file", [Reply(text="Milk.")],
     {"input": [message_item("user", [{"type": "input_text", "text": "Title?"},
                              {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,bWlsaw=="}])]},
     ["message"]),
    ("multi-turn", [Reply(text="Alice.")],
     {"input": [message_item("user", "My name is Alice."), message_item("assistant", "Hello Alice!"), message_item("user", "What is my name?")]},
     ["message"]),
    ("reasoning", [Reply(text="4.", reasoning="2+2")], {"input": "2+2?", "reasoning": {"effort": "low", "summary": "auto"}},
     ["reasoning", "message"]),
    ("own tools", [Reply(text="Hm.", tool_calls=[TODO]), Reply(text="Done.")], {"input": "Plan."},
     ["message", "function_call", "function_call_output", "message"]),
    ("options", [Reply(text="Ok.")],
     {"input": "x", "temperature": 0.2, "top_p": 0.5, "max_output_tokens": 64, "max_tool_calls": 2, "truncation": "auto",
      "metadata": {"a": "b"}, "parallel_tool_calls": False, "service_tier": "flex", "safety_identifier": "u",
      "prompt_cache_key": "k", "text": {"format": {"type": "text"}, "verbosity": "low"}, "store": False, "top_logprobs": 0,
      "presence_penalty": 0.5, "frequency_penalty": 0.5, "instructions": "Be brief.", "background": False,
      "stream_options": {"include_obfuscation": False}}, ["message"]),
    ("allowed tools", [Reply(text="Ok.")],
     {"input": "x", "tools": [WEATHER], "tool_choice": {
         "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}}, ["message"]),
    ("named tool", [Reply(tool_calls=[ASKED])],
     {"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}}, ["function_call"]),
    ("schema", [Reply(text='{"n": 5}')],
     {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}}, ["message"]),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["plain", "streamed"])
@pytest.mark.parametrize(("script", "body", "types"), [row[1:] for row in KINDS], ids=[row[0] for row in KINDS])
async def test_open_responses_requests_of_every_kind(
    api: Api, mode: str, script: list[Reply], body: Json, types: list[str]
) -> None:
    api.model.script = script
    response = await plain(api, **body) if mode == "plain" else (await streamed(api, **body))[-1]["response"]
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == types
    assert all(item["id"] and item["status"] == "completed" for item in response["output"])
    echoed = {
        name: body[name] for name in body if name in response and name not in ("input", "tools", "text", "reasoning")
    }
    assert {name: response[name] for name in echoed} == echoed


async def test_open_responses_function_call_round_trip(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[ASKED]), Reply(text="64 degrees.")]
    first = await plain(api, input="Weather?", tools=[WEATHER])
    (call,) = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "64 degrees and clear"}
    second = await plain(api, input=[output], previous_response_id=first["id"], tools=[WEATHER])
    assert second["output"][0]["content"][0]["text"] == "64 degrees."
    api.model.script = [Reply(text="Still 64.")]
    third = await plain(
        api, input=[message_item("user", "Weather?"), call, output, message_item("user", "Now?")], tools=[WEATHER]
    )
    assert third["status"] == "completed"


async def test_previous_response_precedes_new_input(api: Api) -> None:
    api.model.script = [Reply(text="OK."), Reply(text="Papaya.")]
    first = await plain(api, input="Remember this code word: papaya.")
    second = await plain(api, input="What was it?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    expected = ["Remember this code word: papaya.", "OK.", "What was it?"]
    assert [text for _, text in sent_messages(api.model.requests[1])] == expected


async def test_conversation_has_id(api: Api) -> None:
    api.model.script = [Reply(text="OK.")]
    assert (await plain(api, input="x", conversation="kitchen"))["conversation"] == {"id": "kitchen"}


async def test_calls_of_disallowed_tools_are_suppressed(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[ASKED]), Reply(text="I may not.")]
    other = responses_tool(function("send_email"))
    choice = {"type": "allowed_tools", "tools": [{"type": "function", "name": "send_email"}]}
    response = await plain(api, input="x", tools=[WEATHER, other], tool_choice=choice)
    assert not [item for item in response["output"] if item["type"] == "function_call"]
    assert "get_weather" in str(api.model.requests[0].body["tools"]), "all tools are still shown to the model"


async def test_stream_failures_match_schema(api: Api) -> None:
    api.model.handler = lambda _: Reply(status=500, error="oops")
    events = await streamed(api, input="x")
    assert events[-1]["response"]["error"]["code"]
    api.model.handler = lambda _: Reply(text="Half", finish="length")
    events = await streamed(api, input="x", max_output_tokens=16)
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (await plain(api, input="x", max_output_tokens=16))["status"] == "incomplete"


@pytest.mark.parametrize(
    "body", [{}, {"input": 5}, {"input": "x", "temperature": 9}, {"input": "x", "previous_response_id": "r"}]
)
async def test_errors_match_schema(api: Api, body: Json) -> None:
    async with api.post(PATH, body) as response:
        assert response.status in (400, 404)
        assert faults("refusal", await response.json()) == []


async def test_background_and_resumed_streams_are_equal(start: Start) -> None:
    async with HeldModel(Reply(text=["Do", "ne."])) as model:
        api = await start(settings=model.settings)
        plain_response = await plain(api, input="x", background=True)
        async with api.get(f"{PATH}/{plain_response['id']}?stream=true") as response:
            reading = asyncio.create_task(stream_of(response))
            await model.wait_for_request()
            model.release_all()
            events = checked(await reading)
    assert events[-1]["response"]["id"] == plain_response["id"]
    assert events[-1]["response"]["background"] is True


# ---- compaction


async def test_conversation_compaction(api: Api) -> None:
    api.model.script = [Reply(text="Summary: slate."), Reply(text="compacted")]
    items = [message_item("user", [{"type": "input_text", "text": "The word is slate."}]),
             message_item("assistant", [{"type": "output_text", "text": "OK."}]), message_item("user", "Compress this.")]  # fmt: skip
    async with api.post(f"{PATH}/compact", {"model": "hermes-agent", "input": items}) as response:
        body = await read_json(response)
    assert faults("compaction object", body) == []
    assert body["output"][-1]["type"] == "compaction"
    async with api.client.ws_connect(f"{api.url}{PATH}") as socket:
        events = await turn(socket, input=[*body["output"], message_item("user", "Continue.")], store=False, tools=[])
    assert events[-1]["response"]["status"] == "completed"


# ---- WebSocket


async def turn(socket: aiohttp.ClientWebSocketResponse, **body: Any) -> list[Json]:
    """The events of one turn on a socket, up to its end or its error."""
    await socket.send_json({"type": "response.create", "model": "hermes-agent", **body})
    events: list[Json] = []
    while not events or not (events[-1]["type"] in FINAL or "status" in events[-1]):
        events.append(await socket.receive_json(timeout=DEADLINE_S))
    if events[-1]["type"] in FINAL:
        check_events(events)
    else:
        assert faults("socket error", events[-1]) == []
    return events


async def test_websocket_turns_use_same_events(api: Api) -> None:
    api.model.script = [Reply(text=text, continues=False) for text in ("first", "second")]
    async with api.client.ws_connect(f"{api.url}{PATH}") as socket:
        for expected in ("first", "second"):
            events = await turn(socket, input=f"Reply with exactly: {expected}", store=False)
            assert events[-1]["response"]["output"][0]["content"][0]["text"] == expected


async def test_unstored_response_continues_on_its_websocket_only(api: Api) -> None:
    api.model.script = [Reply(text=text, continues=False) for text in ("OK.", "cobalt", "recovered")]
    async with api.client.ws_connect(f"{api.url}{PATH}") as socket:
        first = (await turn(socket, input="Remember: cobalt.", store=False))[-1]["response"]
        second = await turn(socket, input="The word?", store=False, previous_response_id=first["id"])
        assert second[-1]["response"]["previous_response_id"] == first["id"]
        assert [text for _, text in sent_messages(api.model.requests[1])] == ["Remember: cobalt.", "OK.", "The word?"]
    async with api.client.ws_connect(f"{api.url}{PATH}") as socket:
        last = second[-1]["response"]["id"]
        (error,) = await turn(socket, input="Go on.", store=False, previous_response_id=last)
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
        assert (await turn(socket, input="Start anew.", store=False))[-1]["response"]["status"] == "completed"


async def test_failed_continuation_is_forgotten(api: Api) -> None:
    api.model.script = [Reply(text="OK.")]
    async with api.client.ws_connect(f"{api.url}{PATH}") as socket:
        first = (await turn(socket, input="Remember: ember.", store=False))[-1]["response"]["id"]
        stray = {"type": "function_call_output", "call_id": "call_missing", "output": "x"}
        failed = await turn(socket, input=[stray], store=False, previous_response_id=first)
        assert failed[-1]["type"] in ("error", "response.failed")
        (error,) = await turn(socket, input="Go on.", store=False, previous_response_id=first)
        assert error["error"]["code"] == "previous_response_not_found"


async def test_websocket_rejects_background(api: Api) -> None:
    async with api.client.ws_connect(f"{api.url}{PATH}") as socket:
        (error,) = await turn(socket, input="x", background=True)
        assert error["error"]["param"] == "background"


async def test_get_responses_without_upgrade_is_426(api: Api) -> None:
    async with api.get(PATH) as response:
        await read_error(response, 426, "upgrade_required")
