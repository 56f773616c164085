"""`hermes memory`: what is remembered in every session: look at it, change it, forget it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hermes.cli.actions import YES, Actions, Args, Arguments, command
from hermes.cli.output import confirmed, note, print_redacted, secrets, tell, tool_errors_as_cli
from hermes.core.formatting import printable
from hermes.core.home import Home, locked

if TYPE_CHECKING:
    from hermes.tools.memory import MemoryFile, Target


def _files(args: Args, home: Home) -> dict[Target, MemoryFile]:
    """The files that are meant, of the session key that is meant."""
    from hermes.settings import config
    from hermes.tools.memory import FILES, memory_file

    wanted = [target for target in FILES if getattr(args, "target", None) in (None, target)]
    return {target: memory_file(home, config.load(home), target, "default", args.key) for target in wanted}


def _show(args: Args, home: Home) -> None:
    from hermes.tools.memory import SEPARATOR

    document, lines = {}, []
    for target, file in _files(args, home).items():
        entries = file.entries()
        chars = len(SEPARATOR.join(entries))
        document[target] = {"path": str(file.path), "entries": entries, "chars": chars, "limit": file.chars_max}
        lines.append(f"{target}: {chars} of {file.chars_max} characters, {file.path}")
        lines += ["  - " + printable(entry).replace("\n", "\n    ") for entry in entries]
    print_redacted(args, home, document, lines)


def _edit(args: Args, home: Home) -> None:
    from hermes.cli.editor import edit
    from hermes.tools.memory import MemoryFile, apply

    [file] = _files(args, home).values()

    def check(draft: Path) -> None:
        entries = MemoryFile(draft, file.chars_max).entries()
        with tool_errors_as_cli():
            apply([], [{"action": "add", "content": entry} for entry in entries], file, secrets(home))

    saved = edit(file.path, b"", check)
    tell(args, {"path": str(file.path), "saved": saved}, "Saved." if saved else "Nothing was changed.")


def _reset(args: Args, home: Home) -> int:
    paths = [file.path for file in _files(args, home).values() if file.path.exists()]
    if paths and not confirmed(args, "Forgetting all of it", *(f"{path} will be gone." for path in paths)):
        return 1
    for path in paths:
        with locked(path.parent):
            path.unlink(missing_ok=True)
    tell(args, {"removed": [str(path) for path in paths]}, *(f"{path} is gone." for path in paths))
    if not paths:
        note("Nothing is remembered.")
    return 0


_FILE = {"metavar": "FILE", "nargs": "?", "choices": ("memory", "user")}
_ARGUMENTS: Arguments = YES | {
    "target": _FILE | {"help": "memory or user; both, if left out"},
    "edit target": {"default": "memory", "help": "memory or user (memory)"},
    "--key": {"metavar": "KEY", "help": "that of this session key"},
}
_ACTIONS: Actions = {
    "show": (_show, "what is remembered", "--key"),
    "edit": (_edit, "change it in $VISUAL or $EDITOR", "target --key"),
    "reset": (_reset, "forget it all", "target --key -y/--yes"),
}
add_arguments, run = command(_ACTIONS, _ARGUMENTS, "show")
