"""A sandbox per command, made of Linux namespaces: a read-only system, the workspace, and no network unless allowed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from hermes.limits import (
    SANDBOX_FILE_BYTES_MAX,
    SANDBOX_OPEN_FILES_MAX,
    SANDBOX_PROBE_S_MAX,
    SANDBOX_PROCESSES_MAX,
    SANDBOX_START_S_MAX,
)
from hermes.sandbox import cgroup, seccomp
from hermes.sandbox.base import (
    Command,
    Handle,
    Parts,
    Sandbox,
    SandboxError,
    failure_of,
    launch,
    readable,
)
from hermes.sandbox.mounts import Mount, Place, plan, trial

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "alternatives ca-certificates.conf ca-certificates crypto-policies fonts gai.conf group host.conf hosts ld.so.cache "
    "ld.so.conf ld.so.conf.d localtime mime.types nsswitch.conf os-release passwd pki/ca-trust pki/tls/certs protocols "
    "services ssl/certs ssl/openssl.cnf timezone"
)
_ETC_OF_NETWORK = "resolv.conf"
# Files of the kernel that obey its root, who is also who commands are when Hermes runs as root.
_KERNEL = "acpi bus driver dynamic_debug fs irq mtrr scsi sys sysrq-trigger tty"
_ALWAYS = (
    "--unshare-user --unshare-pid --unshare-ipc --unshare-uts --unshare-cgroup-try --die-with-parent --new-session"
)
# What not every bubblewrap or kernel can do: forbid further namespaces; refuse calls of the system; bound what is in
# memory; mount what was looked at, and not a link that was put in its place since.
_CLOSED, _FILTERED, _SIZED, _BY_FD = OPTIONAL = ("--disable-userns", "--seccomp", "--size", "--ro-bind-fd")


class Probe(NamedTuple):
    """Why bubblewrap does not work here, or nothing; and what it can do beyond what every one can."""

    failure: str
    features: frozenset[str] = frozenset()


class Bubblewrap(Sandbox):
    """Commands see the system read-only, their HOME, the workspace, and what the settings add."""

    name = "bubblewrap"
    isolated = True
    python = os.path.realpath(sys.executable)

    def __init__(self, place: Place, features: frozenset[str]) -> None:
        super().__init__(place)
        self._features = features

    def mounts(self) -> list[Mount]:
        return [*_system(self.place.network), *plan(self.place)]

    async def _start(self, command: Command) -> tuple[Parts, Handle]:
        options, fds = await asyncio.to_thread(_options, self.place, self._features, command)
        told, tell = os.pipe()
        gate, opener = os.pipe()
        fds += [tell, gate]
        try:
            argv = _argv(options, fds, command.argv, self.place, "--info-fd", str(tell), "--block-fd", str(gate))
            parts = launch(argv, env={}, cwd="/", pass_fds=fds)
        except BaseException:
            _close(told, opener)
            raise
        finally:
            _close(*fds)
        try:
            # What it runs waits at the gate until its namespace is known and bounded.
            namespace = await _entered(told)
            os.write(opener, b"\0")
        except BaseException:
            _abandon(*parts)
            raise
        finally:
            _close(told, opener)
        return parts, namespace


class Namespace:
    """A command's namespace of processes: with the first of them all others end."""

    def __init__(self, first: int) -> None:
        self._first, self._pidfd = first, os.pidfd_open(first)
        self._group: Path | None = cgroup.bounded(first, SANDBOX_PROCESSES_MAX) if os.geteuid() == 0 else None

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL if number == signal.SIGKILL else 0)
            if number != signal.SIGKILL:
                os.killpg(self._first, number)  # the first one itself takes no signal

    async def sweep(self) -> None:
        self.signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SANDBOX_START_S_MAX):
                await readable(self._pidfd)
        _close(self._pidfd)
        self._pidfd = -1
        for _ in range(100 if self._group else 0):
            if cgroup.removed(self._group):
                break
            await asyncio.sleep(0.02)  # the last process is out of its group a moment after it has ended


def _abandon(child: subprocess.Popen[bytes], output: FileIO) -> None:
    """End what has not begun yet. First what waits at the gate: without the others it would go on."""
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
    child.kill()
    child.wait()
    output.close()


async def _entered(told: int) -> Namespace:
    """The namespace that bubblewrap says it has made."""
    os.set_blocking(told, False)
    said, more = b"", b"-"
    try:
        async with asyncio.timeout(SANDBOX_START_S_MAX):
            while more:
                await readable(told)
                more = os.read(told, 4096)
                said += more
        return Namespace(int(json.loads(said)["child-pid"]))
    except (ValueError, KeyError, OSError):  # a TimeoutError is one of these
        raise SandboxError("bubblewrap did not start.", hint="hermes doctor") from None


