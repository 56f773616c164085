"""A sandbox per session, made of Linux namespaces: a read-only system, the workspace, and no network except a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from hermes.core.limits import (
    SANDBOX_FILE_BYTES_MAX,
    SANDBOX_IDLE_S_MAX,
    SANDBOX_OPEN_FILES_MAX,
    SANDBOX_PROCESSES_MAX,
    SANDBOXES_IDLE_MAX,
)
from hermes.sandbox import cgroup
from hermes.sandbox.base import Command, Handle, Parts, SandboxError, hide_text
from hermes.sandbox.developer import provide_identity
from hermes.sandbox.mounts import Mount, Place, plan_mounts, trial_place
from hermes.sandbox.namespace import Data, Namespace, RemoteProcess
from hermes.sandbox.proxy import PROXY_PORT, EgressProxy, proxy_env
from hermes.sandbox.watching import WatchedSandbox
from hermes.sandbox.workspace_watch import WorkspaceWatch

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "alternatives ca-certificates.conf ca-certificates crypto-policies fonts gai.conf group host.conf hosts ld.so.cache "
    "ld.so.conf ld.so.conf.d localtime mime.types nsswitch.conf os-release passwd pki/ca-trust pki/tls/certs protocols "
    "services ssl/certs ssl/openssl.cnf timezone"
)
INSTALL_HINT = "Install bubblewrap (on Debian and Ubuntu: apt-get install bubblewrap)."


class Bubblewrap(WatchedSandbox):
    """Commands see the system read-only, their HOME, the workspace, and what the settings add. The namespaces are built
    before the first command, and again when what must be protected has changed since."""

    name = "bubblewrap"
    python = os.path.realpath(sys.executable)

    def __init__(
        self, place: Place, is_granted: Callable[[str], bool] | None = None, idle: dict[Bubblewrap, None] | None = None
    ) -> None:
        """`idle` holds the idle sandboxes of a process, the longest idle one first."""
        super().__init__(place, is_granted)
        self._all_idle = {} if idle is None else idle
        self._namespace: Namespace | None = None
        self._protected: WorkspaceWatch | None = None
        self._group: cgroup.Group | None = None
        self._serving: asyncio.Task[None] | None = None
        self._served: EgressProxy | None = None
        self._building = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None

    def mounts(self) -> list[Mount]:
        return [*(Mount(path, "ro") for path in system_paths()), *super().mounts()]

    async def _start(self, command: Command) -> tuple[Parts, Handle]:
        self._wake_up()
        watch = await self._enter_workspace()
        try:
            async with self._building:
                namespace = await self._ready(watch)
            argv, env = hide_text(command.argv, command.env)
            command = replace(command, argv=argv, env=env | self._serve_proxy(namespace))
            parts, child = await namespace.spawn(self._request(), command)
        except BaseException:
            await self._watching.abandon()
            raise
        return parts, _Handle(self, child)

    async def start_program(self, argv: Sequence[str], env: Mapping[str, str]) -> tuple[RemoteProcess, int, int, int]:
        """Start a program: it, and descriptors of its input, output and errors. It ends with `stop`."""
        watch = await self._enter_workspace()
        async with self._building:
            namespace = await self._ready(watch)
        env = {**env, **self._serve_proxy(namespace)}
        command = Command(argv, str(self.place.workspace), env, network=False, seconds=None)
        return await namespace.spawn_with_pipes(self._request(), command)

    async def _ready(self, watch: WorkspaceWatch) -> Namespace:
        """The namespaces to start a command in; they protect what the watch has found."""
        if self._namespace is not None and self._namespace.alive and self._protected is watch:
            return self._namespace
        await self._close()
        mounts = await asyncio.to_thread(plan_mounts, self.place, watch.covers)
        await asyncio.to_thread(provide_identity, self.place)
        self._namespace = await Namespace.create(_build_plan(self.place, mounts), self._bound)
        self._protected = watch
        return self._namespace

    def _serve_proxy(self, namespace: Namespace) -> dict[str, str]:
        """The variables by which a command finds the proxy, which is started if need be; none where there is no proxy."""
        if self.egress is None:
            return {}
        if self.egress is not self._served and namespace.listener is not None:
            if self._serving is not None:
                self._serving.cancel()
            self._served = self.egress
            self._serving = asyncio.create_task(self.egress.serve(namespace.listener.dup()))
        return proxy_env(PROXY_PORT)

    def _bound(self, pid: int) -> None:
        """Put the first process into a control group, if one can be made; its children inherit it."""
        place = self.place
        self._group = cgroup.create(place.private.parent.name, place.memory_mb, place.cpus, SANDBOX_PROCESSES_MAX)
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._group.add(pid)

    def _request(self) -> Data:
        limits = {
            "AS": self.place.memory_mb * 1024**2,
            "NPROC": SANDBOX_PROCESSES_MAX,
            "NOFILE": SANDBOX_OPEN_FILES_MAX,
            "FSIZE": SANDBOX_FILE_BYTES_MAX,
            "CORE": 0,
        }
        return {"limits": limits, "seccomp": _seccomp_program().hex()}

    async def leave(self) -> None:
        await self._watching.leave()
        if not self._watching.commands:
            self._wake_up()
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(SANDBOX_IDLE_S_MAX, lambda: loop.create_task(self._expire()))
            self._all_idle[self] = None
            while len(self._all_idle) > SANDBOXES_IDLE_MAX:
                await next(iter(self._all_idle))._expire()

    def _wake_up(self) -> None:
        self._all_idle.pop(self, None)
        if self._idle is not None:
            self._idle.cancel()

    async def _expire(self) -> None:
        self._wake_up()
        if not self._watching.commands:
            async with self._building:
                await self._close()
            await self._watching.close()

    async def _close(self) -> None:
        serving, self._serving, self._served = self._serving, None, None
        if serving is not None:
            serving.cancel()
            await asyncio.wait([serving])
        namespace, self._namespace = self._namespace, None
        if namespace is not None:
            namespace.close()
        group, self._group = self._group, None
        for _ in range(100):
            if group is None or group.remove():
                break
            await asyncio.sleep(0.02)  # the last process is out of its group a moment after it has ended

    async def stop(self) -> None:
        await super().stop()
        self._wake_up()
        async with self._building:
            await self._close()
        await self._watching.close()


class _Handle:
    """A command in the namespaces: when its first process ends, so does everything that it has started."""

    def __init__(self, sandbox: Bubblewrap, child: RemoteProcess) -> None:
        self._sandbox, self._child = sandbox, child

    def signal(self, number: int) -> None:
        self._child.signal(number)

    async def sweep(self) -> None:
        self._child.signal(signal.SIGKILL)
        await self._child.exited()
        self._child.release()
        await self._sandbox.leave()


def system_paths() -> list[str]:
    paths = [*_SYSTEM, *(f"/etc/{name}" for name in _ETC.split()), os.path.realpath(sys.base_prefix)]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def _build_plan(place: Place, mounts: Sequence[Mount]) -> Data:
    system = system_paths()
    links = {path: os.readlink(path) for path in system if path in _SYSTEM and os.path.islink(path)}
    real = dict.fromkeys(os.path.realpath(path) for path in system if path not in links)
    mounted = {mount.path for mount in mounts}
    return {
        "memory_bytes": place.memory_mb * 1024**2,
        "links": links,
        "system": [path for path in real if path not in mounted],
        "mounts": [(mount.path, mount.mode, not mount.within) for mount in mounts],
        "proxy_port": PROXY_PORT,
    }


@cache
def probe() -> str:
    """Run `true` in a sandbox: why that fails, empty if it works. Blocks; cached for the life of the process."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed: there is no command 'bwrap'."
    cgroup.sweep()
    try:
        # In a thread of its own: the caller's may have a loop that runs.
        with trial_place() as place, ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, _try_sandbox(place)).result()
    except OSError as error:
        return str(error)


