"""The engine when things come at the wrong moment: shutdown, deadlines, defects, and stores of leases that fail."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from agent.harness import FINAL, Harness, Json, nothing_left, sent_messages, tool
from hermes.agent.step import ModelStep
from hermes.core.spec import Control
from hermes.runs import leases as leases_module
from hermes.runs.engine import LiveRun, Refused
from hermes.store.base import OpenedSession, StoreBusy, StoreError, StoreUnreachable
from hermes.store.stores import AsyncLeases, AsyncRuns, AsyncStore, Store
from hermes.tools.framework.round import ToolRound
from support.model_server import Call, ModelServer, Reply, Request
from support.waiting import DEADLINE_S, idle, until

SESSION = "the-session"


class Gate:
    """Answers that wait until the test lets them go."""

    def __init__(self, server: ModelServer) -> None:
        self.open = asyncio.Event()
        server.handler = self._answer

    async def _answer(self, request: Request) -> Reply:
        await self.open.wait()
        return Reply(text=f"Answer {request.number}.")


@pytest.fixture
async def gate(server: ModelServer) -> Gate:
    return Gate(server)


async def read(harness: Harness, run_id: str) -> list[Json]:
    """All events of a run, waited for."""
    async with asyncio.timeout(DEADLINE_S):
        return [event.as_dict() async for event in harness.engine.subscribe(run_id)]


async def outcome(live: LiveRun) -> Any:
    """The result of a run, or the exception it ended with."""
    assert live.task is not None
    (result,) = await asyncio.gather(live.task, return_exceptions=True)
    return result


async def shape(harness: Harness, session_id: str = SESSION) -> list[tuple[str, str]]:
    """The session's rows: the role of each with the calls it makes or answers."""
    rows = await harness.rows(session_id)
    return [(row.role, row.tool_call_id or ",".join(call["id"] for call in row.tool_calls or ())) for row in rows]


async def queued(harness: Harness) -> None:
    """Wait until a turn of the session runs, and another one waits for it."""
    await until(lambda: harness.engine.admissions.leases.waiting(SESSION) == 2)


# ---- shutdown


def hurry(patch: pytest.MonkeyPatch, *names: str, factor: float = 0.1) -> None:
    """Make fixed waits shorter, all in proportion, wherever they are known."""
    for module in [module for name, module in sys.modules.items() if name.startswith("hermes.")]:
        for name in names:
            if isinstance(seconds := getattr(module, name, None), float):
                patch.setattr(module, name, seconds * factor)


@pytest.fixture
def stubborn(harness: Harness) -> Iterator[None]:
    """A blocking tool that hears nothing until the test is over."""
    over = threading.Event()

    def run(_: Any, __: Json) -> Json:
        over.wait(600)
        return {}

    harness.offer(tool("stubborn", run))
    yield
    over.set()


@pytest.mark.usefixtures("stubborn")
async def test_shutdown_records_end_despite_stubborn_tool(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, "STUBBORN_S_MAX")
    server.script = [Reply(tool_calls=[Call("stubborn", id="c1")])]
    running = await harness.begin(harness.spec(server, persist=True, session_id=SESSION, on_detach="cancel"))
    await running.wait_for("tool.started")
    async with asyncio.timeout(DEADLINE_S):
        await harness.engine.drain(0)
    run = await running.end()
    assert (run.final["type"], run.final["reason"]) == ("run.cancelled", "server_shutdown")
    assert await shape(harness) == [("user", ""), ("assistant", "c1"), ("tool", "c1"), ("assistant", "")]


async def test_shutdown_rejects_turns_waiting_for_session(harness: Harness, server: ModelServer, gate: Gate) -> None:
    first = await harness.begin(harness.spec(server, persist=True, session_id=SESSION, on_detach="cancel"))
    await first.wait_for("model.started")
    waiting = asyncio.create_task(harness.engine.run(harness.spec(server, "two", persist=True, session_id=SESSION)))
    await queued(harness)
    async with asyncio.timeout(DEADLINE_S):
        await harness.engine.drain(0)
        with pytest.raises(Refused) as refused:
            await waiting
    assert refused.value.code == "gateway_draining"
    await first.end()
    await nothing_left(server)


