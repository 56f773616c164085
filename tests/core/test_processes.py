"""Who a process is: alive, ended, or another one under the same pid; and what can be told of a holder by its text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hermes.core.processes import is_alive, is_gone, process_start, this_process

HOST = os.uname().nodename
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
def test_a_start_stays_the_same_and_lies_between_boot_and_now(child: subprocess.Popen[bytes]) -> None:
    ours, theirs = process_start(os.getpid()), process_start(child.pid)
    assert ours is not None and theirs is not None
    assert 0 <= ours <= theirs
    assert process_start(child.pid) == theirs


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**70])
def test_a_pid_that_nobody_can_have_has_no_start_and_is_not_alive(pid: int) -> None:
    assert process_start(pid) is None
    assert not is_alive(pid, None)


def test_a_process_is_alive_until_it_was_ended(child: subprocess.Popen[bytes]) -> None:
    start = process_start(child.pid)
    before = is_alive(child.pid, start)
    child.kill()
    child.wait()
    assert (before, is_alive(child.pid, start)) == (True, False)


@needs_proc
def test_an_ended_process_that_nobody_has_asked_about_is_not_alive(child: subprocess.Popen[bytes]) -> None:
    start = process_start(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(child.pid, start)


@needs_proc
def test_the_same_pid_with_another_start_is_another_process() -> None:
    start = process_start(os.getpid())
    assert start is not None
    assert [is_alive(os.getpid(), at) for at in (start, start - 1, start + 0.01)] == [True, False, False]


def test_without_a_start_the_pid_alone_decides() -> None:
    assert is_alive(os.getpid(), None)


def test_a_process_of_somebody_else_is_alive() -> None:
    assert is_alive(1, process_start(1))


@needs_proc
def test_a_name_full_of_brackets_does_not_hide_the_start() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b') Z 1 (', 0, 0, 0); print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    ours, theirs = process_start(os.getpid()), process_start(process.pid)
    alive = is_alive(process.pid, theirs)
    process.communicate(b"\n")
    assert ours is not None and theirs is not None and theirs >= ours and alive


def test_this_process_signs_the_same_each_time_and_is_not_gone() -> None:
    name = this_process()
    assert name == this_process()
    assert name.startswith(f"{HOST}:{os.getpid()}:")
    assert not is_gone(name)


def test_another_process_signs_otherwise_and_is_gone_after_its_end() -> None:
    code = "from hermes.core.processes import this_process; print(this_process(), flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    before = is_gone(name)
    process.communicate("\n")
    assert name != this_process()
    assert (before, is_gone(name)) == (False, True)


@needs_proc
def test_a_holder_whose_pid_belongs_to_another_process_now_is_gone() -> None:
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
def test_of_any_other_text_and_of_other_hosts_nothing_is_known(text: str) -> None:
    assert not is_gone(text)


def test_a_pid_that_nobody_has_is_gone_with_and_without_a_start() -> None:
    assert is_gone(holder(99999999, 1.0))
    assert is_gone(holder(99999999, None))
