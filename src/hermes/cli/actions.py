"""Commands as tables: what each action runs, what it does and what it takes; and the types of their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hermes.cli.command import age, folder, number
from hermes.core.json_types import JsonObject

if TYPE_CHECKING:
    from hermes.core.home import Home

Args = argparse.Namespace
# action: (what is run, what it does, the names of its arguments)
Actions = Mapping[str, tuple[Callable[[Args, "Home"], Any], str, str]]
# An argument by its name, and under `action name` what is different about it there.
Arguments = Mapping[str, JsonObject]

FLAG: JsonObject = {"action": "store_true"}
YES = {"-y/--yes": FLAG | {"help": "do not ask"}}
__all__ = ["age", "folder", "number"]


def command(
    actions: Actions, arguments: Arguments, default: str = ""
) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[Args, Home], int]]:
    """The `add_arguments` and the `run` of a command; the words of the `default` action may stand without its name."""

    def add(parser: argparse.ArgumentParser, action: str, **more: Any) -> None:
        for name in actions[action][2].split():
            options = arguments[name] | arguments.get(f"{action} {name}", {})
            parser.add_argument(*name.split("/"), **options | more)

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        made = parser.add_subparsers(dest="action", required=not default, metavar="ACTION")
        if default:
            parser.set_defaults(action=default)
            add(parser, default)
        for action, (_, about, _) in actions.items():
            below = made.add_parser(action, help=about, description=f"{about[:1].upper()}{about[1:]}.")
            # What was said before the action's name stands unless it is said again.
            add(below, action, **({"default": argparse.SUPPRESS} if action == default else {}))

    def run(args: Args, home: Home) -> int:
        return actions[args.action][0](args, home) or 0

    return add_arguments, run
