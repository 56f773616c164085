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

from .conftest import Place
from .terminal import Terminal

CTRL_C, CTRL_D = "\x03", "\x04"


def answers(place: Place, *texts: str) -> None:
    place.script(*(Reply(text=text, continues=False, usage={"input": 100, "output": 7}) for text in texts))


def ask(terminal: Terminal, text: str, answer: str) -> None:
    """A turn, to the line that tells what it took."""
    before = str(terminal).count(" tokens in, ")
    terminal.send(text)
    terminal.until(answer)
    ended(terminal, before + 1)


def ended(terminal: Terminal, turns: int) -> None:
    """So many turns are over."""
    terminal.until(
        lambda screen: screen.count(" tokens in, ") == turns and "Ctrl-C stops" not in screen.rpartition("\n")[2]
    )


def skill(place: Place, name: str, text: str) -> None:
    folder = place.home / "skills" / "work" / name
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: How to {name}.\n---\n\n{text}\n")


def test_slash_help_and_unknown_command(place: Place) -> None:
    skill(place, "tidy", "Put things away.")
    terminal = place.terminal(rows=60)
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
    assert place.model.requests == []


def test_slash_title_branch_save_resume(place: Place) -> None:
    answers(place, "One.", "Two.", "Three.")
    terminal = place.terminal(rows=90)
    terminal.send("/new Shopping")
    terminal.until("A new session: Shopping")
    ask(terminal, "first", "One.")
    terminal.send("/title")
    terminal.until("Title: Shopping")
    terminal.send("/branch")
    terminal.until("This continues in a branch: Shopping #2")
    ask(terminal, "second", "Two.")
    assert place.asked() == [("user", "first"), ("assistant", "One."), ("user", "second")]
    terminal.send("/resume Shopping")
    terminal.until(lambda screen: screen.count("One.") == 2)
    ask(terminal, "third", "Three.")
    assert place.asked() == [("user", "first"), ("assistant", "One."), ("user", "third")]
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
    assert [session["title"] for session in place.sessions()] == ["Shopping #2"]
    assert "## User" in (place.folder / "out.md").read_text()


def test_slash_undo_and_retry(each_way: Place) -> None:
    answers(each_way, "One.", "Two.", "Another one.", "Third.")
    terminal = each_way.terminal(rows=90)
    ask(terminal, "first", "One.")
    ask(terminal, "second", "Two.")
    terminal.send("/undo")
    terminal.until("Taken back, from: second")
    terminal.send("/retry")
    terminal.until("Another one.")
    ended(terminal, 3)
    assert each_way.asked() == [("user", "first")]
    terminal.send("/undo 5")
    terminal.until("There are 1 turn to take back.")


def test_slash_undo_in_unsaved_chat(place: Place) -> None:
    answers(place, "One.", "Two.", "Three.")
    terminal = place.terminal("--no-save", rows=90)
    ask(terminal, "first", "One.")
    ask(terminal, "second", "Two.")
    terminal.send("/undo")
    terminal.until("Taken back, from: second")
    ask(terminal, "third", "Three.")
    assert place.asked() == [("user", "first"), ("assistant", "One."), ("user", "third")]
    terminal.send("/title x")
    terminal.until("This conversation is not kept.")
    assert not (place.home / "state.db").exists() and not (place.home / "history").exists()


def test_slash_model_and_effort(each_way: Place) -> None:
    answers(each_way, "One.", "Two.", "Three.")
    terminal = each_way.terminal(rows=90)
    ask(terminal, "first", "One.")
    terminal.send("/model other")
    terminal.until("Model: custom/other, window")
    terminal.send("/reasoning high")
    terminal.until("Reasoning: high; it is shown.")
    ask(terminal, "second", "Two.")
    assert each_way.model.requests[-1].model == "other"
    terminal.send("/reasoning loud")
    terminal.until("is no effort")
    terminal.send("/model third --global")
    terminal.until("model.default is written")
    terminal.type(CTRL_D)
    terminal.wait()
    assert yaml.safe_load((each_way.home / "config.yaml").read_text())["model"]["default"] == "third"
    assert each_way.sessions()[0]["model"] == "third"
    each_way.run("--continue", "-z", "and now?")
    assert each_way.model.requests[-1].model == "third"


