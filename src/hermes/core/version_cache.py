"""A disk cache for `hermes --version`, keyed by a hash of its inputs. Imports next to nothing."""

import os
import sys
from hashlib import sha256

import hermes

# What the kernel lets a user do decides whether commands can be shut in.
_RULES = (
    "kernel/unprivileged_userns_clone",
    "kernel/apparmor_restrict_unprivileged_userns",
    "user/max_user_namespaces",
)
_BYTES_MAX = 1_048_577


def known(path: str, key: str) -> str | None:
    """What is remembered there under this key; None: it must be found out."""
    try:
        with open(path, encoding="utf-8") as file:
            ours = os.fstat(file.fileno()).st_uid == os.getuid()
            found, _, text = file.read(_BYTES_MAX).partition("\n")
    except (OSError, ValueError):
        return None
    return text if ours and found == key else None


def remember(path: str, key: str, text: str) -> None:
    """Keep what was found out under the key that held before. Where that cannot be written, it is found out again."""
    from contextlib import suppress
    from pathlib import Path

    from hermes.core.home import write_private

    with suppress(OSError, ValueError):
        write_private(Path(path), f"{key}\n{text}")


def key_of(*what: object) -> str:
    """All of this in a word that tells nothing of it."""
    return sha256(repr(what).encode("utf-8", "surrogateescape")).hexdigest()


def machine() -> object:
    """What decides where commands can run here: the user, the kernel and its rules, and the programs for it."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    programs = [_stamp(f"{folder}/{name}") for folder in folders for name in ("bwrap", "docker")]
    kernel = os.uname()
    return os.getuid(), kernel.release, kernel.version, programs, [_content(f"/proc/sys/{name}") for name in _RULES]


def version() -> tuple[str, str, str]:
    """Of the lines of `hermes --version`: the home that they are about, where they are remembered, and their key."""
    base = os.path.abspath(os.path.expanduser(os.environ.get("HERMES_HOME") or "~/.hermes"))
    chosen = _content(f"{base}/active_profile") or b""
    name = os.environ.get("HERMES_PROFILE") or chosen.decode(errors="replace").strip() or "default"
    inside = os.path.basename(os.path.dirname(base)) == "profiles"
    home = base if inside or name == "default" else f"{base}/profiles/{name}"
    settings, *more = (_content(f"{home}/{file}") for file in ("config.yaml", ".env", "cache/sandbox"))
    # A setting may name any variable.
    named = [
        item
        for item in os.environb.items()
        if item[0].startswith(b"HERMES_") or item[0] in (b"HOME", b"PATH") or item[0] in (settings or b"")
    ]
    # The first folder is the one where the command was given, or the one of the command.
    packages = [(folder, _stamp(folder)) for folder in sys.path[1:]]
    places = base, home, os.path.isdir(home), chosen
    key = key_of(hermes.__version__, sys.version, places, settings, more, sorted(named), packages, machine())
    return home, f"{base}/cache/version", key


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(_BYTES_MAX)
    except OSError:
        return None


def _stamp(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
