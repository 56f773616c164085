"""The state of a session's shell: folder and exported variables, passed from one command to the next."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from hermes.core.limits import SHELL_STATE_BYTES_MAX
from hermes.sandbox.base import Record

# Set by every shell for itself.
_OWN = frozenset({"_", "PWD", "SHLVL"})
_SCRIPT = """cd -- {cwd} 2>/dev/null
trap {trap} EXIT
eval {command}"""
_TRAP = """{{ printf '%s\\0' "$(pwd -P)"; command -p env -0; printf '\\0'; }} 2>/dev/null >{record}"""


class Shell:
    """Each command is a new shell. At its end it writes its state to a record of its own: output cannot pretend to be
    it, and a command that ends without writing leaves the state as it was. Commands see `folder` at the same path."""

    def __init__(self, folder: Path, cwd: str, env: Mapping[str, str], shell: str = "/bin/sh") -> None:
        self._folder, self._shell = folder, shell
        self._record: Record | None = None
        self.cwd, self.env = cwd, dict(env)

    def argv(self, command: str, *, remember: bool = True) -> list[str]:
        """The arguments that run a command where the last one ended; with `remember` its state is kept for `keep`.
        Blocks."""
        quote, trap = shlex.quote, ""
        if remember:
            self.keep()
            self._record = Record(self._folder)
            trap = _TRAP.format(record=quote(str(self._record.path)))
        return [self._shell, "-c", _SCRIPT.format(cwd=quote(self.cwd), trap=quote(trap), command=quote(command))]

    def keep(self) -> None:
        """Take over the state that the last command left, if it is complete and not too large. Blocks."""
        if self._record is None:
            return
        data = self._record.read(SHELL_STATE_BYTES_MAX + 1)
        self._record.close()
        self._record = None
        if len(data) > SHELL_STATE_BYTES_MAX or not data.endswith(b"\0\0"):
            return
        cwd, *exported = os.fsdecode(data[:-2]).split("\0")
        # Most of it is the same in every session, and kept once.
        pairs = (tuple(map(sys.intern, text.partition("="))) for text in exported)
        self.env = {name: value for name, equals, value in pairs if name and equals and name not in _OWN}
        self.cwd = cwd or self.cwd
