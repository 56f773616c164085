"""The tool `delegate_task`: children are runs of their own that can be seen, stopped, answered and found again."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest

from agent.conftest import MakeHarness
from agent.harness import CompletedRun, Harness, Json, nothing_left, reading, tool
from hermes.core.spec import Control
from hermes.store.base import Row
from hermes.tools import delegation
from hermes.tools.framework.questions import ApprovalRequest
from hermes.tools.framework.registry import ToolContext, ToolDef
from runs.test_resume import SESSION, OrphanedRun
from support.gateway import SURELY_S
from support.model_server import Call, ModelServer, Reply, Request


def script_model(server: ModelServer, *calls: Call, **children: list[Reply]) -> None:
    """The parent makes these calls and sums up; a child whose goal begins with a name answers from that list."""
    parent = [Reply(tool_calls=list(calls)), Reply(text="All done.")]

    def handle(request: Request) -> Reply:
        first = next(turn.text for turn in request.turns if turn.role == "user")
        script = next((replies for name, replies in children.items() if first.startswith(name)), parent)
        return script.pop(0)

    server.handler = handle


def delegate(*goals: str, **more: Any) -> Call:
    return Call("delegate_task", {"tasks": [{"goal": goal} for goal in goals], **more}, id="call_d")


def results(run: CompletedRun) -> list[Json]:
    [answer] = run.tool_results()
    results: list[Json] = answer["results"]
    return results


def child_id(run_id: str, number: int = 0, step: int = 1) -> str:
    return f"run_{hashlib.sha256(f'{run_id}{chr(0)}{step}{chr(0)}call_d{chr(0)}{number}'.encode()).hexdigest()[:32]}"


def offer(harness: Harness, *tools: ToolDef) -> None:
    harness.offer(delegation.TOOL, *tools)


@pytest.mark.parametrize("persist", [True, False])
async def test_delegated_children_are_own_runs(harness: Harness, server: ModelServer, persist: bool) -> None:
    offer(harness, tool("look", **reading()), tool("clarify", toolset="clarify"), tool("cronjob", toolset="cronjob"))
    usage = {"input": 10, "output": 5}
    find = [Reply(tool_calls=[Call("look")], usage=usage), Reply(text="It is blue.", usage=usage)]
    script_model(server, delegate("find out", "count"), find=find, count=[Reply(text="Three.", usage=usage)])
    run = await harness.run(server, persist=persist, answerable=True, owner="me", session_key="k")
    first, second = results(run)
    assert (first["status"], first["summary"]) == ("completed", "It is blue.")
    assert (second["status"], second["summary"]) == ("completed", "Three.")
    assert first["usage"]["total_tokens"] == 30 and second["usage"]["total_tokens"] == 15
    assert {first["child_run_id"], second["child_run_id"]} == {
        child_id(run.spec.run_id, 0),
        child_id(run.spec.run_id, 1),
    }
    events, ended = run.events_of("subagent.started"), run.events_of("subagent.finished")
    assert [(event["call_id"], event["goal"]) for event in events] == [("call_d", "find out"), ("call_d", "count")]
    assert {event["child_run_id"]: (event["status"], event["chars"]) for event in ended} == {
        first["child_run_id"]: ("completed", 11),
        second["child_run_id"]: ("completed", 6),
    }
    assert run.types.index("tool.started") < run.types.index("subagent.started")
    assert run.types.index("subagent.finished") < run.types.index("tool.finished")
    own = sum(event["total_tokens"] for event in run.events_of("usage"))
    assert run.result["total_tokens"] == run.final["usage"]["total_tokens"] == own + 45
    assert run.result["api_calls"] == 2 + 3
    offered = [[t["function"]["name"] for t in r.body.get("tools", [])] for r in server.requests]
    assert offered[0] == ["clarify", "cronjob", "delegate_task", "look"] and offered[1:3] == [["look"], ["look"]]
    if not persist:
        return
    record = await harness.engine.get(first["child_run_id"])
    assert record is not None
    spec = record.spec
    assert (spec.kind, spec.source, spec.owner, spec.session_key) == ("subagent", "subagent", "me", "k")
    assert spec.parent == (run.spec.run_id, "call_d") and spec.max_iterations == 50
    session = await harness.app.store.sessions.get_session(spec.session_id)
    assert session is not None
    assert (session["kind"], session["parent_session_id"]) == ("delegate", run.spec.session_id)


async def test_failing_child_does_not_hide_others(harness: Harness, server: ModelServer) -> None:
    offer(harness)
    script_model(
        server, delegate("break", "count"), **{"break": [Reply(status=401, error="no")], "count": [Reply(text="3")]}
    )
    broken, fine = results(await harness.run(server))
    assert broken["status"] == "failed" and broken["summary"] == "" and "key" in broken["error"]
    assert (fine["status"], fine["summary"]) == ("completed", "3")


async def test_child_out_of_iterations_fails_with_summary(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness({"delegation": {"max_iterations": 1, "max_summary_chars": 100}})
    offer(harness, tool("look", **reading()))
    script_model(server, delegate("search"), search=[Reply(tool_calls=[Call("look")]), Reply(text="Half of it. " * 20)])
    [half] = results(await harness.run(server))
    assert half["status"] == "failed" and half["error"]
    assert len(half["summary"]) == 100 and half["summary"].endswith("[… cut: 240 characters in all]")


async def test_child_gets_goal_and_context_only(harness: Harness, server: ModelServer) -> None:
    offer(harness)
    script_model(server, Call("delegate_task", {"goal": "count", "context": "sheep"}), count=[Reply(text="3")])
    await harness.run(server, "a secret plan", instructions="Speak like a pirate.")
    [only] = [turn.text for turn in server.requests[1].turns if turn.role != "system"]
    assert only == "count\n\nWhat you should know:\nsheep"
    assert "pirate" not in json.dumps(server.requests[1].body)


@pytest.mark.parametrize("most", [1, 2])
async def test_max_concurrent_children_setting(make_harness: MakeHarness, server: ModelServer, most: int) -> None:
    harness = make_harness({"delegation": {"max_concurrent_children": most}})
    at_once = running_max = 0
    all_running = asyncio.Event()

    async def look(_: Any, __: Json) -> Json:
        nonlocal at_once, running_max
        at_once += 1
        running_max = max(running_max, at_once)
        if at_once == most:
            all_running.set()
        async with asyncio.timeout(SURELY_S):
            await all_running.wait()
        await asyncio.sleep(0.02)  # one too many would come now; one that comes later would not be noticed
        at_once -= 1
        return {"ok": True}

    offer(harness, tool("look", look, **reading()))
    children = {name: [Reply(tool_calls=[Call("look")]), Reply(text=name)] for name in ("one", "two", "three")}
    script_model(server, delegate("one", "two", "three"), **children)
    assert [result["summary"] for result in results(await harness.run(server))] == ["one", "two", "three"]
    assert running_max == most


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({}, "invalid_arguments"),
        ({"goal": "a", "tasks": [{"goal": "b"}]}, "invalid_arguments"),
        ({"tasks": []}, "invalid_arguments"),
        ({"tasks": [{"goal": str(n)} for n in range(4)]}, "invalid_arguments"),
        ({"goal": "x" * 100_001}, "too_large"),
    ],
)
async def test_delegation_rejects_invalid_arguments(
    harness: Harness, server: ModelServer, args: Json, code: str
) -> None:
    offer(harness)
    script_model(server, Call("delegate_task", args))
    [answer] = (await harness.run(server)).tool_results()
    assert answer["code"] == code


async def test_child_cannot_delegate(harness: Harness, server: ModelServer) -> None:
    offer(harness, tool("look"))
    script_model(server, delegate("again"), again=[Reply(tool_calls=[delegate("deeper")]), Reply(text="No.")])
    run = await harness.run(server, persist=True)
    rows = await harness.rows(f"delegate_{results(run)[0]['child_run_id'][4:]}")
    assert "unknown_tool" in str(next(row.content for row in rows if row.role == "tool"))


async def test_tool_policy_of_parent_applies_to_child(harness: Harness, server: ModelServer) -> None:
    offer(harness, tool("look", **reading()), tool("touch", toolset="y"))
    script_model(server, delegate("count"), count=[Reply(text="3")])
    await harness.run(server, tool_policy=frozenset({"delegation", "x"}))
    assert [t["function"]["name"] for t in server.requests[1].body["tools"]] == ["look"]


@pytest.mark.parametrize("source", ["api_server", "cli"])
async def test_child_shares_workspace_and_grants_of_parent(
    make_harness: MakeHarness, server: ModelServer, source: Any
) -> None:
    harness = make_harness({"terminal": {"backend": "local"}})
    observed: list[tuple[Any, ...]] = []

    async def look(ctx: ToolContext, _: Json) -> Json:
        resources = ctx.resources
        observed.append(
            (
                await resources.sandbox(),
                id(resources.session.granted),
                id(resources.session.folders),
                resources.session.yolo,
            )
        )
        resources.session.yolo = True
        return {"ok": True}

    offer(harness, tool("look", look, **reading()))
    script_model(server, Call("look"), delegate("look"), look=[Reply(tool_calls=[Call("look")]), Reply(text="Seen.")])
    run = await harness.run(server, source=source, persist=True, owner="me")
    assert run.final["type"] == "run.completed"
    (sandbox, *leave, before), (of_child, *of_childs_leave, after) = observed
    assert of_child is sandbox and of_childs_leave == leave and (before, after) == (False, True)


# ---- stopping


def waiting(started: asyncio.Event) -> ToolDef:
    async def wait(_: Any, __: Json) -> Json:
        started.set()
        await asyncio.Event().wait()
        return {}

    return tool("wait", wait)


@pytest.mark.parametrize("persist", [True, False])
@pytest.mark.parametrize("reason", ["stop", "client_disconnected"])
async def test_cancelling_parent_cancels_children(
    harness: Harness, server: ModelServer, persist: bool, reason: str
) -> None:
    started = asyncio.Event()
    offer(harness, waiting(started))
    script_model(server, delegate("wait", "count"), wait=[Reply(tool_calls=[Call("wait")])], count=[Reply(text="3")])
    running = await harness.begin(harness.spec(server, persist=persist))
    await started.wait()
    await running.wait_for("subagent.finished")
    await running.control("cancel", reason=reason)
    run = await running.end()
    assert (run.final["type"], run.final["reason"]) == ("run.cancelled", reason)
    assert {event["status"] for event in run.events_of("subagent.finished")} == {"completed", "cancelled"}
    assert run.event("tool.finished")["status"] == "interrupted"
    if persist:
        events = await harness.engine.durable(child_id(run.spec.run_id))
        assert (events[-1].type, events[-1].data["reason"]) == ("run.cancelled", reason)
    await nothing_left(server)


async def test_parent_deadline_applies_to_children(harness: Harness, server: ModelServer) -> None:
    started = asyncio.Event()
    offer(harness, waiting(started))
    for seconds in (0.3, 3.0, 30.0):
        script_model(server, delegate("wait"), wait=[Reply(tool_calls=[Call("wait")])])
        run = await harness.run(server, persist=True, deadline_seconds=seconds)
        if started.is_set():  # a slow machine has more time to come there
            break
    assert run.final["failure"] == "deadline"
    record = await harness.engine.get(child_id(run.spec.run_id))
    assert record is not None and record.spec.deadline_seconds is not None and record.spec.deadline_seconds < seconds
    assert record.state.failure == "deadline"


async def test_cancelled_child_is_reported(harness: Harness, server: ModelServer) -> None:
    started = asyncio.Event()
    offer(harness, waiting(started))
    script_model(server, delegate("wait"), wait=[Reply(tool_calls=[Call("wait")])])
    running = await harness.begin(harness.spec(server, persist=True))
    await started.wait()
    assert await harness.engine.control(child_id(running.run_id), Control("cancel")) == "applied"
    run = await running.end()
    assert results(run)[0]["status"] == "cancelled" and run.final["type"] == "run.completed"


# ---- questions of a child


def asking_tool(texts: list[str]) -> ToolDef:
    async def act(ctx: ToolContext, _: Json) -> Json:
        request = ApprovalRequest(ctx.call_id, "command", "rm -r x", "It deletes.", ("delete",), ("once", "deny"))
        texts.append((await ctx.asking.approve(request)).choice)
        return {"ok": texts[-1] != "deny"}

    return tool("act", act)


async def start_asking_child(harness: Harness, server: ModelServer, texts: list[str], **fields: Any) -> Any:
    offer(harness, asking_tool(texts))
    script_model(server, delegate("act"), act=[Reply(tool_calls=[Call("act")]), Reply(text="Acted.")])
    return await harness.begin(harness.spec(server, persist=True, answerable=True, **fields))


@pytest.mark.parametrize("named", [True, False])
async def test_child_approval_is_answered_in_parent_log(harness: Harness, server: ModelServer, named: bool) -> None:
    texts: list[str] = []
    running = await start_asking_child(harness, server, texts)
    request = await running.wait_for("approval.requested")
    assert request["path"] == [child_id(running.run_id)] and request["call_id"] == "call_d"
    assert (request["kind"], request["subject"], request["rules"]) == ("command", "rm -r x", ["delete"])
    record = await harness.engine.get(running.run_id)
    assert record is not None and record.state.status == "waiting_for_approval"
    which = {"id": request["approval_id"]} if named else {}
    assert await running.control("approve", choice="once", comment="go on", **which) == "applied"
    run = await running.end()
    assert texts == ["once"]
    resolved = run.event("approval.resolved")
    assert (resolved["approval_id"], resolved["choice"]) == (request["approval_id"], "once")
    assert (resolved["by"], resolved["comment"]) == ("user", "go on")


async def test_child_approval_answered_at_child_is_closed_in_parent_log(harness: Harness, server: ModelServer) -> None:
    texts: list[str] = []
    running = await start_asking_child(harness, server, texts)
    request = await running.wait_for("approval.requested")
    answer = Control("approve", {"id": request["approval_id"], "choice": "deny"})
    assert await harness.engine.control(child_id(running.run_id), answer) == "applied"
    assert await running.wait_for("approval.resolved")
    assert await running.control("approve", id=request["approval_id"], choice="once") == "already_resolved"
    run = await running.end()
    assert texts == ["deny"] and run.event("approval.resolved")["choice"] == "deny"


async def test_child_approval_is_denied_when_parent_is_interrupted(harness: Harness, server: ModelServer) -> None:
    running = await start_asking_child(harness, server, [])
    await running.wait_for("approval.requested")
    await running.control("cancel")
    run = await running.end()
    assert (run.event("approval.resolved")["choice"], run.event("approval.resolved")["by"]) == ("deny", "interrupt")


async def test_child_approval_timeout(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness({"approvals": {"timeout": 0.05}})
    texts: list[str] = []
    run = await (await start_asking_child(harness, server, texts)).end()
    assert texts == ["deny"] and run.event("approval.resolved")["by"] == "timeout"


# ---- found again


async def left_with_a_call(harness: Harness, server: ModelServer, **fields: Any) -> OrphanedRun:
    """A run as a process left it that was killed while it waited for its child."""
    orphan = await OrphanedRun(harness, server, toolsets=frozenset({"delegation", "x"}), **fields).begin()
    call = delegate("count")
    await orphan.say("", calls=[call])
    await orphan.start(call, "effect")
    return orphan


async def left_child(harness: Harness, server: ModelServer, parent: OrphanedRun) -> OrphanedRun:
    run_id = child_id(parent.spec.run_id)
    fields = {"kind": "subagent", "source": "subagent", "parent": (parent.spec.run_id, "call_d")}
    child = OrphanedRun(harness, server, run_id=run_id, **fields, on_detach=parent.spec.on_detach)
    child.spec = child.spec.replace(session_id=f"delegate_{run_id[4:]}", parent_session_id=SESSION)
    await parent.add(parent.event("subagent.started", call_id="call_d", child_run_id=run_id, goal="count"))
    return child


async def begin(child: OrphanedRun) -> None:
    session = child.spec.session_id
    await child.harness.app.store.runs.create(child.spec)
    started = child.event("run.started", kind="subagent", model="m", provider="p", user_row=None, session_id=session)
    row = Row(session, "user", "count", child.spec.run_id, announced_in=((started, "user_row"),))
    await child.add(started, rows=[row], session={"id": session, "source": "subagent", "kind": "delegate"})


@pytest.mark.parametrize("progress", ["no", "started", "at work"])
async def test_delegation_resumes_child_after_crash(harness: Harness, server: ModelServer, progress: str) -> None:
    offer(harness)
    server.handler = lambda request: (
        Reply(text="Three.") if request.turns[-1].text == "count" else Reply(text="All done.")
    )
    orphan = await left_with_a_call(harness, server)
    if progress != "no":
        child = await left_child(harness, server, orphan)
        if progress == "at work":
            await begin(child)
    resumed = await harness.engine.resume_all()
    assert orphan.spec.run_id in resumed
    events = await orphan.log()
    assert [event["type"] for event in events if event["type"].startswith("subagent.")] == [
        "subagent.started",
        "subagent.finished",
    ]
    assert next(event for event in events if event["type"] == "tool.finished")["repeated"] is True
    assert next(event for event in events if event["type"] == "run.resumed")["repeated"] == ["call_d"]
    rows = await harness.rows(SESSION)
    [result] = json.loads(str(next(row.content for row in rows if row.role == "tool")))["results"]
    assert (result["status"], result["summary"]) == ("completed", "Three.")
    asked_of_child = [r for r in server.requests if r.turns[-1].text == "count"]
    assert len(asked_of_child) == 1


@pytest.mark.parametrize("is_reported", [True, False])
async def test_finished_child_is_not_run_again_after_crash(
    harness: Harness, server: ModelServer, is_reported: bool
) -> None:
    offer(harness)
    server.handler = lambda _: Reply(text="Three.", usage={"input": 10, "output": 5})
    orphan = await left_with_a_call(harness, server)
    child = await left_child(harness, server, orphan)
    ended = await harness.carry_out(child.spec.replace(user_message="count"))
    if is_reported:
        end = {"call_id": "call_d", "child_run_id": child.spec.run_id, "status": "completed", "chars": 6, "steps": 1}
        await orphan.add(orphan.event("subagent.finished", **end, usage=ended.final["usage"]))
    events = await orphan.taken_up()
    assert len(server.requests) == 2
    assert events[-1]["usage"]["total_tokens"] == 30
    assert len([event for event in events if event["type"].startswith("subagent.")]) == 2
    [row] = [row for row in await harness.rows(SESSION) if row.role == "tool"]
    assert json.loads(str(row.content))["results"][0]["summary"] == "Three."


@pytest.mark.parametrize("on_detach", ["continue", "cancel"])
async def test_shutdown_leaves_delegation_open_for_resume(
    make_harness: MakeHarness, server: ModelServer, on_detach: str
) -> None:
    harness, started = make_harness(), asyncio.Event()
    offer(harness, waiting(started))
    script_model(server, delegate("wait"), wait=[Reply(tool_calls=[Call("wait", id="w")])])
    spec = harness.spec(server, persist=True, on_detach=on_detach)
    running = await harness.begin(spec)
    await started.wait()
    await harness.engine.drain(0)
    ids = [spec.run_id, child_id(spec.run_id)]
    ends = [(await harness.engine.durable(run_id))[-1].type for run_id in ids]
    await running._reader
    await harness.close()
    assert ends == (["run.interrupted"] * 2 if on_detach == "continue" else ["run.cancelled"] * 2)
    if on_detach == "cancel":
        return
    later = make_harness()
    offer(later, tool("wait"))
    server.handler = lambda request: Reply(
        text="Waited." if any(t.text.startswith("wait") for t in request.turns) else "All done."
    )
    assert set(await later.engine.resume_all()) <= set(ids)
    events = [event.as_dict() async for event in later.engine.subscribe(spec.run_id)]
    assert events[-1]["type"] == "run.completed"
    rows = await later.rows(spec.session_id)
    [result] = json.loads(str(next(row.content for row in rows if row.role == "tool")))["results"]
    assert (result["status"], result["summary"]) == ("completed", "Waited.")


async def test_child_of_parent_that_is_not_resumed_is_cancelled(harness: Harness, server: ModelServer) -> None:
    offer(harness, tool("wait"))
    server.handler = lambda _: Reply(text="never", stall_at=1)
    orphan = await left_with_a_call(harness, server, on_detach="cancel")
    child = await left_child(harness, server, orphan)
    child.spec = child.spec.replace(on_detach="continue")
    await begin(child)
    harness.engine.start_background_tasks()
    events = await orphan.log()
    assert (events[-1]["type"], events[-1]["failure"]) == ("run.failed", "server_restarted")
    ended = [event.type async for event in harness.engine.subscribe(child.spec.run_id)]
    assert ended[-1] == "run.cancelled"
