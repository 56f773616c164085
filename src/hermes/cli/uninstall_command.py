"""`hermes uninstall`: the service and the program are removed; what is stored stays, unless its removal is asked for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hermes.cli import service
from hermes.cli.command import YES, Args, command, flag
from hermes.cli.install_command import run
from hermes.cli.output import Busy, Refused, confirmed, tell
from hermes.core.formatting import size
from hermes.core.home import Home, is_served, list_profiles, open_profile, own_entries
from hermes.core.installation import installation


@command("uninstall", flag("--data", help="also remove conversations, settings, keys and models, of all profiles"), YES)
def uninstall(args: Args, home: Home) -> int:
    here, root = installation(), home.root
    profiles = [open_profile(root, name) for name in list_profiles(home)]
    services = [unit for one in profiles if (unit := service.of(one)).file.exists()]
    program = here.remove()
    remove = [f"the service {unit.file}" for unit in services]
    remove += [f"the program: {' '.join(program)}"] if program else []
    keep = [] if program else [f"the checkout {here.source}, which is yours to delete"]
    data = own_entries(root) if root.is_dir() else []
    if data and args.data:
        names = ", ".join(path.name for path in data)
        remove.append(f"what is stored in {root}, {size(_bytes(data))}: {names}")
    elif data:
        keep.append(f"what is stored in {root} (`--data` removes it)")
    about = [*(f"Removes {one}." for one in remove), *(f"Keeps {one}." for one in keep)]
    if not remove:
        tell(args, {"removed": [], "kept": keep}, *about, "There is nothing to remove.")
        return 0
    if not confirmed(args, "Removing Hermes", *about):
        return Refused.exit_code
    for unit in services:
        unit.uninstall()
    if busy := [one.profile for one in profiles if is_served(one)]:
        raise Busy(f"A server is running in the profile {busy[0]}.", hint=f"hermes -p {busy[0]} gateway stop")
    for path in data if args.data else ():
        _remove(path)
    if args.data and root.is_dir() and not any(root.iterdir()):
        root.rmdir()
    if program:
        run(program)
    tell(args, {"removed": remove, "kept": keep}, *(f"Removed {one}." for one in remove))
    return 0


def _bytes(paths: list[Path]) -> int:
    files = [path for path in paths if not path.is_dir() or path.is_symlink()]
    inside = [Path(place, name) for path in paths for place, _, names in os.walk(path) for name in names]
    return sum(path.lstat().st_size for path in (*files, *inside))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
