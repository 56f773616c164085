"""Recovery of interrupted runs: each is resumed where its log ends, or closed, and no effect happens twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.harness import Harness, check_laws, reading, sent_messages, tool
from hermes.core.events import Cuts, Event
from hermes.core.home import Home
from hermes.core.processes import host_of, this_process
from hermes.core.spec import Control
from hermes.runs import recovery
from hermes.server.render_responses import ResponseRenderer, VisibleItems
from hermes.server.render_run import RunRenderer
from hermes.store.base import Partial, Row
from hermes.tools.framework.questions import ApprovalRequest
from hermes.tools.framework.registry import ToolContext
from support.model_server import Call, ModelServer, Reply
from support.waiting import DEADLINE_S, until

SESSION = "the-session"
MESSAGE = "msg_000000000000000000000001"
MEANWHILE = 4096


class OrphanedRun:
    """A run whose process was killed: its log as that process would have written it."""

    def __init__(self, harness: Harness, server: ModelServer, **fields: Any) -> None:
        fields = {"persist": True, "session_id": SESSION, "answerable": True, **fields}
        self.harness, self.spec = harness, harness.spec(server, "do it", **fields)
        self.seq, self.ts = 0, time.time()
        self.step = 0

    def event(self, type_: str, **data: Any) -> Event:
        self.seq += 1
        return Event(self.spec.run_id, type_, 0 if type_.startswith("run.") else self.step, data, self.seq, self.ts)

    async def add(self, *events: Event, rows: Sequence[Row] = (), **options: Any) -> None:
        await self.harness.app.store.runs.append(self.spec.run_id, None, events, rows, **options)

    async def begin(self) -> OrphanedRun:
        await self.harness.app.store.runs.create(self.spec)
        started = self.event("run.started", kind="run", model="m", provider="p", user_row=None, session_id=SESSION)
        row = Row(SESSION, "user", "do it", self.spec.run_id, announced_in=((started, "user_row"),))
        await self.add(started, rows=[row], session={"id": SESSION, "source": "api_server"})
        return self

    async def ask(self, message_id: str = MESSAGE) -> None:
        self.step += 1
        await self.add(self.event("model.started", attempt=1, message_id=message_id, model="m", provider="p"))

    async def say(
        self, text: str, message_id: str = MESSAGE, calls: Sequence[Call] = (), *, continues: bool = False
    ) -> None:
        """Append a complete message of the model."""
        await self.ask(message_id)
        cuts = Cuts()
        if text:
            self.seq += 1
            cuts.add(self.seq, len(text), self.ts)
        tool_calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in calls
        ]
        event = self.event("message.completed", message_id=message_id, row=None, text_length=len(text))
        event.data |= {"cuts": cuts.pack(), "tool_calls": [], "finish_reason": "tool_calls" if calls else "stop"}
        row = Row(
            SESSION, "assistant", text, self.spec.run_id, tool_calls=tool_calls or None, announced_in=((event, "row"),)
        )
        row.continues, row.active = continues, not continues
        await self.add(event, rows=[row])

    async def start(self, call: Call, effect: str) -> None:
        await self.add(self.event("tool.started", call_id=call.id, name=call.name, effect=effect, args={}))

    async def finish(self, call: Call, content: str) -> None:
        event = self.event("tool.finished", call_id=call.id, name=call.name, status="ok", row=None)
        row = Row(SESSION, "tool", content, self.spec.run_id, tool_call_id=call.id, tool_name=call.name)
        row.announced_in = ((event, "row"),)
        await self.add(event, rows=[row])

    async def leave_text(self, text: str, stream_id: str = MESSAGE, kind: str = "text", form: str = "") -> None:
        cuts = Cuts()
        self.seq += 1
        cuts.add(self.seq, len(text), self.ts)
        partial = Partial(stream_id, kind, self.step, text, cuts.pack(), self.seq, form)
        await self.harness.app.store.runs.put_partials(self.spec.run_id, None, [partial])

    async def taken_up(self) -> list[dict[str, Any]]:
        """Resume the run, and return its whole log."""
        assert await self.harness.engine.resume_all() == [self.spec.run_id]
        return await self.log()

    async def log(self) -> list[dict[str, Any]]:
        events = [event.as_dict() async for event in self.harness.engine.subscribe(self.spec.run_id)]
        check_laws(events)
        await until(lambda: self.harness.app.store.leases.holder(f"session:{SESSION}"), lambda holder: holder is None)
        return events


def of(events: list[dict[str, Any]], *types: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] in types]


async def rows_of(harness: Harness) -> list[tuple[str, Any]]:
    return [(row.role, row.content) for row in await harness.rows(SESSION)]


# ---- where a log may end


async def test_resume_of_run_without_model_call(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server).begin()
    events = await orphan.taken_up()
    assert [event["type"] for event in events][-1] == "run.completed"
    [resumed] = of(events, "run.resumed")
    assert (resumed["reason"], resumed["cut"], resumed["repeated"], resumed["unknown"]) == ("crash", {}, [], [])
    assert await rows_of(harness) == [("user", "do it"), ("assistant", "Done.")]
    assert sent_messages(server.requests[0]) == [("user", "do it")]


async def test_resume_keeps_client_supplied_history(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    await harness.app.store.sessions.create_session(SESSION, "api_server")
    for role in ("user", "assistant"):
        await harness.app.store.sessions.append_message(SESSION, role, "of another conversation")
    brought = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    orphan = await OrphanedRun(harness, server, history=brought, base_id=SESSION, verbatim=True).begin()
    await orphan.taken_up()
    assert sent_messages(server.requests[0]) == [("user", "a"), ("assistant", "b"), ("user", "do it")]


async def test_resume_continues_sequence_at_next_round_number(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server).begin()
    events = await orphan.taken_up()
    assert of(events, "run.resumed")[0]["seq"] == MEANWHILE
    record = await harness.engine.get(orphan.spec.run_id)
    assert record is not None and (record.resumes, record.state.status) == (1, "completed")


async def test_resume_continues_partial_text(harness: Harness, server: ModelServer) -> None:
    server.handler = lambda request: Reply(text="Once upon a time.")
    orphan = await OrphanedRun(harness, server).begin()
    await orphan.ask()
    await orphan.leave_text("Once upon")
    events = await orphan.taken_up()
    assert of(events, "run.resumed")[0]["cut"] == {MESSAGE: 9}
    deltas = of(events, "text.delta")
    assert (deltas[0]["offset"], deltas[0]["text"]) == (0, "Once upon")
    assert {e["message_id"] for e in deltas} == {MESSAGE}
    [result] = of(events, "message.completed")
    text = (await rows_of(harness))[-1][1]
    assert text.startswith("Once upon") and result["text_length"] == len(text)
    assert [e["attempt"] for e in of(events, "model.started")] == [1, 2]


async def test_resume_after_power_loss_reuses_no_sequence_numbers(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "booted_at", lambda: time.time() + 1)
    server.handler = lambda request: Reply(text="Once upon a time.")
    orphan = await OrphanedRun(harness, server).begin()
    await orphan.ask()
    await orphan.leave_text("Once upon")
    [resumed] = of(await orphan.taken_up(), "run.resumed")
    assert (resumed["cut"], resumed["lost"]) == ({MESSAGE: 9}, True)
    log = [event async for event in harness.engine.subscribe(orphan.spec.run_id)]
    template = {"id": "resp_1", "status": "in_progress", "output": [], "usage": {}}
    renderer = ResponseRenderer(template, VisibleItems(extensions=True))
    shown = b"".join([*renderer.begin(), renderer.feed(log)]).decode()
    events = [json.loads(line[6:]) for line in shown.splitlines() if line.startswith("data: {")]
    at = next(at for at, event in enumerate(events) if event["type"] == "hermes:resumed")
    assert [event["sequence_number"] for event in events[:at]] == list(range(at))
    rest = [event["sequence_number"] for event in events[at:]]
    assert rest == list(range(MEANWHILE, MEANWHILE + len(rest)))
    assert (events[at]["item_id"], events[at]["offset"]) == (MESSAGE, 9)
    record = await harness.engine.get(orphan.spec.run_id)
    assert record is not None
    text = RunRenderer(record, str, names=False, reasoning=False).feed(log).decode()
    frames = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    [warning] = [frame for frame in frames if frame.get("code") == "resumed"]
    assert warning["cut"] == {MESSAGE: 9}


async def continued_run(harness: Harness, server: ModelServer, verbatim: bool) -> OrphanedRun:
    """A run that continues the last message of its session."""
    messages = [{"role": "user", "content": "a story"}, {"role": "assistant", "content": "Once upon a "}]
    await harness.app.store.sessions.create_session(SESSION, "api_server")
    for message in messages:
        await harness.app.store.sessions.append_message(SESSION, message["role"], message["content"])
    brought = {"history": messages, "base_id": SESSION, "verbatim": True} if verbatim else {}
    orphan = OrphanedRun(harness, server, continues=True, toolsets=frozenset({"x"}), **brought)
    orphan.spec = orphan.spec.replace(user_message="")
    await harness.app.store.runs.create(orphan.spec)
    await orphan.add(
        orphan.event("run.started", kind="run", model="m", provider="p", user_row=None, session_id=SESSION)
    )
    return orphan


@pytest.mark.parametrize("verbatim", [True, False])
async def test_resume_of_resumed_message(harness: Harness, server: ModelServer, verbatim: bool) -> None:
    server.script = [Reply(text="me.", continues=False)]
    orphan = await continued_run(harness, server, verbatim)
    await orphan.ask()
    await orphan.leave_text("ti")
    await orphan.taken_up()
    assert sent_messages(server.requests[0])[:2] == [("user", "a story"), ("assistant", "Once upon a ti")]
    assert await rows_of(harness) == [("user", "a story"), ("assistant", "Once upon a time.")]


@pytest.mark.parametrize("verbatim", [True, False])
async def test_resume_runs_tool_calls_of_continued_message(
    harness: Harness, server: ModelServer, verbatim: bool
) -> None:
    call_ids: list[str] = []
    harness.offer(tool("act", lambda ctx, args: call_ids.append(ctx.call_id) or {"ok": True}))
    server.script = [Reply(text="The end.")]
    orphan = await continued_run(harness, server, verbatim)
    await orphan.say("time.", calls=[Call("act", {"a": "1"}, id="c1")], continues=True)
    await orphan.taken_up()
    assert call_ids == ["c1"]
    assert sent_messages(server.requests[0])[:2] == [("user", "a story"), ("assistant", "Once upon a time.")]
    expected = [
        ("user", "a story"),
        ("assistant", "Once upon a time."),
        ("tool", '{"ok": true}'),
        ("assistant", "The end."),
    ]
    assert await rows_of(harness) == expected


async def test_resume_repeats_empty_model_call(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server).begin()
    await orphan.ask()
    events = await orphan.taken_up()
    assert {e["message_id"] for e in of(events, "model.started", "message.completed")} == {MESSAGE}
    assert (await rows_of(harness))[-1] == ("assistant", "Done.")


async def test_resume_only_closes_completed_answer(harness: Harness, server: ModelServer) -> None:
    orphan = await OrphanedRun(harness, server).begin()
    await orphan.say("Done.")
    events = await orphan.taken_up()
    assert events[-1]["type"] == "run.completed" and server.requests == []
    assert await rows_of(harness) == [("user", "do it"), ("assistant", "Done.")]


async def test_resume_runs_unstarted_tool_calls(harness: Harness, server: ModelServer) -> None:
    call_ids: list[str] = []
    harness.offer(tool("act", lambda ctx, args: call_ids.append(ctx.call_id) or {"ok": True}))
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server, toolsets=frozenset({"x"})).begin()
    await orphan.say("", calls=[Call("act", {"a": "1"}, id="c1"), Call("act", {"a": "2"}, id="c2")])
    await orphan.start(Call("act", {}, id="c1"), "effect")
    await orphan.finish(Call("act", {}, id="c1"), '{"ok": true}')
    events = await orphan.taken_up()
    assert call_ids == ["c2"], "a finished call was made again"
    assert [e["repeated"] for e in of(events, "tool.finished") if "repeated" in e] == [False]
    assert [content for role, content in await rows_of(harness) if role == "tool"] == ['{"ok": true}'] * 2


@pytest.mark.parametrize("effect", ["read", "idempotent"])
async def test_resume_repeats_read_only_tool_call(harness: Harness, server: ModelServer, effect: str) -> None:
    call_ids: list[str] = []
    marks = reading(effect=effect)
    harness.offer(tool("look", lambda ctx, args: call_ids.append(ctx.call_id) or {"ok": True}, **marks))
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server, toolsets=frozenset({"x"})).begin()
    await orphan.say("", calls=[Call("look", {}, id="c1")])
    await orphan.start(Call("look", {}, id="c1"), effect)
    events = await orphan.taken_up()
    assert call_ids == ["c1"]
    assert of(events, "run.resumed")[0]["repeated"] == ["c1"]
    assert of(events, "tool.finished")[0]["repeated"] is True


async def test_resume_reports_tool_call_with_effects_as_unknown(harness: Harness, server: ModelServer) -> None:
    call_ids: list[str] = []
    harness.offer(tool("act", lambda ctx, args: call_ids.append(ctx.call_id) or {"ok": True}))
    server.script = [Reply(text="I checked.")]
    orphan = await OrphanedRun(harness, server, toolsets=frozenset({"x"})).begin()
    await orphan.say("", calls=[Call("act", {}, id="c1")])
    await orphan.start(Call("act", {}, id="c1"), "effect")
    await orphan.leave_text("half of it", "c1/stdout", "tool", "stdout")
    events = await orphan.taken_up()
    assert call_ids == []
    assert of(events, "run.resumed")[0]["unknown"] == ["c1"]
    assert of(events, "tool.finished")[0]["status"] == "unknown"
    payload = json.loads((await rows_of(harness))[-2][1])
    assert (payload["status"], payload["outcome"], payload["output_so_far"]) == ("interrupted", "unknown", "half of it")
    again = [event.type async for event in harness.engine.subscribe(orphan.spec.run_id)]
    assert "tool.output" not in again


@pytest.mark.parametrize(
    ("known", "calls", "status", "repeated"),
    [("done", 0, "ok", False), ("not_done", 1, "ok", True), ("unclear", 0, "unknown", False)],
)
async def test_resume_asks_tool_with_reconcile(
    harness: Harness, server: ModelServer, known: str, calls: int, status: str, repeated: bool
) -> None:
    call_ids: list[str] = []
    texts: list[str] = []

    async def reconcile(ctx: ToolContext, args: Any, started: Any) -> Any:
        texts.append(started["call_id"])
        return known

    harness.offer(tool("act", lambda ctx, args: call_ids.append(ctx.call_id) or {"ok": True}, reconcile=reconcile))
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server, toolsets=frozenset({"x"})).begin()
    await orphan.say("", calls=[Call("act", {}, id="c1")])
    await orphan.start(Call("act", {}, id="c1"), "effect")
    events = await orphan.taken_up()
    assert (texts, len(call_ids)) == (["c1"], calls)
    [finished] = of(events, "tool.finished")
    assert (finished["status"], finished["repeated"]) == (status, repeated)


async def test_resume_applies_recorded_interrupt(harness: Harness, server: ModelServer) -> None:
    orphan = await OrphanedRun(harness, server).begin()
    await orphan.ask()
    await orphan.leave_text("Once")
    stop = {"control_id": "x", "control": "cancel", "data": {"reason": "stop"}, "by": "user", "surface": "http"}
    await orphan.add(orphan.event("control.received", **stop))
    events = await orphan.taken_up()
    assert (events[-1]["type"], events[-1]["by"], events[-1]["reason"]) == ("run.cancelled", "user", "stop")
    assert await rows_of(harness) == [("user", "do it"), ("assistant", "Once")]
    assert server.requests == []


# ---- questions


def asking_tool(granted: list[bool]) -> Any:
    async def act(ctx: ToolContext, args: Any) -> Any:
        granted.append((await ctx.asking.approve(ApprovalRequest(ctx.call_id, "command", "rm", "why not"))).allowed)
        return {"ok": granted[-1]}

    return tool("act", act, effect="read")


async def test_resume_keeps_open_approval_answerable(harness: Harness, server: ModelServer) -> None:
    granted: list[bool] = []
    harness.offer(asking_tool(granted))
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server, toolsets=frozenset({"x"})).begin()
    await orphan.say("", calls=[Call("act", {}, id="c1")])
    await orphan.start(Call("act", {}, id="c1"), "read")
    await orphan.add(orphan.event("approval.requested", approval_id="apr_1", call_id="c1", expires_at=orphan.ts + 3600))
    assert await harness.engine.resume_all() == [orphan.spec.run_id]
    async for event in harness.engine.subscribe(orphan.spec.run_id, MEANWHILE):
        if event.type == "approval.requested":
            assert (event.data["approval_id"], event.data["expires_at"]) == ("apr_1", orphan.ts + 3600)
            answer = Control("approve", {"id": "apr_1", "choice": "once"})
            assert await harness.engine.control(orphan.spec.run_id, answer) == "applied"
    assert granted == [True]


async def test_resume_keeps_expired_questions_expired(harness: Harness, server: ModelServer) -> None:
    granted: list[bool] = []
    answers: list[str | None] = []

    async def question(ctx: ToolContext, args: Any) -> Any:
        answers.append(await ctx.asking.clarify(ctx.call_id, "Which?", []))
        return {"ok": True}

    harness.offer(asking_tool(granted), tool("question", question, effect="read"))
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server, toolsets=frozenset({"x"})).begin()
    calls = [Call("act", {}, id="c1"), Call("question", {}, id="c2")]
    await orphan.say("", calls=calls)
    for call in calls:
        await orphan.start(call, "read")
    await orphan.add(orphan.event("approval.requested", approval_id="apr_1", call_id="c1", expires_at=orphan.ts - 5))
    await orphan.add(orphan.event("clarify.requested", request_id="clr_1", call_id="c2", expires_at=orphan.ts - 5))
    async with asyncio.timeout(DEADLINE_S):
        events = await orphan.taken_up()
    assert (granted, answers) == ([False], [None])
    assert [(e["approval_id"], e["choice"], e["by"]) for e in of(events, "approval.resolved")] == [
        ("apr_1", "deny", "timeout")
    ]
    assert [(e["request_id"], e["answered"], e["by"]) for e in of(events, "clarify.resolved")] == [
        ("clr_1", False, "timeout")
    ]
    assert len(of(events, "approval.requested", "clarify.requested")) == 2, "they were asked again"


async def test_resume_does_not_repeat_granted_approval(harness: Harness, server: ModelServer) -> None:
    granted: list[bool] = []
    harness.offer(asking_tool(granted))
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server, toolsets=frozenset({"x"})).begin()
    await orphan.say("", calls=[Call("act", {}, id="c1")])
    await orphan.start(Call("act", {}, id="c1"), "read")
    await orphan.add(orphan.event("approval.requested", approval_id="apr_1", call_id="c1", expires_at=orphan.ts + 3600))
    await orphan.add(orphan.event("approval.resolved", approval_id="apr_1", choice="once", by="user"))
    events = await orphan.taken_up()
    assert granted == [True] and len(of(events, "approval.requested")) == 1


async def test_resume_resolves_question_of_finished_call(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("act"))
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server, toolsets=frozenset({"x"})).begin()
    await orphan.say("", calls=[Call("act", {}, id="c1")])
    await orphan.start(Call("act", {}, id="c1"), "effect")
    await orphan.add(
        orphan.event("approval.requested", approval_id="apr_1", call_id="c1.1", expires_at=orphan.ts + 3600)
    )
    await orphan.add(orphan.event("clarify.requested", request_id="clr_1", call_id="c1.2", expires_at=orphan.ts + 3600))
    events = await orphan.taken_up()
    assert [(e["approval_id"], e["choice"], e["by"]) for e in of(events, "approval.resolved")] == [
        ("apr_1", "deny", "interrupt")
    ]
    assert [(e["request_id"], e["answered"], e["by"]) for e in of(events, "clarify.resolved")] == [
        ("clr_1", False, "interrupt")
    ]


async def test_resume_applies_recorded_answer(harness: Harness, server: ModelServer) -> None:
    granted: list[bool] = []
    harness.offer(asking_tool(granted))
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server, toolsets=frozenset({"x"})).begin()
    await orphan.say("", calls=[Call("act", {}, id="c1")])
    await orphan.start(Call("act", {}, id="c1"), "read")
    await orphan.add(orphan.event("approval.requested", approval_id="apr_1", call_id="c1", expires_at=orphan.ts + 3600))
    data = {"control_id": "x", "control": "approve", "data": {"id": "apr_1", "choice": "once"}}
    await orphan.add(orphan.event("control.received", **data, by="user", surface="http"))
    await orphan.taken_up()
    assert granted == [True]


async def test_resume_keeps_steer_text(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("act", **reading()))
    server.script = [Reply(tool_calls=[Call("act", {}, id="c9")]), Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server, toolsets=frozenset({"x"})).begin()
    steer = {"control_id": "s1", "control": "steer", "data": {"text": "mind the gap"}, "by": "user", "surface": ""}
    await orphan.add(orphan.event("control.received", **steer))
    events = await orphan.taken_up()
    assert of(events, "steer.applied")[0]["steer_ids"] == ["s1"]
    assert "mind the gap" in json.dumps(server.requests[1].body)


# ---- what is not gone on with


async def test_resume_closes_on_detach_cancel_run_with_partial_text(harness: Harness, server: ModelServer) -> None:
    orphan = await OrphanedRun(harness, server, on_detach="cancel").begin()
    await orphan.ask()
    await orphan.leave_text("Once upon")
    events = await orphan.taken_up()
    assert (events[-1]["type"], events[-1]["failure"], events[-1]["code"]) == ("run.failed",) + (
        "server_restarted",
    ) * 2
    assert await rows_of(harness) == [("user", "do it"), ("assistant", "Once upon")]
    assert server.requests == []


@pytest.mark.parametrize("end", ["run.failed", "run.cancelled"])
async def test_resume_closes_run_with_complete_answer(harness: Harness, server: ModelServer, end: str) -> None:
    orphan = await OrphanedRun(harness, server, on_detach="cancel").begin()
    await orphan.say("Done.")
    if end == "run.cancelled":
        stop = {"control_id": "x", "control": "cancel", "data": {"reason": "stop"}, "by": "user", "surface": "http"}
        await orphan.add(orphan.event("control.received", **stop))
    events = await orphan.taken_up()
    [_, answer] = await harness.rows(SESSION)
    assert (events[-1]["type"], events[-1]["partial_row"], events[-1]["text_length"]) == (end, answer.id, 5)
    assert (answer.content, answer.synthetic) == ("Done.", False) and server.requests == []


async def test_resume_closes_too_old_run(harness: Harness, server: ModelServer) -> None:
    orphan = OrphanedRun(harness, server)
    orphan.ts -= 3700
    await orphan.begin()
    events = await orphan.taken_up()
    assert events[-1]["failure"] == "server_restarted"
    [user, closing] = await harness.rows(SESSION)
    assert (user.role, closing.role, closing.synthetic) == ("user", "assistant", True)


@pytest.mark.parametrize(("progress", "end"), [(False, "run.failed"), (True, "run.completed")])
async def test_resume_gives_up_crash_loop(harness: Harness, server: ModelServer, progress: bool, end: str) -> None:
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server).begin()
    for number in range(3):
        if progress and number == 2:
            await orphan.say("", calls=[Call("act", {}, id="c1")])
            await orphan.finish(Call("act", {}, id="c1"), "{}")
        await orphan.add(orphan.event("run.resumed", reason="crash", cut={}, repeated=[], unknown=[]))
    events = await orphan.taken_up()
    assert events[-1]["type"] == end
    assert end == "run.completed" or events[-1]["failure"] == "crash_loop"


async def test_closed_run_has_results_for_all_tool_calls(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("act"))
    orphan = await OrphanedRun(harness, server, toolsets=frozenset({"x"}), on_detach="cancel").begin()
    await orphan.say("", calls=[Call("act", {"a": "1"}, id="c1"), Call("act", {"a": "2"}, id="c2")])
    await orphan.start(Call("act", {}, id="c1"), "effect")
    events = await orphan.taken_up()
    assert [(e["call_id"], e["status"]) for e in of(events, "tool.finished")] == [
        ("c1", "unknown"),
        ("c2", "interrupted"),
    ]
    assert [role for role, _ in await rows_of(harness)] == ["user", "assistant", "tool", "tool", "assistant"]


async def test_resume_closes_run_that_was_never_started(harness: Harness, server: ModelServer) -> None:
    orphan = OrphanedRun(harness, server)
    orphan.spec = orphan.spec.replace(user_message="")
    await harness.app.store.runs.create(orphan.spec)
    assert await harness.engine.resume_all() == [], "it may be about to begin"
    await harness.app.store.sessions.engine.submit_write(lambda tx: tx.execute("UPDATE runs SET created_at = 1"))
    assert await harness.engine.resume_all() == [orphan.spec.run_id]
    record = await harness.engine.get(orphan.spec.run_id)
    assert record is not None and (record.state.status, record.state.failure) == ("failed", "server_restarted")


# ---- who takes it up


async def test_resume_requeues_queued_run(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    orphan = OrphanedRun(harness, server)
    orphan.spec = orphan.spec.replace(user_message="")
    await harness.app.store.runs.create(orphan.spec)
    await orphan.add(orphan.event("run.queued", session_id=SESSION, source="api_server", position=0))
    assert await harness.engine.resume_all() == [], "its process is alive and waits with it"
    dead_holder = f"{host_of(this_process())}:{2**22 + 1}:1.00"
    await harness.app.store.sessions.engine.submit_write(
        lambda tx: tx.execute("UPDATE runs SET holder = ?", (dead_holder,))
    )
    events = await orphan.taken_up()
    assert events[-1]["type"] == "run.completed" and of(events, "run.resumed") == []


async def test_resume_requeues_queued_run_of_a_server_on_another_host(harness: Harness, server: ModelServer) -> None:
    """A container that was made anew, or a database that was moved: no other host serves it."""
    server.script = [Reply(text="Done.")]
    orphan = OrphanedRun(harness, server)
    orphan.spec = orphan.spec.replace(user_message="")
    await harness.app.store.runs.create(orphan.spec)
    await orphan.add(orphan.event("run.queued", session_id=SESSION, source="api_server", position=0))
    statement = "UPDATE runs SET holder = 'elsewhere:7:1.00', created_at = created_at - 60"
    await harness.app.store.sessions.engine.submit_write(lambda tx: tx.execute(statement))
    assert (await orphan.taken_up())[-1]["type"] == "run.completed"


async def test_resume_queues_unstarted_run_behind_session_holder(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text=["Once ", "upon"], gap_s=600), Reply(text="Done.")]
    other = await harness.begin(harness.spec(server, persist=True, session_id=SESSION))
    orphan = OrphanedRun(harness, server)
    await harness.app.store.runs.create(orphan.spec)
    dead_holder = f"{host_of(this_process())}:{2**22 + 1}:1.00"
    statement = "UPDATE runs SET holder = ? WHERE run_id = ?"
    await harness.app.store.sessions.engine.submit_write(
        lambda tx: tx.execute(statement, (dead_holder, orphan.spec.run_id))
    )
    assert await harness.engine.resume_all() == [orphan.spec.run_id]
    await other.control("cancel")
    events = await orphan.log()
    assert [event["type"] for event in events[:2]] == ["run.queued", "run.started"]
    assert events[-1]["type"] == "run.completed"
    assert ("user", orphan.spec.user_message) in await rows_of(harness)


async def test_resume_with_slow_lease_store(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server).begin()
    leases = harness.app.store.leases
    acquire = leases.acquire

    async def slowly(*args: Any) -> Any:
        await asyncio.sleep(0.3)  # longer than those who want a lease wait before they ask again
        return await acquire(*args)

    monkeypatch.setattr(leases, "acquire", slowly, raising=False)
    assert (await orphan.taken_up())[-1]["type"] == "run.completed"


async def test_reader_sees_end_that_arrives_during_lookup(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan = await OrphanedRun(harness, server).begin()
    runs = harness.app.store.runs
    carrier = runs.carrier

    async def end_meanwhile(run_id: str) -> Any:
        monkeypatch.setattr(runs, "carrier", carrier)
        await orphan.add(orphan.event("run.cancelled", by="user", reason="stop", partial_row=None, usage={}))
        return await carrier(run_id)

    monkeypatch.setattr(runs, "carrier", end_meanwhile, raising=False)
    types = [event.type async for event in harness.engine.log.subscribe(orphan.spec.run_id, runs)]
    assert types == ["run.started", "run.cancelled"]


async def test_resume_after_shutdown(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server).begin()
    await orphan.add(orphan.event("run.interrupted"))
    assert await harness.engine.resume_all() == [orphan.spec.run_id]
    events = [event async for event in harness.engine.subscribe(orphan.spec.run_id, orphan.seq)]
    assert events[0].data["reason"] == "shutdown" and events[-1].type == "run.completed"


async def test_resume_skips_run_with_leased_session(harness: Harness, server: ModelServer) -> None:
    orphan = await OrphanedRun(harness, server).begin()
    token = await harness.app.store.leases.acquire(f"session:{SESSION}", "another process", 3600)
    assert await harness.engine.resume_all() == []
    await harness.app.store.leases.release(f"session:{SESSION}", token)
    server.script = [Reply(text="Done.")]
    assert (await orphan.taken_up())[-1]["type"] == "run.completed"


async def test_next_turn_waits_for_resumed_run(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="First."), Reply(text="Second.")]
    orphan = await OrphanedRun(harness, server).begin()
    run = await harness.run(server, "and now?", persist=True, session_id=SESSION)
    assert run.result["completed"] is True
    texts = [content for _, content in await rows_of(harness)]
    assert texts == ["do it", "First.", "and now?", "Second."]
    assert (await orphan.log())[-1]["type"] == "run.completed"


async def test_control_for_run_of_other_process_is_stored(harness: Harness, server: ModelServer) -> None:
    orphan = await OrphanedRun(harness, server).begin()
    assert (
        await harness.engine.control(orphan.spec.run_id, Control("steer", {"text": "x"}, control_id="s")) == "applied"
    )
    assert await harness.app.store.runs.controlled([orphan.spec.run_id]) == [orphan.spec.run_id]
    assert await harness.engine.control("run_unknown", Control("interrupt")) == "unknown"


# ---- a real end of a process

PROGRAM = """
import asyncio, sys
from pathlib import Path
from hermes.settings import config
from hermes.app import App
from hermes.core.home import Home
from hermes.core.spec import RouteChoice, RunSpec
from hermes.tools.framework.registry import Registry, ToolDef
from dataclasses import replace

