"""Threads for blocking work, shared by all runs and started on demand."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from hermes.core.limits import MESSAGES_AT_ONCE_MAX, THREAD_IDLE_S_MAX

T = TypeVar("T")


class Job:
    """A call for a thread. Cancelled before it began it is never made, afterwards its result is dropped."""

    def __init__(self, pool: Threads, function: Callable[[], Any]) -> None:
        self._pool, self._function = pool, function
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self.dropped = False
        self.abandoned = False
        self.future.add_done_callback(self._drop)

    def abandon(self) -> None:
        """The call hangs: its thread is replaced."""
        self._pool._abandon(self)

    def _drop(self, future: asyncio.Future[Any]) -> None:
        self.dropped = future.cancelled()

    def run(self) -> None:
        """Runs in the thread; the outcome goes to the loop."""
        if self.dropped:
            return
        result, error = None, None
        try:
            result = self._function()
        except StopIteration as stop:  # a future cannot carry it
            error = RuntimeError("the call raised StopIteration")
            error.__cause__ = stop
        except BaseException as raised:  # noqa: BLE001  (it belongs to the caller)
            error = raised  # type: ignore[assignment]
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: object, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class RunBlocking(Protocol):
    async def __call__(self, function: Callable[[], T], /) -> T: ...


class Threads:
    """At most `threads_max` calls at once; further ones wait in order. `niceness` lowers their priority."""

    def __init__(self, threads_max: int, *, niceness: int = 0) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads_max, self._niceness = threads_max, niceness
        self._threads = self._idle = self._queued = 0
        self._closed = False
        self.abandoned = 0

    async def call(self, function: Callable[[], Any]) -> Any:
        return await self.submit(function).future

    async def call_for(self, messages: int, function: Callable[[], Any]) -> Any:
        """Call a function that processes so many messages: inline for few, in a thread for many."""
        return function() if messages <= MESSAGES_AT_ONCE_MAX else await self.call(function)

    def submit(self, function: Callable[[], Any]) -> Job:
        job = Job(self, function)
        with self._lock:
            self._queued += 1
            room = self._threads - self.abandoned < self._threads_max
            # Threads of a closed pool are ending.
            if self._closed or (self._queued > self._idle and room):
                self._start()
        self._jobs.put(job)
        return job

    def _start(self) -> None:
        self._threads += 1
        self._idle += 1
        threading.Thread(target=self._serve, name="hermes-thread", daemon=True).start()

    def _abandon(self, job: Job) -> None:
        with self._lock:
            job.abandoned = True
            self.abandoned += 1
            if self._queued > self._idle:
                self._start()

    def _serve(self) -> None:
        if self._niceness and sys.platform == "linux":  # elsewhere it would be that of the whole process
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + self._niceness))
        while True:
            try:
                job = self._jobs.get(timeout=THREAD_IDLE_S_MAX)
            except queue.Empty:
                job = None
            with self._lock:
                if job is None:
                    if self._queued and not self._closed:  # a queued job counts on this thread
                        continue
                    self._idle -= 1
                    self._threads -= 1
                    return
                self._idle -= 1
                self._queued -= 1
            job.run()
            with self._lock:
                if job.abandoned:  # this thread was replaced
                    self._threads -= 1
                    self.abandoned -= 1
                    return
                self._idle += 1
            job = None  # an idle thread must not keep it alive

    def close(self) -> None:
        with self._lock:
            self._closed = True
            count = self._threads
        for _ in range(count):
            self._jobs.put(None)
