"""The interface of every sandbox, and its processes: output, end, and cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from hermes.core.errors import HermesError
from hermes.core.home import make_private_folder, private_opener
from hermes.core.limits import CHUNK_BYTES_MAX as CHUNK_BYTES_MAX

if TYPE_CHECKING:
    from io import FileIO

    from hermes.sandbox.mounts import Mount, Place
    from hermes.sandbox.proxy import EgressProxy
    from hermes.sandbox.quota import DiskQuota
    from hermes.sandbox.watching import Watching

log = logging.getLogger(__name__)
Ended = Literal["exit", "timeout", "interrupted", "killed"]
Parts = tuple["Child", "FileIO"]

# How a command is ended: each signal with the seconds before the next.
LADDER = ((signal.SIGINT, 2.0), (signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0))
# A command that has just started may miss the first signal: its shell loses it, or it is not there yet.
_YOUNG_S, _AGAIN = 0.5, ((signal.SIGINT, 0.2),) * 2
_EXIT_CODES: dict[Ended, int] = {"timeout": 124, "interrupted": 130, "killed": 137}


class SandboxError(HermesError):
    pass


@dataclass(frozen=True, slots=True)
class Command:
    """`call_id` is the tool call whose output a person may watch while it runs; empty for any other command."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    network: bool
    seconds: float | None
    call_id: str = ""


class Child(Protocol):
    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    async def exited(self) -> int:
        pass


class ChildProcess(subprocess.Popen[bytes]):
    async def exited(self) -> int:
        try:
            pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not on every system; a thread can wait everywhere
            code = await asyncio.to_thread(self.wait)
        else:
            try:
                await wait_readable(pidfd)
            finally:
                os.close(pidfd)
            code = self.wait()
        return 128 - code if code < 0 else code


class Handle(Protocol):
    def signal(self, number: int) -> None:
        """Send a signal to the command's whole group; SIGKILL reaches everything the command has started."""

    async def sweep(self) -> None:
        """The command has ended: kill what it left behind, and release its resources."""


class Group:
    """A process group of its own, or a reaper that passes signals on to one."""

    def __init__(self, pid: int, *, reaped: bool = False) -> None:
        self._pid, self._reaped = pid, reaped

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._reaped:
                os.killpg(self._pid, number)
                return
            os.kill(self._pid, signal.SIGUSR1 if number == signal.SIGKILL else number)
            os.kill(self._pid, signal.SIGCONT)

    async def sweep(self) -> None:
        if not self._reaped:
            self.signal(signal.SIGKILL)


class Process:
    """A running or ended command. Use it in `async with`: when that ends, the command has ended. Only the reader of
    `chunks` empties the pipe: a command whose output is not read waits."""

    def __init__(
        self, parts: Parts, handle: Handle, seconds: float | None, on_end: Callable[[Process], None] = lambda _: None
    ) -> None:
        loop = asyncio.get_running_loop()
        self._child, self._output = parts
        self._handle, self._seconds, self._on_end = handle, seconds, on_end
        self._stop: asyncio.Future[Ended] = loop.create_future()
        self._began = loop.time()
        self._hurry: asyncio.Future[None] = loop.create_future()
        self._gone: asyncio.Future[int] = loop.create_future()
        self.pid = self._child.pid
        self.ended_by: Ended = "exit"
        self.reason = ""
        self._task = loop.create_task(self._supervise())
        self._task.add_done_callback(self._finish)

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            data = self._output.read(CHUNK_BYTES_MAX)
            if data:
                yield data
                await asyncio.sleep(0)  # let other tasks run
            elif data == b"" or self._gone.done():  # whatever still holds the pipe is out of reach
                return
            else:
                await wait_readable(self._output.fileno(), self._gone)

    async def wait(self) -> int:
        """The exit code, once everything that the command has started has ended; 124 after a timeout, 130 if
        interrupted."""
        return await asyncio.shield(self._gone)

    def interrupt(self) -> None:
        if not self._stop.done():
            self._stop.set_result("interrupted")

    def kill(self) -> None:
        if not self._stop.done():
            self._stop.set_result("killed")
        if not self._hurry.done():
            self._hurry.set_result(None)

    def end_because(self, reason: str) -> None:
        """Kill the command; `reason` is kept for its answer."""
        self.reason = self.reason or reason
        self.kill()

    def close(self) -> None:
        self._output.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.interrupt()
        try:
            await self.wait()
        finally:
            self.close()

    async def _supervise(self) -> int:
        exited = asyncio.ensure_future(self._child.exited())
        await _first(self._seconds, exited, self._stop)
        if not exited.done():
            self.ended_by = self._stop.result() if self._stop.done() else "timeout"
            await self._end(exited)
        await self._handle.sweep()
        return _EXIT_CODES.get(self.ended_by) or exited.result()

    def _finish(self, task: asyncio.Task[int]) -> None:
        failed = task.cancelled() or task.exception() is not None
        if failed and not task.cancelled():
            log.error("the supervision of process %s has failed", self.pid, exc_info=task.exception())
        if failed and self._child.poll() is None:  # the loop is shut down: nobody else waits for it
            self._handle.signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=LADDER[0][1])
        self._gone.set_result(_EXIT_CODES["killed"] if failed else task.result())
        self._on_end(self)

    async def _end(self, exited: asyncio.Future[int]) -> None:
        young = asyncio.get_running_loop().time() - self._began < _YOUNG_S
        ladder = (*(_AGAIN if young else ()), *LADDER) if self.ended_by == "interrupted" else LADDER[-1:]
        for number, pause in ladder:
            self._handle.signal(number)
            await _first(pause, exited, *([] if number == signal.SIGKILL else [self._hurry]))
            if exited.done():
                return
        log.warning("process %s does not end", self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Sandbox:
    """Where the commands of one session run. An `isolated` one shows nothing of the machine but `mounts`."""

    name: ClassVar[str] = ""
    isolated: ClassVar[bool] = False
    python: str = "python3"

    def __init__(self, place: Place) -> None:
        self.place = place
        # Over the folders that the user and commands share.
        self.watching: Watching | None = None
        self.quota: DiskQuota | None = None
        # How commands reach the network, where they have none of their own.
        self.egress: EgressProxy | None = None
        self._live: set[Process] = set()
        self._starting = 0
        # Clear while no command may start.
        self.may_start = asyncio.Event()
        self.may_start.set()
        # How often all commands were killed, and the last reason: it applies also to those that were about to start.
        self._kills, self._killed_because = 0, ""

    def mounts(self) -> list[Mount]:
        """What an isolated sandbox shows, at the same paths. Blocks."""
        return []

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        network: bool | None = None,
        call_id: str = "",
    ) -> Process:
        """Start a command. Defaults: in the workspace, with the environment and network of the place, without limit."""
        place = self.place
        env, network = place.env if env is None else env, place.network if network is None else network
        command = Command(argv, cwd or str(place.workspace), env, network, seconds, call_id)
        starting = asyncio.ensure_future(self._begin(command))
        try:
            # A start is never cancelled: what has started must be known, to be killed.
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_discard_process)
            raise

    @property
    def is_busy(self) -> bool:
        """Whether a command runs, or is being started."""
        return bool(self._live or self._starting)

    async def _begin(self, command: Command) -> Process:
        if self.quota is not None:
            await self.quota.check()
        kills = self._kills
        while not self.may_start.is_set():
            await self.may_start.wait()
        self._starting += 1
        try:
            process = Process(*await self._start(command), command.seconds, self._ended)
        finally:
            self._starting -= 1
        self._live.add(process)
        if self._kills != kills:
            process.end_because(self._killed_because)
        if self.quota is not None:
            self.quota.started(process, process.end_because)
        return process

    def _ended(self, process: Process) -> None:
        self._live.discard(process)
        if self.quota is not None:
            self.quota.ended(process)

    async def _start(self, command: Command) -> tuple[Parts, Handle]:
        raise NotImplementedError

    def kill_commands(self, reason: str = "") -> None:
        self._kills, self._killed_because = self._kills + 1, reason
        for process in self._live:
            process.end_because(reason)

    async def stop(self) -> None:
        live = list(self._live)
        self.kill_commands()
        for process in live:
            await process.wait()
        if self.quota is not None:
            await self.quota.close()


