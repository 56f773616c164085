"""`hermes config`: look at the settings, change them, check them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hermes import config
from hermes.errors import ConfigError, HermesError
from hermes.home import Home, write_private

_NEW_FILE = b"# Settings of Hermes. All of them, with their values: hermes config show\n"
# Global options that stand for a setting during one call.
_FLAGS = {"model": "model.default", "provider": "model.provider", "sandbox": "terminal.backend"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="config_action", required=True, metavar="ACTION")
    actions.add_parser("show", help="all settings, with the source of each; secrets are masked")
    get = actions.add_parser("get", help="one setting, or one section")
    get.add_argument("key", metavar="KEY")
    set_ = actions.add_parser("set", help="check and write one setting; secrets go to .env")
    set_.add_argument("key", metavar="KEY")
    set_.add_argument("value", metavar="VALUE", help="the value; '-' reads it from standard input")
    unset = actions.add_parser("unset", help="take one setting out")
    unset.add_argument("key", metavar="KEY")
    actions.add_parser("path", help="where config.yaml is")
    actions.add_parser("env-path", help="where .env is")
    actions.add_parser("check", help="unknown names, wrong types, unused spellings")
    actions.add_parser("edit", help="open config.yaml in $VISUAL or $EDITOR")


def run(args: argparse.Namespace, home: Home) -> int:
    try:
        return _ACTIONS[args.config_action](args, home)
    except HermesError as error:
        _note(str(error))
        return error.exit_code


def _load(args: argparse.Namespace, home: Home) -> config.Settings:
    flags = {name: getattr(args, flag, None) for flag, name in _FLAGS.items()}
    if getattr(args, "yolo", False):
        flags["approvals.mode"] = "off"
    return config.load(home, flags, safe_mode=bool(getattr(args, "safe_mode", False)))


def _print(args: argparse.Namespace, document: Any, *lines: str) -> None:
    """The result: one JSON document, or lines."""
    if getattr(args, "json", False):
        print(json.dumps(document, ensure_ascii=False, default=str))
    else:
        for line in lines:
            print(line)


def _note(text: str) -> None:
    print(text, file=sys.stderr)


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


def _show(args: argparse.Namespace, home: Home) -> int:
    settings = _load(args, home)
    rows = list(_rows(settings))
    document = {"profile": home.profile, "home": str(home.path), "settings": rows}
    _print(args, document, *map(_line, rows))
    if settings.problems:
        _note(f"There are {len(settings.problems)} problems. Try: hermes config check")
    return 0


def _get(args: argparse.Namespace, home: Home) -> int:
    settings = _load(args, home)
    try:
        origin = settings.origin(args.key)
    except config.UnknownKey:
        settings.section(args.key)
        rows = list(_rows(settings, args.key))
        _print(args, {"key": args.key, "settings": rows}, *map(_line, rows))
        return 0
    value = settings.shown(args.key)
    document = {"key": args.key, "value": value, "source": origin.source, "where": origin.where}
    _print(args, document, _as_text(value))
    return 0


def _path(args: argparse.Namespace, home: Home) -> int:
    _print(args, {"path": str(home.config_file)}, str(home.config_file))
    return 0


def _env_path(args: argparse.Namespace, home: Home) -> int:
    _print(args, {"path": str(home.env_file)}, str(home.env_file))
    return 0


def _check(args: argparse.Namespace, home: Home) -> int:
    try:
        problems = config.load(home).problems
    except ConfigError as error:
        problems = (config.Problem("error", "", None, error.message, where=error.where, hint=error.hint),)
    document = {"ok": not problems, "problems": [asdict(problem) for problem in problems]}
    _print(args, document, *(_told(problem) for problem in problems))
    if not problems and not getattr(args, "json", False):
        print("The settings are in order.")
    return 1 if problems else 0


def _told(problem: config.Problem) -> str:
    remedy = f" Try: {problem.hint}" if problem.hint else ""
    return f"{problem.severity}: {problem}{remedy}"


# ---- changing


def _set(args: argparse.Namespace, home: Home) -> int:
    value = sys.stdin.readline().rstrip("\r\n") if args.value == "-" else args.value
    written = config.set_value(home, args.key, value)
    settings = config.load(home)
    document = {"key": written.key, "value": settings.shown(written.key), "file": str(written.file)}
    kept_as = f" as {written.variable}" if written.variable else ""
    _print(args, document | {"variable": written.variable or None}, f"{written.key} is in {written.file}{kept_as}.")
    origin = settings.origin(written.key)
    outranked = ("environment",) if written.variable else ("environment", ".env")
    if origin.source in outranked:
        _note(f"{written.key} is still taken from {origin.where}, which comes first.")
    return 0


def _unset(args: argparse.Namespace, home: Home) -> int:
    gone = config.unset_value(home, args.key)
    files = [str(written.file) for written in gone]
    _print(args, {"key": args.key, "files": files}, *(f"{args.key} is gone from {file}." for file in files))
    if not gone:
        _note(f"{args.key} was not set.")
    return 0


def _edit(args: argparse.Namespace, home: Home) -> int:
    from hermes.config_files import parse_yaml, read_bytes

    command = _editor()
    if command is None:
        _note("There is no editor. Try: export EDITOR=nano")
        return 2
    before = read_bytes(home.config_file)
    draft = home.path / "config.draft.yaml"
    write_private(draft, before or _NEW_FILE)
    while True:
        if not _run_editor(command, draft):
            draft.unlink(missing_ok=True)
            _note("The editor failed, and nothing was saved.")
            return 1
        try:
            edited = read_bytes(draft)
            parse_yaml(edited, draft)
            break
        except ConfigError as error:
            _note(str(error))
            if not _again():
                _note(f"Nothing was saved. What you wrote is in {_set_aside(draft)}.")
                return error.exit_code
    if read_bytes(home.config_file) != before:
        _note(f"{home.config_file} was changed by somebody else meanwhile. What you wrote is in {_set_aside(draft)}.")
        return 4
    if edited != (before or _NEW_FILE):
        write_private(home.config_file, edited)
    draft.unlink(missing_ok=True)
    saved = edited != (before or _NEW_FILE)
    _print(args, {"path": str(home.config_file), "saved": saved}, "Saved." if saved else "Nothing was changed.")
    for problem in config.load(home).problems:
        _note(_told(problem))
    return 0


def _set_aside(draft: Path) -> Path:
    """Keep a draft under a name that the next edit does not begin with."""
    return draft.replace(draft.with_name("config.rejected.yaml"))


def _editor() -> list[str] | None:
    import shlex
    import shutil

    chosen = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "")
    if chosen:
        return chosen
    return next(([name] for name in ("nano", "vi") if shutil.which(name)), None)


def _run_editor(command: list[str], draft: Path) -> bool:
    import subprocess

    try:
        # The user's own program, chosen by the user, on the user's own terminal.
        return subprocess.run([*command, str(draft)], check=False).returncode == 0  # noqa: S603
    except OSError:
        return False


def _again() -> bool:
    if not sys.stdin.isatty():
        return False
    print("Edit again? [Y/n] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("", "y", "yes")


_ACTIONS: dict[str, Callable[[argparse.Namespace, Home], int]] = {
    "show": _show,
    "get": _get,
    "set": _set,
    "unset": _unset,
    "path": _path,
    "env-path": _env_path,
    "check": _check,
    "edit": _edit,
}
