"""MCP servers that an editor names for a session: started for it, used under the usual rules, and gone with it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from acp import RequestError, text_block
from acp.schema import EnvVariable, HttpHeader, HttpMcpServer, McpServerStdio, SseMcpServer

from hermes.core.home import Home
from hermes.server.status import local_url
from support.model_server import Call, Reply
from support.waiting import until
from tools.test_mcp import SERVERS, website

from .acp_client import WAIT_S, Editor, editing, started, stderr_of
from .conftest import Cli
from .test_acp_lines import INITIALIZE, Lines

__all__ = ["website"]
pytest.importorskip("mcp")
SECRET = "pa-ss-wo-rd-of-the-editor"


@pytest.fixture(autouse=True)
def patient(cli: Cli) -> None:
    """The first turn waits for servers, however slowly they start."""
    cli.configure("mcp_discovery_timeout: 60\n")


Named = McpServerStdio | HttpMcpServer | SseMcpServer


def program(name: str = "tools", **env: str) -> McpServerStdio:
    variables = [EnvVariable(name=variable, value=value) for variable, value in env.items()]
    return McpServerStdio(name=name, command=sys.executable, args=[str(SERVERS / "plain.py"), "stdio"], env=variables)


async def new_session(editor: Editor, cli: Cli, *servers: Named) -> str:
    await editor.initialize()
    return str((await editor.agent.new_session(cwd=str(cli.folder), mcp_servers=list(servers))).session_id)


async def prompt(editor: Editor, session_id: str, text: str = "go") -> None:
    async with asyncio.timeout(WAIT_S):
        await editor.agent.prompt(session_id=session_id, prompt=[text_block(text)])


def tool_names(cli: Cli) -> set[str]:
    return {tool["function"]["name"] for tool in cli.model.requests[-1].body["tools"]}


def programs(cli: Cli, editor: Editor) -> list[int]:
    """The processes that `hermes acp` has started."""
    pid = editor.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("backend", ["local", "bubblewrap"])
async def test_program_is_used_in_its_session_only(cli: Cli, backend: str) -> None:
    if backend == "bubblewrap":
        from hermes.sandbox import bubblewrap

        if failure := bubblewrap.probe():
            pytest.skip(f"bubblewrap does not work here: {failure}")
    cli.script(Reply(tool_calls=[Call("mcp_tools_add", {"a": 1, "b": 2})]), Reply(text="Done."), Reply(text="Nothing."))
    async with editing(cli, "--sandbox", backend) as editor:
        session_id = await new_session(editor, cli, program())
        await prompt(editor, session_id)
        assert {"mcp_tools_add", "mcp_tools_read_resource"} <= tool_names(cli)
        other = await editor.agent.new_session(cwd=str(cli.folder), mcp_servers=[])
        await prompt(editor, other.session_id)
        assert not any(name.startswith("mcp_") for name in tool_names(cli))
    assert '"total": 3' in cli.model_messages(1)[-1][1]
    assert stderr_of(cli) == ""


async def test_address_is_used_with_its_headers(cli: Cli, website: str) -> None:
    cli.script(Reply(tool_calls=[Call("mcp_web_echo", {"text": "over HTTP"})]), Reply(text="Done."))
    headers = [HttpHeader(name="Authorization", value=f"Bearer {SECRET}")]
    async with editing(cli) as editor:
        able = (await editor.initialize()).model_dump(by_alias=True)["agentCapabilities"]["mcpCapabilities"]
        assert (able["http"], able["sse"]) == (True, False)
        server = HttpMcpServer(type="http", name="web", url=website, headers=headers)
        await prompt(editor, await new_session(editor, cli, server))
    assert "over HTTP" in cli.model_messages(1)[-1][1]


async def test_destructive_tool_needs_permission(cli: Cli) -> None:
    erase = Reply(tool_calls=[Call("mcp_tools_erase", {"what": "the disk"})])
    cli.script(*[erase, Reply(text="Done.")] * 4)
    async with editing(cli) as editor:
        session_id = await new_session(editor, cli, program())
        editor.choose = lambda _: "deny"
        await prompt(editor, session_id)
        editor.choose = lambda _: "session"
        await prompt(editor, session_id)
        await prompt(editor, session_id)
        assert len(editor.permission_requests) == 2
        # It was allowed for this very program, not for another of its name.
        changed = [program(OTHER="1")]
        await editor.agent.load_session(cwd=str(cli.folder), session_id=session_id, mcp_servers=changed)
        await prompt(editor, session_id)
        assert len(editor.permission_requests) == 3
    assert "the disk is gone" not in cli.model_messages(1)[-1][1] and "the disk is gone" in cli.model_messages(3)[-1][1]


async def test_program_ends_with_its_session(cli: Cli) -> None:
    cli.script(Reply(text="Hello."))
    async with editing(cli) as editor:
        session_id = await new_session(editor, cli, program())
        await prompt(editor, session_id)
        [started] = programs(cli, editor)
        await editor.agent.close_session(session_id=session_id)
        await until(lambda: not os.path.exists(f"/proc/{started}"))
        assert editor.process.poll() is None


async def test_loaded_session_has_the_servers_that_are_named_then(cli: Cli) -> None:
    cli.script(Reply(text="Hello."), Reply(text="Again."))
    async with editing(cli) as editor:
        session_id = await new_session(editor, cli, program("first"))
        await prompt(editor, session_id)
        assert "mcp_first_add" in tool_names(cli)
        await editor.agent.load_session(cwd=str(cli.folder), session_id=session_id, mcp_servers=[program("second")])
        await prompt(editor, session_id)
        assert "mcp_second_add" in tool_names(cli) and "mcp_first_add" not in tool_names(cli)


async def test_server_is_switched_off_by_a_command(cli: Cli) -> None:
    cli.script(Reply(text="Hello."), Reply(text="Again."))
    async with editing(cli) as editor:
        session_id = await new_session(editor, cli, program())
        for command, is_offered in (("disable", False), ("enable", True)):
            await prompt(editor, session_id, f"/mcp {command} tools")
            await prompt(editor, session_id)
            assert ("mcp_tools_add" in tool_names(cli)) is is_offered


async def test_subagent_uses_servers_of_its_session(cli: Cli) -> None:
    cli.script(
        Reply(tool_calls=[Call("delegate_task", {"goal": "Add one and two."})]),
        Reply(tool_calls=[Call("mcp_tools_add", {"a": 1, "b": 2})]),
        Reply(text="It is three."),
        Reply(text="Done."),
    )
    async with editing(cli) as editor:
        await prompt(editor, await new_session(editor, cli, program()))
    assert '"total": 3' in cli.model_messages(2)[-1][1]


async def test_values_of_the_editor_are_never_shown(cli: Cli) -> None:
    cli.script(Reply(tool_calls=[Call("mcp_tools_echo", {"text": SECRET})]), Reply(text=f"It is {SECRET}."))
    async with editing(cli) as editor:
        await prompt(editor, await new_session(editor, cli, program(API_KEY=SECRET)))
        assert SECRET not in json.dumps(editor.updates)
    assert SECRET not in json.dumps(cli.model_messages(1)[-1])


async def test_server_that_does_not_start_is_reported(cli: Cli) -> None:
    cli.script(Reply(text="Without it."))
    missing = McpServerStdio(name="gone", command="/nowhere/at/all", args=[], env=[])
    async with editing(cli) as editor:
        await prompt(editor, await new_session(editor, cli, missing))
        assert "The MCP server 'gone' is not available" in editor.text("agent_thought_chunk")
        assert editor.text() == "Without it."


@pytest.mark.parametrize(
    ("servers", "field"),
    [
        ([program(), program()], "mcpServers[1].name"),
        ([program("")], "mcpServers[0].name"),
        ([program(f"s{at}") for at in range(65)], "mcpServers"),
        ([SseMcpServer(type="sse", name="old", url="http://127.0.0.1:1/sse", headers=[])], "mcpServers[0].type"),
    ],
    ids=["twice", "empty", "many", "sse"],
)
async def test_servers_that_cannot_be_used_are_refused(cli: Cli, servers: Sequence[Any], field: str) -> None:
    async with editing(cli) as editor:
        with pytest.raises(RequestError) as raised:
            await new_session(editor, cli, *servers)
    assert raised.value.code == -32602 and raised.value.data == {"field": field}


async def test_turn_with_servers_runs_here_beside_server_of_this_home(cli: Cli) -> None:
    cli.serve()
    cli.script(Reply(tool_calls=[Call("mcp_tools_add", {"a": 2, "b": 2})]), Reply(text="Four."))
    async with editing(cli, "--server", local_url(Home(cli.home))) as editor:
        await prompt(editor, await new_session(editor, cli, program()))
        assert editor.text() == "Four."
    assert '"total": 4' in cli.model_messages(1)[-1][1]


async def test_servers_as_zed_sends_them(cli: Cli, closed_port: int) -> None:
    """A program has no type, a variable is an object with name and value, and an address has a type."""
    cli.script(Reply(tool_calls=[Call("mcp_context7_add", {"a": 3, "b": 4})]), Reply(text="Seven."))
    args = [str(SERVERS / "plain.py"), "stdio"]
    servers = [
        {"name": "Context7", "command": sys.executable, "args": args, "env": [{"name": "MODE", "value": "quiet"}]},
        {"type": "http", "name": "gone", "url": f"http://127.0.0.1:{closed_port}/mcp", "headers": []},
    ]
    async with started(cli) as (reader, writer, _):
        lines = Lines(reader, writer)
        lines.write(INITIALIZE)
        await lines.answer(0)
        new = await lines.ask(1, "session/new", {"cwd": str(cli.folder), "mcpServers": servers})
        params = {"sessionId": new["result"]["sessionId"], "prompt": [{"type": "text", "text": "Add."}]}
        assert (await lines.ask(2, "session/prompt", params))["result"]["stopReason"] == "end_turn"
        calls = [update for update in lines.updates if update["sessionUpdate"] == "tool_call"]
        assert [call["title"].split(":")[0] for call in calls] == ["mcp_context7_add"]
    assert '"total": 7' in cli.model_messages(1)[-1][1]
