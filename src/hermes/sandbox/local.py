"""No sandbox: commands have the user's access. Only their time limit and end are managed."""

from __future__ import annotations

import os
import signal
import sys

from hermes.sandbox import reaper
from hermes.sandbox.base import Command, Group, Handle, Parts, Sandbox, SandboxError, hide_text, launch

INSTALL = (
    "install bubblewrap (apt install bubblewrap, dnf install bubblewrap, pacman -S bubblewrap), "
    "or allow commands without a sandbox: hermes config set terminal.allow_local true"
)
_HAS_REAPER = sys.platform == "linux"


class NoSandbox(Sandbox):
    """Commands cannot be run. File tools work in the workspace and the folders that the settings add."""

    name = "none"
    isolated = True

    async def _start(self, command: Command) -> tuple[Parts, Handle]:
        raise SandboxError("No command can be run here.", hint=INSTALL)


class Local(Sandbox):
    """The user's own machine. Without a reaper, what leaves its process group outlives the command."""

    name = "local"
    python = sys.executable

    async def _start(self, command: Command) -> tuple[Parts, Handle]:
        before = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid())] if _HAS_REAPER else []
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, reaper.AWAITED if _HAS_REAPER else ())
        argv, env = hide_text(command.argv, command.env)
        try:
            parts = launch([*before, *argv], cwd=command.cwd, env=env)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return parts, Group(parts[0].pid, reaped=_HAS_REAPER)
