"""Responses over a WebSocket: who may connect, turns one after the other, errors that leave the socket open, and its end."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from support.model_server import Call, Reply
from support.waiting import DEADLINE_S, until

from .clients import HeldModel, Json, function, read_json, responses_tool, sent_messages, system_of
from .conftest import Api, Start

PATH = "/v1/responses"
FINAL = ("response.completed", "response.failed", "response.incomplete")
HALL = Call("lamp", {"room": "hall"}, id="call_lamp")
Socket = aiohttp.ClientWebSocketResponse


def connect(api: Api, **options: Any) -> Any:
    return api.client.ws_connect(f"{api.url}{PATH}", **options)


async def ask(socket: Socket, input: Any = "hi", **fields: Any) -> None:
    await socket.send_json({"type": "response.create", "input": input, **fields})


async def answer(socket: Socket) -> list[Json]:
    """The events up to the end of a turn, or an error."""
    events: list[Json] = []
    while not events or not (events[-1]["type"] in FINAL or "status" in events[-1]):
        events.append(await socket.receive_json(timeout=DEADLINE_S))
    return events


async def turn(socket: Socket, input: Any = "hi", **fields: Any) -> Json:
    """The object of a turn that ends in one."""
    await ask(socket, input, **fields)
    events = await answer(socket)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response: Json = events[-1]["response"]
    return response


async def error(socket: Socket) -> Json:
    """The error that comes next."""
    told_error: Json = await socket.receive_json(timeout=DEADLINE_S)
    assert set(told_error) >= {"type", "status", "error"}
    assert told_error["type"] == "error"
    assert set(told_error["error"]) >= {"type", "code", "message", "param"}
    return {"status": told_error["status"], **told_error["error"]}


# ---- who may connect


async def refusal(api: Api, **options: Any) -> int:
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        async with aiohttp.ClientSession() as client, client.ws_connect(f"{api.url}{PATH}", **options):
            pass
    return caught.value.status


async def test_websocket_checks_key_and_origin(api: Api) -> None:
    assert await refusal(api) == 401
    assert await refusal(api, headers={"Authorization": "Bearer wrong"}) == 401
    key = {"Authorization": api.client.headers["Authorization"]}
    assert await refusal(api, headers=key, origin="https://evil.example") == 403


async def test_websocket_allows_listed_and_own_origin(start: Start) -> None:
    api = await start(*[Reply(text="Hello.", continues=False)] * 2, cors_origins=["https://app.example"])
    for origin in ("https://app.example", api.url):
        async with connect(api, origin=origin) as socket:
            assert (await turn(socket))["status"] == "completed"


# ---- turns


async def test_websocket_turn_events(api: Api) -> None:
    api.model.script = [Reply(text=["Do", "ne."], continues=False)] * 2
    async with connect(api) as socket:
        await ask(socket)
        events = await answer(socket)
        types = [event["type"].removeprefix("response.") for event in events]
        assert types[:2] == ["created", "in_progress"]
        assert types[-1] == "completed"
        # What comes next is the next turn.
        assert (await turn(socket))["output"][0]["content"][0]["text"] == "Done."
    async with api.get(f"{PATH}/{events[-1]['response']['id']}") as response:
        assert await read_json(response) == events[-1]["response"]


async def test_websocket_turn_is_incremental(start: Start) -> None:
    async with HeldModel(Reply(text=["Hello", " there"])) as model:
        api = await start(settings=model.settings)
        async with connect(api) as socket:
            await ask(socket)
            deltas = []
            for _ in range(2):
                model.release()
                while (event := await socket.receive_json(timeout=DEADLINE_S))["type"] != "response.output_text.delta":
                    pass
                deltas.append(event["delta"])
            assert deltas == ["Hello", " there"]
            await answer(socket)


async def test_websocket_handshake_headers_apply_to_turns(api: Api) -> None:
    todo = Call("todo", {}, id="call_todo")
    api.model.script = [Reply(tool_calls=[todo]), Reply(text="Done.")]
    async with connect(api, headers={"X-Hermes-Tool-Items": "mcp", "X-Hermes-Session-Id": "hall"}) as socket:
        answer = await turn(socket)
    assert [item["type"] for item in answer["output"]] == ["mcp_call", "message"]
    async with api.get("/api/sessions/hall") as response:
        await read_json(response)


async def test_websocket_requests_are_queued_in_order_and_limited(start: Start) -> None:
    async with HeldModel(*[Reply(text=f"answer {n}", continues=False) for n in range(9)]) as model:
        api = await start(settings=model.settings)
        async with connect(api) as socket:
            for number in range(10):
                await ask(socket, f"question {number}", store=False)
            events = []
            while (event := await socket.receive_json(timeout=DEADLINE_S))["type"] != "error":
                events.append(event)
            assert event["error"]["code"] == "rate_limit_exceeded"
            assert len(model.requests) <= 1
            model.release_all()
            answers = []
            while len(answers) < 9:
                event = await socket.receive_json(timeout=DEADLINE_S)
                if event["type"] in FINAL:
                    answers.append(event["response"]["output"][0]["content"][0]["text"])
    assert answers == [f"answer {n}" for n in range(9)]
    assert [sent_messages(request)[-1][1] for request in model.requests] == [f"question {n}" for n in range(9)]


async def test_websocket_unstored_chains(api: Api) -> None:
    api.model.script = [Reply(text=f"answer {n}", continues=False) for n in range(10)]
    async with connect(api) as socket:
        previous: Json = {}
        for number in range(10):
            answer = await turn(socket, f"question {number}", store=False, **previous)
            previous = {"previous_response_id": answer["id"]}
    assert [len(sent_messages(request)) for request in api.model.requests] == [2 * n + 1 for n in range(10)]
    async with api.get(f"{PATH}/{answer['id']}") as response:
        assert response.status == 404


async def test_websocket_client_tool_round_trip(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[HALL]), Reply(text="It is on.")]
    tools = [responses_tool(function("lamp", room={"type": "string"}))]
    async with connect(api) as socket:
        response = await turn(socket, "light", tools=tools, store=False)
        assert response["output"][-1]["call_id"] == "call_lamp"
        output = {"type": "function_call_output", "call_id": "call_lamp", "output": "done"}
        again = await turn(socket, [output], tools=tools, store=False, previous_response_id=response["id"])
    assert again["output"][-1]["content"][0]["text"] == "It is on."


async def test_websocket_ignores_stream_options(api: Api) -> None:
    api.model.script = [Reply(text="Hello.", continues=False)] * 2
    async with connect(api) as socket:
        for stream in (True, False):
            response = await turn(
                socket, stream=stream, stream_options={"include_obfuscation": False}, background=False
            )
            assert response["status"] == "completed"


WARM_UPS: list[tuple[Json, list[tuple[str, str]]]] = [
    ({}, []),
    ({"input": []}, []),
    ({"input": [{"role": "developer", "content": "Be brief."}]}, []),
    ({"input": [{"role": "user", "content": "I am Ada."}]}, [("user", "I am Ada.")]),
    ({"input": "I am Ada.", "store": True}, [("user", "I am Ada.")]),
]


@pytest.mark.parametrize(("fields", "before"), WARM_UPS)
async def test_websocket_warm_up_runs_no_turn(api: Api, fields: Json, before: list[tuple[str, str]]) -> None:
    api.model.script = [Reply(text="Hello.", continues=False), Reply(text="Again.", continues=False)]
    async with connect(api) as socket:
        await socket.send_json({"type": "response.create", "generate": False, "store": False, **fields})
        events = await answer(socket)
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        warm = events[-1]["response"]
        assert (warm["output"], warm["usage"]["total_tokens"], api.model.requests) == ([], 0, [])
        response = await turn(socket, "one", store=False, previous_response_id=warm["id"])
        await turn(socket, "two", store=False, previous_response_id=response["id"])
    first, second = api.model.requests
    assert sent_messages(first) == [*before, ("user", "one")]
    assert sent_messages(second) == [*before, ("user", "one"), ("assistant", "Hello."), ("user", "two")]
    if "Be brief." in str(fields):
        assert all("Be brief." in system_of(request) for request in (first, second))


async def test_websocket_warm_up_continues_stored_response(api: Api) -> None:
    api.model.script = [Reply(text=text, continues=False) for text in "abc"]
    async with connect(api) as socket:
        first = await turn(socket, "one")
        await socket.send_json({"type": "response.create", "generate": False, "previous_response_id": first["id"]})
        warm = (await answer(socket))[-1]["response"]
        await turn(socket, "two", previous_response_id=warm["id"])
        second = {"type": "response.create", "generate": False, "previous_response_id": first["id"], "input": "and"}
        await socket.send_json(second)
        warm = (await answer(socket))[-1]["response"]
        await turn(socket, "three", previous_response_id=warm["id"])
    assert [text for _, text in sent_messages(api.model.requests[1])] == ["one", "a", "two"]
    assert [text for _, text in sent_messages(api.model.requests[2])] == ["one", "a", "and", "three"]


async def test_websocket_continues_any_stored_response(api: Api) -> None:
    api.model.script = [Reply(text=text, continues=False) for text in "abc"]
    async with api.post(PATH, {"input": "one"}) as response:
        first = (await read_json(response))["id"]
    async with connect(api) as socket:
        second = await turn(socket, "two", previous_response_id=first)
    async with api.post(PATH, {"input": "three", "previous_response_id": second["id"]}) as response:
        await read_json(response)
    assert [text for _, text in sent_messages(api.model.requests[2])] == ["one", "a", "two", "b", "three"]


async def test_websocket_large_request(api: Api) -> None:
    api.model.script = [Reply(text="Read.")]
    async with connect(api) as socket:
        response = await turn(socket, "short", padding="x" * 6_000_000)
    assert response["status"] == "completed"


# ---- errors

WRONG: list[tuple[str | bytes, str, str | None]] = [
    ("not json", "invalid_json", None),
    ('{"type": NaN}', "invalid_json", None),
    ("[]", "invalid_body", None),
    ('"text"', "invalid_body", None),
    (b"\x00\x01", "inval", None),
    ("{}", "", "type"),
    ('{"type": "response.cancel"}', "", "type"),
    ('{"type": 5}', "", "type"),
    ('{"type": "response.create"}', "missing_required_parameter", "input"),
    ('{"type": "response.create", "input": 5}', "invalid_type", "input"),
    ('{"type": "response.create", "input": "x", "temperature": 9}', "invalid_value", "temperature"),
    ('{"type": "response.create", "input": "x", "stream": "maybe"}', "invalid_type", "stream"),
    ('{"type": "response.create", "input": "x", "stream_options": 5}', "invalid_type", "stream_options"),
    ('{"type": "response.create", "input": "x", "background": true}', "unsupported_parameter", "background"),
    ('{"type": "response.create", "input": "x", "generate": "maybe"}', "invalid_type", "generate"),
    ('{"type": "response.create", "input": 5, "generate": false}', "invalid_type", "input"),
    ('{"type": "response.create", "input": "x", "previous_response_id": "resp_0"}', "previous_response_not_found",
     "previous_response_id"),
]  # fmt: skip


async def test_websocket_error_leaves_socket_open(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    async with connect(api) as socket:
        for data, code, param in WRONG:
            await (socket.send_bytes(data) if isinstance(data, bytes) else socket.send_str(data))
            error_event = await error(socket)
            assert error_event["status"] == 400, (data, error_event)
            assert error_event["code"].startswith(code), (data, error_event)
            if param is not None:
                assert error_event["param"] == param, (data, error_event)
        assert (await turn(socket))["status"] == "completed"


async def test_websocket_every_frame_counts_against_rate_limit(start: Start) -> None:
    """The handshake counts as one request; each frame, valid or not, as another."""
    limited = {"name": "carol", "key": "sk-carol-0123456789abcdef", "scopes": ["chat"], "requests_per_minute": 4}
    api = await start(keys=[limited])
    async with connect(api, headers={"Authorization": f"Bearer {limited['key']}"}) as socket:
        codes = []
        for data in ("[1]", b"\x00", "not json", "[1]", b"\x00", "not json"):
            await (socket.send_bytes(data) if isinstance(data, bytes) else socket.send_str(data))
            codes.append((await error(socket))["code"])
    assert codes == ["invalid_body", "invalid_body", "invalid_json", *["rate_limit_exceeded"] * 3]


async def test_websocket_frames_are_not_compressed(api: Api) -> None:
    async with connect(api, compress=15) as socket:
        assert not socket.compress


async def test_websocket_failed_turn_evicts_continued_response(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes.agent.decisions.RETRY_WAIT_S_MAX", 0.01)
    api.model.script = [Reply(text="Hello."), Reply(status=401, error="no")]
    async with connect(api) as socket:
        first = await turn(socket, store=False)
        await ask(socket, "more", store=False, previous_response_id=first["id"])
        events = await answer(socket)
        assert events[-1]["type"] in ("response.failed", "error")
        assert "provider_auth_failed" in str(events)
        await ask(socket, "more", store=False, previous_response_id=first["id"])
        assert (await error(socket))["code"] == "previous_response_not_found"


async def test_websocket_concurrency_cap(start: Start) -> None:
    async with HeldModel(Reply(text="Hello."), Reply(text="Hello.", continues=False)) as model:
        api = await start(settings=model.settings, max_concurrent_runs=1)
        first = asyncio.create_task(api.ask("first"))
        await model.wait_for_request()
        async with connect(api) as socket:
            await ask(socket)
            error_event = await error(socket)
            assert (error_event["status"], error_event["code"]) == (429, "rate_limit_exceeded")
            model.release_all()
            await first
            assert (await turn(socket))["status"] == "completed"


# ---- the end of a socket


async def test_websocket_disconnect_cancels_turn(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with HeldModel(Reply(text=["Half", " an answer."])) as model:
        api = await start(settings=model.settings)
        # No ping finds out that the client is gone: only the connection can tell.
        monkeypatch.setattr("hermes.server.websocket.SOCKET_PING_S", 3600)
        async with connect(api) as socket:
            await ask(socket)
            model.release()
            response_id = (await socket.receive_json(timeout=DEADLINE_S))["response"]["id"]
            while (await socket.receive_json(timeout=DEADLINE_S))["type"] != "response.output_text.delta":
                pass
            socket._response.connection.transport.abort()
        await model.until(lambda: model.open_streams == 0)
        assert model.requests[0].closed_early

        async def look() -> Json:
            async with api.get(f"{PATH}/{response_id}") as response:
                return await read_json(response)

        result = await until(look, lambda value: value["status"] != "in_progress")
    assert (result["status"], result["incomplete_details"]) == ("incomplete", {"reason": "client_disconnected"})
    assert result["output"][0]["content"][0]["text"] == "Half"


async def test_websocket_is_closed_on_drain(api: Api) -> None:
    async with connect(api) as socket:
        api.context.drain()
        message = await socket.receive(timeout=DEADLINE_S)
        assert message.type is aiohttp.WSMsgType.CLOSE
        assert message.data == 1012


async def test_websocket_maximum_lifetime(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes.server.websocket.SOCKET_S_MAX", 0.1)
    async with connect(api) as socket:
        assert (await error(socket))["code"] == "websocket_connection_limit_reached"
        message = await socket.receive(timeout=DEADLINE_S)
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1000)
