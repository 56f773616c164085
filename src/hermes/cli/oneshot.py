"""`hermes -z PROMPT`: one question, its answer on stdout, and nothing else there."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from hermes.cli.session import agent, checked_route, close_session, database, exit_code, stopping
from hermes.home import Home


def run(args: argparse.Namespace, home: Home) -> int:
    """Ask, print, and say by the exit code how it went."""
    checked_route(args, home)
    on_event = _print_event if args.events else None
    prompt = _prompt(args.oneshot)
    with database(args, home) as db:
        talk = agent(args, home, session_db=db, event_callback=on_event, deadline_seconds=args.deadline)
        with stopping(talk):
            result = talk.run_conversation(prompt)
        close_session(db, talk.session_id)
    if args.json and not args.events:
        print(json.dumps(result, ensure_ascii=False))
    elif result["final_response"] and not args.events:
        print(result["final_response"])
    if result["error"]:
        print(f"hermes: {result['error']}", file=sys.stderr)
    return exit_code(result)


def _print_event(event: dict[str, Any]) -> None:
    print(json.dumps(event, ensure_ascii=False), flush=True)


def _prompt(prompt: str) -> Any:
    """The question; what is piped in goes along as a file."""
    if prompt == "-":
        return sys.stdin.read()
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    if not piped:
        return prompt
    file = {"name": "stdin", "media_type": "text/plain", "data": piped.encode()}
    return [{"type": "text", "text": prompt}, {"type": "file", "file": file}]
