"""Commands: `@command` declares a command's words, arguments, help and function in one place; parsers are made from it."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermes.core.home import Home

Args = argparse.Namespace
Work = Callable[[Args, "Home"], int | None]
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_COMMANDS: dict[str, Command] = {}


class Argument:
    """One argument or option, as `argparse` takes it."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.names, self.options = names, options

    def but(self, **options: Any) -> Argument:
        """The same with other options."""
        return Argument(*self.names, **{**self.options, **options})

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(*self.names, **self.options)


def flag(*names: str, help: str) -> Argument:
    return Argument(*names, action="store_true", help=help)


YES = flag("-y", "--yes", help="do not ask")


@dataclass(frozen=True, slots=True)
class Command:
    work: Work
    arguments: tuple[Argument, ...]
    help: str
    default: bool


def command(name: str, *arguments: Argument, help: str = "", default: bool = False) -> Callable[[Work], Work]:
    """Declare `hermes WORDS`: a command, or a command and an action. The help of a command without actions is in
    `main.COMMANDS`. The arguments of the `default` action, which is `list` if none is declared, may stand without its
    name; a command with neither prints its help."""

    def declare(work: Work) -> Work:
        _COMMANDS[name] = Command(work, arguments, help, default)
        return work

    return declare


def command_of(name: str) -> Work:
    return _COMMANDS[name].work


def actions_of(name: str) -> dict[str, Command]:
    return {
        command_name.partition(" ")[2]: one
        for command_name, one in _COMMANDS.items()
        if command_name.startswith(f"{name} ")
    }


def add_command(parser: argparse.ArgumentParser, name: str) -> None:
    """What a command and its actions take. The function to be called becomes `args.work`."""
    if name in _COMMANDS:
        _fill(parser, _COMMANDS[name])
    if not (actions := actions_of(name)):
        return
    default = next((one for one in actions.values() if one.default), actions.get("list"))
    subparsers = parser.add_subparsers(dest="action", metavar="ACTION")
    if default is not None:
        _fill(parser, default)
    else:
        parser.set_defaults(work=lambda args, home: parser.print_help())
    for action, declared in actions.items():
        description = f"{declared.help[:1].upper()}{declared.help[1:]}."
        # What was given before the action's name stands unless it is given again.
        more = {"default": argparse.SUPPRESS} if declared is default else {}
        _fill(subparsers.add_parser(action, help=declared.help, description=description), declared, **more)


def _fill(parser: argparse.ArgumentParser, declared: Command, **more: Any) -> None:
    for argument in declared.arguments:
        argument.but(**more).add_to(parser)
    parser.set_defaults(work=declared.work)


def number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def age(text: str) -> float:
    """Seconds."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 30m, 12h, 90d or 8w")
    return float(match[1]) * _SECONDS[match[2]]


def folder(text: str) -> str:
    """A whole path."""
    return os.path.abspath(os.path.expanduser(text))
