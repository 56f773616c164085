"""Jobs at their times: once each, whoever looks and however often, with a clock that the test turns."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from agent.conftest import MakeHarness
from agent.harness import Harness
from hermes.core.spec import Control
from hermes.guards.secrets import Secrets
from hermes.runs.scheduler import Scheduler
from hermes.services.jobs import new_job
from support.model_server import ModelServer, Reply
from support.waiting import DEADLINE_S, until

BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2027, 1, 1, 8, 0, tzinfo=BERLIN).timestamp()
Json = dict[str, Any]


class Clock:
    """Time as the test wants it."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class Plan:
    """A harness whose scheduler is run by the test."""

    def __init__(self, harness: Harness, server: ModelServer, parallel: int = 4) -> None:
        self.harness, self.server, self.clock = harness, server, Clock()
        self.scheduler = self.another(parallel)

    def another(self, parallel: int = 4) -> Scheduler:
        return Scheduler(self.harness.engine, self.harness.app.store.jobs, lambda: parallel, self.clock)

    async def add(self, schedule: str, **fields: Any) -> Json:
        job = new_job({"schedule": schedule, "prompt": "Say hi.", **fields}, self.clock.now, "Europe/Berlin", Secrets())
        return await self.harness.engine.store.jobs.create(job)  # type: ignore[no-any-return]

    async def job(self, job: Json) -> Json:
        return await self.harness.engine.store.jobs.get(job["id"])  # type: ignore[no-any-return]

    async def runs(self) -> list[Any]:
        return sorted(await self.harness.engine.list(kind="job"), key=lambda record: record.created_at)

    async def look(self, at: float | None = None) -> None:
        self.clock.now = self.clock.now if at is None else at
        await self.scheduler.look()
        await self.rest()

    async def rest(self) -> None:
        """Until every run has its end, and the records say so."""
        await until(self.runs, lambda records: all(record.state.ended for record in records))


@pytest.fixture
def plan(make_harness: MakeHarness, server: ModelServer) -> Plan:
    server.script = [Reply(text="hi", continues=False)] * 2_000
    settings = {"model": {"base_url": f"{server.url}/v1", "default": "m"}, "platform_toolsets": {"cron": []}}
    return Plan(make_harness(settings), server)


async def test_one_shot_job_runs_once(plan: Plan) -> None:
    job = await plan.add("30m")
    await plan.look()
    assert await plan.runs() == []
    await plan.look(NOW + 1_800)
    [record] = await plan.runs()
    assert record.spec.source == "cron" and record.spec.session_id.startswith(f"cron_{job['id']}_")
    await plan.look(NOW + 90_000)
    now = await plan.job(job)
    assert len(await plan.runs()) == 1 and (now["enabled"], now["state"], now["next_run_at"]) == (
        False,
        "completed",
        None,
    )
    assert now["last_error"] is None
    assert (now["last_status"], now["last_run_id"]) == ("completed", record.spec.run_id)
    assert now["repeat"] == {"times": 1, "completed": 1}


async def test_weekly_cron_follows_wall_clock_over_dst(plan: Plan) -> None:
    job = await plan.add("0 9 * * sun")
    times: list[datetime] = []
    while (due := (await plan.job(job))["next_run_at"]) < NOW + 365 * 86_400:
        times.append(datetime.fromtimestamp(due, BERLIN))
        await plan.look(due)
    assert len(times) == 52 == len(await plan.runs())
    assert {(at.hour, at.minute) for at in times} == {(9, 0)}
    assert len({at.utcoffset() for at in times}) == 2 and len({at.date() for at in times}) == 52


async def test_missed_schedule_runs_once(plan: Plan) -> None:
    job = await plan.add("every 1h")
    await plan.look(NOW + 10.5 * 3_600)
    assert len(await plan.runs()) == 1
    assert (await plan.job(job))["next_run_at"] == NOW + 11 * 3_600


@pytest.mark.parametrize("schedule", ["every 10m", "*/10 * * * *"])
async def test_next_run_set_far_ahead_by_wrong_clock_is_reset(plan: Plan, schedule: str) -> None:
    job = await plan.add(schedule)
    await plan.look(NOW + 30 * 86_400)
    assert (await plan.job(job))["next_run_at"] > NOW + 86_400
    await plan.look(NOW + 60)
    following = (await plan.job(job))["next_run_at"]
    assert NOW + 60 < following <= NOW + 660
    await plan.look(following)
    await plan.look(following + 600)
    assert len(await plan.runs()) > 1
    assert (await plan.job(job))["next_run_at"] == following + 1200


async def test_job_repeat_limit(plan: Plan) -> None:
    job = await plan.add("every 1h", repeat=2)
    for hour in range(1, 5):
        await plan.look(NOW + hour * 3_600)
    assert len(await plan.runs()) == 2 and (await plan.job(job))["state"] == "completed"


async def test_failing_job_waits_for_next_run(plan: Plan) -> None:
    plan.server.script = [Reply(status=400, error="no")] * 50
    job = await plan.add("every 1h")
    for minute in range(60, 75):
        await plan.look(NOW + minute * 60)
    now = await plan.job(job)
    assert len(await plan.runs()) == 1 and now["enabled"] and now["last_status"] == "failed" and now["last_error"]


async def test_concurrent_schedulers_start_one_run(plan: Plan) -> None:
    for _ in range(5):
        await plan.add("30m")
    plan.clock.now = NOW + 1_800
    await asyncio.gather(*(plan.another(100).look() for _ in range(8)))
    await plan.rest()
    assert len(await plan.runs()) == 5


