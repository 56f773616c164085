"""Lines of a stream that has a limit: one that is too long is skipped whole, and the next is read."""

from __future__ import annotations

import asyncio


async def read_line(reader: asyncio.StreamReader) -> bytes | None:
    """The next line with its end; nothing at the end of the stream. None: it was longer than the reader's limit."""
    is_skipped = False
    while True:
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as end:
            line = end.partial
        except asyncio.LimitOverrunError as overrun:
            await reader.readexactly(overrun.consumed)
            is_skipped = True
            continue
        return None if is_skipped else line
