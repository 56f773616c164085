"""The commands of a chat that begin with a slash: what each shows and changes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from hermes.cli.slash import COMMANDS
from hermes.core.home import write_private
from support.model_server import Call, Reply

from .conftest import Cli
from .terminal import Terminal

CTRL_C, CTRL_D = "\x03", "\x04"


def answers(cli: Cli, *texts: str) -> None:
    cli.script(*(Reply(text=text, continues=False, usage={"input": 100, "output": 7}) for text in texts))


def ask(terminal: Terminal, text: str, answer: str) -> None:
    """A turn, to the line that tells what it took."""
    before = str(terminal).count(" tokens in, ")
    terminal.send(text)
    terminal.until(answer)
    wait_for_turns(terminal, before + 1)


def wait_for_turns(terminal: Terminal, turns: int) -> None:
    """So many turns are over."""
    terminal.until(
        lambda screen: screen.count(" tokens in, ") == turns and "Ctrl-C stops" not in screen.rpartition("\n")[2]
    )


def skill(cli: Cli, name: str, text: str) -> None:
    folder = cli.home / "skills" / "work" / name
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: How to {name}.\n---\n\n{text}\n")


def test_slash_help_and_unknown_command(cli: Cli) -> None:
    skill(cli, "tidy", "Put things away.")
    terminal = cli.terminal(rows=60)
    terminal.send("/help")
    screen = terminal.until("at an approval")
    for word in (
        "/quit [--delete]",
        "/exit",
        "/clear",
        "/delete",
        "/image",
        "Alt-Enter, Ctrl-J",
        "@path",
        "Ctrl-R",
        "Ctrl-L",
    ):
        assert word in screen
    assert all(f"/{name}" in screen for name in COMMANDS) and "/tidy" in screen
    terminal.send("/titel x")
    assert "Did you mean /title" in terminal.until("There is no command /titel")
    terminal.type("/qu")
    terminal.until("leave; --delete deletes the session")
    assert cli.model.requests == []


def test_slash_title_branch_save_resume(cli: Cli) -> None:
    answers(cli, "One.", "Two.", "Three.")
    terminal = cli.terminal(rows=90)
    terminal.send("/new Shopping")
    terminal.until("A new session: Shopping")
    ask(terminal, "first", "One.")
    terminal.send("/title")
    terminal.until("Title: Shopping")
    terminal.send("/branch")
    terminal.until("This continues in a branch: Shopping #2")
    ask(terminal, "second", "Two.")
    assert cli.model_messages() == [("user", "first"), ("assistant", "One."), ("user", "second")]
    terminal.send("/resume Shopping")
    terminal.until(lambda screen: screen.count("One.") == 2)
    ask(terminal, "third", "Three.")
    assert cli.model_messages() == [("user", "first"), ("assistant", "One."), ("user", "third")]
    terminal.send("/save out.md")
    terminal.until("/save out.md\n\n")
    terminal.send("/sessions")
    terminal.until("Shopping #2  cli")
    terminal.send("/history")
    terminal.until(lambda screen: screen.count("Three.") == 2)
    terminal.send("/title Shopping #2")
    terminal.until("belongs to the session")
    terminal.send("/quit --delete")
    assert terminal.wait() == 0
    assert [session["title"] for session in cli.sessions()] == ["Shopping #2"]
    assert "## User" in (cli.folder / "out.md").read_text()


def test_slash_undo_and_retry(cli_or_server: Cli) -> None:
    answers(cli_or_server, "One.", "Two.", "Another one.", "Third.")
    terminal = cli_or_server.terminal(rows=90)
    ask(terminal, "first", "One.")
    ask(terminal, "second", "Two.")
    terminal.send("/undo")
    terminal.until("Taken back, from: second")
    terminal.send("/retry")
    terminal.until("Another one.")
    wait_for_turns(terminal, 3)
    assert cli_or_server.model_messages() == [("user", "first")]
    terminal.send("/undo 5")
    terminal.until("There are 1 turn to take back.")


def test_slash_undo_in_unsaved_chat(cli: Cli) -> None:
    answers(cli, "One.", "Two.", "Three.")
    terminal = cli.terminal("--no-save", rows=90)
    ask(terminal, "first", "One.")
    ask(terminal, "second", "Two.")
    terminal.send("/undo")
    terminal.until("Taken back, from: second")
    ask(terminal, "third", "Three.")
    assert cli.model_messages() == [("user", "first"), ("assistant", "One."), ("user", "third")]
    terminal.send("/title x")
    terminal.until("This conversation is not kept.")
    assert not (cli.home / "state.db").exists() and not (cli.home / "history").exists()


def test_slash_model_and_effort(cli_or_server: Cli) -> None:
    answers(cli_or_server, "One.", "Two.", "Three.")
    terminal = cli_or_server.terminal(rows=90)
    ask(terminal, "first", "One.")
    terminal.send("/model other")
    terminal.until("Model: custom/other, window")
    terminal.send("/reasoning high")
    terminal.until("Reasoning: high; it is shown.")
    ask(terminal, "second", "Two.")
    assert cli_or_server.model.requests[-1].model == "other"
    terminal.send("/reasoning loud")
    terminal.until("is no effort")
    terminal.send("/model third --global")
    terminal.until("model.default is written")
    terminal.type(CTRL_D)
    terminal.wait()
    assert yaml.safe_load((cli_or_server.home / "config.yaml").read_text())["model"]["default"] == "third"
    assert cli_or_server.sessions()[0]["model"] == "third"
    cli_or_server.run("--continue", "-z", "and now?")
    assert cli_or_server.model.requests[-1].model == "third"


def test_slash_tools_and_skills(cli_or_server: Cli) -> None:
    skill(cli_or_server, "tidy", "Put everything into drawers.")
    answers(cli_or_server, "One.", "Two.", "Three.")
    terminal = cli_or_server.terminal("-t", "todo,memory", rows=120)
    terminal.send("/tools disable memory")
    terminal.until("In this conversation: todo.")
    terminal.send("/skills tidy")
    terminal.until("Followed here: tidy.")
    ask(terminal, "first", "One.")
    body = cli_or_server.model.requests[-1].body
    assert [tool["function"]["name"] for tool in body["tools"]] == ["todo"]
    assert "into drawers" in json.dumps([m for m in body["messages"] if m["role"] == "system"])
    terminal.send("/skills off")
    terminal.until("Followed here: none.")
    terminal.send("/tidy my desk")
    terminal.until("Two.")
    assert (
        "my desk" in cli_or_server.model_messages()[-1][1] and "into drawers" in cli_or_server.model_messages()[-1][1]
    )
    terminal.send("/tools disable nonsense")
    terminal.until("There is no toolset 'nonsense'")
    for name, expected in (("/memory", "/memory"), ("/mcp", "/mcp"), ("/cron", "/cron"), ("/skills", "How to tidy.")):
        terminal.send(name)
        terminal.until(expected)


def test_slash_compact(cli_or_server: Cli) -> None:
    long = "words " * 400
    answers(cli_or_server, *(f"Answer {at} {long}" for at in range(6)), "A summary of tea.", "Done.")
    terminal = cli_or_server.terminal(rows=400)
    terminal.send("/compress")
    terminal.until("There is nothing to make shorter yet.")
    for at in range(6):
        ask(terminal, f"question {at}", f"Answer {at}")
    terminal.send("/compress tea")
    screen = terminal.until("Compacted by summary")
    assert "Keep most of what is about: tea" in json.dumps(cli_or_server.model.requests[-1].body)
    before, after = (int(word.replace(",", "")) for word in screen.split("summary: ")[1].split()[0:4:3])
    assert after < before
    ask(terminal, "go on", "Done.")
    assert "A summary of tea." in json.dumps(cli_or_server.model.requests[-1].body)


def test_slash_inspect_request(cli_or_server: Cli) -> None:
    cli_or_server.configure("providers: {}\n")
    answers(cli_or_server, "One.")
    terminal = cli_or_server.terminal(rows=200, columns=200)
    ask(terminal, "first", "One.")
    terminal.send("/usage")
    terminal.until("custom/m  turns  1")
    terminal.send("/status")
    screen = terminal.until("typing while it works")
    assert f"folder                 {cli_or_server.folder}" in screen
    assert ("in the server" in screen) is (cli_or_server.server is not None)
    terminal.send("/prompt")
    terminal.until(str(cli_or_server.folder))
    terminal.send("/debug")
    screen = terminal.until('"messages": [')
    assert '"model": "m"' in screen and '"tools": [' in screen


def test_slash_stop_and_approvals(cli_or_server: Cli) -> None:
    (cli_or_server.folder / "build").mkdir()
    wait = Call("terminal", {"command": "until [ -e go ]; do sleep 0.01; done"})
    cli_or_server.script(
        Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"})]),
        Reply(text="As you say.", continues=False),
        Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"})]),
        Reply(text="Removed.", continues=False),
        Reply(tool_calls=[wait]),
        Reply(text="Steered.", continues=False),
        Reply(text="Queued.", continues=False),
        Reply(tool_calls=[Call("terminal", {"command": "sleep 1000"})]),
    )
    terminal = cli_or_server.terminal(rows=120)
    terminal.send("/approve")
    terminal.until("Nothing waits for approval.")
    terminal.send("clean")
    terminal.until("allow?")
    terminal.send("/deny")
    wait_for_turns(terminal, 1)
    assert (cli_or_server.folder / "build").exists()
    terminal.send("/yolo")
    terminal.until("No approvals are asked for")
    ask(terminal, "clean", "Removed.")
    assert not (cli_or_server.folder / "build").exists()
    terminal.send("wait")
    terminal.until("until [ -e go ]")
    terminal.send("/steer mind the gap")
    terminal.until("It is sent with the next")
    terminal.send("/queue afterwards")
    terminal.until("Next: afterwards")
    (cli_or_server.folder / "go").touch()
    wait_for_turns(terminal, 4)
    assert cli_or_server.model_messages()[-1] == ("user", "afterwards")
    assert any("mind the gap" in text for role, text in cli_or_server.model_messages() if role == "tool")
    terminal.send("sleep")
    terminal.until("sleep 1000")
    terminal.send("/stop")
    terminal.until("■ Stopped.")
    wait_for_turns(terminal, 5)
    terminal.send("/stop")
    terminal.until("Nothing is under way.")


def test_slash_background_processes(cli: Cli) -> None:
    start = Call("terminal", {"command": "sleep 1000", "background": True})
    cli.script(Reply(tool_calls=[start]), Reply(text="Started.", continues=False))
    terminal = cli.terminal()
    ask(terminal, "start it", "Started.")
    terminal.send("/processes")
    screen = terminal.until("running  sleep 1000")
    assert "proc_" in screen
    terminal.send("/expand")
    terminal.until("status: started")


@pytest.mark.parametrize("line", ["/save", "/queue", "/undo x", "/quit now", "/expand", "/prompt", "/debug", "/branch"])
def test_slash_errors_are_reported(line: str, cli: Cli) -> None:
    result = cli.run("chat", stdin=f"{line}\n")
    assert result.returncode == 0 and "hermes: " in result.stderr and "Traceback" not in result.stderr
    assert cli.model.requests == []


def test_slash_commands_without_terminal(cli: Cli) -> None:
    answers(cli, "One.")
    result = cli.run("chat", "--quiet", stdin="hello\n/usage\n/quit\nnever sent\n")
    assert result.stdout.startswith("One.\n") and "custom/m" in result.stdout
    assert len(cli.model.requests) == 1 and Path(cli.home / "state.db").exists()


def test_slash_model_picker_searches(cli_or_server: Cli) -> None:
    cli_or_server.model.models = [
        {"id": f"vendor/{name}", "context_length": 9_000} for name in ("tiny", "small", "large")
    ]
    answers(cli_or_server, "One.", "Two.")
    terminal = cli_or_server.terminal(rows=60)
    terminal.send("/model")
    terminal.until("vendor/large")
    terminal.type("sma")
    terminal.until(lambda screen: "vendor/small" in screen and "vendor/large" not in screen)
    terminal.send("")
    terminal.until("Model: custom/vendor/small")
    ask(terminal, "first", "One.")
    assert cli_or_server.model.requests[-1].model == "vendor/small"
    terminal.send("/model")
    terminal.until("vendor/large")
    terminal.send("nothing like it")
    terminal.until("None of 3 names holds: nothing like it")
    terminal.until("model: nothing like it")
    terminal.type(CTRL_C)
    terminal.send("/model")
    terminal.until(lambda screen: screen.rstrip().count("model:") >= 1 and "vendor/large" in screen)
    terminal.type(CTRL_C)  # closes the list, and changes nothing
    terminal.until(lambda screen: "vendor/large" not in screen.rpartition("window")[2])
    ask(terminal, "second", "Two.")
    assert cli_or_server.model.requests[-1].model == "vendor/small"


def test_slash_model_asks_about_names_that_are_not_listed(cli_or_server: Cli) -> None:
    cli_or_server.model.models = [{"id": name} for name in ("tiny", "large-one")]
    answers(cli_or_server, "One.", "Two.")
    terminal = cli_or_server.terminal(rows=60)
    terminal.send("/model larg")
    terminal.until("The provider lists no model 'larg'.")
    terminal.until(lambda screen: "model: larg" in screen and "large-one" in screen)
    terminal.send("")
    terminal.until("Model: custom/large-one")
    ask(terminal, "first", "One.")
    assert cli_or_server.model.requests[-1].model == "large-one"
    terminal.send("/model secret-preview")
    terminal.until("model: secret-preview")
    terminal.send("")
    terminal.until("Model: custom/secret-preview")
    ask(terminal, "second", "Two.")
    assert cli_or_server.model.requests[-1].model == "secret-preview"


def test_slash_model_without_terminal_refuses_unlisted_names(cli: Cli) -> None:
    cli.model.models = [{"id": "large-one"}]
    result = cli.run("chat", stdin="/model large-onn\n/model large-onn --force\n/model large-one\n")
    assert "The provider lists no model 'large-onn'. Did you mean large-one?" in result.stdout + result.stderr
    assert "Model: custom/large-onn" in result.stdout + result.stderr
    assert "Model: custom/large-one," in result.stdout + result.stderr


def test_slash_model_global_of_another_provider_drops_address_and_key(cli: Cli) -> None:
    text = f"providers: {{mine: {{base_url: '{cli.model.url}/v1'}}}}\n"
    cli.configure(text)
    write_private(
        cli.home / "config.yaml",
        (cli.home / "config.yaml").read_text().replace("model: {default: m,", "model: {default: m, api_key: sk-old,"),
    )
    result = cli.run("chat", stdin="/model n --provider mine --global\n")
    assert "model.default is written" in result.stdout + result.stderr
    model = yaml.safe_load((cli.home / "config.yaml").read_text())["model"]
    assert model == {"default": "n", "provider": "mine"}


def test_slash_save_replaces_a_file_only_by_force(cli: Cli) -> None:
    answers(cli, "One.")
    (cli.folder / "old.md").write_text("old")
    result = cli.run("chat", stdin="first\n/save old.md\n")
    assert "There is such a file already" in result.stdout + result.stderr
    assert (cli.folder / "old.md").read_text() == "old"
    cli.run("chat", "--continue", stdin="/save old.md --force\n")
    assert "One." in (cli.folder / "old.md").read_text()


def test_slash_save_takes_quotes_and_force_on_either_side(cli: Cli) -> None:
    answers(cli, "One.")
    cli.run("chat", stdin='first\n/save "two words.md"\n/save plain words.md\n/save --force plain words.md\n')
    assert sorted(path.name for path in cli.folder.glob("*.md")) == ["plain words.md", "two words.md"]


def test_slash_command_with_an_open_quote_is_a_usage_error(cli: Cli) -> None:
    result = cli.run("chat", stdin='/model "x\n/cron "x\n/save "x\n')
    assert result.stderr.count("A quote is not closed.") == 3 and "defect" not in result.stderr


def test_slash_help_fits_a_narrow_terminal(cli: Cli) -> None:
    terminal = cli.terminal(columns=60, rows=150)
    terminal.send("/help")
    screen = terminal.until("at an approval")
    assert "/deny [what to do instead]\n" in screen
    assert re.search(r"^/stop +stop the turn$", screen, re.M)
    # A line that is longer than the terminal leaves a word or two on the next.
    begins = {len(line) - len(line.lstrip()) for line in screen[screen.index("/new") :].splitlines() if line.strip()}
    assert len(begins) <= 3, begins


def test_slash_model_shows_the_window_that_the_provider_lists(cli: Cli) -> None:
    cli.model.models = [{"id": "m", "context_length": 100_000}, {"id": "large", "context_length": 200_000}]
    answers(cli, "One.")
    terminal = cli.terminal()
    terminal.send("/status")
    terminal.until("0 of 100,000 tokens used")
    ask(terminal, "first", "One.")
    terminal.send("/model large")
    terminal.until("Model: custom/large, window 200,000 tokens.")
    terminal.until(lambda screen: "custom/large · " in screen.rpartition("\n")[2])


def test_leaving_asks_about_messages_that_wait(cli: Cli) -> None:
    cli.configure("approvals: {mode: off}\n")
    cli.script(
        Reply(tool_calls=[Call("terminal", {"command": "until [ -e go ]; do sleep 0.01; done"})]),
        Reply(text="First.", continues=False),
        Reply(text="Second.", continues=False),
    )
    terminal = cli.terminal()
    terminal.send("one")
    terminal.until("until [ -e go ]")
    terminal.send("two")
    terminal.until("1 waiting")
    terminal.send("/quit --delete")
    terminal.until("1 message waiting, not sent yet.")
    terminal.send("three")
    terminal.until("2 waiting")
    terminal.type(CTRL_D)
    terminal.until("2 messages waiting, not sent yet.")
    assert terminal.process.poll() is None
    terminal.send("/exit")
    assert terminal.wait() == 0
    assert len(cli.sessions()) == 1 and len(cli.model.requests) == 1


def test_slash_clear_exit_and_delete(cli: Cli) -> None:
    answers(cli, "One.", "Two.")
    terminal = cli.terminal(rows=60)
    ask(terminal, "first", "One.")
    terminal.send("/clear")
    terminal.until(lambda screen: "One." not in screen)
    ask(terminal, "second", "Two.")
    terminal.send("/delete")
    terminal.until("with 4 messages")
    terminal.send("/exit")
    assert terminal.wait() == 0 and len(cli.sessions()) == 1
    terminal = cli.terminal("--continue")
    terminal.send("/delete yes")
    assert terminal.wait() == 0 and cli.sessions() == []
