"""What a sandbox shows of the machine: the folders it is given, and within them what it must not read or change."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hermes.guards.path_lists import APART, RULES, Rule, below
from hermes.home import Home, make_private_folder
from hermes.sandbox.base import SandboxError

Mode = Literal["rw", "ro", "hide"]


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file at its own path. `within` is the writable mount around it, where it could be swapped for a link."""

    path: str
    mode: Mode
    within: str = ""

    @property
    def is_dir(self) -> bool:
        return os.path.isdir(self.path)

    def open(self) -> int:
        """A descriptor of just what was looked at: no link on the way is followed."""
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.within or "/", flags | os.O_DIRECTORY)
        try:
            for name in os.path.relpath(self.path, self.within or "/").split("/"):
                inner = os.open(name, flags, dir_fd=fd)
                os.close(fd)
                fd = inner
                if stat.S_ISLNK(os.fstat(fd).st_mode):
                    raise SandboxError(f"{self.path} has become a link.")
        except BaseException:
            os.close(fd)
            raise
        return fd


@dataclass(frozen=True, slots=True)
class Place:
    """What the commands of one session work with. `private` is their HOME in a sandbox, and kept between commands."""

    home: Home
    workspace: Path
    private: Path
    uploads: Path | None = None
    ro: tuple[Path, ...] = ()
    rw: tuple[Path, ...] = ()
    git_writable: bool = False
    network: bool = False
    memory_mb: int = 5120
    cpus: float = 1.0
    user_home: Path = field(default_factory=lambda: Path(os.path.expanduser("~")))
    env: Mapping[str, str] = field(default_factory=dict)

    def missing_controls(self) -> list[str]:
        """What would lead a repository to other hooks and settings, and is not there to be mounted. Blocks."""
        roots = [] if self.git_writable else [self.workspace, *self.rw]
        paths = [f"{root}/.git/commondir" for root in roots if os.path.isdir(f"{root}/.git")]
        return [path for path in paths if not os.path.lexists(path)]


def plan(place: Place) -> list[Mount]:
    """Every mount, outer ones first. What the path guard refuses is hidden, or read-only where only writing is refused.

    Rules for any folder are held to at the top of each mount; looking for their names everywhere would take too long.
    """
    make_private_folder(place.private)
    workspace, private = _real(place.workspace), _real(place.private)
    roots: dict[str, Mode] = {_real(path): "ro" for path in place.ro}
    roots |= {_real(path): "rw" for path in place.rw}
    own: dict[str, Mode] = {private: "rw", **({_real(place.uploads): "ro"} if place.uploads else {})}
    own |= {workspace: "rw"} if below(workspace, _real(place.home.workspace)) else {}
    roots |= {workspace: "rw", **own}
    roots = {path: mode for path, mode in roots.items() if os.path.exists(path)}
    if workspace == "/" or workspace not in roots:
        raise SandboxError(f"{workspace} cannot be the workspace of a sandbox.", hint="another folder")
    roots.pop("/", None)
    for git in [f"{root}/.git" for root, mode in roots.items() if mode == "rw" and not place.git_writable]:
        with contextlib.suppress(OSError):
            if not os.path.islink(git):
                os.mkdir(f"{git}/hooks")  # what is not there could not be mounted, and so could be made
    mounts: dict[str, Mount] = {}
    for path, mode in _refused(place, list(roots)):
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
    hidden = {path for path, mount in mounts.items() if mount.mode == "hide"}
    for path, around in [(mount.path, mount.within) for mount in mounts.values()]:
        if hidden.intersection(_between(around, path)):
            del mounts[path]
    mounts |= {path: Mount(path, mode) for path, mode in roots.items()}
    return sorted(mounts.values(), key=lambda mount: mount.path)


@contextlib.contextmanager
def trial() -> Iterator[Place]:
    """A place to try a sandbox in, with something of every kind."""
    with tempfile.TemporaryDirectory(prefix="hermes-probe-") as folder:
        base = Path(_real(folder))
        (base / "work/.git/hooks").mkdir(parents=True)
        (base / "work/.git/config").touch()
        (base / "work/.env").touch()
        yield Place(Home(base / "home"), base / "work", base / "home/sandbox/probe/home")


def _refused(place: Place, roots: list[str]) -> Iterator[tuple[str, Mode]]:
    """Real paths of what there is to be refused, the Hermes home first."""
    ours = [place.home.root, *(place.home.path / area for area in APART)]
    yield from ((_real(path), "hide") for path in ours if path.exists())
    for rule in RULES:
        if rule.base == "hermes" or (rule.name == "git_control" and place.git_writable):
            continue
        mode: Mode = "hide" if "r" in rule.modes else "ro"
        for base in {"/": ["/"], "~": [str(place.user_home)], "any": roots}[rule.base]:
            yield from ((_real(path), mode) for path in _matches(base, rule))


def _matches(base: str, rule: Rule) -> Iterator[str]:
    free = [os.path.join(base, name) for name in rule.free]
    for entry in rule.entries:
        found = glob.glob(os.path.join(glob.escape(base), entry.removeprefix("=")))
        yield from (path for path in found if path not in free and not (entry[0] == "=" and os.path.isdir(path)))


def _between(outer: str, inner: str) -> Iterator[str]:
    above = os.path.dirname(inner)
    while above != outer:
        yield above
        above = os.path.dirname(above)


def _real(path: str | Path) -> str:
    return os.path.realpath(path)
