"""What the tools of one run can reach: each part is the only way to do its kind of thing."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hermes.core.home import Home
from hermes.core.json_types import JsonObject
from hermes.core.spec import RunSpec
from hermes.core.threads import RunBlocking
from hermes.guards.network import Network
from hermes.guards.path_lists import below
from hermes.guards.paths import EditorFiles, Paths
from hermes.guards.secrets import Secrets
from hermes.guards.url_text import domain_suffix, is_named
from hermes.guards.urls import UrlGuard
from hermes.runs.engine import RunEngine
from hermes.sandbox.base import Sandbox
from hermes.sandbox.choose import Sandboxes, workspace_of
from hermes.sandbox.local import Local, NoSandbox
from hermes.sandbox.mounts import Place
from hermes.sandbox.proxy import EgressProxy
from hermes.settings.config import Settings
from hermes.tools.framework.session_state import SessionState
from hermes.tools.process import Processes

SAFE_ROOT = "HERMES_WRITE_SAFE_ROOT"
YOLO = "HERMES_YOLO_MODE"


@dataclass(slots=True)
class ProcessResources:
    sandboxes: Sandboxes
    network: Network
    engine: Callable[[], RunEngine]
    own_ports: Callable[[], Collection[int]]
    processes: Processes = field(default_factory=Processes)
    # By session: the files of the editor that it is used from, and what runs commands in the editor's terminals.
    editors: dict[str, EditorFiles] = field(default_factory=dict)
    terminals: dict[str, Callable[[Place], Sandbox]] = field(default_factory=dict)
    # Read once, when the process starts: no tool can change it.
    yolo: bool = field(default_factory=lambda: os.environ.get(YOLO, "").lower() in ("1", "true", "yes", "on"))


@dataclass(slots=True, kw_only=True, eq=False)
class RunResources:
    """Files, commands, URLs, the store and other runs, as far as one run may use them. Parts are made when first used:
    a turn without tools costs nothing here. `hosts` may be read for the rest of the turn, `named_hosts` returns those
    that the user has named, and `has_foreign` whether the model has read text from outside."""

    spec: RunSpec
    home: Home
    settings: Settings
    secrets: Secrets
    store: Any
    session: SessionState
    outside: ProcessResources
    blocking: RunBlocking
    window_tokens: int
    ask_model: Callable[..., Awaitable[Any]]
    toolsets: frozenset[str] = frozenset()
    spend: Callable[[JsonObject], None] = lambda _: None
    has_foreign: Callable[[], bool] = lambda: False
    named_hosts: Callable[[], frozenset[str]] = frozenset
    hosts: set[str] = field(default_factory=set)
    _sandbox: Sandbox | None = None
    _paths: Paths | None = None
    _urls: UrlGuard | None = None

    @property
    def engine(self) -> RunEngine:
        return self.outside.engine()

    @property
    def processes(self) -> Processes:
        return self.outside.processes

    @property
    def yolo(self) -> bool:
        """Whether approvals are off in this session or this process."""
        return self.session.yolo or self.outside.yolo

    def granted(self, folder: Path) -> None:
        """Let the session write to a folder; sandbox and paths are rebuilt."""
        self.session.folders.append(folder)
        self._sandbox = self._paths = None

    def granted_reserved(self, path: Path, *, session: bool) -> None:
        """Let a reserved name be written: no sandbox sets it aside."""
        self.outside.sandboxes.grant(path)
        if session:
            self.session.reserved.append(path)
            self._sandbox = self._paths = None

    @property
    def spill(self) -> Path:
        return self.home.path / "cache" / "tool_results" / self.spec.run_id

    @property
    def urls(self) -> UrlGuard:
        if self._urls is None:
            outside = self.outside
            # Not a method of this object, which holds the guard: a cycle would wait for the collector.
            may_read = partial(_may_read, self.settings, self.hosts, self.session.granted, self.named_hosts)
            self._urls = UrlGuard(outside.network, self.settings, self.secrets, outside.own_ports, may_read)
        return self._urls

    @property
    def command_urls(self) -> UrlGuard:
        return UrlGuard(self.outside.network, self.settings, self.secrets, self.outside.own_ports)

    def may_read(self, host: str) -> bool:
        return _may_read(self.settings, self.hosts, self.session.granted, self.named_hosts, host)

    @property
    def egress(self) -> EgressProxy:
        return self.session.hosts.proxy(self)

    def is_foreign_file(self, real: str) -> bool:
        """Whether a file holds text from outside: an upload, or a spilled answer of a turn that has read such text."""
        if below(real, os.path.realpath(self.home.uploads)):
            return True
        return below(real, os.path.realpath(self.spill)) and self.has_foreign()

    def names_foreign_file(self, command: str) -> bool:
        return str(self.home.uploads) in command or (str(self.spill) in command and self.has_foreign())

    async def sandbox(self) -> Sandbox:
        if self._sandbox is None:
            # A child works where its parent does, in the same sandbox.
            spec = self.engine.root_spec(self.spec)
            here, workdir = None, spec.workdir
            if spec.source == "cli":  # the user's own choice, whatever folder that is
                here, workdir = Path(spec.workdir or Path.cwd()), None
            folder_id = self.spec.folder_id if self.spec.parent is None else self.spec.parent_session_id
            find = partial(workspace_of, self.home, self.settings, spec.owner, spec.session_key, workdir, here)
            workspace = await self.blocking(find)
            self._sandbox = await self.outside.sandboxes.of(
                self.settings,
                folder_id or spec.folder_id,
                workspace,
                granted=self.session.reserved,
                local=self.outside.terminals.get(spec.session_id, Local),
            )
            self._sandbox.egress = self.egress
        return self._sandbox

    async def paths(self) -> Paths:
        if self._paths is None:
            sandbox = await self.sandbox()
            self._paths = await self.blocking(partial(self._guarded, sandbox))
        return self._paths

    def _guarded(self, sandbox: Sandbox) -> Paths:
        place = sandbox.place
        writable, readable = [place.workspace, *place.rw], [*place.ro, *([place.uploads] if place.uploads else [])]
        if sandbox.isolated and not isinstance(sandbox, NoSandbox):
            mounts = sandbox.mounts()
            writable = [Path(mount.path) for mount in mounts if mount.mode == "rw"]
            readable += [Path(mount.path) for mount in mounts if mount.mode == "ro"]
        safe = self.settings.variable(SAFE_ROOT) or ""
        paths = Paths(
            cwd=place.workspace,
            home=self.home,
            roots_rw=tuple(writable),
            roots_ro=(*readable, self.spill),
            isolated=sandbox.isolated,
            safe_root=tuple(Path(root) for root in safe.split(os.pathsep) if root),
            editor=self.outside.editors.get(self.engine.root_spec(self.spec).session_id),
        )
        for folder in self.session.folders:
            paths.grant(folder)
        for path in self.session.reserved:
            paths.grant_reserved(path)
        return paths


def _may_read(
    settings: Settings, hosts: set[str], granted: set[str], named_hosts: Callable[[], frozenset[str]], host: str
) -> bool:
    """Whether a web host may be read without asking: the settings, the user or a grant name it."""
    if not settings.web.ask_hosts or host in hosts or f"host {host}" in granted:
        return True
    allowed = tuple(map(domain_suffix, settings.web.allowed_hosts))
    return f".{host}".endswith(allowed) or is_named(host, named_hosts())
