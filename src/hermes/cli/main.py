"""The command `hermes`: its options, and the module behind each command, loaded when that command is given."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from hermes.cli.streams import plain_streams
from hermes.core.errors import HermesError

if TYPE_CHECKING:
    from hermes.core.home import Home

# command: (module with `add_arguments` and `run`, what it does)
COMMANDS = {
    "chat": ("hermes.cli.chat", "talk to the agent in this terminal (the default)"),
    "approvals": ("hermes.cli.approvals_command", "what may be done without asking"),
    "completion": ("hermes.cli.completion_command", "what a shell needs to complete commands"),
    "config": ("hermes.cli.config_command", "look at and change settings"),
    "cron": ("hermes.cli.cron_command", "have work done later or regularly"),
    "doctor": ("hermes.cli.doctor_command", "look for what is wrong, and say what helps"),
    "gateway": ("hermes.cli.gateway_command", "run the server, look at it, stop it"),
    "logs": ("hermes.cli.logs_command", "what Hermes has written about its work"),
    "mcp": ("hermes.cli.mcp_command", "servers whose tools are used"),
    "memory": ("hermes.cli.memory_command", "what is remembered in every session"),
    "model": ("hermes.cli.model_command", "look at the model that is used, and choose another"),
    "profile": ("hermes.cli.profile_command", "make, choose and remove profiles"),
    "runs": ("hermes.cli.runs_command", "look at turns, follow, stop and steer them"),
    "sessions": ("hermes.cli.sessions_command", "look at conversations, find, move and remove them"),
    "setup": ("hermes.cli.setup_command", "choose model, tools, sandbox and the server's key"),
    "skills": ("hermes.cli.skills_command", "ways of working kept for later"),
    "status": ("hermes.cli.status_command", "how things stand, in a few lines"),
    "tools": ("hermes.cli.tools_command", "which tools are offered, and what a command may do"),
    "version": ("hermes.cli.version_command", "what is installed here, and what it works with"),
}
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
_FLAG: dict[str, Any] = {"action": "store_true"}


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 10000")
    return int(text)


# Options that may stand anywhere, before or after the command and its own words.
_EVERYWHERE: dict[str, dict[str, Any]] = {
    "-p/--profile": {"metavar": "NAME", "help": "use this profile"},
    "--json": _FLAG | {"help": "print one JSON document and nothing else"},
    "--quiet": _FLAG | {"help": "leave out what is not the result"},
    "--no-color": _FLAG | {"help": "print without colours"},
    "--debug": _FLAG | {"help": "show the log, and where an error came from"},
}
# Options of a conversation, also behind `chat`.
_TALK: dict[str, dict[str, Any]] = {
    "-m/--model": {"metavar": "NAME", "help": "use this model"},
    "--provider": {"metavar": "ID", "help": "ask this provider"},
    "-t/--toolsets": {"metavar": "LIST", "help": "offer only these toolsets, separated by commas"},
    "-s/--skills": {"metavar": "LIST", "help": "follow these skills, separated by commas"},
    "-r/--resume": {"metavar": "ID_OR_TITLE", "help": "go on with this session"},
    "-c/--continue": {
        "metavar": "NAME",
        "nargs": "?",
        "const": "",
        "dest": "go_on",
        "help": "go on with the newest session of this folder, or the newest of this name",
    },
    "--sandbox": {"choices": ("auto", "local", "bubblewrap", "docker"), "help": "run commands there"},
    "--yolo": _FLAG | {"help": "do what would be asked about without asking"},
    "--safe-mode": _FLAG | {"help": "without config.yaml, project file, memory, skills and MCP servers"},
    "--max-turns": {"metavar": "N", "type": _count, "help": "let the model be asked so often in a turn at most"},
    "--image": {"metavar": "PATH", "action": "append", "help": "send this picture along; may be repeated"},
    "--no-save": _FLAG | {"help": "keep nothing of this conversation"},
}
_ONESHOT: dict[str, dict[str, Any]] = {
    "-z/--oneshot": {"metavar": "PROMPT", "help": "answer one question and leave; - reads it from stdin"},
    "--events": _FLAG | {"help": "with -z: print the run's log as JSON lines"},
    "--deadline": {"metavar": "SECONDS", "type": _seconds, "help": "with -z: give up after this time"},
    "--usage-file": {"metavar": "PATH", "help": "with -z: write there what it took, however it ended"},
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are told like all others."""

    def error(self, message: str) -> NoReturn:
        told = f"{message[:1].upper()}{message[1:]}."
        _complain(HermesError(told, hint=f"{self.prog} --help"))
        raise SystemExit(EXIT_USAGE)


