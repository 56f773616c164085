"""The engine: admits runs, gives each its session and its task, follows and stops them, and ends cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hermes.bus.memory import Sink
from hermes.bus.peers import Operation, Peers, PeerServer
from hermes.core.events import Event, RunState
from hermes.core.limits import CLOSE_S_MAX, COMING_S_MAX, CONTROL_POLL_S, LEASE_TTL_S, RESUME_SCAN_S, STORE_POLL_S
from hermes.core.processes import booted_at, is_gone, this_process
from hermes.core.result import Result as Result
from hermes.core.spec import Applied, Control, RunSpec
from hermes.guards.secrets import Secrets
from hermes.runs.control import RunControls
from hermes.runs.leases import Lease, SessionLeases
from hermes.runs.log import RunLog
from hermes.runs.permits import Permits
from hermes.runs.remote_runs import Elsewhere, EncodedEvent, encode_events, encode_record, encode_row
from hermes.runs.resume import Resumption, look
from hermes.runs.writer import LogEnded, RunWriter
from hermes.store.base import LeaseLost, OpenedSession, Row, RunRecord, SessionBusy, SessionNotFound, Store, StoreError

log = logging.getLogger(__name__)

Refusal = Literal[
    "rate_limit_exceeded",
    "gateway_draining",
    "session_busy",
    "session_not_found",
    "idempotency_key_conflict",
    "session_db_unavailable",
]
STORE_UNAVAILABLE_NOTICE = ("store_unavailable", "The store is out of reach; this turn is not kept.")
# The last event of a run that failed for want of its store, and what one says that has nothing to tell.
_STORE_FAILED: dict[str, Any] = {
    "failure": "store_unavailable",
    "code": "session_db_unavailable",
    "error": "The store cannot be written to.",
    "retryable": True,
}
_NOTHING: dict[str, Any] = {"partial_row": None, "text_length": 0, "usage": {}}


class Refused(Exception):
    """The run was not admitted; nothing of it is left."""

    def __init__(self, code: Refusal, message: str, holder: str | None = None) -> None:
        super().__init__(message)
        self.code: Refusal = code
        self.holder = holder


@dataclass(slots=True)
class Admission:
    """What a run has gained before it starts: a permit and its session's lease."""

    spec: RunSpec
    lease: Lease
    engine: RunEngine = field(repr=False)
    begun: bool = False
    # Somebody waits for the whole answer, and would ask again if there were none.
    start_may_wait: bool = False
    on_started: Callable[[], None] | None = field(default=None, repr=False)
    released: bool = False
    waited_s: float = 0.0

    @property
    def run_id(self) -> str:
        """The run that it is for."""
        return self.spec.run_id

    @property
    def session_id(self) -> str:
        """The session that it holds."""
        return self.spec.session_id

    async def release(self) -> None:
        """Give it back. Once is enough; twice does no harm."""
        if not self.released:
            self.released = True
            await self.engine.give_back(self)

    async def finish_request(self) -> None:
        """Whoever asked for the run has read it: give it back, unless a run has taken it over."""
        if self.begun:
            await self.engine.read_by_its_client(self.run_id)
        else:
            await self.release()


@dataclass(slots=True)
class LiveRun:
    """A run at work in this process, as the loop is handed it."""

    spec: RunSpec
    store: Store
    log: RunWriter
    controls: RunControls
    secrets: Secrets
    deadline_at: float | None = None
    task: asyncio.Task[Result] | None = None
    owners: set[object] = field(default_factory=set)
    notices: list[tuple[str, str]] = field(default_factory=list)
    deadline_timer: asyncio.TimerHandle | None = None
    session_lost: bool = False
    resumption: Resumption | None = None
    waited_s: float = 0.0
    begun: OpenedSession | None = None
    # Whether the model has been shown text from outside, and the hosts that the user has named; children have both.
    read_foreign: bool = False
    named_hosts: frozenset[str] = frozenset()

    @property
    def transcript_id(self) -> str:
        """Under what the rows are kept: the session, or, for a run that keeps nothing, the run itself."""
        return self.spec.session_id if self.spec.persist else self.spec.run_id

    @property
    def unrecorded(self) -> bool:
        """Whether nothing of it is on record, and nothing was shown."""
        return self.log.creates is not None and self.log.first_delta_at is None


class _NotStarted(Exception):
    """A run that waited to be started when its server ended, and is not to be started any more."""

    def __init__(self, code: str) -> None:
        super().__init__("The server was restarted before this turn began.")
        self.code = code


def _is_orphaned(record: RunRecord) -> bool:
    """Whether the run is orphaned: it was never started, and the process that created it is gone."""
    if record.state.started_at is not None or record.state.status == "interrupted" or is_gone(record.holder):
        return True
    # It is made a moment before its first event.
    return record.state.last_seq == 0 and time.time() - record.created_at > LEASE_TTL_S


def _refused(error: StoreError | SessionNotFound) -> Refused:
    if isinstance(error, SessionNotFound):
        return Refused("session_not_found", str(error))
    return Refused("session_db_unavailable", f"The store is out of reach: {error}")


