"""A command as a test runs it, and what came of it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Done(NamedTuple):
    """What came of a command."""

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


Hermes = Callable[..., Done]
Editor = Callable[[str], None]


class Terminal(io.StringIO):
    """Somebody who types."""

    def isatty(self) -> bool:
        return True
