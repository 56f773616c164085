"""`hermes chat`: a conversation in a terminal, a line at a time."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

from hermes.agent.facade import AIAgent
from hermes.cli.session import agent, checked_route, close_session, database, stopping
from hermes.home import Home


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options of its own."""


def run(args: argparse.Namespace, home: Home) -> int:
    """Talk until the input ends."""
    route = checked_route(args, home)
    print(f"Hermes · {route.provider}/{route.model} · Ctrl-C stops a turn, Ctrl-D leaves", file=sys.stderr)
    with database(args, home) as db:
        talk = agent(
            args,
            home,
            session_db=db,
            stream_delta_callback=_show,
            tool_progress_callback=_show_tool,
            clarify_callback=_ask,
            approval_callback=_approve,
        )
        _converse(talk, kept=db is not None)
        close_session(db, talk.session_id)
    return 0


def _converse(talk: AIAgent, *, kept: bool) -> None:
    """Question and answer in turns. What is kept nowhere is remembered here."""
    history: list[dict[str, Any]] = []
    while (question := _read("> ")) is not None:
        if not question.strip():
            continue
        with stopping(talk):
            result = talk.run_conversation(question, conversation_history=None if kept else history)
        history = result["messages"]
        print()
        if result["error"]:
            print(f"[{result['error']}]", file=sys.stderr)


def _read(mark: str) -> str | None:
    """A line, or None at the end of the input."""
    try:
        return input(mark if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _answer(mark: str) -> str:
    """A line for a question of the agent; Ctrl-C gives up the question and stops the turn."""
    stop = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _read(mark) or ""
    except KeyboardInterrupt:
        if callable(stop):
            stop(signal.SIGINT, None)
        return ""
    finally:
        signal.signal(signal.SIGINT, stop)


def _show(text: str | None) -> None:
    print(text if text is not None else "\n", end="", flush=True)


def _show_tool(event: str, *, tool_name: str, preview: str | None = None, **_: Any) -> None:
    if event == "tool.started":
        print(f"[{tool_name}: {preview}]", file=sys.stderr)


def _ask(question: str, choices: list[str]) -> str:
    print(question, *(f"  - {choice}" for choice in choices), sep="\n", file=sys.stderr)
    return _answer("? ")


def _approve(request: dict[str, Any]) -> str:
    """One of the choices by its name or first letter; anything else denies."""
    print(f"{request['subject']}\n{request['reason']}", file=sys.stderr)
    said = _answer(f"{', '.join(request['choices'])}? ").strip().lower()
    return next((choice for choice in request["choices"] if said and choice.startswith(said)), "deny")
