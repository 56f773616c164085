"""The command `hermes` as a person or a script uses it: a real process, real pipes, a real socket to the model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hermes
from hermes.home import write_private
from hermes.store.sessions import SessionDB
from support.model_server import Call, ModelServer, Reply
from support.server_thread import serving

# A title is asked for behind the back of a turn, and would eat the script of a test about something else.
UNTITLED = "auxiliary: {title_generation: {enabled: false}}\n"


def run(
    *words: str, home: Path, stdin: str | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "hermes", *words],
        env=environment(home) | (env or {}),
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def environment(home: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HERMES_HOME": str(home), "HOME": str(home)}


def configure(home: Path, server: ModelServer, more: str = "") -> None:
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)
    write_private(home / "config.yaml", f"model: {{default: m, base_url: '{server.url}/v1'}}\n{more}")


def test_a_home_that_is_open_to_others_is_closed_and_that_is_said(tmp_path: Path) -> None:
    with serving(Reply(text="ok"), Reply(text="ok")) as server:
        configure(tmp_path, server)
        (tmp_path / "config.yaml").chmod(0o644)
        done = run("-z", "hi", home=tmp_path)
        again = run("-z", "hi", home=tmp_path)
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert "config.yaml was open to others (644)" in done.stderr
    assert "open to others" not in again.stderr


def test_version_names_version_home_and_profile(tmp_path: Path) -> None:
    done = run("--version", home=tmp_path)
    assert done.returncode == 0
    assert f"hermes {hermes.__version__}" in done.stdout
    assert str(tmp_path) in done.stdout and "profile default" in done.stdout


@pytest.mark.parametrize("command", [(), ("chat",), ("config",), ("profile",), ("sessions",)])
def test_help_answers_for_every_command(command: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*command, "--help", home=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("usage: hermes")


def test_an_unknown_option_is_a_usage_error(tmp_path: Path) -> None:
    assert run("--nonsense", home=tmp_path).returncode == 2


def test_nothing_is_created_in_a_home_that_is_only_looked_at(tmp_path: Path) -> None:
    home = tmp_path / "home"
    run("config", "show", home=home)
    assert not home.exists()


def test_oneshot_prints_the_answer_and_nothing_else(tmp_path: Path) -> None:
    with serving(Reply(text=["Hello", " you."])) as server:
        configure(tmp_path, server)
        done = run("-z", "hi", home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello you.\n", "")


def test_oneshot_reads_the_prompt_from_stdin(tmp_path: Path) -> None:
    with serving(Reply(text="ok")) as server:
        configure(tmp_path, server)
        run("-z", "-", home=tmp_path, stdin="what is this?")
        assert server.requests[0].turns[-1].text == "what is this?"


def test_what_is_piped_in_goes_along_as_a_file(tmp_path: Path) -> None:
    with serving(Reply(text="ok")) as server:
        configure(tmp_path, server)
        run("-z", "review this", home=tmp_path, stdin="+ a line\n")
        said = server.requests[0].turns[-1].text
    assert "review this" in said and "+ a line" in said


def test_oneshot_json_is_the_whole_result(tmp_path: Path) -> None:
    with serving(Reply(text="ok", usage={"input": 12, "output": 3})) as server:
        configure(tmp_path, server)
        result = json.loads(run("-z", "hi", "--json", home=tmp_path).stdout)
    assert result["final_response"] == "ok" and result["completed"] is True
    assert (result["input_tokens"], result["output_tokens"]) == (12, 3)


def test_oneshot_events_are_the_log_as_json_lines(tmp_path: Path) -> None:
    plan = Call("todo", {"todos": [{"id": "1", "content": "x", "status": "pending"}]})
    with serving(Reply(tool_calls=[plan]), Reply(text="done", continues=False)) as server:
        configure(tmp_path, server)
        lines = run("-z", "plan", "--events", home=tmp_path).stdout.splitlines()
    events = [json.loads(line) for line in lines]
    assert events[0]["type"] == "run.started" and events[-1]["type"] == "run.completed"
    assert [e["seq"] for e in events] == sorted(e["seq"] for e in events)
    assert [e["status"] for e in events if e["type"] == "tool.finished"] == ["ok"]


def test_a_failed_turn_exits_with_1_and_says_why_without_the_key(tmp_path: Path) -> None:
    with serving(Reply(status=400, error="no such thing", quote_key=True)) as server:
        configure(tmp_path, server, "providers: {}\n")
        write_private(
            tmp_path / "config.yaml",
            f"model: {{default: m, base_url: '{server.url}/v1', api_key: 'abc-secret-key-123'}}\n",
        )
        done = run("-z", "hi", home=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert "refused the request" in done.stderr and "abc-secret-key-123" not in done.stderr


def test_a_refused_key_exits_with_3(tmp_path: Path) -> None:
    with serving(Reply(status=401)) as server:
        configure(tmp_path, server)
        assert run("-z", "hi", home=tmp_path).returncode == 3


def test_a_deadline_exits_with_124_and_keeps_the_text(tmp_path: Path) -> None:
    with serving(Reply(text=["Begun", " and never ended"], stall_at=450)) as server:
        configure(tmp_path, server)
        done = run("-z", "hi", "--deadline", "1", home=tmp_path)
    assert done.returncode == 124
    assert done.stdout.startswith("Begun")


def test_ctrl_c_ends_a_oneshot_with_130(tmp_path: Path) -> None:
    with serving(Reply(text="Begun", stall_at=10)) as server:
        configure(tmp_path, server)
        process = subprocess.Popen(
            [sys.executable, "-m", "hermes", "-z", "hi"],
            env=environment(tmp_path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        while not server.open_streams and process.poll() is None:
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("agent: {max_turns: many}\n", "agent.max_turns must be a whole number"),
        ("agent: [\n", "config.yaml line 2"),
        ("model: {default: m, provider: opnai}\n", "'opnai' is unknown"),
        (
            "model: {default: m, provider: mine}\nproviders: {mine: {base_url: 'https://x.test/v1', key_env: MINE}}\n",
            "MINE",
        ),
        ("model: m\n", "no provider and no base_url"),
    ],
    ids=["wrong type", "broken YAML", "unknown provider", "missing key", "no address"],
)
def test_bad_configuration_is_one_sentence_and_exit_78(text: str, words: str, tmp_path: Path) -> None:
    write_private(tmp_path / "config.yaml", text)
    done = run("-z", "hi", home=tmp_path)
    assert done.returncode == 78
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert words in done.stderr and "Try:" in done.stderr


def test_without_a_model_the_exit_is_3_and_the_remedy_is_named(tmp_path: Path) -> None:
    done = run("-z", "hi", home=tmp_path)
    assert done.returncode == 3 and "Try: hermes config set model.provider" in done.stderr


def test_chat_answers_line_by_line_and_remembers(tmp_path: Path) -> None:
    with serving(Reply(text="first"), Reply(text="second", continues=False)) as server:
        configure(tmp_path, server, UNTITLED)
        done = run("chat", home=tmp_path, stdin="one\ntwo\n")
        turns = [(turn.role, turn.text) for turn in server.requests[1].turns if turn.role != "system"]
    assert done.returncode == 0 and done.stdout.split() == ["first", "second"]
    assert turns == [("user", "one"), ("assistant", "first"), ("user", "two")]


@pytest.mark.parametrize(("said", "kept"), [("o", True), ("once", True), ("", False), ("what?", False)])
def test_chat_asks_before_it_does_what_needs_leave(said: str, kept: bool, tmp_path: Path) -> None:
    write = Call("memory", {"target": "memory", "action": "add", "content": "Likes tea."})
    with serving(Reply(tool_calls=[write]), Reply(text="Done.", continues=False)) as server:
        configure(tmp_path, server, "memory: {write_approval: true}\n")
        done = run("chat", home=tmp_path, stdin=f"remember it\n{said}\n")
    assert "Likes tea." in done.stderr
    assert (tmp_path / "memories" / "MEMORY.md").exists() is kept


def test_a_broken_pipe_ends_quietly(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hermes", "config", "show"],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=30) == 0 and errors == b""


def test_the_profile_may_be_named_before_or_after_the_command(tmp_path: Path) -> None:
    run("profile", "create", "work", home=tmp_path)
    for words in (("-p", "work", "config", "path"), ("config", "path", "-p", "work")):
        assert run(*words, home=tmp_path).stdout.strip().endswith("profiles/work/config.yaml")


def conversation(home: Path) -> list[tuple[str, Any]]:
    with contextlib.closing(SessionDB(home / "state.db")) as db:
        found = db.list_sessions()
        assert [session["source"] for session in found] == ["cli"]
        return [(row["role"], row["content"]) for row in db.get_messages(found[0]["id"])]


def test_a_question_and_its_answer_are_kept(tmp_path: Path) -> None:
    with serving(Reply(text="ok")) as server:
        configure(tmp_path, server, UNTITLED)
        assert run("-z", "hi", home=tmp_path).returncode == 0
    assert conversation(tmp_path) == [("user", "hi"), ("assistant", "ok")]
    with contextlib.closing(SessionDB(tmp_path / "state.db")) as db:
        assert db.list_sessions()[0]["end_reason"] == "cli_close"
    assert (tmp_path / "state.db").stat().st_mode & 0o777 == 0o600


def test_nothing_is_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    with serving(Reply(text="ok")) as server:
        configure(tmp_path, server)
        assert run("--no-save", "-z", "hi", home=tmp_path).stdout == "ok\n"
    assert not (tmp_path / "state.db").exists()


def test_a_conversation_goes_on_from_what_was_kept_of_it(tmp_path: Path) -> None:
    with serving(Reply(text="One."), Reply(text="Two.")) as server:
        configure(tmp_path, server, UNTITLED)
        assert run("chat", home=tmp_path, stdin="first\nsecond\n").returncode == 0
    said = [("user", "first"), ("assistant", "One."), ("user", "second"), ("assistant", "Two.")]
    assert conversation(tmp_path) == said
    with contextlib.closing(SessionDB(tmp_path / "state.db")) as db:
        assert db.list_sessions()[0]["end_reason"] == "cli_close"


def test_a_question_is_answered_although_it_cannot_be_kept(tmp_path: Path) -> None:
    with serving(Reply(text="ok")) as server:
        configure(tmp_path, server)
        (tmp_path / "state.db").write_bytes(b"no database" * 500)
        done = run("-z", "hi", home=tmp_path)
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert "not kept" in done.stderr and "hermes sessions repair" in done.stderr


def test_the_database_lies_where_the_settings_say(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "all.db"
    with serving(Reply(text="ok")) as server:
        configure(tmp_path, server, f"{UNTITLED}storage: {{url: 'sqlite://{elsewhere}'}}\n")
        assert run("-z", "hi", home=tmp_path).stdout == "ok\n"
    assert elsewhere.exists() and not (tmp_path / "state.db").exists()
    listed = json.loads(run("sessions", "list", "--json", home=tmp_path).stdout)
    assert "cli" in json.dumps(listed)


def test_an_address_that_no_store_has_is_a_refused_setting(tmp_path: Path) -> None:
    with serving(Reply(text="ok")) as server:
        configure(tmp_path, server)
        done = run("-z", "hi", home=tmp_path, env={"HERMES_DATABASE_URL": "postgresql://u:hunter2@h/db"})
    assert done.returncode == 78 and "hunter2" not in done.stderr and "postgresql" in done.stderr