home, url, count = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

async def act(ctx, args):
    with count.open("a") as file:
        file.write(ctx.call_id + "\\n")
    await asyncio.sleep(0.05)  # so that the process is sometimes killed here
    return {"ok": True}

async def main():
    app = App(Home(home), config.load(Home(home)))
    tools = Registry([ToolDef(name="act", description="Acts.", toolset="x", parameters={"type": "object", "properties": {}}, run=act)])
    app.services = replace(app.services, registry=lambda: tools, jitter=lambda: 0.0)
    if len(sys.argv) > 4:
        route = RouteChoice(model="m", base_url=url + "/v1", api_mode="chat_completions")
        spec = RunSpec("do it", "the-session", run_id=sys.argv[4], route=route, toolsets=frozenset({"x"}))
        await app.engine.run(spec)
    else:
        app.engine.start_background_tasks()
        for record in await app.store.runs.list():
            async for event in app.engine.subscribe(record.spec.run_id):
                pass
    await app.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("after_s", [0.0, 0.3, *(pytest.param(s, marks=pytest.mark.long) for s in (0.15, 0.45, 0.6))])
async def test_kill_at_any_moment_leaves_resumable_run(
    server: ModelServer, tmp_path: Path, home_folder: Path, after_s: float
) -> None:
    steps = [
        Reply(text=["Let ", "me ", "see."], tool_calls=[Call("act", {}, id=f"c{n}")], gap_s=0.02) for n in range(3)
    ]

    def answer(request: Any) -> Reply:
        tool_results = sum(turn.role == "tool" for turn in request.turns)
        return steps[tool_results] if tool_results < 3 else Reply(text=["All ", "is ", "done."], gap_s=0.03)

    server.handler = answer
    home_folder.mkdir(mode=0o700)
    (home_folder / "config.yaml").write_text("auxiliary: {title_generation: {enabled: false}}\n")
    counted = tmp_path / "counted"
    counted.touch()
    command = [sys.executable, "-c", PROGRAM, str(home_folder), server.url, str(counted)]
    first = subprocess.Popen([*command, "run_killed"])
    try:
        await server.until(lambda: bool(server.requests))
        await asyncio.sleep(after_s)  # whatever it has come to by then: what follows holds at every moment
    finally:
        first.send_signal(signal.SIGKILL)
        await asyncio.to_thread(first.wait)
    second = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, stderr = await asyncio.wait_for(second.communicate(), 2 * DEADLINE_S)
    assert second.returncode == 0, stderr.decode()
    harness = Harness(Home(home_folder), {})
    try:
        events = [event.as_dict() async for event in harness.engine.subscribe("run_killed")]
        rows = await harness.rows(SESSION)
    finally:
        await harness.close()
    check_laws(events)
    assert events[-1]["type"] == "run.completed"
    calls = counted.read_text().split()
    assert len(calls) == len(set(calls)), "a call with effects was made twice"
    statuses = {e["call_id"]: e["status"] for e in events if e["type"] == "tool.finished"}
    assert set(statuses) == {"c0", "c1", "c2"} and set(statuses.values()) <= {"ok", "unknown"}
    assert [row.role for row in rows] == ["user", *["assistant", "tool"] * 3, "assistant"]
    assert os.stat(home_folder / "state.db").st_mode & 0o777 == 0o600


