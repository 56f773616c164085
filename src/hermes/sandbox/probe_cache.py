"""The sandbox backend that a server has found by probing, stored for commands that only show it."""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from hermes.core.home import write_private
from hermes.settings.config import Settings

# Kernel settings that decide whether sandboxes can be made.
_RULES = (
    "kernel/unprivileged_userns_clone",
    "kernel/apparmor_restrict_unprivileged_userns",
    "user/max_user_namespaces",
)


def known(settings: Settings) -> str | None:
    """The backend found while machine and settings were as they are now; None if it has to be probed.

    One that did not work is probed again: it may have been repaired in a way that the key does not show.
    """
    try:
        with open(_path(settings), encoding="utf-8") as file:
            ours = os.fstat(file.fileno()).st_uid == os.getuid()
            key, _, name = file.read(4096).partition("\n")
    except (OSError, ValueError):
        return None
    return name if ours and key == _key(settings) and "(" not in name else None


def remember(settings: Settings, name: str) -> None:
    """Store the result of a probe; where that cannot be written, it is probed again."""
    with suppress(OSError, ValueError):
        write_private(_path(settings), f"{_key(settings)}\n{name}")


def _path(settings: Settings) -> Path:
    return settings.home.cache / "sandbox"


def _key(settings: Settings) -> str:
    """A hash of all that decides where commands can run: settings, user, kernel and its rules, programs."""
    chosen = settings.terminal.backend, settings.terminal.docker_image, settings.terminal.allow_local
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    programs = [_stamp(f"{folder}/{name}") for folder in folders for name in ("bwrap", "docker")]
    kernel = os.uname()
    rules = [_content(f"/proc/sys/{name}") for name in _RULES]
    inputs = chosen, os.getuid(), kernel.release, kernel.version, programs, rules
    return sha256(repr(inputs).encode("utf-8", "surrogateescape")).hexdigest()


def _content(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


def _stamp(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode
