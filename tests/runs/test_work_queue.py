"""Submitted runs that any replica may take, by what the store says of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agent.harness import Harness
from hermes.bus.nats_connection import NatsConnection
from hermes.bus.nats_queue import NatsQueue
from hermes.core.processes import this_process
from hermes.core.spec import Control, RouteChoice, RunSpec
from hermes.runs import leases as leases_module
from hermes.runs.admission import Refused
from hermes.runs.live_run import LiveRun
from hermes.runs.replica_leases import ReplicaLeases, process_lease
from hermes.runs.work_queue import may_travel
from hermes.services.housekeeping import sweep_if_due
from hermes.store.base import StoreUnreachable
from hermes.store.leases import Leases
from hermes.store.stores import AsyncLeases
from support.model_server import ModelServer, Reply, Request
from support.waiting import idle, until

OTHER = "elsewhere:7:7.00"


def away() -> NatsQueue:
    """The queue of a replica that does not reach NATS."""
    return NatsQueue(NatsConnection("nats://127.0.0.1:1", "t"))


def put_holder(harness: Harness, run_id: str, holder: str, age_s: float = 0.0) -> None:
    values = (holder, time.time() - age_s, run_id)
    sql = "UPDATE runs SET holder = ?, created_at = ? WHERE run_id = ?"
    harness.app.store.blocking.engine.write(lambda tx: tx.execute(sql, values))


async def queued(harness: Harness, spec: RunSpec, holder: str, age_s: float = 60.0) -> None:
    """A run as a replica leaves it that has taken it, and not begun."""
    runs = harness.app.store.runs
    live = await harness.app.engine.lifecycle._open(spec, at_once=False)
    await harness.app.engine.lifecycle.emit_queued(live)
    await harness.app.engine.lifecycle.hand_over(live)
    put_holder(harness, spec.run_id, holder, age_s)
    record = await runs.get(spec.run_id)
    assert record is not None and record.state.status == "queued"


async def status(harness: Harness, run_id: str) -> str:
    record = await harness.app.store.runs.get(run_id)
    assert record is not None
    return record.state.status


async def test_submitted_run_without_nats_is_taken_from_store(harness: Harness, server: ModelServer) -> None:
    engine = harness.app.engine
    await engine.become_replica(away(), 2)
    specs = [harness.spec(server, "Hello.", persist=True, session_id=f"s{at}") for at in range(3)]
    specs = [spec.replace(route=None) if not may_travel(spec) else spec for spec in specs]
    for spec in specs:
        await engine.submit(spec)
        record = await engine.get(spec.run_id)
        assert record is not None and record.state.status == "queued" and record.holder == ""
        assert spec.run_id not in engine.by_id and engine.permits.here == 0
    counts = await harness.app.store.runs.unfinished_counts()
    assert counts == {specs[0].owner: (3, 3)}
    engine.start_background_tasks()

    async def all_ended() -> bool:
        return all([await status(harness, spec.run_id) in ("completed", "failed") for spec in specs])

    await until(all_ended)
    # A permit is returned once the end of its run is on record.
    await until(lambda: engine.permits.here == 0)
    events = [event async for event in engine.subscribe(specs[0].run_id)]
    assert [event.seq for event in events] == sorted({event.seq for event in events}) and events[1].seq == 2


class Unavailable:
    """A queue whose stream has no server, while NATS is there: messages go nowhere, and none comes."""

    connected = True

    async def put(self, _: str) -> bool:
        return False

    async def take(self, _: float) -> None:
        await asyncio.Event().wait()

    async def size(self) -> None:
        return None


async def test_replica_starts_run_that_the_queue_has_not_taken(harness: Harness, server: ModelServer) -> None:
    engine = harness.app.engine
    await engine.become_replica(Unavailable(), 1)
    engine.start_background_tasks()
    await idle()
    specs = [harness.spec(server, "Hello.", persist=True, session_id=f"s{at}").replace(route=None) for at in range(3)]
    for spec in specs:
        await engine.submit(spec)

    async def all_ended() -> bool:
        return all([await status(harness, spec.run_id) in ("completed", "failed") for spec in specs])

    await until(all_ended)


async def test_run_with_credentials_of_its_request_does_not_travel(harness: Harness, server: ModelServer) -> None:
    assert may_travel(RunSpec("x", session_id="s", persist=True))
    assert not may_travel(RunSpec("x", session_id="s", persist=False))
    assert not may_travel(RunSpec("x", session_id="s", persist=True, route=RouteChoice(api_key="key-12345678")))


async def test_caps_count_queued_runs(harness: Harness, server: ModelServer) -> None:
    engine = harness.app.engine
    await engine.become_replica(away(), 2)
    engine.limit(runs_max=2)
    for at in range(2):
        await engine.submit(RunSpec("x", session_id=f"s{at}", persist=True))
    try:
        await engine.submit(RunSpec("x", session_id="s3", persist=True))
    except Refused as error:
        assert error.code == "rate_limit_exceeded"
    else:
        raise AssertionError("it was let in")


async def test_submit_is_refused_at_once_where_the_store_does_not_tell_the_counts(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question to a store that is away takes half a minute."""
    questions: list[str] = []

    def away_for(name: str) -> Any:
        async def raise_away(*_: Any, **__: Any) -> Any:
            questions.append(name)
            raise StoreUnreachable("The store is away.")

        return raise_away

    engine, runs = harness.app.engine, harness.app.store.runs
    await engine.become_replica(away(), 2)
    for name in ("unfinished_counts", "append", "create", "discard"):
        monkeypatch.setattr(runs, name, away_for(name), raising=False)
    with pytest.raises(Refused) as refused:
        await engine.submit(RunSpec("x", session_id="s", persist=True))
    assert isinstance(refused.value.__cause__, StoreUnreachable)
    assert questions == ["unfinished_counts"] and engine.permits.here == 0


async def test_fewest_running_owner_is_next_and_busy_session_waits(harness: Harness) -> None:
    runs, leases = harness.app.store.runs, harness.app.store.leases
    spec = {"persist": True}
    rows = [
        ("a1", "alice", "s1"),
        ("a2", "alice", "s2"),
        ("a3", "alice", "s3"),
        ("b1", "bob", "s4"),
        ("b2", "bob", "s5"),
    ]
    for at, (run_id, owner, session_id) in enumerate(rows):
        await queued(harness, RunSpec("x", run_id=run_id, owner=owner, session_id=session_id, **spec), "", 100 - at)
    assert await leases.acquire("session:s4", OTHER, 3600) is not None
    run_ids = [record.spec.run_id if (record := await runs.take_queued()) else None for _ in range(5)]
    assert run_ids == ["a1", "b2", "a2", "a3", None]
    assert await runs.any_queued() and await runs.queued(time.time()) == ["b1"]
    record = await runs.get("a1")
    assert record is not None and record.holder == this_process()
    await runs.offer("a1")
    record = await runs.take_queued()
    assert record is not None and record.spec.run_id == "a1"


async def test_queued_run_waits_for_an_earlier_one_of_its_session(harness: Harness) -> None:
    runs = harness.app.store.runs
    for at, run_id in enumerate(("r1", "r2")):
        await queued(harness, RunSpec("x", run_id=run_id, session_id="s", persist=True), "", 100 - at)
    first = await runs.take_queued()
    # The first is taken, and its process has not asked for the session yet.
    assert first is not None and first.spec.run_id == "r1" and await runs.take_queued() is None
    await harness.app.engine.recovery.end_refused(first, Refused("session_busy", "It waited for too long."))
    second = await runs.take_queued()
    assert second is not None and second.spec.run_id == "r2"


async def test_unstarted_run_of_lapsed_replica_is_resumed(harness: Harness, server: ModelServer) -> None:
    engine = harness.app.engine
    await engine.become_replica(away(), 2)
    spec = harness.spec(server, "Hello.", persist=True, session_id="s")
    await queued(harness, spec, OTHER)
    token = await harness.app.store.leases.acquire(process_lease(OTHER), OTHER, 3600)
    assert token is not None
    assert await engine.resume_all() == [] and spec.run_id not in engine.by_id
    await harness.app.store.leases.release(process_lease(OTHER), token)
    assert await engine.resume_all() == [spec.run_id]

    async def has_ended() -> bool:
        return await status(harness, spec.run_id) in ("completed", "failed")

    await until(has_ended)


async def test_queued_run_is_not_taken_by_recovery(harness: Harness) -> None:
    engine = harness.app.engine
    await engine.become_replica(away(), 2)
    await queued(harness, RunSpec("x", session_id="s", persist=True), "")
    assert await engine.resume_all() == []


async def test_unstarted_run_that_was_taken_over_gets_no_end(harness: Harness) -> None:
    engine, spec = harness.app.engine, RunSpec("x", session_id="s", persist=True)
    await engine.become_replica(away(), 2)
    live = await engine.lifecycle._open(spec, at_once=False)
    await engine.lifecycle.emit_queued(live)
    put_holder(harness, spec.run_id, OTHER)
    await engine.lifecycle.end_unstarted(live, Refused("session_busy", "late"))
    assert await status(harness, spec.run_id) == "queued" and spec.run_id not in engine.by_id


async def test_queued_run_that_was_stopped_asks_no_model(harness: Harness, server: ModelServer) -> None:
    engine = harness.app.engine
    await engine.become_replica(away(), 2)
    spec = harness.spec(server, "Hello.", persist=True, session_id="s")
    await queued(harness, spec, "")
    # A replica to which it was said, and which did not have the run, has left it in the store.
    assert await harness.app.store.runs.add_control(spec.run_id, Control("cancel", {"reason": "stop"}))
    assert engine.work_queue is not None
    await engine.work_queue._look(None)
    await engine.work_queue.close()
    assert await status(harness, spec.run_id) == "cancelled" and not server.requests


async def test_requeued_run_survives_closing_of_its_late_submission(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when two replicas are asked for a run under one key, and the one that was late gets it from the queue."""
    lifecycle, engine = harness.app.engine.lifecycle, harness.app.engine
    spec = RunSpec("x", session_id="s", persist=True)
    late, live_runs = lifecycle.make_live(spec), list[LiveRun]()
    close = late.log.close

    async def close_late() -> None:
        await close()
        live_runs.append(lifecycle.make_live(spec))

    monkeypatch.setattr(late.log, "close", close_late)
    await lifecycle.forget(late)
    assert engine.by_id[spec.run_id] is live_runs[0] and engine.log.writer(spec.run_id) is live_runs[0].log
    await lifecycle.forget(live_runs[0])
    assert spec.run_id not in engine.by_id and engine.log.writer(spec.run_id) is None


async def test_one_replica_leads(harness: Harness) -> None:
    leases = harness.app.store.leases
    first, other = ReplicaLeases(leases), ReplicaLeases(leases)
    await first.renew()
    await other.renew()
    assert first.leads and not other.leads
    await first.renew()
    assert first.leads
    await first.release()
    await other.renew()
    assert other.leads and not first.leads
    assert Leases(harness.app.store.blocking.engine).holder(process_lease(this_process())) == this_process()
    await other.release()
    await until(lambda: leases.holder("leader"), lambda holder: holder is None)


async def test_leading_replica_sweeps(harness: Harness) -> None:
    app = harness.app
    await app.engine.become_replica(away(), 2)
    assert app.engine.replica_leases is not None and app.engine.replica_leases.leads
    assert await asyncio.to_thread(sweep_if_due, app.store.blocking, app.settings) is not None


@pytest.mark.parametrize("is_taken_over", [True, False])
async def test_turn_that_ends_while_its_lease_is_uncertain(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, is_taken_over: bool
) -> None:
    """A replica that was suspended reads the end of an answer before it learns whether another has the run."""
    suspended, renewing, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()
    renew_all = AsyncLeases.renew_all

    async def renew_late(leases: AsyncLeases, *args: Any) -> set[str]:
        if suspended.is_set():
            renewing.set()
            await answered.wait()
        return await renew_all(leases, *args)

    monkeypatch.setattr(AsyncLeases, "renew_all", renew_late)
    monkeypatch.setattr(leases_module, "LEASE_RENEW_S", 0.02)
    engine, gate = harness.app.engine, asyncio.Event()

    async def answer(_: Request) -> Reply:
        await gate.wait()
        return Reply(text="Done.")

    server.handler = answer
    await engine.become_replica(away(), 2)
    live = await engine.start(harness.spec(server, persist=True, session_id="s"))
    # The run's first commit may need a renewed lease.
    await until(
        lambda: harness.app.store.runs.get(live.spec.run_id), lambda record: record and record.state.status == "running"
    )
    suspended.set()
    await renewing.wait()
    engine.lifecycle.session_expired(live.spec.run_id, True)
    for lease in engine.admissions.leases._held:
        lease.expired = True
    if is_taken_over:
        token = "UPDATE leases SET token = token + 1, holder = ? WHERE name = 'session:s'"
        await harness.app.store.blocking.engine.submit_write(lambda tx: tx.execute(token, (OTHER,)))
    gate.set()
    await until(lambda: live.log.ending)
    answered.set()
    await until(lambda: live.spec.run_id not in engine.by_id)
    assert engine.permits.here == 0
    assert await status(harness, live.spec.run_id) == ("running" if is_taken_over else "completed")
