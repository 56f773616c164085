"""Chats at a server over its public API: which server is used, what may be asked for there, and a server elsewhere."""

from __future__ import annotations

import json
import os
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from hermes.core.home import Home, write_private
from hermes.server.status import read_runtime_status
from support.model_server import Call, Reply

from .conftest import KEY, Cli
from .terminal import Terminal

CTRL_D = "\x04"


def submitted(cli: Cli, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """What a server says to a run that is asked for."""
    state = read_runtime_status(Home(cli.home))
    assert state is not None
    connection = HTTPConnection("127.0.0.1", state["port"], timeout=60)
    connection.request("POST", "/v1/runs", json.dumps({"input": "hi", **body}), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    document = json.loads(answer.read())
    connection.close()
    return answer.status, document


# ---- the server of the home


def test_request_cannot_choose_workdir_outside_workspaces(cli: Cli, tmp_path: Path) -> None:
    cli.serve()
    status, document = submitted(cli, {"workdir": str(tmp_path)})
    assert status == 400 and document["error"]["param"] == "workdir"
    assert "terminal.workspaces" in document["error"]["message"] and cli.model.requests == []


def test_shared_workspace_is_open_to_all(cli: Cli) -> None:
    cli.configure("approvals: {mode: off}\n")
    cli.serve()
    cli.script(Reply(tool_calls=[Call("terminal", {"command": "pwd > here.txt"})]), Reply(text="done"))
    assert submitted(cli, {"workdir": str(cli.folder)})[0] == 202
    while not (cli.folder / "here.txt").exists():
        os.sched_yield()


def test_cli_and_server_share_run_and_session(cli: Cli) -> None:
    cli.serve()
    assert cli.server is not None
    cli.script(Reply(text="One."), Reply(text="Two.", continues=False))
    first = json.loads(cli.run("-z", "one", "--json").stdout)
    payload = json.loads(cli.run("runs", "show", first["run_id"], "--json").stdout)
    assert (payload["kind"], payload["session_id"]) == ("run", first["session_id"])
    cli.server.terminate()
    cli.server.wait()
    second = json.loads(cli.run("-r", first["session_id"], "-z", "two", "--json").stdout)
    assert second["session_id"] == first["session_id"]
    assert [role for role, _ in cli.messages()] == ["user", "assistant"] * 2
    assert [(session["source"], session["cwd"]) for session in cli.sessions()] == [("cli", str(cli.folder))]


@pytest.mark.parametrize("args", [("--yolo",), ("-m", "other"), ("--sandbox", "local")], ids=" ".join)
def test_options_beyond_the_api_work_beside_a_server(args: tuple[str, ...], cli: Cli) -> None:
    cli.serve()
    cli.script(Reply(text="ok"))
    assert cli.run(*args, "-z", "hi").stdout == "ok\n"
    assert cli.model.requests[-1].body["model"] == ("other" if "-m" in args else "m")


def test_folder_outside_workspaces_is_worked_in_by_the_command_itself(cli: Cli) -> None:
    cli.configure("approvals: {mode: off}\n")
    cli.serve()
    config = (cli.home / "config.yaml").read_text()
    write_private(cli.home / "config.yaml", config.replace(f", workspaces: ['{cli.folder}']", ""))
    cli.script(Reply(tool_calls=[Call("terminal", {"command": "pwd > here.txt"})]), Reply(text="done"))
    payload = json.loads(cli.run("-z", "hi", "--json").stdout)
    assert (cli.folder / "here.txt").read_text().strip() == str(cli.folder)
    assert json.loads(cli.run("runs", "show", payload["run_id"], "--json").stdout)["kind"] == "cli"


def test_server_with_key_accepts_key_of_the_settings(cli: Cli) -> None:
    cli.configure(f"api_server: {{key: {KEY}}}\n")
    cli.serve()
    cli.script(Reply(text="ok"))
    result = cli.run("-z", "hi", "--json")
    assert json.loads(result.stdout)["final_response"] == "ok" and result.stderr == ""
    run_id = json.loads(result.stdout)["run_id"]
    assert json.loads(cli.run("runs", "show", run_id, "--json").stdout)["kind"] == "run"


def test_unresponsive_server_is_bypassed(cli: Cli) -> None:
    cli.serve()
    assert cli.server is not None
    cli.server.send_signal(19)  # it is held up
    try:
        cli.script(Reply(text="ok"))
        assert cli.run("-z", "hi").stdout == "ok\n"
    finally:
        cli.server.send_signal(18)


# ---- a server elsewhere


def ask(terminal: Terminal, text: str, answer: str) -> None:
    before = str(terminal).count(" tokens in, ")
    terminal.send(text)
    terminal.until(answer)
    terminal.until(lambda screen: screen.count(" tokens in, ") == before + 1)


def replies(cli: Cli, *texts: str) -> None:
    cli.script(*(Reply(text=text, continues=False, usage={"input": 100, "output": 7}) for text in texts))


def test_oneshot_at_a_server(elsewhere: Cli) -> None:
    elsewhere.script(Reply(text="Hello."))
    result = elsewhere.run(*elsewhere.options, "-z", "hi")
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello.\n", "")
    assert not (elsewhere.home.parent / "own" / "state.db").exists()
    [session] = elsewhere.sessions()
    assert session["end_reason"] == "cli_close"
    elsewhere.script(Reply(text="Again.", continues=False))
    again = json.loads(elsewhere.run(*elsewhere.options, "-r", session["id"][:18], "-z", "more", "--json").stdout)
    assert (again["final_response"], again["session_id"]) == ("Again.", session["id"])
    assert [role for role, _ in elsewhere.messages()] == ["user", "assistant"] * 2


def test_wrong_key_and_missing_server_are_reported(elsewhere: Cli, closed_port: int) -> None:
    result = elsewhere.run(*elsewhere.options, "-z", "hi", HERMES_API_KEY="wrong")
    assert result.returncode == 1 and "refuses the key" in result.stderr and "HERMES_API_KEY" in result.stderr
    result = elsewhere.run("--server", f"http://127.0.0.1:{closed_port}", "-z", "hi")
    assert result.returncode == 69 and result.stderr.count("does not answer") == 1


def test_options_beyond_the_api_are_refused(elsewhere: Cli) -> None:
    result = elsewhere.run(*elsewhere.options, "--yolo", "-z", "hi")
    assert result.returncode == 2 and "Try: hermes without --server" in result.stderr
    assert elsewhere.model.requests == []


def test_chat_at_a_server_handles_approvals_and_questions(elsewhere: Cli) -> None:
    question = {"question": "Tea or coffee?", "choices": ["tea", "coffee"]}
    elsewhere.script(
        Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"})]),
        Reply(tool_calls=[Call("clarify", question)]),
        Reply(text="Done.", continues=False),
    )
    (elsewhere.home / "workspace" / "build").mkdir(parents=True)
    terminal = elsewhere.terminal(*elsewhere.options)
    terminal.until(f"Hermes · at {elsewhere.options[1]}")
    terminal.send("clean up")
    terminal.until("Enter denies")
    terminal.send("o")
    terminal.until("answer:")
    terminal.send("2")
    terminal.until("Done.")
    assert not (elsewhere.home / "workspace" / "build").exists()
    assert "coffee" in elsewhere.model_messages()[-1][1]
    terminal.type(CTRL_D)
    assert terminal.wait() == 0


def test_slash_commands_at_a_server(elsewhere: Cli) -> None:
    replies(elsewhere, "One.", "Two.", "Three.")
    terminal = elsewhere.terminal(*elsewhere.options, rows=90)
    ask(terminal, "first", "One.")
    ask(terminal, "second", "Two.")
    terminal.send("/title Breakfast")
    terminal.until("Title: Breakfast")
    terminal.send("/usage")
    terminal.until("cached")
    terminal.until(lambda screen: "200" in screen.rpartition("cached")[2])
    terminal.send("/sessions")
    terminal.until(lambda screen: screen.count("Breakfast") >= 3)
    for command in ("/compress", "/prompt", "/yolo", "/memory"):
        before = str(terminal).count("not available at")
        terminal.send(command)
        terminal.until(lambda screen, before=before: screen.count("not available at") == before + 1)
    terminal.send("/undo")
    terminal.until("Taken back, from: second")
    ask(terminal, "third", "Three.")
    assert [text for role, text in elsewhere.model_messages() if role == "user"] == ["first", "third"]


def test_chat_follows_server_over_a_restart(elsewhere: Cli) -> None:
    elsewhere.script(
        Reply(text=["Before", " the end"], stall_at=450),
        Reply(text=" and after it.", continues=False),
    )
    terminal = elsewhere.terminal(*elsewhere.options)
    terminal.send("hello")
    terminal.until("Before")
    assert elsewhere.server is not None
    elsewhere.server.kill()
    elsewhere.server.wait()
    terminal.until("The server has gone")
    elsewhere.env["HERMES_HOME"] = str(elsewhere.home)
    elsewhere.serve("--port", elsewhere.options[1].rpartition(":")[2])
    terminal.until("and after it.", 60)
