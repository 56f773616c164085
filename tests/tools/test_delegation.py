"""The tool `delegate_task`: children are runs of their own that can be seen, stopped, answered and found again."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest

from agent.conftest import MakeHouse
from agent.house import House, Json, Ran, nothing_left, reading, tool
from hermes.core.spec import Control
from hermes.store.base import Row
from hermes.tools import delegation
from hermes.tools.framework.questions import ApprovalRequest
from hermes.tools.framework.registry import ToolContext, ToolDef
from runs.test_resume import SESSION, Left
from support.model_server import Call, ModelServer, Reply, Request


def talk(server: ModelServer, *calls: Call, **children: list[Reply]) -> None:
    """The parent makes these calls and sums up; a child whose goal begins with a name answers from that list."""
    parent = [Reply(tool_calls=list(calls)), Reply(text="All done.")]

    def handle(request: Request) -> Reply:
        first = next(turn.text for turn in request.turns if turn.role == "user")
        script = next((replies for name, replies in children.items() if first.startswith(name)), parent)
        return script.pop(0)

    server.handler = handle


def delegate(*goals: str, **more: Any) -> Call:
    return Call("delegate_task", {"tasks": [{"goal": goal} for goal in goals], **more}, id="call_d")


def results(ran: Ran) -> list[Json]:
    [answer] = ran.tool_results()
    found: list[Json] = answer["results"]
    return found


def child_id(run_id: str, number: int = 0, step: int = 1) -> str:
    return f"run_{hashlib.sha256(f'{run_id}{chr(0)}{step}{chr(0)}call_d{chr(0)}{number}'.encode()).hexdigest()[:32]}"


def offer(house: House, *tools: ToolDef) -> None:
    house.offer(delegation.TOOL, *tools)


@pytest.mark.parametrize("persist", [True, False])
async def test_delegated_children_are_own_runs(house: House, server: ModelServer, persist: bool) -> None:
    offer(house, tool("look", **reading()), tool("clarify", toolset="clarify"), tool("cronjob", toolset="cronjob"))
    usage = {"input": 10, "output": 5}
    find = [Reply(tool_calls=[Call("look")], usage=usage), Reply(text="It is blue.", usage=usage)]
    talk(server, delegate("find out", "count"), find=find, count=[Reply(text="Three.", usage=usage)])
    ran = await house.run(server, persist=persist, answerable=True, owner="me", session_key="k")
    first, second = results(ran)
    assert (first["status"], first["summary"]) == ("completed", "It is blue.")
    assert (second["status"], second["summary"]) == ("completed", "Three.")
    assert first["usage"]["total_tokens"] == 30 and second["usage"]["total_tokens"] == 15
    assert {first["child_run_id"], second["child_run_id"]} == {
        child_id(ran.spec.run_id, 0),
        child_id(ran.spec.run_id, 1),
    }
    begun, ended = ran.of("subagent.started"), ran.of("subagent.finished")
    assert [(event["call_id"], event["goal"]) for event in begun] == [("call_d", "find out"), ("call_d", "count")]
    assert {event["child_run_id"]: (event["status"], event["chars"]) for event in ended} == {
        first["child_run_id"]: ("completed", 11),
        second["child_run_id"]: ("completed", 6),
    }
    assert ran.types.index("tool.started") < ran.types.index("subagent.started")
    assert ran.types.index("subagent.finished") < ran.types.index("tool.finished")
    own = sum(event["total_tokens"] for event in ran.of("usage"))
    assert ran.result["total_tokens"] == ran.final["usage"]["total_tokens"] == own + 45
    assert ran.result["api_calls"] == 2 + 3
    offered = [[t["function"]["name"] for t in r.body.get("tools", [])] for r in server.requests]
    assert offered[0] == ["clarify", "cronjob", "delegate_task", "look"] and offered[1:3] == [["look"], ["look"]]
    if not persist:
        return
    record = await house.engine.get(first["child_run_id"])
    assert record is not None
    spec = record.spec
    assert (spec.kind, spec.source, spec.owner, spec.session_key) == ("subagent", "subagent", "me", "k")
    assert spec.parent == (ran.spec.run_id, "call_d") and spec.max_iterations == 50
    session = await house.app.store.sessions.get_session(spec.session_id)
    assert session is not None
    assert (session["kind"], session["parent_session_id"]) == ("delegate", ran.spec.session_id)


async def test_failing_child_does_not_hide_others(house: House, server: ModelServer) -> None:
    offer(house)
    talk(server, delegate("break", "count"), **{"break": [Reply(status=401, error="no")], "count": [Reply(text="3")]})
    broken, fine = results(await house.run(server))
    assert broken["status"] == "failed" and broken["summary"] == "" and "key" in broken["error"]
    assert (fine["status"], fine["summary"]) == ("completed", "3")


async def test_child_out_of_iterations_fails_with_summary(make_house: MakeHouse, server: ModelServer) -> None:
    house = make_house({"delegation": {"max_iterations": 1, "max_summary_chars": 100}})
    offer(house, tool("look", **reading()))
    talk(server, delegate("search"), search=[Reply(tool_calls=[Call("look")]), Reply(text="Half of it. " * 20)])
    [half] = results(await house.run(server))
    assert half["status"] == "failed" and half["error"]
    assert len(half["summary"]) == 100 and half["summary"].endswith("[… cut: 240 characters in all]")


async def test_child_gets_goal_and_context_only(house: House, server: ModelServer) -> None:
    offer(house)
    talk(server, Call("delegate_task", {"goal": "count", "context": "sheep"}), count=[Reply(text="3")])
    await house.run(server, "a secret plan", instructions="Speak like a pirate.")
    [only] = [turn.text for turn in server.requests[1].turns if turn.role != "system"]
    assert only == "count\n\nWhat you should know:\nsheep"
    assert "pirate" not in json.dumps(server.requests[1].body)


@pytest.mark.parametrize("most", [1, 2])
async def test_max_concurrent_children_setting(make_house: MakeHouse, server: ModelServer, most: int) -> None:
    house = make_house({"delegation": {"max_concurrent_children": most}})
    at_once = seen = 0

    async def look(_: Any, __: Json) -> Json:
        nonlocal at_once, seen
        at_once += 1
        seen = max(seen, at_once)
        await asyncio.sleep(0.02)
        at_once -= 1
        return {"ok": True}

    offer(house, tool("look", look, **reading()))
    children = {name: [Reply(tool_calls=[Call("look")]), Reply(text=name)] for name in ("one", "two", "three")}
    talk(server, delegate("one", "two", "three"), **children)
    assert [result["summary"] for result in results(await house.run(server))] == ["one", "two", "three"]
    assert seen == most


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
async def test_delegation_rejects_invalid_arguments(house: House, server: ModelServer, args: Json, code: str) -> None:
    offer(house)
    talk(server, Call("delegate_task", args))
    [answer] = (await house.run(server)).tool_results()
    assert answer["code"] == code


async def test_child_cannot_delegate(house: House, server: ModelServer) -> None:
    offer(house, tool("look"))
    talk(server, delegate("again"), again=[Reply(tool_calls=[delegate("deeper")]), Reply(text="No.")])
    ran = await house.run(server, persist=True)
    rows = await house.rows(f"delegate_{results(ran)[0]['child_run_id'][4:]}")
    assert "unknown_tool" in str(next(row.content for row in rows if row.role == "tool"))


async def test_tool_policy_of_parent_applies_to_child(house: House, server: ModelServer) -> None:
    offer(house, tool("look", **reading()), tool("touch", toolset="y"))
    talk(server, delegate("count"), count=[Reply(text="3")])
    await house.run(server, tool_policy=frozenset({"delegation", "x"}))
    assert [t["function"]["name"] for t in server.requests[1].body["tools"]] == ["look"]


@pytest.mark.parametrize("source", ["api_server", "cli"])
async def test_child_shares_workspace_and_grants_of_parent(
    make_house: MakeHouse, server: ModelServer, source: Any
) -> None:
    house = make_house({"terminal": {"backend": "local"}})
    seen: list[tuple[Any, ...]] = []

    async def look(ctx: ToolContext, _: Json) -> Json:
        world = ctx.resources
        seen.append((await world.sandbox(), id(world.session.granted), id(world.session.folders), world.session.yolo))
        world.session.yolo = True
        return {"ok": True}

    offer(house, tool("look", look, **reading()))
    talk(server, Call("look"), delegate("look"), look=[Reply(tool_calls=[Call("look")]), Reply(text="Seen.")])
    ran = await house.run(server, source=source, persist=True, owner="me")
    assert ran.final["type"] == "run.completed"
    (sandbox, *leave, before), (of_child, *of_childs_leave, after) = seen
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
    house: House, server: ModelServer, persist: bool, reason: str
) -> None:
    started = asyncio.Event()
    offer(house, waiting(started))
    talk(server, delegate("wait", "count"), wait=[Reply(tool_calls=[Call("wait")])], count=[Reply(text="3")])
    running = await house.begin(house.spec(server, persist=persist))
    await started.wait()
    await running.seen("subagent.finished")
    await running.control("cancel", reason=reason)
    ran = await running.end()
    assert (ran.final["type"], ran.final["reason"]) == ("run.cancelled", reason)
    assert {event["status"] for event in ran.of("subagent.finished")} == {"completed", "cancelled"}
    assert ran.one("tool.finished")["status"] == "interrupted"
    if persist:
        events = await house.engine.durable(child_id(ran.spec.run_id))
        assert (events[-1].type, events[-1].data["reason"]) == ("run.cancelled", reason)
    await nothing_left(server)


async def test_parent_deadline_applies_to_children(house: House, server: ModelServer) -> None:
    offer(house, waiting(asyncio.Event()))
    talk(server, delegate("wait"), wait=[Reply(tool_calls=[Call("wait")])])
    ran = await house.run(server, persist=True, deadline_seconds=0.3)
    assert ran.final["failure"] == "deadline"
    record = await house.engine.get(child_id(ran.spec.run_id))
    assert record is not None and record.spec.deadline_seconds is not None and record.spec.deadline_seconds < 0.3
    assert record.state.failure == "deadline"


async def test_cancelled_child_is_reported(house: House, server: ModelServer) -> None:
    started = asyncio.Event()
    offer(house, waiting(started))
    talk(server, delegate("wait"), wait=[Reply(tool_calls=[Call("wait")])])
    running = await house.begin(house.spec(server, persist=True))
    await started.wait()
    assert await house.engine.control(child_id(running.run_id), Control("cancel")) == "applied"
    ran = await running.end()
    assert results(ran)[0]["status"] == "cancelled" and ran.final["type"] == "run.completed"


# ---- questions of a child


def asking(said: list[str]) -> ToolDef:
    async def act(ctx: ToolContext, _: Json) -> Json:
        request = ApprovalRequest(ctx.call_id, "command", "rm -r x", "It deletes.", ("delete",), ("once", "deny"))
        said.append((await ctx.asking.approve(request)).choice)
        return {"ok": said[-1] != "deny"}

    return tool("act", act)


async def asked(house: House, server: ModelServer, said: list[str], **fields: Any) -> Any:
    offer(house, asking(said))
    talk(server, delegate("act"), act=[Reply(tool_calls=[Call("act")]), Reply(text="Acted.")])
    return await house.begin(house.spec(server, persist=True, answerable=True, **fields))


@pytest.mark.parametrize("named", [True, False])
async def test_child_approval_is_answered_in_parent_log(house: House, server: ModelServer, named: bool) -> None:
    said: list[str] = []
    running = await asked(house, server, said)
    request = await running.seen("approval.requested")
    assert request["path"] == [child_id(running.run_id)] and request["call_id"] == "call_d"
    assert (request["kind"], request["subject"], request["rules"]) == ("command", "rm -r x", ["delete"])
    record = await house.engine.get(running.run_id)
    assert record is not None and record.state.status == "waiting_for_approval"
    which = {"id": request["approval_id"]} if named else {}
    assert await running.control("approve", choice="once", comment="go on", **which) == "applied"
    ran = await running.end()
    assert said == ["once"]
    resolved = ran.one("approval.resolved")
    assert (resolved["approval_id"], resolved["choice"]) == (request["approval_id"], "once")
    assert (resolved["by"], resolved["comment"]) == ("user", "go on")


async def test_child_approval_answered_at_child_is_closed_in_parent_log(house: House, server: ModelServer) -> None:
    said: list[str] = []
    running = await asked(house, server, said)
    request = await running.seen("approval.requested")
    answer = Control("approve", {"id": request["approval_id"], "choice": "deny"})
    assert await house.engine.control(child_id(running.run_id), answer) == "applied"
    assert await running.seen("approval.resolved")
    assert await running.control("approve", id=request["approval_id"], choice="once") == "already_resolved"
    ran = await running.end()
    assert said == ["deny"] and ran.one("approval.resolved")["choice"] == "deny"


async def test_child_approval_is_denied_when_parent_is_interrupted(house: House, server: ModelServer) -> None:
    running = await asked(house, server, [])
    await running.seen("approval.requested")
    await running.control("cancel")
    ran = await running.end()
    assert (ran.one("approval.resolved")["choice"], ran.one("approval.resolved")["by"]) == ("deny", "interrupt")


async def test_child_approval_timeout(make_house: MakeHouse, server: ModelServer) -> None:
    house = make_house({"approvals": {"timeout": 0.05}})
    said: list[str] = []
    ran = await (await asked(house, server, said)).end()
    assert said == ["deny"] and ran.one("approval.resolved")["by"] == "timeout"


# ---- found again


async def left_with_a_call(house: House, server: ModelServer, **fields: Any) -> Left:
    """A run as a process left it that was killed while it waited for its child."""
    left = await Left(house, server, toolsets=frozenset({"delegation", "x"}), **fields).begin()
    call = delegate("count")
    await left.say("", calls=[call])
    await left.start(call, "effect")
    return left


async def left_child(house: House, server: ModelServer, parent: Left) -> Left:
    run_id = child_id(parent.spec.run_id)
    fields = {"kind": "subagent", "source": "subagent", "parent": (parent.spec.run_id, "call_d")}
    child = Left(house, server, run_id=run_id, **fields, on_detach=parent.spec.on_detach)
    child.spec = child.spec.replace(session_id=f"delegate_{run_id[4:]}", parent_session_id=SESSION)
    await parent.add(parent.event("subagent.started", call_id="call_d", child_run_id=run_id, goal="count"))
    return child


async def begin(child: Left) -> None:
    session = child.spec.session_id
    await child.house.app.store.runs.create(child.spec)
    started = child.event("run.started", kind="subagent", model="m", provider="p", user_row=None, session_id=session)
    row = Row(session, "user", "count", child.spec.run_id, announced_in=((started, "user_row"),))
    await child.add(started, rows=[row], session={"id": session, "source": "subagent", "kind": "delegate"})


@pytest.mark.parametrize("begun", ["no", "started", "at work"])
async def test_delegation_resumes_child_after_crash(house: House, server: ModelServer, begun: str) -> None:
    offer(house)
    server.handler = lambda request: (
        Reply(text="Three.") if request.turns[-1].text == "count" else Reply(text="All done.")
    )
    left = await left_with_a_call(house, server)
    if begun != "no":
        child = await left_child(house, server, left)
        if begun == "at work":
            await begin(child)
    taken = await house.engine.resume_all()
    assert left.spec.run_id in taken
    events = await left.log()
    assert [event["type"] for event in events if event["type"].startswith("subagent.")] == [
        "subagent.started",
        "subagent.finished",
    ]
    assert next(event for event in events if event["type"] == "tool.finished")["repeated"] is True
    assert next(event for event in events if event["type"] == "run.resumed")["repeated"] == ["call_d"]
    rows = await house.rows(SESSION)
    [result] = json.loads(str(next(row.content for row in rows if row.role == "tool")))["results"]
    assert (result["status"], result["summary"]) == ("completed", "Three.")
    asked_of_child = [r for r in server.requests if r.turns[-1].text == "count"]
    assert len(asked_of_child) == 1


@pytest.mark.parametrize("told", [True, False])
async def test_finished_child_is_not_run_again_after_crash(house: House, server: ModelServer, told: bool) -> None:
    offer(house)
    server.handler = lambda _: Reply(text="Three.", usage={"input": 10, "output": 5})
    left = await left_with_a_call(house, server)
    child = await left_child(house, server, left)
    ended = await house.carry_out(child.spec.replace(user_message="count"))
    if told:
        end = {"call_id": "call_d", "child_run_id": child.spec.run_id, "status": "completed", "chars": 6, "steps": 1}
        await left.add(left.event("subagent.finished", **end, usage=ended.final["usage"]))
    events = await left.taken_up()
    assert len(server.requests) == 2
    assert events[-1]["usage"]["total_tokens"] == 30
    assert len([event for event in events if event["type"].startswith("subagent.")]) == 2
    [row] = [row for row in await house.rows(SESSION) if row.role == "tool"]
    assert json.loads(str(row.content))["results"][0]["summary"] == "Three."


@pytest.mark.parametrize("on_detach", ["continue", "cancel"])
async def test_shutdown_leaves_delegation_open_for_resume(
    make_house: MakeHouse, server: ModelServer, on_detach: str
) -> None:
    house, started = make_house(), asyncio.Event()
    offer(house, waiting(started))
    talk(server, delegate("wait"), wait=[Reply(tool_calls=[Call("wait", id="w")])])
    spec = house.spec(server, persist=True, on_detach=on_detach)
    running = await house.begin(spec)
    await started.wait()
    await house.engine.drain(0)
    ids = [spec.run_id, child_id(spec.run_id)]
    ends = [(await house.engine.durable(run_id))[-1].type for run_id in ids]
    await running._reader
    await house.close()
    assert ends == (["run.interrupted"] * 2 if on_detach == "continue" else ["run.cancelled"] * 2)
    if on_detach == "cancel":
        return
    later = make_house()
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


async def test_child_of_parent_that_is_not_resumed_is_cancelled(house: House, server: ModelServer) -> None:
    offer(house, tool("wait"))
    server.handler = lambda _: Reply(text="never", stall_at=1)
    left = await left_with_a_call(house, server, on_detach="cancel")
    child = await left_child(house, server, left)
    child.spec = child.spec.replace(on_detach="continue")
    await begin(child)
    house.engine.start_background_tasks()
    events = await left.log()
    assert (events[-1]["type"], events[-1]["failure"]) == ("run.failed", "server_restarted")
    ended = [event.type async for event in house.engine.subscribe(child.spec.run_id)]
    assert ended[-1] == "run.cancelled"
