"""Threads for blocking tools: few, shared, and given up when they will not stop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from hermes.core.threads import Threads

Pool = Callable[[int], Threads]


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    """Makes pools and closes them."""
    made: list[Threads] = []

    def make(threads_max: int) -> Threads:
        made.append(Threads(threads_max))
        return made[-1]

    yield make
    for threads in made:
        threads.close()


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not happened():
            await asyncio.sleep(0)


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


async def test_a_call_is_made_in_another_thread_and_its_result_comes_back(pool: Pool) -> None:
    threads = pool(2)
    assert await threads.call(lambda: 5) == 5
    assert await threads.call(threading.get_ident) != threading.get_ident()


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("k"), TimeoutError(), StopIteration(1)], ids=repr)
async def test_an_exception_reaches_the_caller(pool: Pool, error: Exception) -> None:
    def fail() -> None:
        raise error

    threads = pool(1)
    with pytest.raises((type(error), RuntimeError)) as raised:
        async with asyncio.timeout(2):
            await threads.call(fail)
    assert error in (raised.value, raised.value.__cause__)
    assert await threads.call(lambda: "still there") == "still there"


async def test_no_thread_exists_before_there_is_work(pool: Pool) -> None:
    before = threading.active_count()
    pool(8)
    assert threading.active_count() == before


async def test_threads_are_used_again_and_never_too_many(pool: Pool) -> None:
    threads = pool(3)
    one_by_one = {await threads.call(threading.get_ident) for _ in range(100)}
    at_once = set(await asyncio.gather(*(threads.call(threading.get_ident) for _ in range(100))))
    assert len(one_by_one | at_once) <= 3


async def test_further_calls_wait_in_order(pool: Pool) -> None:
    threads, gate, order = pool(1), threading.Event(), list[int]()
    calls = [asyncio.ensure_future(threads.call(gate.wait))]
    calls += [asyncio.ensure_future(threads.call(partial(order.append, n))) for n in range(5)]
    await asyncio.sleep(0)
    assert order == []
    gate.set()
    await asyncio.gather(*calls)
    assert order == [0, 1, 2, 3, 4]


async def test_no_more_calls_at_once_than_allowed(pool: Pool) -> None:
    threads, work = pool(1), Together(0.05)
    await asyncio.gather(*(threads.call(work) for _ in range(3)))
    assert work.most == 1


async def test_calls_at_once_have_a_thread_each_while_there_is_room(pool: Pool) -> None:
    threads, meeting = pool(4), threading.Barrier(3)
    await threads.call(lambda: None)
    await until(lambda: threads._idle == 1)
    results = await asyncio.gather(*(threads.call(lambda: meeting.wait(1)) for _ in range(3)), return_exceptions=True)
    assert sorted(r for r in results if isinstance(r, int)) == [0, 1, 2]


async def test_an_abandoned_thread_is_replaced_and_its_late_answer_dropped(pool: Pool) -> None:
    threads, gate, began = pool(1), threading.Event(), threading.Event()

    def stubborn() -> str:
        began.set()
        gate.wait(5)
        return "late"

    job = threads.submit(stubborn)
    await until(began.is_set)
    job.future.cancel()
    job.abandon()
    async with asyncio.timeout(2):
        assert await threads.call(lambda: "next") == "next"
    assert threads.abandoned == 1
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await job.future


async def test_an_abandoned_thread_that_comes_back_makes_the_pool_no_larger(pool: Pool) -> None:
    threads, gate, began = pool(1), threading.Event(), threading.Event()

    def stubborn() -> None:
        began.set()
        gate.wait(5)

    job = threads.submit(stubborn)
    await until(began.is_set)
    job.abandon()
    await threads.call(lambda: None)
    gate.set()
    await job.future
    work = Together(0.05)
    for _ in range(4):
        await asyncio.gather(threads.call(work), threads.call(work))
    assert work.most == 1


async def test_a_call_given_up_while_it_waits_is_never_made(pool: Pool) -> None:
    threads, gate, made = pool(1), threading.Event(), list[str]()
    busy = asyncio.ensure_future(threads.call(lambda: gate.wait(5)))
    waiting = asyncio.ensure_future(threads.call(lambda: made.append("an effect")))
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    gate.set()
    await busy
    await threads.call(lambda: None)
    assert made == []


async def test_closing_lets_threads_go(pool: Pool) -> None:
    threads = pool(2)
    thread = await threads.call(threading.current_thread)
    assert thread.daemon
    threads.close()
    await until(lambda: not thread.is_alive())
