"""Hermes as an MCP server over HTTP, used by the official SDK's client in both eras of the protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hermes.core.spec import Control
from support.model_server import Call, Reply
from support.waiting import DEADLINE_S, until

from .clients import HeldModel, Json, pieces, read_error, read_json
from .conftest import KEY, Api, Start
from .test_keys import ALL, ANNA, BEN, KEYS, bearer

pytest.importorskip("mcp")
import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

ERAS = ("legacy", "auto")
NAMES = ["ask", "list_sessions", "read_session", "run_status", "schedule", "search_sessions"]


@pytest.fixture(params=ERAS)
def era(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def connected(api: Api, era: str = "legacy", key: str = KEY, **headers: str) -> AsyncIterator[Client]:
    sent = {**(bearer(key) if key else {}), **headers}
    async with (
        httpx2.AsyncClient(headers=sent, timeout=None) as http,
        Client(streamable_http_client(f"{api.url}/mcp", http_client=http), mode=era) as client,
    ):
        yield client


async def called(client: Client, name: str, **arguments: Any) -> Json:
    """What a tool answers when all goes well."""
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result
    return dict(result.structured_content)


async def failed(client: Client, name: str, **arguments: Any) -> Json:
    """The error that a tool answers."""
    result = await client.call_tool(name, arguments)
    assert result.is_error, result
    error: Json = result.structured_content["error"]
    assert result.content[0].text == error["message"]
    return error


# --- tools -----------------------------------------------------------------------------------------------------------


async def test_ask_begins_and_continues_a_session(start: Start, era: str) -> None:
    api = await start(Reply(text="Hello."), Reply(text="Again."))
    async with connected(api, era) as client:
        assert client.server_info.name == "hermes"
        tools = (await client.list_tools()).tools
        assert sorted(tool.name for tool in tools) == NAMES
        assert all(tool.input_schema["type"] == "object" for tool in tools)
        result = await client.call_tool("ask", {"message": "hi"})
        first = result.structured_content
        assert result.content[0].text == first["answer"] == "Hello." and first["completed"]
        second = await called(client, "ask", message="and now?", session_id=first["session_id"])
        assert second["answer"] == "Again." and second["session_id"] == first["session_id"]
        assert [turn.text for turn in api.model.requests[-1].turns[-3:]] == ["hi", "Hello.", "and now?"]
        run = await called(client, "run_status", run_id=second["run_id"])
        assert (run["status"], run["output"], run["kind"]) == ("completed", "Again.", "session")
    async with api.get(f"/api/sessions/{first['session_id']}/messages") as response:
        assert [message["content"] for message in (await read_json(response))["data"]] == [
            "hi", "Hello.", "and now?", "Again."
        ]  # fmt: skip


async def test_sessions_are_listed_searched_and_read(start: Start, era: str) -> None:
    api = await start(Reply(text="The melon is in the shed."))
    async with connected(api, era) as client:
        result = await called(client, "ask", message="Where is the melon?")
        session_id = result["session_id"]
        listed = await called(client, "list_sessions", limit=5)
        assert [session["id"] for session in listed["data"]] == [session_id] and not listed["has_more"]
        run = await called(client, "search_sessions", q="shed")
        assert [match["session_id"] for match in run["data"]] == [session_id]
        read = await called(client, "read_session", session_id=session_id, limit=1)
        assert [message["content"] for message in read["data"]] == ["The melon is in the shed."] and read["has_more"]
        resource = (await client.list_resources()).resources[0]
        assert str(resource.uri) == f"hermes://sessions/{session_id}" and resource.mime_type == "text/markdown"
        contents = (await client.read_resource(resource.uri)).contents
        assert "The melon is in the shed." in contents[0].text and contents[0].text.startswith("# ")
        template = (await client.list_resource_templates()).resource_templates[0]
        assert template.uri_template == "hermes://sessions/{session_id}"


async def test_schedule_creates_a_job(start: Start, era: str) -> None:
    api = await start(Reply(text="Hi."))
    async with connected(api, era) as client:
        job = await called(client, "schedule", schedule="every 2h", prompt="Water the plants.")
        assert job["prompt"] == "Water the plants." and job["state"] == "scheduled"
        error = await failed(client, "schedule", schedule="whenever", prompt="x")
        assert error["param"] == "schedule"
    async with api.get(f"/api/jobs/{job['id']}") as response:
        assert (await read_json(response))["job"]["schedule_display"] == job["schedule_display"]


async def test_skills_are_prompts(start: Start, era: str, home_folder: Path) -> None:
    folder = home_folder / "skills" / "tea"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: tea\ndescription: How tea is made here.\n---\n\nWater first.\n")
    api = await start(Reply(text="Hi."))
    async with connected(api, era) as client:
        prompt = next(prompt for prompt in (await client.list_prompts()).prompts if prompt.name == "tea")
        assert prompt.description == "How tea is made here."
        message = (await client.get_prompt("tea", {"task": "Make two cups."})).messages[0]
        assert message.content.text.startswith("Follow the skill tea: Make two cups.")
        assert "Water first." in message.content.text
        with pytest.raises(MCPError, match="coffee"):
            await client.get_prompt("coffee")


BAD_ARGUMENTS: list[tuple[str, Json, str, str]] = [
    ("ask", {}, "missing_required_parameter", "message"),
    ("ask", {"message": 1}, "invalid_type", "message"),
    ("ask", {"message": " "}, "empty_message", "message"),
    ("ask", {"message": "hi", "mesage": "hi"}, "unknown_parameter", "mesage"),
    ("ask", {"message": "hi", "session_id": "no-such"}, "session_not_found", ""),
    ("list_sessions", {"limit": 0}, "invalid_value", "limit"),
    ("list_sessions", {"cursor": "nonsense!"}, "invalid_cursor", "cursor"),
    ("search_sessions", {}, "missing_required_parameter", "q"),
    ("read_session", {"session_id": "no-such"}, "session_not_found", ""),
    ("run_status", {"run_id": "run_0"}, "run_not_found", ""),
    ("schedule", {"schedule": "1h", "prompt": "x", "when": "now"}, "unknown_parameter", "when"),
]


async def test_bad_arguments_name_the_field(start: Start, subtests: Any) -> None:
    api = await start()
    async with connected(api) as client:
        for name, arguments, code, param in BAD_ARGUMENTS:
            with subtests.test(name=name, arguments=arguments):
                error = await failed(client, name, **arguments)
                assert (error["code"], error["param"] or "") == (code, param), error
        with pytest.raises(MCPError, match="no tool 'answer'"):
            await client.call_tool("answer", {})
        with pytest.raises(MCPError, match="no session 'no-such'"):
            await client.read_resource("hermes://sessions/no-such")
        with pytest.raises(MCPError, match="no resource"):
            await client.read_resource("hermes://secrets/1")
    assert api.model.requests == []


async def test_failed_turn_is_a_tool_error(start: Start) -> None:
    api = await start(Reply(status=400, error="The request is malformed."))
    async with connected(api) as client:
        error = await failed(client, "ask", message="hi")
        assert error["hermes"]["run_id"].startswith("run_") and error["hermes"]["session_id"]


# --- keys ------------------------------------------------------------------------------------------------------------


async def test_wrong_key_is_401(start: Start) -> None:
    api = await start()
    for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}):
        async with api.post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, headers=headers) as response:
            await read_error(response, 401, "invalid_api_key")
    with pytest.raises(ExceptionGroup) as raised:
        async with connected(api, key="wrong"):
            pass
    assert raised.group_contains(MCPError)


async def test_missing_scope_is_refused(start: Start, era: str) -> None:
    keys = [
        {"name": "reader", "key": ANNA, "scopes": ["sessions:read"]},
        {"name": "chat", "key": BEN, "scopes": ["chat"]},
    ]
    api = await start(keys=keys)
    async with connected(api, era, ANNA) as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert names == {"list_sessions", "search_sessions", "read_session"}
        for name, arguments in (("ask", {"message": "hi"}), ("schedule", {"schedule": "1h", "prompt": "x"})):
            assert (await failed(client, name, **arguments))["code"] == "insufficient_scope"
    async with connected(api, era, BEN) as client:
        assert (await client.list_resources()).resources == []
        with pytest.raises(MCPError, match="sessions:read"):
            await client.read_resource("hermes://sessions/any")
    assert api.model.requests == []


async def test_session_of_another_owner_is_not_there(start: Start, era: str) -> None:
    api = await start(Reply(text="The melon is in the shed."), keys=KEYS)
    async with connected(api, era, ANNA) as anna, connected(api, era, BEN) as ben:
        run = await called(anna, "ask", message="Where is the melon?")
        session_id = run["session_id"]
        assert (await called(ben, "list_sessions"))["data"] == []
        assert (await called(ben, "search_sessions", q="melon"))["data"] == []
        assert (await ben.list_resources()).resources == []
        for name, arguments, code in (
            ("ask", {"message": "hi", "session_id": session_id}, "session_not_found"),
            ("read_session", {"session_id": session_id}, "session_not_found"),
            ("run_status", {"run_id": run["run_id"]}, "run_not_found"),
            ("schedule", {"schedule": "1h", "prompt": "x", "session_id": session_id}, "session_not_found"),
        ):
            assert (await failed(ben, name, **arguments))["code"] == code
        with pytest.raises(MCPError, match=f"no session '{session_id}'"):
            await ben.read_resource(f"hermes://sessions/{session_id}")
        assert (await called(anna, "read_session", session_id=session_id))["data"]
    assert len(api.model.requests) == 1


async def test_rates_hold(start: Start) -> None:
    keys = [{"name": "anna", "key": ANNA, "scopes": ALL, "tokens_per_minute": 1}]
    api = await start(Reply(text="Hi."), keys=keys)
    async with connected(api, key=ANNA) as client:
        await called(client, "ask", message="hi")
        assert (await failed(client, "ask", message="hi"))["code"] == "rate_limit_exceeded"
        assert (await called(client, "list_sessions"))["data"]
    keys = [{"name": "ben", "key": BEN, "scopes": ALL, "requests_per_minute": 1}]
    api = await start(keys=keys)
    for status in (200, 429):
        async with api.post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "ping"}, headers=bearer(BEN)) as response:
            assert response.status == status


# --- turns that take their time --------------------------------------------------------------------------------------


async def test_progress_is_reported(start: Start, era: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes.server.mcp_tools.MCP_PROGRESS_S", 0.05)
    model = HeldModel(Reply(tool_calls=[Call("todo", {})]), Reply(text="Done."))
    await model.start()
    api = await start(settings=model.settings)
    steps: list[tuple[float, str]] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        steps.append((progress, str(message)))

    async with connected(api, era) as client:
        asking = asyncio.create_task(client.call_tool("ask", {"message": "plan"}, progress_callback=on_progress))
        await until(lambda: sum("Asking" in text for _, text in steps) >= 3)
        model.release_all()
        result = await asyncio.wait_for(asking, DEADLINE_S)
    assert result.structured_content["answer"] == "Done."
    texts = [text for _, text in steps]
    assert texts[0] == "Started" and "Asking test-model" in texts and any(text.startswith("todo") for text in texts)
    assert [number for number, _ in steps] == sorted({number for number, _ in steps})
    await model.stop()


async def test_cancelled_request_stops_the_turn(start: Start, era: str) -> None:
    model = HeldModel(Reply(text="Never."))
    await model.start()
    api = await start(settings=model.settings)
    async with connected(api, era) as client:
        asking = asyncio.create_task(client.call_tool("ask", {"message": "hi"}))
        await until(lambda: model.requests)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: api.app.engine.active == 0)
        assert [run.state.status for run in await api.app.store.runs.list()] == ["cancelled"]
        assert (await called(client, "list_sessions"))["total"] == 1
    model.release_all()
    await model.stop()


async def test_turn_of_client_that_disconnects_is_stopped(start: Start) -> None:
    model = HeldModel(Reply(text="Never."))
    await model.start()
    api = await start(settings=model.settings)
    params = {"name": "ask", "arguments": {"message": "hi"}, "_meta": {"progressToken": 1}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    async with api.post("/mcp", body, headers={"Accept": "application/json, text/event-stream"}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        await until(lambda: model.requests)
        response.close()
    await until(lambda: api.app.engine.active == 0)
    assert [run.state.status for run in await api.app.store.runs.list()] == ["cancelled"]
    model.release_all()
    await model.stop()


async def test_detached_turn_continues_without_its_client(start: Start) -> None:
    model = HeldModel(Reply(text="Done."))
    await model.start()
    api = await start(settings=model.settings)
    async with connected(api, "auto", **{"X-Hermes-Detach": "true"}) as client:
        asking = asyncio.create_task(client.call_tool("ask", {"message": "hi"}))
        await until(lambda: model.requests)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        model.release_all()
        await until(lambda: api.app.engine.active == 0)
        assert [run.state.status for run in await api.app.store.runs.list()] == ["completed"]
    await model.stop()


async def test_slow_answer_becomes_a_stream(start: Start) -> None:
    model = HeldModel(Reply(text="Late."))
    await model.start()
    api = await start(settings=model.settings, keepalive_seconds=0.1)
    body = {
        "jsonrpc": "2.0",
        "id": 7,
        "method": "tools/call",
        "params": {"name": "ask", "arguments": {"message": "hi"}},
    }
    async with api.post("/mcp", body, headers={"Accept": "application/json, text/event-stream"}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert await response.content.readline() == b": keepalive\n"
        model.release_all()
        text = (await response.content.read()).decode()
    reply = json.loads(text.rpartition("data: ")[2])
    assert reply["id"] == 7 and reply["result"]["structuredContent"]["answer"] == "Late."
    # One that takes no stream gets JSON.
    async with api.post("/mcp", body, headers={"Accept": "application/json"}) as response:
        assert (await read_json(response))["id"] == 7
    await model.stop()


# --- the wire --------------------------------------------------------------------------------------------------------

WIRE: list[tuple[str, bytes, Json, int, int | None]] = [
    ("bad JSON", b"{", {}, 400, -32700),
    ("array", b"[]", {}, 400, -32600),
    ("not UTF-8", b"\xff", {}, 400, -32700),
    ("no message", b"{}", {}, 400, -32600),
    ("id of a wrong type", b'{"jsonrpc":"2.0","id":{},"method":"ping"}', {}, 400, -32600),
    ("wrong jsonrpc", b'{"jsonrpc":"1.0","id":1,"method":"ping"}', {}, 400, -32600),
    ("notification", b'{"jsonrpc":"2.0","method":"notifications/initialized"}', {}, 202, None),
    ("malformed notification", b'{"jsonrpc":"2.0","method":7}', {}, 400, -32600),
    ("response", b'{"jsonrpc":"2.0","id":1,"result":{}}', {}, 202, None),
    ("unknown method", b'{"jsonrpc":"2.0","id":1,"method":"no/such"}', {}, 200, -32601),
    ("bad params", b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{}}', {}, 200, -32602),
    ("ping", b'{"jsonrpc":"2.0","id":1,"method":"ping"}', {}, 200, None),
    (
        "unknown version",
        b'{"jsonrpc":"2.0","id":1,"method":"ping"}',
        {"MCP-Protocol-Version": "1999-01-01"},
        400,
        -32602,
    ),
    ("too large", b'{"jsonrpc":"2.0","id":1,"method":"' + b"x" * 200_000 + b'"}', {}, 413, -32600),
]


async def test_messages_on_the_wire(start: Start, subtests: Any) -> None:
    api = await start(max_body_bytes=100_000)
    for name, data, headers, status, code in WIRE:
        with subtests.test(name):
            sent = {"Content-Type": "application/json", **headers}
            async with api.client.post(f"{api.url}/mcp", data=data, headers=sent) as response:
                body = await response.read()
                assert response.status == status, body
                if code is not None:
                    error = json.loads(body)
                    assert error["jsonrpc"] == "2.0" and error["error"]["code"] == code and "id" in error
                elif status == 202:
                    assert body == b""
    for method in ("GET", "DELETE"):
        async with api.client.request(method, f"{api.url}/mcp") as response:
            await read_error(response, 405, "method_not_allowed")


async def test_foreign_origin_and_host_are_refused(start: Start) -> None:
    api, body = await start(key=""), {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    async with api.post("/mcp", body, headers={"Origin": "https://evil.example"}) as response:
        await read_error(response, 403, "origin_not_allowed")
    async with api.post("/mcp", body, headers={"Host": "evil.example"}) as response:
        await read_error(response, 403, "host_not_allowed")
    async with connected(api, key="") as client:
        assert len((await client.list_tools()).tools) == len(NAMES)


async def begun_session(api: Api) -> dict[str, str]:
    """The header of a new MCP session."""
    begin = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    async with api.post("/mcp", {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": begin}) as response:
        assert (await read_json(response))["result"]["protocolVersion"] == "2025-06-18"
        return {"Mcp-Session-Id": response.headers["Mcp-Session-Id"]}


ASK = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "ask", "arguments": {"message": "hi"}}}


async def test_used_request_id_is_refused(start: Start) -> None:
    api = await start(Reply(text="Hi."))
    session = await begun_session(api)
    for status in (200, 400):
        async with api.post("/mcp", ASK, headers=session) as response:
            assert response.status == status, await response.text()


async def test_request_id_that_is_used_twice_at_once_is_refused_once(start: Start) -> None:
    async with HeldModel(Reply(text="Hi.")) as model:
        api = await start(settings=model.settings)
        session = await begun_session(api)

        async def ask() -> int:
            async with api.post("/mcp", ASK, headers=session) as response:
                await response.read()
                return response.status

        asking = [asyncio.create_task(ask()) for _ in range(4)]
        await model.wait_for_request()
        model.release_all()
        assert sorted(await asyncio.gather(*asking)) == [200, 400, 400, 400]


async def test_failure_after_text_is_an_error(start: Start, era: str) -> None:
    api = await start(Reply(text=["Hel", "lo"], error_event={"message": "Broken."}))
    async with connected(api, era) as client:
        error = await failed(client, "ask", message="hi")
    assert error["hermes"]["answer"].startswith("Hel")


async def test_turn_that_is_stopped_from_elsewhere_is_an_error(start: Start, era: str) -> None:
    model = HeldModel(Reply(text=["Half ", "of it."]))
    await model.start()
    api = await start(settings=model.settings)
    async with connected(api, era) as client:
        asking = asyncio.create_task(failed(client, "ask", message="hi"))
        await until(lambda: model.requests)
        model.release()
        [run] = await api.app.store.runs.list()
        async with api.get(f"/v1/runs/{run.spec.run_id}/events") as following:
            async for frame in pieces(following):
                if "Half" in str(frame.data):
                    break
        await api.app.engine.control(run.spec.run_id, Control("interrupt", surface="mcp"))
        error = await asking
    assert error["code"] == "turn_cancelled" and error["hermes"]["answer"].startswith("Half")
    await model.stop()
