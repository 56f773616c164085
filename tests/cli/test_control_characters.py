"""Nothing that others said, stored or sent steers the terminal, whichever command shows it."""

from __future__ import annotations

import json
import re

import pytest

from hermes.cli.screen import Screen
from hermes.store.sessions import SessionDB
from support.model_server import Call, Reply

from .conftest import Cli

ODD = "\x1b]0;title\x07\x1b[2J\x9b31m\x9d52;c;eA==\x9c\x85\x7f\x08\rred"
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture
def escape_cli(cli: Cli) -> Cli:
    """A home in which what is stored is odd: a session with its title, messages and tool output, and a log."""
    cli.script(
        Reply(tool_calls=[Call("terminal", {"command": f"printf '%s' '{ODD}'"})]), Reply(text=f"Look: {ODD}\n{ODD}")
    )
    cli.run("-z", f"say {ODD}", "--yolo")
    db = SessionDB(cli.home / "state.db")
    [session] = db.list_sessions()
    db.set_session_title(session["id"], f"A title {ODD}")
    db.close()
    (cli.home / "logs").mkdir(exist_ok=True)
    (cli.home / "logs" / "gateway.log").write_text(f"2026-01-01 00:00:00,000 WARNING hermes: {ODD}\n")
    return cli


@pytest.mark.parametrize(
    "args",
    [
        ["-z", "hi"],
        ["-z", "hi", "--json"],
        ["-z", "hi", "--events"],
        ["chat"],
        ["sessions", "list"],
        ["sessions", "list", "--json"],
        ["sessions", "search", "Look"],
        ["sessions", "export", "--all", "--format", "jsonl"],
        ["sessions", "export", "--all", "--format", "md"],
        ["sessions", "show", f"none{ODD}"],
        ["sessions", f"none{ODD}"],
        ["runs", "list"],
        ["logs", "gateway"],
        ["logs", "gateway", "--json"],
        ["config", "get", f"none{ODD}"],
        ["tools", "check", f"echo {ODD}"],
    ],
    ids=lambda args: " ".join(args).replace(ODD, ""),
)
def test_no_command_prints_terminal_escapes(escape_cli: Cli, args: list[str]) -> None:
    escape_cli.script(Reply(text=[f"An answer {ODD}", f" in {ODD} pieces"]))
    result = escape_cli.run(*args, stdin="hi" if args == ["chat"] else "")
    assert result.stdout or result.stderr
    for printed in (result.stdout, result.stderr):
        assert not STEERING.search(printed), repr(printed)


def test_provider_error_has_no_terminal_escapes(escape_cli: Cli) -> None:
    escape_cli.script(Reply(status=400, error=f"no such thing {ODD}"))
    result = escape_cli.run("-z", "hi")
    assert "no such thing" in result.stderr and not STEERING.search(result.stderr)


def test_json_output_keeps_escaped_characters(escape_cli: Cli) -> None:
    escape_cli.script(Reply(text=f"An answer {ODD}"))
    result = escape_cli.run("-z", "hi", "--json")
    assert json.loads(result.stdout)["final_response"] == f"An answer {ODD}"


def test_screen_output_has_own_styles_only_property() -> None:
    from rich.text import Text

    screen = Screen(lambda: 80, reasoning=False, quiet=False)
    drawn = screen.drawn(Text(ODD, "red"), Text.assemble((ODD, "bold"), ODD))
    assert "\x1b[31m" in drawn and not STEERING.search(re.sub(r"\x1b\[[0-9;]*m", "", drawn))
