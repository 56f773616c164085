"""Threads for blocking tools: few, shared, and given up when they will not stop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from hermes.core import threads as threads_module
from hermes.core.threads import Threads
from support.waiting import DEADLINE_S, idle, until

Pool = Callable[[int], Threads]


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    """Makes pools and closes them."""
    pools: list[Threads] = []

    def make(threads_max: int) -> Threads:
        pools.append(Threads(threads_max))
        return pools[-1]

    yield make
    for threads in pools:
        threads.close()


class Together:
    """Work that notices how much of it is done at once."""

    def __init__(self, linger_s: float) -> None:
        self._lock = threading.Lock()
        self._crowd = threading.Event()
        self._linger_s = linger_s
        self._now = self.most = 0

    def __call__(self) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            if self._now > 1:
                self._crowd.set()
        self._crowd.wait(self._linger_s)
        with self._lock:
            self._now -= 1


async def test_thread_call_returns_result(pool: Pool) -> None:
    threads = pool(2)
    assert await threads.call(lambda: 5) == 5
    assert await threads.call(threading.get_ident) != threading.get_ident()


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("k"), TimeoutError(), StopIteration(1)], ids=repr)
async def test_thread_exception_reaches_caller(pool: Pool, error: Exception) -> None:
    def fail() -> None:
        raise error

    threads = pool(1)
    with pytest.raises((type(error), RuntimeError)) as raised:
        async with asyncio.timeout(DEADLINE_S):
            await threads.call(fail)
    assert error in (raised.value, raised.value.__cause__)
    assert await threads.call(lambda: "still there") == "still there"


async def test_no_thread_is_created_before_first_call(pool: Pool) -> None:
    before = threading.active_count()
    pool(8)
    assert threading.active_count() == before


async def test_threads_are_reused_and_limited(pool: Pool) -> None:
    threads = pool(3)
    one_by_one = {await threads.call(threading.get_ident) for _ in range(100)}
    at_once = set(await asyncio.gather(*(threads.call(threading.get_ident) for _ in range(100))))
    assert len(one_by_one | at_once) <= 3


async def test_queued_calls_run_in_order(pool: Pool) -> None:
    threads, gate, order = pool(1), threading.Event(), list[int]()
    calls = [asyncio.ensure_future(threads.call(gate.wait))]
    calls += [asyncio.ensure_future(threads.call(partial(order.append, n))) for n in range(5)]
    await until(lambda: threads._idle == 0)  # the first has its thread
    assert order == []
    gate.set()
    await asyncio.gather(*calls)
    assert order == [0, 1, 2, 3, 4]


async def test_concurrent_calls_are_limited(pool: Pool) -> None:
    threads, work = pool(1), Together(0.05)
    await asyncio.gather(*(threads.call(work) for _ in range(3)))
    assert work.most == 1


async def test_concurrent_calls_get_a_thread_each(pool: Pool) -> None:
    threads, meeting = pool(4), threading.Barrier(3)
    await threads.call(lambda: None)
    await until(lambda: threads._idle == 1)
    results = await asyncio.gather(
        *(threads.call(lambda: meeting.wait(DEADLINE_S)) for _ in range(3)), return_exceptions=True
    )
    assert sorted(r for r in results if isinstance(r, int)) == [0, 1, 2]


async def test_abandoned_thread_is_replaced_and_late_result_dropped(pool: Pool) -> None:
    threads, gate, started = pool(1), threading.Event(), threading.Event()

    def stubborn() -> str:
        started.set()
        gate.wait(DEADLINE_S)
        return "late"

    job = threads.submit(stubborn)
    await until(started.is_set)
    job.future.cancel()
    job.abandon()
    async with asyncio.timeout(DEADLINE_S):
        assert await threads.call(lambda: "next") == "next"
    assert threads.abandoned == 1
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await job.future


async def test_returning_abandoned_thread_does_not_grow_pool(pool: Pool) -> None:
    threads, gate, started = pool(1), threading.Event(), threading.Event()

    def stubborn() -> None:
        started.set()
        gate.wait(DEADLINE_S)

    job = threads.submit(stubborn)
    await until(started.is_set)
    job.abandon()
    await threads.call(lambda: None)
    gate.set()
    await job.future
    work = Together(0.05)
    for _ in range(4):
        await asyncio.gather(threads.call(work), threads.call(work))
    assert work.most == 1


async def test_cancelled_queued_call_never_runs(pool: Pool) -> None:
    threads, gate, results = pool(1), threading.Event(), list[str]()
    busy = asyncio.ensure_future(threads.call(lambda: gate.wait(DEADLINE_S)))
    waiting = asyncio.ensure_future(threads.call(lambda: results.append("an effect")))
    await idle()
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    gate.set()
    await busy
    await threads.call(lambda: None)
    assert results == []


async def test_close_ends_threads(pool: Pool) -> None:
    threads = pool(2)
    thread = await threads.call(threading.current_thread)
    assert thread.daemon
    threads.close()
    await until(lambda: not thread.is_alive())


class Hesitant:
    """A queue whose readers pause between their timeout and leaving."""

    leaving, go = threading.Event(), threading.Event()

    def __init__(self) -> None:
        self._jobs: queue.Queue[Any] = queue.Queue()
        self.put = self._jobs.put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        try:
            return self._jobs.get(block, timeout)
        except queue.Empty:
            self.leaving.set()
            self.go.wait(DEADLINE_S)
            raise


@pytest.fixture
def hesitant(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hesitant]]:
    monkeypatch.setattr(threads_module, "THREAD_IDLE_S_MAX", 0.02)
    monkeypatch.setattr(queue, "SimpleQueue", Hesitant)
    Hesitant.leaving.clear()
    Hesitant.go.clear()
    yield Hesitant
    Hesitant.go.set()


async def test_job_submitted_while_last_idle_thread_leaves_is_run(hesitant: type[Hesitant]) -> None:
    pool = Threads(4)
    assert await pool.call(lambda: 1) == 1
    await until(hesitant.leaving.is_set)
    async with asyncio.timeout(DEADLINE_S):
        job = pool.submit(lambda: 2)
        hesitant.go.set()
        assert await job.future == 2
    pool.close()


async def test_full_pool_of_leaving_threads_runs_every_job(hesitant: type[Hesitant]) -> None:
    pool = Threads(1)
    assert await pool.call(lambda: 1) == 1
    await until(hesitant.leaving.is_set)
    async with asyncio.timeout(DEADLINE_S):
        jobs = [pool.submit(lambda n=n: n) for n in range(3)]
        hesitant.go.set()
        assert [await job.future for job in jobs] == [0, 1, 2]
    pool.close()
