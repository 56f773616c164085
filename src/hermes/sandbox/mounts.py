"""The mounts of a sandbox: the folders it shows, and within them what it must not read or change."""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hermes.core.home import Home, make_private_folder
from hermes.guards.path_lists import APART, RULES, Rule, below
from hermes.sandbox.base import SandboxError

Mode = Literal["rw", "ro", "hide"]


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file at its own path. `within` is the root that holds it; a root has none."""

    path: str
    mode: Mode
    within: str = ""

    @property
    def is_dir(self) -> bool:
        return os.path.isdir(self.path)


@dataclass(frozen=True, slots=True)
class Place:
    """Folders, limits and environment of the commands of one session. `private` is their HOME in a sandbox, and kept
    between commands. Workspace, `ro` and `rw` are real paths and not resolved again."""

    home: Home
    workspace: Path
    private: Path
    uploads: Path | None = None
    ro: tuple[Path, ...] = ()
    rw: tuple[Path, ...] = ()
    granted: tuple[Path, ...] = ()
    network: bool = False
    memory_mb: int = 5120
    cpus: float = 1.0
    disk_quota_mb: int = 0
    # Paths within `ro` that are not shown.
    hidden: tuple[str, ...] = ()
    user_home: Path = field(default_factory=lambda: Path(os.path.expanduser("~")))
    env: Mapping[str, str] = field(default_factory=dict)

    def is_granted(self, path: str) -> bool:
        return any(below(path, str(folder)) for folder in self.granted)


def writable_roots(place: Place) -> list[str]:
    roots = [str(path) for path in (place.workspace, *place.rw)]
    return [path for path in roots if path != "/" and os.path.isdir(path) and _real(path) == path]


def reserved_paths(place: Place) -> list[str]:
    """Credentials and start files of the user that lie in a writable root; most may not exist."""
    home, roots = _real(place.user_home), writable_roots(place)
    entries = [entry for rule in RULES if rule.base == "~" and "w" in rule.modes for entry in rule.entries]
    return [f"{home}/{entry}" for entry in entries if any(below(home, root) for root in roots)]


def resolve_root(path: str | Path, writable: Sequence[str]) -> str | None:
    """The real path of a root; None where a link lies in a folder that commands write to, and so could lead
    anywhere."""
    folder, names, links = "/", [name for name in os.path.abspath(path).split("/") if name], 0
    while names:
        name = names.pop(0)
        entry = os.path.normpath(os.path.join(folder, name))
        try:
            target = os.readlink(entry)
        except OSError:
            folder = entry
            continue
        links += 1
        if links > 40 or any(below(folder, root) for root in writable):
            return None
        names = [part for part in target.split("/") if part] + names
        folder = "/" if target.startswith("/") else folder
    return folder


def plan_mounts(place: Place, covers: Mapping[str, Mode] | None = None) -> list[Mount]:
    """Every mount, outer ones first. What the path guard refuses is hidden, or read-only where only writing is refused.
    `covers` come from a scan of the workspace; rules for any folder apply to the top of each root."""
    make_private_folder(place.private)
    workspace, private = str(place.workspace), _real(place.private)
    roots: dict[str, Mode] = {str(path): "ro" for path in place.ro}
    roots |= {str(path): "rw" for path in place.rw}
    own: dict[str, Mode] = {private: "rw", **({_real(place.uploads): "ro"} if place.uploads else {})}
    own |= {workspace: "rw"} if below(workspace, _real(place.home.workspace)) else {}
    roots |= {workspace: "rw", **own}
    # What has become a link since it was resolved is not followed.
    roots = {path: mode for path, mode in roots.items() if os.path.exists(path) and _real(path) == path}
    if workspace == "/" or workspace not in roots:
        raise SandboxError(f"{workspace} cannot be the workspace of a sandbox.", hint="another folder")
    roots.pop("/", None)
    mounts: dict[str, Mount] = {}
    for path, mode in _refused_paths(place, list(roots)):
        for root in [root for root in roots if root not in own and below(root, path)]:
            if mode == "ro":
                roots[root] = "ro"
            elif root == workspace:
                raise SandboxError(f"{path} is not for commands, and so is no workspace.", hint="another folder")
            else:
                del roots[root]
        around = max((root for root in roots if root != path and below(path, root)), key=len, default="")
        if around and not (mode == roots[around] == "ro") and path not in roots:
            if mounts.get(path, Mount(path, "ro")).mode != "hide":
                mounts[path] = Mount(path, mode, around)
            if roots[around] == "rw":
                # A mount cannot be renamed: so what lies in it stays where its rule finds it again.
                for above in _between(around, path):
                    mounts.setdefault(above, Mount(above, "rw", around))
    for path, mode in (covers or {}).items():
        around = max((root for root in roots if root != path and below(path, root)), key=len, default="")
        if around and roots[around] == "rw" and path not in roots:
            mounts.setdefault(path, Mount(path, mode, around))
    hidden = {path for path, mount in mounts.items() if mount.mode == "hide"}
    for path, around in [(mount.path, mount.within) for mount in mounts.values()]:
        if hidden.intersection(_between(around, path)):
            del mounts[path]
    mounts |= {path: Mount(path, mode) for path, mode in roots.items()}
    return sorted(mounts.values(), key=lambda mount: mount.path)


@contextlib.contextmanager
def trial_place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="hermes-probe-") as folder:
        base = Path(_real(folder))
        (base / "work/.git").mkdir(parents=True)
        (base / "work/.env").touch()
        yield Place(Home(base / "home"), base / "work", base / "home/sandbox/probe/home")


def _refused_paths(place: Place, roots: list[str]) -> Iterator[tuple[str, Mode]]:
    yield from ((path, "hide") for path in place.hidden)
    ours = [place.home.root, *(place.home.path / area for area in APART)]
    yield from ((_real(path), "hide") for path in ours if path.exists())
    for rule in RULES:
        if rule.base == "hermes" or rule.name == "git_control":
            continue
        mode: Mode = "hide" if "r" in rule.modes else "ro"
        for base in {"/": ["/"], "~": [str(place.user_home)], "any": roots}[rule.base]:
            yield from ((_real(path), mode) for path in _matches(base, rule))


def _matches(base: str, rule: Rule) -> Iterator[str]:
    free = [os.path.join(base, name) for name in rule.free]
    for entry in rule.entries:
        name = entry.removeprefix("=")
        if "*" in name:
            paths = glob.glob(os.path.join(glob.escape(base), name))
        else:
            path = os.path.join(base, name)
            paths = [path] if os.path.lexists(path) else []
        yield from (path for path in paths if path not in free and not (entry[0] == "=" and os.path.isdir(path)))


def _between(outer: str, inner: str) -> Iterator[str]:
    above = os.path.dirname(inner)
    while above != outer:
        yield above
        above = os.path.dirname(above)


def _real(path: str | Path) -> str:
    return os.path.realpath(path)
