"""Control groups (v1 and v2): limits on memory, CPU and processes of a sandbox, also for root, unlike rlimits.

They need a writable hierarchy: as root, or by delegation."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

from hermes.core.processes import is_alive

Controller = Literal["memory", "cpu", "pids"]

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "hermes-"
_PERIOD_US = 100_000
_numbers = itertools.count(1)


class Group:
    """A group for processes. `bounds` are the limits in force; the others have to be set as rlimits. In version 1 it is
    a folder in each hierarchy."""

    def __init__(self, folders: tuple[Path, ...], bounds: frozenset[Controller]) -> None:
        self._folders, self.bounds = folders, bounds

    def add(self, pid: int) -> None:
        """Move a process into the group; its later children inherit it. Raises OSError."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> bool:
        """Whether the group was removed. One that holds a process stays; a process leaves its group a moment after its
        end."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
        return not any(folder.exists() for folder in self._folders)


def create(name: str, memory_mb: int, cpus: float, processes_max: int) -> Group | None:
    """Create a group for one sandbox; None if no limit can be set. `name` is only for people."""
    title = f"{_PREFIX}{os.getpid()}-{next(_numbers)}-{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:64]}"
    memory, quota = str(memory_mb * 1024**2), str(max(1000, round(cpus * _PERIOD_US)))
    v1: dict[Controller, dict[str, str]] = {
        # The second limit counts swap too, and exists only where swap is accounted for.
        "memory": {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
        "cpu": {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": quota},
        "pids": {"pids.max": str(processes_max)},
    }
    v2: dict[Controller, dict[str, str]] = {
        "memory": {"memory.max": memory, "memory.swap.max": "0"},
        "cpu": {"cpu.max": f"{quota} {_PERIOD_US}"},
        "pids": {"pids.max": str(processes_max)},
    }
    paths = _own_paths()
    hierarchies = {controller: _hierarchy(controller, paths) for controller in v1}
    folders: list[Path] = []
    bounds: set[Controller] = set()
    for controller, hierarchy in hierarchies.items():
        for parent in _v1_parents(hierarchy, paths) if hierarchy else ():
            if _bound(parent / title, {controller: v1[controller]}):
                folders.append(parent / title)
                bounds.add(controller)
                break
    unified = {controller: v2[controller] for controller, hierarchy in hierarchies.items() if not hierarchy}
    # A process is in one group of version 2 only, so that group has to hold all that is left.
    for parent in _v2_parents(paths) if unified else ():
        if controllers := _bound(parent / title, unified):
            folders.append(parent / title)
            bounds |= controllers
            break
    return Group(tuple(dict.fromkeys(folders)), frozenset(bounds)) if bounds else None


def sweep() -> None:
    """Remove the groups of dead processes."""
    for group in (group for parent in _parents() for group in parent.glob(f"{_PREFIX}*-*")):
        maker = group.name.removeprefix(_PREFIX).partition("-")[0]
        if maker.isdigit() and not is_alive(int(maker), None):
            Group((group,), frozenset()).remove()


def _bound(folder: Path, limits: Mapping[Controller, Mapping[str, str]]) -> set[Controller]:
    """Create the group, and set the limits that can be set; without any it is removed again."""
    bounded: set[Controller] = set()
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        for controller, files in limits.items():
            if _limited(folder, controller, files):
                bounded.add(controller)
        if not bounded:
            folder.rmdir()
    return bounded


def _limited(folder: Path, controller: Controller, files: Mapping[str, str]) -> bool:
    subtree, (required, *_) = folder.parent / "cgroup.subtree_control", files
    try:
        if subtree.exists() and controller not in subtree.read_text().split():
            subtree.write_text(f"+{controller}")
        for name, value in files.items():
            if name == required or (folder / name).exists():
                (folder / name).write_text(value)
    except OSError:
        return False
    return True


def _hierarchy(controller: Controller, paths: Mapping[str, str]) -> str:
    return next((names for names in paths if controller in names.split(",")), "")


def _own_paths() -> dict[str, str]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    return {names: path.lstrip("/") for _, names, path in (line.split(":", 2) for line in lines)}


def _v1_parents(hierarchy: str, paths: Mapping[str, str]) -> list[Path]:
    root = _ROOT / hierarchy
    return _existing(root / paths[hierarchy], root)


def _v2_parents(paths: Mapping[str, str]) -> list[Path]:
    """Our parent group, or our own: a group that holds processes cannot have limited groups below it, except for the
    root."""
    own = _ROOT / paths.get("", "")
    return _existing(own.parent, own)


def _existing(*candidates: Path) -> list[Path]:
    return [path for path in dict.fromkeys(candidates) if path.is_relative_to(_ROOT) and path.is_dir()]


def _parents() -> Iterator[Path]:
    """The folders that can hold our groups."""
    paths = _own_paths()
    for hierarchy in dict.fromkeys(_hierarchy(controller, paths) for controller in get_args(Controller)):
        yield from _v1_parents(hierarchy, paths) if hierarchy else _v2_parents(paths)
