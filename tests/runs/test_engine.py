"""The engine: who may run, in what order, and how everything ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from agent.conftest import MakeHarness
from agent.harness import QUIET, Harness, Json, nothing_left, sent_messages, tool
from hermes.app import App
from hermes.core.spec import Control, RunSpec
from hermes.runs import leases as leases_module
from hermes.runs.engine import Refused
from hermes.settings import config
from hermes.store.base import StoreError
from support.model_server import Call, ModelServer, Reply, Request
from support.waiting import DEADLINE_S, idle, until

SESSION = "the-session"


class Gate:
    """Answers that wait until the test lets them go."""

    def __init__(self, server: ModelServer) -> None:
        self.open = asyncio.Event()
        self.most = self.now = 0
        self._server = server
        server.handler = self._answer

    async def _answer(self, request: Request) -> Reply:
        self.now = self._server.open_streams
        self.most = max(self.most, self.now)
        await self.open.wait()
        return Reply(text=f"Answer {request.number}.")


@pytest.fixture
async def gate(server: ModelServer) -> Gate:
    return Gate(server)


async def wait_for_end(harness: Harness, run_id: str) -> Json:
    """The last event of a run, waited for."""
    async with asyncio.timeout(DEADLINE_S):
        events = [event.as_dict() async for event in harness.engine.subscribe(run_id)]
    return events[-1]


# ---- one turn per session


@pytest.mark.parametrize("persist", [True, False])
async def test_turns_of_same_session_never_overlap(
    harness: Harness, server: ModelServer, gate: Gate, persist: bool
) -> None:
    specs = [harness.spec(server, f"turn {n}", session_id=SESSION, persist=persist) for n in range(4)]
    runs = [asyncio.create_task(harness.engine.run(spec)) for spec in specs]
    await server.until(lambda: server.open_streams == 1)
    gate.open.set()
    await asyncio.gather(*runs)
    assert gate.most == 1


async def test_queued_turns_run_in_order_of_arrival(harness: Harness, server: ModelServer, gate: Gate) -> None:
    specs = [harness.spec(server, f"turn {n}", session_id=SESSION, persist=True) for n in range(4)]
    runs = [asyncio.create_task(harness.engine.run(spec)) for spec in specs]
    await server.until(lambda: server.open_streams == 1)
    gate.open.set()
    await asyncio.gather(*runs)
    wanted: list[tuple[str, str]] = []
    for number, request in enumerate(server.requests):
        wanted.append(("user", f"turn {number}"))
        assert sent_messages(request) == wanted
        wanted.append(("assistant", f"Answer {number + 1}."))


async def test_turns_of_different_sessions_run_concurrently(harness: Harness, server: ModelServer, gate: Gate) -> None:
    runs = [asyncio.create_task(harness.run(server, persist=True)) for _ in range(5)]
    await server.until(lambda: server.open_streams == 5)
    gate.open.set()
    assert all(run.result["completed"] for run in await asyncio.gather(*runs))


async def test_session_queue_timeout_rejects_turn_without_trace(
    harness: Harness, server: ModelServer, gate: Gate
) -> None:
    running = await harness.begin(harness.spec(server, session_id=SESSION, persist=True))
    late = harness.spec(server, session_id=SESSION, persist=True)
    with pytest.raises(Refused) as refused:
        await harness.engine.admit(late, wait_s=0.05)
    assert refused.value.code == "session_busy"
    assert await harness.engine.get(late.run_id) is None
    gate.open.set()
    await running.end()
    server.handler, server.script = None, [Reply(text="Now.")]
    assert (await harness.carry_out(late)).result["final_response"] == "Now."


async def test_turn_queue_setting_limits_waiting_turns(
    make_harness: MakeHarness, server: ModelServer, gate: Gate
) -> None:
    harness = make_harness({"sessions": {"turn_queue": 2}})
    runs = [asyncio.create_task(harness.engine.run(harness.spec(server, session_id=SESSION))) for _ in range(3)]
    await server.until(lambda: server.open_streams == 1)
    with pytest.raises(Refused) as refused:
        await harness.engine.run(harness.spec(server, session_id=SESSION))
    assert refused.value.code == "session_busy"
    gate.open.set()
    assert all(result["completed"] for result in await asyncio.gather(*runs))


async def test_submitted_turn_fails_with_session_busy_after_timeout(
    harness: Harness, server: ModelServer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.engine, "limits", replace(harness.engine.limits, submitted_wait_s=0.05))
    running = await harness.begin(harness.spec(server, session_id=SESSION, persist=True))
    late = harness.spec(server, session_id=SESSION, persist=True)
    await harness.engine.submit(late)
    last = await wait_for_end(harness, late.run_id)
    assert (last["type"], last["failure"]) == ("run.failed", "session_busy")
    gate.open.set()
    await running.end()


async def test_submitted_turn_is_recorded_and_reports_queue_position(
    harness: Harness, server: ModelServer, gate: Gate
) -> None:
    running = await harness.begin(harness.spec(server, session_id=SESSION, persist=True))
    await server.until(lambda: server.open_streams == 1)
    waiting = [harness.spec(server, f"turn {n}", session_id=SESSION, persist=True) for n in range(2)]
    for spec in waiting:
        assert await harness.engine.submit(spec) == spec.run_id
        record = await harness.engine.get(spec.run_id)
        assert record is not None
        assert record.state.status == "queued"
    gate.open.set()
    await running.end()
    logs = [[e.as_dict() async for e in harness.engine.subscribe(spec.run_id)] for spec in waiting]
    assert [log[0]["position"] for log in logs] == [1, 2]
    assert [log[-1]["type"] for log in logs] == ["run.completed"] * 2


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_run_that_is_on_record_is_submitted_once(
    harness: Harness, server: ModelServer, gate: Gate, elsewhere: bool
) -> None:
    """Two that were asked under one key give the run the same number."""
    spec = harness.spec(server, session_id=SESSION, persist=True)
    if elsewhere:
        await harness.engine.store.runs.create(spec)
    for _ in range(2):
        assert await harness.engine.submit(spec) == spec.run_id
    assert harness.engine.permits.of(spec.owner) == (0 if elsewhere else 1)
    gate.open.set()
    if elsewhere:
        assert not harness.engine.by_id
    else:
        events = [event async for event in harness.engine.subscribe(spec.run_id)]
        assert events[-1].type == "run.completed" and len(server.requests) == 1


async def test_cancelled_waiter_does_not_block_session_queue(harness: Harness, server: ModelServer, gate: Gate) -> None:
    running = await harness.begin(harness.spec(server, session_id=SESSION, persist=True))
    leaving = asyncio.create_task(harness.engine.run(harness.spec(server, "left", session_id=SESSION, persist=True)))
    staying = asyncio.create_task(harness.engine.run(harness.spec(server, "stayed", session_id=SESSION, persist=True)))
    await until(lambda: harness.engine.admissions.leases.waiting(SESSION) == 3)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    gate.open.set()
    await running.end()
    assert (await staying)["completed"] is True
    assert [row.content for row in await harness.rows(SESSION) if row.role == "user"] == ["hi", "stayed"]


async def test_failed_turn_releases_session(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(status=403), Reply(text="Fine.")]
    await harness.run(server, session_id=SESSION, persist=True)
    async with asyncio.timeout(DEADLINE_S):
        run = await harness.run(server, "again", session_id=SESSION, persist=True)
    assert run.result["completed"] is True


async def test_admission_holds_session_until_run_ends(harness: Harness, server: ModelServer, gate: Gate) -> None:
    spec = harness.spec(server, session_id=SESSION, persist=True)
    admission = await harness.engine.admit(spec)
    assert (admission.run_id, admission.session_id) == (spec.run_id, SESSION)
    with pytest.raises(Refused):
        await harness.engine.admit(harness.spec(server, session_id=SESSION), wait_s=0.02)
    gate.open.set()
    result = await harness.engine.run(spec, admission)
    assert result["completed"] is True
    again = await harness.engine.admit(harness.spec(server, session_id=SESSION), wait_s=DEADLINE_S)
    await again.release()
    await again.release()


async def test_runs_max_limits_concurrent_runs(
    harness: Harness, server: ModelServer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.engine, "limits", replace(harness.engine.limits, runs_max=2))
    runs = [await harness.begin(harness.spec(server)) for _ in range(2)]
    with pytest.raises(Refused) as refused:
        await harness.engine.run(harness.spec(server))
    assert refused.value.code == "rate_limit_exceeded"
    gate.open.set()
    for running in runs:
        await running.end()
    assert (await harness.run(server)).result["completed"] is True


# ---- two processes on one store


@pytest.fixture
async def twins(harness: Harness) -> AsyncIterator[tuple[Harness, Harness]]:
    """Two engines on one store, as two processes would be."""
    harnesses = [Harness(harness.home, {}), Harness(harness.home, {})]
    for async_class in harnesses:
        async_class.app = App(harness.home, config.load(harness.home))
        async_class.engine = async_class.app.engine
    yield harnesses[0], harnesses[1]
    for async_class in harnesses:
        await async_class.close()


async def test_turns_of_same_session_never_overlap_across_engines(
    twins: tuple[Harness, Harness], server: ModelServer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = twins
    first = asyncio.create_task(one.engine.run(one.spec(server, "first", session_id=SESSION, persist=True)))
    await server.until(lambda: server.open_streams == 1)
    refused, begin = list[Any](), two.app.store.begin

    def ask(*args: Any, **fields: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.ensure_future(begin(*args, **fields))
        answer.add_done_callback(lambda done: refused.append(done) if done.result() is None else None)
        return answer

    monkeypatch.setattr(two.app.store, "begin", ask, raising=False)
    second = asyncio.create_task(two.engine.run(two.spec(server, "second", session_id=SESSION, persist=True)))
    await until(lambda: len(refused) >= 2)
    assert server.open_streams == 1
    gate.open.set()
    await asyncio.gather(first, second)
    assert gate.most == 1
    assert sent_messages(server.requests[1]) == [("user", "first"), ("assistant", "Answer 1."), ("user", "second")]


async def test_lost_lease_prevents_further_writes(
    twins: tuple[Harness, Harness], server: ModelServer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, two = twins
    monkeypatch.setattr(leases_module, "LEASE_RENEW_S", 600.0)
    waited_for = first.spec(server, "stalled", session_id=SESSION, persist=True, on_detach="cancel")
    stalled = asyncio.create_task(first.engine.run(waited_for))
    await server.until(lambda: server.open_streams == 1)
    expire = "UPDATE leases SET until = 0 WHERE name = ?"
    first.app.store.blocking.engine.write(lambda tx: tx.execute(expire, (f"session:{SESSION}",)))
    taking = asyncio.create_task(two.engine.run(two.spec(server, "taking over", session_id=SESSION, persist=True)))
    await server.until(lambda: server.open_streams == 2)
    gate.open.set()
    await asyncio.gather(stalled, taking, return_exceptions=True)
    assert taking.result()["completed"] is True
    rows = await two.rows(SESSION)
    contents = [row.content for row in rows if row.role == "assistant" and not row.synthetic]
    assert contents == [taking.result()["final_response"]]


# ---- getting and listing


async def test_list_runs_newest_first_with_filters(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="One."), Reply(status=403), Reply(text="Three.")]
    runs = [
        await harness.run(server, persist=True, session_id="a", kind="chat"),
        await harness.run(server, persist=True, session_id="b", owner="ada"),
        await harness.run(server, persist=True, session_id="a"),
    ]
    ids = [run.spec.run_id for run in runs]

    async def list_run_ids(**wanted: Any) -> list[str]:
        return [record.spec.run_id for record in await harness.engine.list(**wanted)]

    assert await list_run_ids() == ids[::-1]
    assert await list_run_ids(session_id="a") == [ids[2], ids[0]]
    assert await list_run_ids(owner="ada") == [ids[1]]
    assert await list_run_ids(status="failed") == [ids[1]]
    assert await list_run_ids(kind="chat") == [ids[0]]


# ---- ends


async def test_draining_engine_rejects_new_runs_and_finishes_running_ones(
    harness: Harness, server: ModelServer, gate: Gate
) -> None:
    running = await harness.begin(harness.spec(server))
    draining = asyncio.create_task(harness.engine.drain(DEADLINE_S))
    await idle()
    for refused in (harness.engine.run, harness.engine.submit, harness.engine.admit):
        with pytest.raises(Refused) as error:
            await refused(harness.spec(server))
        assert error.value.code == "gateway_draining"
    gate.open.set()
    assert (await running.end()).result["completed"] is True
    await draining


async def test_drain_timeout_cancels_remaining_runs(harness: Harness, server: ModelServer) -> None:
    server.repeat, server.script = True, [Reply(text=["Once ", "upon"], gap_s=600)]
    running = await harness.begin(harness.spec(server, persist=True, on_detach="cancel"))
    await running.wait_for("text.delta")
    await harness.engine.drain(0.05)
    run = await running.end()
    assert (run.final["type"], run.final["reason"]) == ("run.cancelled", "server_shutdown")
    assert (run.result["error_code"], run.result["final_response"]) == ("server_shutdown", "Once ")
    await nothing_left(server)


async def test_shutdown_under_load_ends_every_run(harness: Harness, server: ModelServer) -> None:
    async def forever(_: Any, __: Any) -> Json:
        await asyncio.Event().wait()
        return {}

    harness.offer(tool("stuck", forever))
    kinds = [
        Reply(text=["Once ", "upon"], gap_s=600),
        Reply(text="x", delay_s=600),
        Reply(tool_calls=[Call("stuck")]),
        Reply(status=429, headers={"Retry-After": "599"}),
        Reply(text="Done."),
    ]
    server.handler = lambda request: kinds[request.number % len(kinds)]
    specs = [harness.spec(server, persist=True, on_detach="cancel") for _ in range(40)]
    for spec in specs:
        await harness.engine.submit(spec)
    await server.until(lambda: len(server.requests) == 40)
    async with asyncio.timeout(DEADLINE_S):
        await harness.engine.drain(0.1)
    for spec in specs:
        record = await harness.engine.get(spec.run_id)
        assert record is not None
        assert record.state.status in ("completed", "cancelled", "failed")
    await nothing_left(server)


async def test_crash_in_agent_loop_fails_run_and_releases_session(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken_turn(*_: object) -> Json:
        raise ZeroDivisionError("a defect")

    spec = harness.spec(server, persist=True, session_id=SESSION)
    with monkeypatch.context() as broken:
        broken.setattr("hermes.agent.loop.run_turn", broken_turn)
        with pytest.raises(ZeroDivisionError):
            await harness.engine.run(spec)
    last = await wait_for_end(harness, spec.run_id)
    assert last["type"] == "run.failed"
    assert "a defect" not in last["error"]
    assert "a defect" in caplog.text
    server.script = [Reply(text="Fine.")]
    assert (await harness.run(server, persist=True, session_id=SESSION)).result["completed"] is True


async def test_close_twice_leaves_store_closed(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness(QUIET)
    server.script = [Reply(text="Done.")]
    await harness.run(server)
    await harness.close()
    await harness.close()
    with pytest.raises(StoreError, match="closed"):
        await harness.app.store.sessions.get_session("s")


async def test_run_survives_cancelled_waiter(harness: Harness, server: ModelServer, gate: Gate) -> None:
    spec: RunSpec = harness.spec(server, persist=True, on_detach="continue")
    waiter = asyncio.create_task(harness.engine.run(spec))
    await server.until(lambda: server.open_streams == 1)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    gate.open.set()
    assert (await wait_for_end(harness, spec.run_id))["type"] == "run.completed"
    assert await harness.engine.control(spec.run_id, Control("interrupt")) == "not_active"


# ---- leases and stores


async def test_long_turn_renews_lease(
    harness: Harness, server: ModelServer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "LEASE_RENEW_S", 0.02)
    running = await harness.begin(harness.spec(server, session_id=SESSION, persist=True))
    engine, name = harness.app.store.blocking.engine, f"session:{SESSION}"

    def renewed_until() -> float:
        expires_at: float = engine.read(lambda tx: tx.value("SELECT until FROM leases WHERE name = ?", (name,), 0.0))
        return expires_at

    first = await until(renewed_until)
    await until(renewed_until, lambda expires_at: expires_at > first)
    assert await harness.app.store.leases.acquire(f"session:{SESSION}", "somebody", 1.0) is None
    gate.open.set()
    assert (await running.end()).result["completed"] is True


def break_store(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> Any:
        raise StoreError("the disk is gone")

    store = harness.app.store
    for place, names in ((store.runs, ("create", "append", "get")), (store.sessions, ("get", "messages"))):
        for name in names:
            monkeypatch.setattr(place, name, broken, raising=False)
    monkeypatch.setattr(store.leases, "acquire", broken, raising=False)


async def test_unavailable_store_runs_unpersisted_turn_with_notice(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_store(harness, monkeypatch)
    server.script = [Reply(text="Done.")]
    run = await harness.run(server, persist=True, on_detach="cancel", session_id=SESSION)
    assert run.result["final_response"] == "Done."
    assert run.event("notice")["code"] == "store_unavailable"


async def test_unavailable_store_rejects_persisted_turn(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_store(harness, monkeypatch)
    for refused in (harness.engine.run, harness.engine.submit):
        with pytest.raises(Refused) as error:
            await refused(harness.spec(server, persist=True, on_detach="continue"))
        assert error.value.code == "session_db_unavailable"
    assert server.requests == []
