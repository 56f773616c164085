"""The options of the command `hermes`, each doing what it says; errors and exit codes; chats without a terminal."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from dataclasses import replace

import pytest

import hermes
from hermes.cli.main import COMMANDS, main
from hermes.core.home import write_private
from hermes.settings.known_providers import KNOWN_PROVIDERS
from support.model_server import Call, Reply

from .conftest import HERMES, Cli

# What a help text needs is little: its time is that of its imports, of which a bare Python has some 35.
HELP_MODULES_MAX = 200
HELP = """
import contextlib, io, sys
from hermes.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
    main([*sys.argv[1:], "--help"])
assert text.getvalue().startswith("usage: hermes")
print(*sys.modules)
"""


@pytest.mark.parametrize("command", [[], ["chat"], ["gateway"], ["sessions"]], ids=str)
def test_help_imports_little(command: list[str]) -> None:
    result = subprocess.run([sys.executable, "-c", HELP, *command], capture_output=True, text=True, check=True)
    modules = result.stdout.split()
    assert len(modules) < HELP_MODULES_MAX
    assert {"aiohttp", "asyncio", "sqlite3", "yaml", "rich", "prompt_toolkit", "uvloop"}.isdisjoint(modules)


def test_oneshot_imports_no_terminal_library() -> None:
    code = (
        "import sys, hermes.cli.oneshot, hermes.cli.chat_command; print({'rich', 'prompt_toolkit'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_for_every_command(command: str, cli: Cli) -> None:
    result = cli.run(*([command] if command else []), "--help")
    assert result.returncode == 0 and result.stdout.startswith("usage: hermes")


def test_version_output(cli: Cli) -> None:
    stdout = cli.run("-V").stdout
    assert f"hermes {hermes.__version__}" in stdout and "profile default" in stdout
    for name in (str(cli.home), "python", "store", "sandbox local", "llama.cpp"):
        assert name in stdout.replace("Python", "python")


@pytest.mark.parametrize(
    "args",
    [
        ["--nonsense"],
        ["-z", "hi", "--deadline", "soon"],
        ["--max-turns", "0", "-z", "hi"],
        ["--sandbox", "jail", "-z", "hi"],
        ["-t", "teleport", "-z", "hi"],
        ["-s", "juggling", "-z", "hi"],
        ["--json"],
        ["--image", "config.yaml", "-z", "hi"],
    ],
    ids=" ".join,
)
def test_usage_errors_have_hint(args: list[str], cli: Cli) -> None:
    (cli.folder / "config.yaml").write_text("no picture")
    result = cli.run(*args)
    first, *rest = result.stderr.splitlines()
    assert result.returncode == 2 and result.stdout == ""
    assert first.startswith("hermes: ") and first.endswith((".", "?")) and rest[-1].startswith("Try: ")
    assert cli.model.requests == []


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_invalid_configuration_is_exit_78(text: str, message: str, cli: Cli) -> None:
    write_private(cli.home / "config.yaml", text)
    result = cli.run("-z", "hi")
    sentence, remedy = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (78, "")
    assert message in sentence and remedy.startswith("Try: ")


def test_missing_model_is_exit_3_with_hint(cli: Cli) -> None:
    write_private(cli.home / "config.yaml", "model: {path: none}\n")
    result = cli.run("-z", "hi")
    assert result.returncode == 3 and "Try: hermes setup" in result.stderr


def test_traceback_only_with_debug(cli: Cli) -> None:
    write_private(cli.home / "config.yaml", "agent: [\n")
    assert "Traceback" not in cli.run("-z", "hi").stderr
    assert "Traceback" in cli.run("--debug", "-z", "hi").stderr


def test_open_home_permissions_are_fixed_and_reported(cli: Cli) -> None:
    cli.script(Reply(text="ok"), Reply(text="ok"))
    (cli.home / "config.yaml").chmod(0o644)
    first, second = cli.run("-z", "hi"), cli.run("-z", "hi")
    assert (cli.home / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert "config.yaml was open to others (644)" in first.stderr and "open to others" not in second.stderr


def test_read_only_commands_create_nothing(cli: Cli) -> None:
    elsewhere = cli.home.parent / "elsewhere"
    cli.run("config", "show", HERMES_HOME=str(elsewhere))
    cli.run("-V", HERMES_HOME=str(elsewhere))
    assert not elsewhere.exists()


def test_profile_flag_before_or_after_command(cli: Cli) -> None:
    cli.run("profile", "create", "work")
    for args in (("-p", "work", "config", "path"), ("config", "path", "-p", "work")):
        assert cli.run(*args).stdout.strip().endswith("profiles/work/config.yaml")


def test_model_and_provider_flags(cli_or_server: Cli) -> None:
    cli_or_server.configure(f"providers: {{mine: {{base_url: '{cli_or_server.model.url}/v1', models: [theirs]}}}}\n")
    cli_or_server.script(Reply(text="one"), Reply(text="two"))
    cli_or_server.run("-m", "other", "-z", "hi")
    assert cli_or_server.model.requests[-1].model == "other"
    result = json.loads(cli_or_server.run("--provider", "mine", "-m", "theirs", "-z", "hi", "--json").stdout)
    assert (result["provider"], result["model"]) == ("mine", "theirs")


def test_toolsets_skills_and_max_turns_flags(cli_or_server: Cli) -> None:
    folder = cli_or_server.home / "skills" / "tidy"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: tidy\ndescription: How to tidy.\n---\n\nInto drawers.\n")
    plan = Call("todo", {"todos": []})
    cli_or_server.script(Reply(tool_calls=[plan]), Reply(text="Enough.", continues=False))
    result = cli_or_server.run("-t", "todo", "-s", "tidy", "--max-turns", "1", "-z", "hi", "--json")
    body = cli_or_server.model.requests[0].body
    assert [tool["function"]["name"] for tool in body["tools"]] == ["todo"]
    assert "Into drawers." in json.dumps(body["messages"])
    assert json.loads(result.stdout)["error_code"] == "max_iterations" and result.returncode == 1


def test_image_flag(cli_or_server: Cli) -> None:
    (cli_or_server.folder / "dot.png").write_bytes(
        bytes.fromhex("89504e470d0a1a0a0000000d4948445200000001000000010806")
    )
    cli_or_server.script(Reply(text="A dot."))
    assert cli_or_server.run("--image", "dot.png", "-z", "what is it?").stdout == "A dot.\n"
    assert "data:image/png;base64," in json.dumps(cli_or_server.model.requests[-1].body)


def test_sandbox_flag(cli: Cli) -> None:
    cli.configure("")
    outside = cli.home.parent / "outside.txt"
    write = Call("terminal", {"command": f"echo x > {outside}"})
    cli.script(Reply(tool_calls=[write]), Reply(text="done"), Reply(tool_calls=[write]), Reply(text="done"))
    cli.run("--sandbox", "bubblewrap", "--yolo", "-z", "write")
    assert not outside.exists()
    cli.run("--sandbox", "local", "--yolo", "-z", "write")
    assert outside.exists()


def test_safe_mode_flag(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (cli.home / "memories").mkdir()
    (cli.home / "memories" / "MEMORY.md").write_text("The user likes tea.")
    (cli.folder / "AGENTS.md").write_text("Always shout.")
    known = replace(KNOWN_PROVIDERS["ollama"], base_url=f"{cli.model.url}/v1")
    monkeypatch.setitem(KNOWN_PROVIDERS, "ollama", known)
    monkeypatch.setenv("HERMES_HOME", str(cli.home))
    monkeypatch.chdir(cli.folder)
    monkeypatch.setattr("sys.stdin", None)
    cli.script(Reply(text="ok"), Reply(text="ok"))
    args = ["--provider", "ollama", "-m", "m", "-z", "hi"]
    assert main(args) == 0
    usual = json.dumps(cli.model.requests[-1].body)
    write_private(cli.home / "config.yaml", "agent: [\n")
    assert (main(args), main(["--safe-mode", *args])) == (78, 0)
    safe = json.dumps(cli.model.requests[-1].body)
    for word in ("likes tea", "Always shout", "skill_view"):
        assert word in usual and word not in safe


def test_no_save_flag(cli: Cli) -> None:
    cli.serve()
    cli.script(Reply(text="ok"))
    assert cli.run("--no-save", "-z", "a secret question").stdout == "ok\n"
    assert cli.sessions() == []
    assert b"a secret question" not in (cli.home / "state.db").read_bytes()


def test_no_save_leaves_no_memory_and_no_files(cli: Cli) -> None:
    remember = Call("memory", {"action": "add", "target": "memory", "content": "The user likes tea."})
    cli.script(
        Reply(tool_calls=[remember, Call("terminal", {"command": "seq 1 60000"})]),
        Reply(text="Done."),
    )
    assert cli.run("--no-save", "--yolo", "-z", "remember that I like tea").stdout == "Done.\n"
    offered = {tool["function"]["name"] for tool in cli.model.requests[0].body["tools"]}
    assert offered.isdisjoint({"memory", "skill_manage", "cronjob"}) and "terminal" in offered
    paths = {path.relative_to(cli.home) for path in cli.home.rglob("*") if path.is_file()}
    assert {str(path) for path in paths if path.parts[0] != "logs"} <= {"config.yaml", "cache/models.json"}


def test_no_save_is_refused_with_a_server(cli: Cli) -> None:
    refused = cli.run("--no-save", "--server", "http://127.0.0.1:9", "-z", "hi")
    assert refused.returncode == 2 and "--no-save" in refused.stderr


def test_refused_connection_is_named_by_its_address(cli: Cli, closed_port: int) -> None:
    address = f"127.0.0.1:{closed_port}"
    failed = cli.run("--server", f"http://{address}", "-z", "hi")
    assert failed.returncode == 69 and f"http://{address}" in failed.stderr and "refused" in failed.stderr
    assert cli.run("config", "set", "model.base_url", f"http://{address}/v1").returncode == 0
    failed = cli.run("-z", "hi")
    assert failed.returncode == 1 and f"{address}: Connection refused; trying again\n" in failed.stderr
    assert f"could not be reached. {address}: Connection refused" in failed.stderr


def test_missing_sandbox_is_reported_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes.sandbox.bubblewrap.probe", lambda: "bubblewrap is not installed.")
    assert cli.run("config", "set", "terminal.backend", "auto").returncode == 0
    cli.script(Reply(text="One.", continues=False), Reply(text="Two.", continues=False))
    stderr = cli.run("chat", stdin="hi\nagain\n").stderr
    assert stderr.count("Commands cannot be run: there is no sandbox for commands") == 1
    assert "terminal.allow_local" in stderr
    cli.script(Reply(text="Three."))
    assert "no sandbox" not in cli.run("-z", "hi", "-t", "todo").stderr


def test_quiet_flag(cli: Cli) -> None:
    cli.script(Reply(text="One.", continues=False), Reply(text="Two.", continues=False))
    aloud, quiet = cli.run("chat", stdin="hi\n"), cli.run("--quiet", "chat", stdin="hi\n")
    assert "custom/m" in aloud.stderr and "--resume" in aloud.stderr
    assert (quiet.stdout, quiet.stderr) == ("Two.\n", "")


def test_continue_by_id_title_or_folder(cli_or_server: Cli) -> None:
    cli_or_server.script(*(Reply(text=f"Answer {at}.", continues=False) for at in range(6)))
    cli_or_server.run("-z", "first")
    [session] = cli_or_server.sessions()
    cli_or_server.run("sessions", "rename", session["id"], "Dinner")
    cli_or_server.run("-r", "Dinner", "-z", "second")
    cli_or_server.run("-z", "third", "-c", "Dinner")
    cli_or_server.run("-c", "-z", "fourth")
    assert [text for role, text in cli_or_server.messages() if role == "user"] == ["first", "second", "third", "fourth"]
    assert cli_or_server.run("-r", "nobody", "-z", "hi").returncode == 5
    assert cli_or_server.run("-c", "nobody", "-z", "hi").returncode == 5


def test_continue_ignores_sessions_of_other_folders(cli: Cli) -> None:
    cli.script(Reply(text="ok"))
    cli.run("-z", "first")
    cli.folder = cli.folder / "below"
    cli.folder.mkdir()
    assert cli.run("-c", "-z", "hi").returncode == 5


# --- chats without a terminal ----------------------------------------------------------------------------------------


def test_piped_chat_answers_line_by_line(cli_or_server: Cli) -> None:
    cli_or_server.script(Reply(text="first"), Reply(text="second", continues=False))
    result = cli_or_server.run("chat", stdin="one\ntwo\n")
    assert result.returncode == 0 and result.stdout.split() == ["first", "second"]
    assert cli_or_server.model_messages() == [("user", "one"), ("assistant", "first"), ("user", "two")]
    assert cli_or_server.sessions()[0]["end_reason"] == "cli_close"


def test_piped_chat_from_file(cli: Cli) -> None:
    cli.script(Reply(text="first"))
    (cli.folder / "lines").write_text("one")
    with (cli.folder / "lines").open() as lines:
        result = subprocess.run([*HERMES], env=cli.env, cwd=cli.folder, stdin=lines, capture_output=True, check=False)
    assert result.stdout == b"first\n"


def test_piped_no_save_chat_remembers(cli: Cli) -> None:
    cli.script(Reply(text="first"), Reply(text="second", continues=False))
    cli.run("--no-save", "chat", stdin="one\ntwo\n")
    assert cli.model_messages() == [("user", "one"), ("assistant", "first"), ("user", "two")]
    assert not (cli.home / "state.db").exists()


def test_piped_chat_asks_no_approval(cli: Cli) -> None:
    write = Call("memory", {"target": "memory", "action": "add", "content": "Likes tea."})
    cli.configure("memory: {write_approval: true}\n")
    cli.script(Reply(tool_calls=[write]), Reply(text="Not done.", continues=False), Reply(text="What?"))
    result = cli.run("chat", stdin="remember it\nonce\n")
    assert result.stdout == "Not done.\nWhat?\n" and not (cli.home / "memories" / "MEMORY.md").exists()


@pytest.mark.parametrize(("reply", "code"), [(Reply(text="It is."), 0), (Reply(status=401), 3), (Reply(status=400), 1)])
def test_chat_query_streams_and_exits(reply: Reply, code: int, cli: Cli) -> None:
    cli.script(reply)
    result = cli.run("chat", "-q", "review this", stdin="+ a line\n")
    assert (result.returncode, result.stdout) == (code, "It is.\n" if code == 0 else "")
    assert "+ a line" in cli.model_messages()[-1][1]


def test_chat_query_json(cli: Cli) -> None:
    cli.script(Reply(text="It is."))
    assert json.loads(cli.run("chat", "-q", "is it?", "--json").stdout)["final_response"] == "It is."


# --- what can go wrong ----------------------------------------------------------------------------------------------


def test_broken_pipe_is_quiet(cli: Cli) -> None:
    process = cli.start("config", "show")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=60)) == ("", 0)
    process.stdout = None


def test_question_is_answered_without_usable_database(cli: Cli) -> None:
    cli.script(Reply(text="ok"))
    (cli.home / "state.db").write_bytes(b"no database" * 500)
    result = cli.run("-z", "hi")
    assert (result.returncode, result.stdout) == (0, "ok\n")
    assert "not kept" in result.stderr and "hermes sessions repair" in result.stderr


def test_storage_url_setting_is_used(cli: Cli) -> None:
    elsewhere = cli.home.parent / "elsewhere" / "all.db"
    cli.configure(f"storage: {{url: 'sqlite://{elsewhere}'}}\n")
    cli.script(Reply(text="ok"))
    assert cli.run("-z", "hi").stdout == "ok\n"
    assert elsewhere.exists() and not (cli.home / "state.db").exists()


def test_unknown_storage_url_is_rejected(cli: Cli) -> None:
    result = cli.run("-z", "hi", HERMES_DATABASE_URL="mysql://u:hunter2@h/db")
    assert result.returncode == 78 and "hunter2" not in result.stderr and "mysql" in result.stderr


def test_api_key_is_not_in_errors(cli: Cli) -> None:
    text = f"model: {{default: m, base_url: '{cli.model.url}/v1', api_key: 'abc-secret-key-123'}}\n"
    write_private(cli.home / "config.yaml", text)
    cli.script(Reply(status=400, error="no such thing", quote_key=True))
    result = cli.run("-z", "hi")
    assert (
        result.returncode == 1 and "refused the request" in result.stderr and "abc-secret-key-123" not in result.stderr
    )


def test_question_without_a_command(cli: Cli) -> None:
    cli.script(Reply(text="It is noon."), Reply(text="Noon.", continues=False))
    result = cli.run("what time is it")
    assert (result.returncode, result.stdout) == (0, "It is noon.\n")
    assert cli.model_messages() == [("user", "what time is it")]
    result = cli.run("-m", "other", "time?", "--json")
    assert json.loads(result.stdout)["final_response"] == "Noon."
    assert cli.model.requests[-1].model == "other"


def test_single_unknown_word_is_no_question(cli: Cli) -> None:
    result = cli.run("sesions")
    assert result.returncode == 2 and "There is no command 'sesions'. Did you mean sessions" in result.stderr
    assert 'hermes -z "hello you"' in cli.run("hello", "you").stderr
    assert "--nonsense" in cli.run("--nonsense", "hello").stderr
    assert cli.model.requests == []


@pytest.mark.parametrize("args", [["help"], ["help", "cron"], ["help", "cron", "create"]], ids=" ".join)
def test_help_is_a_word_too(args: list[str], cli: Cli) -> None:
    assert cli.run(*args) == cli.run(*args[1:], "--help")


def test_group_without_an_action_lists_or_prints_help(cli: Cli) -> None:
    listed = cli.run("sessions")
    assert (listed.returncode, listed.stderr) == (0, "There are no sessions.\n")
    for group in ("config", "gateway"):
        result = cli.run(group)
        assert result.returncode == 0 and result.stdout.startswith("usage: ")


def test_sampling_settings_are_sent_and_requests_win(cli: Cli) -> None:
    cli.serve()
    cli.script(Reply(text="One."), Reply(text="Two."))
    for name, value in (("temperature", "0.3"), ("top_p", "0.9"), ("max_tokens", "77"), ("stop", "END")):
        assert cli.run("config", "set", f"model.{name}", value).returncode == 0
    assert cli.run("-z", "hello").returncode == 0
    body = cli.model.requests[-1].body
    assert (body["temperature"], body["top_p"], body["stop"]) == (0.3, 0.9, ["END"])
    assert 77 in (body.get("max_tokens"), body.get("max_completion_tokens"))
    request = {"messages": [{"role": "user", "content": "hello"}], "temperature": 1.5}
    address = json.loads((cli.home / "gateway_state.json").read_text())
    url = f"http://127.0.0.1:{address['port']}/v1/chat/completions"
    http_request = urllib.request.Request(url, json.dumps(request).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(http_request, timeout=60) as answer:
        assert answer.status == 200
    assert cli.model.requests[-1].body["temperature"] == 1.5
