"""The result of a command that is run in the test process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Result(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        """The printed JSON document."""
        return json.loads(self.out)


Hermes = Callable[..., Result]
Editor = Callable[[str], None]


class TerminalInput(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True
