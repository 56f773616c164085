"""What git runs for the user later: a repository's settings stay as they are, however it is laid out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from agent.conftest import MakeHarness
from support.model_server import ModelServer
from tools.commanding import ToolSession

EVIL = """
mkdir -p evil/hooks evil/objects evil/refs; echo 'ref: refs/heads/main' > evil/HEAD
printf '[core]\\nrepositoryformatversion = 0\\nfsmonitor = "touch {mark}; false"\\n' > evil/config
"""


@pytest.fixture
def tool_session(make_harness: MakeHarness, server: ModelServer) -> ToolSession:
    tool_session = ToolSession(make_harness, server, "bubblewrap", approvals={"mode": "off"})
    tool_session.workspace.mkdir(parents=True)
    return tool_session


def git(folder: Path, *args: str) -> None:
    subprocess.run(["git", "-C", str(folder), *args], check=False, capture_output=True)


async def test_existing_git_settings_are_protected(tool_session: ToolSession) -> None:
    git(tool_session.workspace, "init", "-q")
    (tool_session.workspace / ".git/commondir").write_text(".\n")
    answer = await tool_session.sh("echo ../evil > .git/commondir; rm -f .git/commondir; git status")
    assert "Read-only" in answer["output"] and "No commits yet" in answer["output"]
    assert (tool_session.workspace / ".git/commondir").read_text() == ".\n"


async def test_worktree_git_file_is_protected(tool_session: ToolSession, tmp_path: Path) -> None:
    (tool_session.workspace / ".git").write_text("gitdir: /elsewhere\n")
    evil = EVIL.format(mark=tmp_path / "ran")
    for way in ("echo 'gitdir: evil' > .git", "rm .git; mkdir .git", "mv .git x", "ln -sf evil .git"):
        await tool_session.sh(f"{evil}\n{way}")
        assert (tool_session.workspace / ".git").read_text() == "gitdir: /elsewhere\n"
    git(tool_session.workspace, "status")
    assert not (tmp_path / "ran").exists()


async def test_protected_repository_stays_usable(tool_session: ToolSession) -> None:
    git(tool_session.workspace, "init", "-q")
    answer = await tool_session.sh(
        "git -c user.name=a -c user.email=a@b.test commit -q --allow-empty -m x && git worktree add -q side && git log -1"
    )
    assert answer["exit_code"] == 0 and (tool_session.workspace / ".git/worktrees/side/commondir").exists()
    assert (await tool_session.sh("git -C side status"))["exit_code"] == 0
