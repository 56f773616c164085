"""The tool `execute_code`: a Python script in the sandbox that can call other tools like a model does."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from hermes.core import limits
from hermes.core.errors import HermesError
from hermes.core.home import make_private_folder
from hermes.core.stream_parts import ToolCall
from hermes.sandbox import script
from hermes.sandbox.base import CHUNK_BYTES_MAX
from hermes.sandbox.choose import why_no_commands
from hermes.tools import terminal
from hermes.tools.framework import approvals
from hermes.tools.framework.registry import Answer, Prepared, ToolArguments, ToolContext, ToolDef, ToolError, render
from hermes.tools.output_buffer import CapturedOutput

CALLABLE = ("read_file", "write_file", "patch", "search_files", "terminal", "web_search", "web_extract")
_CHILD = Path(script.__file__)
_LAST_OUTPUT_S = 1.0


class ExecuteCode(ToolArguments):
    code: Annotated[str, Meta(min_length=1, max_length=limits.CODE_CHARS_MAX)]


class ScriptChannel:
    """A folder with the script, and a socket there that its calls and its errors come through."""

    def __init__(self, ctx: ToolContext, folder: Path, errors: CapturedOutput) -> None:
        self.calls, self._over = 0, False
        self._ctx, self._folder, self._errors = ctx, folder, errors
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: dict[str, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None

    async def open(self, code: str) -> None:
        listener = await self._ctx.blocking(partial(_write_script, self._folder, code))
        self._server = await asyncio.start_unix_server(
            lambda *streams: self._tasks.add(asyncio.create_task(self._serve(*streams))),
            sock=listener,
            limit=limits.CODE_CALL_BYTES_MAX,
        )

    def cancel_calls(self) -> None:
        self._over = True
        if (calls := self._connections.get("calls")) is not None:
            calls.cancel()

    async def close(self) -> None:
        """Read the script's last output, and remove its folder."""
        if self._server is not None:
            self._server.close()
        self.cancel_calls()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_LAST_OUTPUT_S)
            for task in late - {self._connections.get("calls")}:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._ctx.blocking(partial(shutil.rmtree, self._folder, ignore_errors=True))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serve = asyncio.current_task()
        try:
            purpose = (await reader.readline()).decode("ascii", "replace").strip()
            if purpose in self._connections or purpose not in ("calls", "errors") or serve is None:
                return
            self._connections[purpose] = serve
            await (self._serve_calls(reader, writer) if purpose == "calls" else self._read_errors(reader))
        except (ConnectionError, ValueError, LookupError, TypeError):
            return  # the script has closed the connection, or does not keep to the protocol
        finally:
            writer.close()

    async def _read_errors(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(CHUNK_BYTES_MAX):
            await self._errors.add(data)
        await self._errors.add(b"", end=True)

    async def _serve_calls(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            request = json.loads(line)
            answer = await self._call_tool(str(request["name"]), request["arguments"])
            if self._over:
                return
            writer.write(answer.encode() + b"\n")
            await writer.drain()

    async def _call_tool(self, name: str, arguments: Mapping[str, object]) -> str:
        if name not in CALLABLE or name not in self._ctx.tools or self._ctx.call is None:
            hint = f"A script can call {', '.join(name for name in CALLABLE if name in self._ctx.tools)}."
            return render({"error": f"{name} cannot be called from here.", "code": "unknown_tool", "hint": hint})
        if self.calls == limits.CODE_CALLS_MAX:
            fault = f"A script makes at most {limits.CODE_CALLS_MAX} calls."
            return render({"error": fault, "code": "limit_reached", "hint": "Split the work."})
        self.calls += 1
        text = json.dumps(arguments, ensure_ascii=False)
        return await self._ctx.call(self._ctx, ToolCall(f"{self._ctx.call_id}.{self.calls}", name, text))


def _write_script(folder: Path, code: str) -> socket.socket:
    make_private_folder(folder.parent)
    os.mkdir(folder, 0o700)
    # Commands can write here: from now on nothing is opened by path, which could be redirected.
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX)
    try:
        for name, data in (("script.py", code.encode("utf-8", "replace")), ("hermes_tools.py", _CHILD.read_bytes())):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(name, flags, 0o600, dir_fd=folder_fd), "wb") as file:
                file.write(data)
        # The path of a socket must be short, too.
        listener.bind(f"/proc/self/fd/{folder_fd}/socket" if sys.platform == "linux" else f"{folder}/socket")
        listener.listen()
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(folder_fd)
    return listener


async def _prepare(ctx: ToolContext, args: ExecuteCode) -> Prepared:
    sandbox, shell = await terminal.sandbox_and_shell(ctx)
    await approvals.script(ctx, args.code, shell.cwd)
    return Prepared(value=(sandbox, shell))


async def _run(ctx: ToolContext, args: ExecuteCode) -> Answer:
    sandbox, shell = ctx.prepared
    folder = sandbox.place.private / f".hermes-{os.urandom(8).hex()}"
    names = {name: list(ctx.tools[name].parameters["properties"]) for name in CALLABLE if name in ctx.tools}
    output = CapturedOutput(
        min(limits.CODE_OUTPUT_CHARS_MAX, terminal.output_chars_max(ctx) * 4 // 5), ctx.secrets, ctx.emit
    )
    errors_max = min(limits.CODE_ERRORS_CHARS_MAX, terminal.output_chars_max(ctx) // 5)
    errors = CapturedOutput(errors_max, ctx.secrets, ctx.emit, "stderr")
    channel = ScriptChannel(ctx, folder, errors)
    argv = [sandbox.python, "-u", "-B", str(folder / "hermes_tools.py"), shell.cwd, json.dumps(names)]
    try:
        await channel.open(args.code)
        async with ctx.resources.session.hosts.call(ctx) as call:
            env = terminal.environment(ctx, shell)
            process, _ = await terminal.start_process(sandbox.spawn(argv, env=env, seconds=limits.CODE_S_MAX))
            code = await terminal.follow_process(process, output, channel.cancel_calls)
        ctx.foreign = ctx.foreign or call.connected or (sandbox.name == "docker" and sandbox.place.network)
    except HermesError as fault:
        raise ToolError(f"The script could not be started: {fault}", "tool_unavailable", "Tell the user.") from None
    finally:
        await terminal.run_to_end(channel.close())
    status, error = terminal.ENDED[process.ended_by]
    answer: Answer = {"stdout": output.text(), "stderr": errors.text(), "exit_code": code, "status": status}
    answer["calls"] = channel.calls
    answer |= await approvals.set_aside(ctx, sandbox, ask=status == "ok")
    if status != "ok":
        hint = answer.pop("hint", "") or ("Do less in one script." if status == "timeout" else "")
        raise ToolError(process.reason or error.format(seconds=limits.CODE_S_MAX), status, hint, **answer)
    if code and call.hint:
        answer["hint"] = call.hint
    return answer


TOOL = ToolDef(
    name="execute_code",
    toolset="code_execution",
    description=(
        "Run a Python script, for work of many steps, loops or much data: only what it prints comes back. It can call "
        f"tools: `from hermes_tools import {', '.join(CALLABLE)}`; each takes the arguments of the tool and returns its "
        f"answer as a dict. At most {limits.CODE_CALLS_MAX} calls and {limits.CODE_S_MAX:g} seconds."
    ),
    arguments=ExecuteCode,
    run=_run,
    prepare=_prepare,
    scope=lambda _: frozenset({"shell"}),
    timeout_s=None,
    available=why_no_commands,
    preview=lambda args: args.code.strip().partition("\n")[0],
)
