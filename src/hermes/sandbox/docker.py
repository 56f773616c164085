"""A container per session: created with its first command, removed when idle, and swept after its server has died."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import functools
import hashlib
import io
import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping

from hermes.core import limits
from hermes.core.home import Home
from hermes.core.processes import is_gone, this_process
from hermes.sandbox.base import (
    Child,
    Command,
    Group,
    Handle,
    Parts,
    Process,
    Record,
    SandboxError,
    failure_message,
    hide_text,
    launch,
)
from hermes.sandbox.mounts import Mode, Place, plan_mounts, trial_place
from hermes.sandbox.watching import WatchedSandbox, Watching

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_CLIENT_VARIABLES = ("DOCKER_", "XDG_", "PATH", "HOME")
# `$0` is a file in the private folder, which both sides see at the same path.
_KEEPER = 'echo $$ >"$0"; exec tail -f /dev/null'
_RUNNER = '. "$0"; echo $$ >"$0"; exec "$@"'
_SWEEPER = """read keeper <"$0" || exit
n=0
while left= && [ $n -lt 5000 ]; do
  for p in /proc/[0-9]*; do
    case ${p#/proc/} in 1|$keeper|$$) ;; *) kill -s KILL ${p#/proc/} 2>/dev/null && left=1 ;; esac
  done
  [ "$left" ] || break
  n=$((n + 1))
done"""


class Docker(WatchedSandbox):
    """Commands see the image, the workspace, their HOME, and what the settings add. The mounts of a container are
    fixed: when they change, or the network is granted, a new container takes its place; running commands stay in the
    old one."""

    name = "docker"

    def __init__(
        self, place: Place, image: str, session_id: str, is_granted: Callable[[str], bool] | None = None
    ) -> None:
        super().__init__(place, is_granted)
        self._image, self._session_id = image, session_id
        self._containers: dict[tuple[str, ...], Container] = {}
        self.making = asyncio.Lock()

    async def _start(self, command: Command) -> tuple[Parts, Handle]:
        watch = await self._enter_workspace()
        try:
            arguments = await asyncio.to_thread(_isolation_options, self.place, command.network, watch.covers)
            async with self.making:
                container = await self._container((*arguments, self._image))
                container.enter()
        except BaseException:
            await self._watching.abandon()
            raise
        try:
            record = await asyncio.to_thread(Record, self.place.private)
            try:
                argv, env = hide_text(command.argv, command.env)
                env_fd, exports = _variables(env)
                options = ["--env-file", f"/proc/self/fd/{env_fd}", "--workdir", command.cwd, container.name]
                try:
                    await asyncio.to_thread(record.write, exports)
                    runner = ["/bin/sh", "-c", _RUNNER, str(record.path)]
                    parts = _launch_docker("exec", *options, *runner, *argv, pass_fds=[env_fd])
                finally:
                    os.close(env_fd)
            except BaseException:
                record.close()
                raise
        except BaseException:
            await container.leave()
            await self._watching.abandon()
            raise
        return parts, Exec(container, record, self._watching)

    async def _container(self, arguments: tuple[str, ...]) -> Container:
        for other in [key for key, container in self._containers.items() if key != arguments and not container.active]:
            await self._containers.pop(other).remove()
        if (container := self._containers.get(arguments)) and not container.doomed and await container.runs():
            return container
        labels = {"home": _home_label(self.place.home), "holder": this_process(), "session": self._session_id}
        options = [part for name, value in labels.items() for part in ("--label", f"hermes.{name}={value}")]
        container = Container(self)
        await container.make(*options, *arguments, "-c", _KEEPER)
        self._containers[arguments] = container
        return container

    async def expire(self, container: Container) -> None:
        async with self.making:
            if not container.active:
                self._containers = {key: other for key, other in self._containers.items() if other is not container}
                await container.remove()

    async def stop(self) -> None:
        await super().stop()
        async with self.making:
            while self._containers:
                await self._containers.popitem()[1].remove()
        await self._watching.close()


class Container:
    def __init__(self, owner: Docker) -> None:
        self.name = f"hermes-{os.urandom(8).hex()}"
        self.active, self.doomed = 0, False
        self._owner = owner
        self._keeper = owner.place.private / f".keeper-{self.name}"
        self._idle: asyncio.TimerHandle | None = None

    async def make(self, *options: str) -> None:
        options = ("--detach", "--rm", "--name", self.name, *options, str(self._keeper))
        code, output = await _run_docker("run", *options, seconds=limits.CONTAINER_PULL_S_MAX)
        if code:
            raise SandboxError(f"The container could not be started: {output.strip()[-500:]}", hint="hermes doctor")

    async def runs(self) -> bool:
        return (await _run_docker("inspect", "--format", "{{.State.Running}}", self.name))[1].strip() == "true"

    def enter(self) -> None:
        self.active += 1
        if self._idle is not None:
            self._idle.cancel()

    async def leave(self) -> None:
        """A command has ended. After the last one, everything that any of them left behind is killed."""
        async with self._owner.making:
            if self.active == 1 and not self.doomed:
                await _run_docker("exec", self.name, "/bin/sh", "-c", _SWEEPER, str(self._keeper))
            self.active -= 1
        if not self.active:
            loop = asyncio.get_running_loop()
            expire = self._owner.expire
            self._idle = loop.call_later(limits.CONTAINER_IDLE_S_MAX, lambda: loop.create_task(expire(self)))

    async def remove(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        await _run_docker("rm", "--force", self.name)
        with contextlib.suppress(OSError):
            self._keeper.unlink()


class Exec:
    """A command in a container. Signals are sent from within: one to the client would not reach it."""

    def __init__(self, container: Container, record: Record, watching: Watching) -> None:
        self._container, self._record, self._watching = container, record, watching
        self._sent: list[Child] = []

    def signal(self, number: int) -> None:
        name, pid = self._container.name, self._record.read(20).strip()
        if number == signal.SIGKILL and self._container.active == 1:
            self._container.doomed = True
            self._send("rm", "--force", name)
        elif pid.isdigit():
            self._send("exec", name, "/bin/sh", "-c", f"kill -s {signal.Signals(number).name[3:]} -- -{int(pid)}")

    def _send(self, *arguments: str) -> None:
        child, output = _launch_docker(*arguments)
        output.close()
        self._sent.append(child)

    async def sweep(self) -> None:
        for child in self._sent:
            await asyncio.to_thread(child.wait)
        self._record.close()
        await self._container.leave()
        await self._watching.leave()


def _isolation_options(place: Place, network: bool, covers: Mapping[str, Mode] | None = None) -> list[str]:
    """The options that isolate a container. Blocks."""
    memory = f"{place.memory_mb}m"
    arguments = ["--init", "--read-only", "--network", "bridge" if network else "none", "--cap-drop", "ALL"]
    arguments += ["--security-opt", "no-new-privileges", "--user", f"{os.getuid()}:{os.getgid()}"]
    arguments += ["--memory", memory, "--memory-swap", memory, "--cpus", f"{place.cpus:g}"]
    arguments += ["--pids-limit", str(limits.SANDBOX_PROCESSES_MAX), "--tmpfs", f"/tmp:rw,exec,mode=1777,size={memory}"]  # noqa: S108
    for mount in plan_mounts(place, covers):
        if mount.mode == "hide" and mount.is_dir:
            fields = ["type=tmpfs", f"target={mount.path}"]
        else:
            source = "/dev/null" if mount.mode == "hide" else mount.path
            fields = ["type=bind", f"source={source}", f"target={mount.path}"]
            fields += [] if mount.mode == "rw" else ["readonly"]
        csv.writer(line := io.StringIO(), lineterminator="").writerow(fields)
        arguments += ["--mount", line.getvalue()]
    return [*arguments, "--workdir", str(place.workspace), "--env", f"HOME={place.private}", "--entrypoint", "/bin/sh"]


def _variables(env: Mapping[str, str]) -> tuple[int, bytes]:
    """A descriptor of an env file, and as shell lines the variables that such a file cannot hold.

    None is passed as an argument, which others can list, or in the environment of the client, which would obey it.
    """
    env_fd, exports = os.memfd_create("variables"), b""
    with open(env_fd, "wb", closefd=False) as file:
        for name, value in env.items():
            line = os.fsencode(f"{name}={value}")
            fits = len(line) <= limits.CONTAINER_VARIABLE_BYTES_MAX and b"\n" not in line and b"\r" not in line
            if fits and line[:1].isalpha():
                file.write(line + b"\n")
            elif _NAME.fullmatch(name):
                exports += os.fsencode(f"export {name}={shlex.quote(value)}\n")
    return env_fd, exports


def _launch_docker(*arguments: str, pass_fds: list[int] | None = None) -> Parts:
    return launch(["docker", *arguments], env=_client_env(), pass_fds=pass_fds or ())


def _client_env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_CLIENT_VARIABLES)}


def _home_label(home: Home) -> str:
    return hashlib.sha256(os.fsencode(home.path)).hexdigest()[:32]


async def _run_docker(*arguments: str, seconds: float = limits.CONTAINER_CALL_S_MAX) -> tuple[int, str]:
    parts = _launch_docker(*arguments)
    async with Process(parts, Group(parts[0].pid), seconds) as process:
        output = b"".join([chunk async for chunk in process.chunks()])
        return await process.wait(), output.decode(errors="replace")


async def sweep(home: Home) -> None:
    own, names = f"label=hermes.home={_home_label(home)}", '{{.Names}} {{.Label "hermes.holder"}}'
    code, output = await _run_docker("ps", "--all", "--filter", own, "--format", names)
    for name, _, holder in (line.partition(" ") for line in output.splitlines() if not code):
        if is_gone(holder):
            await _run_docker("rm", "--force", name)


@functools.cache
def probe(image: str) -> str:
    """Run `true` in a container with all options: why that fails, empty if it works. Blocks, and may fetch the
    image."""
    with trial_place() as place:
        argv = ["docker", "run", "--rm", *_isolation_options(place, network=False), image, "-c", "true"]
        return failure_message(argv, _client_env(), limits.CONTAINER_PULL_S_MAX)
