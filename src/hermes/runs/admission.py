"""Admission: the permit and the session lease that a run acquires before it starts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from hermes.core.spec import RunSpec
from hermes.runs.leases import Lease, SessionLeases
from hermes.store.base import NoPlace, RunExists, RunRecord, SessionBusy, SessionNotFound, StoreError

if TYPE_CHECKING:
    from hermes.runs.engine import RunEngine

log = logging.getLogger(__name__)
# By owner: unfinished runs, and how many of them are queued.
StoredCounts = Mapping[str, tuple[int, int]]
_NO_COUNTS: StoredCounts = {}

Refusal = Literal[
    "rate_limit_exceeded",
    "gateway_draining",
    "session_busy",
    "session_not_found",
    "idempotency_key_conflict",
    "session_db_unavailable",
]


class Refused(Exception):
    """The run was not admitted; nothing of it is stored."""

    def __init__(self, code: Refusal, message: str, holder: str | None = None) -> None:
        super().__init__(message)
        self.code: Refusal = code
        self.holder = holder

    @classmethod
    def by(cls, error: StoreError | SessionNotFound) -> Refused:
        if isinstance(error, SessionNotFound):
            return cls("session_not_found", str(error))
        if isinstance(error, NoPlace):
            return cls("rate_limit_exceeded", str(error))
        if isinstance(error, RunExists):
            message = "A run of this number is on record already. It is carried out elsewhere; ask again to join it."
            return cls("session_db_unavailable", message)
        return cls("session_db_unavailable", f"The store is out of reach: {error}")


def no_place(owner: str, owner_max: int) -> Refused:
    return Refused("rate_limit_exceeded", f"{owner_max} turns of {owner!r} are running already.")


@dataclass(slots=True)
class Admission:
    """The permit and the session lease of a run that has not started."""

    spec: RunSpec
    lease: Lease
    engine: RunEngine = field(repr=False)
    started: bool = False
    # Somebody waits for the answer, and would ask again without one; `start_may_wait`: for all of it at once.
    start_may_lag: bool = False
    start_may_wait: bool = False
    # The request that asked for the run will read it, though it may not have started to.
    read_by_client: bool = False
    released: bool = False
    waited_s: float = 0.0
    # Called before the first model call, and possibly again.
    on_model_asked: Callable[[], None] | None = None
    # Called with the id of a session that is created with the run.
    on_session_made: Callable[[str], None] | None = None

    @property
    def run_id(self) -> str:
        return self.spec.run_id

    @property
    def session_id(self) -> str:
        return self.spec.session_id

    async def release(self) -> None:
        """Idempotent."""
        if not self.released:
            self.released = True
            await self.engine.admissions.give_back(self)

    async def finish_request(self) -> None:
        """Called when the requester has read the run: release it, unless a run has taken it over."""
        if self.started:
            await self.engine.read_by_its_client(self.run_id)
        else:
            await self.release()


class SharedCounts(Protocol):
    """The number of turns in other processes. An owner of `None` stands for all."""

    def put(self, owner: str | None, count: int) -> None: ...

    def others(self, owner: str | None) -> int: ...


class Permits:
    """Counts active turns: in this process, and in the others that serve the same home."""

    def __init__(self) -> None:
        self._own: Counter[str] = Counter()
        self.here = 0  # of this process
        self.shared: SharedCounts | None = None

    def change(self, owner: str, count: int) -> None:
        self._own[owner] += count
        self.here += count
        if self.shared is not None:
            self.shared.put(owner, self._own[owner])
            self.shared.put(None, self.here)

    @property
    def everywhere(self) -> int:
        return self.here + (self.shared.others(None) if self.shared is not None else 0)

    def of(self, owner: str) -> int:
        return self._own[owner] + (self.shared.others(owner) if self.shared is not None else 0)


def may_go_unrecorded(spec: RunSpec) -> bool:
    """Whether a turn can run without a record: it stores nothing, or somebody waits for its answer."""
    return not spec.persist or spec.on_detach == "cancel"


class Admissions:
    def __init__(self, engine: RunEngine) -> None:
        self._engine, self.permits = engine, Permits()
        self.leases = SessionLeases(engine.limits.turn_queue, engine.lifecycle.session_lost)

    async def admit(
        self,
        spec: RunSpec,
        *,
        wait_s: float | None = -1.0,
        bind: bool = False,
        defer: bool = False,
        charged: bool = False,
        after_run: str | None = None,
    ) -> Admission:
        """Acquire a permit and the session's lease, in order of arrival. `charged`: the run was counted against its
        owner's rates before. With `bind` the session's id is only a label: the stored session that matches the spec's
        history is used, or a new one, without waiting; with `defer` a new one, which is created and leased with the
        run's first commit and has its id from then on. With `after_run`, wait only for the end of that run."""
        self.take_permit(spec)
        try:
            if not charged:
                await self._engine.limits.charge(spec)
            await self.take_place(spec)
            wait_s = self._engine.limits.session_wait_s if wait_s == -1.0 else wait_s
            return await self.admit_with_permit(spec, wait_s, bind, defer=defer, after_run=after_run)
        except BaseException:
            await self.return_permit(spec)
            raise

    def take_permit(self, spec: RunSpec, stored: StoredCounts = _NO_COUNTS) -> None:
        """`stored`: the store's counts of unfinished runs, if some of them have no permit yet."""
        self.check_open(spec, stored)
        self.permits.change(spec.owner, 1)

    async def take_place(self, spec: RunSpec) -> None:
        """A place among those that the owner has at all replicas, which the store counts."""
        shared, owner_max = self._engine.shared_limits, self._engine.limits.owner_max(spec.owner)
        if shared is None or not owner_max or spec.parent is not None:
            return
        try:
            granted = await shared.take_place(spec.owner, spec.run_id)
        except StoreError as error:
            log.warning("the turns of other replicas are not counted exactly: %s", error)
            granted = self.permits.of(spec.owner) <= owner_max
        if not granted:
            raise no_place(spec.owner, owner_max)

    async def return_permit(self, spec: RunSpec) -> None:
        self.permits.change(spec.owner, -1)
        if self._engine.shared_limits is not None:
            await self._engine.shared_limits.give_back(spec.run_id)

    def check_open(self, spec: RunSpec | None = None, stored: StoredCounts = _NO_COUNTS) -> None:
        """Raise `Refused` if no runs are admitted any more or, given a spec, too many are active."""
        if self._engine.draining:
            raise Refused("gateway_draining", "The server is stopping and takes no new turns.")
        if spec is None or spec.parent is not None:  # a child works on a turn that was admitted already
            return
        limits = self._engine.limits
        owner_max, runs_max = limits.owner_max(spec.owner), limits.runs_max
        runs, queued = stored.get(spec.owner, (0, 0))
        all_runs, all_queued = (sum(counts) for counts in zip((0, 0), *stored.values(), strict=True))
        if runs_max and max(self.permits.everywhere + all_queued, all_runs) >= runs_max:
            raise Refused("rate_limit_exceeded", f"{runs_max} turns are running already.")
        if self._engine.shared_limits is not None:  # then the store says so, to `take_place` or when a run is submitted
            return
        if owner_max and max(self.permits.of(spec.owner) + queued, runs) >= owner_max:
            raise no_place(spec.owner, owner_max)

    async def admit_with_permit(
        self,
        spec: RunSpec,
        wait_s: float | None,
        bind: bool = False,
        *,
        defer: bool = False,
        after_run: str | None = None,
    ) -> Admission:
        """Admit a run that has its permit; on failure the permit stays the caller's."""
        started_at = time.monotonic()
        try:
            lease = await self._acquire_session(spec, wait_s, bind, defer, after_run)
        except SessionBusy as error:
            self.check_open()
            raise Refused("session_busy", str(error), await self._running_run_id(spec)) from None
        except (StoreError, SessionNotFound) as error:
            raise Refused.by(error) from error
        if self._engine.draining:
            await self.leases.release(lease)
            self.check_open()
        if bind:
            stored = lease.opened.history if lease.opened is not None else None
            history = spec.history if stored is None else stored
            spec = spec.replace(session_id=lease.session_id, history=history, verbatim=True)
        self._engine.creating[spec.run_id] = asyncio.get_running_loop().create_future()
        return Admission(spec, lease, self._engine, waited_s=time.monotonic() - started_at)

    async def _acquire_session(
        self, spec: RunSpec, wait_s: float | None, bind: bool, defer: bool, after_run: str | None
    ) -> Lease:
        """The session's lease. An unfinished run of the session goes first: it is resumed or closed."""
        until = None if wait_s is None else time.monotonic() + wait_s
        bind, next_in_line = bind and spec.persist, False
        while True:
            lease: Lease | None = None
            if bind and defer:
                return self.leases.unclaimed_lease(spec, self._engine.store)
            if bind:
                try:
                    lease = await self.leases.bind(spec, self._engine.store)
                except StoreError as error:
                    if not may_go_unrecorded(spec):
                        raise
                    log.warning("the conversation of run %s could not be searched: %s", spec.run_id, error)
            if lease is None:
                left_s = None if until is None else max(0.0, until - time.monotonic())
                lease = await self.leases.acquire(
                    spec,
                    left_s,
                    self._engine.store_for(spec),
                    unrecorded=may_go_unrecorded(spec),
                    next_in_line=next_in_line,
                    after_run=after_run,
                )
            unfinished = lease.opened.unfinished if spec.persist and lease.opened is not None else ()
            orphan = self._find_orphan(lease, unfinished) if unfinished else None
            if orphan is None:
                return lease
            await self._engine.recovery.resume_with_lease(orphan, lease)
            next_in_line = True

    async def _running_run_id(self, spec: RunSpec) -> str | None:
        if (run_id := self.leases.first(spec.session_id, spec.owner)) is not None:
            return run_id
        try:
            unfinished = await self._engine.store.runs.unfinished(spec.session_id)
        except StoreError:
            return None
        started = (record.spec for record in unfinished if record.state.started_at is not None)
        return next((run.run_id for run in started if run.owner == spec.owner), None)

    def _find_orphan(self, lease: Lease, unfinished: Sequence[RunRecord]) -> RunRecord | None:
        """An unfinished run of the session that another process has started."""
        for record in unfinished:
            is_ours = record.spec.run_id == lease.run_id or record.spec.run_id in self._engine.by_id
            if record.state.started_at is not None and not is_ours:
                return record
        return None

    async def give_back(self, admission: Admission) -> None:
        self._engine.mark_created(admission.run_id)
        await self.return_permit(admission.spec)
        await self.leases.release(admission.lease)
