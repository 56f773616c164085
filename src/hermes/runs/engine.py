"""The engine that every surface uses: it admits runs, executes, follows and stops them, and shuts down cleanly."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hermes.bus.memory import Sink
from hermes.bus.peers import AnyPeerServer, Operation, Peers, Stream
from hermes.core.events import Event
from hermes.core.limits import CLOSE_S_MAX, COMING_S_MAX
from hermes.core.result import Result
from hermes.core.spec import RunSpec
from hermes.guards.secrets import Secrets
from hermes.runs.admission import Admission, Admissions, Refused
from hermes.runs.controller import Controller
from hermes.runs.lifecycle import Execute, Lifecycle
from hermes.runs.live_run import STORE_UNAVAILABLE_NOTICE, LiveRun
from hermes.runs.log import RunLog
from hermes.runs.recovery import Recovery
from hermes.runs.remote_runs import Elsewhere
from hermes.runs.replica_leases import ReplicaLeases
from hermes.runs.shared_limits import SharedLimits
from hermes.runs.work_queue import RunQueue, WorkQueue
from hermes.store.base import Row, RunRecord, StoreError
from hermes.store.owner_limits import OwnerBounds
from hermes.store.stores import AsyncStore

__all__ = ["STORE_UNAVAILABLE_NOTICE", "Admission", "EngineLimits", "LiveRun", "Refused", "Result", "RunEngine"]


async def _uncharged(spec: RunSpec) -> None:
    """Nobody has rates."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Concurrency, waiting times and limits of owners. `rates` are the requests and tokens of an owner per minute;
    `ceiling` applies the current ceilings of its owner to a run; `charge` counts it against its owner's rates, or raises
    `Refused`."""

    runs_max: int = 0
    owner_max: Callable[[str], int] = lambda owner: 0
    rates: Callable[[str], tuple[int, int]] = lambda owner: (0, 0)
    ceiling: Callable[[RunSpec], RunSpec] = lambda spec: spec
    charge: Callable[[RunSpec], Awaitable[None]] = _uncharged
    turn_queue: int = 16
    session_wait_s: float | None = 30.0
    submitted_wait_s: float | None = 600.0
    resume_within_s: float = 3600.0


class RunEngine:
    """The interface of every surface; belongs to one event loop. An ephemeral run is in a store in memory until it has
    ended and its last reader has left."""

    def __init__(
        self,
        store: AsyncStore,
        ephemeral: AsyncStore,
        run_log: RunLog,
        execute: Execute,
        *,
        secrets: Callable[[RunSpec], Secrets] = lambda _: Secrets(),
        limits: EngineLimits | None = None,
    ) -> None:
        self.store, self.log, self.limits = store, run_log, limits or EngineLimits()
        self.by_id: dict[str, LiveRun] = {}
        # Admitted runs that are not stored yet: their callers know their ids already.
        self.creating: dict[str, asyncio.Future[None]] = {}
        self.draining = False
        self._ephemeral = ephemeral
        self._ephemeral_ids: set[str] = set()
        self._to_be_read: set[str] = set()  # by the request that asked for it, though it may not have started to
        self._watching: set[asyncio.Task[None]] = set()
        self._peer_server: AnyPeerServer | None = None
        # Set if this process is one of several replicas, possibly on other hosts.
        self.replica_leases: ReplicaLeases | None = None
        self.shared_limits: SharedLimits | None = None
        self.work_queue: WorkQueue | None = None
        self.lifecycle = Lifecycle(self, execute, secrets)
        self.admissions = Admissions(self)
        self.recovery, self._controller = Recovery(self), Controller(self)
        self.permits, self.admit, self.others = (
            self.admissions.permits,
            self.admissions.admit,
            self.admissions.leases.others,
        )
        self.start, self.run, self.work = self.lifecycle.start, self.lifecycle.run, self.lifecycle.work
        self.submit, self.listeners = self.lifecycle.submit, self.lifecycle.listeners
        self.resume, self.resume_all, self.join = self.recovery.resume, self.recovery.resume_all, self.recovery.join
        self.look_now, self.revival_listeners = self.recovery.look_now, self.recovery.listeners
        self.control, self.take_controls = self._controller.control, self._controller.take
        self.attach, self.detach = self._controller.attach, self._controller.detach

    def limit(self, **limits: Any) -> None:
        self.limits = replace(self.limits, **limits)

    def live(self, run_id: str) -> LiveRun | None:
        return self.by_id.get(run_id)

    def root_spec(self, spec: RunSpec) -> RunSpec:
        """The spec of the parent's turn if that is active here, else the run's own."""
        parent = self.by_id.get(spec.parent[0]) if spec.parent else None
        return parent.spec if parent is not None else spec

    @property
    def kinds(self) -> Counter[str]:
        return Counter(live.spec.kind for live in self.by_id.values() if live.task is not None)

    @property
    def elsewhere(self) -> Elsewhere:
        return self.log.elsewhere

    # --- stores -------------------------------------------------------------------------------------------------

    def store_for(self, spec: RunSpec) -> AsyncStore:
        return self.store if spec.persist else self._ephemeral

    async def create(self, spec: RunSpec) -> None:
        await self.store_for(spec).runs.create(spec)
        self.mark_ephemeral(spec)

    def mark_ephemeral(self, spec: RunSpec) -> None:
        if not spec.persist:
            self._ephemeral_ids.add(spec.run_id)

    def mark_created(self, run_id: str) -> None:
        if (coming := self.creating.pop(run_id, None)) is not None:
            coming.set_result(None)

    def is_ephemeral(self, run_id: str) -> bool:
        return run_id in self._ephemeral_ids

    async def _store_of(self, run_id: str) -> AsyncStore | None:
        if run_id in self._ephemeral_ids:
            return self._ephemeral
        exists = run_id in self.by_id or await self.store.runs.get(run_id) is not None
        return self.store if exists else None

    def expect_reader(self, run_id: str) -> None:
        self._to_be_read.add(run_id)

    async def read_by_its_client(self, run_id: str) -> None:
        """The request that started a run no longer reads it."""
        self._to_be_read.discard(run_id)
        await self.discard_unread(run_id)

    async def discard_unread(self, run_id: str) -> None:
        """Discard an ephemeral run once it has ended and has no reader, present or expected."""
        if run_id not in self._ephemeral_ids or run_id in self.by_id or run_id in self._to_be_read:
            return
        if not self.log.has_subscribers(run_id):
            self._ephemeral_ids.discard(run_id)
            await self._ephemeral.runs.discard(run_id)

    # --- reading ------------------------------------------------------------------------------------------------

    async def subscribe(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        """The run's log after `after`; an ephemeral run can be read until its last reader has left."""
        async with contextlib.aclosing(self.batches(run_id, after)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    def batches(self, run_id: str, after: int = 0, sink: Sink | None = None) -> AsyncGenerator[list[Event], None]:
        """The events in batches, without those that the sink has consumed."""
        if run_id in self.by_id and run_id not in self._ephemeral_ids:
            return self.log.batches(run_id, self.store.runs, after, sink)
        return self._batches(run_id, after, sink)

    async def _batches(self, run_id: str, after: int, sink: Sink | None) -> AsyncGenerator[list[Event], None]:
        store = await self._store_of(run_id)
        source = (
            self.log.batches(run_id, store.runs, after, sink)
            if store is not None
            else self.elsewhere.batches(run_id, after)
        )
        try:
            async with contextlib.aclosing(source) as batches:
                async for batch in batches:
                    yield batch
        finally:
            await self.discard_unread(run_id)

    async def get(self, run_id: str) -> RunRecord | None:
        """The current record of a run; waits for one that is being created."""
        return await self.get_here(run_id) or await self.elsewhere.get(run_id)

    async def get_here(self, run_id: str) -> RunRecord | None:
        """`get` without asking other processes."""
        coming = self.creating.get(run_id)
        record = await self._stored_record(run_id)
        if record is None and coming is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMING_S_MAX):
                    await asyncio.shield(coming)
            record = await self._stored_record(run_id)
        if record is not None and self.log.resume is not None:
            await self.log.resume(record)
        return record

    async def _stored_record(self, run_id: str) -> RunRecord | None:
        store = self._ephemeral if run_id in self._ephemeral_ids else self.store
        return await store.runs.get(run_id)

    async def list(
        self,
        owner: str | None = None,
        session_id: str | None = None,
        status: str | None = None,
        kind: str | None = None,
    ) -> list[RunRecord]:
        await self.record_starts()
        return await self.store.runs.list(owner=owner, session_id=session_id, status=status, kind=kind)

    async def record_starts(self) -> None:
        """Store every active run whose start is held back until its end."""
        with contextlib.suppress(StoreError):
            await asyncio.gather(*(live.log.put_on_record() for live in self.by_id.values() if live.log.holds_start))

    async def durable(self, run_id: str) -> Sequence[Event]:
        """The stored events of the run, without deltas."""
        store = await self._store_of(run_id)
        return await store.runs.durable(run_id) if store else await self.elsewhere.durable(run_id)

    async def row(self, run_id: str, row_id: int) -> Row | None:
        store = await self._store_of(run_id)
        return await store.runs.row(run_id, row_id) if store else await self.elsewhere.row(run_id, row_id)

    def has_subscribers(self, run_id: str) -> bool:
        return self.log.has_subscribers(run_id)

    async def wait(self, run_id: str, seconds: float) -> None:
        live = self.by_id.get(run_id)
        if live is not None and live.task is not None:
            await asyncio.wait([live.task], timeout=seconds)
        elif live is None and (record := await self.get(run_id)) is not None and not record.state.ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    async for _ in self.batches(run_id, record.state.last_seq):
                        pass

    # --- its life ------------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        return self.permits.here

    @property
    def peers(self) -> Peers:
        return self.elsewhere.peers

    def unrecorded_end(self, run_id: str) -> Event | None:
        return self.log.unrecorded_ends.get(run_id, (None, None))[0]

    async def become_replica(self, queue: RunQueue, inflight_max: int) -> None:
        """Take part in a cluster: other hosts can take over runs of this process, and it theirs."""
        self.shared_limits = SharedLimits(self.store.owner_limits)
        self.shared_limits.bounds = lambda owner: OwnerBounds(self.limits.owner_max(owner), *self.limits.rates(owner))
        self.replica_leases = ReplicaLeases(self.store.leases, self.shared_limits.renew)
        self.work_queue = WorkQueue(self, queue, inflight_max)
        self.admissions.leases.on_expired = self.lifecycle.session_expired
        await self.replica_leases.renew()

    def start_background_tasks(self, *, resume: bool = True) -> None:
        """Watch for controls from other processes and, with `resume`, resume interrupted runs."""
        if not self._watching:
            works = [self._controller.poll(), *([self.recovery.scan()] if resume else [])]
            if self.replica_leases is not None:
                works.append(self.replica_leases.keep())
            if self.work_queue is not None and resume:
                works.append(self.work_queue.serve())
            for work in works:
                task = asyncio.create_task(work)
                self._watching.add(task)
                task.add_done_callback(self._watching.discard)

    async def answer_peers(
        self,
        make_server: Callable[[Mapping[str, Operation], Mapping[str, Stream]], AnyPeerServer],
        operations: Mapping[str, Operation],
    ) -> None:
        """Answer other processes about the runs that are active here, and let them control those."""
        self._peer_server = make_server({**self._controller.operations(), **operations}, self._controller.streams())
        await self._peer_server.start()

    async def drain(self, seconds: float) -> None:
        """Admit nothing new, let runs continue for a while, then stop the rest; every run has an end on record."""
        self.draining = True
        for watch in tuple(self._watching):
            watch.cancel()
        leases, tasks = self.admissions.leases, self.lifecycle.tasks
        leases.turn_away()
        if tasks:
            await asyncio.wait(set(tasks), timeout=seconds)
        for live in tuple(self.by_id.values()):
            live.controls.stop.request("server_shutdown", "server")
        if tasks:
            _, late = await asyncio.wait(set(tasks), timeout=CLOSE_S_MAX)
            for live in tuple(self.by_id.values()):
                live.log.give_up_if_paused()
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        if self.work_queue is not None:
            await self.work_queue.close()
        if self._peer_server is not None:
            await self._peer_server.close()
        if self.replica_leases is not None:
            await self.replica_leases.release()
        leases.close()