def _may_go_unrecorded(spec: RunSpec) -> bool:
    """Whether a turn makes sense without a record: when it keeps nothing, or somebody waits for its answer."""
    return not spec.persist or spec.on_detach == "cancel"


Execute = Callable[[LiveRun], Awaitable[Result]]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How much at once, how long to wait, and what an owner may do.

    `ceiling` puts a run under the present ceilings of its owner; `charge` counts it against its owner's rates, or
    raises `Refused`.
    """

    runs_max: int = 0
    owner_max: Callable[[str], int] = lambda owner: 0
    ceiling: Callable[[RunSpec], RunSpec] = lambda spec: spec
    charge: Callable[[RunSpec], None] = lambda spec: None
    turn_queue: int = 16
    session_wait_s: float | None = 30.0
    submitted_wait_s: float | None = 600.0
    resume_within_s: float = 3600.0


class RunEngine:
    """What every surface talks to. It belongs to one event loop."""

    def __init__(
        self,
        store: Store,
        ephemeral: Store,
        run_log: RunLog,
        execute: Execute,
        *,
        secrets: Callable[[RunSpec], Secrets] = lambda _: Secrets(),
        limits: EngineLimits | None = None,
    ) -> None:
        self._store, self._ephemeral, self._log, self._execute = store, ephemeral, run_log, execute
        self._secrets = secrets
        self.limits = limits or EngineLimits()
        self._live: dict[str, LiveRun] = {}
        self._ephemeral_ids: set[str] = set()
        self._to_be_read: set[str] = set()  # by the request that asked for it, though it may not have come to it yet
        # Runs that were admitted and are not on record yet: their callers know their numbers already.
        self._creating: dict[str, asyncio.Event] = {}
        self.permits = Permits()
        # Runs that ended while the store could not be written to: the end that is on no record, and the log so far.
        self._unrecorded_ends: dict[str, tuple[Event, RunWriter]] = {}
        self._being_resumed: set[str] = set()
        # Whoever wants to hear of what is put on record, text left out.
        self.listeners: list[Callable[[LiveRun, Event], None]] = []
        self._leases = SessionLeases(self.limits.turn_queue, self._session_lost)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watching: set[asyncio.Task[None]] = set()
        self._draining = False
        # Whoever wants to hear of runs that are taken up from another process.
        self.revival_listeners: list[Callable[[RunSpec], None]] = []
        self._look = asyncio.Event()
        self._peer_server: PeerServer | None = None

    def limit(self, **limits: Any) -> None:
        """Change how much is done at once, or how long is waited."""
        self.limits = replace(self.limits, **limits)

    @property
    def store(self) -> Store:
        """Where runs, sessions and jobs are kept."""
        return self._store

    def live(self, run_id: str) -> LiveRun | None:
        """The run, if it is at work in this process."""
        return self._live.get(run_id)

    def root_spec(self, spec: RunSpec) -> RunSpec:
        """The turn that a run works for: its parent's where that is at work here, else its own."""
        parent = self._live.get(spec.parent[0]) if spec.parent else None
        return parent.spec if parent is not None else spec

    @property
    def active(self) -> int:
        """How many turns there are at work in this process, or about to be."""
        return self.permits.here

    @property
    def kinds(self) -> Counter[str]:
        """How many turns of each kind are at work."""
        return Counter(live.spec.kind for live in self._live.values() if live.task is not None)

    @property
    def draining(self) -> bool:
        """Whether no new turns are taken any more."""
        return self._draining

    # --- admission ----------------------------------------------------------------------------------------------

    async def admit(
        self,
        spec: RunSpec,
        *,
        wait_s: float | None = -1.0,
        bind: bool = False,
        charged: bool = False,
        after_run: str | None = None,
    ) -> Admission:
        """A permit and the session's lease, waited for in order of arrival. `charged`: the run has been counted against
        its owner's rates before.

        With `bind` the session's id is only a label: the stored session that holds the spec's history is taken, or a
        new one, and none is waited for. With `after_run`, only the end of that run is waited for.
        """
        self._let_in(spec, charged=charged)
        try:
            wait_s = self.limits.session_wait_s if wait_s == -1.0 else wait_s
            return await self._admitted(spec, wait_s, bind, after_run)
        except BaseException:
            self.permits.give_back(spec.owner)
            raise

    def _let_in(self, spec: RunSpec, *, charged: bool) -> None:
        """Take a permit."""
        self._check_open(spec)
        if not charged:
            self.limits.charge(spec)
        self.permits.take(spec.owner)

    async def _admitted(
        self, spec: RunSpec, wait_s: float | None, bind: bool = False, after_run: str | None = None
    ) -> Admission:
        """The admission of a run that has its permit, which stays the caller's where this fails."""
        began = time.monotonic()
        try:
            lease = await self._acquire_session(spec, wait_s, bind, after_run)
        except SessionBusy as error:
            self._check_open()
            raise Refused("session_busy", str(error), await self._running_in(spec)) from None
        except (StoreError, SessionNotFound) as error:
            raise _refused(error) from error
        if self._draining:
            await self._leases.release(lease)
            self._check_open()
        waited_s = time.monotonic() - began
        if bind:
            known = lease.begun.said if lease.begun is not None else None
            history = spec.history if known is None else known
            spec = spec.replace(session_id=lease.session_id, history=history, verbatim=True)
        self._creating[spec.run_id] = asyncio.Event()
        return Admission(spec, lease, self, waited_s=waited_s)

    async def _acquire_session(self, spec: RunSpec, wait_s: float | None, bind: bool, after_run: str | None) -> Lease:
        """The session's lease. A run that was begun there and has no end goes first: it is taken up, or closed."""
        until = None if wait_s is None else time.monotonic() + wait_s
        store = self._store if spec.persist else self._ephemeral
        unrecorded, next_in_line = _may_go_unrecorded(spec), False
        lease = await self._bind_by_history(spec) if bind and spec.persist else None
        while True:
            if lease is None:
                left = None if until is None else max(0.0, until - time.monotonic())
                order = {"unrecorded": unrecorded, "next_in_line": next_in_line}
                lease = await self._leases.acquire(spec, left, store, **order, after_run=after_run)
            orphan = self._orphan(lease) if spec.persist else None
            if orphan is None:
                return lease
            await self._resume_with_lease(orphan, lease)
            lease, next_in_line = await self._bind_by_history(spec) if bind and spec.persist else None, True

    async def _bind_by_history(self, spec: RunSpec) -> Lease | None:
        """The session that holds the spec's history, or one for it to begin in. None: the store is away."""
        try:
            return await self._leases.bind(spec, self._store)
        except StoreError as error:
            if not _may_go_unrecorded(spec):
                raise
            log.warning("the conversation of run %s could not be looked for: %s", spec.run_id, error)
            return None

    async def _running_in(self, spec: RunSpec) -> str | None:
        """The run that holds a session, if it is of the same owner."""
        if (run_id := self._leases.first(spec.session_id, spec.owner)) is not None:
            return run_id
        try:
            found = await self._store.runs.unfinished(spec.session_id)
        except StoreError:
            return None
        begun = (record.spec for record in found if record.state.started_at is not None)
        return next((other.run_id for other in begun if other.owner == spec.owner), None)

    def _orphan(self, lease: Lease) -> RunRecord | None:
        """A run of the session that was begun elsewhere and has no end."""
        for record in lease.begun.left if lease.begun is not None else ():
            known = record.spec.run_id == lease.run_id or record.spec.run_id in self._live
            if record.state.started_at is not None and not known:
                return record
        return None

    def others(self, session_id: str, run_id: str) -> bool:
        """Whether this process has another run than this in a session, begun or waiting, on record or not yet."""
        return self._leases.others(session_id, run_id)

    async def give_back(self, admission: Admission) -> None:
        """Let the next one in."""
        self._mark_created(admission)
        self.permits.give_back(admission.spec.owner)
        await self._leases.release(admission.lease)

    def _mark_created(self, admission: Admission) -> None:
        if (coming := self._creating.pop(admission.run_id, None)) is not None:
            coming.set()

    def _check_open(self, spec: RunSpec | None = None) -> None:
        if self._draining:
            raise Refused("gateway_draining", "The server is stopping and takes no new turns.")
        if spec is None or spec.parent is not None:  # a child works on a turn that has been let in already
            return
        own, most = self.limits.owner_max(spec.owner), self.limits.runs_max
        if most and self.permits.everywhere >= most:
            raise Refused("rate_limit_exceeded", f"{most} turns are running already.")
        if own and self.permits.of(spec.owner) >= own:
            raise Refused("rate_limit_exceeded", f"{own} turns of {spec.owner!r} are running already.")

    def _session_lost(self, run_id: str) -> None:
        live = self._live.get(run_id)
        if live is not None and live.log.ending:  # it has given it back itself
            return
        log.warning("run %s has lost its session", run_id)
        if live is not None and live.task is not None:
            live.session_lost = True
            live.task.cancel()

    # --- running ------------------------------------------------------------------------------------------------

    async def start(self, spec: RunSpec, admission: Admission | None = None) -> LiveRun:
        """Begin a run; its task is the engine's own."""
        admission = admission or await self.admit(spec)
        try:
            live = await self._open_or_go_unrecorded(spec, admission)
        except BaseException:
            await admission.release()
            raise
        self._begin(live, admission)
        return live

    async def run(self, spec: RunSpec, admission: Admission | None = None) -> Result:
        """Begin a run and wait for its result."""
        live = await self.start(spec, admission)
        assert live.task is not None
        return await asyncio.shield(live.task)

    async def work(self, spec: RunSpec, admission: Admission) -> Result:
        """Begin a run for whoever waits for its result; who is called away meanwhile leaves it."""
        live = await self.start(spec, admission)
        assert live.task is not None
        owner = self.attach(spec.run_id)
        try:
            return await asyncio.shield(live.task)
        except asyncio.CancelledError:
            await self.detach(spec.run_id, owner)
            raise

    async def submit(self, spec: RunSpec, *, charged: bool = False) -> str:
        """Record a run that starts as soon as its session is free; returns once it is on record. `charged` as in `admit`.

        It goes on even where whoever asks for it has left before that.
        """
        self._let_in(spec, charged=charged)
        await asyncio.shield(self._spawn(self._queue(spec)))
        return spec.run_id

    async def _queue(self, spec: RunSpec) -> None:
        live: LiveRun | None = None
        try:
            live = await self._open(spec, at_once=False)
            await self._emit_queued(live)
        except BaseException as error:
            self.permits.give_back(spec.owner)
            if not isinstance(error, StoreError | SessionNotFound):
                raise
            if live is not None:
                await self._forget(live)
                with contextlib.suppress(StoreError):
                    await self._store.runs.discard(spec.run_id)
            raise _refused(error) from error
        self._spawn(self._start_queued(live))

    async def _emit_queued(self, live: LiveRun) -> None:
        session_id = live.spec.session_id
        position = self._leases.waiting(session_id)
        await live.log.emit("run.queued", session_id=session_id, source=live.spec.source, position=position)

    async def _start_queued(self, live: LiveRun) -> None:
        try:
            async with live.controls.stop.scope():
                admission = await self._admitted(live.spec, self.limits.submitted_wait_s)
        except BaseException as error:  # whatever kept it from starting is its end, on record
            self.permits.give_back(live.spec.owner)
            await self._end_unstarted(live, error)
            if not isinstance(error, Exception):
                raise
            return
        self._begin(live, admission)

    async def _end_unstarted(self, live: LiveRun, error: BaseException) -> None:
        stop, spec = live.controls.stop, live.spec
        shutdown = stop.reason == "server_shutdown" or self._draining or isinstance(error, asyncio.CancelledError)
        nothing: dict[str, Any] = {**_NOTHING, "steps": 0}
        if shutdown and spec.on_detach == "continue" and spec.persist:
            await live.log.emit("run.interrupted")
        elif shutdown or stop.reason not in (None, "deadline"):
            await live.log.emit("run.cancelled", by=stop.by, reason=stop.reason or "server_shutdown", **nothing)
        else:
            told = isinstance(error, Refused | _NotStarted)
            kind = "deadline" if stop.reason else error.code if told else "unknown"  # type: ignore[attr-defined]
            await live.log.emit("run.failed", failure=kind, error=str(error), code=kind, retryable=True, **nothing)
        await self._forget(live)

    async def _open_or_go_unrecorded(self, spec: RunSpec, admission: Admission) -> LiveRun:
        """A turn that somebody waits for is carried out without its store, if need be; any other is refused."""
        if not spec.persist:
            return await self._open(spec)
        if admission.lease.token is not None:
            try:
                return await self._open(spec, at_once=not _may_go_unrecorded(spec))
            except (StoreError, SessionNotFound) as error:
                raise _refused(error) from error
        live = await self._open(spec.replace(persist=False))
        live.notices.append(STORE_UNAVAILABLE_NOTICE)
        return live

    async def _open(self, spec: RunSpec, *, at_once: bool = True) -> LiveRun:
        """A run that is put on record now, or together with its first event, under its owner's ceilings."""
        spec = self.limits.ceiling(spec)
        store = self._store if spec.persist else self._ephemeral
        if at_once:
            await store.runs.create(spec)
        if not spec.persist:
            self._ephemeral_ids.add(spec.run_id)
        live = self._make_live_run(spec, store)
        live.log.creates = None if at_once else spec
        return live

    def _make_live_run(self, spec: RunSpec, store: Store, last_seq: int = 0, state: RunState | None = None) -> LiveRun:
        secrets = self._secrets(spec)
        writer = self._log.open(
            spec.run_id, store.runs, secrets=secrets, last_seq=last_seq, state=state, persist=spec.persist
        )
        live = LiveRun(spec, store, writer, RunControls(), secrets)
        writer.on_event = self._tell
        if spec.deadline_seconds is not None:
            used = time.time() - state.started_at if state is not None and state.started_at is not None else 0.0
            left = max(0.0, spec.deadline_seconds - used)
            live.deadline_at = time.monotonic() + left
            stop = live.controls.stop
            live.deadline_timer = asyncio.get_running_loop().call_later(left, stop.request, "deadline")
        self._live[spec.run_id] = live
        return live

    def _tell(self, event: Event) -> None:
        for hear in self.listeners:
            try:
                hear(self._live[event.run_id], event)
            except Exception:  # whoever only listens does no harm
                log.exception("the event %s of run %s was not heard", event.type, event.run_id)

    # --- runs that were cut off -----------------------------------------------------------------------------------

    def start_background_tasks(self, *, resume: bool = True) -> None:
        """From now on look for controls that other processes have left and, as servers do, take up runs that were cut
        off."""
        if not self._watching:
            if resume:
                self._log.resume = self._resume_if_left
            for work in (self._poll_controls(), *([self._scan()] if resume else [])):
                task = asyncio.create_task(work)
                self._watching.add(task)
                task.add_done_callback(self._watching.discard)

    async def _scan(self) -> None:
        while not self._draining:
            self._look.clear()
            try:
                await self.resume_all()
            except StoreError as error:
                log.warning("runs that were cut off could not be looked for: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), RESUME_SCAN_S)

    def look_now(self) -> None:
        """Look for runs that were cut off at once: another process has ended."""
        self._look.set()

    async def resume_all(self) -> list[str]:
        """Take up, or close, every run without an end that nobody carries on. Their ids."""
        unfinished = await self._store.runs.unfinished()
        return [record.spec.run_id for record in unfinished if await self._resume(record)]

    async def resume(self, run_id: str) -> None:
        """Take up, or close, a run without an end, if nobody carries it on."""
        record = await self._store.runs.get(run_id)
        if record is not None and not record.state.ended:
            await self._resume(record)

    async def _resume_if_left(self, record: RunRecord) -> None:
        """For whoever reads a run: take it up at once where nobody carries it on."""
        if record.state.ended or record.spec.run_id in self._live or not _is_orphaned(record):
            return
        with contextlib.suppress(StoreError):  # whoever looks next finds it again
            holder = await self._store.leases.holder(f"session:{record.spec.session_id}")
            # One of its own that no run has any more could not be given back.
            if holder is None or holder == this_process():
                await self._resume(record)

    async def join(self, run_id: str) -> Admission | None:
        """What stands for the admission of a run that was begun earlier, once it goes on here or in another process that
        tells of it, or has ended."""
        while (record := await self.get(run_id)) is not None and not record.state.ended and run_id not in self._live:
            self._check_open()
            if await self._is_elsewhere(run_id):
                break
            if not await self._resume(record):
                await asyncio.sleep(STORE_POLL_S)
        if record is None:
            return None
        turn = asyncio.get_running_loop().create_future()
        lease = Lease(record.spec.session_id, record.spec.owner, run_id, turn, self._store)
        return Admission(record.spec, lease, self, begun=True, released=True)

    async def _resume(self, record: RunRecord) -> bool:
        run_id = record.spec.run_id
        known = run_id in self._live or run_id in self._being_resumed
        if known or self._draining or not _is_orphaned(record):
            return False
        self._being_resumed.add(run_id)
        try:
            return await self._resume_left(record)
        finally:
            self._being_resumed.discard(run_id)

    async def _resume_left(self, record: RunRecord) -> bool:
        spec = record.spec
        if record.state.started_at is None and (record.state.last_seq or is_gone(record.holder)):
            if not await self._store.runs.adopt(spec.run_id, record.holder):
                return False
            await self._queue_again(record)
            return True
        try:
            lease = await self._leases.acquire_if_free(spec, self._store)
        except SessionNotFound as error:
            await self._end_cut_off(record, _refused(error))
            return True
        if lease is None:
            return False
        # While the lease was waited for, whoever had it may have come to an end.
        now = await self._store.runs.get(spec.run_id)
        if now is None or now.state.ended or now.state.last_seq != record.state.last_seq:
            await self._leases.release(lease)
            return False
        await self._resume_with_lease(now, lease)
        return True

    async def _end_cut_off(self, record: RunRecord, error: Refused) -> None:
        """Close a run that may not go on."""
        live = await self._revived(record, None)
        live.resumption = None
        await self._end_unstarted(live, error)

    async def _resume_with_lease(self, record: RunRecord, lease: Lease) -> None:
        """Go on with a run whose session is held; it gives the lease back at its end."""
        admission = Admission(record.spec, lease, self)
        session = lease.begun.session if lease.begun is not None else None
        self.permits.take(record.spec.owner)
        try:
            if session is not None and session["owner"] != record.spec.owner:
                await self._end_cut_off(record, _refused(SessionNotFound(record.spec.session_id)))
                await admission.release()
                return
            lease.run_id, lease.owner = record.spec.run_id, record.spec.owner
            live = await self._revived(record, lease.token)
        except BaseException:
            await admission.release()
            raise
        if live.resumption is None and not self._may_begin(record):  # it was made, and never begun
            await self._end_unstarted(live, _NotStarted("server_restarted"))
            await admission.release()
        else:
            self._begin(live, admission)

    async def _queue_again(self, record: RunRecord) -> None:
        """A run that was submitted or made, and not begun, waits for its session once more."""
        live = await self._revived(record, None)
        found, live.resumption = live.resumption, None
        go_on = found.verdict == "go_on" if found is not None else self._may_begin(record)
        try:
            if found is None and go_on:
                await self._emit_queued(live)
            elif found is not None and found.verdict == "cancelled":
                live.controls.stop.request(found.stop_reason or "stop", found.stopped_by)
            if not go_on:
                await self._end_unstarted(live, _NotStarted(found.verdict if found else "server_restarted"))
                return
        except StoreError:
            await self._forget(live)
            raise
        self.permits.take(live.spec.owner)
        self._spawn(self._start_queued(live))

    def _may_begin(self, record: RunRecord) -> bool:
        """Whether a run that was made and not begun is still wanted: it does not need its client, and is not old."""
        return record.spec.on_detach == "continue" and time.time() - record.created_at <= self.limits.resume_within_s

    async def _revived(self, record: RunRecord, token: int | None) -> LiveRun:
        """A run as its log leaves it."""
        spec, store = self.limits.ceiling(record.spec), self._store.runs
        for hear in self.revival_listeners:
            hear(spec)
        await self._log.absorb(store)
        end, before = self._unrecorded_ends.get(spec.run_id, (None, None))
        if before is not None:
            await before.save_rest(token)
        events, partials = await store.durable(spec.run_id), await store.partials(spec.run_id)
        if not events:
            return self._make_live_run(spec, self._store)
        found = look(
            events,
            partials,
            on_detach=spec.on_detach,
            now=time.time(),
            within_s=self.limits.resume_within_s,
            booted_at=booted_at(),
        )
        if end is not None:  # its readers have been told that it is over
            found.verdict, found.next_seq = "store_unavailable", max(found.next_seq, end.seq + 1)
        log.info("run %s is taken up again (%s, %s)", spec.run_id, found.reason, found.verdict)
        live = self._make_live_run(spec, self._store, found.next_seq - 1, record.state)
        live.resumption, live.log.token = found, token
        live.controls.seen |= found.controls
        live.controls.steers += found.steers
        live.controls.approvals.expect(record.state.approvals.keys() - found.answers.keys())
        live.controls.clarifications.expect(record.state.questions.keys() - found.answers.keys())
        live.log.restore(found.partials)
        return live

    async def _poll_controls(self) -> None:
        while not self._draining:
            await asyncio.sleep(CONTROL_POLL_S)
            mine = [run_id for run_id, live in self._live.items() if live.spec.persist]
            try:
                for run_id in await self._store.runs.controlled(mine) if mine else ():
                    for control in await self._store.runs.take_controls(run_id):
                        await self.control(run_id, control)
            except StoreError as error:
                log.warning("controls of other processes could not be looked for: %s", error)

    def _begin(self, live: LiveRun, admission: Admission) -> None:
        if live.spec.persist:
            live.log.token = admission.lease.token
        live.waited_s, live.begun = admission.waited_s, admission.lease.begun
        live.log.start_may_wait = admission.start_may_wait
        if live.log.creates is None:
            self._mark_created(admission)
        else:
            live.log.on_created = partial(self._mark_created, admission)
        live.task = self._spawn(self._carry_out(live, admission))
        admission.begun = True
        if admission.on_started is not None:
            self._to_be_read.add(admission.run_id)
            admission.on_started()

    async def _carry_out(self, live: LiveRun, admission: Admission) -> Result:
        try:
            done = await self._executed(live)
            self._note_unrecorded_end(live)
            return done
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
            except Exception as error:  # noqa: BLE001  (the lease runs out by itself; the result stands)
                log.warning("the session of run %s could not be released: %s", live.spec.run_id, error)
            finally:
                await self._forget(live)

    async def _executed(self, live: LiveRun) -> Result:
        """The run's result. One of which nothing could be put on record is carried out without, if somebody waits."""
        try:
            return await self._execute(live)
        except SessionNotFound as error:  # another owner has made the session since it was leased
            raise _refused(error) from None
        except StoreError as error:
            if not live.unrecorded or isinstance(error, LeaseLost):
                raise
        await live.log.close()
        live.spec, live.store, live.begun = live.spec.replace(persist=False), self._ephemeral, None
        await self._ephemeral.runs.create(live.spec)
        self._ephemeral_ids.add(live.spec.run_id)
        live.log = self._log.open(live.spec.run_id, self._ephemeral.runs, secrets=live.secrets, persist=False)
        live.log.on_event = self._tell
        live.notices.append(STORE_UNAVAILABLE_NOTICE)
        return await self._execute(live)

    async def _close_broken(self, live: LiveRun) -> None:
        """The last resort: a run always has an end on record, even when the loop itself fell over."""
        if live.log.state.ended or live.log.state.status == "interrupted":
            return
        message = live.secrets.redact(traceback.format_exc())
        log.error("run %s ended by a defect: %s", live.spec.run_id, message)
        end: dict[str, Any] = {"failure": "unknown", "error": "The server had an internal error.", "retryable": False}
        if isinstance(sys.exception(), StoreError):
            end = _STORE_FAILED
        try:
            await live.log.emit("run.failed", **end, **_NOTHING, steps=live.log.step)
        except (LogEnded, LeaseLost):
            return
        except StoreError:
            self._note_unrecorded_end(live)

    def _note_unrecorded_end(self, live: LiveRun) -> None:
        """A run that has ended and has no end on record gets it from whoever takes it up, and does not go on."""
        state, writer = live.log.state, live.log
        if live.spec.persist and writer.creates is None and not state.ended and state.status != "interrupted":
            end = writer.event("run.failed", **_STORE_FAILED, **_NOTHING, steps=writer.step)
            end.seq, end.ts = writer.last_seq + 1, time.time()
            self._unrecorded_ends[live.spec.run_id] = end, writer

    def unrecorded_end(self, run_id: str) -> Event | None:
        """The end of a run that the store could not be told."""
        return self._unrecorded_ends.get(run_id, (None, None))[0]

    async def _forget(self, live: LiveRun) -> None:
        run_id = live.spec.run_id
        if live.log.state.ended:
            self._unrecorded_ends.pop(run_id, None)
        if live.deadline_timer is not None:
            live.deadline_timer.cancel()
        await self._log.close(run_id)
        self._live.pop(run_id, None)
        await self._discard_unread(run_id)

    async def read_by_its_client(self, run_id: str) -> None:
        """The request that asked for a run reads no more of it."""
        self._to_be_read.discard(run_id)
        await self._discard_unread(run_id)

    async def _discard_unread(self, run_id: str) -> None:
        """Discard a run that keeps nothing once it has ended and nobody reads it, or is about to."""
        if run_id not in self._ephemeral_ids or run_id in self._live or run_id in self._to_be_read:
            return
        if not self._log.has_subscribers(run_id):
            self._ephemeral_ids.discard(run_id)
            await self._ephemeral.runs.discard(run_id)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen; whoever waits for the run is told, and it is in the log

    # --- following ----------------------------------------------------------------------------------------------

    async def subscribe(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        """The run's log from `after` on; a run that keeps nothing can be read until its last reader has left."""
        async with contextlib.aclosing(self.batches(run_id, after)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    def batches(self, run_id: str, after: int = 0, sink: Sink | None = None) -> AsyncGenerator[list[Event], None]:
        """The events in batches; those that the sink has consumed are left out."""
        if run_id in self._live and run_id not in self._ephemeral_ids:
            return self._log.batches(run_id, self._store.runs, after, sink)
        return self._batches(run_id, after, sink)

    async def _batches(self, run_id: str, after: int, sink: Sink | None) -> AsyncGenerator[list[Event], None]:
        store = await self._store_of(run_id)
        if store is None:
            async with contextlib.aclosing(self._elsewhere.batches(run_id, after)) as batches:
                async for batch in batches:
                    yield batch
            return
        try:
            async with contextlib.aclosing(self._log.batches(run_id, store.runs, after, sink)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            await self._discard_unread(run_id)

    async def _known_here(self, run_id: str) -> RunRecord | None:
        coming = self._creating.get(run_id)
        record = await self._recorded(run_id)
        if record is None and coming is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMING_S_MAX):
                    await coming.wait()
            record = await self._recorded(run_id)
        if record is not None and self._log.resume is not None:
            await self._log.resume(record)
        return record

    async def get(self, run_id: str) -> RunRecord | None:
        """The run as it stands; one that is about to be put on record is waited for."""
        return await self._known_here(run_id) or await self._elsewhere.get(run_id)

    async def _recorded(self, run_id: str) -> RunRecord | None:
        store = await self._store_of(run_id)
        return await store.runs.get(run_id) if store else None

    async def list(
        self,
        owner: str | None = None,
        session_id: str | None = None,
        status: str | None = None,
        kind: str | None = None,
    ) -> list[RunRecord]:
        """Runs, newest first."""
        await self.record_starts()
        return await self._store.runs.list(owner=owner, session_id=session_id, status=status, kind=kind)

    async def record_starts(self) -> None:
        """Put on record every run at work here whose start may wait for its end."""
        with contextlib.suppress(StoreError):
            await asyncio.gather(*(live.log.put_on_record() for live in self._live.values() if live.log.holds_start))

    async def durable(self, run_id: str) -> Sequence[Event]:
        """What of the run's log is on record as such, without deltas."""
        store = await self._store_of(run_id)
        return await store.runs.durable(run_id) if store else await self._elsewhere.durable(run_id)

    async def row(self, run_id: str, row_id: int) -> Row | None:
        """A message that the run's log announces."""
        store = await self._store_of(run_id)
        return await store.runs.row(run_id, row_id) if store else await self._elsewhere.row(run_id, row_id)

    async def _store_of(self, run_id: str) -> Store | None:
        if run_id in self._ephemeral_ids:
            return self._ephemeral
        known = run_id in self._live or await self._store.runs.get(run_id) is not None
        return self._store if known else None

    def has_subscribers(self, run_id: str) -> bool:
        """Whether anybody follows the run."""
        return self._log.has_subscribers(run_id)

    def attach(self, run_id: str) -> object:
        """Become one of those for whom the run works."""
        owner = object()
        if (live := self._live.get(run_id)) is not None:
            live.owners.add(owner)
        return owner

    async def detach(self, run_id: str, owner: object) -> None:
        """Leave; when the last one has gone, the run ends if its spec says so."""
        live = self._live.get(run_id)
        if live is None or owner not in live.owners:
            return
        live.owners.discard(owner)
        if not live.owners and live.spec.on_detach == "cancel":
            await self.control(run_id, Control("cancel", {"reason": "client_disconnected"}))
            await self.wait(run_id, CLOSE_S_MAX)

    async def wait(self, run_id: str, seconds: float) -> None:
        """Wait until the run has ended, but not longer."""
        live = self._live.get(run_id)
        if live is not None and live.task is not None:
            await asyncio.wait([live.task], timeout=seconds)
        elif live is None and (record := await self.get(run_id)) is not None and not record.state.ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    async for _ in self.batches(run_id, record.state.last_seq):
                        pass

    # --- controlling --------------------------------------------------------------------------------------------

    async def control(self, run_id: str, control: Control) -> Applied:
        """Record a control and apply it. A repeated id does nothing."""
        live = self._live.get(run_id)
        if live is None:
            return await self._leave_control(run_id, control)
        if control.control_id in live.controls.seen:
            return "applied"
        live.controls.seen.add(control.control_id)
        event = live.log.event(
            "control.received", by=control.by, surface=control.surface, credential=control.credential
        )
        event.data |= {"control_id": control.control_id, "control": control.control, "data": dict(control.data)}
        applied: list[Applied] = []
        try:
            await live.log.append(event, then=lambda: applied.append(self._apply(live, control)))
        except (LogEnded, LeaseLost):
            return "not_active"
        if control.control in ("approve", "answer"):
            said = (applied[0], control.control, run_id, control.credential or control.by, control.surface)
            log.info("%s: %s of run %s with the credential %r over %r", *said)
        return applied[0]

    async def _leave_control(self, run_id: str, control: Control) -> Applied:
        """A control for a run that another process carries on, or that is to be taken up."""
        record = await self.get(run_id)
        if record is None:
            return "unknown"
        if run_id in self._live:  # it was about to begin
            return await self.control(run_id, control)
        if not record.state.ended:
            carrier = await self._store.runs.carrier(run_id)
            if (applied := await self._elsewhere.control(run_id, carrier or "", control)) != "unknown":
                return applied
        # Nobody has taken it: whoever carries the run on, or takes it up, finds it in the store.
        if not record.state.ended and not await self._store.runs.add_control(run_id, control):
            record = await self.get(run_id)  # it was left there before, or the run has ended meanwhile
        return "not_active" if record is None or record.state.ended else "applied"

    @property
    def _elsewhere(self) -> Elsewhere:
        return self._log.elsewhere

    @property
    def peers(self) -> Peers:
        """The other processes of the home."""
        return self._log.elsewhere.peers

    async def _is_elsewhere(self, run_id: str) -> bool:
        """Whether another process has the run at work, and tells of it."""
        carrier = await self._store.runs.carrier(run_id)
        return carrier is not None and await self._elsewhere.has(run_id, carrier)

    # --- other processes ----------------------------------------------------------------------------------------

    async def answer_peers(self, folder: Path, more: Mapping[str, Operation]) -> None:
        """Tell other processes of the home of the runs that are at work here, and let them control those."""
        operations: dict[str, Operation] = {
            "get": self._get_for_peer,
            "has": self._has_for_peer,
            "control": self._control_for_peer,
            "durable": self._durable_for_peer,
            "row": self._row_for_peer,
            **more,
        }
        self._peer_server = PeerServer(folder, operations, {"batches": self._batches_for_peer})
        await self._peer_server.start()

    async def _get_for_peer(self, run_id: str) -> dict[str, Any] | None:
        record = await self._known_here(run_id) if run_id in self._creating or run_id in self._ephemeral_ids else None
        return encode_record(record) if record is not None else None

    async def _has_for_peer(self, run_id: str) -> bool:
        return run_id in self._live

    async def _control_for_peer(self, run_id: str, control: dict[str, Any]) -> Applied:
        if run_id in self._creating:
            await self._known_here(run_id)
        return await self.control(run_id, Control(**control)) if run_id in self._live else "unknown"

    async def _durable_for_peer(self, run_id: str) -> Sequence[EncodedEvent]:
        return encode_events(await self._ephemeral.runs.durable(run_id)) if run_id in self._ephemeral_ids else []

    async def _row_for_peer(self, run_id: str, row_id: int) -> Row | None:
        row = await self._ephemeral.runs.row(run_id, row_id) if run_id in self._ephemeral_ids else None
        return encode_row(row) if row is not None else None

    async def _batches_for_peer(self, run_id: str, after: int) -> AsyncGenerator[Sequence[EncodedEvent], None]:
        if run_id in self._live or run_id in self._ephemeral_ids:
            async with contextlib.aclosing(self.batches(run_id, after)) as batches:
                async for batch in batches:
                    yield encode_events(batch)

    def _apply(self, live: LiveRun, control: Control) -> Applied:
        controls, data = live.controls, control.data
        if control.control in ("interrupt", "cancel"):
            controls.stop.request(data.get("reason", "stop"), control.by)
            return "applied"
        if control.control == "steer":
            controls.steers.append((control.control_id, str(data["text"])))
            return "applied"
        questions = controls.approvals if control.control == "approve" else controls.clarifications
        answer: Mapping[str, Any] = {
            **data,
            "by": control.by,
            "surface": control.surface,
            "credential": control.credential,
        }
        return "applied" if questions.answer(data.get("id"), answer) else "already_resolved"

    # --- ending -------------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let runs go on for a while, then stop what is left; nothing ends without a record."""
        self._draining = True
        for watch in tuple(self._watching):
            watch.cancel()
        self._leases.turn_away()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=seconds)
        for live in tuple(self._live.values()):
            live.controls.stop.request("server_shutdown", "server")
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=CLOSE_S_MAX)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        if self._peer_server is not None:
            await self._peer_server.close()
        self._leases.close()