async def test_background_task_resumes_interrupted_runs(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server).begin()
    await harness.app.store.idempotency.claim("s", "k", "f", run_id="run_never_made")
    harness.app.serve()
    events = await orphan.log()
    assert events[-1]["type"] == "run.completed"
    await until(lambda: harness.app.store.idempotency.claim("s", "k", "f"), lambda claim: claim.state == "new")
    await until(lambda: harness.app.store.sessions.get_meta("swept_at"))


@pytest.mark.parametrize("reads", ["log", "status"])
async def test_subscribing_to_orphaned_run_resumes_it(harness: Harness, server: ModelServer, reads: str) -> None:
    server.script = [Reply(text="Done.")]
    harness.engine.start_background_tasks()
    await harness.engine.resume_all()
    orphan = await OrphanedRun(harness, server).begin()
    if reads == "status":
        await until(lambda: harness.engine.get(orphan.spec.run_id), lambda record: record and record.state.ended)
    async with asyncio.timeout(DEADLINE_S):
        events = await orphan.log()
    assert events[-1]["type"] == "run.completed"


async def test_concurrent_readers_resume_run_once(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script = [Reply(text="Done."), Reply(text="Done twice.")]
    harness.engine.start_background_tasks()
    await harness.engine.resume_all()
    orphan, runs = OrphanedRun(harness, server), harness.app.store.runs
    await runs.create(orphan.spec)
    statement = "UPDATE runs SET holder = ?, created_at = created_at - 60 WHERE run_id = ?"
    dead_holder = f"{host_of(this_process())}:{2**22 + 1}:1.00"
    await harness.app.store.sessions.engine.submit_write(
        lambda tx: tx.execute(statement, (dead_holder, orphan.spec.run_id))
    )
    durable, at_work, go_on = runs.durable, asyncio.Event(), asyncio.Event()

    async def slowly(run_id: str) -> Any:
        at_work.set()
        await go_on.wait()
        return await durable(run_id)

    monkeypatch.setattr(runs, "durable", slowly, raising=False)
    first = asyncio.ensure_future(harness.engine.get(orphan.spec.run_id))
    await at_work.wait()
    async with asyncio.timeout(DEADLINE_S):
        await harness.engine.get(orphan.spec.run_id)
    go_on.set()
    await first
    events = await orphan.log()
    assert [event["type"] for event in events].count("run.started") == 1
    assert len(server.requests) == 1


async def test_startup_removes_leases_of_dead_processes(harness: Harness) -> None:
    store, dead_holder = harness.app.store, f"{host_of(this_process())}:{2**22 + 1}:1.00"
    await store.leases.acquire("session:of-a-dead-process", dead_holder, 3600.0)
    await store.leases.acquire("session:of-another-host", "elsewhere:1:1.00", 3600.0)
    harness.app.serve()
    await until(lambda: _lease_names(harness), lambda names: names == ["session:of-another-host"])


async def _lease_names(harness: Harness) -> list[str]:
    read = harness.app.store.sessions.engine.submit_write
    return [row["name"] for row in await read(lambda tx: tx.rows("SELECT name FROM leases WHERE name <> ''"))]


async def test_stored_control_of_other_process_is_applied(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes.runs.controller.CONTROL_POLL_S", 0.02)
    server.script = [Reply(text=["a", "b"], gap_s=600)]
    harness.engine.start_background_tasks()
    running = await harness.begin(harness.spec(server, persist=True, session_id=SESSION))
    await running.wait_for("text.delta")
    assert await harness.app.store.runs.add_control(running.run_id, Control("cancel", {"reason": "stop"}))
    run = await running.end()
    assert run.final["type"] == "run.cancelled"
