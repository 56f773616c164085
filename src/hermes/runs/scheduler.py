"""Starts jobs when they are due: each time becomes one run, whichever process is there, however often it restarts."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from hermes.core.json_types import JsonObject
from hermes.core.limits import JOB_CLAIM_S, JOB_LOOK_S
from hermes.core.text import text_of
from hermes.runs import schedule as schedules
from hermes.runs.engine import Refused, RunEngine
from hermes.runs.jobs import Job, Report, after_delivery, due_delivery, run_ended, run_started, spec_of, with_delivery
from hermes.store.base import RunRecord, StoreError
from hermes.store.leases import this_process

log = logging.getLogger(__name__)


# Delivers a result; an exception is recorded, and the delivery retried.
Deliver = Callable[[Job, Report], Awaitable[None]]


class Scheduler:
    """Looks for due jobs and submits their runs to the engine. `parallel`: how many may run at once."""

    def __init__(
        self,
        engine: RunEngine,
        jobs: Any,
        parallel: Callable[[], int],
        clock: Callable[[], float] = time.time,
        leads: Callable[[], bool] = lambda: True,
        deliver: Deliver | None = None,
    ) -> None:
        self._leads, self._deliver = leads, deliver
        self._deliveries: dict[str, asyncio.Task[None]] = {}
        self._engine, self._jobs, self._parallel, self._clock = engine, jobs, parallel, clock
        self._holder = this_process()

    async def run(self) -> None:
        while True:
            try:
                if not self._engine.draining and self._leads():
                    await self.look()
            except (StoreError, Refused) as error:
                log.warning("jobs could not be checked: %s", error)
            except Exception:  # one defect must not end all jobs
                log.exception("jobs could not be checked")
            await asyncio.sleep(JOB_LOOK_S)

    async def look(self) -> None:
        """Record the ends of runs, then start what is due."""
        running = await self._settle()
        jobs = self._jobs
        now, free = self._clock(), self._parallel() - running
        for job in await jobs.claim_due(now, self._holder, ttl=JOB_CLAIM_S, limit=free) if free > 0 else ():
            try:
                fields = await self._begin(job, now)
            except Refused as error:
                log.warning("the job %s was not started: %s", job["id"], error)
                # The session will not become the job's by waiting; any other refusal passes.
                never = error.code == "session_not_found"
                failed = {"last_status": "failed", "last_error": str(error)}
                fields = {**_next_run(job, now), **failed} if never else {}
            except StoreError as error:
                log.warning("the job %s is put off: %s", job["id"], error)
                fields = {}
            except schedules.BadSchedule as error:  # a time zone that no longer exists
                fields = {"enabled": False, "state": "failed", "last_error": str(error)}
            await jobs.finish(job["id"], holder=self._holder, **fields)

    async def _settle(self) -> int:
        """Record the ends of jobs' runs and correct times that are too late; returns how many jobs are running."""
        running, now = 0, self._clock()
        for job in await self._jobs.list():
            if self._deliver is not None and due_delivery(job, now) and job["id"] not in self._deliveries:
                self._deliveries[job["id"]] = asyncio.ensure_future(self._deliver_one(job))
            if (sooner := _earlier_time(job, now)) is not None:
                await self._jobs.update(job["id"], next_run_at=sooner)
            if job["last_status"] != "running":
                continue
            record = await self._engine.get(job["last_run_id"])
            if record is not None and not record.state.ended:
                running += 1
            else:
                outcome = {"last_status": "failed", "last_error": "its run is gone"}
                if record is not None:
                    outcome = with_delivery(job, await settled(self._engine, record), job["last_run_id"], now)
                await self._jobs.update(job["id"], **outcome)
        return running

    async def _deliver_one(self, job: Job) -> None:
        assert self._deliver is not None
        try:
            await deliver_due(self._engine, self._jobs, job, self._deliver, self._clock)
        except StoreError as error:
            log.warning("the delivery of the job %s is postponed: %s", job["id"], error)
        finally:
            del self._deliveries[job["id"]]

    async def _begin(self, job: Job, now: float) -> JsonObject:
        """Start the run of a due job; returns the changes of its record. The run is named after job and time: after a
        crash in between, a second attempt finds it."""
        following = _next_run(job, now)
        last = await self._engine.get(job["last_run_id"]) if job["last_run_id"] else None
        spec = spec_of(job, now).replace(run_id=run_id_of(job))
        if last is not None and not last.state.ended and last.spec.run_id != spec.run_id:
            await self._notify_skipped(job)
            return following
        if await self._engine.get(spec.run_id) is None:
            await self._engine.submit(spec)
        completed = job["repeat"]["completed"] + 1
        repeat = {**job["repeat"], "completed": completed}
        if following["next_run_at"] is None or completed >= (repeat["times"] or completed + 1):
            following = {"next_run_at": None, "enabled": False, "state": "completed"}
        return {**following, **run_started(spec, now), "repeat": repeat}

    async def _notify_skipped(self, job: Job) -> None:
        message = f"The job {job['name']!r} was due again while it still runs; this time is skipped."
        log.warning("%s (%s)", message, job["id"])
        if (live := self._engine.live(job["last_run_id"])) is not None:
            await live.log.emit("notice", level="warn", code="job_skipped", message=message)


