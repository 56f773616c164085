"""The lifecycle of a run in this process: recorded, started, executed in its task, and always ended on record."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from math import inf
from typing import TYPE_CHECKING, TypeVar

from hermes.core.events import Event, RunState
from hermes.core.json_types import JsonObject
from hermes.core.limits import LEASE_TTL_S, STORE_POLL_S
from hermes.core.processes import this_process
from hermes.core.result import Result
from hermes.core.spec import RunSpec
from hermes.guards.secrets import Secrets
from hermes.runs.admission import Admission, Refused, may_go_unrecorded
from hermes.runs.control import RunControls
from hermes.runs.live_run import STORE_UNAVAILABLE_NOTICE, LiveRun
from hermes.runs.work_queue import WorkQueue, may_travel
from hermes.runs.writer import LogEnded
from hermes.store.base import LeaseLost, RunExists, SessionNotFound, StoreBusy, StoreError
from hermes.store.runs import ClaimedSession

if TYPE_CHECKING:
    from hermes.runs.engine import RunEngine

log = logging.getLogger(__name__)

R = TypeVar("R")
Execute = Callable[[LiveRun], Awaitable[Result]]
# The last event of a run that failed because of its store, and the message of a failure without one.
_STORE_FAILED: JsonObject = {
    "failure": "store_unavailable",
    "code": "session_db_unavailable",
    "error": "The store cannot be written to.",
    "retryable": True,
}
_NOTHING: JsonObject = {"partial_row": None, "text_length": 0, "usage": {}}


async def _retried(work: Callable[[], Awaitable[R]], until: float) -> R:
    """For a run on record: an unavailable store is retried for a while."""
    while True:
        try:
            return await work()
        except (Refused, StoreBusy) as error:
            if not isinstance(error.__cause__ if isinstance(error, Refused) else error, StoreBusy):
                raise
            if time.monotonic() >= until:
                raise
            await asyncio.sleep(STORE_POLL_S)


class NotStarted(Exception):
    """A run that waited for its start when its server ended, and must not be started any more."""

    def __init__(self, code: str) -> None:
        super().__init__("The server was restarted before this turn began.")
        self.code = code


class Lifecycle:
    """Starts and ends runs. `execute` does a run's work."""

    def __init__(self, engine: RunEngine, execute: Execute, secrets: Callable[[RunSpec], Secrets]) -> None:
        self._engine, self._execute, self._secrets = engine, execute, secrets
        # Called with recorded events, without text.
        self.listeners: list[Callable[[LiveRun, Event], None]] = []
        self.tasks: set[asyncio.Task[object]] = set()
        # By owner: held while the store counts its runs.
        self._counting: dict[str, asyncio.Lock] = {}
        # Called with the id of a session that a run creates: cached state of that id belongs to a deleted one.
        self.on_new_session: Callable[[list[str]], None] = lambda _: None

    # --- starting -----------------------------------------------------------------------------------------------

    async def start(self, spec: RunSpec, admission: Admission | None = None) -> LiveRun:
        admission = admission or await self._engine.admissions.admit(spec)
        try:
            live = await self._open_or_go_unrecorded(spec, admission)
        except BaseException:
            await admission.release()
            raise
        self.begin(live, admission)
        return live

    async def run(self, spec: RunSpec, admission: Admission | None = None) -> Result:
        live = await self.start(spec, admission)
        assert live.task is not None
        return await asyncio.shield(live.task)

    async def work(self, spec: RunSpec, admission: Admission) -> Result:
        """Start a run and wait for its result; a cancelled caller detaches from it."""
        live = await self.start(spec, admission)
        assert live.task is not None
        owner = self._engine.attach(spec.run_id)
        try:
            return await asyncio.shield(live.task)
        except asyncio.CancelledError:
            await self._engine.detach(spec.run_id, owner)
            raise

    async def submit(self, spec: RunSpec, *, charged: bool = False) -> str:
        """Record a run that starts as soon as its session is free; returns once it is on record, and continues if the
        caller is cancelled. `charged` as in `admit`. A run that is on record already is left alone."""
        if spec.run_id in self._engine.by_id:
            return spec.run_id
        queue = self._engine.work_queue if may_travel(spec) else None
        try:
            stored = await self._engine.store.runs.unfinished_counts() if queue is not None else {}
        except StoreError as error:
            raise Refused.by(error) from error
        admissions = self._engine.admissions
        admissions.take_permit(spec, stored)
        try:
            if not charged:
                await self._engine.limits.charge(spec)
            if queue is None:  # one that travels is counted when it is put on record
                await admissions.take_place(spec)
        except BaseException:
            await admissions.return_permit(spec)
            raise
        await asyncio.shield(self._spawn(self._queue(spec, queue)))
        return spec.run_id

    async def _queue(self, spec: RunSpec, queue: WorkQueue | None) -> None:
        live: LiveRun | None = None
        try:
            live = await self._open(spec, at_once=False)
            owner_max = self._engine.limits.owner_max(spec.owner) if queue is not None else 0
            if owner_max and spec.parent is None:
                live.log.owner_max = owner_max
                async with self._counting.setdefault(spec.owner, asyncio.Lock()):  # concurrent inserts would conflict
                    await self.emit_queued(live)
            else:
                await self.emit_queued(live)
        except BaseException as error:
            await self._engine.admissions.return_permit(spec)
            if not isinstance(error, StoreError | SessionNotFound):
                raise
            # Another replica may have stored a run of this id, which may have come here since.
            if live is not None and self._engine.by_id.get(spec.run_id) is live:
                await self.forget(live)
            if isinstance(error, RunExists):  # it was submitted: ids are used once
                return
            # Whether it is stored is unknown.
            if isinstance(error, StoreBusy) and spec.run_id not in self._engine.by_id:
                with contextlib.suppress(StoreError):
                    await self._engine.store.runs.discard(spec.run_id)
            raise Refused.by(error) from error
        if queue is None:
            self.start_when_free(live)
            return
        self._engine.admissions.permits.change(spec.owner, -1)
        try:
            await queue.put(live)
        except StoreError as error:  # it is stored, and is taken over once this process is dead
            log.warning("the run %s could not be offered to other replicas: %s", spec.run_id, error)
            self._spawn(self._offer_again(queue, live))

    async def _offer_again(self, queue: WorkQueue, live: LiveRun) -> None:
        while not self._engine.draining:
            await asyncio.sleep(STORE_POLL_S)
            with contextlib.suppress(StoreError):
                await queue.put(live)
                return

    async def hand_over(self, live: LiveRun) -> None:
        """A run that is on record and not started leaves this process; its readers stay."""
        if live.deadline_timer is not None:
            live.deadline_timer.cancel()
        await self._engine.log.release(live.log)
        self._remove(live)

    def _remove(self, live: LiveRun) -> None:
        """Unless this process has resumed the run meanwhile."""
        if self._engine.by_id.get(live.spec.run_id) is live:
            del self._engine.by_id[live.spec.run_id]

    async def wait_until_ended(self, live: LiveRun) -> None:
        """For a run that starts when its session is free."""
        if live.starting is not None:
            await asyncio.wait([live.starting])
        if live.task is not None:
            await asyncio.wait([live.task])

    async def emit_queued(self, live: LiveRun) -> None:
        session_id = live.spec.session_id
        position = self._engine.admissions.leases.waiting(session_id)
        await live.log.emit("run.queued", session_id=session_id, source=live.spec.source, position=position)

    def start_when_free(self, live: LiveRun) -> None:
        """Start a recorded run with a permit as soon as its session is free."""
        live.starting = self._spawn(self._start_queued(live))

    async def _start_queued(self, live: LiveRun) -> None:
        admission: Admission | None = None
        try:
            async with live.controls.stop.scope():
                wait_s = self._engine.limits.submitted_wait_s
                until = inf if wait_s is None else time.monotonic() + wait_s
                admit = partial(self._engine.admissions.admit_with_permit, live.spec)
                admission = await _retried(lambda: admit(None if wait_s is None else until - time.monotonic()), until)
                await _retried(lambda: self.check_unstarted(live), until)
                if self._engine.work_queue is not None and live.spec.persist:
                    # Controls that were sent while no process had it.
                    await _retried(lambda: self._engine.take_controls([live.spec.run_id]), until)
        except BaseException as error:  # whatever kept it from starting is its recorded end
            if admission is not None:
                await admission.release()
            else:
                await self._engine.admissions.return_permit(live.spec)
            if isinstance(error, LeaseLost):
                await self.forget(live)
                return
            await self.end_unstarted(live, error)
            if not isinstance(error, Exception):
                raise
            return
        self.begin(live, admission)

    async def check_unstarted(self, live: LiveRun) -> None:
        """Raise LeaseLost if another replica has taken over an unstarted run: before its session is held, no token
        tells."""
        if self._engine.replica_leases is None or live.log.token is not None or not live.spec.persist:
            return
        record = await self._engine.store.runs.get(live.spec.run_id)
        is_unstarted = record is not None and record.state.started_at is None and not record.state.ended
        if record is None or not is_unstarted or record.holder != this_process():
            raise LeaseLost(f"The run {live.spec.run_id} was taken over.")

    async def _open_or_go_unrecorded(self, spec: RunSpec, admission: Admission) -> LiveRun:
        """An awaited turn runs without an unavailable store; any other is refused."""
        if not spec.persist:
            return await self._open(spec)
        if admission.lease.token is not None or admission.lease.unclaimed:
            try:
                return await self._open(spec, at_once=not may_go_unrecorded(spec))
            except (StoreError, SessionNotFound) as error:
                raise Refused.by(error) from error
        live = await self._open(spec.replace(persist=False))
        live.notices.append(STORE_UNAVAILABLE_NOTICE)
        return live

    async def _open(self, spec: RunSpec, *, at_once: bool = True) -> LiveRun:
        """Create a run, now or with its first event, under its owner's ceilings."""
        spec = self._engine.limits.ceiling(spec)
        if at_once:
            await self._engine.create(spec)
        if not spec.persist:
            self._engine.mark_ephemeral(spec)
        if spec.run_id in self._engine.by_id:  # an id made from a request that was sent twice
            raise RunExists
        live = self.make_live(spec)
        live.log.creates = None if at_once else spec
        return live

    def make_live(self, spec: RunSpec, last_seq: int = 0, state: RunState | None = None) -> LiveRun:
        secrets, store = self._secrets(spec), self._engine.store_for(spec)
        writer = self._engine.log.open(
            spec.run_id, store.runs, secrets=secrets, last_seq=last_seq, state=state, persist=spec.persist
        )
        live = LiveRun(spec, store, writer, RunControls(), secrets)
        self._listen(live)
        if spec.deadline_seconds is not None:
            used_s = time.time() - state.started_at if state is not None and state.started_at is not None else 0.0
            left_s = max(0.0, spec.deadline_seconds - used_s)
            live.deadline_at = time.monotonic() + left_s
            stop = live.controls.stop
            live.deadline_timer = asyncio.get_running_loop().call_later(left_s, stop.request, "deadline")
        self._engine.by_id[spec.run_id] = live
        return live

    def _listen(self, live: LiveRun) -> None:
        live.log.on_event = self._notify
        if self._engine.shared_limits is not None and live.spec.parent is None:
            live.log.count_end = partial(self._engine.shared_limits.settle, live.spec.run_id, live.spec.owner)

    def _notify(self, event: Event) -> None:
        for listener in self.listeners:
            try:
                listener(self._engine.by_id[event.run_id], event)
            except Exception:  # a listener must not harm the run
                log.exception("a listener failed on the event %s of run %s", event.type, event.run_id)

    # --- at work ------------------------------------------------------------------------------------------------

    def begin(self, live: LiveRun, admission: Admission) -> None:
        if live.spec.persist:
            live.log.token = admission.lease.token
            if admission.lease.unclaimed:
                live.log.claims = (this_process(), LEASE_TTL_S)
            elif admission.lease.opened is not None and admission.lease.opened.session is None:
                self.on_new_session([live.spec.session_id])
        live.waited_s, live.opened = admission.waited_s, admission.lease.opened
        live.on_model_asked = admission.on_model_asked
        live.log.start_may_lag, live.log.start_may_wait = admission.start_may_lag, admission.start_may_wait
        if live.log.creates is None:
            self._engine.mark_created(admission.spec.run_id)
        else:
            live.log.on_created = partial(self._on_created, live, admission)
        live.task = self._spawn(self._carry_out(live, admission))
        admission.started = True
        if admission.read_by_client:
            self._engine.expect_reader(admission.spec.run_id)

    def _on_created(self, live: LiveRun, admission: Admission, claimed: ClaimedSession | None) -> None:
        self._engine.mark_created(admission.spec.run_id)
        if claimed is not None:
            self._set_session_id(live, admission, claimed.session_id)
            self.on_new_session([claimed.session_id])
            if not admission.released:
                self._engine.admissions.leases.mark_claimed(admission.lease, claimed)
            elif claimed.token is not None:
                leases = self._engine.store.leases
                self._spawn(leases.release(f"session:{claimed.session_id}", claimed.token))

    @staticmethod
    def _set_session_id(live: LiveRun, admission: Admission, session_id: str) -> None:
        live.spec = live.spec.replace(session_id=session_id)
        admission.spec = admission.spec.replace(session_id=session_id)
        if admission.on_session_made is not None:
            admission.on_session_made(session_id)

    async def _carry_out(self, live: LiveRun, admission: Admission) -> Result:
        try:
            result = await self._execute_or_go_unrecorded(live, admission)
            self._note_unrecorded_end(live)
            return result
        except asyncio.CancelledError:
            if live.session_lost:
                raise LeaseLost(f"The run {live.spec.run_id} has lost its session.") from None
            await self._close_broken(live)
            raise
        except (LeaseLost, Refused):
            raise
        except Exception:
            await self._close_broken(live)
            raise
        finally:
            if live.log.lease_released:
                admission.lease.token = None
            try:
                await admission.release()
            except Exception as error:  # noqa: BLE001  (the lease expires by itself; the result stands)
                log.warning("the session of run %s could not be released: %s", live.spec.run_id, error)
            finally:
                await self.forget(live)

    async def _execute_or_go_unrecorded(self, live: LiveRun, admission: Admission) -> Result:
        """The run's result. One of which nothing could be put on record is carried out without, if somebody waits."""
        try:
            return await self._execute(live)
        except (SessionNotFound, RunExists) as error:  # another was quicker: an owner with the session, or with the run
            raise Refused.by(error) from None
        except StoreError as error:
            if not live.unrecorded or isinstance(error, LeaseLost):
                raise
        live.log.drop_start()
        await live.log.close()
        if admission.lease.unclaimed:  # a session of that id is another's by now
            self._set_session_id(live, admission, f"{live.spec.session_id}-{live.spec.run_id[-8:]}")
        live.spec, live.opened = live.spec.replace(persist=False), None
        live.store = self._engine.store_for(live.spec)
        await self._engine.create(live.spec)
        live.log = self._engine.log.open(live.spec.run_id, live.store.runs, secrets=live.secrets, persist=False)
        self._listen(live)
        live.notices.append(STORE_UNAVAILABLE_NOTICE)
        return await self._execute(live)

    def session_expired(self, run_id: str, expired: bool) -> None:
        """Another process may have taken the run's session over, or has not."""
        if (live := self._engine.by_id.get(run_id)) is not None:
            live.log.pause() if expired else live.log.go_on()

    def session_lost(self, run_id: str) -> None:
        """Another process holds the run's session: the run is interrupted."""
        live = self._engine.by_id.get(run_id)
        if live is not None and live.log.ending:  # its end, if that was stored, has released it
            live.log.give_up_if_paused()
            return
        log.warning("run %s has lost its session", run_id)
        if live is not None:
            live.log.go_on(lost=True)
        if live is not None and live.task is not None:
            live.session_lost = True
            live.task.cancel()

    # --- ending -------------------------------------------------------------------------------------------------

    async def end_unstarted(self, live: LiveRun, error: BaseException) -> None:
        stop, spec = live.controls.stop, live.spec
        try:
            await self.check_unstarted(live)
        except LeaseLost:
            await self.forget(live)
            return
        is_cancelled = isinstance(error, asyncio.CancelledError)
        shutdown = stop.reason == "server_shutdown" or self._engine.draining or is_cancelled
        nothing: JsonObject = {**_NOTHING, "steps": 0}
        if shutdown and spec.on_detach == "continue" and spec.persist:
            await live.log.emit("run.interrupted")
        elif shutdown or stop.reason not in (None, "deadline"):
            await live.log.emit("run.cancelled", by=stop.by, reason=stop.reason or "server_shutdown", **nothing)
        else:
            code = error.code if isinstance(error, Refused | NotStarted) else "unknown"
            kind = "deadline" if stop.reason else code
            await live.log.emit("run.failed", failure=kind, error=str(error), code=kind, retryable=True, **nothing)
        await self.forget(live)

    async def _close_broken(self, live: LiveRun) -> None:
        """Last resort: a run has an end on record even if the loop itself has failed."""
        if live.log.state.ended or live.log.state.status == "interrupted":
            return
        message = live.secrets.redact(traceback.format_exc())
        log.error("run %s ended by a defect: %s", live.spec.run_id, message)
        end: JsonObject = {"failure": "unknown", "error": "The server had an internal error.", "retryable": False}
        if isinstance(sys.exception(), StoreError):
            end = _STORE_FAILED
        try:
            await live.log.emit("run.failed", **end, **_NOTHING, steps=live.log.step)
        except (LogEnded, LeaseLost):
            return
        except StoreError:
            self._note_unrecorded_end(live)

    def _note_unrecorded_end(self, live: LiveRun) -> None:
        """A run whose end could not be stored gets it from whoever resumes it, and does not continue."""
        state, writer = live.log.state, live.log
        if live.spec.persist and writer.creates is None and not state.ended and state.status != "interrupted":
            end = writer.event("run.failed", **_STORE_FAILED, **_NOTHING, steps=writer.step)
            end.seq, end.ts = writer.last_seq + 1, time.time()
            self._engine.log.unrecorded_ends[live.spec.run_id] = end, writer

    async def forget(self, live: LiveRun) -> None:
        run_id = live.spec.run_id
        if live.log.state.ended:
            self._engine.log.unrecorded_ends.pop(run_id, None)
        if live.deadline_timer is not None:
            live.deadline_timer.cancel()
        await self._engine.log.close(live.log)
        self._remove(live)
        await self._engine.discard_unread(run_id)

    def _spawn(self, work: Coroutine[object, object, R]) -> asyncio.Task[R]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[object]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark as retrieved; waiters get it, and it is in the log
