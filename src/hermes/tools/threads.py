"""Threads for tools that block. They are shared by all runs and come to life when there is work for them."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

from hermes.limits import THREAD_IDLE_S_MAX


class ToolThreads:
    """At most `threads_max` calls at once; further ones wait. A thread that will not stop can be given up."""

    def __init__(self, threads_max: int) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]] | None]
        self._work = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads_max = threads_max
        self._threads = self._idle = 0
        self.abandoned = 0

    async def call(self, function: Callable[[], Any]) -> Any:
        """The function's result, computed in a thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

        def done(result: Any, error: BaseException | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        self._work.put((function, done))
        with self._lock:
            if self._idle == 0 and self._threads - self.abandoned < self._threads_max:
                self._threads += 1
                threading.Thread(target=self._serve, name="hermes-tool", daemon=True).start()
        return await future

    def abandon(self) -> None:
        """A call does not come back: its thread no longer counts."""
        with self._lock:
            self.abandoned += 1

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            try:
                job = self._work.get(timeout=THREAD_IDLE_S_MAX)
            except queue.Empty:
                job = None
            with self._lock:
                self._idle -= 1
                if job is None:
                    self._threads -= 1
                    return
            function, done = job
            try:
                done(function(), None)
            except BaseException as error:  # noqa: BLE001  (it belongs to the caller)
                done(None, error)

    def close(self) -> None:
        """Let idle threads go at once."""
        with self._lock:
            count = self._threads
        for _ in range(count):
            self._work.put(None)