def _system(network: bool) -> Iterator[Mount]:
    names = f"{_ETC} {_ETC_OF_NETWORK}" if network else _ETC
    paths = [*_SYSTEM, *(f"/etc/{name}" for name in names.split()), os.path.realpath(sys.base_prefix)]
    return (Mount(path, "ro") for path in dict.fromkeys(paths) if os.path.exists(path))


def _options(place: Place, features: frozenset[str], command: Command) -> tuple[list[str], list[int]]:
    """Everything but the command, and the descriptors that it names. Looks at the disk."""
    memory = ["--perms", "1777", *([_SIZED, str(place.memory_mb * 1024**2)] if _SIZED in features else []), "--tmpfs"]
    options = [*_ALWAYS.split(), "--cap-drop", "ALL", *([] if command.network else ["--unshare-net"])]
    options += [_CLOSED] if _CLOSED in features else []
    for path in (mount.path for mount in _system(command.network)):
        link = path in _SYSTEM and os.path.islink(path)
        options += ["--symlink", os.readlink(path), path] if link else ["--ro-bind", path, path]
    options += ["--proc", "/proc"]
    for path in (f"/proc/{name}" for name in _KERNEL.split()):
        options += ["--ro-bind", path, path] if os.path.exists(path) else []
    options += ["--dev", "/dev", "--remount-ro", "/dev", *memory, "/dev/shm"]  # noqa: S108
    options += [*memory, "/tmp", "--symlink", "../tmp", "/var/tmp"]  # noqa: S108
    fds = [_held(seccomp.program())] if _FILTERED in features else []
    options += [_FILTERED, str(fds[0])] if fds else []
    last = ["--remount-ro", "/", "--chdir", command.cwd, "--clearenv"]
    try:
        for mount in plan(place):
            bind = "--bind" if mount.mode == "rw" else "--ro-bind"
            if mount.mode == "hide" and mount.is_dir:
                options += ["--tmpfs", mount.path]
                last += ["--remount-ro", mount.path]
            elif mount.mode == "hide":
                options += ["--ro-bind", "/dev/null", mount.path]
            elif mount.within and _BY_FD in features:
                fds.append(mount.open())
                options += [f"{bind}-fd", str(fds[-1]), mount.path]
            else:
                options += [bind, mount.path, mount.path]
    except BaseException:
        _close(*fds)
        raise
    return options + last + [part for item in command.env.items() for part in ("--setenv", *item)], fds


def _argv(options: list[str], fds: list[int], command: Sequence[str], place: Place, *more: str) -> list[str]:
    """What is started. The options go through a descriptor, for nobody else to read."""
    fds.append(_held(b"".join(os.fsencode(option) + b"\0" for option in options)))
    limits = {
        "AS": place.memory_mb * 1024**2,
        "NPROC": SANDBOX_PROCESSES_MAX,
        "NOFILE": SANDBOX_OPEN_FILES_MAX,
        "FSIZE": SANDBOX_FILE_BYTES_MAX,
    }
    bounds = [f"--{name.lower()}={_lowered(name, value)}" for name, value in {**limits, "CORE": 0}.items()]
    bwrap = shutil.which("bwrap") or "bwrap"
    return [bwrap, "--args", str(fds[-1]), *more, "--", "/usr/bin/prlimit", *bounds, "--", *command]


def _held(data: bytes) -> int:
    """A descriptor from which these bytes can be read."""
    fd = os.memfd_create("held")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _lowered(name: str, value: int) -> int:
    """A limit that is not above our own, which could not be set."""
    own = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
    return value if own == resource.RLIM_INFINITY else min(value, own)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


@functools.cache
def probe() -> Probe:
    """Run the whole list of arguments once with `true`. Blocks; the answer is kept for the life of the process."""
    if shutil.which("bwrap") is None:
        return Probe("bubblewrap is not installed: there is no command 'bwrap'.")
    cgroup.sweep()
    help_text = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False).stdout  # noqa: S607
    features = frozenset(option for option in OPTIONAL if f"{option} " in help_text)
    failure = _tried(features)
    for option in (_CLOSED, _FILTERED):  # the kernel has a say in these
        if failure and option in features:
            features -= {option}
            failure = _tried(features)
    return Probe(failure, features)


def _tried(features: frozenset[str]) -> str:
    with trial() as place:
        command = Command(["true"], str(place.workspace), {}, network=False, seconds=None)
        options, fds = _options(place, features, command)
        try:
            return failure_of(_argv(options, fds, command.argv, place), {}, SANDBOX_PROBE_S_MAX, fds)
        finally:
            _close(*fds)
