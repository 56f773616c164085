"""Programs of the operator's that are spoken to over their pipes: servers of tools, the local model's worker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from hermes.sandbox.base import Group

_REAPER = Path(__file__).with_name("reaper.py")
_HAS_REAPER = sys.platform == "linux"
_NOTE_BYTES_MAX, _NOTES_MAX = 2_048, 1_000


@asynccontextmanager
async def piped(
    argv: Sequence[str],
    env: Mapping[str, str],
    note: Callable[[str], None],
    *,
    line_bytes_max: int,
    end_s: float,
    cwd: Path | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process in a group of its own, started now and gone at the end, with all that it has started.

    `note` gets what it writes to its error output, as far as a log can stand it.
    """
    reaper = [sys.executable, "-I", "-S", str(_REAPER), str(os.getpid())] if _HAS_REAPER else []
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *reaper, *argv, env=env, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True,
        limit=line_bytes_max,
    )  # fmt: skip
    hearing = asyncio.ensure_future(_hear(process, note))
    try:
        yield process
    finally:
        await asyncio.shield(_end(process, hearing, end_s))


async def _hear(process: asyncio.subprocess.Process, note: Callable[[str], None]) -> None:
    assert process.stderr is not None
    lines = 0
    while data := await process.stderr.read(_NOTE_BYTES_MAX):
        lines += 1
        if lines <= _NOTES_MAX:
            note(data.decode("utf-8", "replace").strip())


async def _end(process: asyncio.subprocess.Process, hearing: asyncio.Future[None], seconds: float) -> None:
    """Close its input; what does not end by that is told to, and then made to."""
    assert process.stdin is not None
    group = Group(process.pid, reaped=_HAS_REAPER)
    process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL, None):
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds / 2):
                await process.wait()
                break
        if number is not None:
            group.signal(number)
    await group.sweep()
    # Its last words often say why. A pipe that is not read to its end would stay open.
    await asyncio.wait([hearing], timeout=seconds / 10)
    hearing.cancel()
    process._transport.close()  # type: ignore[attr-defined]
    await asyncio.sleep(0)