async def _try_sandbox(place: Place) -> str:
    sandbox = Bubblewrap(place)
    try:
        async with await sandbox.spawn(["true"]) as process:
            output = b"".join([chunk async for chunk in process.chunks()]).decode(errors="replace").strip()
            return "" if await process.wait() == 0 else output[-500:] or "The first command in it failed."
    except SandboxError as error:
        return str(error)
    finally:
        await sandbox.stop()


# ---- seccomp: calls of the system that no namespace keeps apart, refused: the kernel's keys, sockets to the host, and io_uring

_LOAD, _AND, _IS, _RETURN = 0x20, 0x54, 0x15, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.ENOSYS
_AF_VSOCK = 40
_IO_URING_SETUP = 425  # everywhere; what is done through it no filter sees


class _Calls(NamedTuple):
    """An architecture with the numbers of its refused system calls, and of `socket`, of which one family is refused."""

    machine: int
    refused: tuple[int, ...]
    socket: int
    bits: int = 0xFFFFFFFF


_KINDS = (
    _Calls(0xC000003E, (248, 249, 250), 41, 0xBFFFFFFF),  # x86_64; the bit is that of its other numbering
    _Calls(0x40000003, (286, 287, 288, 102), 359),  # i386, whose `socketcall` tells nothing of the family
    _Calls(0xC00000B7, (217, 218, 219), 198),  # aarch64
    _Calls(0x40000028, (309, 310, 311), 281),  # arm
    _Calls(0xC00000F3, (217, 218, 219), 198),  # riscv64
)


@cache
def _seccomp_program() -> bytes:
    lines = [_instruction(_LOAD, _MACHINE)]
    for kind in _KINDS:
        refuse = _instruction(_RETURN, _REFUSE)
        part = [_instruction(_LOAD, _NUMBER), _instruction(_AND, kind.bits)]
        for number in (*kind.refused, _IO_URING_SETUP):
            part += [_instruction(_IS, number, otherwise=1), refuse]
        part += [_instruction(_IS, kind.socket, otherwise=3), _instruction(_LOAD, _FIRST_ARGUMENT)]
        part += [_instruction(_IS, _AF_VSOCK, otherwise=1), refuse, _instruction(_RETURN, _ALLOW)]
        lines += [_instruction(_IS, kind.machine, otherwise=len(part)), *part]
    return b"".join([*lines, _instruction(_RETURN, _ALLOW)])


def _instruction(code: int, value: int, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, 0, otherwise, value)
