"""`hermes install`: optional parts of Hermes, installed beside it, whatever it was installed with."""

from __future__ import annotations

import importlib
import os
from importlib.resources import as_file, files

from hermes.cli.command import Args, Argument, command
from hermes.cli.output import NotFound, note, tell
from hermes.core.errors import HermesError
from hermes.core.home import Home
from hermes.core.installation import extras, installation, is_installed
from hermes.core.json_types import JsonObject
from hermes.local.install import NotInstalled
from hermes.sandbox.base import failure_message

INSTALL_S_MAX = 1800.0
# The runtime of the embedded model, at the version that it is tested with.
_RUNTIME = "local"


class NotDone(HermesError):
    pass


@command("install", Argument("parts", metavar="PART", nargs="*", help="what to install; without any, list the parts"))
def install(args: Args, home: Home) -> None:
    known = extras()
    if unknown := [name for name in args.parts if name not in known]:
        raise NotFound(f"There is no part '{unknown[0]}'.", hint="hermes install")
    if not args.parts:
        rows: list[JsonObject] = [
            {"part": name, "installed": is_installed(needs), "packages": needs} for name, needs in known.items()
        ]
        lines = [
            f"{name:<9} {'yes' if is_installed(needs) else 'no':<4} {', '.join(needs)}" for name, needs in known.items()
        ]
        tell(args, {"parts": rows}, *lines)
        return
    missing = [name for name in dict.fromkeys(args.parts) if not is_installed(known[name])]
    for name in missing:
        note(f"Installing {name}: {', '.join(known[name])}")
        install_runtime() if name == _RUNTIME else run(installation().add(*known[name]))
    added = ", ".join(missing)
    tell(args, {"installed": missing}, f"Installed: {added}." if added else "Everything is there.")
    if missing:
        note("A running server has to be started again: hermes gateway restart")


def install_runtime() -> None:
    with as_file(files("hermes.local").joinpath("runtime.txt")) as pins:
        locked = ("--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(pins))
        if problem := failure_message(installation().add(*locked), os.environ, INSTALL_S_MAX):
            raise NotInstalled(f"The runtime of the embedded model could not be installed: {problem}")
    importlib.invalidate_caches()


def run(argv: list[str]) -> None:
    """A command of the package installer, to its end; its output is shown where it fails."""
    if problem := failure_message(argv, os.environ, INSTALL_S_MAX):
        raise NotDone(f"`{' '.join(argv)}` failed: {problem}")
    importlib.invalidate_caches()
