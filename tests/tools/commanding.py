"""Shared by the tests of command tools: a harness with a sandbox, tool calls of a scripted model, and lists of processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from agent.conftest import MakeHarness
from agent.harness import CompletedRun, Harness, Json, Running
from hermes.sandbox import bubblewrap
from hermes.tools import code, process, terminal
from hermes.tools.framework.registry import ToolDef
from support.model_server import Call, ModelServer, Reply

SURELY_S = 120.0
each_backend = pytest.mark.parametrize("backend", ["local", "bubblewrap"])


class ToolSession:
    """A harness whose model calls tools, one call per turn, all in one session."""

    def __init__(self, make: MakeHarness, server: ModelServer, backend: str = "local", **settings: Any) -> None:
        if backend == "bubblewrap" and (failure := bubblewrap.probe()):
            pytest.skip(f"bubblewrap does not work here: {failure}")
        terminal_settings = {"backend": backend, **settings.pop("terminal", {})}
        self.harness: Harness = make({"terminal": terminal_settings, **settings})
        self.harness.offer(terminal.TOOL, process.TOOL, code.TOOL)
        self.server, self.fields = server, {"session_id": "s1"}
        self.workspace = self.harness.home.workspace

    def offer(self, *tools: ToolDef) -> None:
        self.harness.offer(terminal.TOOL, process.TOOL, code.TOOL, *tools)

    async def begin(self, *calls: Call, replies: tuple[Reply, ...] = (), message: str = "hi", **fields: Any) -> Running:
        """Start a turn whose model makes these calls in one message; `replies` come before the final answer."""
        self.server.script = [Reply(tool_calls=list(calls)), *replies, Reply(text="Done.")]
        return await self.harness.begin(self.harness.spec(self.server, message, **{**self.fields, **fields}))

    async def run(self, *calls: Call, **more: Any) -> CompletedRun:
        return await (await self.begin(*calls, **more)).end()

    async def call(self, tool: str, arguments: Json, **more: Any) -> Json:
        """The answer to one call."""
        [answer] = (await self.run(Call(tool, arguments), **more)).tool_results()
        return answer  # type: ignore[no-any-return]

    async def sh(self, command: str, **arguments: Any) -> Json:
        """The answer of terminal."""
        return await self.call("terminal", {"command": command, **arguments})

    @property
    def private(self) -> Path:
        """The HOME of commands in a sandbox."""
        return self.harness.home.sandbox / "s1" / "home"

    def left_over(self) -> list[str]:
        """Temporary files in the sandbox home that should have been removed."""
        return [path.name for path in self.private.glob(".hermes-*")]


def allowed(make: MakeHarness, server: ModelServer, backend: str = "local", **settings: Any) -> ToolSession:
    """A session without approvals where there is no sandbox, for tests about something else."""
    if backend == "local":
        settings.setdefault("approvals", {"mode": "off"})
    return ToolSession(make, server, backend, **settings)


def running(mark: str) -> list[str]:
    """The processes of this machine whose arguments hold a text."""
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.append(pid)
    return pids


def descriptors() -> int:
    """How many files, pipes and sockets are open, but for the store's, which come as they are needed."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += ".db" not in os.readlink(f"/proc/self/fd/{fd}")
    return count


def new_mark() -> str:
    """A number of seconds that no other test sleeps for."""
    return str(int.from_bytes(os.urandom(4)) + 10_000_000)
