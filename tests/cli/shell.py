"""A command as a function of the test, and its result."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Result(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        """The one document that was printed."""
        return json.loads(self.out)


Hermes = Callable[..., Result]
Editor = Callable[[str], None]


class TerminalInput(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True
