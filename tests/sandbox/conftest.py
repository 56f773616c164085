"""Sandboxes of every kind that works here, each with a workspace of its own."""

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hermes.core.home import Home
from hermes.sandbox import bubblewrap, docker
from hermes.sandbox.base import Process, Sandbox
from hermes.sandbox.bubblewrap import Bubblewrap
from hermes.sandbox.docker import Docker
from hermes.sandbox.local import Local
from hermes.sandbox.mounts import Place

PATH = "/usr/local/bin:/usr/bin:/bin"
_NAMESPACES = ["unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--mount-proc"]


@dataclass
class Result:
    """Result of a command."""

    code: int
    output: str
    ended_by: str
    bytes: int


async def finished(process: Process) -> Result:
    """Read a command to its end; only the last part of long output is kept."""
    tail, count = b"", 0
    async with process:
        async for chunk in process.chunks():
            count += len(chunk)
            tail = (tail + chunk)[-100_000:]
        code = await process.wait()
    return Result(code, tail.decode(errors="replace"), process.ended_by, count)


async def sh(sandbox: Sandbox, script: str, **options: Any) -> Result:
    """Run a script to its end."""
    return await finished(await sandbox.spawn(["/bin/sh", "-c", script], **options))


def running(mark: str) -> list[str]:
    """The processes of this machine whose arguments hold a text."""
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.append(pid)
    return pids


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """The folders of a server: its workspace is in the Hermes home, beside secrets."""
    home = Home(tmp_path / "hermes")
    workspace = home.workspace
    (workspace / "scopes/other").mkdir(parents=True)
    (home.path / ".env").write_text("KEY=planted-secret")
    private = home.sandbox / "s1" / "home"
    env = {"PATH": PATH, "HOME": str(private)}
    return Place(home, workspace, private, user_home=tmp_path / "user", env=env)


@pytest.fixture
def fake_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A `docker` that records how it is called and runs commands in real namespaces; the folder of its records."""
    if (
        shutil.which("unshare") is None
        or subprocess.run([*_NAMESPACES, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no namespaces of processes can be made here, and the stand-in for docker needs them")
    folder = tmp_path / "docker"
    folder.mkdir()
    program = folder / "docker"
    script = Path(__file__).with_name("fake_docker.py")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {script} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    docker.probe.cache_clear()
    yield folder
    docker.probe.cache_clear()


Maker = Callable[..., Sandbox]


@pytest.fixture(params=["local", "bubblewrap", "docker"])
async def make(request: pytest.FixtureRequest, place: Place) -> AsyncIterator[Maker]:
    """Creates sandboxes of each kind; arguments override fields of `place`."""
    sandboxes: list[Sandbox] = []
    if request.param == "bubblewrap":
        needs_bubblewrap()
    if request.param == "docker":
        request.getfixturevalue("fake_docker")

    def making(**changes: Any) -> Sandbox:
        where = replace(place, **changes)
        kinds: Mapping[str, Callable[[], Sandbox]] = {
            "local": lambda: Local(where),
            "bubblewrap": lambda: Bubblewrap(where),
            "docker": lambda: Docker(where, "image", "s1"),
        }
        sandboxes.append(kinds[request.param]())
        return sandboxes[-1]

    yield making
    for sandbox in sandboxes:
        await sandbox.stop()


@pytest.fixture
def sandbox(make: Maker) -> Sandbox:
    """A sandbox of each kind."""
    return make()


def needs_bubblewrap() -> None:
    """Skip where bubblewrap cannot work, and say why."""
    if failure := bubblewrap.probe():
        pytest.skip(f"bubblewrap does not work here: {failure}")


@pytest.fixture
async def wrapped(place: Place) -> AsyncIterator[Callable[..., Sandbox]]:
    """Makes sandboxes of bubblewrap."""
    needs_bubblewrap()
    sandboxes: list[Sandbox] = []

    def making(**changes: Any) -> Sandbox:
        sandboxes.append(Bubblewrap(replace(place, **changes)))
        return sandboxes[-1]

    yield making
    for sandbox in sandboxes:
        await sandbox.stop()