async def settled(engine: RunEngine, record: RunRecord) -> Job:
    row_id = record.state.final_row
    row = await engine.row(record.spec.run_id, row_id) if row_id is not None else None
    return run_ended(record.state, text_of(row.content) if row is not None else None)


async def deliver_due(
    engine: RunEngine, jobs: Any, job: Job, deliver: Deliver, clock: Callable[[], float] = time.time
) -> None:
    """Try to deliver the oldest pending result, and record the outcome in the job."""
    run_id = due_delivery(job, clock())
    record = await engine.get(run_id) if run_id is not None else None
    if run_id is None:
        return
    error: str | None = "its run is gone"
    if record is not None:
        row_id, state = record.state.final_row, record.state
        row = await engine.row(run_id, row_id) if row_id is not None else None
        text = (text_of(row.content) if row is not None else "") or state.error or ""
        names = {"job_id": job["id"], "job_name": job["name"], "run_id": run_id, "session_id": record.spec.session_id}
        report = Report(**names, status=state.status, text=text, finished_at=state.ended_at or clock())
        try:
            await deliver(job, report)
            error = None
        except Exception as failure:  # noqa: BLE001  (whatever it is, it is recorded and retried)
            error = str(failure) or type(failure).__name__
            log.warning("the result of the job %s is not delivered: %s", job["id"], error)
    current = await jobs.get(job["id"])
    if current is not None:
        await jobs.update(job["id"], **after_delivery(current, run_id, error, clock()))


def run_id_of(job: Job) -> str:
    time_of_job = f"{job['id']}:{job['next_run_at']!r}"
    return f"run_{hashlib.sha256(time_of_job.encode()).hexdigest()[:32]}"


def _earlier_time(job: Job, now: float) -> float | None:
    """The next time by the schedule, if the stored one is later: a clock was ahead when that was set."""
    schedule, at = job["schedule"], job["next_run_at"]
    if not job["enabled"] or at is None or schedule["kind"] == "once":
        return None
    # Cron expressions are slow to parse: it is computed again only if the clock is known to have been set back.
    if schedule["kind"] == "cron" and max(job["created_at"], job["last_run_at"] or 0.0) <= now:
        return None
    try:
        soonest = schedules.next_time(schedule, now, schedules.zone_named(job["timezone"]))
    except schedules.BadSchedule:  # reported when it is due
        return None
    return soonest if soonest is not None and soonest < at else None


def _next_run(job: Job, now: float) -> JsonObject:
    """The next time; missed times count as the present one."""
    zone = schedules.zone_named(job["timezone"])
    return {"next_run_at": schedules.next_time(job["schedule"], now, zone, last=job["next_run_at"])}
