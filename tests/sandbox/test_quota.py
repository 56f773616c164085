"""Disk use: when a sandbox is over its quota, what becomes of its commands, and how spill files stay bounded."""

from __future__ import annotations

import asyncio
import os
from collections import namedtuple
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hermes.sandbox import quota as quota_module
from hermes.sandbox.base import SandboxError
from hermes.sandbox.quota import DiskQuota, disk_use, trim_spills, write_spill
from support.waiting import DEADLINE_S, until

MB = 1024**2


def fill(path: Path, megabytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, megabytes * MB)


class Watched:
    """A quota, with a command that it may stop."""

    def __init__(self, quota: DiskQuota) -> None:
        self.quota = quota
        self.stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        self.quota.started(self, lambda reason: self.stopped.done() or self.stopped.set_result(reason))

    async def end(self) -> None:
        """The command ends, and the last look is over."""
        self.quota.ended(self)
        await until(lambda: self.quota._watcher is None)


@pytest.fixture
async def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(quota_module.limits, "DISK_LOOK_S", 0.02)
    monkeypatch.setattr(quota_module.limits, "DISK_MEASURED_S", 0.0)
    (tmp_path / "own").mkdir()
    fill(tmp_path / "shared" / "old", 30)
    watched = Watched(DiskQuota(20, [tmp_path / "own"], [tmp_path / "shared"]))
    yield watched
    await watched.quota.close()


@pytest.mark.parametrize("folder", ["own", "shared"])
async def test_command_over_disk_quota_is_stopped(watched: Watched, tmp_path: Path, folder: str) -> None:
    watched.start()
    await watched.end()  # what was there before is measured by now
    await watched.quota.check()
    watched.start()
    fill(tmp_path / folder / "deep" / "file", 25)
    async with asyncio.timeout(DEADLINE_S):
        reason = await watched.stopped
    assert "its quota is 20 MB" in reason
    await watched.end()


async def test_commands_over_disk_quota_are_rejected_until_files_are_deleted(watched: Watched, tmp_path: Path) -> None:
    watched.start()
    fill(tmp_path / "own" / "file", 25)
    await watched.end()  # a command that is over at once is looked at as well
    with pytest.raises(SandboxError, match=r"uses 2\d MB .* quota is 20 MB"):
        await watched.quota.check()
    (tmp_path / "own" / "file").unlink()
    await watched.quota.check()


async def test_existing_content_of_shared_folders_is_not_counted(watched: Watched) -> None:
    watched.start()
    await watched.end()
    await watched.quota.check()
    assert not watched.stopped.done()


async def test_full_disk_stops_commands(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = namedtuple("stats", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda _: stats(100 * MB, 1))
    watched.start()
    async with asyncio.timeout(DEADLINE_S):
        assert "only 100 MB left" in await watched.stopped


async def test_disk_use_is_not_measured_again_while_free_space_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    free = [10_000 * MB]
    stats = namedtuple("stats", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda _: stats(free[0], 1))
    monkeypatch.setattr(quota_module, "disk_use", lambda folders: measured.append(folders) or 0)
    watched = Watched(DiskQuota(1000, [tmp_path]))
    for _ in range(3):
        watched.start()
        await watched.end()
    assert len(measured) == 2, "once, for each kind of folder"
    free[0] -= 600 * MB
    watched.start()
    await watched.end()
    assert len(measured) == 4


async def test_disk_quota_zero_means_none(tmp_path: Path) -> None:
    watched = Watched(DiskQuota(0, [tmp_path]))
    watched.start()
    assert watched.quota._watcher is None
    await watched.quota.check()


def test_disk_use_counts_each_file_once_and_follows_no_link(tmp_path: Path) -> None:
    fill(tmp_path / "in" / "a", 4)
    fill(tmp_path / "out" / "b", 8)
    os.link(tmp_path / "in" / "a", tmp_path / "in" / "c")
    os.symlink(tmp_path / "out", tmp_path / "in" / "link")
    used = disk_use([tmp_path / "in", tmp_path / "missing"])
    assert used is not None and 4 * MB <= used < 5 * MB


# ---- spill files


def test_oldest_spill_files_are_removed_first(tmp_path: Path) -> None:
    for age, name in enumerate(["r1/a", "r1/b", "r2/a", "r3/a"]):
        fill(tmp_path / name, 4)
        os.utime(tmp_path / name, (1000 + age, 1000 + age))
    assert trim_spills(tmp_path, 9 * MB) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r2", "r3"]
    assert trim_spills(tmp_path, 0, keep=tmp_path / "r2" / "a") == 1
    assert (tmp_path / "r2" / "a").exists()


def test_spill_folder_stays_within_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_module.limits, "SPILL_BYTES_MAX", 200_000)
    monkeypatch.setattr(quota_module.limits, "SPILL_TRIM_BYTES", 50_000)
    fill(tmp_path / "left-by-an-earlier-process" / "a", 1)
    for number in range(40):
        write_spill(tmp_path / f"run{number % 4}" / f"{number}.txt", b"x" * 20_000)
        used = disk_use([tmp_path])
        assert used is not None and used < 350_000
    assert (tmp_path / "run3" / "39.txt").exists() and not (tmp_path / "run0" / "0.txt").exists()
