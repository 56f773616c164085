"""`hermes memory`: what is remembered in every session: look at it, change it, forget it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hermes.cli.command import YES, Args, Argument, command
from hermes.cli.output import confirmed, note, print_redacted, secrets, service_errors, tell
from hermes.core.formatting import printable
from hermes.core.home import Home

if TYPE_CHECKING:
    from hermes.services.memory import MemoryFile, Target

_KEY = Argument("--key", metavar="KEY", help="the memory of this session key")
_TARGET = Argument(
    "target", metavar="FILE", nargs="?", choices=("memory", "user"), help="memory or user; both, if left out"
)


def _files(args: Args, home: Home) -> dict[Target, MemoryFile]:
    """The files that are meant, of the session key that is meant."""
    from hermes.services.memory import FILES, memory_file
    from hermes.settings import config

    wanted = [target for target in FILES if getattr(args, "target", None) in (None, target)]
    return {target: memory_file(home, config.load(home), target, "default", args.key) for target in wanted}


@command("memory show", _KEY, help="show the memory", default=True)
def _show(args: Args, home: Home) -> None:
    document, lines = {}, []
    for target, file in _files(args, home).items():
        facts = file.describe(file.entries())
        document[target] = {"path": str(file.path), **facts}
        lines.append(f"{target}: {facts['chars']} of {facts['limit']} characters, {file.path}")
        lines += ["  - " + printable(entry).replace("\n", "\n    ") for entry in facts["entries"]]
    print_redacted(args, home, document, lines)


@command(
    "memory edit",
    _TARGET.but(default="memory", help="memory or user (memory)"),
    _KEY,
    help="edit it in $VISUAL or $EDITOR",
)
def _edit(args: Args, home: Home) -> None:
    from hermes.cli.editor import edit
    from hermes.services.memory import MemoryFile, apply

    [file] = _files(args, home).values()

    def check(draft: Path) -> None:
        entries = MemoryFile(draft, file.chars_max).entries()
        with service_errors():
            apply([], [{"action": "add", "content": entry} for entry in entries], file, secrets(home))

    saved = edit(file.path, b"", check)
    tell(args, {"path": str(file.path), "saved": saved}, "Saved." if saved else "Nothing was changed.")


@command("memory reset", _TARGET, _KEY, YES, help="delete all of it")
def _reset(args: Args, home: Home) -> int:
    files = [file for file in _files(args, home).values() if file.path.exists()]
    paths = [str(file.path) for file in files]
    if paths and not confirmed(args, "Forgetting all of it", *(f"{path} will be gone." for path in paths)):
        return 1
    for file in files:
        file.remove()
    tell(args, {"removed": paths}, *(f"{path} is gone." for path in paths))
    if not paths:
        note("Nothing is remembered.")
    return 0
