"""A chat at a pseudo-terminal: what a person sees, types and is asked, with and without a server behind it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time

import pytest

from hermes.store.stores import Store
from support.model_server import Call, Reply
from support.waiting import DEADLINE_S, until_blocking

from .conftest import HERMES, Cli
from .terminal import Terminal

CTRL_C, CTRL_D, CTRL_V, ALT_ENTER = "\x03", "\x04", "\x16", "\x1b\r"


def leave(terminal: Terminal) -> str:
    """End the chat by Ctrl-D; the last screen."""
    terminal.type(CTRL_D)
    assert terminal.wait() == 0
    return str(terminal)


def running(terminal: Terminal, text: str) -> None:
    """Wait for something that only shows while a turn is under way."""
    terminal.until(lambda screen: text in screen and "Ctrl-C stops" in screen.splitlines()[-1])


def test_chat_streams_and_renders_markdown(cli_or_server: Cli) -> None:
    answer = [
        "# Plan\n\nThis is **bold",
        "**.\n\n- one\n",
        "- two\n\n```python\nx = 1\n```\n",
        "| a | b |\n|--|--|\n| 1 | 2 |",
    ]
    cli_or_server.script(Reply(text=answer, usage={"input": 1200, "output": 34}))
    terminal = cli_or_server.terminal()
    head = terminal.until(" · session 2").splitlines()[0]
    assert "custom/m" in head and "~" in head and "local" in head
    assert ("through the server" in head) is (cli_or_server.server is not None)
    terminal.send("hello")
    screen = terminal.until("1,200 tokens in, 34 out")
    text = screen[screen.index("› hello") :]
    for line in ("Plan", "This is bold.", "  • one", "  • two", "  x = 1"):
        assert f"\n{line}\n" in text
    assert "**" not in text and "```" not in text and "|--|" not in text
    terminal.until(" m · 1,234 tokens")
    screen = leave(terminal)
    [session] = cli_or_server.sessions()
    assert screen.splitlines()[-1] == f"Continue with: hermes --resume {session['id']}"
    assert session["end_reason"] == "cli_close"


def test_chat_shows_unfinished_line(cli: Cli) -> None:
    cli.script(Reply(text=["The beginning of", " the end"], stall_at=450))
    terminal = cli.terminal()
    terminal.send("hello")
    running(terminal, "The beginning of")
    terminal.type(CTRL_C)
    terminal.until("■ Stopped.")
    assert "The beginning of" in leave(terminal)


def test_chat_reasoning_can_be_hidden(cli: Cli) -> None:
    cli.script(Reply(reasoning="I wonder.", text="One."), Reply(reasoning="Once more.", text="Two.", continues=False))
    terminal = cli.terminal()
    terminal.send("hello")
    terminal.until("I wonder.")
    terminal.until("One.")
    terminal.send("/reasoning hide")
    terminal.until("it is hidden")
    terminal.send("again")
    assert "Once more." not in terminal.until("Two.")


def test_chat_tool_line_and_folded_output(cli_or_server: Cli) -> None:
    command = "for i in 1 2 3 4 5 6 7; do echo row-$i; done; until [ -e go ]; do sleep 0.01; done; echo over"
    cli_or_server.configure("approvals: {mode: off}\n")
    cli_or_server.script(
        Reply(tool_calls=[Call("terminal", {"command": command})]), Reply(text="Counted.", continues=False)
    )
    terminal = cli_or_server.terminal()
    terminal.send("count")
    screen = terminal.until("row-7")
    assert [f"row-{i}" in screen for i in range(1, 8)] == [False, False, True, True, True, True, True]
    (cli_or_server.folder / "go").touch()
    screen = terminal.until("Counted.")
    assert "✓ terminal" in screen and "row-7" not in screen
    terminal.send("/expand")
    terminal.until("row-1\nrow-2")


@pytest.mark.parametrize(
    ("keys", "choice"),
    [
        *(("o", "once"), ("y", "once"), ("s", "session"), ("a", "always"), ("d", "deny"), ("\r", "deny"), ("", "deny")),
        *(("yes\r", "once"), ("once\r", "once"), ("no\r", "deny")),
    ],
)
def test_chat_approval_prompt(keys: str, choice: str, cli: Cli) -> None:
    cli.configure("" if keys else "approvals: {timeout: 0.2}\n")
    (cli.folder / "build").mkdir()
    cli.script(Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"})]), Reply(text="So be it."))
    terminal = cli.terminal()
    terminal.send("clean up")
    screen = terminal.until("allow?" if keys else "nobody answered in time")
    assert "rm -rf build" in screen and "(delete)" in screen
    assert not keys or ("[o]nce  [s]ession  [a]lways  [d]eny" in screen and re.search(r"allow\? (5:00|4:\d\d)", screen))
    terminal.type(keys)
    terminal.until("So be it.")
    assert "Next:" not in str(terminal)  # the rest of a word is no message
    assert (cli.folder / "build").exists() is (choice == "deny")
    with contextlib.closing(Store(cli.home / "state.db")) as store:
        [run] = store.runs.list()
        [event] = [event for event in store.runs.durable(run.spec.run_id) if event.type == "approval.resolved"]
    decided = (event.data["choice"], event.data["by"], event.data["surface"])
    assert decided == ((choice, "user", "cli") if keys else (choice, "timeout", ""))


def test_chat_approval_explains_and_rejects_other_input(cli_or_server: Cli) -> None:
    (cli_or_server.folder / "build").mkdir()
    cli_or_server.script(Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"})]), Reply(text="So be it."))
    terminal = cli_or_server.terminal()
    terminal.send("clean up")
    terminal.until("allow?")
    terminal.send("e")
    assert "Working folder:" in terminal.until("allow this call")
    terminal.send("perhaps")
    terminal.until(lambda screen: screen.count("Enter denies") == 2)
    assert (cli_or_server.folder / "build").exists()
    terminal.send("once")
    terminal.until("So be it.")
    assert not (cli_or_server.folder / "build").exists()


def test_chat_approval_keys_are_all_shown_in_a_narrow_terminal(cli: Cli) -> None:
    (cli.folder / "build").mkdir()
    cli.script(Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"})]), Reply(text="So be it."))
    terminal = cli.terminal(columns=50)
    terminal.send("clean up")
    screen = " ".join(terminal.until("allow?").split())
    assert "[o]nce [s]ession [a]lways [d]eny [n]o, instead… [e]xplain · Enter denies" in screen
    terminal.type("d")
    terminal.until("So be it.")


@pytest.mark.parametrize("word", ["stop", "abort", "oh no"])
def test_chat_text_starting_like_a_choice_is_no_approval(word: str, cli: Cli) -> None:
    (cli.folder / "build").mkdir()
    cli.script(Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"})]), Reply(text="So be it."))
    terminal = cli.terminal()
    terminal.send("clean up")
    terminal.until("allow?")
    terminal.type(word)
    terminal.until(lambda screen: re.search(rf"allow\? \d:\d\d {word}", screen) is not None)
    terminal.send("")
    terminal.until(lambda screen: re.search(r"allow\? \d:\d\d\s*$", screen, re.M) is not None)
    terminal.type("d")
    terminal.until("So be it.")
    assert (cli.folder / "build").exists()


def test_chat_denial_with_comment(cli_or_server: Cli) -> None:
    (cli_or_server.folder / "build").mkdir()
    rm = Call("terminal", {"command": "rm -rf build"})
    cli_or_server.script(Reply(tool_calls=[rm]), Reply(text="Renamed.", continues=False))
    terminal = cli_or_server.terminal()
    terminal.send("clean up")
    terminal.until("allow?")
    terminal.type("n")
    terminal.until("instead:")
    terminal.send("/old is a better place, move it there")
    assert "› /old is a better place" in terminal.until("Renamed.")
    assert (cli_or_server.folder / "build").exists()
    role, result = cli_or_server.model_messages()[-1]
    assert role == "tool" and "/old is a better place, move it there" in result and "Do what the user says" in result


def test_chat_text_typed_before_an_approval_is_not_its_answer(cli: Cli) -> None:
    (cli.folder / "build").mkdir()
    command = "until [ -e go ]; do sleep 0.01; done; true"
    cli.configure(f"command_allowlist: ['{command}']\n")
    cli.script(
        Reply(tool_calls=[Call("terminal", {"command": command})]),
        Reply(tool_calls=[Call("terminal", {"command": "rm -rf build"})]),
        Reply(text="So be it.", continues=False),
        Reply(text="And that.", continues=False),
    )
    terminal = cli.terminal()
    terminal.send("clean up")
    terminal.until("allow?")
    terminal.type("o")
    running(terminal, "until [ -e go ]")
    terminal.type("also")
    terminal.until("› also")
    (cli.folder / "go").touch()
    terminal.until("rm -rf build")
    terminal.type(" say yes")  # still typing when the question appears
    screen = terminal.until("allow?")
    assert "your draft comes back" in screen and "also say yes" not in screen and (cli.folder / "build").exists()
    terminal.type("d")
    terminal.until("So be it.")
    assert (cli.folder / "build").exists()
    terminal.until("› also say yes")
    # An Enter right behind the key belongs to the key, which only time tells; more of it changes nothing.
    time.sleep(1.2)
    terminal.send("")
    terminal.until("And that.")
    assert cli.model_messages()[-1] == ("user", "also say yes")


def test_chat_clarify_takes_number_or_text(cli_or_server: Cli) -> None:
    ask = Call("clarify", {"question": "Tea or coffee?", "choices": ["Green tea", "Coffee"]})
    cli_or_server.script(
        Reply(tool_calls=[ask]),
        Reply(tool_calls=[ask]),
        Reply(text="Noted.", continues=False),
    )
    terminal = cli_or_server.terminal()
    terminal.send("serve me")
    terminal.until("2. Coffee")
    terminal.send("2")
    terminal.until(lambda screen: screen.count("? Tea or coffee?") == 2)
    terminal.send("just water")
    terminal.until("Noted.")
    answers = [text for role, text in cli_or_server.model_messages() if role == "tool"]
    assert "Coffee" in answers[0] and "just water" in answers[1]


def test_ctrl_c_interrupts_model_and_chat_continues(cli_or_server: Cli) -> None:
    cli_or_server.script(Reply(text=["Half", " an answer"], stall_at=450), Reply(text="Whole.", continues=False))
    terminal = cli_or_server.terminal()
    terminal.send("hello")
    running(terminal, "Half")
    terminal.type(CTRL_C)
    terminal.until("■ Stopped.")
    terminal.send("again")
    terminal.until("Whole.")
    assert ("assistant", "Half") in cli_or_server.messages()


def test_ctrl_c_interrupts_tool(cli_or_server: Cli) -> None:
    call = Call("terminal", {"command": "echo begun; sleep 1000"})
    cli_or_server.script(Reply(tool_calls=[call]), Reply(text="Never.", continues=False))
    terminal = cli_or_server.terminal()
    terminal.send("wait")
    running(terminal, "    begun")
    terminal.type(CTRL_C)
    screen = terminal.until("■ Stopped.")
    assert "■ terminal" in screen and "interrupted" in screen
    assert len(cli_or_server.model.requests) == 1
    leave(terminal)


def test_busy_input_mode_interrupt(cli_or_server: Cli) -> None:
    cli_or_server.configure("display: {busy_input_mode: interrupt}\n")
    cli_or_server.script(Reply(text=["First", " answer"], stall_at=450), Reply(text="Second.", continues=False))
    terminal = cli_or_server.terminal()
    terminal.send("one")
    running(terminal, "First")
    assert "Enter interrupts" in str(terminal)
    terminal.send("no, two")
    terminal.until("Second.")
    assert cli_or_server.model_messages() == [("user", "one"), ("assistant", "First"), ("user", "no, two")]


def test_busy_input_mode_queue_is_default(cli: Cli) -> None:
    cli.configure("approvals: {mode: off}\n")
    cli.script(
        Reply(tool_calls=[Call("terminal", {"command": "until [ -e go ]; do sleep 0.01; done"})]),
        Reply(text="First.", continues=False),
        Reply(text="Second.", continues=False),
    )
    terminal = cli.terminal()
    terminal.send("one")
    running(terminal, "Enter queues")
    terminal.send("two")
    terminal.until("Next: two")
    assert "1 waiting" in terminal.until("1 waiting").splitlines()[-1]
    (cli.folder / "go").touch()
    screen = terminal.until("Second.")
    assert screen.index("First.") < screen.index("› two") < screen.index("Second.")


def test_busy_input_mode_steer(cli_or_server: Cli) -> None:
    cli_or_server.configure("display: {busy_input_mode: steer}\napprovals: {mode: off}\n")
    cli_or_server.script(
        Reply(tool_calls=[Call("terminal", {"command": "until [ -e go ]; do sleep 0.01; done"})]),
        Reply(text="As you wish.", continues=False),
    )
    terminal = cli_or_server.terminal()
    terminal.send("one")
    running(terminal, "Enter steers")
    terminal.send("use the other file")
    terminal.until("It is sent with the next")
    (cli_or_server.folder / "go").touch()
    screen = terminal.until("As you wish.")
    assert "Sent to the model with the next tool result." in screen
    assert "use the other file" in cli_or_server.model_messages()[-1][1]


def test_late_steer_becomes_next_message(cli: Cli) -> None:
    cli.configure("display: {busy_input_mode: steer}\n")
    cli.script(Reply(text=["Answer", "ed."], gap_s=1.0), Reply(text="That too.", continues=False))
    terminal = cli.terminal()
    terminal.send("one")
    running(terminal, "Answer")
    terminal.send("and the rest")
    terminal.until("That too.")
    assert cli.model_messages()[-1] == ("user", "and the rest")


def test_chat_multi_line_message(cli: Cli) -> None:
    cli.script(*(Reply(text=f"Answer {n}.", continues=False) for n in range(3)))
    terminal = cli.terminal()
    terminal.type("first\\\rsecond" + ALT_ENTER + "third\r")
    terminal.until("Answer 0.")
    terminal.type("\x1b[200~pasted\nlines\x1b[201~")
    terminal.until("lines")
    terminal.send("")
    terminal.until("Answer 1.")
    texts = [text for role, text in cli.model_messages() if role == "user"]
    assert texts == ["first\nsecond\nthird", "pasted\nlines"]


def test_chat_ctrl_j_begins_another_line(cli: Cli) -> None:
    cli.script(Reply(text="Answer.", continues=False))
    terminal = cli.terminal()
    # Right after the start Ctrl-J may be an Enter that was typed ahead, which only time tells; more of it changes nothing.
    time.sleep(1.2)
    terminal.type("first\nsecond\r")
    terminal.until("Answer.")
    assert cli.model_messages() == [("user", "first\nsecond")]


def test_chat_shows_output_preview_and_expands_it(cli: Cli) -> None:
    cli.configure("approvals: {mode: off}\n")
    cli.script(
        Reply(tool_calls=[Call("terminal", {"command": "seq 1 7; exit 3"})]),
        Reply(tool_calls=[Call("search_files", {"pattern": "nothing-like-it"})]),
        Reply(text="Done.", continues=False),
    )
    terminal = cli.terminal()
    terminal.send("count")
    screen = terminal.until("Done.")
    assert "    1\n    … " in screen and "more lines: /expand" in screen
    terminal.send("/expand")
    terminal.until("› /expand")
    terminal.until(lambda screen: "tokens" in screen.rpartition("› /expand")[2])
    assert "{" not in str(terminal).rpartition("› /expand")[2]


def test_chat_shows_file_changes_as_diff(cli_or_server: Cli) -> None:
    cli_or_server.configure("approvals: {mode: off}\n")
    (cli_or_server.folder / "tea.txt").write_text("green\nblack\n")
    patch = {"mode": "replace", "path": "tea.txt", "old_string": "black", "new_string": "white"}
    new = {"path": "list.txt", "content": "".join(f"line {n}\n" for n in range(60))}
    cli_or_server.script(
        Reply(tool_calls=[Call("read_file", {"path": "tea.txt"})]),
        Reply(tool_calls=[Call("patch", patch)]),
        Reply(tool_calls=[Call("write_file", new)]),
        Reply(text="Changed.", continues=False),
    )
    terminal = cli_or_server.terminal(rows=90)
    terminal.send("change it")
    screen = terminal.until("Changed.")
    assert "    -black\n    +white\n" in screen
    assert "    +line 0\n" in screen and "+line 59" not in screen and "more lines: /expand" in screen
    terminal.send("/expand")
    terminal.until("+line 59")


def test_chat_image_command_and_pasted_path(cli_or_server: Cli) -> None:
    picture = bytes.fromhex("89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489")
    (cli_or_server.folder / "a dot.png").write_bytes(picture)
    (cli_or_server.folder / "text.txt").write_text("no image")
    cli_or_server.script(Reply(text="One.", continues=False), Reply(text="Two.", continues=False))
    terminal = cli_or_server.terminal()
    terminal.send("/image text.txt")
    terminal.until("is no picture")
    terminal.send("/image a dot.png")
    terminal.until("With the next message: a dot.png")
    terminal.send("what is it?")
    terminal.until("One.")
    path = str(cli_or_server.folder / "a dot.png")
    terminal.type(f"\x1b[200~{path.replace(' ', chr(92) + ' ')}\x1b[201~")
    terminal.until('@"')
    terminal.send("and that?")
    terminal.until("Two.")
    messages = [m for m in cli_or_server.model.requests[-1].body["messages"] if m["role"] == "user"]
    assert [[part["type"] for part in message["content"]] for message in messages] == [["text", "image_url"]] * 2


def test_chat_pastes_image_of_the_clipboard(cli: Cli) -> None:
    picture = "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
    programs = cli.folder / "bin"
    programs.mkdir()
    (programs / "wl-paste").write_text(
        f"#!{sys.executable}\nimport sys; sys.stdout.buffer.write(bytes.fromhex('{picture}'))\n"
    )
    (programs / "wl-paste").chmod(0o755)
    cli.env |= {"PATH": f"{programs}:{cli.env['PATH']}", "WAYLAND_DISPLAY": "wayland-0"}
    cli.script(Reply(text="One.", continues=False))
    terminal = cli.terminal()
    terminal.type("what is ")
    terminal.type(CTRL_V)
    terminal.until("With the next message: an image of the clipboard (33 bytes)")
    terminal.send("it?")
    terminal.until("One.")
    [message] = [m for m in cli.model.requests[-1].body["messages"] if m["role"] == "user"]
    assert [part["type"] for part in message["content"]] == ["text", "image_url"]
    assert message["content"][0]["text"] == "what is it?"
    (programs / "wl-paste").write_text("#!/bin/sh\necho text\n")
    terminal.type("\x1b[200~\x1b[201~")  # as terminals paste what is no text
    terminal.until("The clipboard holds no image.")
    (programs / "wl-paste").unlink()
    terminal.send("/paste")
    terminal.until(lambda screen: "reads images of the clipboard" in screen or screen.count("holds no image") == 2)


def test_chat_in_steer_mode_keeps_files_for_the_next_turn(cli: Cli) -> None:
    cli.configure("display: {busy_input_mode: steer}\napprovals: {mode: off}\n")
    (cli.folder / "notes.txt").write_text("buy milk")
    cli.script(
        Reply(tool_calls=[Call("terminal", {"command": "until [ -e go ]; do sleep 0.01; done"})]),
        Reply(text="First.", continues=False),
        Reply(text="Second.", continues=False),
    )
    terminal = cli.terminal()
    terminal.send("one")
    terminal.until("until [ -e go ]")
    terminal.send("look at @notes.txt")
    terminal.until("Next: look at @notes.txt")
    (cli.folder / "go").touch()
    terminal.until("Second.")
    assert any("buy milk" in str(m["content"]) for m in cli.model.requests[-1].body["messages"] if m["role"] == "user")


def test_chat_attaches_files_and_images(cli_or_server: Cli) -> None:
    (cli_or_server.folder / "notes.txt").write_text("buy milk")
    picture = bytes.fromhex("89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489")
    (cli_or_server.folder / "dot.png").write_bytes(picture)
    cli_or_server.script(Reply(text="Seen."))
    terminal = cli_or_server.terminal()
    terminal.send("look at @notes.txt and @dot.png, not at @gone.txt")
    screen = terminal.until("Seen.")
    assert "There is no file gone.txt" in screen
    [message] = [m for m in cli_or_server.model.requests[-1].body["messages"] if m["role"] == "user"]
    parts = {part["type"]: part for part in message["content"]}
    assert any("buy milk" in part.get("text", "") for part in message["content"])
    assert parts["image_url"]["image_url"]["url"].startswith("data:image/png;base64,")


def test_chat_input_history(cli: Cli) -> None:
    cli.script(*(Reply(text="Yes.", continues=False) for _ in range(4)))
    terminal = cli.terminal()
    terminal.send("remember this line")
    terminal.until("Yes.")
    terminal.send(" a secret line")
    terminal.until(lambda screen: screen.count("Yes.") == 2)
    leave(terminal)
    history = cli.home / "history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "remember this line" in history.read_text() and "secret" not in history.read_text()
    terminal = cli.terminal()
    terminal.type("\x12membe")
    terminal.until("remember this line")
    terminal.type("\r")
    terminal.until("› remember this line")
    terminal.type("\r")
    terminal.until("Yes.")
    assert cli.model_messages()[-1] == ("user", "remember this line")


def test_ctrl_c_clears_line_and_twice_exits(cli: Cli) -> None:
    terminal = cli.terminal()
    terminal.type("half a thought")
    terminal.until("half a thought")
    terminal.type(CTRL_C)
    terminal.until(lambda screen: "half a thought" not in screen)
    terminal.type(CTRL_C)
    terminal.until("Ctrl-C once more")
    terminal.type(CTRL_C)
    assert terminal.wait() == 0


def test_chat_resume(cli_or_server: Cli) -> None:
    cli_or_server.script(
        Reply(text="Noted, Ann."), Reply(text="Ann.", continues=False), Reply(text="Still Ann.", continues=False)
    )
    terminal = cli_or_server.terminal()
    terminal.send("my name is Ann")
    terminal.until("Noted, Ann.")
    [session] = cli_or_server.sessions()
    leave(terminal)
    terminal = cli_or_server.terminal("--continue")
    screen = terminal.until("Noted, Ann.")
    assert "2 messages" in screen and "› my name is Ann" in screen
    terminal.send("who am I?")
    terminal.until("\nAnn.")
    leave(terminal)
    result = cli_or_server.run("-r", session["id"][:18], "-z", "and now?")
    assert result.stdout == "Still Ann.\n"
    assert [role for role, _ in cli_or_server.messages()] == ["user", "assistant"] * 3


def test_chat_query_at_terminal(cli: Cli) -> None:
    cli.script(Reply(text="It is **so**."))
    terminal = Terminal([*HERMES, "chat", "-q", "is it?"], cli.env, cli.folder)
    try:
        assert terminal.wait() == 0
    finally:
        terminal.close()
    assert "It is so." in str(terminal) and "Continue with" not in str(terminal)


def test_hangup_interrupts_turn(cli_or_server: Cli) -> None:
    cli_or_server.script(Reply(text=["Begun", " and"], stall_at=450))
    terminal = cli_or_server.terminal()
    terminal.send("hello")
    running(terminal, "Begun")
    terminal.hang_up()
    assert terminal.process.wait(timeout=DEADLINE_S) == 130
    assert cli_or_server.messages() == [("user", "hello"), ("assistant", "Begun")]
    assert cli_or_server.sessions()[0]["end_reason"] == "cli_close"


def test_killed_chat_can_be_resumed(cli: Cli) -> None:
    cli.script(Reply(text=["The beginning of", " the end"], stall_at=450), Reply(text="All of it.", continues=False))
    terminal = cli.terminal()
    terminal.send("hello")
    running(terminal, "The beginning of")
    with contextlib.closing(Store(cli.home / "state.db")) as store:
        [run] = store.runs.list()
        until_blocking(lambda: store.runs.partials(run.spec.run_id))  # text is stored a moment after it is shown
    terminal.process.kill()
    terminal.process.wait()
    terminal = cli.terminal("--continue")
    screen = terminal.until("The last turn was cut off.")
    assert "› hello" in screen and "The beginning of" in screen
    terminal.send("/retry")
    terminal.until("All of it.")
    assert cli.model_messages() == [("user", "hello")]
    assert "was cut off" not in leave(terminal).rpartition("All of it.")[2]


def test_chat_waits_for_busy_session(cli: Cli) -> None:
    cli.script(Reply(text=["Slow", "ly"], stall_at=450), Reply(text="At last.", continues=False))
    first = cli.terminal()
    first.send("one")
    running(first, "Slow")
    [session] = cli.sessions()
    second = cli.terminal("--resume", session["id"])
    second.send("two")
    second.until("in use elsewhere")
    first.type(CTRL_C)
    second.until("At last.")


def test_no_color_output(cli: Cli) -> None:
    cli.script(Reply(text="**Plain** `words`", continues=False))
    written: list[bytes] = []
    terminal = cli.terminal("--no-color")
    read = os.read

    def noted(fd: int, count: int) -> bytes:
        written.append(read(fd, count))
        return written[-1]

    os.read = noted
    try:
        terminal.send("hello")
        terminal.until("Plain words")
    finally:
        os.read = read
    assert not any(f"\x1b[{colour}m".encode() in b"".join(written) for colour in (31, 32, 33, 36, 96))


def test_chat_follows_restarted_server(cli: Cli) -> None:
    cli.serve()
    cli.script(
        Reply(tool_calls=[Call("read_file", {"path": "notes.txt"})]),
        Reply(text=["Before", " the end"], stall_at=450),
        Reply(text=" and after it.", continues=False),
    )
    (cli.folder / "notes.txt").write_text("milk")
    terminal = cli.terminal()
    terminal.send("hello")
    running(terminal, "Before")
    assert cli.server is not None
    cli.server.kill()
    cli.server.wait()
    terminal.until("The server has gone")
    cli.serve()
    screen = terminal.until("and after it.", 60)
    assert "continues where its log ends" in screen
    leave(terminal)


def test_chat_gives_up_on_lost_server(cli: Cli) -> None:
    cli.serve()
    cli.script(Reply(text=["Begun", " and"], stall_at=450))
    terminal = cli.terminal()
    terminal.send("hello")
    running(terminal, "Begun")
    assert cli.server is not None
    cli.server.kill()
    cli.server.wait()
    terminal.until("The server has gone")
    terminal.type(CTRL_C)
    terminal.until("No longer waiting")
    leave(terminal)
