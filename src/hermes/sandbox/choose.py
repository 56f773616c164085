"""Which sandbox the settings select, where its commands work, and the sandboxes of all sessions."""

from __future__ import annotations

import asyncio
import os
import shutil
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from hermes.core.errors import ConfigError
from hermes.core.home import Home, make_private_folder
from hermes.core.ids import folder_name, scope_name
from hermes.guards.path_lists import below
from hermes.sandbox import bubblewrap, developer, docker, probe_cache
from hermes.sandbox.base import Sandbox, SandboxError
from hermes.sandbox.bubblewrap import Bubblewrap
from hermes.sandbox.docker import Docker
from hermes.sandbox.local import INSTALL, Local, NoSandbox
from hermes.sandbox.mounts import Place, resolve_root
from hermes.sandbox.shell import Shell
from hermes.settings.config import Settings

_INHERITED = ("PATH", "HOME", "USER", "LANG", "TERM", "TMPDIR", "TZ")
_STANDARD = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/", "LANG": "C.UTF-8", "TERM": "dumb"}
_OUR_VARIABLES = ("HERMES_", "API_SERVER_")


class Choice(NamedTuple):
    """The backend in use, or `none`; `failure` says why a stronger one is not."""

    name: str
    isolated: bool
    failure: str = ""

    @property
    def reason(self) -> str | None:
        """Why no command can be run, and what to do about it; None where commands can be run."""
        return (
            f"there is no sandbox for commands ({self.failure.rstrip('.')}): {INSTALL}" if self.name == "none" else None
        )

    @property
    def description(self) -> str:
        return f"{self.name} ({self.failure})" if self.failure else self.name


def choose_backend(settings: Settings) -> Choice:
    """The backend that the settings mean. Blocks the first time. Raises ConfigError where a named one does not work."""
    backend = settings.terminal.backend
    if backend == "local":
        return Choice("local", isolated=False)
    failure = docker.probe(settings.terminal.docker_image) if backend == "docker" else bubblewrap.probe()
    if not failure:
        return Choice("bubblewrap" if backend == "auto" else backend, isolated=True)
    if backend == "auto":
        # The default image may have to be fetched: only a configured one is tried automatically.
        image = settings.terminal.docker_image
        if settings.source("terminal.docker_image") != "default" and not docker.probe(image):
            return Choice("docker", isolated=True, failure=failure)
        return Choice("local" if settings.terminal.allow_local else "none", isolated=False, failure=failure)
    message = f"The sandbox {backend!r} does not work here: {failure}"
    raise ConfigError(message, where="terminal.backend", hint="hermes config set terminal.backend auto")


def why_no_commands(settings: Settings) -> str | None:
    try:
        return choose_backend(settings).reason
    except ConfigError:
        return None  # callers get the error of the named backend


def workspace_of(
    home: Home, settings: Settings, owner: str, key: str | None, workdir: str | None = None, here: Path | None = None
) -> Path:
    """The folder in which commands work: `workdir`, which must lie inside `terminal.workspaces`; or `here`, the folder
    of a user at a terminal; or one in the home, made if need be."""
    if workdir is not None:
        folder, roots = real_path(workdir), [real_path(root) for root in settings.terminal.workspaces]
        if any(folder.is_relative_to(root) for root in roots) and folder.is_dir():
            return folder
        raise SandboxError(f"{workdir} is no folder inside terminal.workspaces.", where="workdir")
    if here is not None:
        return real_path(here / Path(settings.terminal.cwd).expanduser())
    scopes = home.workspace / "scopes"
    make_private_folder(scopes)  # before any command works beside it: so it is hidden from every one
    if owner == "default" and key is None:
        return real_path(home.workspace)
    folder = scopes / scope_name(owner, key)
    make_private_folder(folder)
    return real_path(folder)


def writable_places(home: Home, settings: Settings, workspace: Path) -> list[str]:
    configured = (*settings.terminal.workspaces, *settings.terminal.sandbox_rw)
    places = (home.workspace, home.sandbox, workspace, *(Path(path).expanduser() for path in configured))
    return sorted({os.path.realpath(path) for path in places} | {os.path.abspath(path) for path in places})


def _roots(paths: Sequence[str], writable: Sequence[str]) -> Iterator[Path]:
    """The real paths of configured folders. Inside folders that commands write to no link is followed."""
    for path in paths:
        others = [root for root in writable if root != os.path.abspath(Path(path).expanduser())]
        if (real := resolve_root(Path(path).expanduser(), others)) is not None:
            yield Path(real)


def shown_toolchains(settings: Settings, backend: str, home: Home, workspace: Path) -> list[Path]:
    """The toolchains of the user that commands in a sandbox of this machine can use."""
    if backend != "bubblewrap" or not settings.terminal.toolchains:
        return []
    return developer.toolchains(Path(os.path.expanduser("~")), writable_places(home, settings, workspace))


def commands_in(settings: Settings, chosen: Choice, home: Home, workspace: Path, names: Sequence[str]) -> list[str]:
    """Which of these commands can be run where commands run. Of an image nothing is known. Blocks."""
    if chosen.name in ("none", "docker"):
        return []
    places = {name: place for name in names if (place := shutil.which(name)) is not None}
    if chosen.name != "bubblewrap":
        return list(places)
    shown = [*shown_toolchains(settings, chosen.name, home, workspace), workspace]
    shown += [real_path(path) for path in (*settings.terminal.sandbox_ro, *settings.terminal.sandbox_rw)]
    roots = [*bubblewrap.system_paths(), *map(str, shown)]
    # A link is of use only where its target is shown too.
    return [
        name
        for name, place in places.items()
        if all(any(below(path, root) for root in roots) for path in (place, os.path.realpath(place)))
    ]


