"""A session's files: a workspace, its guard and its sandbox, and calls of tools as a round makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hermes.core.home import Home
from hermes.core.threads import Threads
from hermes.guards.paths import Paths
from hermes.guards.secrets import Secrets
from hermes.sandbox.base import Sandbox
from hermes.sandbox.local import Local
from hermes.sandbox.mounts import Place
from hermes.settings import config
from hermes.tools.framework import arguments
from hermes.tools.framework.registry import ToolContext, ToolDef, ToolError
from hermes.tools.framework.session_state import SessionState

Json = dict[str, Any]
KNOWN = "planted-value-0123456789"


@dataclass
class RunResources:
    """The resources of a run that file tools use."""

    guard: Paths
    place: Place
    session: SessionState = field(default_factory=SessionState)
    window_tokens: int = 1_000_000
    make: Callable[[Place], Sandbox] = Local

    async def paths(self) -> Paths:
        return self.guard

    async def sandbox(self) -> Sandbox:
        return self.make(self.place)

    @property
    def spill(self) -> Path:
        return self.place.home.path / "cache/tool_results/run"

    def is_foreign_file(self, real: str) -> bool:
        return False


class FileTools:
    """Calls file tools in a workspace."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder / "ws"
        self.folder.mkdir(parents=True, exist_ok=True)
        home = Home(folder / "user/.hermes")
        home.path.mkdir(parents=True, exist_ok=True)
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
        self.settings = config.load(home, environ={})
        spill = home.path / "cache/tool_results/run"
        options = {"cwd": self.folder, "roots_rw": (self.folder,), "user_home": folder / "user"} | options
        guard = Paths(home=home, roots_ro=(*options.pop("roots_ro", ()), spill), **options)
        self.resources = RunResources(guard, Place(home, self.folder, folder / "private", env=env))
        self.threads = Threads(4)
        self.settings_changed: Json = {}

    def context(self) -> ToolContext:
        nothing: Any = None
        resources: Any = self.resources
        return ToolContext(
            run_id="run",
            call_id="call",
            session_id="s",
            owner="default",
            session_key=None,
            home=self.resources.place.home,
            settings=self.settings,
            secrets=Secrets([KNOWN]),
            asking=nothing,
            emit=lambda *_: None,
            blocking=self.threads.call,
            last_answer=lambda *_: None,
            resources=resources,
        )

    async def prepare(self, tool: ToolDef, args: Json) -> ToolContext:
        """Check and prepare a call, as before `tool.started` is recorded; `self.started` is what the event holds."""
        args, fault = arguments.check(args, tool.parameters)
        if fault:
            raise ToolError(fault, "invalid_arguments")
        ctx = self.context()
        if tool.prepare is not None:
            prepared: Any = tool.prepare(ctx, tool.decode(args))
            ready = await prepared
            ctx.prepared = ready.value
            self.started = ready.started
        return ctx

    async def carry_out(self, tool: ToolDef, ctx: ToolContext, args: Json) -> Json:
        if inspect.iscoroutinefunction(tool.run):
            return await tool.run(ctx, tool.decode(args))
        return await self.threads.call(partial(tool.run, ctx, tool.decode(args)))

    async def call(self, tool: ToolDef, **args: Any) -> Json:
        """The answer, or the error that the model receives."""
        try:
            return await self.carry_out(tool, await self.prepare(tool, args), args)
        except ToolError as refusal:
            return refusal.answer

    def put(self, name: str, content: str | bytes = "") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path
