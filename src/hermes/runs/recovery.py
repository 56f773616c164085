"""Interrupted runs: found, resumed where their logs end, or closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hermes.core.limits import LEASE_TTL_S, REPLICA_SCAN_S, RESUME_SCAN_S, STORE_POLL_S
from hermes.core.processes import booted_at, host_of, is_gone, this_process
from hermes.core.spec import RunSpec
from hermes.runs.admission import Admission, Refused
from hermes.runs.leases import Lease
from hermes.runs.lifecycle import NotStarted
from hermes.runs.live_run import LiveRun
from hermes.runs.replica_leases import process_lease
from hermes.runs.resume import look
from hermes.store.base import RunRecord, SessionNotFound, StoreError

if TYPE_CHECKING:
    from hermes.runs.engine import RunEngine

log = logging.getLogger(__name__)


class Recovery:
    """Resumes or closes unfinished runs without a process."""

    def __init__(self, engine: RunEngine) -> None:
        self._engine, self._lifecycle = engine, engine.lifecycle
        # Called for runs that are taken over from another process.
        self.listeners: list[Callable[[RunSpec], None]] = []
        self._being_resumed: set[str] = set()
        self._look = asyncio.Event()

    async def scan(self) -> None:
        self._engine.log.resume = self._resume_if_left
        while not self._engine.draining:
            self._look.clear()
            try:
                await self.resume_all()
            except StoreError as error:
                log.warning("interrupted runs could not be listed: %s", error)
            with contextlib.suppress(TimeoutError):
                scan_s = RESUME_SCAN_S if self._engine.replica_leases is None else REPLICA_SCAN_S
                await asyncio.wait_for(self._look.wait(), scan_s)

    def look_now(self) -> None:
        self._look.set()

    async def resume_all(self) -> list[str]:
        """Resume or close every unfinished run without a process; returns their ids."""
        if self._engine.replica_leases is not None:
            return await self._resume_of_replicas()
        unfinished = await self._engine.store.runs.unfinished()
        return [record.spec.run_id for record in unfinished if await self._try_resume(record)]

    async def _try_resume(self, record: RunRecord) -> bool:
        """A run that cannot be resumed because of a defect does not affect the others."""
        try:
            return await self._resume(record)
        except StoreError:
            raise
        except Exception:
            log.exception("the run %s could not be resumed", record.spec.run_id)
            return False

    async def _resume_of_replicas(self) -> list[str]:
        """`resume_all` where other replicas work on many of them."""
        runs, resumed = self._engine.store.runs, list[str]()
        for run_id, holder in await runs.left_behind():
            if run_id in self._engine.by_id or (holder not in (None, this_process()) and not is_gone(holder or "")):
                continue
            record = await runs.get(run_id)
            if record is not None and not record.state.ended and await self._try_resume(record):
                resumed.append(run_id)
        return resumed

    async def resume(self, run_id: str) -> None:
        """Resume or close an unfinished run if it has no process."""
        record = await self._engine.store.runs.get(run_id)
        if record is not None and not record.state.ended:
            await self._resume(record)

    async def _resume_if_left(self, record: RunRecord) -> None:
        """For readers: resume a run at once if it has no process."""
        if record.state.ended or record.spec.run_id in self._engine.by_id:
            return
        with contextlib.suppress(StoreError):  # the next look finds it again
            if not await self._is_orphaned(record):
                return
            holder = await self._engine.store.leases.holder(f"session:{record.spec.session_id}")
            # A lease of this process without a run could not be released.
            if holder is None or holder == this_process():
                await self._resume(record)

    async def join(self, run_id: str) -> Admission | None:
        """The admission of a run that was started earlier, once it continues here or in another process that answers,
        or has ended."""
        engine = self._engine
        while (
            (record := await engine.get(run_id)) is not None and not record.state.ended and run_id not in engine.by_id
        ):
            self._engine.admissions.check_open()
            carrier = await engine.store.runs.carrier(run_id)
            if carrier is not None and await engine.elsewhere.has(run_id, carrier):
                break
            if not await self._resume(record):
                await asyncio.sleep(STORE_POLL_S)
        if record is None:
            return None
        turn = asyncio.get_running_loop().create_future()
        lease = Lease(record.spec.session_id, record.spec.owner, run_id, turn, engine.store)
        return Admission(record.spec, lease, self._engine, started=True, released=True)

    async def _resume(self, record: RunRecord) -> bool:
        run_id = record.spec.run_id
        is_live = run_id in self._engine.by_id or run_id in self._being_resumed
        if is_live or self._engine.draining or not await self._is_orphaned(record):
            return False
        self._being_resumed.add(run_id)
        try:
            return await self._resume_left(record)
        finally:
            self._being_resumed.discard(run_id)

    async def _is_orphaned(self, record: RunRecord) -> bool:
        """Whether the run may be resumed: it was started, and its session's lease decides; or never, and its process is
        dead."""
        if record.state.started_at is not None or record.state.status == "interrupted" or is_gone(record.holder):
            return True
        if time.time() - record.created_at <= LEASE_TTL_S:
            return False
        # It is created a moment before its first event.
        return record.state.last_seq == 0 or await self._has_lapsed(record.holder)

    async def _has_lapsed(self, holder: str) -> bool:
        """Whether a replica of any host has not renewed its lease for long. Without replicas no other host serves this
        database."""
        if holder in ("", this_process()):
            return False
        if self._engine.replica_leases is None:
            return host_of(holder) != host_of(this_process())
        return await self._engine.store.leases.holder(process_lease(holder)) is None

    async def _resume_left(self, record: RunRecord) -> bool:
        spec, store, leases = record.spec, self._engine.store, self._engine.admissions.leases
        is_dead = is_gone(record.holder) or await self._has_lapsed(record.holder)
        if record.state.started_at is None and (record.state.last_seq or is_dead):
            if not await store.runs.adopt(spec.run_id, record.holder):
                return False
            await self.requeue(record)
            return True
        try:
            lease = await leases.acquire_if_free(spec, store)
        except SessionNotFound as error:
            await self.end_refused(record, Refused.by(error))
            return True
        if lease is None:
            return False
        # While the lease was waited for, its holder may have ended the run.
        now = await store.runs.get(spec.run_id)
        if now is None or now.state.ended or now.state.last_seq != record.state.last_seq:
            await leases.release(lease)
            return False
        await self.resume_with_lease(now, lease)
        return True

    async def resume_with_lease(self, record: RunRecord, lease: Lease) -> None:
        """Continue a run with its session's lease, which is released at its end."""
        admission = Admission(record.spec, lease, self._engine)
        session = lease.opened.session if lease.opened is not None else None
        self._engine.admissions.permits.change(record.spec.owner, 1)
        try:
            if session is not None and session["owner"] != record.spec.owner:
                await self.end_refused(record, Refused.by(SessionNotFound(record.spec.session_id)))
                await admission.release()
                return
            lease.run_id, lease.owner = record.spec.run_id, record.spec.owner
            live = await self._revive(record, lease.token)
        except BaseException:
            await admission.release()
            raise
        if live.resumption is None and not self._may_begin(record):  # it was created, and never started
            await self._lifecycle.end_unstarted(live, NotStarted("server_restarted"))
            await admission.release()
        else:
            self._lifecycle.begin(live, admission)

    async def end_refused(self, record: RunRecord, error: Refused) -> None:
        """End a run of this process that cannot continue or waited too long in the queue."""
        live = await self._revive(record, None)
        live.resumption = None
        await self._lifecycle.end_unstarted(live, error)

    async def requeue(self, record: RunRecord) -> LiveRun | None:
        """A run that was submitted or created, and not started, waits for its session again; None if it is over."""
        live = await self._revive(record, None)
        resumption, live.resumption = live.resumption, None
        go_on = resumption.verdict == "go_on" if resumption is not None else self._may_begin(record)
        try:
            if resumption is None and go_on:
                await self._lifecycle.emit_queued(live)
            elif resumption is not None and resumption.verdict == "cancelled":
                live.controls.stop.request(resumption.stop_reason or "stop", resumption.stopped_by)
            if not go_on:
                code = resumption.verdict if resumption else "server_restarted"
                await self._lifecycle.end_unstarted(live, NotStarted(code))
                return None
        except StoreError:
            await self._lifecycle.forget(live)
            raise
        self._engine.admissions.permits.change(live.spec.owner, 1)
        self._lifecycle.start_when_free(live)
        return live

    def _may_begin(self, record: RunRecord) -> bool:
        """Whether a run that was created and not started is still wanted: it does not need its client, and is not
        old."""
        age_s = time.time() - record.created_at
        return record.spec.on_detach == "continue" and age_s <= self._engine.limits.resume_within_s

    async def _revive(self, record: RunRecord, token: int | None) -> LiveRun:
        limits, store = self._engine.limits, self._engine.store.runs
        spec = limits.ceiling(record.spec)
        for listener in self.listeners:
            listener(spec)
        await self._engine.log.absorb(store)
        if token is not None and self._engine.replica_leases is not None:
            await self._engine.log.absorb_from(spec.run_id, store, record.holder)
            await store.adopt(spec.run_id, record.holder)
        end, before = self._engine.log.unrecorded_ends.get(spec.run_id, (None, None))
        if before is not None:
            await before.save_rest(token)
        events, partials = await store.durable(spec.run_id), await store.partials(spec.run_id)
        if not events:
            return self._lifecycle.make_live(spec)
        resumption = look(
            events,
            partials,
            on_detach=spec.on_detach,
            now=time.time(),
            within_s=limits.resume_within_s,
            booted_at=booted_at(),
        )
        if end is not None:  # its readers were told that it has ended
            resumption.verdict, resumption.next_seq = "store_unavailable", max(resumption.next_seq, end.seq + 1)
        if record.state.started_at is None and self._engine.work_queue is not None:
            resumption.next_seq = events[-1].seq + 1  # nothing was shown beyond what is stored
        else:
            log.info("run %s is resumed (%s, %s)", spec.run_id, resumption.reason, resumption.verdict)
        live = self._lifecycle.make_live(spec, resumption.next_seq - 1, record.state)
        live.resumption, live.log.token = resumption, token
        live.controls.seen |= resumption.controls
        live.controls.steers += resumption.steers
        live.controls.approvals.expect(record.state.approvals.keys() - resumption.answers.keys())
        live.controls.clarifications.expect(record.state.questions.keys() - resumption.answers.keys())
        live.log.restore(resumption.partials)
        return live
