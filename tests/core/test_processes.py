"""Process identity: alive, ended, or another process with the same pid; and parsing of holder names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hermes.core import processes
from hermes.core.processes import host_of, is_alive, is_gone, process_start, this_process

HOST = host_of(this_process())
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="this system does not tell starts")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until the test ends it."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def holder(pid: int, start: float | None, host: str = HOST) -> str:
    return f"{host}:{pid}:{'' if start is None else start}"


@needs_proc
def test_process_start_is_stable(child: subprocess.Popen[bytes]) -> None:
    ours, theirs = process_start(os.getpid()), process_start(child.pid)
    assert ours is not None and theirs is not None
    assert 0 <= ours <= theirs
    assert process_start(child.pid) == theirs


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**70])
def test_impossible_pid_is_not_alive(pid: int) -> None:
    assert process_start(pid) is None
    assert not is_alive(pid, None)


def test_process_is_alive_until_it_ends(child: subprocess.Popen[bytes]) -> None:
    start = process_start(child.pid)
    before = is_alive(child.pid, start)
    child.kill()
    child.wait()
    assert (before, is_alive(child.pid, start)) == (True, False)


@needs_proc
def test_zombie_is_not_alive(child: subprocess.Popen[bytes]) -> None:
    start = process_start(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(child.pid, start)


@needs_proc
def test_same_pid_with_other_start_is_another_process() -> None:
    start = process_start(os.getpid())
    assert start is not None
    assert [is_alive(os.getpid(), at) for at in (start, start - 1, start + 0.01)] == [True, False, False]


def test_is_alive_without_start_uses_pid_only() -> None:
    assert is_alive(os.getpid(), None)


def test_process_of_other_user_is_alive() -> None:
    assert is_alive(1, process_start(1))


@needs_proc
def test_brackets_in_process_name_do_not_break_start() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b') Z 1 (', 0, 0, 0); print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    ours, theirs = process_start(os.getpid()), process_start(process.pid)
    alive = is_alive(process.pid, theirs)
    process.communicate(b"\n")
    assert ours is not None and theirs is not None and theirs >= ours and alive


def test_own_process_name_is_stable_and_alive() -> None:
    name = this_process()
    assert name == this_process()
    assert name.startswith(f"{HOST}:{os.getpid()}:")
    assert not is_gone(name)


def test_name_of_ended_process_is_gone() -> None:
    code = "from hermes.core.processes import this_process; print(this_process(), flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    before = is_gone(name)
    process.communicate("\n")
    assert name != this_process()
    assert (before, is_gone(name)) == (False, True)


@needs_proc
def test_name_with_reused_pid_is_gone() -> None:
    assert is_gone(holder(os.getpid(), 0.01))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "worker-1",
        f"{HOST}:",
        f"{HOST}:0:1.00",
        f"{HOST}:-1:1.00",
        f"{HOST}:99999999:x",
        f"{HOST}:99999999",
        f"{HOST}:99999999:1.00:more",
        f"{HOST}:99999999:1.00\n",
        "elsewhere:99999999:1.00",
        ":99999999:1.00",
    ],
)
def test_unknown_text_or_other_host_is_not_gone(text: str) -> None:
    assert not is_gone(text)


def test_name_with_unused_pid_is_gone() -> None:
    assert is_gone(holder(99999999, 1.0))
    assert is_gone(holder(99999999, None))


def test_machine_with_same_host_name_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pids mean other processes: nothing is concluded from them. The same is true of a container."""
    dead = holder(999999, 1.0)
    assert processes.is_gone(dead)
    monkeypatch.setattr(processes, "_machine", lambda: "@0123456789ab")
    processes._holder.cache_clear()
    try:
        own = processes.this_process()
        assert processes.host_of(own) == f"{os.uname().nodename}@0123456789ab"
        assert not processes.is_gone(own) and not processes.is_gone(dead)
        assert processes.is_gone(f"{processes.host_of(own)}:999999:1.00")
        assert not processes.is_gone(f"{os.uname().nodename}@ffffffffffff:999999:1.00")
    finally:
        processes._holder.cache_clear()
