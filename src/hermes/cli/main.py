"""The command `hermes`: its options, and the module behind each command, loaded when that command is given."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from typing import NoReturn

from hermes.cli.command import Argument, Work, add_command, command_of, flag
from hermes.cli.streams import plain_streams
from hermes.core.errors import HermesError

# command: what it does. Its module, `hermes.cli.<command>_command`, is loaded when the command is given.
COMMANDS = {
    "chat": "chat in this terminal (the default)",
    "acp": "run as the agent of an editor (Agent Client Protocol)",
    "approvals": "list and remove commands and hosts that need no approval",
    "cluster": "try several servers on this machine, with PostgreSQL and NATS",
    "completion": "print a completion script for a shell",
    "config": "show and change settings",
    "cron": "schedule jobs",
    "doctor": "check for problems and suggest fixes",
    "gateway": "run and control the server",
    "install": "list and install optional parts",
    "logs": "show the logs",
    "mcp": "manage MCP servers, or run Hermes as one",
    "memory": "show, edit and reset the memory",
    "migrate": "move all data to another database",
    "model": "show, choose and install models",
    "profile": "create, choose and remove profiles",
    "runs": "list, follow, stop and steer runs",
    "sessions": "list, search, export and delete conversations",
    "setup": "choose model, tools, sandbox and the server's key",
    "skills": "manage skills: instructions that the agent can follow",
    "status": "show a summary: model, server, runs, jobs, storage",
    "tools": "list tools, enable and disable them, check a command",
    "uninstall": "remove Hermes; your data stays unless you give --data",
    "update": "install the newest version of Hermes",
    "usage": "show tokens and costs by day, model or session",
    "version": "show the version, home, store, sandbox and runtime",
}
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


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
COMMON_OPTIONS = (
    Argument("-p", "--profile", metavar="NAME", help="use this profile"),
    flag("--json", help="print one JSON document and nothing else"),
    flag("--quiet", help="print nothing but the result"),
    flag("--no-color", help="print without colours"),
    flag("--debug", help="show the log, and a traceback of errors"),
)
# Options of a conversation, also behind `chat`.
_TALK = (
    Argument("-m", "--model", metavar="NAME", help="use this model"),
    Argument("--provider", metavar="ID", help="use this provider"),
    Argument("-t", "--toolsets", metavar="LIST", help="offer only these toolsets, separated by commas"),
    Argument("-s", "--skills", metavar="LIST", help="load these skills, separated by commas"),
    Argument("-r", "--resume", metavar="ID_OR_TITLE", help="continue this session"),
    Argument(
        "-c",
        "--continue",
        metavar="NAME",
        nargs="?",
        const="",
        dest="go_on",
        help="continue the newest session of this folder, or the newest of this name",
    ),
    Argument("--sandbox", choices=("auto", "local", "bubblewrap", "docker"), help="run commands in this sandbox"),
    flag("--yolo", help="ask for no approvals"),
    flag("--safe-mode", help="without config.yaml, project file, memory, skills and MCP servers"),
    Argument("--max-turns", metavar="N", type=_count, help="at most N model calls per turn"),
    Argument("--image", metavar="PATH", action="append", help="attach this image; may be repeated"),
    flag("--no-save", help="store nothing of this conversation: no session, memory, skill, job or file"),
    Argument("--server", metavar="URL", help="use the agent of this server, with the key in HERMES_API_KEY"),
)
# Of these, what an editor does not decide, behind `acp`.
_EDITOR = [option for option in _TALK if not {"--resume", "--continue", "--image"} & set(option.names)]
_ONESHOT = (
    Argument("-z", "--oneshot", metavar="PROMPT", help="answer one question and exit; - reads it from stdin"),
    flag("--events", help="with -z: print the run's log as JSON lines"),
    Argument("--deadline", metavar="SECONDS", type=_seconds, help="with -z: give up after this time"),
    Argument(
        "--usage-file", metavar="PATH", help="with -z: write tokens, time and exit code to this file, however it ends"
    ),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sentence = f"{message[:1].upper()}{message[1:]}."
        _complain(HermesError(sentence, hint=f"{self.prog} --help"))
        raise SystemExit(EXIT_USAGE)


def main(argv: Sequence[str]) -> int:
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
    place = f"{error.where}: " if error.where else ""
    print(f"hermes: {place}{error.message}", file=sys.stderr)
    if error.hint:
        print(f"Try: {error.hint}", file=sys.stderr)


def _trace(argv: Sequence[str]) -> None:
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
    if args.oneshot is not None and not args.version:
        from hermes.cli import oneshot

        return oneshot.run(args, home)
    if args.version or args.command is None:
        name = "version" if args.version else "chat"
        _load(name)
        return command_of(name)(args, home) or 0
    work: Work = args.work
    return work(args, home) or 0


def _load(name: str) -> None:
    import_module(f"hermes.cli.{name}_command")


def _parse(argv: list[str]) -> argparse.Namespace:
    common = _Parser(prog="hermes", add_help=False, allow_abbrev=False)
    _add(common, COMMON_OPTIONS)
    # What follows `--args` belongs to another program.
    end = argv.index("--args") if "--args" in argv else len(argv)
    everywhere, own = common.parse_known_args(argv[:end])
    own = _spelled_out(own)
    wanted = next((word for word in own if word in COMMANDS), "")
    args = parser_with({wanted}).parse_args(own + argv[end:])
    vars(args).update(vars(everywhere))
    return args


def _spelled_out(argv: list[str]) -> list[str]:
    """`hermes help …` and `hermes "a question"` as what they stand for."""
    options = _Parser(prog="hermes", add_help=False, allow_abbrev=False)
    _add(options, (*_ONESHOT, *_TALK))
    unknown = options.parse_known_args(argv)[1]
    positionals = [word for word in unknown if not word.startswith("-")]
    first = positionals[0] if positionals else ""
    if first == "help":
        return [*positionals[1:], "--help"]
    if not first or first in COMMANDS:
        return argv
    if not (" " in first.strip() or first.endswith("?")):  # more likely a command that was mistyped
        from hermes.cli.output import UsageError, near

        if unknown[0] in ("-h", "--help", "-V", "--version"):
            return argv
        if unknown[0] != first:
            raise UsageError(f"There is no option '{unknown[0]}'.", hint="hermes --help")
        message = f"There is no command '{first}'.{near(first, COMMANDS)}"
        raise UsageError(message, hint=f'hermes --help, or to ask a question: hermes -z "{" ".join(positionals)}"')
    at = argv.index(first)
    return [*argv[:at], "chat", "--query", *argv[at:]]


def parser_with(wanted: Collection[str]) -> argparse.ArgumentParser:
    """The parser of everything, with what these commands take."""
    parser = _Parser(
        prog="hermes",
        usage="hermes [OPTION…] [COMMAND …]",
        description="A self-hosted AI agent that speaks OpenAI's protocols.",
        epilog="`hermes COMMAND --help` shows help for a command; `hermes` alone is `hermes chat`. "
        '`hermes "a question"` answers it and exits.',
    )
    parser.add_argument(
        "-V", "--version", action="store_true", help="print version, home, profile, Python, store, sandbox, llama.cpp"
    )
    _add(parser, (*COMMON_OPTIONS, *_ONESHOT, *_TALK))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog="hermes")
    for name, about in COMMANDS.items():
        below = commands.add_parser(name, help=about, description=f"{about[:1].upper()}{about[1:]}.")
        if name in ("chat", "acp"):  # what was said before the command stands unless it is said again
            options = _TALK if name == "chat" else _EDITOR
            _add(below, [option.but(default=argparse.SUPPRESS) for option in options])
        if name in wanted:
            _load(name)
            add_command(below, name)
    return parser


def _add(parser: argparse.ArgumentParser, options: Iterable[Argument]) -> None:
    for option in options:
        option.add_to(parser)