def main(argv: Sequence[str]) -> int:
    """Run one command; its exit code."""
    with plain_streams():
        return _guarded(argv)


def _guarded(argv: Sequence[str]) -> int:
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except HermesError as error:
        _trace(argv)
        _complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001  (a defect of ours is a sentence too)
        _trace(argv)
        _complain(HermesError(f"This is a defect of Hermes: {type(error).__name__}.", hint="the same with --debug"))
        return 1


def _complain(error: HermesError) -> None:
    """What is wrong, and what helps."""
    place = f"{error.where}: " if error.where else ""
    print(f"hermes: {place}{error.message}", file=sys.stderr)
    if error.hint:
        print(f"Try: {error.hint}", file=sys.stderr)


def _trace(argv: Sequence[str]) -> None:
    """Where an error came from, for those who want to know, without secrets."""
    if "--debug" in argv:
        import traceback

        from hermes.guards.secrets import Secrets

        print(Secrets().redact(traceback.format_exc()), file=sys.stderr)


def _run(argv: Sequence[str]) -> int:
    args = _parse(list(argv))
    from hermes.cli import output
    from hermes.core.home import resolve

    output.quiet = args.quiet
    if args.no_color:
        os.environ["NO_COLOR"] = "1"
    home = resolve(args.profile)
    if args.version:
        return _module(COMMANDS["version"][0])(args, home)
    if args.oneshot is not None:
        return _module("hermes.cli.oneshot")(args, home)
    return _module(COMMANDS[args.command or "chat"][0])(args, home)


def _module(name: str) -> Callable[[argparse.Namespace, Home], int]:
    run: Callable[[argparse.Namespace, Home], int] = import_module(name).run
    return run


def _parse(argv: list[str]) -> argparse.Namespace:
    common = _Parser(prog="hermes", add_help=False, allow_abbrev=False)
    add_options(common, _EVERYWHERE)
    # What follows `--args` belongs to another program.
    end = argv.index("--args") if "--args" in argv else len(argv)
    everywhere, own = common.parse_known_args(argv[:end])
    wanted = next((word for word in own if word in COMMANDS), "")
    args = parser_with({wanted}).parse_args(own + argv[end:])
    vars(args).update(vars(everywhere))
    return args


def parser_with(wanted: Collection[str]) -> argparse.ArgumentParser:
    """The parser of everything, with what these commands take."""
    parser = _Parser(
        prog="hermes",
        usage="hermes [OPTION…] [COMMAND …]",
        description="A self-hosted AI agent that speaks OpenAI's protocols.",
        epilog="`hermes COMMAND --help` tells of a command; without one, `hermes` is `hermes chat`.",
    )
    parser.add_argument(
        "-V", "--version", action="store_true", help="print version, home, profile, Python, store, sandbox, llama.cpp"
    )
    add_options(parser, _EVERYWHERE | _ONESHOT | _TALK)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog="hermes")
    for name, (module, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=f"{about[:1].upper()}{about[1:]}.")
        if name == "chat":  # what was said before the command stands unless it is said again
            add_options(command, _TALK, default=argparse.SUPPRESS)
        if name in wanted:
            import_module(module).add_arguments(command)
    return parser


def add_options(parser: argparse.ArgumentParser, options: dict[str, dict[str, Any]], **more: Any) -> None:
    """Options of a table: each by its names, with what it takes."""
    for names, option in options.items():
        parser.add_argument(*names.split("/"), **option, **more)
