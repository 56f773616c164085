"""Commands in the terminals of the editor: where there is no sandbox, the user watches them there."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from acp import RequestError
from acp.connection import Connection

from hermes.core.json_types import JsonObject
from hermes.core.limits import ACP_TERMINAL_BYTES_MAX
from hermes.sandbox.base import Command, Handle, Parts, SandboxError, hide_text
from hermes.sandbox.local import Local
from hermes.sandbox.mounts import Place

# Above every number that a system gives to a process: nothing is signalled by it.
_NO_PID = 2**31 - 1
_NAME = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)


class ClientTerminals(Local):
    """Runs commands of the tool `terminal` in the editor; all others, as searches, in processes of our own. `shown` is
    told the tool call and the terminal."""

    def __init__(
        self, place: Place, connection: Connection, session_id: str, shown: Callable[[str, str], None]
    ) -> None:
        super().__init__(place)
        self._connection, self._session_id, self._shown = connection, session_id, shown

    async def _start(self, command: Command) -> tuple[Parts, Handle]:
        if not command.call_id:
            return await super()._start(command)
        argv, env = hide_text(_only(command), command.env)
        params: JsonObject = {"sessionId": self._session_id, "command": argv[0], "args": argv[1:], "cwd": command.cwd}
        params["env"] = [{"name": name, "value": value} for name, value in env.items()]
        params["outputByteLimit"] = ACP_TERMINAL_BYTES_MAX
        try:
            answer = await self._connection.send_request("terminal/create", params)
        except (RequestError, OSError) as error:
            raise SandboxError(f"The editor opens no terminal: {error}.") from None
        terminal_id = str((answer if isinstance(answer, dict) else {}).get("terminalId") or "")
        if not terminal_id:
            raise SandboxError("The editor opens no terminal: its answer has no terminalId.")
        ask = partial(_ask, self._connection, {"sessionId": self._session_id, "terminalId": terminal_id})
        self._shown(command.call_id, terminal_id)
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        child = _Terminal(ask, writing)
        return (child, os.fdopen(reading, "rb", buffering=0)), child


def _only(command: Command) -> list[str]:
    """The arguments with a text that first takes away what the editor would pass on of its own environment."""
    others = sorted(name for name in os.environ if name not in command.env and _NAME.match(name))
    argv = list(command.argv)
    if len(argv) > 2 and others:
        argv[2] = f"unset {' '.join(others)}\n{argv[2]}"
    return argv


async def _ask(connection: Connection, params: JsonObject, method: str) -> JsonObject:
    with suppress(RequestError, OSError):
        answer: Any = await connection.send_request(method, params)
        return answer if isinstance(answer, dict) else {}
    return {}


class _Terminal:
    """A terminal as the process that runs in it. Its output comes as a whole when it has ended: until then the editor
    shows it."""

    pid = _NO_PID

    def __init__(self, ask: Callable[[str], Any], output: int) -> None:
        self._ask, self._output = ask, output
        self._code: int | None = None
        self._kills: set[asyncio.Task[JsonObject]] = set()

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        return -1 if self._code is None else self._code

    async def exited(self) -> int:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.streams.FlowControlMixin(loop), os.fdopen(self._output, "wb", buffering=0)
        )
        transport.set_write_buffer_limits(0)
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        try:
            status = await self._ask("terminal/wait_for_exit")
            result = await self._ask("terminal/output")
            cut = "[the beginning of the output is left out]\n" if result.get("truncated") else ""
            output = result.get("output")
            text = output if isinstance(output, str) else "[the editor does not give the output]"
            if not writer.is_closing():  # else nobody has waited for it
                writer.write(f"{cut}{text}".encode("utf-8", "replace"))
                with suppress(OSError):
                    await writer.drain()
        finally:
            writer.close()
        code = status.get("exitCode")
        self._code = code if isinstance(code, int) else 137
        return self._code

    def signal(self, number: int) -> None:
        task: asyncio.Task[JsonObject] = asyncio.ensure_future(self._ask("terminal/kill"))
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)

    async def sweep(self) -> None:
        await self._ask("terminal/release")
