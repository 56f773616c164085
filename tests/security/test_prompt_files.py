"""Files whose content reaches a prompt: read through the path guard, never out of their folder, and redacted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.harness import Harness
from agent.test_context import system_of
from hermes.cli import attach
from hermes.core.errors import HermesError
from hermes.tools import memory
from hermes.tools.skills import TOOLS as SKILLS
from support.model_server import ModelServer, Reply
from tools.turns import tool_answers

MARK = "planted7f3a91"
KEY = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{MARK}AAAAAAAAAAAAAAAA\n-----END OPENSSH PRIVATE KEY-----\n"
GITHUB = "ghp_" + "Zq8Yw2Xe4Rt6" * 3


def outside(path: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text(MARK)
    path.symlink_to(tmp_path / "outside.txt")


def outside_relative(path: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text(MARK)
    path.symlink_to(os.path.relpath(tmp_path / "outside.txt", path.parent))


def chain(path: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text(MARK)
    (path.parent / "step").symlink_to(tmp_path)
    path.symlink_to("step/outside.txt")


def process_environment(path: Path, tmp_path: Path) -> None:
    path.symlink_to("/proc/self/environ")


def private_key(path: Path, tmp_path: Path) -> None:
    path.write_text(KEY)


def env_file_beside(path: Path, tmp_path: Path) -> None:
    (path.parent / ".env").write_text(f"NOTE={MARK}\n")
    path.symlink_to(".env")


def fifo(path: Path, tmp_path: Path) -> None:
    os.mkfifo(path)


def device(path: Path, tmp_path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path, tmp_path: Path) -> None:
    path.mkdir()


REFUSED = [
    outside, outside_relative, chain, process_environment, private_key, env_file_beside, fifo, device, folder
]  # fmt: skip
Plant = Callable[[Path, Path], None]


@pytest.fixture(autouse=True)
def marked_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTE_OF_TEST", MARK)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    (project / ".git").mkdir(parents=True)
    return project


async def prompt_of(harness: Harness, server: ModelServer, **fields: object) -> str:
    server.script = [Reply(text="Done.")]
    await harness.run(server, **fields)  # type: ignore[arg-type]
    return system_of(server.requests[-1])


@pytest.mark.parametrize("plant", REFUSED)
async def test_project_file_that_is_not_a_plain_repository_file_is_ignored(
    harness: Harness, server: ModelServer, tmp_path: Path, repository: Path, plant: Plant
) -> None:
    plant(repository / ".hermes.md", tmp_path)
    (repository / "AGENTS.md").write_text("Use tabs.")
    prompt = await prompt_of(harness, server, source="cli", workdir=str(repository))
    assert MARK not in prompt
    assert "Use tabs." in prompt, "the next candidate is read"


async def test_project_file_may_be_link_inside_repository(
    harness: Harness, server: ModelServer, repository: Path
) -> None:
    (repository / "docs").mkdir()
    (repository / "docs" / "agents.md").write_text("Use tabs.")
    (repository / "AGENTS.md").symlink_to("docs/agents.md")
    (repository / "deep").mkdir()
    assert "Use tabs." in await prompt_of(harness, server, source="cli", workdir=str(repository / "deep"))


async def test_project_file_is_redacted(harness: Harness, server: ModelServer, repository: Path) -> None:
    harness.home.env_file.write_text("SOME_PHRASE=quartz-violet-heron\n")
    (repository / "AGENTS.md").write_text(f"Use tabs. {GITHUB} quartz-violet-heron")
    prompt = await prompt_of(harness, server, source="cli", workdir=str(repository))
    assert "Use tabs. [redacted] [redacted]" in prompt


@pytest.mark.parametrize("plant", [plant for plant in REFUSED if plant is not env_file_beside])
@pytest.mark.parametrize("name", ["SOUL.md", "memories/MEMORY.md", "memories/USER.md", "skills/plan/SKILL.md"])
async def test_home_prompt_file_that_is_a_link_is_ignored(
    harness: Harness, server: ModelServer, tmp_path: Path, name: str, plant: Plant
) -> None:
    path = harness.home.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    plant(path, tmp_path)
    harness.offer(memory.TOOL, *SKILLS)
    assert MARK not in await prompt_of(harness, server)


async def test_soul_link_to_secrets_file_is_ignored(harness: Harness, server: ModelServer) -> None:
    harness.home.env_file.write_text(f"# {MARK}\n")
    (harness.home.path / "SOUL.md").symlink_to(harness.home.env_file)
    assert MARK not in await prompt_of(harness, server)


async def test_home_prompt_files_are_redacted(harness: Harness, server: ModelServer) -> None:
    for name in ("SOUL.md", "memories/MEMORY.md", "skills/plan/SKILL.md"):
        path = harness.home.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f"{path.parent.name} {GITHUB}"
        path.write_text(text if path.name != "SKILL.md" else f"---\nname: plan\ndescription: {text}\n---\n")
    harness.offer(memory.TOOL, *SKILLS)
    prompt = await prompt_of(harness, server)
    assert GITHUB not in prompt
    assert prompt.count("[redacted]") == 3


async def test_memory_behind_link_is_not_overwritten(harness: Harness, server: ModelServer, tmp_path: Path) -> None:
    path = harness.home.memories / "MEMORY.md"
    path.parent.mkdir(parents=True)
    outside(path, tmp_path)
    [answer] = await tool_answers(
        harness, server, memory.TOOL, {"target": "memory", "action": "add", "content": "a fact"}
    )
    assert answer["code"] == "path_refused"
    assert (tmp_path / "outside.txt").read_text() == MARK


async def test_attached_file_text_is_redacted(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    file = {"name": "notes.txt", "media_type": "text/plain", "data": f"before {GITHUB} after".encode()}
    await harness.run(server, [{"type": "text", "text": "Look."}, {"type": "file", "file": file}])
    assert "before [redacted] after" in server.requests[-1].turns[-1].text


@pytest.mark.parametrize("plant", [plant for plant in REFUSED if plant not in (folder, fifo, device)])
def test_at_mention_of_link_out_of_folder_is_rejected(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    monkeypatch.chdir(repository)
    plant(repository / "notes.md", tmp_path)
    with pytest.raises(HermesError, match=r"notes\.md"):
        attach.message("Read @notes.md")


@pytest.mark.parametrize("plant", [folder, fifo, device])
def test_at_mention_of_non_regular_file_is_ignored(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    monkeypatch.chdir(repository)
    plant(repository / "notes.md", tmp_path)
    assert attach.message("Read @notes.md") == "Read @notes.md"


def test_at_mention_attaches_file(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one elsewhere that the user names by its full path, and a link that stays in the repository."""
    monkeypatch.chdir(repository)
    (repository / "real.md").write_text("a")
    (repository / "link.md").symlink_to("real.md")
    (tmp_path / "other.md").write_text("b")
    parts = attach.message(f"Read @link.md and @{tmp_path}/other.md")
    assert [part["file"]["data"] for part in parts[1:]] == [b"a", b"b"]  # type: ignore[index]


def test_at_mention_of_credential_file_is_rejected(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(MARK)
    with pytest.raises(HermesError, match="credentials"):
        attach.message("Read @~/.ssh/config")