def test_slash_tools_and_skills(each_way: Place) -> None:
    skill(each_way, "tidy", "Put everything into drawers.")
    answers(each_way, "One.", "Two.", "Three.")
    terminal = each_way.terminal("-t", "todo,memory", rows=120)
    terminal.send("/tools disable memory")
    terminal.until("In this conversation: todo.")
    terminal.send("/skills tidy")
    terminal.until("Followed here: tidy.")
    ask(terminal, "first", "One.")
    body = each_way.model.requests[-1].body
    assert [tool["function"]["name"] for tool in body["tools"]] == ["todo"]
    assert "into drawers" in json.dumps([m for m in body["messages"] if m["role"] == "system"])
    terminal.send("/skills off")
    terminal.until("Followed here: none.")
    terminal.send("/tidy my desk")
    terminal.until("Two.")
    assert "my desk" in each_way.asked()[-1][1] and "into drawers" in each_way.asked()[-1][1]
    terminal.send("/tools disable nonsense")
    terminal.until("There is no toolset 'nonsense'")
    for name, shown in (("/memory", "/memory"), ("/mcp", "/mcp"), ("/cron", "/cron"), ("/skills", "How to tidy.")):
        terminal.send(name)
        terminal.until(shown)


def test_slash_compact(each_way: Place) -> None:
    long = "words " * 400
    answers(each_way, *(f"Answer {at} {long}" for at in range(6)), "A summary of tea.", "Done.")
    terminal = each_way.terminal(rows=400)
    terminal.send("/compress")
    terminal.until("There is nothing to make shorter yet.")
    for at in range(6):
        ask(terminal, f"question {at}", f"Answer {at}")
    terminal.send("/compress tea")
    screen = terminal.until("Compacted by summary")
    assert "Keep most of what is about: tea" in json.dumps(each_way.model.requests[-1].body)
    before, after = (int(word.replace(",", "")) for word in screen.split("summary: ")[1].split()[0:4:3])
    assert after < before
    ask(terminal, "go on", "Done.")
    assert "A summary of tea." in json.dumps(each_way.model.requests[-1].body)


def test_slash_inspect_request(each_way: Place) -> None:
    each_way.configure("providers: {}\n")
    answers(each_way, "One.")
    terminal = each_way.terminal(rows=200, columns=200)
    ask(terminal, "first", "One.")
    terminal.send("/usage")
    terminal.until("custom/m  turns  1")
    terminal.send("/status")
    screen = terminal.until("typing while it works")
    assert f"folder                 {each_way.folder}" in screen
    assert ("in the server" in screen) is (each_way.server is not None)
    terminal.send("/prompt")
    terminal.until(str(each_way.folder))
    terminal.send("/debug")
    screen = terminal.until('"messages": [')
    assert '"model": "m"' in screen and '"tools": [' in screen


def test_slash_stop_and_approvals(each_way: Place) -> None:
    (each_way.folder / "build").mkdir()
    wait = Call("terminal", {"command": "until [ -e go ]; do sleep 0.01; done"})
    each_way.script(
        Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"})]),
        Reply(text="As you say.", continues=False),
        Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"})]),
        Reply(text="Removed.", continues=False),
        Reply(tool_calls=[wait]),
        Reply(text="Steered.", continues=False),
        Reply(text="Queued.", continues=False),
        Reply(tool_calls=[Call("terminal", {"command": "sleep 1000"})]),
    )
    terminal = each_way.terminal(rows=120)
    terminal.send("/approve")
    terminal.until("Nothing waits for approval.")
    terminal.send("clean")
    terminal.until("allow?")
    terminal.send("/deny")
    ended(terminal, 1)
    assert (each_way.folder / "build").exists()
    terminal.send("/yolo")
    terminal.until("No approvals are asked for")
    ask(terminal, "clean", "Removed.")
    assert not (each_way.folder / "build").exists()
    terminal.send("wait")
    terminal.until("until [ -e go ]")
    terminal.send("/steer mind the gap")
    terminal.until("It is sent with the next")
    terminal.send("/queue afterwards")
    terminal.until("Next: afterwards")
    (each_way.folder / "go").touch()
    ended(terminal, 4)
    assert each_way.asked()[-1] == ("user", "afterwards")
    assert any("mind the gap" in text for role, text in each_way.asked() if role == "tool")
    terminal.send("sleep")
    terminal.until("sleep 1000")
    terminal.send("/stop")
    terminal.until("■ Stopped.")
    ended(terminal, 5)
    terminal.send("/stop")
    terminal.until("Nothing is under way.")


