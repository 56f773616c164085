"""A stdio MCP server runs in a sandbox of its own unless `sandbox: false` is set for it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.conftest import MakeHarness
from hermes.core.text import text_of
from hermes.sandbox import bubblewrap
from support.model_server import Call, ModelServer, Reply

SERVER = '''
import os, socket
from mcp.server.mcpserver import MCPServer

server = MCPServer("probe", log_level="ERROR")

@server.tool()
def look(path: str, port: int) -> str:
    """Try to reach what is outside."""
    found = []
    try:
        found.append("read " + open(path).read())
    except OSError as error:
        found.append("unread " + type(error).__name__)
    with open(path, "w") as file:  # in a sandbox there is only a folder of its own
        file.write("changed")
    try:
        socket.create_connection(("127.0.0.1", port), 3)
        found.append("connected")
    except OSError:
        found.append("unconnected")
    found.append("planted" if "HERMES_TEST_SECRET" in os.environ else "clean")
    open(os.path.expanduser("~/kept"), "w").write("x")
    return "; ".join(found)

server.run("stdio")
'''


@pytest.mark.parametrize(
    ("sandbox", "expected"),
    [
        (True, ["unread FileNotFoundError", "unconnected", "clean"]),
        (False, ["read outside", "connected", "clean"]),
    ],
)
async def test_mcp_server_is_confined_to_its_sandbox(
    make_harness: MakeHarness,
    server: ModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sandbox: bool,
    expected: list[str],
) -> None:
    if sandbox and (failure := bubblewrap.probe()):
        pytest.skip(f"bubblewrap does not work here: {failure}")
    monkeypatch.setenv("HERMES_TEST_SECRET", "planted")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "user").mkdir()
    program, outside = tmp_path / "program/server.py", tmp_path / "outside"
    program.parent.mkdir()
    program.write_text(SERVER)
    outside.write_text("outside")
    wanted: dict[str, Any] = {"command": sys.executable, "args": [str(program)], "approval": "never"}
    harness = make_harness({"mcp_discovery_timeout": 30, "mcp_servers": {"probe": {**wanted, "sandbox": sandbox}}})
    harness.offer()
    harness.toolsets = frozenset({"mcp:probe"})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arguments = {"path": str(outside), "port": listener.getsockname()[1]}
        server.script = [Reply(tool_calls=[Call("mcp_probe_look", arguments)]), Reply(text="Done.")]
        run = await harness.run(server)
    [answer] = [text_of(message["content"]) for message in run.result["messages"] if message["role"] == "tool"]
    assert "; ".join(expected) in answer
    assert outside.read_text() == ("outside" if sandbox else "changed")
    kept_path = "mcp-probe/home/kept" if sandbox else "user/kept"
    assert [path for path in tmp_path.rglob("kept") if str(path).endswith(kept_path)]
