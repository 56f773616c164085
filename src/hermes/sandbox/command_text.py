"""Keeps what a shell is told out of its arguments, which every user of the machine can list."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

# Only the same user can read the environment of a process; what the shell runs does not inherit this variable.
VARIABLE = "HERMES_COMMAND_TEXT"
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "busybox"})
_TAKE = f'eval "unset {VARIABLE}; ${VARIABLE}"'


def hidden(argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """A command and its environment, with the text of `sh -c TEXT` in the environment instead."""
    if len(argv) < 3 or argv[1] != "-c" or os.path.basename(argv[0]) not in _SHELLS:
        return list(argv), dict(env)
    return [argv[0], "-c", _TAKE, *argv[3:]], {**env, VARIABLE: argv[2]}
