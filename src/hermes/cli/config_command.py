"""`hermes config`: look at the settings, change them, check them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hermes.cli.actions import Actions, Args, Arguments, command
from hermes.cli.output import note, settings_of, tell
from hermes.core.errors import ConfigError
from hermes.core.home import Home
from hermes.settings import config
from hermes.settings.keys import at

_NEW_FILE = b"# Settings of Hermes. All of them, with their values: hermes config show\n"


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# ---- looking


def _rows(settings: config.Settings, section: str = "") -> Iterator[dict[str, Any]]:
    for name, _, value in settings.items():
        if not section or name.startswith(f"{section}."):
            yield {"key": name, "value": settings.shown(name), "source": value.source, "where": value.where}


def _line(row: dict[str, Any]) -> str:
    origins = {"file": row["where"], ".env": row["where"], "environment": f"environment {row['where']}"}
    return f"{row['key']} = {_as_text(row['value'])}  ({origins.get(row['source'], row['source'])})"


def _show(args: Args, home: Home) -> int:
    settings = settings_of(args, home)
    rows = list(_rows(settings))
    document = {"profile": home.profile, "home": str(home.path), "settings": rows}
    tell(args, document, *map(_line, rows))
    if settings.problems:
        note(f"There are {len(settings.problems)} problems. Try: hermes config check")
    return 0


def _get(args: Args, home: Home) -> int:
    settings = settings_of(args, home)
    try:
        origin = settings.origin(args.key)
    except config.UnknownKey:
        if not isinstance(at(tuple(args.key.split("."))), dict):
            raise
        rows = list(_rows(settings, args.key))
        tell(args, {"key": args.key, "settings": rows}, *map(_line, rows))
        return 0
    value = settings.shown(args.key)
    document = {"key": args.key, "value": value, "source": origin.source, "where": origin.where}
    tell(args, document, _as_text(value))
    return 0


def _path(args: Args, home: Home) -> int:
    tell(args, {"path": str(home.config_file)}, str(home.config_file))
    return 0


def _env_path(args: Args, home: Home) -> int:
    tell(args, {"path": str(home.env_file)}, str(home.env_file))
    return 0


def _check(args: Args, home: Home) -> int:
    try:
        problems = config.load(home).problems
    except ConfigError as error:
        problems = (config.Problem("error", "", None, error.message, where=error.where, hint=error.hint),)
    document = {"ok": not problems, "problems": [asdict(problem) for problem in problems]}
    tell(args, document, *(_told(problem) for problem in problems))
    if not problems and not getattr(args, "json", False):
        print("The settings are in order.")
    return 1 if problems else 0


def _told(problem: config.Problem) -> str:
    remedy = f" Try: {problem.hint}" if problem.hint else ""
    return f"{problem.severity}: {problem}{remedy}"


# ---- changing


def _set(args: Args, home: Home) -> int:
    value = sys.stdin.readline().rstrip("\r\n") if args.value == "-" else args.value
    written = config.set_value(home, args.key, value)
    settings = config.load(home)
    document = {"key": written.key, "value": settings.shown(written.key), "file": str(written.file)}
    kept_as = f" as {written.variable}" if written.variable else ""
    tell(args, document | {"variable": written.variable or None}, f"{written.key} is in {written.file}{kept_as}.")
    origin = settings.origin(written.key)
    outranked = ("environment",) if written.variable else ("environment", ".env")
    if origin.source in outranked:
        note(f"{written.key} is still taken from {origin.where}, which comes first.")
    return 0


def _unset(args: Args, home: Home) -> int:
    gone = config.unset_value(home, args.key)
    files = [str(written.file) for written in gone]
    tell(args, {"key": args.key, "files": files}, *(f"{args.key} is gone from {file}." for file in files))
    if not gone:
        note(f"{args.key} was not set.")
    return 0


def _edit(args: Args, home: Home) -> int:
    from hermes.cli.editor import edit
    from hermes.settings.files import parse_yaml

    def check(draft: Path) -> None:
        parse_yaml(draft.read_bytes(), home.config_file)

    saved = edit(home.config_file, _NEW_FILE, check)
    tell(args, {"path": str(home.config_file), "saved": saved}, "Saved." if saved else "Nothing was changed.")
    note(*map(_told, config.load(home).problems))
    return 0


_ARGUMENTS: Arguments = {
    "key": {"metavar": "KEY"},
    "value": {"metavar": "VALUE", "help": "the value; '-' reads it from standard input"},
}
_ACTIONS: Actions = {
    "show": (_show, "all settings, with the source of each; secrets are masked", ""),
    "get": (_get, "one setting, or one section", "key"),
    "set": (_set, "check and write one setting; secrets go to .env", "key value"),
    "unset": (_unset, "take one setting out", "key"),
    "path": (_path, "where config.yaml is", ""),
    "env-path": (_env_path, "where .env is", ""),
    "check": (_check, "unknown names, wrong types, unused spellings", ""),
    "edit": (_edit, "open config.yaml in $VISUAL or $EDITOR", ""),
}
add_arguments, run = command(_ACTIONS, _ARGUMENTS)