async def test_scheduler_crash_after_start_does_not_start_second_run(plan: Plan) -> None:
    job = await plan.add("every 1h")
    before = await plan.job(job)
    await plan.look(NOW + 3_600)
    # The record as it was when the process died between the two.
    await plan.harness.engine.store.jobs.update(job["id"], **{**before, "last_status": None})
    await plan.look(NOW + 3_700)
    now = await plan.job(job)
    assert len(await plan.runs()) == 1 and now["next_run_at"] == NOW + 7_200
    assert now["last_run_id"] == (await plan.runs())[0].spec.run_id


async def test_job_due_while_running_is_skipped_with_notice(plan: Plan) -> None:
    plan.server.script = [Reply(text="slow", stall_at=1)]
    job = await plan.add("every 1h")
    plan.clock.now = NOW + 3_600
    await plan.scheduler.look()
    [record] = await plan.runs()
    await plan.server.until(lambda: bool(plan.server.requests))
    plan.clock.now = NOW + 7_200
    await plan.scheduler.look()
    now = await plan.job(job)
    assert len(await plan.runs()) == 1 and now["next_run_at"] == NOW + 10_800 and now["repeat"]["completed"] == 1
    await plan.harness.engine.control(record.spec.run_id, Control("interrupt"))
    await plan.rest()
    await plan.look()
    codes = [
        event.data["code"] for event in await plan.harness.engine.durable(record.spec.run_id) if event.type == "notice"
    ]
    assert "job_skipped" in codes and (await plan.job(job))["last_status"] == "cancelled"


async def test_concurrent_jobs_are_limited(plan: Plan) -> None:
    plan.server.script = [Reply(text="slow", stall_at=1)] * 3
    for _ in range(3):
        await plan.add("30m")
    plan.clock.now = NOW + 1_800
    narrow = plan.another(2)
    await narrow.look()
    await narrow.look()
    runs = await plan.runs()
    assert len(runs) == 2
    for record in runs:
        await plan.harness.engine.control(record.spec.run_id, Control("interrupt"))
    await plan.rest()
    await narrow.look()
    assert len(await plan.runs()) == 3
    for record in await plan.runs():
        await plan.harness.engine.control(record.spec.run_id, Control("interrupt"))
    await plan.rest()


async def test_job_with_session_id_continues_session(plan: Plan) -> None:
    await plan.add("every 1h", session_id="diary")
    await plan.look(NOW + 3_600)
    await plan.look(NOW + 7_200)
    assert [record.spec.session_id for record in await plan.runs()] == ["diary", "diary"]
    assert [m["content"] for m in plan.server.requests[-1].body["messages"] if m["role"] != "system"] == [
        "Say hi.", "hi", "Say hi.",
    ]  # fmt: skip


async def test_defect_does_not_end_scheduler(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: asyncio.Queue[None] = asyncio.Queue()

    async def fail() -> None:
        looked.put_nowait(None)
        raise RuntimeError("a defect")

    monkeypatch.setattr("hermes.runs.scheduler.JOB_LOOK_S", 0.0)
    monkeypatch.setattr(plan.scheduler, "look", fail)
    running = asyncio.create_task(plan.scheduler.run())
    for _ in range(2):
        await asyncio.wait_for(looked.get(), DEADLINE_S)
    running.cancel()


async def test_delivery_is_retried_with_growing_waits_and_given_up(plan: Plan) -> None:
    reports: list[Any] = []

    async def deliver(job: Json, report: Any) -> None:
        reports.append(report)
        raise OSError("no way")

    job = await plan.add("every 1d", name="Daily", deliver="notify")
    jobs = plan.harness.engine.store.jobs
    scheduler = Scheduler(plan.harness.engine, jobs, lambda: 4, plan.clock, deliver=deliver)
    plan.clock.now = job["next_run_at"]
    await scheduler.look()
    await plan.rest()
    waits: list[float] = []

    async def deliveries() -> list[Json]:
        await scheduler.look()
        return (await plan.job(job))["deliveries"]  # type: ignore[no-any-return]

    for attempt in range(1, 6):
        await until(deliveries, lambda entries, count=attempt: entries and entries[0]["attempts"] >= count)
        assert len(reports) == attempt
        [entry] = (await plan.job(job))["deliveries"]
        if entry["next_at"] is not None:
            waits.append(entry["next_at"] - plan.clock.now)
            plan.clock.now = entry["next_at"]
    assert waits == [30, 120, 480, 1920]
    assert (entry["status"], entry["error"]) == ("failed", "no way")
    await scheduler.look()
    assert len(reports) == 5
    assert (reports[0].text, reports[0].job_name, reports[0].status) == ("hi", "Daily", "completed")


async def test_results_are_delivered_once(plan: Plan) -> None:
    reports: list[Any] = []

    async def deliver(job: Json, report: Any) -> None:
        reports.append(report.run_id)

    job = await plan.add("every 1d", deliver="notify")
    scheduler = Scheduler(plan.harness.engine, plan.harness.engine.store.jobs, lambda: 4, plan.clock, deliver=deliver)
    plan.clock.now = job["next_run_at"]
    await scheduler.look()
    await plan.rest()

    async def statuses() -> list[str]:
        await scheduler.look()
        return [entry["status"] for entry in (await plan.job(job))["deliveries"]]

    await until(statuses, lambda value: value == ["delivered"])
    await scheduler.look()
    assert len(reports) == 1
