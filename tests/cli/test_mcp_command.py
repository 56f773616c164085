"""`hermes mcp`, with real servers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hermes.core.home import Home, write_private
from hermes.settings import config

from .shell import Hermes

pytest.importorskip("mcp")
SERVERS = Path(__file__).parents[1] / "tools" / "mcp_servers"
PLAIN = ("--command", sys.executable, "--args", str(SERVERS / "plain.py"), "stdio")
SECRET = "a-very-secret-value"


def test_mcp_add_tests_before_writing(home: Home, hermes: Hermes) -> None:
    result = hermes("--json", "mcp", "add", "notes", "--env", f"NOTES_KEY={SECRET}", *PLAIN)
    assert result.code == 0 and result.json["test"]["state"] == "up"
    server = config.load(home).mcp_servers["notes"]
    assert server.args == [str(SERVERS / "plain.py"), "stdio"] and server.env == {"NOTES_KEY": SECRET}
    assert SECRET in home.env_file.read_text() and SECRET not in home.config_file.read_text()
    listed = hermes("mcp")
    assert listed.code == 0 and "notes" in listed.out and SECRET not in listed.out
    assert hermes("mcp", "list", "--json").json["servers"][0]["env"] == ["NOTES_KEY"]


def test_mcp_add_rejects_unreachable_server(home: Home, hermes: Hermes) -> None:
    args = ("mcp", "add", "gone", "--command", "/no/such/program")
    result = hermes(*args)
    assert result.code == 1 and "Nothing was written" in result.err and not home.config_file.exists()
    assert hermes(*args, "--force").code == 0
    assert hermes("mcp", "test", "gone").code == 1
    assert hermes("mcp", "tools", "gone").code == 1


def test_mcp_test_and_tools(home: Home, hermes: Hermes) -> None:
    listing = f"[{str(SERVERS / 'plain.py')!r}, stdio]"
    text = f"mcp_servers: {{notes: {{command: {sys.executable!r}, args: {listing}, enabled: false}}}}\n"
    write_private(home.config_file, text)
    state = hermes("mcp", "test", "no", "--json").json
    assert state["state"] == "up" and state["seconds"] > 0
    names = {tool["name"] for tool in state["tools"]}
    assert names and all(name.startswith("mcp_notes_") for name in names)
    assert {tool["name"] for tool in hermes("mcp", "tools", "notes", "--json").json["tools"]} == names
    assert hermes("mcp", "test", "nothing").code == 5


@pytest.mark.parametrize(
    "args",
    [
        ("a b", "--url", "http://x.test"),
        ("x",),
        ("x", "--url", "http://x.test", "--command", "y"),
        ("x", "--url", "http://x.test", "--header", "nonsense"),
        ("x", "--command", "y", "--env", "=1"),
    ],
)
def test_mcp_add_usage_errors(args: tuple[str, ...], home: Home, hermes: Hermes) -> None:
    assert hermes("mcp", "add", *args).code == 2 and not home.config_file.exists()


def test_mcp_remove(home: Home, hermes: Hermes) -> None:
    text = (
        "mcp_servers:\n  keep: {url: 'http://x.test'}\n  go:\n    url: http://y.test\n    headers: {X-Key: '${GO}'}\n"
    )
    write_private(home.config_file, text)
    write_private(home.env_file, f"GO={SECRET}\n")
    assert hermes("mcp", "remove", "go").code == 2
    assert hermes("mcp", "remove", "go", "-y").code == 0
    assert list(config.load(home).mcp_servers) == ["keep"]
    assert hermes("mcp", "remove", "go", "-y").code == 5
