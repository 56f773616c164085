"""Control groups: what a group bounds for all its processes together, and what is left of it afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hermes.sandbox import cgroup
from hermes.sandbox.cgroup import Group
from support.waiting import DEADLINE_S, until_blocking


@pytest.fixture
def group() -> Iterator[Group]:
    group = cgroup.create("a test/of mine", 64, 0.5, 20)
    if group is None:
        pytest.skip("control groups cannot be written here")
    yield group
    until_blocking(group.remove)  # the last process leaves it a moment after it has ended


@contextmanager
def running_in(group: Group, script: str) -> Iterator[subprocess.Popen[str]]:
    """A shell script that waits until it is in the group; afterwards all of it is killed."""
    argv = ["/bin/sh", "-c", f"read go; {script}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            group.add(process.pid)
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_memory_limit_is_shared_by_all_processes(group: Group) -> None:
    if "memory" not in group.bounds:
        pytest.skip("no memory controller")
    half = "exec python3 -c 'x = bytearray(40 << 20); print(len(x), flush=True); input()'"
    with running_in(group, half) as one:
        assert said(one)
        with running_in(group, half) as two:
            killed = one if said(two) else two
            assert killed.wait(DEADLINE_S) == -signal.SIGKILL


def test_process_limit(group: Group) -> None:
    if "pids" not in group.bounds:
        pytest.skip("no pids controller")
    with running_in(group, "for i in $(seq 40); do sleep 600 & done; echo all") as process:
        assert "fork" in said(process)


def test_cpu_quota_is_set(group: Group) -> None:
    if "cpu" not in group.bounds:
        pytest.skip("no cpu controller")
    [value] = [
        text
        for folder in group._folders
        for name in ("cpu.max", "cpu.cfs_quota_us")
        if (folder / name).exists() and (text := (folder / name).read_text().split()[0])
    ]
    assert value == "50000"


def test_cgroup_with_process_is_not_removed(group: Group) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        group.add(process.pid)
        assert not group.remove()
        process.kill()


def test_cgroup_v2_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "service" / "server"
    own.mkdir(parents=True)
    (own.parent / "cgroup.subtree_control").write_text("pids")
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "_own_paths", lambda: {"": "service/server"})
    group = cgroup.create("s1", 100, 1.5, 7)
    assert group is not None and group.bounds == {"memory", "cpu", "pids"}
    [folder] = [path for path in own.parent.iterdir() if path.name.startswith(f"hermes-{os.getpid()}-")]
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "memory.max": str(100 * 1024**2),
        "cpu.max": "150000 100000",
        "pids.max": "7",
    }


def test_unwritable_cgroup_means_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path / "missing")
    assert cgroup.create("s1", 100, 1, 10) is None


def test_sweep_removes_cgroups_of_dead_processes_only(group: Group) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    folders = [folder.parent / f"hermes-{process.pid}-1-old" for folder in group._folders]
    for folder in folders:
        folder.mkdir()
    cgroup.sweep()
    assert not any(folder.exists() for folder in folders)
    assert all(folder.exists() for folder in group._folders)
