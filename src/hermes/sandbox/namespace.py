"""The namespaces of one sandbox: started through bubblewrap, held by `init.py`, and entered by every command."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

from hermes.core.json_types import JsonMapping
from hermes.core.limits import SANDBOX_START_S_MAX
from hermes.sandbox.base import ChildProcess, Command, Parts, SandboxError, launch, wait_readable

_INIT = Path(__file__).with_name("init.py")
# Its namespaces are new; its root is still the host's, for `init.py` to take from it what is shown. Without
# --die-with-parent: bubblewrap killed before its child has begun leaves that waiting for ever. `init.py` ends with the
# control socket instead.
_OPTIONS = (
    "--unshare-user --unshare-pid --unshare-ipc --unshare-uts --unshare-cgroup-try --unshare-net "
    "--new-session --as-pid-1 --cap-add ALL --dev-bind / / --chdir /"
)
_PACKET_BYTES = 4096
_ARGUMENT_BYTES_MAX = 128 * 1024  # the system's own bound for a single one
Data = JsonMapping  # a JSON object for `init.py`


def bwrap_argv(control: int, info: int) -> list[str]:
    bwrap = shutil.which("bwrap") or "bwrap"
    python = os.path.realpath(sys.executable)
    return [bwrap, *_OPTIONS.split(), "--info-fd", str(info), "--", python, "-I", "-S", str(_INIT), str(control)]


class Namespace:
    def __init__(self, bwrap: ChildProcess, output: FileIO, control: socket.socket, pid: int) -> None:
        self._bwrap, self._output, self._control = bwrap, output, control
        self._numbers = itertools.count(1)
        self._starting: dict[int, asyncio.Future[RemoteProcess]] = {}
        self._running: dict[int, RemoteProcess] = {}
        self.pid = pid
        self.listener: socket.socket | None = None
        self.alive = True

    @classmethod
    async def create(cls, plan: Data, enter: Callable[[int], None] = lambda _: None) -> Namespace:
        """Build the file system of the plan. `enter` gets the id of the first process before that does anything."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        info_read, info_write = _keep_open_pipe()
        try:
            fds = [theirs.fileno(), info_write]
            bwrap, output = launch(bwrap_argv(*fds), env={}, cwd="/", pass_fds=fds)
        except BaseException:
            control.close()
            os.close(info_read)
            raise
        finally:
            theirs.close()
            os.close(info_write)
        assert isinstance(bwrap, ChildProcess)
        namespace = cls(bwrap, output, control, 0)
        try:
            async with asyncio.timeout(SANDBOX_START_S_MAX):
                namespace.pid = await _child_pid(info_read)
                enter(namespace.pid)
                with _memory_file(plan) as fd:
                    await namespace._send(b"{}", [fd])
                await wait_readable(control.fileno())
                data, fds, _, _ = socket.recv_fds(control, _PACKET_BYTES, 1)
                answer = json.loads(data)
                if "error" in answer:
                    raise SandboxError(f"The sandbox could not be built: {answer['error']}.", hint="hermes doctor")
                namespace.listener = socket.socket(fileno=fds[0])
        except (OSError, ValueError, KeyError, IndexError) as error:  # a TimeoutError is one of these
            reason = namespace._last_output() or (
                "it did not answer" if isinstance(error, TimeoutError) else str(error)
            )
            namespace.close()
            raise SandboxError(f"bubblewrap did not start: {reason}", hint="hermes doctor") from None
        except BaseException:
            namespace.close()
            raise
        finally:
            os.close(info_read)
        asyncio.get_running_loop().add_reader(control, namespace._read_messages)
        return namespace

    async def spawn(self, request: Data, command: Command) -> tuple[Parts, RemoteProcess]:
        ours, theirs = os.pipe()
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.set_blocking(ours, False)
        output = os.fdopen(ours, "rb", buffering=0)
        try:
            child = await self._start(request, command, null, theirs, theirs)
        except BaseException:
            output.close()
            raise
        finally:
            _close(theirs, null)
        return (child, output), child

    async def spawn_with_pipes(self, request: Data, command: Command) -> tuple[RemoteProcess, int, int, int]:
        """Start a program; returns it with descriptors of its input, output and errors."""
        pipes = [os.pipe() for _ in range(3)]
        (input_read, input_write), (output_read, output_write), (errors_read, errors_write) = pipes
        try:
            child = await self._start(request, command, input_read, output_write, errors_write)
        except BaseException:
            _close(input_write, output_read, errors_read)
            raise
        finally:
            _close(input_read, output_write, errors_write)
        return child, input_write, output_read, errors_read

    async def _start(self, request: Data, command: Command, stdin: int, stdout: int, stderr: int) -> RemoteProcess:
        if any(len(os.fsencode(text)) >= _ARGUMENT_BYTES_MAX for text in (*command.argv, *command.env.values())):
            raise SandboxError("The command cannot be started: Argument list too long.")
        number = next(self._numbers)
        answer: asyncio.Future[RemoteProcess] = asyncio.get_running_loop().create_future()
        self._starting[number] = answer
        try:
            fields = {"argv": list(command.argv), "cwd": command.cwd, "env": dict(command.env)}
            with _memory_file({**request, **fields}) as fd:
                await self._send(json.dumps({"id": number}).encode(), [fd, stdin, stdout, stderr])
            async with asyncio.timeout(SANDBOX_START_S_MAX):
                return await answer
        except (OSError, ValueError) as error:  # a TimeoutError is one of these
            raise SandboxError(f"The command could not be started: {error}", hint="hermes doctor") from None
        finally:
            self._starting.pop(number, None)

    async def _send(self, data: bytes, fds: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self._control, [data], fds)
            except BlockingIOError:  # many start at once
                await asyncio.sleep(0.001)
            else:
                return

    def signal(self, number: int, signal_number: int) -> None:
        with contextlib.suppress(OSError):
            self._control.send(json.dumps({"id": number, "signal": signal_number}).encode())

    def close(self) -> None:
        if self._control.fileno() >= 0:
            with contextlib.suppress(RuntimeError, ValueError):
                asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
        self.alive = False
        if self.listener is not None:
            self.listener.close()
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self._bwrap.pid}/task/{self._bwrap.pid}/children").read_text().split()
            for pid in children:
                os.kill(int(pid), signal.SIGKILL)
        self._bwrap.kill()
        self._bwrap.wait()
        self._output.close()
        for answer in self._starting.values():
            if not answer.done():
                answer.set_exception(SandboxError("The sandbox has ended."))
        while self._running:
            self._running.popitem()[1].ended(137)

    def _read_messages(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self.close()
                return
            message = json.loads(data)
            number = message["id"]
            if "code" in message:
                child = self._running.pop(number, None)
                if child is not None:
                    child.ended(message["code"])
                continue
            answer = self._starting.get(number)
            if answer is None or answer.done():  # nobody waits for it any more
                _close(*fds)
                self.signal(number, signal.SIGKILL)
            elif "error" in message:
                answer.set_exception(SandboxError(message["error"]))
            else:
                # Known at once: that it has ended may be the next answer.
                self._running[number] = child = RemoteProcess(self, number, fds[0])
                answer.set_result(child)

    def _last_output(self) -> str:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._bwrap.wait(0.5)
        output = (self._output.read(4096) or b"").decode(errors="replace").strip()[-500:]
        return output or (f"it ended with code {code}" if code else "")


class RemoteProcess:
    """A command's first process, which is a child of `init.py`. Its exit code comes from there."""

    def __init__(self, namespace: Namespace, number: int, pidfd: int) -> None:
        self._namespace, self._number, self._pidfd = namespace, number, pidfd
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.pid = _pid_of(pidfd)

    def ended(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)

    async def exited(self) -> int:
        return await asyncio.shield(self._code)

    def poll(self) -> int | None:
        return self._code.result() if self._code.done() else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; its exit code is known a moment later."""
        if self._pidfd >= 0:
            select.select([self._pidfd], [], [], timeout)
        return self.poll() or 0

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            if self._pidfd >= 0 and number == signal.SIGKILL:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            elif self._pidfd >= 0:
                self._namespace.signal(self._number, number)

    def release(self) -> None:
        _close(self._pidfd)
        self._pidfd = -1


def _pid_of(pidfd: int) -> int:
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    return -1


def _keep_open_pipe() -> tuple[int, int]:
    """A pipe whose writer can also read: bubblewrap can write to it, and start its child, after this process has
    died."""
    read, write = os.pipe()
    try:
        return read, os.open(f"/proc/self/fd/{write}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(write)


async def _child_pid(fd: int) -> int:
    os.set_blocking(fd, False)
    text, data = b"", b"-"
    while data:
        await wait_readable(fd)
        data = os.read(fd, 4096)
        text += data
    return int(json.loads(text)["child-pid"])


@contextlib.contextmanager
def _memory_file(content: Data) -> Iterator[int]:
    fd = os.memfd_create("request")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(json.dumps(content).encode())
        yield fd
    finally:
        os.close(fd)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