async def test_shutdown_leaves_queued_run_for_next_process(harness: Harness, server: ModelServer, gate: Gate) -> None:
    first = await harness.begin(harness.spec(server, persist=True, session_id=SESSION, on_detach="cancel"))
    await first.wait_for("model.started")
    run_id = await harness.engine.submit(harness.spec(server, "two", persist=True, session_id=SESSION))
    await queued(harness)
    await harness.engine.drain(0)
    assert [event["type"] for event in await read(harness, run_id)] == ["run.queued", "run.interrupted"]
    record = await harness.engine.get(run_id)
    assert record is not None
    assert record.state.status == "interrupted"
    await first.end()


async def test_shutdown_cancels_queued_run_that_is_not_resumable(
    harness: Harness, server: ModelServer, gate: Gate
) -> None:
    first = await harness.begin(harness.spec(server, persist=True, session_id=SESSION, on_detach="cancel"))
    await first.wait_for("model.started")
    late = harness.spec(server, "two", persist=True, session_id=SESSION, on_detach="cancel")
    await harness.engine.submit(late)
    await queued(harness)
    await harness.engine.drain(0)
    last = (await read(harness, late.run_id))[-1]
    assert (last["type"], last["reason"]) == ("run.cancelled", "server_shutdown")
    await first.end()


# ---- queued runs


async def test_queued_run_deadline_counts_from_submission(harness: Harness, server: ModelServer, gate: Gate) -> None:
    first = await harness.begin(harness.spec(server, persist=True, session_id=SESSION))
    await first.wait_for("model.started")
    late = harness.spec(server, "two", persist=True, session_id=SESSION, deadline_seconds=0.05)
    await harness.engine.submit(late)
    last = (await read(harness, late.run_id))[-1]
    assert (last["type"], last["failure"]) == ("run.failed", "deadline")
    gate.open.set()
    await first.end()
    assert len(server.requests) == 1


async def test_submission_over_runs_max_is_rejected_without_trace(
    harness: Harness, server: ModelServer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.engine, "limits", replace(harness.engine.limits, runs_max=1))
    first = await harness.begin(harness.spec(server, persist=True))
    await first.wait_for("model.started")
    more = harness.spec(server, persist=True)
    with pytest.raises(Refused) as refused:
        await harness.engine.submit(more)
    assert refused.value.code == "rate_limit_exceeded"
    assert await harness.engine.get(more.run_id) is None
    gate.open.set()
    await first.end()


# ---- controls


