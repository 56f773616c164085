"""What the tests of command tools share: a house with a sandbox, calls driven by a model, processes that are looked for."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from agent.conftest import MakeHouse
from agent.house import House, Json, Ran, Running
from hermes.sandbox import bubblewrap
from hermes.tools import code, process, terminal
from hermes.tools.framework.registry import ToolDef
from support.model_server import Call, ModelServer, Reply

SURELY_S = 120.0
each_backend = pytest.mark.parametrize("backend", ["local", "bubblewrap"])


class Desk:
    """A house whose model calls tools, one call a turn, all in one session."""

    def __init__(self, make: MakeHouse, server: ModelServer, backend: str = "local", **settings: Any) -> None:
        if backend == "bubblewrap" and (failure := bubblewrap.probe()):
            pytest.skip(f"bubblewrap does not work here: {failure}")
        terminal_settings = {"backend": backend, **settings.pop("terminal", {})}
        self.house: House = make({"terminal": terminal_settings, **settings})
        self.house.offer(terminal.TOOL, process.TOOL, code.TOOL)
        self.server, self.fields = server, {"session_id": "s1"}
        self.workspace = self.house.home.workspace

    def offer(self, *tools: ToolDef) -> None:
        self.house.offer(terminal.TOOL, process.TOOL, code.TOOL, *tools)

    async def begin(self, *calls: Call, replies: tuple[Reply, ...] = (), message: str = "hi", **fields: Any) -> Running:
        """A turn of one message with these calls; `replies` are what models say between it and the answer."""
        self.server.script = [Reply(tool_calls=list(calls)), *replies, Reply(text="Done.")]
        return await self.house.begin(self.house.spec(self.server, message, **{**self.fields, **fields}))

    async def ran(self, *calls: Call, **more: Any) -> Ran:
        return await (await self.begin(*calls, **more)).end(SURELY_S)

    async def call(self, tool: str, arguments: Json, **more: Any) -> Json:
        """The answer to one call."""
        [answer] = (await self.ran(Call(tool, arguments), **more)).tool_results()
        return answer  # type: ignore[no-any-return]

    async def sh(self, command: str, **arguments: Any) -> Json:
        """The answer of terminal."""
        return await self.call("terminal", {"command": command, **arguments})

    @property
    def private(self) -> Path:
        """The HOME of commands in a sandbox."""
        return self.house.home.sandbox / "s1" / "home"

    def left_over(self) -> list[str]:
        """What is in there that should not stay."""
        return [path.name for path in self.private.glob(".hermes-*")]


def allowed(make: MakeHouse, server: ModelServer, backend: str = "local", **settings: Any) -> Desk:
    """A desk that asks nothing where there is no sandbox: for tests that are about something else."""
    if backend == "local":
        settings.setdefault("approvals", {"mode": "off"})
    return Desk(make, server, backend, **settings)


def running(mark: str) -> list[str]:
    """The processes of this machine whose arguments hold a text."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def descriptors() -> int:
    """How many files, pipes and sockets are open, but for the store's, which come as they are needed."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += ".db" not in os.readlink(f"/proc/self/fd/{fd}")
    return found


def new_mark() -> str:
    """A number of seconds that no other test sleeps for."""
    return str(int.from_bytes(os.urandom(4)) + 10_000_000)
