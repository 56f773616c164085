"""Without a sandbox: every command asks but those known to change nothing, and none is run without being allowed."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from agent.conftest import MakeHarness
from agent.harness import Harness, Json
from hermes.cli.tools_command import _list, verdict
from hermes.guards.commands import Facts, check, simple_forms
from hermes.guards.read_only import is_read_only
from hermes.sandbox import bubblewrap, docker
from hermes.sandbox.choose import choose_backend
from hermes.server.discovery import _sandbox as capabilities_sandbox
from hermes.services import health
from hermes.settings import config
from hermes.tools import files, searching
from hermes.tools.framework.approvals import rules_to_approve
from support.model_server import Call, ModelServer
from tools.commanding import ToolSession

READ_ONLY = [
    "ls", "ls -la src", "ls *.py", "pwd", "cat a b", "cat a | head -3", "cd src && ls; pwd", "git status", "git status -s",
    "git diff HEAD~1 -- a.py", "git log --oneline -5", "git show HEAD", "date", "date -u +%F", "echo 'a; b' \"c\"",
    "grep -rn word .", "wc -l a", "sleep 1", "true && false", "stat a;",
]  # fmt: skip
ASKS = [
    "touch a", "make", "python3 x.py", "rm a", "mv a b", "tee a", "ls > a", "ls >> a", "cat < a", "cat <<< a",
    "echo $(touch a)", "echo `touch a`", "echo $HOME", "A=b ls", "PATH=. ls", "sudo ls", "env ls", "command ls", "./ls",
    "/tmp/ls", "ls & touch a", "ls\ntouch a", "(touch a)", "{ touch a; }", "ls || touch a", "! touch a", "git commit -m x",
    "git -c core.pager=x log", "git -C elsewhere status", "git diff --output=a", "git log --outp=a", "git diff --ext-diff",
    "git show --textconv", "git diff *", "git push", "git branch -D x", "git config a b", "date -s tomorrow",
    "date 01010000", "sort -o a b", "find . -delete", "xargs touch", "sh -c ls", "ls; eval x", "alias ls=touch",
    "export PATH=.", "source a", ". a", "ls() { touch a; }", "'", "", "echo a >&2", "exec ls", "env", "printenv",
]  # fmt: skip


@pytest.mark.parametrize("command", READ_ONLY)
def test_read_only_command(command: str) -> None:
    assert is_read_only(command)


@pytest.mark.parametrize("command", ASKS)
def test_command_that_may_change_something(command: str) -> None:
    assert not is_read_only(command)
    facts = Facts(("/w",), "/home/u", "/home/u/.hermes")
    hits = check(command, "/w", facts)
    assert rules_to_approve(command, hits, simple_forms(command, "/w", facts), isolated=False, network=True)


async def under_way_answered(tool_session: ToolSession, command: str, choice: str) -> Json:
    active_run = await tool_session.begin(Call("terminal", {"command": command}), answerable=True)
    request = await active_run.wait_for("approval.requested")
    await active_run.control("approve", id=request["approval_id"], choice=choice)
    await active_run.end()
    return request


async def test_local_command_asks_unless_read_only(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session = ToolSession(make_harness, server)
    run = await tool_session.run(Call("terminal", {"command": "pwd"}))
    assert run.tool_results()[0]["status"] == "ok" and not run.events_of("approval.requested", "approval.resolved")
    blocked = await tool_session.sh("touch made")
    assert (blocked["status"], blocked["rules"]) == ("blocked", ["local"])
    assert "without a sandbox" in blocked["reason"]
    request = await under_way_answered(tool_session, "touch made", "once")
    assert request["choices"] == ["once", "session", "always", "deny"]
    assert (tool_session.workspace / "made").exists()


async def test_session_grant_covers_same_command_only(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session = ToolSession(make_harness, server)
    await under_way_answered(tool_session, "touch made", "session")
    assert (await tool_session.sh("touch made"))["status"] == "ok"
    assert (await tool_session.sh("touch made; touch other"))["status"] == "blocked"
    assert (await tool_session.sh("touch other"))["status"] == "blocked"
    assert not (tool_session.workspace / "other").exists()


async def test_grant_for_flagged_part_does_not_cover_rest(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session = ToolSession(make_harness, server)
    await under_way_answered(tool_session, "rm -r build", "session")
    assert (await tool_session.sh("rm -r build; touch other"))["status"] == "blocked"


async def test_changed_path_variable_disables_read_only_table(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session = ToolSession(make_harness, server)
    await under_way_answered(tool_session, "export PATH=$PWD:$PATH", "once")
    assert (await tool_session.sh("ls"))["status"] == "blocked"


async def test_isolated_backend_does_not_ask_for_plain_commands(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session = ToolSession(make_harness, server, "bubblewrap")
    assert (await tool_session.sh("touch made"))["status"] == "ok"


# ---- no sandbox at all


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "probe", lambda: "no namespaces")
    monkeypatch.setattr(docker, "probe", lambda image: "no daemon" if image != "works" else "")


def settings_of(harness: Harness, **terminal: Any) -> config.Settings:
    harness.configure({"terminal": terminal})
    return config.load(harness.home)


@pytest.mark.parametrize(
    ("terminal", "name", "isolated"),
    [
        ({}, "none", False),
        ({"allow_local": True}, "local", False),
        ({"backend": "local"}, "local", False),
        ({"docker_image": "works"}, "docker", True),
        ({"docker_image": "other"}, "none", False),
        ({"docker_image": "other", "allow_local": True}, "local", False),
    ],
)
def test_auto_never_falls_back_to_local_silently(
    harness: Harness, no_bubblewrap: None, terminal: Json, name: str, isolated: bool
) -> None:
    chosen = choose_backend(settings_of(harness, **terminal))
    assert (chosen.name, chosen.isolated, chosen.reason is not None) == (name, isolated, name == "none")
    if chosen.reason is not None:
        assert "no namespaces" in chosen.reason
        assert "apt install bubblewrap" in chosen.reason and "terminal.allow_local true" in chosen.reason


async def test_command_tools_are_not_offered_without_sandbox(
    make_harness: MakeHarness, server: ModelServer, no_bubblewrap: None
) -> None:
    tool_session = ToolSession(make_harness, server, "auto")
    tool_session.offer(files.READ, files.WRITE, searching.TOOL)
    tool_session.workspace.mkdir(parents=True, exist_ok=True)
    [answer] = await asked_all(tool_session, Call("write_file", {"path": "a.txt", "content": "word"}))
    assert answer["created"]
    offered = [tool["function"]["name"] for tool in server.requests[-1].body["tools"]]
    assert offered == ["read_file", "search_files", "write_file"]
    prompt = server.requests[-1].turns[0].text
    assert "install bubblewrap" in prompt
    for call, key in [
        (Call("read_file", {"path": "a.txt"}), "content"),
        (Call("search_files", {"pattern": "word"}), "matches"),
    ]:
        [answer] = await asked_all(tool_session, call)
        assert "word" in str(answer[key])


async def asked_all(tool_session: ToolSession, *calls: Call) -> list[Json]:
    return (await tool_session.run(*calls)).tool_results()


@pytest.mark.parametrize("tool", ["write_file", "read_file"])
async def test_file_tools_stay_in_workspace_without_sandbox(
    make_harness: MakeHarness, server: ModelServer, no_bubblewrap: None, tmp_path: Path, tool: str
) -> None:
    tool_session = ToolSession(make_harness, server, "auto")
    tool_session.offer(files.READ, files.WRITE)
    (tmp_path / "outside.txt").write_text("mark")
    more = {"content": "x", "overwrite": True} if tool == "write_file" else {}
    [answer] = await asked_all(tool_session, Call(tool, {"path": str(tmp_path / "outside.txt"), **more}))
    assert (answer["code"], answer["rule"]) == ("path_refused", "outside_sandbox")
    assert (tmp_path / "outside.txt").read_text() == "mark"


async def test_call_of_unoffered_tool_runs_nothing(
    make_harness: MakeHarness, server: ModelServer, no_bubblewrap: None
) -> None:
    tool_session = ToolSession(make_harness, server, "auto")
    tool_session.offer(files.READ, files.WRITE)
    for name, arguments in (("terminal", {"command": "touch made"}), ("execute_code", {"code": "open('made', 'w')"})):
        [answer] = await asked_all(tool_session, Call(name, arguments))
        assert answer["code"] == "unknown_tool"
    assert not (tool_session.workspace / "made").exists()


def test_missing_sandbox_reason_is_reported_everywhere(
    harness: Harness, no_bubblewrap: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = settings_of(harness)
    assert "apt install bubblewrap" in capabilities_sandbox(settings)["reason"]
    assert "apt install bubblewrap" in health.CHECKS["sandbox"].look(health.Subject(harness.home, settings)).remedy
    _list(Namespace(platform="cli", json=False, model=None, provider=None, sandbox=None), harness.home)
    lines = [line for line in capsys.readouterr().out.splitlines() if "bubblewrap" in line]
    assert [line.split()[:2] for line in lines] == [["terminal", "unavailable"], ["code_execution", "unavailable"]]
    assert verdict(settings, "ls", tmp_path)["verdict"] == "blocked"