def real_path(path: str | Path) -> Path:
    return Path(os.path.realpath(Path(path).expanduser()))


def child_env(settings: Settings, backend: str, private: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of commands, built from nothing: without keys of providers and variables of our own."""
    from hermes.settings.known_providers import KNOWN_PROVIDERS

    env = _STANDARD | {name: value for name, value in environ.items() if name in _INHERITED or name.startswith("LC_")}
    env["SHELL"] = shell_of(backend)
    if backend != "local":
        env |= {"HOME": str(private), "TMPDIR": "/tmp"}  # noqa: S108
    if backend == "docker":
        del env["PATH"]  # the image has its own
    keys = {provider.key_env for provider in KNOWN_PROVIDERS.values()}
    keys |= {provider.key_env for provider in settings.providers.values() if provider.key_env}
    for name in settings.terminal.env_passthrough:
        value = settings.variable(name)
        if value is not None and name not in keys and not name.startswith(_OUR_VARIABLES):
            env[name] = value
    return env


def shell_of(backend: str) -> str:
    return "/bin/sh" if backend == "docker" else shutil.which("bash", path="/bin:/usr/bin:/usr/local/bin") or "/bin/sh"


def shell_in(sandbox: Sandbox) -> Shell:
    place = sandbox.place
    return Shell(place.private, str(place.workspace), place.env, shell_of(sandbox.name))


class Sandboxes:
    def __init__(self, home: Home) -> None:
        self._home = home
        self._sandboxes: weakref.WeakValueDictionary[str, Sandbox] = weakref.WeakValueDictionary()
        # Reserved names that the user has allowed, for any session: none of their sandboxes sets them aside.
        self._granted: set[str] = set()
        self._idle: dict[Bubblewrap, None] = {}
        self._tried: set[tuple[object, ...]] = set()
        self._may_start, self._holds = asyncio.Event(), 0
        self._may_start.set()

    def grant(self, path: Path) -> None:
        self._granted.add(str(path))

    def _is_granted(self, path: str) -> bool:
        return any(below(path, granted) for granted in self._granted)

    async def ready(self, settings: Settings) -> None:
        """Probe the backend once, so that `choose_backend` does not block the loop."""
        terminal = settings.terminal
        key = terminal.backend, terminal.docker_image, terminal.allow_local
        if key not in self._tried:
            await asyncio.to_thread(why_no_commands, settings)
            self._tried.add(key)

    async def start(self, settings: Settings) -> Choice:
        chosen = await asyncio.to_thread(choose_backend, settings)
        await asyncio.to_thread(probe_cache.remember, settings, chosen.description)
        if chosen.name == "docker":
            await docker.sweep(self._home)
        return chosen

    async def of(
        self,
        settings: Settings,
        session_id: str,
        workspace: Path,
        *,
        granted: Sequence[Path] = (),
        local: Callable[[Place], Sandbox] = Local,
    ) -> Sandbox:
        """The sandbox of a session that works in this folder; `granted` are reserved names that it may write. Where there
        is to be none, `local` makes what runs its commands."""
        await self.ready(settings)
        backend = choose_backend(settings).name
        place = await asyncio.to_thread(self._place, settings, backend, session_id, workspace, tuple(granted))
        image = settings.terminal.docker_image
        key = repr((backend, image, session_id, place, local))
        if (sandbox := self._sandboxes.get(key)) is None:
            if backend == "docker":
                sandbox = Docker(place, image, session_id, self._is_granted)
            elif backend == "bubblewrap":
                sandbox = Bubblewrap(place, self._is_granted, self._idle)
            else:
                sandbox = local(place) if backend == "local" else NoSandbox(place)
            sandbox.may_start = self._may_start
            self._sandboxes[key] = sandbox
        return sandbox

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[bool]:
        """Whether no sandboxed command runs. If so, none starts meanwhile: nothing can swap a path after its check."""
        if any(sandbox.isolated and sandbox.is_busy for sandbox in self._sandboxes.values()):
            yield False
            return
        self._holds += 1
        self._may_start.clear()
        try:
            yield True
        finally:
            self._holds -= 1
            if not self._holds:
                self._may_start.set()

    def _place(
        self, settings: Settings, backend: str, session_id: str, workspace: Path, granted: tuple[Path, ...]
    ) -> Place:
        name = folder_name(session_id)
        writable = writable_places(self._home, settings, workspace)
        private = self._home.sandbox / name / "home"
        user_home = Path(os.path.expanduser("~"))
        shown = shown_toolchains(settings, backend, self._home, workspace)
        env = child_env(settings, backend, private, os.environ)
        return Place(
            home=self._home,
            workspace=workspace,
            private=private,
            uploads=self._home.uploads / name,
            ro=(*_roots(settings.terminal.sandbox_ro, writable), *shown),
            hidden=tuple(developer.hidden_settings(user_home)) if shown else (),
            rw=tuple(_roots(settings.terminal.sandbox_rw, writable)),
            granted=granted,
            network=settings.terminal.network,
            memory_mb=settings.terminal.container_memory,
            cpus=settings.terminal.container_cpu,
            disk_quota_mb=settings.terminal.disk_quota_mb,
            env={**developer.variables(user_home, shown), **env},
        )

    async def close(self) -> None:
        for sandbox in list(self._sandboxes.values()):
            await sandbox.stop()
