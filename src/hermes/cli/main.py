"""The command `hermes`: its options, and the module behind each command, loaded when that command is given."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import hermes
from hermes.errors import HermesError

if TYPE_CHECKING:
    from hermes.home import Home

# command: (module with `add_arguments` and `run`, what it does)
COMMANDS = {
    "chat": ("hermes.cli.chat", "talk to the agent in this terminal (the default)"),
    "config": ("hermes.cli.config_command", "look at and change settings"),
    "gateway": ("hermes.cli.gateway_command", "run the server, look at it, stop it"),
    "profile": ("hermes.cli.profile_command", "make, choose and remove profiles"),
    "sessions": ("hermes.cli.sessions_command", "look at conversations, find, move and remove them"),
}
EXIT_INTERRUPTED = 130


def entry() -> None:
    """The console script."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run one command; its exit code."""
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except HermesError as error:
        print(f"hermes: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: Sequence[str]) -> int:
    args = _parse(list(argv))
    from hermes.home import resolve

    home = resolve(args.profile)
    if args.version:
        return _version(home)
    if args.oneshot is not None:
        return _module("hermes.cli.oneshot")(args, home)
    return _module(COMMANDS[args.command or "chat"][0])(args, home)


def _module(name: str) -> Callable[[argparse.Namespace, Home], int]:
    run: Callable[[argparse.Namespace, Home], int] = import_module(name).run
    return run


def _parse(argv: list[str]) -> argparse.Namespace:
    # These two may stand anywhere, before or after the command and its own words.
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-p", "--profile", metavar="NAME", help="use this profile")
    common.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    everywhere, argv = common.parse_known_args(argv)
    parser = argparse.ArgumentParser(
        prog="hermes", description="A self-hosted AI agent that speaks OpenAI's protocols.", parents=[common]
    )
    parser.add_argument(
        "-V", "--version", action="store_true", help="print version, home, profile and Python, and leave"
    )
    parser.add_argument(
        "-z", "--oneshot", metavar="PROMPT", help="answer one question and leave; - reads it from stdin"
    )
    parser.add_argument("--events", action="store_true", help="with -z: print the run's log as JSON lines")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="with -z: give up after this time")
    parser.add_argument("--no-save", action="store_true", help="keep nothing of this conversation")
    parser.add_argument("-m", "--model", metavar="NAME", help="use this model")
    parser.add_argument("--provider", metavar="ID", help="ask this provider")
    parser.add_argument("-t", "--toolsets", metavar="LIST", help="offer only these toolsets, separated by commas")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    wanted = next((word for word in argv if word in COMMANDS), "")
    for name, (module, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about.capitalize() + ".")
        if name == wanted:
            import_module(module).add_arguments(command)
    args = parser.parse_args(argv)
    args.profile, args.json = everywhere.profile, everywhere.json
    return args


def _version(home: Home) -> int:
    print(f"hermes {hermes.__version__}")
    print(f"home {home.path} (profile {home.profile})")
    print(f"Python {sys.version.split()[0]}")
    return 0
