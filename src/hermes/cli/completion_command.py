"""`hermes completion`: what a shell needs to complete commands, made from the parsers themselves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from shlex import quote
from typing import NamedTuple

from hermes.cli.command import Args, Argument, command
from hermes.core.home import Home


class Place(NamedTuple):
    """A command as far as it is written: the options and words that may follow, and the values of options."""

    options: list[str]
    below: list[str]
    values: dict[str, list[str]]


Places = Mapping[str, Place]


@command(
    "completion",
    Argument("shell", choices=("bash", "fish", "zsh"), help="the shell; add the output to its startup file"),
)
def completion(args: Args, home: Home) -> None:
    from hermes.cli.main import COMMANDS, COMMON_OPTIONS, parser_with

    everywhere = [name for option in COMMON_OPTIONS for name in option.names]
    print(_SHELLS[args.shell](dict(_places("hermes", parser_with(COMMANDS), everywhere))))


def _places(path: str, parser: argparse.ArgumentParser, everywhere: list[str]) -> Iterator[tuple[str, Place]]:
    """Every command and action that there is, with what it takes."""
    place, subparsers = Place([], [], {}), dict[str, argparse.ArgumentParser]()
    for action in parser._actions:
        choices = [str(choice) for choice in action.choices or ()]
        place.options.extend(action.option_strings)
        place.values.update({option: choices for option in action.option_strings if choices})
        place.below.extend([] if action.option_strings else choices)
        subparsers |= action.choices if isinstance(action, argparse._SubParsersAction) else {}
    place.options.extend(name for name in everywhere if name not in place.options)
    yield path, place
    for name, below in subparsers.items():
        yield from _places(f"{path} {name}", below, everywhere)


def _cases(places: Places) -> tuple[str, str, str]:
    """Branches of a `case`: the paths there are, what may follow each, and what may follow an option."""
    known = "|".join(quote(path) for path in places if " " in path)
    completions = {path: [*place.below, *place.options] for path, place in places.items()}
    values = {f"{path} {option}": choices for path, place in places.items() for option, choices in place.values.items()}
    after, behind = ("\n".join(f"    {quote(path)}) reply={quote(' '.join(choices))} ;;" for path, choices in table.items())
                     for table in (completions, values))  # fmt: skip
    return known, after, behind


def _script(places: Places, before: str, last: str, end: str, bind: str) -> str:
    known, after, behind = _cases(places)
    return f"""_hermes() {{
  local at=hermes word reply=
  for word in {before}; do
    case "$at $word" in {known}) at="$at $word" ;; esac
  done
  case "$at" in
{after}
  esac
  case "$at {last}" in
{behind}
  esac
  {end}
}}
{bind}"""


def _bash(places: Places) -> str:
    end = 'COMPREPLY=($(compgen -W "$reply" -- "${COMP_WORDS[COMP_CWORD]}"))'
    bind, last = "complete -o default -F _hermes hermes", "${COMP_WORDS[COMP_CWORD-1]}"
    return _script(places, '"${COMP_WORDS[@]:1:COMP_CWORD-1}"', last, end, bind)


def _zsh(places: Places) -> str:
    end, bind = "compadd -- ${=reply} || _files", "compdef _hermes hermes"
    return "#compdef hermes\n" + _script(places, '"${words[@]:1:CURRENT-2}"', "${words[CURRENT-1]}", end, bind)


def _fish(places: Places) -> str:
    known = " ".join(quote(path) for path in places if " " in path)
    lines = [f"""function __hermes_at
  set -l at hermes
  for word in (commandline -opc)[2..-1]
    contains -- "$at $word" {known}; and set at "$at $word"
  end
  test "$at" = "$argv[1]"
end"""]  # fmt: skip
    for path, place in places.items():
        line = f"complete -c hermes -n '__hermes_at \"{path}\"'"
        lines += [f"{line} -a {quote(' '.join(place.below))}"] if place.below else []
        for option in place.options:
            kind = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            values = f" -x -a {quote(' '.join(place.values[option]))}" if option in place.values else ""
            lines.append(f"{line} {kind}{values}")
    return "\n".join(lines)


_SHELLS = {"bash": _bash, "fish": _fish, "zsh": _zsh}