class Record:
    """A file that a command writes to by its name. It is held open here, so that no other can replace it. Blocks."""

    def __init__(self, folder: Path) -> None:
        make_private_folder(folder)
        self.path = folder / f".hermes-{os.urandom(8).hex()}"
        self._fd = private_opener(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)

    def read(self, bytes_max: int) -> bytes:
        return os.pread(self._fd, bytes_max, 0)

    def write(self, data: bytes) -> None:
        with open(self._fd, "wb", closefd=False) as file:
            file.write(data)

    def close(self) -> None:
        os.close(self._fd)
        with contextlib.suppress(OSError):
            self.path.unlink()


def launch(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None = None, pass_fds: Sequence[int] = ()
) -> Parts:
    """Start a process in a session of its own, without input; both its outputs are one pipe. The death signal of its
    parent is that of the calling thread."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    output = open(ours, "rb", buffering=0)  # noqa: SIM115  (closed by the process it is of)
    null = subprocess.DEVNULL
    try:
        child = ChildProcess(
            argv, cwd=cwd, env=env, stdin=null, stdout=theirs, stderr=theirs, start_new_session=True, pass_fds=pass_fds
        )
    except (OSError, ValueError) as error:
        output.close()
        raise SandboxError(f"The command cannot be started: {error}.") from None
    finally:
        os.close(theirs)
    return child, output


def failure_message(argv: Sequence[str], env: Mapping[str, str], seconds: float) -> str:
    """Run a command to its end: empty if it succeeds, else the end of its error output. Blocks."""
    null = subprocess.DEVNULL
    try:
        result = subprocess.run(argv, env=env, timeout=seconds, stdin=null, capture_output=True, check=False)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    output = result.stderr.decode(errors="replace").strip()[-500:]
    return "" if result.returncode == 0 else output or f"{argv[0]} ended with code {result.returncode}."


async def wait_readable(fd: int, unless: asyncio.Future[int] | None = None) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake(*_: object) -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, wake)
    if unless is not None:
        unless.add_done_callback(wake)
    try:
        await ready
    finally:
        loop.remove_reader(fd)
        if unless is not None:
            unless.remove_done_callback(wake)


async def _first(seconds: float | None, *futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


def _discard_process(starting: asyncio.Future[Process]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().kill()
        starting.result().close()


# Only the same user can read the environment of a process; what the shell runs does not inherit this variable.
VARIABLE = "HERMES_COMMAND_TEXT"
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "busybox"})
_TAKE = f'eval "unset {VARIABLE}; ${VARIABLE}"'


def hide_text(argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """A command and its environment, with the text of `sh -c TEXT` moved into the environment."""
    if len(argv) < 3 or argv[1] != "-c" or os.path.basename(argv[0]) not in _SHELLS:
        return list(argv), dict(env)
    return [argv[0], "-c", _TAKE, *argv[3:]], {**env, VARIABLE: argv[2]}