def test_slash_background_processes(place: Place) -> None:
    start = Call("terminal", {"command": "sleep 1000", "background": True})
    place.script(Reply(tool_calls=[start]), Reply(text="Started.", continues=False))
    terminal = place.terminal()
    ask(terminal, "start it", "Started.")
    terminal.send("/processes")
    screen = terminal.until("running  sleep 1000")
    assert "proc_" in screen
    terminal.send("/expand")
    terminal.until("status: started")


@pytest.mark.parametrize("line", ["/save", "/queue", "/undo x", "/quit now", "/expand", "/prompt", "/debug", "/branch"])
def test_slash_errors_are_reported(line: str, place: Place) -> None:
    done = place.run("chat", stdin=f"{line}\n")
    assert done.returncode == 0 and "hermes: " in done.stderr and "Traceback" not in done.stderr
    assert place.model.requests == []


def test_slash_commands_without_terminal(place: Place) -> None:
    answers(place, "One.")
    done = place.run("chat", "--quiet", stdin="hello\n/usage\n/quit\nnever sent\n")
    assert done.stdout.startswith("One.\n") and "custom/m" in done.stdout
    assert len(place.model.requests) == 1 and Path(place.home / "state.db").exists()


def test_slash_model_picker_searches(each_way: Place) -> None:
    each_way.model.models = [{"id": f"vendor/{name}", "context_length": 9_000} for name in ("tiny", "small", "large")]
    answers(each_way, "One.", "Two.")
    terminal = each_way.terminal(rows=60)
    terminal.send("/model")
    terminal.until("vendor/large")
    terminal.type("sma")
    terminal.until(lambda screen: "vendor/small" in screen and "vendor/large" not in screen)
    terminal.send("")
    terminal.until("Model: custom/vendor/small")
    ask(terminal, "first", "One.")
    assert each_way.model.requests[-1].model == "vendor/small"
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
    assert each_way.model.requests[-1].model == "vendor/small"


def test_slash_model_asks_about_names_that_are_not_listed(each_way: Place) -> None:
    each_way.model.models = [{"id": name} for name in ("tiny", "large-one")]
    answers(each_way, "One.", "Two.")
    terminal = each_way.terminal(rows=60)
    terminal.send("/model larg")
    terminal.until("The provider lists no model 'larg'.")
    terminal.until(lambda screen: "model: larg" in screen and "large-one" in screen)
    terminal.send("")
    terminal.until("Model: custom/large-one")
    ask(terminal, "first", "One.")
    assert each_way.model.requests[-1].model == "large-one"
    terminal.send("/model secret-preview")
    terminal.until("model: secret-preview")
    terminal.send("")
    terminal.until("Model: custom/secret-preview")
    ask(terminal, "second", "Two.")
    assert each_way.model.requests[-1].model == "secret-preview"


def test_slash_model_without_terminal_refuses_unlisted_names(place: Place) -> None:
    place.model.models = [{"id": "large-one"}]
    done = place.run("chat", stdin="/model large-onn\n/model large-onn --force\n/model large-one\n")
    assert "The provider lists no model 'large-onn'. Did you mean large-one?" in done.stdout + done.stderr
    assert "Model: custom/large-onn" in done.stdout + done.stderr
    assert "Model: custom/large-one," in done.stdout + done.stderr


