"""`hermes profile`: several homes side by side."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from hermes import config, home
from hermes.errors import ConfigError, HermesError
from hermes.home import Home


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="profile_action", required=True, metavar="ACTION")
    actions.add_parser("list", help="all profiles; the current one is marked")
    create = actions.add_parser("create", help="make a new profile")
    create.add_argument("name", metavar="NAME")
    create.add_argument("--clone", action="store_true", help="with the settings, memory and skills of this profile")
    create.add_argument("--with-secrets", action="store_true", help="with --clone: its secrets too")
    use = actions.add_parser("use", help="work in this profile from now on")
    use.add_argument("name", metavar="NAME")
    show = actions.add_parser("show", help="what is in a profile")
    show.add_argument("name", metavar="NAME", nargs="?", help="the current one, if left out")
    rename = actions.add_parser("rename", help="give a profile another name")
    rename.add_argument("name", metavar="NAME")
    rename.add_argument("new_name", metavar="NEW_NAME")
    delete = actions.add_parser("delete", help="remove a profile with everything in it")
    delete.add_argument("name", metavar="NAME")
    delete.add_argument("-y", "--yes", action="store_true", help="do not ask for the name")


def run(args: argparse.Namespace, home: Home) -> int:
    try:
        return _ACTIONS[args.profile_action](args, home)
    except HermesError as error:
        _note(str(error))
        return error.exit_code


def _print(args: argparse.Namespace, document: Any, *lines: str) -> None:
    """The result: one JSON document, or lines."""
    if getattr(args, "json", False):
        print(json.dumps(document, ensure_ascii=False))
    else:
        for line in lines:
            print(line)


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _list(args: argparse.Namespace, current: Home) -> int:
    sticky = home.sticky_profile(current.root)
    profiles = [home.open_profile(current.root, name) for name in home.list_profiles(current)]
    rows = [
        {"name": p.profile, "path": str(p.path), "current": p.profile == current.profile, "sticky": p.profile == sticky}
        for p in profiles
    ]
    lines = [f"{'*' if row['current'] else ' '} {row['name']}  {row['path']}" for row in rows]
    _print(args, {"profiles": rows}, *lines)
    return 0


def _create(args: argparse.Namespace, current: Home) -> int:
    if args.with_secrets and not args.clone:
        _note(f"--with-secrets copies from a profile. Try: hermes profile create {args.name} --clone --with-secrets")
        return 2
    made = home.create_profile(current, args.name, clone=args.clone, with_secrets=args.with_secrets)
    document = {"name": made.profile, "path": str(made.path), "cloned_from": current.profile if args.clone else None}
    _print(args, document, f"The profile '{made.profile}' is in {made.path}.")
    _note(f"Try: hermes -p {made.profile} setup")
    return 0


def _use(args: argparse.Namespace, current: Home) -> int:
    home.use_profile(current, args.name)
    _print(args, {"name": args.name}, f"The profile is now '{args.name}'.")
    return 0


def _show(args: argparse.Namespace, current: Home) -> int:
    profile = current if args.name is None else home.open_profile(current.root, args.name)
    document = {
        "name": profile.profile,
        "path": str(profile.path),
        "current": profile.profile == current.profile,
        "sticky": profile.profile == home.sticky_profile(current.root),
        "model": _model(profile),
        "settings": profile.config_file.exists(),
        "secrets": profile.env_file.exists(),
        "skills": sum(1 for _ in profile.skills.glob("**/SKILL.md")),
        "database_bytes": profile.state_db.stat().st_size if profile.state_db.exists() else 0,
        "server_running": home.is_served(profile),
    }
    _print(args, document, *(f"{name}: {_as_text(value)}" for name, value in document.items()))
    return 0


def _model(profile: Home) -> str | None:
    try:
        model = config.load(profile).get("model")
    except ConfigError as error:
        _note(str(error))
        return None
    return None if model is None else str(model)


def _as_text(value: Any) -> str:
    words = {True: "yes", False: "no", None: "none"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _rename(args: argparse.Namespace, current: Home) -> int:
    renamed = home.rename_profile(current, args.name, args.new_name)
    document = {"name": renamed.profile, "path": str(renamed.path), "was": args.name}
    _print(args, document, f"The profile '{args.name}' is now '{renamed.profile}'.")
    return 0


def _delete(args: argparse.Namespace, current: Home) -> int:
    profile = home.open_profile(current.root, args.name)
    if not args.yes:
        if not sys.stdin.isatty():
            _note(f"Deleting '{args.name}' must be confirmed. Try: hermes profile delete {args.name} -y")
            return 2
        question = f"All sessions, memory and settings in {profile.path} will be gone. Type the name to go on: "
        print(question, end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip() != args.name:
            _note("That is not the name; nothing was deleted.")
            return 1
    home.delete_profile(current, args.name)
    _print(args, {"name": args.name, "deleted": True}, f"The profile '{args.name}' is gone.")
    return 0


_ACTIONS: dict[str, Callable[[argparse.Namespace, Home], int]] = {
    "list": _list,
    "create": _create,
    "use": _use,
    "show": _show,
    "rename": _rename,
    "delete": _delete,
}
