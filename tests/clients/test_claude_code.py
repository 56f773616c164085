"""Claude Code in its print mode: turns with its own tools on the client's machine, conversations that go on, failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.drivers.claude_code import ClaudeCode, command
from clients.scenes import HELLO, REFUSAL
from clients.server import Hermes, running
from support.model_server import Call, Reply, Request

pytestmark = pytest.mark.skipif(command() is None, reason="@anthropic-ai/claude-code has no program for this machine")

COMMAND = "echo violets > out.txt && cat out.txt"


def _answer(request: Request) -> Reply:
    """What is asked is a line among the reminders that Claude Code adds."""
    last = request.turns[-1]
    if last.role == "tool" or request.turns[-2].role == "tool":
        return Reply(text=f"Result: {last.text}", continues=False)
    lines = last.text.splitlines()
    if "run a command" in lines:
        call = Call("Bash", {"command": COMMAND, "description": "Write a file"})
        return Reply(text="One moment.", tool_calls=[call], continues=False)
    if "write a poem" in lines:
        folder = next(line.rsplit(": ", 1)[1] for line in lines if "Primary working directory" in line)
        call = Call("Write", {"file_path": f"{folder}/poem.txt", "content": "Roses are red.\n"})
        return Reply(tool_calls=[call], continues=False)
    return Reply(status=400, error=REFUSAL) if "be refused" in lines else Reply(text=HELLO, continues=False)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hermes]:
    with running(tmp_path_factory.mktemp("home")) as server:
        server.model.handler = _answer
        yield server


@pytest.fixture
def claude(hermes: Hermes, tmp_path: Path) -> ClaudeCode:
    return ClaudeCode(tmp_path, hermes.url, hermes.key)


def test_turn_and_continue(hermes: Hermes, claude: ClaudeCode) -> None:
    first = claude.ask("say hello").result
    assert (first["result"], first["is_error"]) == ("".join(HELLO), False)
    assert first["usage"]["output_tokens"] > 0
    assert claude.ask("say it again", "--continue").result["result"] == "".join(HELLO)
    turns = hermes.model.requests[-1].turns
    texts = [turn.text for turn in turns if turn.role == "assistant"]
    questions = [turn.text for turn in turns if turn.role == "user"]
    assert texts == ["".join(HELLO)]
    assert "say hello" in questions[0] and "say it again" in questions[-1]


def test_command_runs_on_client_machine(claude: ClaudeCode) -> None:
    answer = claude.ask("run a command")
    assert "violets" in answer.result["result"], answer
    assert [block["name"] for block in answer.blocks("assistant", "tool_use")] == ["Bash"]
    assert (claude.project / "out.txt").read_text() == "violets\n"


def test_file_is_written_on_client_machine(claude: ClaudeCode) -> None:
    answer = claude.ask("write a poem")
    assert not answer.result["is_error"], answer
    assert (claude.project / "poem.txt").read_text() == "Roses are red.\n"


def test_failure_is_reported(hermes: Hermes, claude: ClaudeCode) -> None:
    before = len(hermes.model.requests)
    answer = claude.ask("be refused")
    assert answer.result["is_error"] and REFUSAL in answer.result["result"], answer
    assert len(hermes.model.requests) > before
