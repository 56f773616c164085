"""`hermes profile`: several homes side by side."""

from __future__ import annotations

import sys

from hermes.cli.command import Args, Argument, command, flag
from hermes.cli.output import UsageError, asked, note, tell
from hermes.core import home
from hermes.core.errors import ConfigError
from hermes.core.home import Home
from hermes.settings import config, profiles


@command("profile list", help="list profiles; the current one is marked")
def _list(args: Args, current: Home) -> int:
    sticky = home.sticky_profile(current.root)
    profiles = [home.open_profile(current.root, name) for name in home.list_profiles(current)]
    rows = [
        {"name": p.profile, "path": str(p.path), "current": p.profile == current.profile, "sticky": p.profile == sticky}
        for p in profiles
    ]
    lines = [f"{'*' if row['current'] else ' '} {row['name']}  {row['path']}" for row in rows]
    tell(args, {"profiles": rows}, *lines)
    return 0


@command(
    "profile create",
    Argument("name", metavar="NAME"),
    flag("--clone", help="with the settings, memory and skills of this profile"),
    flag("--with-secrets", help="with --clone: its secrets too"),
    help="create a profile",
)
def _create(args: Args, current: Home) -> int:
    if args.with_secrets and not args.clone:
        hint = f"hermes profile create {args.name} --clone --with-secrets"
        raise UsageError("--with-secrets copies from a profile.", hint=hint)
    profile = profiles.create_profile(current, args.name, clone=args.clone, with_secrets=args.with_secrets)
    document = {
        "name": profile.profile,
        "path": str(profile.path),
        "cloned_from": current.profile if args.clone else None,
    }
    tell(args, document, f"The profile '{profile.profile}' is in {profile.path}.")
    note(f"Try: hermes -p {profile.profile} setup")
    return 0


@command("profile use", Argument("name", metavar="NAME"), help="make this the current profile")
def _use(args: Args, current: Home) -> int:
    home.use_profile(current, args.name)
    tell(args, {"name": args.name}, f"The profile is now '{args.name}'.")
    return 0


@command(
    "profile show",
    Argument("name", metavar="NAME", nargs="?", help="the current one, if left out"),
    help="show what a profile contains",
)
def _show(args: Args, current: Home) -> int:
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
    tell(args, document, *(f"{name}: {_as_text(value)}" for name, value in document.items()))
    return 0


def _model(profile: Home) -> str | None:
    try:
        return config.load(profile).model.default
    except ConfigError as error:
        note(str(error))
        return None


def _as_text(value: object) -> str:
    labels = {True: "yes", False: "no", None: "none"}
    return labels[value] if value is None or isinstance(value, bool) else str(value)


@command(
    "profile rename",
    Argument("name", metavar="NAME"),
    Argument("new_name", metavar="NEW_NAME"),
    help="rename a profile",
)
def _rename(args: Args, current: Home) -> int:
    renamed = profiles.rename_profile(current, args.name, args.new_name)
    document = {"name": renamed.profile, "path": str(renamed.path), "was": args.name}
    tell(args, document, f"The profile '{args.name}' is now '{renamed.profile}'.")
    return 0


@command(
    "profile delete",
    Argument("name", metavar="NAME"),
    flag("-y", "--yes", help="do not ask for the name"),
    help="remove a profile with everything in it",
)
def _delete(args: Args, current: Home) -> int:
    profile = home.open_profile(current.root, args.name)
    if not args.yes:
        if not sys.stdin.isatty():
            raise UsageError(f"Deleting '{args.name}' must be confirmed.", hint=f"hermes profile delete {args.name} -y")
        note(f"All sessions, memory and settings in {profile.path} will be gone.")
        if asked("Type the name to go on: ") != args.name:
            note("That is not the name; nothing was deleted.")
            return 1
    profiles.delete_profile(current, args.name)
    tell(args, {"name": args.name, "deleted": True}, f"The profile '{args.name}' is gone.")
    return 0
