"""Process identity (host, pid and start time, so that a reused pid is not taken for its first owner), and what ends a process."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from functools import lru_cache

# Zombie and dead states.
_ENDED = (b"Z", b"X", b"x")
# The pids of the machine itself: the kernel gives this number to no container.
_FIRST_PIDS = "pid:[4026531836]"
_HOLDER = re.compile(r"(.+):([1-9][0-9]{0,9}):([0-9]+(?:\.[0-9]+)?)?")


def ending_signals() -> list[signal.Signals]:
    """The signals that ask this process to end. A hangup is none where it is ignored, as nohup does."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if ignored else [signal.SIGHUP])]


def process_start(pid: int) -> float | None:
    """Seconds from boot to the start of the process; None where the system does not tell.

    Relative to boot, it does not depend on the clock.
    """
    fields = _stat(pid)
    return _start(fields) if fields else None


def is_alive(pid: int, start: float | None) -> bool:
    """Whether the process with this pid and start still exists; without a start the pid alone decides."""
    # Zero and below name groups of processes.
    if pid <= 0 or not _exists(pid):
        return False
    fields = _stat(pid)
    if fields is None:
        # Hidden by the system, or ended just now.
        return _exists(pid)
    # Starts are reported in hundredths of a second, rounded.
    return fields[0] not in _ENDED and (start is None or abs(_start(fields) - start) < 0.005)


def booted_at() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def this_process() -> str:
    """This process's identity as a holder: `host:pid:start`, the start empty where it is not known. The host is
    `name@machine` where the machine, or the container with pids of its own, has an id."""
    return _holder(os.getpid())


@lru_cache(maxsize=1)
def _holder(pid: int) -> str:
    start = process_start(pid)
    return f"{_host()}:{pid}:{'' if start is None else format(start, '.2f')}"


def is_gone(holder: str) -> bool:
    """Whether this holder was a process of this host that has ended; other holders are unknown, hence False."""
    if holder == this_process():
        return False
    match = _HOLDER.fullmatch(holder)
    if match is None or match[1] != _host():
        return False
    return not is_alive(int(match[2]), float(match[3]) if match[3] else None)


def host_of(holder: str) -> str:
    return holder.rsplit(":", 2)[0]


def _host() -> str:
    return f"{os.uname().nodename}{_machine()}"


@lru_cache(maxsize=1)
def _machine() -> str:
    """Distinguishes machines, and containers, with the same host name: their pids mean different processes."""
    try:
        pids = os.readlink("/proc/self/ns/pid")
        # That of a machine stays the same when it is started again; containers may share it.
        path = "/etc/machine-id" if pids == _FIRST_PIDS else "/proc/sys/kernel/random/boot_id"
        with open(path, encoding="ascii") as file:
            machine = file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return f"@{hashlib.sha256(f'{machine}{pids}'.encode()).hexdigest()[:12]}" if machine else ""


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the state on: the name before it may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def _start(fields: list[bytes]) -> float:
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
