"""`hermes` started by forking a process that has imported it: its imports cost more processor time than most tests.

A test process has one such process, which it starts when first needed. What that forks becomes a child of the test process,
which waits for it and signals it as if it had started it itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
from typing import Any

# What chats and servers import sooner or later.
_MODULES = (
    *("hermes.app", "hermes.agent.loop", "hermes.agent.turn_start", "hermes.agent.turn_end"),
    *(
        "hermes.cli.acp.agent",
        "hermes.cli.main",
        "hermes.cli.chat_command",
        "hermes.cli.chat_loop",
        "hermes.cli.prompt_line",
    ),
    *("hermes.server.runner", "hermes.server.application", "prompt_toolkit.patch_stdout", "uvloop", "yaml"),
)
_COMMAND = [sys.executable, "-m", "hermes"]
_ENVIRON = dict(os.environ)
_REQUEST_BYTES_MAX = 128 * 1024
_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_libc = ctypes.CDLL(None, use_errno=True)


class HermesProcess(subprocess.Popen[Any]):
    """A process that is forked where it is `python -m hermes`; anything else is executed. One at a terminal that
    begins a session gets it as its own."""

    def _execute_child(  # type: ignore[override]
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        startupinfo: Any,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: Any,
        gids: Any,
        uid: Any,
        umask: int,
        start_new_session: bool,
        process_group: int,
    ) -> None:
        argv, environ = list(args), dict(os.environ if env is None else env)
        # What steers the start of Python has no effect on one that runs already.
        is_plain = all(_ENVIRON.get(name) == value for name, value in environ.items() if name.startswith("PYTHON"))
        if argv[:3] != _COMMAND or not is_plain or preexec_fn is not None or pass_fds or process_group != -1:
            super()._execute_child(  # type: ignore[misc]
                *(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell),
                *(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask),
                *(start_new_session, process_group),
            )
            return
        request = {
            "words": argv[3:],
            "cwd": os.path.abspath(cwd or "."),
            "env": environ,
            "session": start_new_session,
        }
        stdio = [own if fd == -1 else fd for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = _preloaded().fork(request, stdio)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


class _Preloaded:
    """Client of the forking process, used in the test process."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_ENVIRON, cwd="/"
        )
        theirs.close()
        atexit.register(self._end)

    def _end(self) -> None:
        self._control.close()
        self._process.wait()

    def fork(self, request: dict[str, Any], stdio: list[int]) -> int:
        with self._lock, _adopting():
            socket.send_fds(self._control, [json.dumps(request).encode()], stdio)
            pid = int(self._control.recv(64))
            assert self._control.recv(64) == b"done"
        return pid


_preloaded = functools.cache(_Preloaded)


@contextlib.contextmanager
def _adopting() -> Any:
    """Make orphaned descendants children of this process (subreaper)."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# ---- in the process that forks


def _serve(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for every request. In a forked process: the request, and its descriptors; None once there is no more."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, _REQUEST_BYTES_MAX, 3)
        if not data:
            return None
        # The process in between ends at once, which makes its child one of the test process.
        between = os.fork()
        if between == 0:
            if (pid := os.fork()) == 0:
                control.close()
                return json.loads(data), fds
            control.send(str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        control.send(b"done")
        for fd in fds:
            os.close(fd)


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Set up session, descriptors, folder and environment like an executed process."""
    if request["session"]:
        os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    if request["session"] and os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8")  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _text_output(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text_output(2, "backslashreplace")  # type: ignore[misc]
    sys.argv = [importlib.import_module("hermes.__main__").__file__ or "", *request["words"]]


def _text_output(fd: int, errors: str) -> io.TextIOWrapper:
    lines = fd == 2 or os.isatty(fd)
    return io.TextIOWrapper(open(fd, "wb"), encoding="utf-8", errors=errors, line_buffering=lines)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _MODULES:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a thread would be missing in what is forked"
    gc.collect()
    gc.freeze()
    if (started := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _become(*started)
        importlib.import_module("hermes.cli").entry()


if __name__ == "__main__":
    main()
