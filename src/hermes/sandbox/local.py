"""No sandbox: commands see and reach what the user does. Only their time and their end are looked after."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hermes.sandbox.base import Command, Group, Handle, Parts, Sandbox, launch

_REAPER = str(Path(__file__).with_name("reaper.py"))
_HAS_REAPER = sys.platform == "linux"


class Local(Sandbox):
    """The user's own machine. Where there is no reaper, what leaves its process group outlives the command."""

    name = "local"
    python = sys.executable

    async def _start(self, command: Command) -> tuple[Parts, Handle]:
        reaper = [sys.executable, "-I", "-S", _REAPER, str(os.getpid())] if _HAS_REAPER else []
        parts = launch([*reaper, *command.argv], cwd=command.cwd, env=command.env)
        return parts, Group(parts[0].pid, reaped=_HAS_REAPER)
