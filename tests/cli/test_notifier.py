"""Notifications of a chat: when, how, and that texts cannot steer a terminal."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from hermes.cli.notifier import Notifier
from hermes.core.home import Home
from hermes.services.notifications import terminal_sequence
from hermes.settings import config
from support.model_server import Reply

from .conftest import Cli


def notifier(tmp_path: Path, **flags: object) -> tuple[Notifier, list[str], list[float]]:
    written: list[str] = []
    now = [0.0]
    settings = config.load(Home(tmp_path), {name.replace("__", "."): value for name, value in flags.items()}, {})
    return Notifier(settings, written.append, lambda: now[0]), written, now


def test_end_of_a_long_turn_rings(tmp_path: Path) -> None:
    notifications, written, now = notifier(tmp_path)
    for seconds, rings in ((5.0, 0), (25.0, 1), (5.0, 1)):
        notifications.hear({"event": "run.started"})
        now[0] += seconds
        notifications.hear({"event": "run.completed"})
        assert written == ["\a"] * rings


@pytest.mark.parametrize(
    ("kind", "sequence"),
    [("off", []), ("bell", ["\a"]), ("osc9", ["\x1b]9;Hermes: An approval is wanted.\a"]),
     ("osc777", ["\x1b]777;notify;Hermes;An approval is wanted.\a"])],
)  # fmt: skip
def test_approval_notification_follows_setting(tmp_path: Path, kind: str, sequence: list[str]) -> None:
    notifications, written, _ = notifier(tmp_path, display__notify=kind)
    notifications.hear({"event": "approval.request"})
    assert written == sequence


def test_texts_cannot_leave_the_sequence() -> None:
    sequence = terminal_sequence("osc777", "a;b", "x\x07\x1b]0;evil\x9c\ny")
    assert sequence.startswith("\x1b]777;notify;a,b;x") and sequence.count("\a") == 1 and sequence.count("\x1b") == 1
    assert "\n" not in sequence and "\x9c" not in sequence


async def test_notify_command_is_run(tmp_path: Path) -> None:
    file = tmp_path / "program"
    file.write_text(f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'out')!r}, 'w').write(sys.argv[1])\n")
    file.chmod(0o700)
    notifications, _, _ = notifier(tmp_path, notify__command=f"{file} {{text}}")
    notifications.hear({"event": "approval.request"})
    async with asyncio.timeout(60):
        await asyncio.gather(*notifications._tasks)
    assert (tmp_path / "out").read_text() == "An approval is wanted."


def test_chat_writes_the_sequence_to_its_terminal(cli: Cli) -> None:
    cli.configure("display: {notify: osc777, notify_after_seconds: 0}\n")
    cli.script(Reply(text="The answer."))
    terminal = cli.terminal()
    written: list[str] = []
    feed = terminal.screen.feed

    def record(text: str) -> int:
        written.append(text)
        return feed(text)

    terminal.screen.feed = record  # type: ignore[method-assign]
    terminal.send("hello")
    terminal.until(" tokens in")
    terminal.until(lambda _: "\x1b]777;notify;Hermes;The answer is there.\a" in "".join(written))
