"""`hermes config`: look at the settings, change them, check them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from hermes.cli.command import Args, Argument, command
from hermes.cli.output import note, settings_of, tell
from hermes.core.errors import ConfigError
from hermes.core.home import Home
from hermes.core.json_types import JsonObject
from hermes.settings import config
from hermes.settings.keys import ANY, KEYS, Key, at, find

_NEW_FILE = b"# Settings of Hermes. All of them, with their values: hermes config show\n"


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# ---- looking


def _rows(settings: config.Settings, section: str = "") -> Iterator[JsonObject]:
    for name, _, value in settings.items():
        if not section or name.startswith(f"{section}."):
            yield {"key": name, "value": settings.shown(name), "source": value.source, "where": value.where}


def _line(row: JsonObject) -> str:
    origins = {"file": row["where"], ".env": row["where"], "environment": f"environment {row['where']}"}
    return f"{row['key']} = {_as_text(row['value'])}  ({origins.get(row['source'], row['source'])})"


@command("config show", help="show all settings with their sources; secrets are masked")
def _show(args: Args, home: Home) -> int:
    settings = settings_of(args, home)
    rows = list(_rows(settings))
    document = {"profile": home.profile, "home": str(home.path), "settings": rows}
    tell(args, document, *map(_line, rows))
    if settings.problems:
        note(f"There are {len(settings.problems)} problems. Try: hermes config check")
    return 0


@command("config get", Argument("key", metavar="KEY"), help="print one setting or section")
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


@command(
    "config describe",
    Argument("key", metavar="KEY", nargs="?", default="", help="a setting or a section; without one all"),
    help="describe settings: purpose, values, default",
)
def _describe(args: Args, home: Home) -> int:
    section = at(tuple(args.key.split("."))) if args.key else {}
    # The section `model` may be given as one value, and `find` takes it for that.
    keys = _keys_below(args.key) if isinstance(section, dict) else [find(args.key)[0]]
    rows = [
        {
            "key": key.name,
            "description": key.mark.text,
            "type": key.expected,
            "default": key.default,
            "follows": key.mark.follows or None,
            "choices": list(key.choices),
            "variable": key.env or None,
            "secret": key.mark.secret,
        }
        for key in keys
    ]
    lines = _described(rows[0]) if len(rows) == 1 else [f"{row['key']}: {row['description']}" for row in rows]
    tell(args, {"settings": rows}, *lines)
    return 0


def _keys_below(section: str) -> list[Key]:
    names = section.split(".") if section else []
    return [key for key in KEYS if all(own in (name, ANY) for own, name in zip(key.path, names, strict=False))]


def _described(row: JsonObject) -> list[str]:
    default = f"that of {row['follows']}" if row["follows"] else _as_text(row["default"]) or "none"
    lines = [row["key"], f"  {row['description']}", f"  value: {row['type']}", f"  default: {default}"]
    if row["variable"]:
        lines.append(f"  environment: {row['variable']}")
    return [*lines, "  secret: stored in .env, never shown"] if row["secret"] else lines


# ---- changing


@command(
    "config set",
    Argument("key", metavar="KEY"),
    Argument("value", metavar="VALUE", help="the value; '-' reads it from standard input"),
    help="check and write one setting; secrets go to .env",
)
def _set(args: Args, home: Home) -> int:
    from hermes.services.settings import doubtful_values

    value = sys.stdin.readline().rstrip("\r\n") if args.value == "-" else args.value
    written = config.set_value(home, args.key, value)
    settings = config.load(home)
    document = {"key": written.key, "value": settings.shown(written.key), "file": str(written.file)}
    variable = f" as {written.variable}" if written.variable else ""
    tell(args, document | {"variable": written.variable or None}, f"{written.key} is in {written.file}{variable}.")
    origin = settings.origin(written.key)
    stronger = ("environment",) if written.variable else ("environment", ".env")
    if origin.source in stronger:
        note(f"{written.key} is still taken from {origin.where}, which comes first.")
    note(*(problem.message for problem in doubtful_values(settings) if problem.key == written.key))
    return 0


@command("config unset", Argument("key", metavar="KEY"), help="remove one setting")
def _unset(args: Args, home: Home) -> int:
    files = [str(removed.file) for removed in config.unset_value(home, args.key)]
    tell(args, {"key": args.key, "files": files}, *(f"{args.key} is gone from {file}." for file in files))
    if not files:
        note(f"{args.key} was not set.")
    return 0


# ---- the files


@command("config path", help="print the path of config.yaml")
def _path(args: Args, home: Home) -> None:
    tell(args, {"path": str(home.config_file)}, str(home.config_file))


@command("config env-path", help="print the path of .env")
def _env_path(args: Args, home: Home) -> None:
    tell(args, {"path": str(home.env_file)}, str(home.env_file))


@command("config check", help="check for unknown names, wrong types, and addresses and names that do not exist")
def _check(args: Args, home: Home) -> int:
    from hermes.services.settings import doubtful_values

    try:
        settings = config.load(home)
        problems = (*settings.problems, *doubtful_values(settings))
    except ConfigError as error:
        problems = (config.Problem("error", "", None, error.message, where=error.where, hint=error.hint),)
    document = {"ok": not problems, "problems": [asdict(problem) for problem in problems]}
    tell(args, document, *(_problem_line(problem) for problem in problems))
    if not problems and not getattr(args, "json", False):
        print("The settings are in order.")
    return 1 if problems else 0


def _problem_line(problem: config.Problem) -> str:
    remedy = f" Try: {problem.hint}" if problem.hint else ""
    return f"{problem.severity}: {problem}{remedy}"


@command("config edit", help="open config.yaml in $VISUAL or $EDITOR")
def _edit(args: Args, home: Home) -> int:
    from hermes.cli.editor import edit
    from hermes.settings.files import parse_yaml

    def check(draft: Path) -> None:
        parse_yaml(draft.read_bytes(), home.config_file)

    saved = edit(home.config_file, _NEW_FILE, check)
    tell(args, {"path": str(home.config_file), "saved": saved}, "Saved." if saved else "Nothing was changed.")
    note(*map(_problem_line, config.load(home).problems))
    return 0
