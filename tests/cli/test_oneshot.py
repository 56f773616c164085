"""`hermes -z`: what stands on stdout, what the exit code says, and what is left behind, with and without a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

import pytest

from hermes.core.limits import ATTACHED_BYTES_MAX
from hermes.store.sessions import SessionDB
from support.model_server import Call, Reply
from support.waiting import DEADLINE_S, until_blocking

from .conftest import HERMES, Cli, lines_of
from .terminal import Terminal

RM = Call("terminal", {"command": "rm -rf build"})


def test_oneshot_prints_answer_only(cli_or_server: Cli) -> None:
    cli_or_server.script(Reply(text=["Hello", " you."]))
    result = cli_or_server.run("-z", "hi")
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello you.\n", "")
    assert cli_or_server.messages() == [("user", "hi"), ("assistant", "Hello you.")]
    [session] = cli_or_server.sessions()
    assert (session["source"], session["cwd"], session["end_reason"]) == ("cli", str(cli_or_server.folder), "cli_close")


def test_oneshot_prompt_from_stdin(cli_or_server: Cli) -> None:
    cli_or_server.script(Reply(text="one"), Reply(text="two"))
    cli_or_server.run("-z", "-", stdin="what is this?")
    assert cli_or_server.model_messages() == [("user", "what is this?")]
    cli_or_server.run("-z", "review this", stdin="+ a line\n")
    [(_, prompt)] = cli_or_server.model_messages()
    assert prompt.startswith("review this") and prompt.endswith("review this") and "File stdin:\n+ a line\n" in prompt


def test_piped_text_in_another_encoding_is_text(cli: Cli) -> None:
    cli.script(Reply(text="ok"))
    (cli.home.parent / "stdin").write_bytes("Grüße\n".encode("latin-1"))
    with (cli.home.parent / "stdin").open() as piped:
        result = subprocess.run([*HERMES, "-z", "translate"], env=cli.env, cwd=cli.folder, stdin=piped, check=False)
    assert result.returncode == 0
    assert "Gr\ufffd\ufffde" in cli.model_messages()[0][1]


def test_piped_text_past_the_limit_is_refused(cli: Cli) -> None:
    result = cli.run("-z", "review this", stdin="x" * (ATTACHED_BYTES_MAX + 1))
    assert (result.returncode, result.stdout, cli.model.requests) == (2, "", [])
    assert "standard input is larger than 5" in result.stderr and "Try: write it to a file" in result.stderr


def test_oneshot_failed_turn_leaves_stdout_empty(cli: Cli) -> None:
    cli.script(Reply(status=400, error="no such thing"))
    result = cli.run("-z", "hi")
    assert (result.returncode, result.stdout) == (1, "") and "refused the request" in result.stderr


def test_oneshot_rejected_key_is_exit_3(cli: Cli) -> None:
    cli.script(Reply(status=401))
    assert cli.run("-z", "hi").returncode == 3


def test_oneshot_denied_last_call_is_exit_6(cli_or_server: Cli) -> None:
    cli_or_server.script(Reply(tool_calls=[RM]), Reply(text="I may not.", continues=False))
    result = cli_or_server.run("-z", "clean up")
    assert (result.returncode, result.stdout) == (6, "I may not.\n")


def test_oneshot_denied_earlier_call_is_exit_0(cli: Cli) -> None:
    todo = Call("todo", {"todos": []})
    cli.script(Reply(tool_calls=[RM]), Reply(tool_calls=[todo]), Reply(text="Done.", continues=False))
    assert cli.run("-z", "clean up").returncode == 0


def test_oneshot_yolo_skips_approval(cli_or_server: Cli) -> None:
    (cli_or_server.folder / "build").mkdir()
    cli_or_server.script(Reply(tool_calls=[RM]), Reply(text="Done.", continues=False))
    result = cli_or_server.run("--yolo", "-z", "clean up")
    assert (result.returncode, (cli_or_server.folder / "build").exists()) == (0, False)


def test_oneshot_works_in_user_folder(cli_or_server: Cli) -> None:
    cli_or_server.configure("approvals: {mode: off}\n")
    cli_or_server.script(Reply(tool_calls=[Call("terminal", {"command": "pwd > here.txt"})]), Reply(text="Done."))
    cli_or_server.run("-z", "where are you?")
    assert (cli_or_server.folder / "here.txt").read_text().strip() == os.path.realpath(cli_or_server.folder)


def test_oneshot_deadline_is_exit_124_and_keeps_text(cli_or_server: Cli) -> None:
    for deadline in ("1", "10", "50"):
        cli_or_server.script(Reply(text=["Begun", " and never ended"], stall_at=450))
        result = cli_or_server.run("-z", "hi", "--deadline", deadline)
        if result.stdout:  # a slow machine has more time to begin
            break
    assert result.returncode == 124 and result.stdout.startswith("Begun")


def test_oneshot_interrupt_is_exit_130(cli_or_server: Cli) -> None:
    cli_or_server.script(Reply(text="Begun", stall_at=10))
    process = cli_or_server.start("-z", "hi")
    until_blocking(lambda: cli_or_server.model.open_streams or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert [role for role, _ in cli_or_server.messages()] == ["user", "assistant"]


def test_nohup_keeps_oneshot_after_hangup(cli: Cli) -> None:
    cli.script(Reply(text=["Begun", " and ended."], gap_s=1.0))
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *HERMES, "-z", "hi"]
    process = subprocess.Popen(command, env=cli.env, cwd=cli.folder, stdout=subprocess.PIPE, text=True)
    until_blocking(lambda: cli.model.open_streams or process.poll() is not None)
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=DEADLINE_S)[0] == "Begun and ended.\n" and process.returncode == 0


def test_oneshot_json_result(cli_or_server: Cli) -> None:
    cli_or_server.script(Reply(text="ok", usage={"input": 12, "output": 3}))
    result = json.loads(cli_or_server.run("-z", "hi", "--json").stdout)
    assert (result["final_response"], result["completed"], result["api_calls"]) == ("ok", True, 1)
    assert (result["input_tokens"], result["output_tokens"], result["model"]) == (12, 3, "m")
    assert [message["role"] for message in result["messages"]] == ["user", "assistant"]
    keys = {"last_reasoning", "partial", "failed", "interrupted", "error", "error_code", "failure", "run_id"}
    keys |= {"session_id", "provider", "pending_calls", "pending_steer", "total_tokens", "usage_details"}
    assert keys <= set(result)


def test_oneshot_events_output(cli_or_server: Cli) -> None:
    plan = Call("todo", {"todos": [{"id": "1", "content": "x", "status": "pending"}]})
    cli_or_server.script(Reply(tool_calls=[plan]), Reply(text="done", continues=False))
    events = lines_of(cli_or_server.run("-z", "plan", "--events").stdout)
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[1], kinds[-1]) == ("run.queued", "run.started", "run.completed")
    assert [event["seq"] for event in events] == sorted(event["seq"] for event in events)
    assert [event["status"] for event in events if event["type"] == "tool.finished"] == ["ok"]
    assert "".join(event["text"] for event in events if event["type"] == "text.delta") == "done"


USED = {"run_id", "session_id", "model", "provider", "steps", "input_tokens", "output_tokens", "total_tokens"}
USED |= {"duration_s", "exit", "error"}


@pytest.mark.parametrize(
    ("reply", "code", "error"),
    [(Reply(text="ok"), 0, None), (Reply(status=401), 3, "key"), (Reply(text="a", stall_at=10), 124, "time")],
    ids=["done", "failed", "late"],
)
def test_oneshot_usage_file_for_every_ending(reply: Reply, code: int, error: str | None, cli: Cli) -> None:
    cli.script(reply)
    cli.run("-z", "hi", "--usage-file", "used.json", "--deadline", "1" if code == 124 else "60")
    used: dict[str, Any] = json.loads((cli.folder / "used.json").read_text())
    assert set(used) >= USED
    assert used["exit"] == code and used["session_id"] and used["run_id"].startswith("run_")
    assert used["error"] is None if error is None else error in used["error"]


def test_oneshot_usage_file_without_request(cli: Cli) -> None:
    cli.configure("nonsense: [\n")
    result = cli.run("-z", "hi", "--usage-file", "used.json")
    used = json.loads((cli.folder / "used.json").read_text())
    assert (result.returncode, used["exit"], used["run_id"]) == (78, 78, None) and used["error"]


def test_oneshot_blank_prompt_is_usage_error(cli: Cli) -> None:
    assert cli.run("-z", "-", stdin=" \n").returncode == 2


def test_oneshot_broken_pipe_is_quiet(cli: Cli) -> None:
    cli.script(Reply(text="x" * 200_000))
    process = cli.start("-z", "hi", "--events")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    assert (process.wait(timeout=DEADLINE_S), errors) == (0, "")
    process.stdout = None


@pytest.mark.parametrize("args", [("-r", "annas"), ("-r", "Melons"), ("-c", "Melons"), ("--no-save", "-r", "annas")])
def test_oneshot_does_not_resume_session_of_other_owner(cli: Cli, args: tuple[str, ...]) -> None:
    cli.script(Reply(text="Hi."))
    db = SessionDB(cli.home / "state.db")
    db.create_session("annas", "api_server", owner="anna", title="Melons", cwd=str(cli.folder))
    db.append_message("annas", "user", "the melon is hidden")
    before = db.export_session("annas")
    result = cli.run(*args, "-z", "where is it?")
    assert result.returncode != 0 and "There is no session" in result.stderr and cli.model.requests == []
    assert db.export_session("annas") == before
    db.close()


def test_oneshot_streams_on_terminal(cli: Cli) -> None:
    cli.configure("approvals: {mode: off}\n")
    cli.script(
        Reply(tool_calls=[Call("terminal", {"command": "echo begun; until [ -e go ]; do sleep 0.01; done"})]),
        Reply(text=["It is **so**", ".\nAnd more"], stall_at=650, continues=False),
    )
    terminal = Terminal([*HERMES, "-z", "is it?"], cli.env, cli.folder)
    try:
        terminal.until("thinking")
        terminal.until("    begun")
        (cli.folder / "go").touch()
        screen = terminal.until("It is so")
        assert "✓ terminal" in screen and "thinking" not in screen
        terminal.type("\x03")
        assert terminal.wait() == 130
    finally:
        terminal.close()
    assert str(terminal).endswith("■ Stopped.") and str(terminal).count("It is so") == 1


def test_oneshot_piped_answer_is_plain_and_tools_are_on_stderr(cli: Cli) -> None:
    (cli.folder / "notes.txt").write_text("milk")
    cli.script(
        Reply(tool_calls=[Call("read_file", {"path": "notes.txt"})]), Reply(text="It is **so**.", continues=False)
    )
    terminal = Terminal([*HERMES, "-z", "is it?"], cli.env, cli.folder, stdout=cli.folder / "out")
    try:
        assert terminal.wait() == 0
    finally:
        terminal.close()
    assert (cli.folder / "out").read_text() == "It is **so**.\n"
    assert "✓ read_file" in str(terminal) and "so" not in str(terminal)


def test_denied_call_has_a_hint_how_to_allow_it(cli_or_server: Cli) -> None:
    (cli_or_server.folder / "build").mkdir()
    rm = Call("terminal", {"command": "rm -rf build"})
    cli_or_server.script(Reply(tool_calls=[rm]), Reply(text="I may not.", continues=False))
    result = cli_or_server.run("-z", "clean up")
    assert (result.returncode, result.stdout) == (6, "I may not.\n")
    assert 'Try: hermes "…" at a terminal, or --yolo' in result.stderr and (cli_or_server.folder / "build").exists()
    cli_or_server.script(Reply(tool_calls=[rm]), Reply(text="I may not.", continues=False))
    assert "--yolo" not in cli_or_server.run("-z", "clean up", "--quiet").stderr
