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
from hermes.core.limits import ACP_CLOSE_S_MAX, ACP_TERMINAL_BYTES_MAX
from hermes.sandbox.base import Command, Handle, Parts, hide_text
from hermes.sandbox.local import Local
from hermes.sandbox.mounts import Place

# Above every number that a system gives to a process: nothing is signalled by it.
_NO_PID = 2**31 - 1
# The exit code of a command that could not be started, as shells have it.
_NOT_STARTED = 127
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
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        child = _Terminal(self._connection, params, writing, partial(self._shown, command.call_id))
        return (child, os.fdopen(reading, "rb", buffering=0)), child


def _only(command: Command) -> list[str]:
    """The arguments with a text that first takes away what the editor would pass on of its own environment."""
    others = sorted(name for name in os.environ if name not in command.env and _NAME.match(name))
    argv = list(command.argv)
    if len(argv) > 2 and others:
        argv[2] = f"unset {' '.join(others)}\n{argv[2]}"
    return argv


class _Terminal:
    """A terminal as the process that runs in it, which the editor may take any time to open. Its output comes as a whole
    when it has ended: until then the editor shows it."""

    pid = _NO_PID

    def __init__(self, connection: Connection, params: JsonObject, output: int, shown: Callable[[str], None]) -> None:
        self._connection, self._params, self._output, self._shown = connection, params, output, shown
        self._id = ""
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._code: int | None = None
        self._kills: set[asyncio.Task[JsonObject]] = set()

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        return -1 if self._code is None else self._code

    async def exited(self) -> int:
        opening = asyncio.ensure_future(self._open())
        await asyncio.wait((opening, self._stopped), return_when=asyncio.FIRST_COMPLETED)
        text, code = "", 137
        if not self._stopped.done() and not (text := opening.result()):
            status = await self._ask("terminal/wait_for_exit")
            code = status["exitCode"] if isinstance(status.get("exitCode"), int) else 137
            text = _text_of(await self._ask("terminal/output"))
        elif text:
            code = _NOT_STARTED
        await self._write(text)
        self._code = code
        return code

    async def _open(self) -> str:
        """Why there is no terminal; empty once there is one. One that nobody waits for any more is ended at once."""
        try:
            answer = await self._connection.send_request("terminal/create", self._params)
        except (RequestError, OSError) as error:
            return f"The editor opens no terminal: {error}."
        self._id = str((answer if isinstance(answer, dict) else {}).get("terminalId") or "")
        if not self._id:
            return "The editor opens no terminal: its answer has no terminalId."
        if self._stopped.done():
            await self._ask("terminal/kill")
            await self.sweep()
        else:
            self._shown(self._id)
        return ""

    async def _write(self, text: str) -> None:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.streams.FlowControlMixin(loop), os.fdopen(self._output, "wb", buffering=0)
        )
        transport.set_write_buffer_limits(0)
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        try:
            if not writer.is_closing():  # else nobody has waited for it
                writer.write(text.encode("utf-8", "replace"))
                with suppress(OSError):
                    await writer.drain()
        finally:
            writer.close()

    def signal(self, number: int) -> None:
        if not self._id:
            if not self._stopped.done():
                self._stopped.set_result(None)
            return
        task: asyncio.Task[JsonObject] = asyncio.ensure_future(self._ask("terminal/kill"))
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)

    async def sweep(self) -> None:
        if self._id:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ask("terminal/release"), ACP_CLOSE_S_MAX)

    async def _ask(self, method: str) -> JsonObject:
        params = {"sessionId": self._params["sessionId"], "terminalId": self._id}
        with suppress(RequestError, OSError):
            answer: Any = await self._connection.send_request(method, params)
            return answer if isinstance(answer, dict) else {}
        return {}


def _text_of(answer: JsonObject) -> str:
    output = answer.get("output")
    if not isinstance(output, str):
        return "[the editor does not give the output]"
    return f"[the beginning of the output is left out]\n{output}" if answer.get("truncated") else output
