"""What commands leave in a workspace makes none of the user's own tools run anything, unless the user has allowed it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from pathlib import Path

import pytest

from agent.conftest import MakeHarness
from hermes.sandbox.workspace_watch import WorkspaceWatch
from hermes.tools import files
from support.model_server import Call, ModelServer
from support.waiting import until
from tools.commanding import SURELY_S, ToolSession

# Ways to have git run a program, from within a repository.
WAYS = {
    "fsmonitor": "git config core.fsmonitor '{run}; false'",
    "hook": "mkdir -p .git/hooks; printf '#!/bin/sh\\n{run}\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit",
    "hooks path": (
        "mkdir -p h; printf '#!/bin/sh\\n{run}\\n' > h/pre-commit; chmod +x h/pre-commit; git config core.hooksPath h"
    ),
    "filter": "git config filter.x.clean '{run}; cat'; echo '* filter=x' > .gitattributes; touch -d 2001-01-01 file",
    "include": "printf '[core]\\n\\tfsmonitor = \"{run}; false\"\\n' > more; git config include.path ../more",
    "external diff": "git config diff.external '{run}; true'; echo changed > file",
    "pager": "git config core.pager '{run}; cat'; git config pager.status true; git config core.fsmonitor '{run}; false'",
    "commondir": (
        "cp -r .git evil; git -C evil config core.fsmonitor '{run}; false' || "
        "printf '[core]\\n\\tfsmonitor = \"{run}; false\"\\n' >> evil/config; echo ../evil > .git/commondir"
    ),
    "link": (
        "cp -r .git evil; printf '[core]\\n\\tfsmonitor = \"{run}; false\"\\n' >> evil/config; rm -rf .git; ln -s evil .git"
    ),
    "git file": (
        "cp -r .git evil; printf '[core]\\n\\tfsmonitor = \"{run}; false\"\\n' >> evil/config; rm -rf .git; "
        "echo 'gitdir: evil' > .git"
    ),
    "another name": (
        "printf '[core]\\n\\tfsmonitor = \"{run}; false\"\\n' > more; cp .git/config saved; cat saved more > both; "
        "ln -f both .git/config"
    ),
    "moved": "mkdir -p made; cp -r .git made/g; git -C made/g config core.fsmonitor '{run}; false'; mv made/g made/.git",
    "bare": (
        "mkdir -p objects refs; echo 'ref: refs/heads/main' > HEAD; "
        "printf '[core]\\n\\trepositoryformatversion = 0\\n\\tbare = false\\n\\tworktree = .\\n"
        '\\tfsmonitor = "{run}; false"\\n\' > config'
    ),
}
MAKE = (
    "git init -q . && git config user.name a && git config user.email a@b.test && echo x > file && git add file && "
    "git commit -qm x"
)
FOLDERS = {"existing": ".", "new": ".", "nested": "deep/er"}


def use_git(folder: Path) -> None:
    """What a user does next, in the folder and in what a command has made there."""
    for here in (folder, folder / "made"):
        for command in ("status", "diff", "commit -aqm y --allow-empty"):
            if here.is_dir():
                subprocess.run(
                    ["git", *command.split()], cwd=here, check=False, capture_output=True, stdin=subprocess.DEVNULL
                )


@pytest.fixture
def tool_session(make_harness: MakeHarness, server: ModelServer) -> ToolSession:
    tool_session = ToolSession(make_harness, server, "bubblewrap", approvals={"mode": "off"})
    tool_session.workspace.mkdir(parents=True)
    return tool_session


def script(way: str, mark: Path, where: str) -> str:
    begin = f"mkdir -p {FOLDERS[where]}; cd {FOLDERS[where]}\n" + ("" if where == "existing" else f"{MAKE}\n")
    return begin + WAYS[way].replace("{run}", f"touch {mark}")


@pytest.mark.parametrize("way", WAYS)
def test_every_git_attack_works_without_protection(tmp_path: Path, way: str) -> None:
    mark, folder = tmp_path / "ran", tmp_path / "work"
    folder.mkdir()
    if way == "bare":  # in a repository it would not be looked at
        subprocess.run(WAYS[way].replace("{run}", f"touch {mark}"), shell=True, cwd=folder, check=False)
    else:
        subprocess.run(script(way, mark, "new"), shell=True, cwd=folder, check=False, capture_output=True)
    use_git(folder)
    assert mark.exists()


@pytest.mark.parametrize("where", FOLDERS)
@pytest.mark.parametrize("way", WAYS)
async def test_git_runs_nothing_left_by_a_command(
    tool_session: ToolSession, tmp_path: Path, way: str, where: str
) -> None:
    mark = tmp_path / "ran"
    if where == "existing":
        subprocess.run(MAKE, shell=True, cwd=tool_session.workspace, check=True, capture_output=True)
    await tool_session.sh(script(way, mark, where))
    use_git(tool_session.workspace / FOLDERS[where])
    assert not mark.exists()


@pytest.mark.parametrize("way", ["fsmonitor", "hook", "include", "bare"])
async def test_late_write_of_background_process_is_undone(tool_session: ToolSession, tmp_path: Path, way: str) -> None:
    mark, result = tmp_path / "ran", tool_session.workspace / "done"
    late = f"until [ -e go ]; do sleep 0.02; done\n({script(way, mark, 'new')})\ntouch done; sleep 100"
    started = await tool_session.sh(late, background=True)
    (tool_session.workspace / "go").touch()
    await until(result.exists)
    async with asyncio.timeout(SURELY_S):
        await tool_session.sh("true")  # a command that ends has everything looked at
    use_git(tool_session.workspace)
    assert not mark.exists()
    await tool_session.run(Call("process", {"action": "kill", "session_id": started["session_id"]}))


NAMES = [".vscode/tasks.json", ".envrc", ".husky/pre-commit", ".mcp.json", "AGENTS.md", "sub/AGENTS.md", "sub/.idea/x"]


@pytest.mark.parametrize("name", NAMES)
async def test_new_reserved_file_is_quarantined(tool_session: ToolSession, name: str) -> None:
    answer = await tool_session.sh(f"mkdir -p $(dirname {name}); echo planted > {name}; echo done")
    entry = next(part for part in (Path(name), *Path(name).parents) if part.name.startswith((".", "A")))
    assert not (tool_session.workspace / entry).exists()
    assert (tool_session.workspace / f"{entry}.needs-approval").exists()
    assert str(tool_session.workspace / entry) in answer["set_aside"] and "approval" in answer["hint"]


@pytest.mark.parametrize("name", NAMES)
async def test_existing_reserved_file_is_read_only(tool_session: ToolSession, name: str) -> None:
    path = tool_session.workspace / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    top = Path(name).parts[0]
    await tool_session.sh(
        f"echo planted > {name}; rm -rf {name}; mv {name} other; mv {top} moved; sed -i s/mine/x/ {name}"
    )
    paths = [
        path
        for path in (tool_session.workspace / name, tool_session.workspace / name.replace(top, "moved", 1))
        if path.exists()
    ]
    assert [path.read_text() for path in paths] == ["mine"]


@pytest.mark.parametrize("choice", ["session", "deny"])
async def test_write_grant_restores_quarantined_file(
    make_harness: MakeHarness, server: ModelServer, choice: str
) -> None:
    tool_session = ToolSession(make_harness, server, "bubblewrap")
    active_run = await tool_session.begin(Call("terminal", {"command": "echo planted > AGENTS.md"}), answerable=True)
    [request] = await active_run.until(lambda events: [e for e in events if e["type"] == "approval.requested"])
    assert request["kind"] == "write" and str(tool_session.workspace / "AGENTS.md") in request["subject"]
    await active_run.control("approve", id=request["approval_id"], choice=choice)
    [answer] = (await active_run.end()).tool_results()
    assert (tool_session.workspace / "AGENTS.md").exists() is (choice == "session")
    assert ("set_aside" in answer) is (choice == "deny")
    if choice == "session":
        answer = await tool_session.sh("echo more >> AGENTS.md")
        assert (tool_session.workspace / "AGENTS.md").read_text() == "planted\nmore\n"


@pytest.mark.parametrize("path", [".vscode/tasks.json", "AGENTS.md", "deep/.envrc", "x/.git/config", "plain/HEAD"])
async def test_file_tools_ask_before_writing_reserved_file(
    make_harness: MakeHarness, server: ModelServer, path: str
) -> None:
    tool_session = ToolSession(make_harness, server, "bubblewrap")
    tool_session.offer(files.WRITE)
    answer = await tool_session.call("write_file", {"path": path, "content": "x"})
    assert answer["status"] == "blocked" and not (tool_session.workspace / path).exists()


async def test_command_that_recreates_reserved_file_is_ended(tool_session: ToolSession) -> None:
    answer = await tool_session.sh("while :; do echo planted > AGENTS.md; sleep 0.01; done")
    assert answer["status"] == "interrupted" and "AGENTS.md" in answer["error"]


async def test_repository_created_by_command_is_usable(tool_session: ToolSession) -> None:
    first = await tool_session.sh(f"{MAKE} && git remote add origin https://example.test/x.git && git branch side")
    later = await tool_session.sh(
        "git config user.name b && git checkout -q side && git commit -q --allow-empty -m y && git log"
    )
    assert (first["exit_code"], later["exit_code"]) == (0, 0), (first, later)
    assert "set_aside" not in first and "set_aside" not in later
    config = subprocess.run(
        ["git", "config", "--get", "remote.origin.url"], cwd=tool_session.workspace, capture_output=True, check=False
    )
    assert config.stdout == b"https://example.test/x.git\n"


async def test_reserved_files_made_by_user_between_commands_are_kept(tool_session: ToolSession) -> None:
    await tool_session.sh("true")
    (tool_session.workspace / "AGENTS.md").write_text("mine")
    subprocess.run("git init -q; git config alias.x status", shell=True, cwd=tool_session.workspace, check=True)
    answer = await tool_session.sh(
        "cat AGENTS.md; echo planted > AGENTS.md; git config alias.x '!id'; git config alias.x"
    )
    assert answer["output"].startswith("mine") and answer["output"].endswith("status\n")
    assert (tool_session.workspace / "AGENTS.md").read_text() == "mine" and "set_aside" not in answer


# Each in a workspace with a repository at its top and one in `sub`; the second command runs after the first has ended.
TRICKS = {
    "a folder around it made anew": [
        "mv sub old; mkdir sub; cp -r old/.git sub/; cp old/file sub/; git -C sub config core.fsmonitor '{run}; false'"
    ],
    "a repository that hides the rest": [
        "mkdir -p objects refs; touch HEAD",
        "git config core.fsmonitor '{run}; false'; git -C sub config core.fsmonitor '{run}; false'; echo x > sub/AGENTS.md",
    ],
    "a file that is none": [
        "mkdir x; printf 'gitdir: a\\0b' > x/.git; git init -q made; git -C made config core.fsmonitor '{run}; false'",
    ],
    "settings elsewhere": [
        "mkdir -p made/lib/objects made/lib/refs; cd made; echo 'ref: refs/heads/main' > HEAD; echo lib > commondir; "
        "printf '[core]\\n\\trepositoryformatversion = 0\\n\\tbare = false\\n\\tworktree = .\\n\\tfsmonitor = \"{run}; false\"\\n'"
        " > lib/config",
    ],
    "a link to nothing that is filled later": [
        "mkdir -p made; echo 'gitdir: ../later' > made/.git",
        "git init -q --bare later; git -C later config core.bare false; git -C later config core.worktree ../made; "
        "git -C later config core.fsmonitor '{run}; false'",
    ],
    "a submodule among caches": [
        "mkdir -p __pycache__/e; cd __pycache__/e; git init -q; git config user.name a; git config user.email a@b.test; "
        "git commit -q --allow-empty -m x; git config core.fsmonitor '{run}; false'; cd ../..; git add -f __pycache__/e",
    ],
    "a folder that is closed while it is filled": [
        "mkdir -m 300 made; cd made; git init -q; git config core.fsmonitor '{run}; false'; cd ..; chmod 755 made",
    ],
}


@pytest.mark.parametrize("trick", TRICKS)
async def test_reserved_file_watch_cannot_be_evaded(tool_session: ToolSession, tmp_path: Path, trick: str) -> None:
    mark = tmp_path / "ran"
    (tool_session.workspace / "sub").mkdir()
    for folder in (tool_session.workspace / "sub", tool_session.workspace):
        subprocess.run(MAKE, shell=True, cwd=folder, check=True, capture_output=True)
    for command in TRICKS[trick]:
        await tool_session.sh(command.replace("{run}", f"touch {mark}"))
    use_git(tool_session.workspace)
    use_git(tool_session.workspace / "sub")
    assert not mark.exists()
    assert not (tool_session.workspace / "sub/AGENTS.md").exists()


async def test_user_replacing_protected_file_ends_commands(tool_session: ToolSession) -> None:
    subprocess.run(MAKE, shell=True, cwd=tool_session.workspace, check=True, capture_output=True)
    active_run = await tool_session.begin(Call("terminal", {"command": "touch begun; sleep 100"}))
    await until((tool_session.workspace / "begun").exists)
    subprocess.run(["git", "remote", "add", "mine", "https://example.test/x"], cwd=tool_session.workspace, check=True)
    [answer] = (await active_run.end()).tool_results()
    assert answer["status"] == "interrupted" and ".git/config" in answer["error"]
    assert "mine" in (tool_session.workspace / ".git/config").read_text()
    assert (await tool_session.sh("git remote; echo x > .git/config"))["output"].startswith("mine\n")
    assert "mine" in (tool_session.workspace / ".git/config").read_text()


def test_replaced_file_with_reused_inode_is_detected(tmp_path: Path) -> None:
    """The number of an inode is free again as soon as the file is replaced, and a cover of the first file stays lost."""
    subprocess.run(MAKE, shell=True, cwd=tmp_path, check=True, capture_output=True)
    config, saved, reasons, replaced = tmp_path / ".git/config", tmp_path / "kept", [], threading.Event()
    ended = threading.Event()

    def is_granted(_: str) -> bool:
        return watch.active and not replaced.wait(SURELY_S)  # the watch is slower than who replaces

    def end_commands(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    watch = WorkspaceWatch([str(tmp_path)], is_granted, end_commands)
    try:
        watch.scan()
        assert watch.begin()
        saved.hardlink_to(config)
        (tmp_path / "other").write_text("[core]\n\tbare = false\n")
        os.replace(tmp_path / "other", config)
        os.replace(saved, config)
        replaced.set()
        assert ended.wait(SURELY_S)
    finally:
        replaced.set()
        watch.close()
    assert str(config) in reasons[0]


def test_path_changed_many_times_is_looked_at_once(tmp_path: Path) -> None:
    looked_at: list[str] = []

    def is_granted(path: str) -> bool:
        looked_at.append(path)
        return False

    watch = WorkspaceWatch([str(tmp_path)], is_granted)
    try:
        watch.scan()
        watch.active = True
        for _ in range(500):
            (tmp_path / "one").mkdir()
            (tmp_path / "one").rename(tmp_path / "other")
            (tmp_path / "other").rmdir()
        watch.settle()
    finally:
        watch.close()
    assert sorted(looked_at) == [str(tmp_path / "one"), str(tmp_path / "other")]


async def test_first_command_is_watched_without_hooks_folder(tool_session: ToolSession) -> None:
    subprocess.run(
        MAKE + "; rm -rf .git/hooks", shell=True, cwd=tool_session.workspace, check=True, capture_output=True
    )
    await tool_session.sh("echo x > AGENTS.md")
    assert not (tool_session.workspace / "AGENTS.md").exists()
