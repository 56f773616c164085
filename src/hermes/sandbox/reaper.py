"""Runs one command and leaves nothing of it behind. A program of its own, started by path: `reaper.py PARENT COMMAND…`

What the command orphans, daemons in sessions of their own included, becomes a child of this process and is killed when
the command ends, when SIGUSR1 says so, or when the parent dies.
"""

import os
import signal
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
AWAITED = {signal.SIGCHLD, signal.SIGUSR1, *_PASSED_ON}
# Python or the parent may have changed these.
_NATURAL = {signal.SIGPIPE, signal.SIGXFSZ, *_PASSED_ON}
_SWEEP_S_MAX = 3.0


def main(parent: int, argv: list[str]) -> int:
    """The command's exit code, as a shell reports it. Signals go to the command's own process group. A caller that
    blocks `AWAITED` may send signals from the first moment on: they wait for the command."""
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    import ctypes  # slow enough for a signal to come in between

    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != parent:
        return 137
    command = os.fork()
    if command == 0:
        _become(argv)
    _group(command)  # here as well: the first signal may go there before the command has come to do it
    while (number := signal.sigwait(AWAITED)) != signal.SIGUSR1:
        if number != signal.SIGCHLD:
            _signal(-command, number)
            continue
        for pid, status in iter(_ended_child, None):
            if pid == command:
                _sweep(command)
                code = os.waitstatus_to_exitcode(status)
                return 128 - code if code < 0 else code
    _sweep(command)
    return 137


def _become(argv: list[str]) -> None:
    _group(0)
    for number in _NATURAL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _group(pid: int) -> None:
    try:
        os.setpgid(pid, pid)
    except OSError:
        return  # it has been done already


def _ended_child() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        return


def _sweep(command: int) -> None:
    """Kill the children, then the orphans they leave to us, until there are none that we may kill."""
    until = time.monotonic() + _SWEEP_S_MAX
    while time.monotonic() < until:
        for pid in _children(command):
            _signal(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _children(command: int) -> list[int]:
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children", "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # not every kernel tells; then the group has to do
        return [-command]


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), sys.argv[2:]))