def test_slash_model_of_another_provider_for_good_leaves_address_and_key_behind(place: Place) -> None:
    text = f"providers: {{mine: {{base_url: '{place.model.url}/v1'}}}}\n"
    place.configure(text)
    write_private(
        place.home / "config.yaml",
        (place.home / "config.yaml").read_text().replace("model: {default: m,", "model: {default: m, api_key: sk-old,"),
    )
    done = place.run("chat", stdin="/model n --provider mine --global\n")
    assert "model.default is written" in done.stdout + done.stderr
    model = yaml.safe_load((place.home / "config.yaml").read_text())["model"]
    assert model == {"default": "n", "provider": "mine"}


def test_slash_save_replaces_a_file_only_by_force(place: Place) -> None:
    answers(place, "One.")
    (place.folder / "old.md").write_text("old")
    done = place.run("chat", stdin="first\n/save old.md\n")
    assert "There is such a file already" in done.stdout + done.stderr
    assert (place.folder / "old.md").read_text() == "old"
    place.run("chat", "--continue", stdin="/save old.md --force\n")
    assert "One." in (place.folder / "old.md").read_text()


def test_slash_save_takes_quotes_and_force_on_either_side(place: Place) -> None:
    answers(place, "One.")
    place.run("chat", stdin='first\n/save "two words.md"\n/save plain words.md\n/save --force plain words.md\n')
    assert sorted(path.name for path in place.folder.glob("*.md")) == ["plain words.md", "two words.md"]


def test_slash_command_with_an_open_quote_is_a_usage_error(place: Place) -> None:
    done = place.run("chat", stdin='/model "x\n/cron "x\n/save "x\n')
    assert done.stderr.count("A quote is not closed.") == 3 and "defect" not in done.stderr


def test_slash_help_fits_a_narrow_terminal(place: Place) -> None:
    terminal = place.terminal(columns=60, rows=150)
    terminal.send("/help")
    screen = terminal.until("at an approval")
    assert "/deny [what to do instead]\n" in screen
    assert re.search(r"^/stop +stop the turn$", screen, re.M)
    # A line that is longer than the terminal leaves a word or two on the next.
    begins = {len(line) - len(line.lstrip()) for line in screen[screen.index("/new") :].splitlines() if line.strip()}
    assert len(begins) <= 3, begins


def test_slash_model_shows_the_window_that_the_provider_lists(place: Place) -> None:
    place.model.models = [{"id": "m", "context_length": 100_000}, {"id": "large", "context_length": 200_000}]
    answers(place, "One.")
    terminal = place.terminal()
    terminal.send("/status")
    terminal.until("0 of 100,000 tokens used")
    ask(terminal, "first", "One.")
    terminal.send("/model large")
    terminal.until("Model: custom/large, window 200,000 tokens.")
    terminal.until(lambda screen: "custom/large · " in screen.rpartition("\n")[2])


def test_leaving_asks_about_messages_that_wait(place: Place) -> None:
    place.configure("approvals: {mode: off}\n")
    place.script(
        Reply(tool_calls=[Call("terminal", {"command": "until [ -e go ]; do sleep 0.01; done"})]),
        Reply(text="First.", continues=False),
        Reply(text="Second.", continues=False),
    )
    terminal = place.terminal()
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
    assert len(place.sessions()) == 1 and len(place.model.requests) == 1


def test_slash_clear_exit_and_delete(place: Place) -> None:
    answers(place, "One.", "Two.")
    terminal = place.terminal(rows=60)
    ask(terminal, "first", "One.")
    terminal.send("/clear")
    terminal.until(lambda screen: "One." not in screen)
    ask(terminal, "second", "Two.")
    terminal.send("/delete")
    terminal.until("with 4 messages")
    terminal.send("/exit")
    assert terminal.wait() == 0 and len(place.sessions()) == 1
    terminal = place.terminal("--continue")
    terminal.send("/delete yes")
    assert terminal.wait() == 0 and place.sessions() == []
