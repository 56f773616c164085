"""The scripted model server on an event loop in its own thread, for blocking tests and tests of other processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from support.model_server import ModelServer, Reply
from support.waiting import idle


async def _end(server: ModelServer) -> None:
    """Stop, and let the loop close the sockets of aborted connections."""
    await server.stop()
    await idle()


@contextmanager
def serving(*script: Reply) -> Iterator[ModelServer]:
    """A running server; its attributes may be read from any thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = ModelServer(*script)
    asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
