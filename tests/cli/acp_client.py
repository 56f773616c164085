"""An ACP editor built with the SDK's client: `hermes acp` over real pipes, with open buffers and a record of updates."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from acp import RequestError, connect_to_agent
from acp.schema import (
    ClientCapabilities,
    CreateTerminalResponse,
    FileSystemCapabilities,
    Implementation,
    InitializeResponse,
    ReadTextFileResponse,
    RequestPermissionResponse,
    TerminalOutputResponse,
    WaitForTerminalExitResponse,
    WriteTextFileResponse,
)

from support.preloaded import HermesProcess

from .conftest import HERMES, Cli

WAIT_S = 60.0


class Editor:
    """A client. `buffers` are the files that it has open, by path; `choose` answers permission requests."""

    def __init__(self) -> None:
        self.agent: Any
        self.process: subprocess.Popen[bytes]
        self.updates: list[tuple[str, dict[str, Any]]] = []
        self.buffers: dict[str, str] = {}
        self.reads: list[str] = []
        self.writes: list[str] = []
        self.permission_requests: list[dict[str, Any]] = []
        self.terminals: dict[str, asyncio.subprocess.Process] = {}
        self.outputs: dict[str, asyncio.Task[tuple[bytes, bytes]]] = {}
        self.killed: list[str] = []
        self.released: list[str] = []
        self.choose: Callable[[dict[str, Any]], str | None] = lambda _: "once"
        self.permission_gate: asyncio.Event | None = None
        self._changed = asyncio.Condition()

    # --- what the agent calls

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        async with self._changed:
            self.updates.append((session_id, update.model_dump(by_alias=True, exclude_none=True)))
            self._changed.notify_all()

    async def request_permission(self, session_id: str, tool_call: Any, options: Any, **_: Any) -> Any:
        request = {"sessionId": session_id, "toolCall": tool_call.model_dump(by_alias=True, exclude_none=True)}
        request["options"] = [option.model_dump(by_alias=True, exclude_none=True) for option in options]
        async with self._changed:
            self.permission_requests.append(request)
            self._changed.notify_all()
        if self.permission_gate is not None:
            await self.permission_gate.wait()
        choice = self.choose(request)
        outcome = {"outcome": "selected", "optionId": choice} if choice else {"outcome": "cancelled"}
        return RequestPermissionResponse.model_validate({"outcome": outcome})

    async def read_text_file(self, session_id: str, path: str, **_: Any) -> ReadTextFileResponse:
        self.reads.append(path)
        if path in self.buffers:
            return ReadTextFileResponse(content=self.buffers[path])
        try:
            with open(path, encoding="utf-8") as file:
                return ReadTextFileResponse(content=file.read())
        except FileNotFoundError:
            raise RequestError.resource_not_found(path) from None

    async def write_text_file(self, session_id: str, path: str, content: str, **_: Any) -> WriteTextFileResponse:
        self.writes.append(path)
        if path in self.buffers:
            self.buffers[path] = content
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)
        return WriteTextFileResponse()

    async def create_terminal(
        self, session_id: str, command: str, args: Any = None, env: Any = None, cwd: str | None = None, **_: Any
    ) -> CreateTerminalResponse:
        environ = {**os.environ, "OF_EDITOR": "yes", **{variable.name: variable.value for variable in env or ()}}
        process = await asyncio.create_subprocess_exec(
            *(command, *args),
            env=environ,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        terminal_id = f"term_{len(self.terminals)}"
        self.terminals[terminal_id] = process
        self.outputs[terminal_id] = asyncio.create_task(process.communicate())
        async with self._changed:
            self._changed.notify_all()
        return CreateTerminalResponse(terminal_id=terminal_id)

    async def wait_for_terminal_exit(self, session_id: str, terminal_id: str, **_: Any) -> WaitForTerminalExitResponse:
        await self.outputs[terminal_id]
        code = self.terminals[terminal_id].returncode
        ended = {"exit_code": code} if code is not None and code >= 0 else {"signal": "SIGKILL"}
        return WaitForTerminalExitResponse(**ended)

    async def terminal_output(self, session_id: str, terminal_id: str, **_: Any) -> TerminalOutputResponse:
        return TerminalOutputResponse(output=(await self.outputs[terminal_id])[0].decode(), truncated=False)

    async def kill_terminal(self, session_id: str, terminal_id: str, **_: Any) -> None:
        self.killed.append(terminal_id)
        if self.terminals[terminal_id].returncode is None:
            os.killpg(self.terminals[terminal_id].pid, signal.SIGKILL)

    async def release_terminal(self, session_id: str, terminal_id: str, **_: Any) -> None:
        self.released.append(terminal_id)

    async def ext_method(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        raise RequestError.method_not_found(method)

    async def ext_notification(self, method: str, params: dict[str, Any]) -> None:
        pass

    def on_connect(self, agent: Any) -> None:
        pass

    # --- what tests ask

    async def initialize(self, *, files: bool = True, **capabilities: Any) -> InitializeResponse:
        fs = FileSystemCapabilities(read_text_file=files, write_text_file=files)
        offered = ClientCapabilities(fs=fs, **capabilities)
        info = Implementation(name="editor", title="Editor", version="1")
        return await self.agent.initialize(protocol_version=1, client_capabilities=offered, client_info=info)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self._changed, asyncio.timeout(WAIT_S):
            await self._changed.wait_for(condition)

    def kinds(self, session_id: str | None = None) -> list[str]:
        return [update["sessionUpdate"] for updated_id, update in self.updates if session_id in (None, updated_id)]

    def of(self, kind: str, session_id: str | None = None) -> list[dict[str, Any]]:
        return [
            update
            for updated_id, update in self.updates
            if update["sessionUpdate"] == kind and session_id in (None, updated_id)
        ]

    def text(self, kind: str = "agent_message_chunk", session_id: str | None = None) -> str:
        return "".join(update["content"].get("text", "") for update in self.of(kind, session_id))


@asynccontextmanager
async def started(cli: Cli, *args: str) -> AsyncIterator[tuple[Any, Any, subprocess.Popen[bytes]]]:
    """`hermes acp` with a reader of its output and a writer to its input."""
    log = (cli.home.parent / "stderr").open("wb")
    process = HermesProcess(
        [*HERMES, "acp", *args],
        env=cli.env,
        cwd=cli.folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
    )
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=1 << 26)
    reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop), process.stdin)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    try:
        yield reader, writer, process
    finally:
        log.close()
        writer.close()
        try:
            await asyncio.to_thread(process.wait, WAIT_S)
        finally:
            process.kill()
            reading.close()


@asynccontextmanager
async def editing(cli: Cli, *args: str) -> AsyncIterator[Editor]:
    editor = Editor()
    async with started(cli, *args) as (reader, writer, process):
        editor.agent, editor.process = connect_to_agent(editor, writer, reader, use_unstable_protocol=True), process
        yield editor
        await editor.agent.close()


def stderr_of(cli: Cli) -> str:
    return (cli.home.parent / "stderr").read_text()


def real(cli: Cli, name: str) -> str:
    return os.path.realpath(cli.folder / name)
