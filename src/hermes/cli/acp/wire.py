"""Messages of the Agent Client Protocol over pipes: one JSON object a line, and nothing else on them."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hermes.cli.output import UsageError
from hermes.core.json_types import JsonObject
from hermes.core.limits import ACP_CLOSE_S_MAX, ACP_LINE_BYTES_MAX
from hermes.core.line_reader import read_line

PARSE_ERROR, INVALID_REQUEST, INTERNAL_ERROR = -32700, -32600, -32603


@contextmanager
def protocol_pipes() -> Iterator[tuple[int, int]]:
    """Standard input and output for the protocol alone: meanwhile whatever else reads is given nothing, and whatever
    else prints goes to standard error."""
    sys.stdout.flush()
    pipes = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    try:
        yield pipes
    finally:
        sys.stdout.flush()
        for own, fd in enumerate(pipes):
            os.dup2(fd, own)
        for fd in (null, *pipes):
            os.close(fd)


class Wire:
    """A transport of the SDK's `Connection`. A line that is no message is answered with an error, and the next is read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, fd_in: int, fd_out: int) -> Wire:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=ACP_LINE_BYTES_MAX)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), _pipe(fd_in, "rb"))
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.streams.FlowControlMixin(loop), _pipe(fd_out, "wb")
        )
        transport.set_write_buffer_limits(0)  # whoever drains it waits until all is written
        return cls(reader, asyncio.StreamWriter(transport, protocol, None, loop))

    async def receive(self) -> JsonObject | None:
        while (line := await read_line(self._reader)) != b"":
            if line is None:
                self._refuse(INVALID_REQUEST, f"A message has at most {ACP_LINE_BYTES_MAX} bytes")
            elif line.strip() and (message := self._message(line)) is not None:
                return message
        return None

    def _message(self, line: bytes) -> JsonObject | None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            self._refuse(PARSE_ERROR, "Parse error: the line is no JSON")
            return None
        if _is_message(message):
            return _with_error_object(message)
        self._refuse(INVALID_REQUEST, "Invalid request: a message is one JSON object with method, or id and result")
        return None

    def _refuse(self, code: int, message: str) -> None:
        self._write({"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}})

    def notify(self, method: str, params: JsonObject) -> None:
        """Send a notification now, before whatever is sent later."""
        self._write({"jsonrpc": "2.0", "method": method, "params": params})

    async def send(self, message: JsonObject) -> None:
        self._write(message)
        try:
            await self._writer.drain()
        except OSError:
            if "method" in message:  # an answer is of no use any more, but whoever asks must know
                raise

    def _write(self, message: JsonObject) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    async def close(self) -> None:
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), ACP_CLOSE_S_MAX)
        self._writer.close()


def _with_error_object(message: JsonObject) -> JsonObject:
    """The SDK takes the error of an answer for an object without looking."""
    error = message.get("error")
    if "method" in message or "error" not in message or isinstance(error, dict):
        return message
    return {**message, "error": {"code": INTERNAL_ERROR, "message": str(error)}}


def _is_message(message: Any) -> bool:
    """Whether it is a request, a notification, or an answer to one of ours."""
    if not isinstance(message, dict) or not isinstance(message.get("id"), str | int | None):
        return False
    if "method" in message:
        return isinstance(message["method"], str)
    return "id" in message and ("result" in message or "error" in message)


def _pipe(fd: int, mode: str) -> Any:
    kind = os.fstat(fd).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or os.isatty(fd)):
        message = "`hermes acp` is started by an editor, which it talks to over pipes."
        raise UsageError(message, hint="hermes chat, for a conversation in a terminal")
    return os.fdopen(os.dup(fd), mode, buffering=0)
