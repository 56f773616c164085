"""A bound on the number of processes that holds for root too, whom the system's limit per user passes over."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

from hermes.processes import is_alive

_ROOT = Path("/sys/fs/cgroup")
_NAME = "hermes-"
_numbers = itertools.count(1)


def bounded(pid: int, processes_max: int) -> Path | None:
    """Put a process into a group of its own that may hold so many; None where such a group cannot be made."""
    for parent in _parents():
        group = parent / f"{_NAME}{os.getpid()}-{next(_numbers)}"
        try:
            group.mkdir()
            (group / "pids.max").write_text(str(processes_max))
            (group / "cgroup.procs").write_text(str(pid))
        except OSError:
            removed(group)
            continue
        return group
    return None


def removed(group: Path | None) -> bool:
    """Whether a group could be removed: one that holds a process stays."""
    if group is None:
        return True
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def sweep() -> None:
    """Remove the groups of processes that are no more."""
    for group in (found for parent in _parents() for found in parent.glob(f"{_NAME}*-*")):
        maker = group.name.removeprefix(_NAME).partition("-")[0]
        if maker.isdigit() and not is_alive(int(maker), None):
            removed(group)


def _parents() -> list[Path]:
    """Where a group with a bound can be: the old hierarchy of that name, or beside or below ourselves in the new one."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = {names: path.lstrip("/") for _, names, path in (line.split(":", 2) for line in lines)}
    own = _ROOT / paths.get("", "")
    candidates = [_ROOT / "pids" / paths["pids"]] if "pids" in paths else [own.parent, own]
    return [path for path in candidates if path.is_relative_to(_ROOT)]
