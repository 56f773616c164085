"""`hermes -z PROMPT`: one question, its answer on stdout, and nothing else there; a terminal sees it as it comes."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from hermes.app import new_loop
from hermes.cli import attach
from hermes.cli.conversation import Conversation, Show, conversation, exit_code, note
from hermes.cli.output import EXIT_INTERRUPTED, UsageError
from hermes.cli.streams import as_json
from hermes.core.errors import HermesError
from hermes.core.home import Home
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.processes import ending_signals
from hermes.core.result import Result

_ANSWER = ("message.delta", "run.failed")
_COUNTS = ("input_tokens", "output_tokens", "total_tokens")


def run(args: argparse.Namespace, home: Home) -> int:
    usage = Usage(args.usage_file)
    try:
        with asyncio.Runner(loop_factory=new_loop) as loop:
            code = loop.run(_run(args, home, usage))
    except HermesError as error:
        usage.write(error.exit_code, error.message)
        raise
    except KeyboardInterrupt:
        usage.write(EXIT_INTERRUPTED, "It was interrupted.")
        raise
    usage.write(code)
    return code


async def _run(args: argparse.Namespace, home: Home, usage: Usage) -> int:
    piped = attach.piped()
    text, piped = (piped.decode("utf-8", "replace"), b"") if args.oneshot == "-" else (args.oneshot, piped)
    if not text.strip():
        raise UsageError("There is no question.", hint='hermes -z "What is this?"')
    content = attach.message(text, args.image or (), piped, named=False)
    async with conversation(args, home, answerable=False) as talk:
        async with _view(args, talk) as show:
            with stopping(talk):
                result = await talk.ask(content, show, log=args.events)
        usage.result, usage.steps = result, result["api_calls"]
        code = exit_code(result, refused=talk.refused)
    if args.json and not args.events:
        print(as_json(result))
    elif result["final_response"] and not args.events and not _is_streamed(args):
        print(result["final_response"])
    if result["error"] and not _is_streamed(args):
        note(result["error"])
    if talk.unapproved and not args.quiet:
        note('a call needed approval, and -z asks nobody. Try: hermes "…" at a terminal, or --yolo to allow everything')
    return code


def _is_streamed(args: argparse.Namespace) -> bool:
    """Whether the answer stands on the terminal as it comes."""
    return _draws(sys.stdout) and not (args.quiet or args.json or args.events)


def _draws(stream: Any) -> bool:
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


@asynccontextmanager
async def _view(args: argparse.Namespace, talk: Conversation) -> AsyncIterator[Show]:
    """What takes the events of the turn: a terminal shows the answer, or where that is piped, the tools at work."""
    streamed = _is_streamed(args)
    if args.events or args.quiet or not (streamed or _draws(sys.stderr)):
        yield _print_event if args.events else _say_nothing if args.quiet else tell_notice
        return
    from hermes.cli.live_lines import LiveLines
    from hermes.cli.screen import Screen

    lines = LiveLines(sys.stdout if streamed else sys.stderr)
    reasoning = streamed and talk.settings.display.show_reasoning
    screen = Screen(lambda: lines.size.columns, reasoning=reasoning, quiet=True, expands=False)
    screen.emit, lines.live = lines.write, screen.live

    def show(event: JsonObject) -> None:
        if streamed or event["event"] not in _ANSWER:
            screen.show(event)
            lines.draw()

    screen.begin()
    async with lines.drawing():
        yield show
        screen.reset()


def _print_event(event: JsonObject) -> None:
    print(as_json(event), flush=True)


def _say_nothing(_: JsonObject) -> None:
    """Nothing but the result is wanted."""


def tell_notice(event: JsonObject) -> None:
    if event["event"] == "warning" and event["level"] == "warn":
        note(event["message"])
    elif event["event"] == "model.fallback":
        note(f"{event['to']['model']} answers instead of {event['from']['model']}: {event['reason']}.")


@contextmanager
def stopping(talk: Conversation) -> Iterator[None]:
    """While a turn runs, Ctrl-C stops the turn, not the program; what there is of the answer is kept. A second one ends
    the program."""
    loop, tasks = asyncio.get_running_loop(), set[Any]()
    numbers = ending_signals()

    def stop() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
        tasks.add(loop.create_task(talk.control("interrupt")))

    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class Usage:
    """What a question took, written to a file in every case."""

    def __init__(self, path: str | None) -> None:
        self._path, self._began = path, time.monotonic()
        self.result: Result | None = None
        self.steps = 0

    def write(self, code: int, error: str | None = None) -> None:
        if self._path is None:
            return
        result: JsonMapping = self.result or {}
        report = {name: result.get(name) for name in ("run_id", "session_id", "model", "provider")}
        report |= {"steps": self.steps, **{name: result.get(name, 0) for name in _COUNTS}}
        report |= {**(result.get("usage_details") or {}), "duration_s": round(time.monotonic() - self._began, 3)}
        report |= {"exit": code, "error": error or result.get("error")}
        try:
            Path(self._path).write_text(json.dumps(report) + "\n")
        except OSError as fault:
            note(f"{self._path} cannot be written: {fault.strerror}.")
