"""A conversation where there is no terminal: the answer on stdout as it comes, everything else a line on stderr."""

from __future__ import annotations

import sys

from hermes.cli.screen import Open
from hermes.cli.tool_text import readable
from hermes.core.formatting import one_line
from hermes.core.json_types import JsonObject
from hermes.core.result import Result


class Lines:
    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._open = quiet, False
        self.reasoning, self.last_output = False, ""
        self.questions: list[Open] = []
        self.tokens, self.model = 0, ""

    def begin(self) -> None:
        pass

    def show(self, event: JsonObject) -> None:
        kind = event["event"]
        if kind == "message.delta":
            self._write(event["delta"])
        elif kind in ("message.completed", "run.failed", "run.cancelled") and self._open:
            self._write("\n")
        if kind == "tool.started":
            self.note(f"[{event['tool']}: {one_line(event['preview'] or '')}]")
        elif kind == "tool.completed":
            self.last_output = readable(event["result"])
        elif kind == "warning":
            self.note(event["message"])
        elif kind == "run.failed":
            self.problem(event["error"])

    def _write(self, text: str) -> None:
        self._open = not text.endswith("\n")
        sys.stdout.write(text)
        sys.stdout.flush()

    def ended(self, result: Result) -> None:
        pass

    reset = begin

    def note(self, text: str, style: str = "") -> None:
        """A word beside the conversation."""
        if not self._quiet:
            print(text, file=sys.stderr)

    def problem(self, text: str) -> None:
        print(f"hermes: {text}", file=sys.stderr)

    def plain(self, text: str) -> None:
        print(text.rstrip("\n"), flush=True)

    def expand(self) -> None:
        self.plain(self.last_output)

    def user_text(self, text: str) -> None:
        pass

    def markdown(self, text: str, block: str = "") -> None:
        self.plain(text)
