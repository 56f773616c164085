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

from .conftest import HERMES, Place

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
    done = subprocess.run([sys.executable, "-c", HELP, *command], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert len(modules) < HELP_MODULES_MAX
    assert {"aiohttp", "asyncio", "sqlite3", "yaml", "rich", "prompt_toolkit", "uvloop"}.isdisjoint(modules)


def test_oneshot_imports_no_terminal_library() -> None:
    code = (
        "import sys, hermes.cli.oneshot, hermes.cli.chat_command; print({'rich', 'prompt_toolkit'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_for_every_command(command: str, place: Place) -> None:
    done = place.run(*([command] if command else []), "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: hermes")


def test_version_output(place: Place) -> None:
    told = place.run("-V").stdout
    assert f"hermes {hermes.__version__}" in told and "profile default" in told
    for name in (str(place.home), "python", "store", "sandbox local", "llama.cpp"):
        assert name in told.replace("Python", "python")


@pytest.mark.parametrize(
    "words",
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
def test_usage_errors_have_hint(words: list[str], place: Place) -> None:
    (place.folder / "config.yaml").write_text("no picture")
    done = place.run(*words)
    first, *rest = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == ""
    assert first.startswith("hermes: ") and first.endswith((".", "?")) and rest[-1].startswith("Try: ")
    assert place.model.requests == []


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
def test_invalid_configuration_is_exit_78(text: str, words: str, place: Place) -> None:
    write_private(place.home / "config.yaml", text)
    done = place.run("-z", "hi")
    sentence, remedy = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (78, "")
    assert words in sentence and remedy.startswith("Try: ")


def test_missing_model_is_exit_3_with_hint(place: Place) -> None:
    write_private(place.home / "config.yaml", "model: {path: none}\n")
    done = place.run("-z", "hi")
    assert done.returncode == 3 and "Try: hermes setup" in done.stderr


def test_traceback_only_with_debug(place: Place) -> None:
    write_private(place.home / "config.yaml", "agent: [\n")
    assert "Traceback" not in place.run("-z", "hi").stderr
    assert "Traceback" in place.run("--debug", "-z", "hi").stderr


def test_open_home_permissions_are_fixed_and_reported(place: Place) -> None:
    place.script(Reply(text="ok"), Reply(text="ok"))
    (place.home / "config.yaml").chmod(0o644)
    first, second = place.run("-z", "hi"), place.run("-z", "hi")
    assert (place.home / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert "config.yaml was open to others (644)" in first.stderr and "open to others" not in second.stderr


def test_read_only_commands_create_nothing(place: Place) -> None:
    elsewhere = place.home.parent / "elsewhere"
    place.run("config", "show", HERMES_HOME=str(elsewhere))
    place.run("-V", HERMES_HOME=str(elsewhere))
    assert not elsewhere.exists()


def test_profile_flag_before_or_after_command(place: Place) -> None:
    place.run("profile", "create", "work")
    for words in (("-p", "work", "config", "path"), ("config", "path", "-p", "work")):
        assert place.run(*words).stdout.strip().endswith("profiles/work/config.yaml")


def test_model_and_provider_flags(each_way: Place) -> None:
    each_way.configure(f"providers: {{mine: {{base_url: '{each_way.model.url}/v1', models: [theirs]}}}}\n")
    each_way.script(Reply(text="one"), Reply(text="two"))
    each_way.run("-m", "other", "-z", "hi")
    assert each_way.model.requests[-1].model == "other"
    result = json.loads(each_way.run("--provider", "mine", "-m", "theirs", "-z", "hi", "--json").stdout)
    assert (result["provider"], result["model"]) == ("mine", "theirs")


def test_toolsets_skills_and_max_turns_flags(each_way: Place) -> None:
    folder = each_way.home / "skills" / "tidy"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: tidy\ndescription: How to tidy.\n---\n\nInto drawers.\n")
    plan = Call("todo", {"todos": []})
    each_way.script(Reply(tool_calls=[plan]), Reply(text="Enough.", continues=False))
    done = each_way.run("-t", "todo", "-s", "tidy", "--max-turns", "1", "-z", "hi", "--json")
    body = each_way.model.requests[0].body
    assert [tool["function"]["name"] for tool in body["tools"]] == ["todo"]
    assert "Into drawers." in json.dumps(body["messages"])
    assert json.loads(done.stdout)["error_code"] == "max_iterations" and done.returncode == 1


def test_image_flag(each_way: Place) -> None:
    (each_way.folder / "dot.png").write_bytes(bytes.fromhex("89504e470d0a1a0a0000000d4948445200000001000000010806"))
    each_way.script(Reply(text="A dot."))
    assert each_way.run("--image", "dot.png", "-z", "what is it?").stdout == "A dot.\n"
    assert "data:image/png;base64," in json.dumps(each_way.model.requests[-1].body)


def test_sandbox_flag(place: Place) -> None:
    place.configure("")
    outside = place.home.parent / "outside.txt"
    write = Call("terminal", {"command": f"echo x > {outside}"})
    place.script(Reply(tool_calls=[write]), Reply(text="done"), Reply(tool_calls=[write]), Reply(text="done"))
    place.run("--sandbox", "bubblewrap", "--yolo", "-z", "write")
    assert not outside.exists()
    place.run("--sandbox", "local", "--yolo", "-z", "write")
    assert outside.exists()


def test_safe_mode_flag(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.home / "memories").mkdir()
    (place.home / "memories" / "MEMORY.md").write_text("The user likes tea.")
    (place.folder / "AGENTS.md").write_text("Always shout.")
    known = replace(KNOWN_PROVIDERS["ollama"], base_url=f"{place.model.url}/v1")
    monkeypatch.setitem(KNOWN_PROVIDERS, "ollama", known)
    monkeypatch.setenv("HERMES_HOME", str(place.home))
    monkeypatch.chdir(place.folder)
    monkeypatch.setattr("sys.stdin", None)
    place.script(Reply(text="ok"), Reply(text="ok"))
    words = ["--provider", "ollama", "-m", "m", "-z", "hi"]
    assert main(words) == 0
    usual = json.dumps(place.model.requests[-1].body)
    write_private(place.home / "config.yaml", "agent: [\n")
    assert (main(words), main(["--safe-mode", *words])) == (78, 0)
    safe = json.dumps(place.model.requests[-1].body)
    for word in ("likes tea", "Always shout", "skill_view"):
        assert word in usual and word not in safe


def test_no_save_flag(place: Place) -> None:
    place.serve()
    place.script(Reply(text="ok"))
    assert place.run("--no-save", "-z", "a secret question").stdout == "ok\n"
    assert place.sessions() == []
    assert b"a secret question" not in (place.home / "state.db").read_bytes()


def test_no_save_leaves_no_memory_and_no_files(place: Place) -> None:
    remember = Call("memory", {"action": "add", "target": "memory", "content": "The user likes tea."})
    place.script(
        Reply(tool_calls=[remember, Call("terminal", {"command": "seq 1 60000"})]),
        Reply(text="Done."),
    )
    assert place.run("--no-save", "--yolo", "-z", "remember that I like tea").stdout == "Done.\n"
    offered = {tool["function"]["name"] for tool in place.model.requests[0].body["tools"]}
    assert offered.isdisjoint({"memory", "skill_manage", "cronjob"}) and "terminal" in offered
    kept = {path.relative_to(place.home) for path in place.home.rglob("*") if path.is_file()}
    assert {str(path) for path in kept if path.parts[0] != "logs"} <= {"config.yaml", "cache/models.json"}


def test_no_save_is_refused_with_a_server(place: Place) -> None:
    refused = place.run("--no-save", "--server", "http://127.0.0.1:9", "-z", "hi")
    assert refused.returncode == 2 and "--no-save" in refused.stderr


def test_refused_connection_is_named_by_its_address(place: Place) -> None:
    failed = place.run("--server", "http://127.0.0.1:9", "-z", "hi")
    assert failed.returncode == 69 and "http://127.0.0.1:9" in failed.stderr and "refused" in failed.stderr
    assert place.run("config", "set", "model.base_url", "http://127.0.0.1:9/v1").returncode == 0
    failed = place.run("-z", "hi")
    assert failed.returncode == 1 and "127.0.0.1:9: Connection refused; trying again\n" in failed.stderr
    assert "could not be reached. 127.0.0.1:9: Connection refused" in failed.stderr


def test_missing_sandbox_is_said_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes.sandbox.bubblewrap.probe", lambda: "bubblewrap is not installed.")
    assert place.run("config", "set", "terminal.backend", "auto").returncode == 0
    place.script(Reply(text="One.", continues=False), Reply(text="Two.", continues=False))
    told = place.run("chat", stdin="hi\nagain\n").stderr
    assert told.count("Commands cannot be run: there is no sandbox for commands") == 1
    assert "terminal.allow_local" in told
    place.script(Reply(text="Three."))
    assert "no sandbox" not in place.run("-z", "hi", "-t", "todo").stderr


def test_quiet_flag(place: Place) -> None:
    place.script(Reply(text="One.", continues=False), Reply(text="Two.", continues=False))
    aloud, quiet = place.run("chat", stdin="hi\n"), place.run("--quiet", "chat", stdin="hi\n")
    assert "custom/m" in aloud.stderr and "--resume" in aloud.stderr
    assert (quiet.stdout, quiet.stderr) == ("Two.\n", "")


def test_continue_by_id_title_or_folder(each_way: Place) -> None:
    each_way.script(*(Reply(text=f"Answer {at}.", continues=False) for at in range(6)))
    each_way.run("-z", "first")
    [session] = each_way.sessions()
    each_way.run("sessions", "rename", session["id"], "Dinner")
    each_way.run("-r", "Dinner", "-z", "second")
    each_way.run("-z", "third", "-c", "Dinner")
    each_way.run("-c", "-z", "fourth")
    assert [text for role, text in each_way.said() if role == "user"] == ["first", "second", "third", "fourth"]
    assert each_way.run("-r", "nobody", "-z", "hi").returncode == 5
    assert each_way.run("-c", "nobody", "-z", "hi").returncode == 5


def test_continue_ignores_sessions_of_other_folders(place: Place) -> None:
    place.script(Reply(text="ok"))
    place.run("-z", "first")
    place.folder = place.folder / "below"
    place.folder.mkdir()
    assert place.run("-c", "-z", "hi").returncode == 5


# --- chats without a terminal ----------------------------------------------------------------------------------------


def test_piped_chat_answers_line_by_line(each_way: Place) -> None:
    each_way.script(Reply(text="first"), Reply(text="second", continues=False))
    done = each_way.run("chat", stdin="one\ntwo\n")
    assert done.returncode == 0 and done.stdout.split() == ["first", "second"]
    assert each_way.asked() == [("user", "one"), ("assistant", "first"), ("user", "two")]
    assert each_way.sessions()[0]["end_reason"] == "cli_close"


def test_piped_chat_from_file(place: Place) -> None:
    place.script(Reply(text="first"))
    (place.folder / "lines").write_text("one")
    with (place.folder / "lines").open() as lines:
        done = subprocess.run([*HERMES], env=place.env, cwd=place.folder, stdin=lines, capture_output=True, check=False)
    assert done.stdout == b"first\n"


def test_piped_no_save_chat_remembers(place: Place) -> None:
    place.script(Reply(text="first"), Reply(text="second", continues=False))
    place.run("--no-save", "chat", stdin="one\ntwo\n")
    assert place.asked() == [("user", "one"), ("assistant", "first"), ("user", "two")]
    assert not (place.home / "state.db").exists()


def test_piped_chat_asks_no_approval(place: Place) -> None:
    write = Call("memory", {"target": "memory", "action": "add", "content": "Likes tea."})
    place.configure("memory: {write_approval: true}\n")
    place.script(Reply(tool_calls=[write]), Reply(text="Not done.", continues=False), Reply(text="What?"))
    done = place.run("chat", stdin="remember it\nonce\n")
    assert done.stdout == "Not done.\nWhat?\n" and not (place.home / "memories" / "MEMORY.md").exists()


@pytest.mark.parametrize(("reply", "code"), [(Reply(text="It is."), 0), (Reply(status=401), 3), (Reply(status=400), 1)])
def test_chat_query_streams_and_exits(reply: Reply, code: int, place: Place) -> None:
    place.script(reply)
    done = place.run("chat", "-q", "review this", stdin="+ a line\n")
    assert (done.returncode, done.stdout) == (code, "It is.\n" if code == 0 else "")
    assert "+ a line" in place.asked()[-1][1]


def test_chat_query_json(place: Place) -> None:
    place.script(Reply(text="It is."))
    assert json.loads(place.run("chat", "-q", "is it?", "--json").stdout)["final_response"] == "It is."


# --- what can go wrong ----------------------------------------------------------------------------------------------


def test_broken_pipe_is_quiet(place: Place) -> None:
    process = place.start("config", "show")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=30)) == ("", 0)
    process.stdout = None


def test_question_is_answered_without_usable_database(place: Place) -> None:
    place.script(Reply(text="ok"))
    (place.home / "state.db").write_bytes(b"no database" * 500)
    done = place.run("-z", "hi")
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert "not kept" in done.stderr and "hermes sessions repair" in done.stderr


def test_storage_url_setting_is_used(place: Place) -> None:
    elsewhere = place.home.parent / "elsewhere" / "all.db"
    place.configure(f"storage: {{url: 'sqlite://{elsewhere}'}}\n")
    place.script(Reply(text="ok"))
    assert place.run("-z", "hi").stdout == "ok\n"
    assert elsewhere.exists() and not (place.home / "state.db").exists()


def test_unknown_storage_url_is_rejected(place: Place) -> None:
    done = place.run("-z", "hi", HERMES_DATABASE_URL="mysql://u:hunter2@h/db")
    assert done.returncode == 78 and "hunter2" not in done.stderr and "mysql" in done.stderr


def test_api_key_is_not_in_errors(place: Place) -> None:
    text = f"model: {{default: m, base_url: '{place.model.url}/v1', api_key: 'abc-secret-key-123'}}\n"
    write_private(place.home / "config.yaml", text)
    place.script(Reply(status=400, error="no such thing", quote_key=True))
    done = place.run("-z", "hi")
    assert done.returncode == 1 and "refused the request" in done.stderr and "abc-secret-key-123" not in done.stderr


def test_question_without_a_command(place: Place) -> None:
    place.script(Reply(text="It is noon."), Reply(text="Noon.", continues=False))
    done = place.run("what time is it")
    assert (done.returncode, done.stdout) == (0, "It is noon.\n")
    assert place.asked() == [("user", "what time is it")]
    done = place.run("-m", "other", "time?", "--json")
    assert json.loads(done.stdout)["final_response"] == "Noon."
    assert place.model.requests[-1].model == "other"


def test_single_unknown_word_is_no_question(place: Place) -> None:
    done = place.run("sesions")
    assert done.returncode == 2 and "There is no command 'sesions'. Did you mean sessions" in done.stderr
    assert 'hermes -z "hello you"' in place.run("hello", "you").stderr
    assert "--nonsense" in place.run("--nonsense", "hello").stderr
    assert place.model.requests == []


@pytest.mark.parametrize("words", [["help"], ["help", "cron"], ["help", "cron", "create"]], ids=" ".join)
def test_help_is_a_word_too(words: list[str], place: Place) -> None:
    assert place.run(*words) == place.run(*words[1:], "--help")


def test_group_without_an_action_lists_or_prints_help(place: Place) -> None:
    listed = place.run("sessions")
    assert (listed.returncode, listed.stderr) == (0, "There are no sessions.\n")
    for group in ("config", "gateway"):
        done = place.run(group)
        assert done.returncode == 0 and done.stdout.startswith("usage: ")


def test_sampling_settings_are_sent_and_requests_win(place: Place) -> None:
    place.serve()
    place.script(Reply(text="One."), Reply(text="Two."))
    for name, value in (("temperature", "0.3"), ("top_p", "0.9"), ("max_tokens", "77"), ("stop", "END")):
        assert place.run("config", "set", f"model.{name}", value).returncode == 0
    assert place.run("-z", "hello").returncode == 0
    body = place.model.requests[-1].body
    assert (body["temperature"], body["top_p"], body["stop"]) == (0.3, 0.9, ["END"])
    assert 77 in (body.get("max_tokens"), body.get("max_completion_tokens"))
    request = {"messages": [{"role": "user", "content": "hello"}], "temperature": 1.5}
    address = json.loads((place.home / "gateway_state.json").read_text())
    url = f"http://127.0.0.1:{address['port']}/v1/chat/completions"
    asked = urllib.request.Request(url, json.dumps(request).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert answer.status == 200
    assert place.model.requests[-1].body["temperature"] == 1.5
