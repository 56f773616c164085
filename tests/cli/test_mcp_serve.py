"""`hermes mcp serve` as MCP hosts start it: the official SDK's client over real pipes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes.store.stores import Store
from support.gateway import Gateway, serving
from support.model_server import Call, ModelServer, Reply, Request
from support.waiting import until

pytest.importorskip("mcp")
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError
from mcp_types import ElicitResult, ErrorData

SURELY_S = 120.0
KEY = "sk-server-0123456789abcdef0123456789"


async def _answer(request: Request) -> Reply:
    """The text of the last message again; one that says `wait` is never answered."""
    text = request.turns[-1].text
    if text == "wait":
        await asyncio.Event().wait()
    return Reply(text=f"You said {text}.")


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    scripted = ModelServer(handler=_answer)
    await scripted.start()
    yield scripted
    await scripted.stop()


def _settings(model: ModelServer) -> dict[str, Any]:
    return {
        "model": {"default": "test-model", "base_url": f"{model.url}/v1", "api_key": "sk-provider-0123456789abcdef"},
        "auxiliary": {"title_generation": {"enabled": False}},
        "agent": {"api_max_retries": 0},
    }


@asynccontextmanager
async def host(
    home: Path, *args: str, mode: str = "legacy", elicit: Any = None, **variables: str
) -> AsyncIterator[Client]:
    env = {**os.environ, "HERMES_HOME": str(home), **variables}
    started = StdioServerParameters(command=sys.executable, args=["-m", "hermes", "mcp", "serve", *args], env=env)
    reading = {"read_timeout_seconds": SURELY_S, "elicitation_callback": elicit}
    async with Client(stdio_client(started), mode=mode, **reading) as client:
        yield client


async def use(client: Client, model: ModelServer) -> None:
    """Two turns of a session with progress, what is on record of them, a refusal, and a turn that is cancelled."""
    steps: list[str] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        steps.append(str(message))

    first = (await client.call_tool("ask", {"message": "one"}, progress_callback=on_progress)).structured_content
    assert first["answer"] == "You said one." and "Asking test-model" in steps
    session_id = first["session_id"]
    second = await client.call_tool("ask", {"message": "two", "session_id": session_id})
    assert second.structured_content["answer"] == "You said two."
    read = (await client.call_tool("read_session", {"session_id": session_id})).structured_content
    assert [message["content"] for message in read["data"]] == ["one", "You said one.", "two", "You said two."]
    assert "You said two." in (await client.read_resource(f"hermes://sessions/{session_id}")).contents[0].text
    refused = await client.call_tool("ask", {"message": "hi", "session_id": "no-such"})
    assert refused.is_error and refused.structured_content["error"]["code"] == "session_not_found"

    async def sessions() -> dict[str, Any]:
        listed = (await client.call_tool("list_sessions", {})).structured_content["data"]
        return {session["id"]: session["active_run_id"] for session in listed}

    async def is_working() -> bool:
        return len(model.requests) == 3 and any((await sessions()).values())

    async def is_stopped() -> bool:
        return not any((await sessions()).values())

    asking = asyncio.create_task(client.call_tool("ask", {"message": "wait"}))
    await until(is_working)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(is_stopped)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_serve_in_process(tmp_path: Path, model: ModelServer, mode: str) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(_settings(model)))
    async with host(tmp_path, mode=mode) as client:
        assert len((await client.list_tools()).tools) == 6
        await use(client, model)


def _line(method: str, request_id: int | None = None, **params: Any) -> bytes:
    message = {"jsonrpc": "2.0", "method": method, "params": params}
    return json.dumps(message if request_id is None else {**message, "id": request_id}).encode() + b"\n"


INITIALIZE = _line(
    "initialize", 1, protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "test", "version": "1"}
)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, None], ids=["SIGTERM", "SIGINT", "EOF"])
async def test_serve_stops_turns_when_it_ends(tmp_path: Path, model: ModelServer, end: int | None) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**_settings(model), "api_server": {"max_body_bytes": 4096}}))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "hermes", "mcp", "serve"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "HERMES_HOME": str(tmp_path)},
    )
    assert process.stdin is not None and process.stdout is not None
    # Lines that are too long, or no messages, are refused.
    process.stdin.write(b"x" * 100_000 + b"\nnonsense\n" + INITIALIZE)
    for expected in (None, None, 1):
        assert json.loads(await asyncio.wait_for(process.stdout.readline(), SURELY_S))["id"] == expected
    process.stdin.write(_line("notifications/initialized"))
    process.stdin.write(_line("tools/call", 2, name="ask", arguments={"message": "wait"}))

    await model.until(lambda: bool(model.requests))
    if end is None:
        process.stdin.close()
    else:
        process.send_signal(end)
    assert await asyncio.wait_for(process.wait(), SURELY_S) == (130 if end == signal.SIGINT else 0)
    store = Store(tmp_path / "state.db")
    try:
        assert [run.state.status for run in store.runs.list()] == ["cancelled"]
    finally:
        store.close()


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_serve_relays_to_a_server(tmp_path: Path, model: ModelServer, mode: str) -> None:
    gateway = Gateway(tmp_path / "server", **_settings(model), api_server={"key": KEY})
    await gateway.start()
    (tmp_path / "home").mkdir()
    try:
        async with host(tmp_path / "home", "--server", gateway.url, mode=mode, HERMES_API_KEY=KEY) as client:
            await use(client, model)
        assert not (tmp_path / "home" / "state.db").exists()
        with pytest.raises(ExceptionGroup) as raised:
            async with host(tmp_path / "home", "--server", gateway.url, HERMES_API_KEY="wrong"):
                pass
        assert raised.group_contains(MCPError, match="refuses the key")
    finally:
        await gateway.end()
        await gateway.client.close()


@pytest.mark.parametrize(
    ("answer", "is_run", "text"),
    [
        (ElicitResult(action="accept", content={"choice": "once", "answer": "blue"}), True, "blue"),
        (ElicitResult(action="accept", content={"choice": "nonsense"}), False, "gave no answer"),
        (ElicitResult(action="decline"), False, "gave no answer"),
        (ErrorData(code=-32603, message="The form fell over."), False, "gave no answer"),
        (None, False, ""),
    ],
    ids=["accepted", "nonsense", "declined", "failed", "without-forms"],
)
async def test_approvals_and_questions_are_elicited_from_host(
    tmp_path: Path, model: ModelServer, answer: Any, is_run: bool, text: str
) -> None:
    """Approvals and questions come as forms where the host has them; without forms they are denied."""
    target = tmp_path / "made"
    settings = {**_settings(model), "terminal": {"backend": "local"}, "approvals": {"mode": "manual"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    model.handler = None
    model.script = [
        Reply(tool_calls=[Call("terminal", {"command": f"touch {target}"})]),
        Reply(tool_calls=[Call("clarify", {"question": "Which colour?", "choices": ["red", "blue"]})]),
        Reply(text="Done."),
    ]
    requests: list[Any] = []

    async def elicit(context: Any, params: Any) -> Any:
        requests.append(params.model_dump(by_alias=True))
        return answer

    async with host(tmp_path, elicit=elicit if answer is not None else None) as client:
        result = await client.call_tool("ask", {"message": "go"})
    assert result.structured_content["answer"] == "Done."
    assert target.exists() is is_run
    results = [turn.text for turn in model.requests[-1].turns if turn.role == "tool"]
    if answer is None:
        assert requests == []
        return
    assert text in results[1]
    assert f"touch {target}" in requests[0]["message"] and requests[1]["message"] == "Which colour?"
    assert requests[0]["requestedSchema"]["properties"]["choice"]["enum"][0] == "once"
    assert requests[1]["requestedSchema"]["properties"]["answer"]["enum"] == ["red", "blue"]


@pytest.mark.parametrize("at_server", [False, True])
async def test_lines_that_are_no_message_are_answered(
    tmp_path: Path, model: ModelServer, at_server: bool, closed_port: int
) -> None:
    args = ("--server", f"http://127.0.0.1:{closed_port}") if at_server else ()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(_settings(model)))
    env = {**os.environ, "HERMES_HOME": str(tmp_path)}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hermes", "mcp", "serve", *args, env=env, stdin=pipe, stdout=pipe
    )
    assert process.stdin is not None and process.stdout is not None
    ping = {"jsonrpc": "2.0", "id": 7, "method": "ping"}
    lines = [b"this is no JSON", b"[" * 100_000, b"[]", b"5", b"{}", b'{"jsonrpc":"2.0","id":1}', b"", b"\xff\xfe"]
    lines += [b'{"jsonrpc":"2.0","id":%s,"method":"ping"}' % id_ for id_ in (b"null", b"1.5", b"[]", b"true")]
    codes = [-32700, -32700, -32600, -32600, -32600, -32600, -32700, *[-32600] * 4]
    try:
        process.stdin.write(b"".join(line + b"\n" for line in (*lines, json.dumps(ping).encode())))
        async with asyncio.timeout(SURELY_S):
            answers = [json.loads(await process.stdout.readline()) for _ in (*codes, ping)]
        refusals = [answer for answer in answers if answer["id"] is None]
        assert [answer["error"]["code"] for answer in refusals] == codes
        assert [answer["id"] for answer in answers if answer["id"] is not None] == [7], "the next message is read"
    finally:
        process.stdin.close()
        async with asyncio.timeout(SURELY_S):
            await process.wait()


@pytest.mark.parametrize("way", ["in process", "at a server"])
async def test_odd_params_end_nothing(tmp_path: Path, model: ModelServer, way: str) -> None:
    """Params of any type are answered as requests, and passed over in notifications."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.yaml").write_text(yaml.safe_dump(_settings(model)))
    version = "io.modelcontextprotocol/protocolVersion"
    odd: list[Any] = ["x", [1], {version: 5}, {version: "1\r\nX: y"}, {"progressToken": {}}]
    notifications = [{"requestId": {"a": 1}}, {"requestId": [1]}, {"requestId": True}, {}]
    async with AsyncExitStack() as stack:
        args: tuple[str, ...] = ()
        if way == "at a server":
            gateway = await stack.enter_async_context(serving(tmp_path / "server", **_settings(model)))
            args = ("--server", gateway.url)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hermes", "mcp", "serve", *args, env={**os.environ, "HERMES_HOME": str(home)},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        messages: list[dict[str, Any]] = [
            *({"method": "notifications/cancelled", "params": params} for params in notifications),
            *({"id": at, "method": "tools/list", "params": {"_meta": meta}} for at, meta in enumerate(odd)),
            *[{"id": "same", "method": "ping"}] * 3,
            {"id": 99, "result": {}},
            {"id": "\ud800", "method": "ping"},
        ]
        text = "".join(json.dumps({"jsonrpc": "2.0", **message}) + "\n" for message in messages)
        process.stdin.write(text.encode())
        async with asyncio.timeout(SURELY_S):
            answers = [
                json.loads(await process.stdout.readline())
                for message in messages
                if {"id", "method"} <= message.keys()
            ]
        assert sorted(str(answer["id"]) for answer in answers) == ["0", "1", "2", "3", "4", *["same"] * 3, "\ufffd"]
        process.stdin.close()
        async with asyncio.timeout(SURELY_S):
            assert await process.wait() == 0
