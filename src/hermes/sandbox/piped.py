"""Programs of the operator that are used over their pipes: MCP servers, the local model's worker.

MCP servers run in their own sandbox unless the settings say otherwise."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hermes.core.limits import CHATTER_LINE_BYTES, CHATTER_LINES_MAX, CHATTER_LINES_PER_S, CHUNK_BYTES_MAX
from hermes.sandbox.base import Group
from hermes.sandbox.bubblewrap import Bubblewrap

_REAPER = Path(__file__).with_name("reaper.py")
_HAS_REAPER = sys.platform == "linux"
_NOTE_BYTES_MAX, _NOTES_MAX = 2_048, 1_000


@asynccontextmanager
async def piped_process(
    argv: Sequence[str],
    env: Mapping[str, str],
    note: Callable[[str], None],
    *,
    line_bytes_max: int,
    end_s: float,
    cwd: Path | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process in its own group, killed at the end with all that it has started. `note` gets its error output, up to a
    limit."""
    reaper = [sys.executable, "-I", "-S", str(_REAPER), str(os.getpid())] if _HAS_REAPER else []
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *reaper, *argv, env=env, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True,
        limit=line_bytes_max,
    )  # fmt: skip
    assert process.stderr is not None
    errors_task = asyncio.ensure_future(_read_errors(process.stderr, note))
    try:
        yield process
    finally:
        await asyncio.shield(_end(process, errors_task, end_s))


@dataclass(frozen=True, slots=True)
class Program:
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader


@asynccontextmanager
async def sandboxed_process(
    sandbox: Bubblewrap,
    argv: Sequence[str],
    env: Mapping[str, str],
    note: Callable[[str], None],
    *,
    line_bytes_max: int,
    end_s: float,
) -> AsyncIterator[Program]:
    """Like `piped_process`, in a sandbox that ends with the program."""
    pipes: list[asyncio.BaseTransport] = []
    try:
        child, *fds = await sandbox.start_program(argv, env)
        stdin = await _writer(fds[0], pipes)
        stdout, stderr = [await _reader(fd, line_bytes_max, pipes) for fd in fds[1:]]
        errors_task = asyncio.ensure_future(_read_errors(stderr, note))
        try:
            yield Program(stdin, stdout)
        finally:
            stdin.close()
            await _wait_or_signal(child.exited, child.signal, end_s / 2)
            await asyncio.wait([errors_task], timeout=end_s / 10)  # the last output often says why
            errors_task.cancel()
            child.release()
    finally:
        for pipe in pipes:
            pipe.close()
        await asyncio.shield(sandbox.stop())


async def _reader(fd: int, line_bytes_max: int, pipes: list[asyncio.BaseTransport]) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=line_bytes_max)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    pipes.append(transport)
    return reader


async def _writer(fd: int, pipes: list[asyncio.BaseTransport]) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(fd, "wb", buffering=0)
    )
    pipes.append(transport)
    return asyncio.StreamWriter(transport, protocol, None, loop)


class Throttle:
    """Slows down reading from a program that writes much that nobody needs."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lines, self._at = 0.0, self._loop.time()

    async def spend(self, data: bytes) -> None:
        """A long line counts as several."""
        now = self._loop.time()
        self._lines = max(0.0, self._lines - (now - self._at) * CHATTER_LINES_PER_S)
        self._lines += 1 + len(data) // CHATTER_LINE_BYTES
        self._at = now
        if self._lines > CHATTER_LINES_MAX:
            await asyncio.sleep((self._lines - CHATTER_LINES_MAX) / CHATTER_LINES_PER_S)


async def _read_errors(stderr: asyncio.StreamReader, note: Callable[[str], None]) -> None:
    notes, throttle = 0, Throttle()
    while data := await stderr.read(_NOTE_BYTES_MAX if notes < _NOTES_MAX else CHUNK_BYTES_MAX):
        if notes < _NOTES_MAX:
            notes += 1
            note(data.decode("utf-8", "replace").strip())
        await throttle.spend(data)


async def _wait_or_signal(exited: Callable[[], Awaitable[int]], send: Callable[[int], None], seconds: float) -> None:
    """Wait so many seconds for the end of a process, and again after SIGTERM and SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL, None):
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await exited()
                return
        if number is not None:
            send(number)


async def _end(process: asyncio.subprocess.Process, errors_task: asyncio.Future[None], seconds: float) -> None:
    """Close the input of a process; if it does not end by that, send signals."""
    assert process.stdin is not None
    group = Group(process.pid, reaped=_HAS_REAPER)
    process.stdin.close()
    await _wait_or_signal(process.wait, group.signal, seconds / 2)
    await group.sweep()
    # The last output often says why. A pipe that is not read to its end would stay open.
    await asyncio.wait([errors_task], timeout=seconds / 10)
    errors_task.cancel()
    process._transport.close()  # type: ignore[attr-defined]
    await asyncio.sleep(0)
