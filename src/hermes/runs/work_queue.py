"""Submitted runs that any replica may execute: recorded, queued, and taken from the queue.

The store decides which run is next: a message of the queue is only the permit to look. So a lost or repeated message
neither loses a run nor starts it twice; without NATS the store is polled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Protocol

from hermes.core.limits import CLOSE_S_MAX, QUEUE_BUSY_S, QUEUE_EXTEND_S, QUEUE_LOST_S, STORE_POLL_S
from hermes.core.spec import RunSpec
from hermes.runs.admission import Refused
from hermes.runs.live_run import LiveRun
from hermes.store.base import RunRecord, StoreError

if TYPE_CHECKING:
    from hermes.runs.engine import RunEngine

log = logging.getLogger(__name__)


class Delivery(Protocol):
    @property
    def count(self) -> int: ...

    async def extend(self) -> None: ...

    async def ack(self) -> None: ...

    async def nak(self, delay: float) -> None: ...


class RunQueue(Protocol):
    """What `bus.nats_queue` offers."""

    @property
    def connected(self) -> bool: ...

    async def put(self, run_id: str) -> bool:
        """False: no replica will get a message."""
        ...

    async def take(self, wait_s: float) -> Delivery | None: ...

    async def size(self) -> int | None: ...


def may_travel(spec: RunSpec) -> bool:
    """Whether another process can execute a run: credentials from a request are stored nowhere."""
    route = spec.route
    return spec.persist and (route is None or not (route.api_key or route.fallbacks))


class WorkQueue:
    """Takes runs for this replica, at most `inflight_max` at a time."""

    def __init__(self, engine: RunEngine, queue: RunQueue, inflight_max: int) -> None:
        self._engine, self._queue, self._inflight_max = engine, queue, inflight_max
        self._working: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._serving = False

    async def put(self, live: LiveRun) -> None:
        """Let any replica have a recorded, queued run; this one, if it has room and the others cannot be told."""
        run_id = live.spec.run_id
        await self._engine.lifecycle.hand_over(live)
        await self._engine.store.runs.offer(run_id)
        is_queued = await self._queue.put(run_id)
        if not is_queued and self._serving and len(self._working) < self._inflight_max:
            self._spawn(self._look(None))

    async def serve(self) -> None:
        """Take runs until cancelled; those that were taken continue."""
        looking = [asyncio.create_task(work) for work in (self._take_all(), self._keep())]
        self._serving = True
        try:
            await asyncio.gather(*looking)
        finally:
            self._serving = False
            for task in looking:
                task.cancel()

    async def close(self) -> None:
        """Acknowledge the runs of this process after they have ended."""
        if self._working:
            _, late = await asyncio.wait(set(self._working), timeout=CLOSE_S_MAX)
            for task in late:
                task.cancel()

    async def _take_all(self) -> None:
        while True:
            while len(self._working) >= self._inflight_max:
                self._ended.clear()
                await self._ended.wait()
            try:
                await self._take_next()
            except StoreError as error:
                log.warning("queued runs could not be listed: %s", error)
                await asyncio.sleep(STORE_POLL_S)

    async def _take_next(self) -> None:
        delivery = await self._queue.take(QUEUE_LOST_S)
        if delivery is None and not self._queue.connected:
            await asyncio.sleep(STORE_POLL_S)
        if delivery is not None and delivery.count > 1:
            self._engine.look_now()  # its previous process may have left a run behind
        try:
            await self._look(delivery)
        except BaseException:
            if delivery is not None:
                await delivery.nak(QUEUE_BUSY_S)
            raise

    async def _look(self, delivery: Delivery | None) -> None:
        runs = self._engine.store.runs
        record = await runs.take_queued()
        if record is not None:
            self._spawn(self._work(record, delivery))
        elif delivery is not None:
            # All that wait are for busy sessions, or there are none.
            waiting = await runs.any_queued()
            await (delivery.nak(min(delivery.count, 10) * QUEUE_BUSY_S) if waiting else delivery.ack())

    async def _work(self, record: RunRecord, delivery: Delivery | None) -> None:
        extending = asyncio.create_task(self._extend(delivery)) if delivery is not None else None
        try:
            live = await self._engine.recovery.requeue(record)
            if live is not None:
                await self._engine.lifecycle.wait_until_ended(live)
        except StoreError as error:  # its process is alive, so it is resumed once its lease has expired
            log.warning("the queued run %s could not be started: %s", record.spec.run_id, error)
            with contextlib.suppress(StoreError):
                await self._engine.store.runs.offer(record.spec.run_id)
        finally:
            if extending is not None:
                extending.cancel()
        if delivery is not None:
            await delivery.ack()
        # The session is free now: another run may have waited for it.
        if not self._engine.draining and len(self._working) <= self._inflight_max:
            with contextlib.suppress(StoreError):
                await self._look(None)

    @staticmethod
    async def _extend(delivery: Delivery) -> None:
        while True:
            await asyncio.sleep(QUEUE_EXTEND_S)
            await delivery.extend()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        self._ended.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a queued run could not be started", exc_info=error)

    # --- what was lost, and what waits too long -------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(QUEUE_LOST_S)
            try:
                await self._end_overdue()
                await self._put_again()
            except StoreError as error:
                log.warning("queued runs could not be checked: %s", error)

    async def _end_overdue(self) -> None:
        wait_s = self._engine.limits.submitted_wait_s
        if wait_s is None:
            return
        runs = self._engine.store.runs
        for run_id in await runs.queued(time.time() - wait_s):
            if await runs.adopt(run_id, "") and (record := await runs.get(run_id)) is not None:
                error = Refused("session_busy", "Another turn of this session is still running.")
                await self._engine.recovery.end_refused(record, error)

    async def _put_again(self) -> None:
        """Queue runs again that may have no message."""
        messages = await self._queue.size()
        if messages is None:
            return
        lost = await self._engine.store.runs.queued(time.time() - QUEUE_LOST_S)
        for run_id in lost[messages:]:
            await self._queue.put(run_id)
