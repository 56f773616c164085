"""No sandbox: commands see and reach what the user does. Only their time and their end are looked after."""

from __future__ import annotations

import os
import signal
import sys

from hermes.sandbox import reaper
from hermes.sandbox.base import Command, Group, Handle, Parts, Sandbox, launch
from hermes.sandbox.command_text import hidden

_HAS_REAPER = sys.platform == "linux"


class Local(Sandbox):
    """The user's own machine. Where there is no reaper, what leaves its process group outlives the command."""

    name = "local"
    python = sys.executable

    async def _start(self, command: Command) -> tuple[Parts, Handle]:
        before = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid())] if _HAS_REAPER else []
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, reaper.AWAITED if _HAS_REAPER else ())
        argv, env = hidden(command.argv, command.env)
        try:
            parts = launch([*before, *argv], cwd=command.cwd, env=env)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return parts, Group(parts[0].pid, reaped=_HAS_REAPER)
