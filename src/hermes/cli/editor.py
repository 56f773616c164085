"""The user's own editor on a file of the home: what was written is saved when it is in order, and never lost."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hermes.cli.output import Busy, UsageError, asked
from hermes.core.errors import HermesError
from hermes.core.home import write_private


def edit(file: Path, begin: bytes, check: Callable[[Path], None]) -> bool:
    """Let the user change a file, or begin one; whether it has changed. `check` raises what is wrong with a draft."""
    command = _editor()
    before = _read(file)
    draft = file.with_name(f"{file.stem}.draft{file.suffix}")
    write_private(draft, begin if before is None else before)
    try:
        written = _written(command, draft, check)
        if _read(file) != before:
            saved = _set_aside(draft)
            message = f"It was changed by somebody else meanwhile. What you wrote is in {saved}."
            raise Busy(message, where=str(file))
        if changed := written != (begin if before is None else before):
            write_private(file, written)
        return changed
    finally:
        draft.unlink(missing_ok=True)


def _written(command: list[str], draft: Path, check: Callable[[Path], None]) -> bytes:
    while True:
        try:
            # The user's own program, chosen by the user, on the user's own terminal.
            failed = subprocess.run([*command, str(draft)], check=False).returncode != 0  # noqa: S603
        except OSError:
            failed = True
        if failed:
            raise HermesError("The editor failed, and nothing was saved.")
        try:
            check(draft)
        except HermesError as error:
            if sys.stdin.isatty() and asked(f"{error}\nEdit again? [Y/n] ").lower() in ("", "y", "yes"):
                continue
            error.message = f"{error.message} Nothing was saved; what you wrote is in {_set_aside(draft)}."
            raise
        return draft.read_bytes()


def _editor() -> list[str]:
    chosen = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "")
    command = chosen or next(([name] for name in ("nano", "vi") if shutil.which(name)), [])
    if not command:
        raise UsageError("There is no editor.", hint="export EDITOR=nano")
    return command


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


def _set_aside(draft: Path) -> Path:
    """Keep a draft under a name that the next edit does not begin with."""
    return draft.replace(draft.with_name(draft.name.replace(".draft", ".rejected")))
