"""Disk use of sandboxes and spill files: measured periodically, and limited.

There is no file system quota, so a command can overshoot: it is killed within seconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hermes.core import limits
from hermes.core.home import write_private
from hermes.sandbox.base import SandboxError
from hermes.sandbox.mounts import Place

log = logging.getLogger(__name__)
_MB = 1024**2


class DiskQuota:
    """How much the commands of one sandbox may leave on disk. `owned` folders count whole; of `shared` ones only growth
    since the first measurement. While commands run, free space is checked every few seconds (`statvfs`), and the
    folders are measured (`du`) when it has shrunk by enough to matter, or after some minutes. For one event loop."""

    def __init__(self, quota_mb: int, owned: Sequence[Path], shared: Sequence[Path] = ()) -> None:
        """A quota of 0 MB means none."""
        self._quota_bytes, self._owned, self._shared = quota_mb * _MB, tuple(owned), tuple(shared)
        self._running: dict[object, Callable[[str], None]] = {}
        self._ended = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._used_bytes = 0
        self._shared_before: int | None = None
        self._free_then = self._measured_at = 0.0
        self.message = ""

    async def check(self) -> None:
        """Raise SandboxError if no command may be started. Measures only if the last look found too much."""
        if self.message:
            self._measured_at = 0.0
            await asyncio.to_thread(self._look)
        if self.message:
            raise SandboxError(self.message, hint="hermes config set terminal.disk_quota_mb MB")

    def started(self, command: object, stop: Callable[[str], None]) -> None:
        if self._quota_bytes:
            self._running[command] = stop
            if self._watcher is None:
                self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def ended(self, command: object) -> None:
        self._running.pop(command, None)
        if not self._running:
            self._ended.set()

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    async def _watch(self) -> None:
        try:
            while True:
                self._ended.clear()
                was_idle = not self._running
                await asyncio.to_thread(self._look)
                for stop in list(self._running.values()) if self.message else ():
                    stop(self.message)
                if was_idle and not self._running:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(limits.DISK_LOOK_S):
                        await self._ended.wait()
        finally:
            self._watcher = None

    def _look(self) -> None:
        """Measure if need be, and set `message` to what is wrong. Blocks."""
        free = min((_free_bytes(folder) for folder in (*self._owned, *self._shared)), default=float("inf"))
        remaining = max(0, self._quota_bytes - self._used_bytes)
        shrunk = self._free_then - free >= max(limits.DISK_STEP_BYTES, remaining / 2)
        if shrunk or not self._measured_at or time.monotonic() - self._measured_at >= limits.DISK_MEASURED_S:
            self._free_then, self._measured_at = free, time.monotonic()
            self._measure()
        if self._used_bytes > self._quota_bytes:
            used, quota = self._used_bytes // _MB, self._quota_bytes // _MB
            self.message = f"The sandbox uses {used} MB of disk, its quota is {quota} MB. Ask the user to delete files."
        elif free < limits.DISK_FREE_BYTES_MIN:
            self.message = f"The disk has only {int(free) // _MB} MB left. Ask the user to make room."
        else:
            self.message = ""

    def _measure(self) -> None:
        owned, shared = disk_use(self._owned), disk_use(self._shared)
        if owned is None or shared is None:
            log.warning("disk use cannot be measured: %s", ", ".join(map(str, (*self._owned, *self._shared))))
            return
        if self._shared_before is None:
            self._shared_before = shared
        self._used_bytes = owned + max(0, shared - self._shared_before)


def quota_of(place: Place) -> DiskQuota:
    owned, shared = [place.private], list(place.rw)
    is_own = place.workspace.is_relative_to(os.path.realpath(place.home.workspace))
    (owned if is_own else shared).append(place.workspace)
    return DiskQuota(place.disk_quota_mb, owned, shared)


def disk_use(folders: Sequence[Path]) -> int | None:
    """The bytes allocated below these folders, each file once; None if that takes too long. Blocks. Another process
    walks: here the walk would hold up everything else."""
    folders = [folder for folder in folders if folder.is_dir()]
    if not folders:
        return 0
    argv = ["nice", "-n", "19", "du", "-skx", "--", *map(str, folders)]
    env = {"PATH": os.defpath, "LC_ALL": "C"}
    try:
        result = subprocess.run(argv, env=env, capture_output=True, timeout=limits.DISK_MEASURE_S_MAX, check=False)  # noqa: S603
        sizes = [int(line.split(b"\t", 1)[0]) for line in result.stdout.splitlines() if line]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return sum(sizes) * 1024 if sizes else None


def _free_bytes(folder: Path) -> float:
    try:
        status = os.statvfs(folder)
    except OSError:
        return float("inf")
    return status.f_bavail * status.f_frsize


# ---- spill files

_written_bytes: dict[Path, int] = {}
_lock = threading.Lock()


def write_spill(path: Path, data: str | bytes) -> None:
    write_private(path, data)
    note_spill(path, len(data))


def note_spill(path: Path, size: int) -> None:
    """Note that a spill file, `<folder>/<run>/<file>`, was written. Now and then the oldest are removed, to keep the
    folder within its limit. Blocks."""
    folder = path.parent.parent
    with _lock:
        # What an earlier process has left counts too: so the first one looks.
        _written_bytes[folder] = _written_bytes.get(folder, limits.SPILL_TRIM_BYTES) + size
        if _written_bytes[folder] < limits.SPILL_TRIM_BYTES:
            return
        _written_bytes[folder] = 0
    trim_spills(folder, limits.SPILL_BYTES_MAX, keep=path)


def trim_spills(folder: Path, bytes_max: int, keep: Path | None = None) -> int:
    """Remove the oldest spill files but for `keep` until the rest fit; how many were removed. Blocks."""
    files: list[tuple[float, int, Path]] = []
    for run in _entries(folder):
        for path in _entries(run):
            with contextlib.suppress(OSError):
                status = path.stat(follow_symlinks=False)
                files.append((status.st_mtime, status.st_blocks * 512, path))
    excess, removed = sum(size for _, size, _ in files) - bytes_max, 0
    for modified_at, size, path in sorted(files):
        if excess <= 0:
            break
        if path != keep:
            with contextlib.suppress(OSError):
                path.unlink()
                excess, removed = excess - size, removed + 1
            if modified_at < time.time() - limits.SPILL_FOLDER_IDLE_S:  # a run that still writes needs its folder
                with contextlib.suppress(OSError):
                    path.parent.rmdir()
    return removed


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
