"""Controls: stopping a run wherever it waits, steering it while it works, and answering its questions."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from agent.conftest import MakeHarness
from agent.harness import (
    FINAL,
    PROTOCOLS,
    CompletedRun,
    Harness,
    Json,
    Running,
    hold_answers,
    nothing_left,
    reading,
    sent_messages,
    tool,
)
from hermes.core.spec import Control
from hermes.tools import clarify, memory
from hermes.tools.framework import round as tool_round
from support.model_server import Call, ModelServer, Protocol, Reply
from support.waiting import DEADLINE_S

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


def assert_cancelled(run: CompletedRun, text: str = "") -> None:
    assert run.final["type"] == "run.cancelled"
    assert run.final["reason"] == "stop"
    assert run.final["by"] == "user"
    result = run.result
    assert (result["interrupted"], result["completed"], result["failed"]) == (True, False, False)
    assert (result["final_response"], result["error_code"]) == (text, "interrupted")


async def forever(_: Any, __: Any) -> Json:
    await asyncio.Event().wait()
    return {}


# ---- stopping


@each_protocol
@pytest.mark.parametrize("control", ["interrupt", "cancel"])
async def test_interrupt_closes_model_socket_and_keeps_partial_text(
    harness: Harness, server: ModelServer, protocol: Protocol, control: str
) -> None:
    server.script = [Reply(text=["Once ", "upon"], gap_s=600)]
    running = await harness.begin(harness.spec(server, protocol=protocol))
    await running.wait_for("text.delta")
    assert await running.control(control) == "applied"
    await server.until(lambda: server.open_streams == 0)
    assert server.requests[-1].closed_early
    assert_cancelled(await running.end(), "Once ")
    await nothing_left(server)


async def test_interrupt_before_first_token_closes_model_socket(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Hello", delay_s=600)]
    running = await harness.begin(harness.spec(server))
    await server.until(lambda: server.open_streams == 1)
    await running.control("interrupt")
    await server.until(lambda: server.open_streams == 0)
    assert server.requests[-1].closed_early
    assert_cancelled(await running.end())
    await nothing_left(server)


async def test_interrupt_cuts_retry_wait_short(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(status=429, headers={"Retry-After": "599"})]
    running = await harness.begin(harness.spec(server))
    waiting = await running.wait_for("model.retrying")
    assert waiting["wait_seconds"] == pytest.approx(599.0)
    await running.control("interrupt")
    assert_cancelled(await running.end())  # long before that wait would be over
    assert len(server.requests) == 1
    await nothing_left(server)


async def test_interrupt_cancels_async_tool(harness: Harness, server: ModelServer) -> None:
    cancelled = asyncio.Event()

    async def look(_: Any, __: Any) -> Json:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return {}

    harness.offer(tool("look", look))
    server.script = [Reply(text="Wait.", tool_calls=[Call("look")])]
    running = await harness.begin(harness.spec(server))
    await running.wait_for("tool.started")
    await running.control("interrupt")
    run = await running.end()
    assert cancelled.is_set()
    assert run.final["type"] == "run.cancelled"
    assert run.event("tool.finished")["status"] == "interrupted"
    await nothing_left(server)


async def test_interrupt_is_signalled_to_blocking_tool(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_round.limits, "STUBBORN_S_MAX", DEADLINE_S)
    reached = threading.Event()

    def look(ctx: Any, _: Any) -> Json:
        if ctx.cancelled.wait(DEADLINE_S):
            reached.set()
        return {}

    harness.offer(tool("look", look))
    server.script = [Reply(tool_calls=[Call("look")])]
    running = await harness.begin(harness.spec(server))
    await running.wait_for("tool.started")
    await running.control("interrupt")
    run = await running.end()
    assert reached.is_set()
    assert run.event("tool.finished")["status"] == "interrupted"
    await nothing_left(server)


async def test_interrupt_does_not_wait_for_stubborn_tool(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_round.limits, "STUBBORN_S_MAX", 0.1)
    release = threading.Event()

    def look(_: Any, __: Any) -> Json:
        release.wait(600)
        return {}

    harness.offer(tool("look", look))
    server.script = [Reply(tool_calls=[Call("look")])]
    running = await harness.begin(harness.spec(server))
    await running.wait_for("tool.started")
    await running.control("interrupt")
    try:
        run = await running.end()  # the tool still works
    finally:
        release.set()
    assert run.final["type"] == "run.cancelled"
    await nothing_left(server)


async def test_interrupt_ends_all_parallel_tool_calls(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look", forever, effect="read", scope=lambda _: frozenset()))
    server.script = [Reply(tool_calls=[Call("look", {"a": str(n)}) for n in range(12)])]
    running = await harness.begin(harness.spec(server, persist=True))
    await running.wait_for("tool.started")
    await running.control("interrupt")
    run = await running.end()
    rows = await harness.rows(run.spec.session_id)
    assert [row.role for row in rows].count("tool") == 12
    assert run.final["type"] == "run.cancelled"
    await nothing_left(server)


async def test_interrupt_cancels_queued_run(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="One.", delay_s=600)]
    running = await harness.begin(harness.spec(server, persist=True, session_id="s"))
    await server.until(lambda: server.open_streams == 1)
    queued = harness.spec(server, persist=True, session_id="s")
    await harness.engine.submit(queued)
    assert await harness.engine.control(queued.run_id, Control("interrupt")) == "applied"
    events = [event async for event in harness.engine.subscribe(queued.run_id)]
    assert [event.type for event in events] == ["run.queued", "control.received", "run.cancelled"]
    await running.control("interrupt")
    await running.end()
    assert len(server.requests) == 1
    await nothing_left(server)


async def test_interrupt_from_another_thread(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text=["Once ", "upon"], gap_s=600)]
    running = await harness.begin(harness.spec(server))
    await running.wait_for("text.delta")
    loop = asyncio.get_running_loop()

    def stop() -> None:
        asyncio.run_coroutine_threadsafe(running.control("interrupt"), loop).result(DEADLINE_S)

    thread = threading.Thread(target=stop)
    thread.start()
    assert_cancelled(await running.end(), "Once ")
    thread.join()


async def test_interrupt_is_recorded_before_it_is_applied(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text=["Once ", "upon"], gap_s=600)]
    running = await harness.begin(harness.spec(server))
    await running.wait_for("text.delta")
    control = Control("interrupt", {"message": "no, the other"}, by="someone", surface="test", control_id="c1")
    assert await harness.engine.control(running.run_id, control) == "applied"
    run = await running.end()
    received = run.event("control.received")
    assert (received["control_id"], received["control"], received["by"], received["surface"]) == (
        *("c1", "interrupt"),
        *("someone", "test"),
    )
    assert run.final["by"] == "someone"


async def test_duplicate_control_id_is_ignored(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text=["Once ", "upon"], gap_s=600)]
    running = await harness.begin(harness.spec(server))
    await running.wait_for("text.delta")
    for _ in range(2):
        assert await running.control("steer", control_id="c1", text="faster") == "applied"
    await running.control("interrupt")
    run = await running.end()
    assert [event["control_id"] for event in run.events_of("control.received")].count("c1") == 1


async def test_control_of_ended_run_is_not_active_and_of_missing_run_unknown(
    harness: Harness, server: ModelServer
) -> None:
    server.script = [Reply(text="Done.")]
    run = await harness.run(server, persist=True)
    assert await harness.engine.control(run.spec.run_id, Control("interrupt")) == "not_active"
    assert await harness.engine.control("run_" + "0" * 32, Control("interrupt")) == "unknown"


async def test_interrupt_at_any_moment_leaves_exactly_one_final_event(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look", lambda _, args: {"saw": args}))
    script = [Reply(text=["a ", "b "], tool_calls=[Call("look")], gap_s=0.005), Reply(text=["c ", "d"], gap_s=0.005)]
    server.script = list(script)
    whole = await harness.run(server)
    for count in range(1, len(whole.events) - 1):
        server.script = list(script)
        running = await harness.begin(harness.spec(server))
        # Pieces may be joined to fewer events than in the first run.
        await running.until(lambda events, n=count: len(events) >= n or (events and events[-1]["type"] in FINAL))
        await running.control("interrupt")
        run = await running.end()
        assert run.final["type"] in ("run.cancelled", "run.completed")
        roles = [m["role"] for m in run.result["messages"]]
        assert roles[0] == "user"
        assert roles[-1] == "assistant"
    await nothing_left(server)


# ---- the waiter leaves


async def test_disconnect_of_last_owner_cancels_run(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text=["Once ", "upon"], gap_s=600)]
    running = await harness.begin(harness.spec(server, on_detach="cancel"))
    first, two = harness.engine.attach(running.run_id), harness.engine.attach(running.run_id)
    await running.wait_for("text.delta")
    await harness.engine.detach(running.run_id, first)
    assert running.events[-1]["type"] == "text.delta"
    await harness.engine.detach(running.run_id, two)
    run = await running.end()
    assert (run.final["type"], run.final["reason"]) == ("run.cancelled", "client_disconnected")
    await nothing_left(server)


async def test_disconnect_does_not_cancel_run_with_on_detach_continue(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = hold_answers(monkeypatch)
    server.script = [Reply(text=["Once ", "upon"], gap_s=1)]
    running = await harness.begin(harness.spec(server, on_detach="continue"))
    owner = harness.engine.attach(running.run_id)
    await running.wait_for("text.delta")
    await harness.engine.detach(running.run_id, owner)
    go_on.set()
    assert (await running.end()).result["final_response"] == "Once upon"


# ---- steering


async def steered(harness: Harness, server: ModelServer, *texts: str) -> CompletedRun:
    """A turn of one tool round, steered while its tool runs."""
    go_on = asyncio.Event()

    async def look(_: Any, __: Any) -> Json:
        await go_on.wait()
        return {"saw": "a fox"}

    harness.offer(tool("look", look))
    server.script = [Reply(tool_calls=[Call("look")]), Reply(text="Done.")]
    running = await harness.begin(harness.spec(server, persist=True))
    await running.wait_for("tool.started")
    for at, text in enumerate(texts):
        assert await running.control("steer", control_id=f"st{at}", text=text) == "applied"
    go_on.set()
    return await running.end()


async def test_steer_is_appended_to_next_tool_result(harness: Harness, server: ModelServer) -> None:
    run = await steered(harness, server, "Only red ones.")
    result_text = sent_messages(server.requests[1], "tool")[-1][1]
    assert result_text.startswith('{"saw": "a fox"}')
    assert "Only red ones." in result_text
    assert result_text != '{"saw": "a fox"}Only red ones.'
    applied = run.event("steer.applied")
    assert applied["steer_ids"] == ["st0"]
    assert applied["where"] == run.event("tool.started")["call_id"]
    assert not run.result["pending_steer"]
    assert run.result["final_response"] == "Done."


async def test_steered_tool_result_is_replayed_in_next_turn(harness: Harness, server: ModelServer) -> None:
    run = await steered(harness, server, "Only red ones.")
    server.script = [Reply(text="Again.")]
    await harness.run(server, "and now?", persist=True, session_id=run.spec.session_id)
    assert sent_messages(server.requests[2], "tool") == sent_messages(server.requests[1], "tool")


async def test_several_steers_are_all_applied(harness: Harness, server: ModelServer) -> None:
    run = await steered(harness, server, "Only red ones.", "And quickly.")
    result_text = sent_messages(server.requests[1], "tool")[-1][1]
    assert result_text.index("Only red ones.") < result_text.index("And quickly.")
    assert [i for event in run.events_of("steer.applied") for i in event["steer_ids"]] == ["st0", "st1"]


async def steered_when_one_of_two_has_finished(harness: Harness, server: ModelServer, slow: str) -> CompletedRun:
    go_on = asyncio.Event()

    async def look(_: Any, args: Json) -> Json:
        if args["a"] == slow:
            await go_on.wait()
        return {"saw": args["a"]}

    harness.offer(tool("look", look, effect="read", scope=lambda _: frozenset()))
    server.script = [Reply(tool_calls=[Call("look", {"a": "one"}), Call("look", {"a": "two"})]), Reply(text="Done.")]
    running = await harness.begin(harness.spec(server))
    await running.wait_for("tool.finished")
    await running.control("steer", text="Only red ones.")
    go_on.set()
    return await running.end()


async def test_steer_is_applied_to_last_result_of_round(harness: Harness, server: ModelServer) -> None:
    run = await steered_when_one_of_two_has_finished(harness, server, slow="two")
    results = [m for m in server.requests[1].body["messages"] if m["role"] == "tool"]
    assert ["Only red ones." in m["content"] for m in results] == [False, True]
    assert run.event("steer.applied")["where"] == results[1]["tool_call_id"]


async def test_late_steer_after_last_result_is_applied_once(harness: Harness, server: ModelServer) -> None:
    run = await steered_when_one_of_two_has_finished(harness, server, slow="one")
    mentions = json.dumps(server.requests[1].body).count("Only red ones.")
    assert mentions + str(run.result["pending_steer"]).count("Only red ones.") == 1
    assert len(run.events_of("steer.applied")) == mentions


async def test_steer_during_model_output_waits_for_next_round(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = hold_answers(monkeypatch)
    harness.offer(tool("look"))
    server.script = [Reply(text=["Well, ", "wait."], tool_calls=[Call("look")], gap_s=1), Reply(text="Done.")]
    running = await harness.begin(harness.spec(server))
    await running.wait_for("text.delta")
    await running.control("steer", text="Only red ones.")
    go_on.set()
    await running.end()
    assert "Only red ones." in sent_messages(server.requests[1], "tool")[-1][1]


async def test_unapplied_steer_is_returned_as_pending_steer(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = hold_answers(monkeypatch)
    server.script = [Reply(text=["Well, ", "fine."], gap_s=1)]
    running = await harness.begin(harness.spec(server))
    await running.wait_for("text.delta")
    await running.control("steer", text="Only red ones.")
    go_on.set()
    run = await running.end()
    assert "Only red ones." in str(run.result["pending_steer"])
    assert run.final["pending_steer"] == run.result["pending_steer"]
    assert run.events_of("steer.applied") == []
    assert "Only red ones." not in json.dumps(run.result["messages"])
    assert run.result["final_response"] == "Well, fine."


async def test_steer_is_not_lost_on_interrupt(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text=["Well, ", "fine."], gap_s=600)]
    running = await harness.begin(harness.spec(server))
    await running.wait_for("text.delta")
    await running.control("steer", text="Only red ones.")
    await running.control("interrupt")
    run = await running.end()
    assert "Only red ones." in str(run.result["pending_steer"])


# ---- questions


async def start_question(harness: Harness, server: ModelServer, **arguments: Any) -> Running:
    harness.offer(clarify.TOOL)
    server.script = [Reply(tool_calls=[Call("clarify", {"question": "Which?", **arguments})]), Reply(text="Done.")]
    return await harness.begin(harness.spec(server, answerable=True))


async def test_clarify_question_waits_without_thread_or_socket(harness: Harness, server: ModelServer) -> None:
    running = await start_question(harness, server, choices=["this", "that"])
    event = await running.wait_for("clarify.requested")
    assert (event["question"], event["choices"]) == ("Which?", ["this", "that"])
    assert event["expires_at"] > time.time() + 3000
    assert harness.app.services.threads._threads == 0
    await server.until(lambda: server.open_streams == 0)
    assert await running.control("answer", id=event["request_id"], answer="that") == "applied"
    run = await running.end()
    assert run.tool_results() == [{"answer": "that", "answered": True}]
    resolved = run.event("clarify.resolved")
    assert (resolved["request_id"], resolved["by"], resolved["answered"]) == (event["request_id"], "user", True)


async def test_first_clarify_answer_wins(harness: Harness, server: ModelServer) -> None:
    running = await start_question(harness, server)
    event = await running.wait_for("clarify.requested")
    answers = [running.control("answer", id=event["request_id"], answer=text) for text in ("one", "two")]
    assert await asyncio.gather(*answers) == ["applied", "already_resolved"]
    run = await running.end()
    assert run.tool_results() == [{"answer": "one", "answered": True}]


async def test_clarify_question_times_out(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness({"agent": {"clarify_timeout": 0.05}})
    run = await (await start_question(harness, server)).end()
    assert run.tool_results()[0]["answered"] is False
    assert run.event("clarify.resolved")["answered"] is False
    assert run.result["final_response"] == "Done."


async def test_interrupt_resolves_clarify_question(harness: Harness, server: ModelServer) -> None:
    running = await start_question(harness, server)
    await running.wait_for("clarify.requested")
    await running.control("interrupt")
    run = await running.end()
    assert (run.event("clarify.resolved")["by"], run.event("clarify.resolved")["answered"]) == ("interrupt", False)
    assert run.final["type"] == "run.cancelled"
    await nothing_left(server)


async def remembering(make_harness: MakeHarness, server: ModelServer, **approvals: Any) -> tuple[Harness, Running]:
    """A run whose memory write has to be approved."""
    harness = make_harness({"memory": {"write_approval": True}, "approvals": approvals})
    harness.offer(memory.TOOL)
    call = Call("memory", {"target": "memory", "action": "add", "content": "Likes tea."})
    server.script = [Reply(tool_calls=[call]), Reply(text="Done.")]
    return harness, await harness.begin(harness.spec(server, answerable=True))


@pytest.mark.parametrize(("choice", "written"), [("once", True), ("deny", False)])
async def test_approval_decides_whether_tool_runs(
    make_harness: MakeHarness, server: ModelServer, choice: str, written: bool
) -> None:
    harness, running = await remembering(make_harness, server)
    event = await running.wait_for("approval.requested")
    assert {"approval_id", "call_id", "kind", "subject", "reason", "rules", "choices", "expires_at"} <= event.keys()
    assert event["kind"] == "memory"
    assert "Likes tea." in event["subject"]
    assert await running.control("approve", id=event["approval_id"], choice=choice) == "applied"
    run = await running.end()
    resolved = run.event("approval.resolved")
    assert (resolved["approval_id"], resolved["choice"], resolved["by"]) == (event["approval_id"], choice, "user")
    assert (harness.home.memories / "MEMORY.md").exists() is written
    assert run.result["final_response"] == "Done."


async def test_approval_timeout_is_denial(make_harness: MakeHarness, server: ModelServer) -> None:
    harness, running = await remembering(make_harness, server, timeout=0.05)
    run = await running.end()
    assert (run.event("approval.resolved")["choice"], run.event("approval.resolved")["by"]) == ("deny", "timeout")
    assert not (harness.home.memories / "MEMORY.md").exists()


async def test_interrupt_denies_pending_approval(make_harness: MakeHarness, server: ModelServer) -> None:
    harness, running = await remembering(make_harness, server)
    await running.wait_for("approval.requested")
    await running.control("interrupt")
    run = await running.end()
    assert (run.event("approval.resolved")["choice"], run.event("approval.resolved")["by"]) == ("deny", "interrupt")
    assert not (harness.home.memories / "MEMORY.md").exists()
    await nothing_left(server)


@each_protocol
@pytest.mark.parametrize("persist", [True, False], ids=["persisted", "unpersisted"])
async def test_interrupted_tool_round_has_result_for_every_call(
    harness: Harness, server: ModelServer, protocol: Protocol, persist: bool
) -> None:
    harness.offer(tool("quick", **reading()), tool("slow", forever, **reading()))
    calls = [Call("slow", id="c1"), Call("quick", {"a": "tea"}, id="c2"), Call("slow", {"a": "x"}, id="c3")]
    server.script = [Reply(tool_calls=calls), Reply(text="Fine.")]
    running = await harness.begin(harness.spec(server, protocol=protocol, persist=persist))
    await running.wait_for("tool.finished")
    await running.control("interrupt")
    run = await running.end()
    messages = run.result["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "tool", "assistant"]
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == ["c1", "c2", "c3"]
    assert "tea" in messages[3]["content"]
    again = await harness.run(server, "next", protocol, history=messages)
    assert again.result["completed"] is True
    results = "".join(text for role, text in sent_messages(server.requests[-1]) if role == "tool")
    assert results.count("interrupted") == 2


async def test_steer_applied_event_names_message_with_steer(harness: Harness, server: ModelServer) -> None:
    go = asyncio.Event()

    async def slow(_: Any, __: Json) -> Json:
        await go.wait()
        return {"slow": True}

    harness.offer(tool("slow", slow, **reading()), tool("fast", **reading()))
    server.script = [Reply(tool_calls=[Call("slow", id="c1"), Call("fast", id="c2")]), Reply(text="Done.")]
    running = await harness.begin(harness.spec(server))
    await running.wait_for("tool.finished")
    await running.control("steer", text="only red ones")
    go.set()
    run = await running.end()
    holding = [m["tool_call_id"] for m in run.result["messages"] if "only red ones" in str(m["content"])]
    assert [run.event("steer.applied")["where"]] == holding