async def test_concurrent_duplicate_control_is_applied_once(
    harness: Harness, server: ModelServer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = AsyncRuns.append

    async def slowly(runs: AsyncRuns, *args: Any, **fields: Any) -> None:
        await idle()
        await original(runs, *args, **fields)

    monkeypatch.setattr(AsyncRuns, "append", slowly)
    running = await harness.begin(harness.spec(server, persist=True))
    await running.wait_for("model.started")
    steer = Control("steer", {"text": "and tea"}, control_id="ctl_1")
    results = await asyncio.gather(*(harness.engine.control(running.run_id, steer) for _ in range(3)))
    gate.open.set()
    run = await running.end()
    assert results == ["applied"] * 3
    assert run.event("control.received")["control_id"] == "ctl_1"
    assert run.result["pending_steer"] == "and tea"


# ---- faults while a turn is opened


MALFORMED: dict[str, Json] = {
    "a file without data": {"message": [{"type": "text", "text": "look"}, {"type": "file", "file": {"name": "x"}}]},
    "a file that is no object": {"message": [{"type": "text", "text": "look"}, {"type": "file", "file": "x"}]},
    "a client's tool without a name": {"client_tools": ({"type": "function", "description": "nameless"},)},
}


@pytest.mark.parametrize("fault", MALFORMED)
async def test_malformed_request_fails_run_and_keeps_user_message(
    harness: Harness, server: ModelServer, fault: str
) -> None:
    run = await harness.run(server, persist=True, session_id=SESSION, **{"message": "look", **MALFORMED[fault]})
    assert run.final["type"] == "run.failed"
    assert run.final["error"]
    assert (run.result["failed"], run.result["final_response"]) == (True, "")
    assert server.requests == []
    rows = await harness.rows(SESSION)
    assert [(row.role, row.synthetic) for row in rows] == [("user", False), ("assistant", True)]
    assert "look" in str(rows[0].content)


async def test_session_continues_after_malformed_request(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    await harness.run(server, [{"type": "file", "file": {"name": "x"}}], persist=True, session_id=SESSION)
    run = await harness.run(server, "again", persist=True, session_id=SESSION)
    assert run.result["final_response"] == "Done."
    assert [role for role, _ in sent_messages(server.requests[-1])] == ["user", "assistant", "user"]


async def test_unreadable_memory_does_not_prevent_answer(harness: Harness, server: ModelServer) -> None:
    (harness.home.memories / "MEMORY.md").mkdir(parents=True)
    server.script = [Reply(text="Done.")]
    assert (await harness.run(server)).result["final_response"] == "Done."


async def test_client_tool_in_chat_completions_envelope(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(tool_calls=[Call("ring", id="c1")])]
    run = await harness.run(server, client_tools=({"type": "function", "function": {"name": "ring"}},))
    assert [call["id"] for call in run.result["pending_calls"]] == ["c1"]


# ---- defects


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        (ModelStep, [("user", ""), ("assistant", "")]),
        (ToolRound, [("user", ""), ("assistant", "c1,c2"), ("tool", "c1"), ("tool", "c2"), ("assistant", "")]),
    ],
    ids=["asking the model", "running the tools"],
)
async def test_crash_in_agent_loop_leaves_complete_transcript_and_one_end(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, place: Any, wanted: list[tuple[str, str]]
) -> None:
    async def fall_over(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a defect")

    harness.offer(tool("look"))
    server.script = [Reply(text="Wait.", tool_calls=[Call("look", id="c1"), Call("look", id="c2")])]
    spec = harness.spec(server, persist=True, session_id=SESSION)
    with monkeypatch.context() as broken:
        broken.setattr(place, "run", fall_over)
        await outcome(await harness.engine.start(spec))
    events = await read(harness, spec.run_id)
    assert [event["type"] for event in events if event["type"] in FINAL] == ["run.failed"]
    assert "a defect" not in events[-1]["error"]
    assert await shape(harness) == wanted
    server.script = [Reply(text="Fine.")]
    run = await harness.run(server, "again", persist=True, session_id=SESSION)
    assert run.result["final_response"] == "Fine."
    assert [role for role, _ in sent_messages(server.requests[-1])] == [*(role for role, _ in wanted), "user"]


# ---- stores of leases that fail


async def free(harness: Harness, session_id: str) -> None:
    """Wait until the session's lease is released."""
    await until(lambda: harness.app.store.leases.holder(f"session:{session_id}"), lambda holder: holder is None)


async def test_cancellation_during_lease_acquire_releases_session(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquired, go_on, original = asyncio.Event(), asyncio.Event(), AsyncStore.begin

    async def slowly(store: AsyncStore, *args: Any, **fields: Any) -> OpenedSession | None:
        result = await original(store, *args, **fields)
        acquired.set()
        await go_on.wait()
        return result

    with monkeypatch.context() as slow:
        slow.setattr(AsyncStore, "begin", lambda *args, **fields: asyncio.ensure_future(slowly(*args, **fields)))
        admitting = asyncio.create_task(harness.engine.admit(harness.spec(server, persist=True, session_id=SESSION)))
        await acquired.wait()
        admitting.cancel()
        await idle()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await admitting
        await free(harness, SESSION)
    server.script = [Reply(text="Done.")]
    assert (await harness.run(server, persist=True, session_id=SESSION)).result["completed"] is True


@pytest.mark.parametrize("error", [StoreError, OSError, KeyError], ids=lambda error: error.__name__)
async def test_failed_lease_renewal_is_retried(
    harness: Harness, server: ModelServer, gate: Gate, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    monkeypatch.setattr(leases_module, "LEASE_RENEW_S", 0.01)
    calls, original = 0, AsyncLeases.renew_all
    renewed = asyncio.Event()

    async def renew(leases: AsyncLeases, *args: Any) -> set[str]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise error("a hiccup")
        renewed.set()
        return await original(leases, *args)

    monkeypatch.setattr(AsyncLeases, "renew_all", renew)
    running = await harness.begin(harness.spec(server, persist=True))
    async with asyncio.timeout(DEADLINE_S):
        await renewed.wait()
    gate.open.set()
    assert (await running.end()).result["completed"] is True


async def test_leases_of_all_turns_are_renewed_in_one_transaction(
    harness: Harness, server: ModelServer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "LEASE_RENEW_S", 0.01)
    calls, original = list[set[str]](), AsyncLeases.renew_all
    enough = asyncio.Event()

    async def renew(leases: AsyncLeases, tokens: dict[str, int], ttl: float) -> set[str]:
        calls.append({*tokens})
        if len(tokens) == 3:
            enough.set()
        return await original(leases, tokens, ttl)

    monkeypatch.setattr(AsyncLeases, "renew_all", renew)
    running = [await harness.begin(harness.spec(server, persist=True, session_id=f"s{at}")) for at in range(3)]
    async with asyncio.timeout(DEADLINE_S):
        await enough.wait()
    assert {f"session:s{at}" for at in range(3)} in calls
    gate.open.set()
    assert [(await run.end()).result["completed"] for run in running] == [True] * 3


async def test_session_lease_is_released_after_final_event(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    running = await harness.begin(harness.spec(server, persist=True, session_id=SESSION))
    await running.wait_for("run.completed")
    assert await harness.app.store.leases.holder(f"session:{SESSION}") is None
    await running.end()


async def test_engine_keeps_no_state_of_ended_sessions(harness: Harness, server: ModelServer) -> None:
    server.repeat, server.script = True, [Reply(text="Done.", continues=False)]
    leases = harness.app.store.leases

    def remembered() -> int:
        return sum(len(value) for value in vars(leases).values() if isinstance(value, dict | list | set))

    await harness.run(server)
    before = remembered()
    for _ in range(10):
        await harness.run(server)
    assert remembered() <= before


async def test_lease_tokens_increase_between_holders() -> None:
    leases = AsyncStore(Store(None)).leases
    tokens: list[int] = []
    for _ in range(4):
        token = await leases.acquire("session:s", "me", 30.0)
        assert token is not None
        tokens.append(token)
        await leases.release("session:s", token)
        assert not await leases.renew("session:s", token, 30.0)
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("error", [StoreUnreachable, StoreBusy], ids=lambda error: error.__name__)
async def test_submitted_run_waits_for_store_that_is_away(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, error: type[StoreError]
) -> None:
    hurry(monkeypatch, "STORE_POLL_S")
    server.script = [Reply(text="Done.")]
    failures, original = [error("away")] * 3, AsyncStore.begin

    async def begin(store: AsyncStore, *args: Any, **fields: Any) -> OpenedSession | None:
        if failures:
            raise failures.pop()
        return await original(store, *args, **fields)

    monkeypatch.setattr(AsyncStore, "begin", lambda *args, **fields: asyncio.ensure_future(begin(*args, **fields)))
    run_id = await harness.engine.submit(harness.spec(server, persist=True, session_id=SESSION, on_detach="continue"))
    assert (await read(harness, run_id))[-1]["type"] == "run.completed" and not failures
