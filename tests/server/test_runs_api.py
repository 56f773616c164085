"""Runs over HTTP: submitted, followed live and again, listed, stopped, steered, answered and forgotten."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from hermes.core.events import Event
from hermes.core.spec import RunSpec
from hermes.store.base import StoreUnreachable
from hermes.tools.framework.questions import ApprovalRequest
from hermes.tools.framework.registry import Registry, ToolContext, ToolDef
from support.model_server import Call, Reply
from support.waiting import DEADLINE_S, idle, until

from .clients import (
    Frame,
    HeldModel,
    Json,
    Stream,
    read_error,
    read_json,
    sent_messages,
    stream_of,
    system_of,
    tool_names,
)
from .conftest import Api, Start

RUNS = "/v1/runs"
FIELDS = {
    "object", "run_id", "kind", "status", "created_at", "started_at", "updated_at", "finished_at", "session_id",
    "response_id", "model", "last_event", "last_seq", "input", "output", "completed", "partial", "interrupted", "error",
    "error_code", "pending_approvals", "pending_question", "usage", "metadata",
}  # fmt: skip
LIVE_ONLY = {"tool.output"}
TODO = {"todos": [{"id": "1", "content": "milk", "status": "pending"}]}


async def submitted(api: Api, text: Any = "hi", **fields: Any) -> Json:
    async with api.post(RUNS, {"input": text, **fields}) as response:
        return await read_json(response, 202)


async def get_json(api: Api, path: str, **more: Any) -> Json:
    async with api.get(path, **more) as response:
        return await read_json(response)


async def wait_for_end(api: Api, run_id: str) -> Json:
    run: Json = await until(lambda: get_json(api, f"{RUNS}/{run_id}"), lambda run: run["finished_at"])
    return run


async def run_to_end(api: Api, text: Any = "hi", **fields: Any) -> Json:
    return await wait_for_end(api, (await submitted(api, text, **fields))["run_id"])


async def events(api: Api, run_id: str, query: str = "", **headers: str) -> list[Frame]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with api.get(f"{RUNS}/{run_id}/events{query}", headers=named) as response:
        assert response.headers["X-Hermes-Run-Id"] == run_id
        text = await response.text()
        assert text.endswith(": stream closed\n\n")
        return await stream_of(response)


def names(frames: list[Frame]) -> list[str]:
    """The events of a stream, one of each that follow each other."""
    events = [str(item.data["event"]) for item in frames]
    return [name for at, name in enumerate(events) if at == 0 or events[at - 1] != name]


def event_data(frames: list[Frame], name: str) -> Json:
    [item] = [item.data for item in frames if item.data["event"] == name]
    return dict(item)


def offer(api: Api, name: str, run: Any) -> None:
    """A tool of this test's."""
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    tool = ToolDef(name=name, description=name, toolset="todo", parameters=parameters, run=run)
    registry = Registry([tool])
    api.app.services = replace(api.app.services, registry=lambda: registry)


def offer_dangerous(api: Api) -> None:
    async def danger(ctx: ToolContext, args: Json) -> Json:
        leave = ApprovalRequest(ctx.call_id, "command", "rm -r x", "It deletes.", ("rm",), ("once", "session", "deny"))
        allowed = (await ctx.asking.approve(leave)).allowed
        return {"done": allowed}

    offer(api, "danger", danger)


# ---- submitting


async def test_run_submit_and_result(api: Api) -> None:
    api.model.script = [Reply(text="Saved.", usage={"input": 900, "output": 40, "cached": 600})]
    body = {"input": "save it", "metadata": {"a": "b"}, "instructions": "In short.", "colour": "red"}
    async with api.post(RUNS, body) as response:
        payload = await read_json(response, 202)
        assert response.headers["Location"] == f"{RUNS}/{payload['run_id']}"
        assert response.headers["X-Hermes-Run-Id"] == response.headers["X-Hermes-Session-Id"] == payload["run_id"]
        assert response.headers["X-Hermes-Ignored"] == "colour"
        assert response.headers["X-Hermes-History"] == "stored; messages=0; ignored=0"
    run_id = payload["run_id"]
    assert payload == {
        "run_id": run_id, "status": "started", "object": "hermes.run", "session_id": run_id,
        "created_at": payload["created_at"],
    }  # fmt: skip
    run = await wait_for_end(api, run_id)
    assert set(run) == FIELDS and run["input"] == "save it"
    assert [run["input"] for run in (await get_json(api, RUNS))["data"]] == ["save it"]
    outcome = {name: run[name] for name in ("status", "output", "completed", "partial", "interrupted", "error_code")}
    assert outcome == {
        "status": "completed", "output": "Saved.", "completed": True, "partial": False, "interrupted": False,
        "error_code": None,
    }  # fmt: skip
    assert run["created_at"] == payload["created_at"] <= run["started_at"] <= run["finished_at"] == run["updated_at"]
    assert (run["kind"], run["model"], run["metadata"]) == ("run", "hermes-agent", {"a": "b"})
    assert run["last_event"] == "run.completed" and run["pending_approvals"] == [] and run["pending_question"] is None
    assert run["usage"] == {
        "input_tokens": 900, "output_tokens": 40, "total_tokens": 940,
        "input_tokens_details": {"cached_tokens": 600, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    assert "In short." in system_of(api.model.requests[0])


async def test_run_in_session_uses_history(api: Api) -> None:
    api.model.script = [Reply(text="One."), Reply(text="Two."), Reply(text="Three.")]
    before = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "x"}]
    before += [{"role": "assistant", "content": "y"}]
    first = await submitted(api, "first", session_id="kitchen", conversation_history=before)
    assert first["session_id"] == "kitchen"
    await wait_for_end(api, first["run_id"])
    assert sent_messages(api.model.requests[0]) == [("user", "x"), ("assistant", "y"), ("user", "first")]
    assert "Be kind." in system_of(api.model.requests[0])
    body = {"input": "second", "conversation_history": before}
    async with api.post(RUNS, body, headers={"X-Hermes-Session-Id": "kitchen"}) as response:
        second = await read_json(response, 202)
        assert response.headers["X-Hermes-History"] == "stored; messages=4; ignored=2"
    await wait_for_end(api, second["run_id"])
    assert [text for _, text in sent_messages(api.model.requests[1])] == ["x", "y", "first", "One.", "second"]
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    await run_to_end(api, items)
    assert [text for _, text in sent_messages(api.model.requests[2])] == ["a", "b", "c"]


async def test_run_continues_stored_response(api: Api) -> None:
    api.model.script = [Reply(text="Blue."), Reply(text="Because.")]
    async with api.post("/v1/responses", {"input": "What colour?"}) as response:
        response_id = (await read_json(response))["id"]
    run = await run_to_end(api, "Why?", previous_response_id=response_id)
    assert run["output"] == "Because."
    assert [text for _, text in sent_messages(api.model.requests[1])] == ["What colour?", "Blue.", "Why?"]
    async with api.post(RUNS, {"input": "x", "previous_response_id": response_id, "session_id": "other"}) as response:
        await read_error(response, 400, "session_conflict", "previous_response_id")
    async with api.post(RUNS, {"input": "x", "previous_response_id": "resp_none"}) as response:
        await read_error(response, 404, "previous_response_not_found", "previous_response_id")


async def test_run_toolsets_can_be_narrowed(api: Api) -> None:
    api.model.script = [Reply(text="x", continues=False)] * 4
    await run_to_end(api)
    await run_to_end(api, toolsets=["todo", "memory"])
    await run_to_end(api, toolsets=[])
    async with api.post(
        RUNS, {"input": "x", "toolsets": ["todo"]}, headers={"X-Hermes-Toolsets": "memory"}
    ) as response:
        await wait_for_end(api, (await read_json(response, 202))["run_id"])
    by_default, *narrowed = [tool_names(request) for request in api.model.requests]
    assert {"clarify", "memory", "read_file", "terminal", "todo"} < set(by_default)
    assert narrowed == [["memory", "todo"], [], []]


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "missing_required_parameter", "input"),
        ({"input": 5}, 400, "invalid_type", "input"),
        ({"input": []}, 400, "missing_user_message", "input"),
        ({"input": "x", "tools": []}, 400, "unsupported_parameter", "tools"),
        ({"input": "x", "toolsets": ["none such"]}, 400, "invalid_value", "toolsets"),
        ({"input": "x", "session_id": "a/b"}, 400, "invalid_session_id", "session_id"),
        ({"input": "x", "session_id": "theirs"}, 404, "session_not_found", None),
        ({"input": "x", "temperature": 9}, 400, "invalid_value", "temperature"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            400,
            "unsupported_value",
            "input",
        ),
    ],
)
async def test_invalid_run_is_rejected(api: Api, body: Json, status: int, code: str, param: str) -> None:
    api.app.store.blocking.sessions.create_session("theirs", "api_server", owner="tablet")
    async with api.post(RUNS, body) as response:
        await read_error(response, status, code, param)
    assert (await get_json(api, RUNS))["total"] == 0


async def test_session_id_in_body_and_header_must_agree(api: Api) -> None:
    api.model.script = [Reply(text="x")]
    async with api.post(RUNS, {"input": "x", "session_id": "a"}, headers={"X-Hermes-Session-Id": "b"}) as response:
        await read_error(response, 400, "session_conflict", "session_id")
    async with api.post(RUNS, {"input": "x", "session_id": "a"}, headers={"X-Hermes-Session-Id": "a"}) as response:
        await wait_for_end(api, (await read_json(response, 202))["run_id"])


async def test_failed_run_reports_reason(api: Api) -> None:
    api.model.script = [Reply(status=401, error="bad key"), Reply(text="Half an ans", finish="length")]
    run = await run_to_end(api)
    assert (run["status"], run["error_code"], run["output"]) == ("failed", "provider_auth_failed", None)
    assert run["error"] and not run["completed"] and not run["partial"]
    failed = (await events(api, run["run_id"]))[-1].data
    assert (failed["event"], failed["error_code"], failed["error"]) == ("run.failed", run["error_code"], run["error"])
    run = await run_to_end(api, max_output_tokens=5)
    assert (run["status"], run["error_code"], run["output"]) == ("failed", "output_truncated", "Half an ans")
    assert run["partial"] is True
    failed = (await events(api, run["run_id"]))[-1].data
    assert (failed["output"], failed["partial"]) == ("Half an ans", True)


async def test_run_waits_for_its_session(start: Start) -> None:
    held_model = HeldModel(Reply(text="One."), Reply(text="Two."))
    await held_model.start()
    api = await start(settings=held_model.settings)
    first = (await submitted(api, session_id="s"))["run_id"]
    await held_model.wait_for_request()
    second = (await submitted(api, session_id="s"))["run_id"]
    assert (await get_json(api, f"{RUNS}/{second}"))["status"] == "queued"
    assert {run["run_id"] for run in (await get_json(api, f"{RUNS}?status=queued"))["data"]} == {second}
    held_model.release_all()
    assert [(await wait_for_end(api, run_id))["output"] for run_id in (first, second)] == ["One.", "Two."]
    queued = (await events(api, second))[0].data
    assert (queued["event"], queued["session_id"], queued["position"]) == ("run.queued", "s", 1)
    await held_model.stop()


# ---- following


async def test_run_events_are_same_live_and_replayed(start: Start) -> None:
    held_model = HeldModel(
        Reply(text=["Let me", " see."], reasoning=["Hm", "m."], tool_calls=[Call("todo", TODO, id="call_1")]),
        Reply(text=["All", " done."]),
    )
    await held_model.start()
    api = await start(settings=held_model.settings)
    run_id = (await submitted(api, "shopping", session_id="s"))["run_id"]
    headers = {"X_Hermes_Reasoning": "on"}
    live = [asyncio.create_task(events(api, run_id, **headers)) for _ in range(2)]
    await held_model.wait_for_request()
    for _ in range(8):
        held_model.release()
        await idle()
    held_model.release_all()
    live_events = await live[0]
    assert live_events == await live[1] == await events(api, run_id, **headers)
    assert names(live_events) == [
        "run.queued", "run.started", "model.started", "reasoning.delta", "message.delta", "reasoning.available",
        "message.completed", "usage.updated", "tool.started", "tool.completed", "model.started", "message.delta",
        "message.completed", "usage.updated", "run.completed",
    ]  # fmt: skip
    model_events = [item.data for item in live_events if item.data["event"] == "model.started"]
    assert [(started["iteration"], started["attempt"], started["model"]) for started in model_events] == [
        (1, 1, "test-model"),
        (2, 1, "test-model"),
    ]
    for item in live_events:
        assert item.event is None and item.id == str(item.data["seq"])
        assert list(item.data)[:4] == ["event", "run_id", "seq", "timestamp"]
        assert item.data["run_id"] == run_id
    numbers = [item.data["seq"] for item in live_events]
    assert numbers == sorted(set(numbers))

    started = event_data(live_events, "run.started")
    assert (started["kind"], started["session_id"], started["model"]) == ("run", "s", "test-model")
    assert event_data(live_events, "reasoning.available")["text"] == "Hmm."
    texts: dict[str, str] = {}
    for item in live_events:
        if item.data["event"] == "message.delta":
            known = texts.get(item.data["message_id"], "")
            assert item.data["offset"] == len(known)
            texts[item.data["message_id"]] = known + item.data["delta"]
    completed = [item.data for item in live_events if item.data["event"] == "message.completed"]
    assert {message["message_id"]: message["content"] for message in completed} == texts
    assert list(texts) == [started["message_id"] for started in model_events]
    assert [message["phase"] for message in completed] == ["commentary", "final_answer"]
    event, finish = event_data(live_events, "tool.started"), event_data(live_events, "tool.completed")
    assert (event["tool"], event["tool_call_id"], event["arguments"], event["iteration"]) == ("todo", "call_1", TODO, 1)
    assert (finish["tool"], finish["status"], finish["error"]) == ("todo", "ok", False)
    assert len(finish["result"]) == finish["result_chars"]
    assert [item.data["usage"]["total_tokens"] for item in live_events if item.data["event"] == "usage.updated"] == [
        15,
        30,
    ]
    final = live_events[-1].data
    assert (final["output"], final["completed"], final["partial"], final["session_id"]) == (
        "All done.",
        True,
        False,
        "s",
    )
    assert final["pending_calls"] == [] and final["usage"]["total_tokens"] == 30

    plain = await events(api, run_id)
    assert plain == [item for item in live_events if not item.data["event"].startswith("reasoning.")]
    for at in (3, 7, len(live_events) - 1):
        seq = live_events[at].data["seq"]
        later = [item for item in live_events if item.data["seq"] > seq]
        assert await events(api, run_id, Last_Event_ID=str(seq), **headers) == later
        assert await events(api, run_id, f"?starting_after={seq}", Last_Event_ID="1", **headers) == later
    named = await events(api, run_id, "?event_names=true")
    assert [item.event for item in named] == [item.data["event"] for item in plain]
    await held_model.stop()


async def test_disconnect_of_events_reader_changes_nothing(start: Start) -> None:
    held_model = HeldModel(Reply(text=["Hel", "lo", "."]))
    await held_model.start()
    api = await start(settings=held_model.settings)
    run_id = (await submitted(api))["run_id"]
    async with api.get(f"{RUNS}/{run_id}/events") as response:
        stream = Stream(response)
        held_model.release(2)
        await stream.until(lambda item: item.data["event"] == "message.delta")
    held_model.release_all()
    assert (await wait_for_end(api, run_id))["output"] == "Hello."
    await held_model.stop()


async def test_events_of_every_turn_can_be_followed(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    async with api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}) as response:
        run_id = response.headers["X-Hermes-Run-Id"]
    run_events = await events(api, run_id)
    assert event_data(run_events, "run.started")["kind"] == "chat" and run_events[-1].data["output"] == "Hello."
    async with api.client.head(f"{api.url}{RUNS}/{run_id}/events") as response:
        assert response.status == 200 and response.headers["Content-Type"] == "text/event-stream"


async def test_client_tool_calls_end_run(api: Api) -> None:
    api.model.script = [Reply(text="I call.", tool_calls=[Call("lamp", {"on": True}, id="call_9")])]
    lamp = {"type": "function", "function": {"name": "lamp", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "light"}], "tools": [lamp]}
    async with api.post("/v1/chat/completions", body, headers={"X-Hermes-Session-Id": "s"}) as response:
        run_id = response.headers["X-Hermes-Run-Id"]
    run_events = await events(api, run_id)
    assert event_data(run_events, "message.completed")["phase"] == "final_answer"
    assert [call["id"] for call in run_events[-1].data["pending_calls"]] == ["call_9"]
    async with api.post(RUNS, {"input": "and?", "session_id": "s"}) as response:
        await read_error(response, 400, "tool_output_missing")


async def test_expired_events_are_gone(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    run = await run_to_end(api)
    api.app.store.blocking.runs.sweep({"": 1000.0}, {"run": 0.0}, 1000, now=run["finished_at"] + 10)
    async with api.get(f"{RUNS}/{run['run_id']}/events") as response:
        await read_error(response, 410, "events_expired")
    assert (await get_json(api, f"{RUNS}/{run['run_id']}"))["output"] == "Hello."


@pytest.mark.parametrize(
    ("query", "header", "param"),
    [
        ("?starting_after=x", "", "starting_after"),
        ("?starting_after=-1", "", "starting_after"),
        ("", "x", "Last-Event-ID"),
    ],
)
async def test_invalid_event_position_is_rejected(api: Api, query: str, header: str, param: str) -> None:
    async with api.get(f"{RUNS}/run_x/events{query}", headers={"Last-Event-ID": header}) as response:
        await read_error(response, 400, "invalid_value", param)


# ---- lists


async def test_run_list_pagination(api: Api) -> None:
    api.model.script = [Reply(text=f"Answer {n}.") for n in range(5)]
    run_ids = [(await run_to_end(api, session_id=f"s{n % 2}"))["run_id"] for n in range(5)]
    pages: list[Json] = []
    cursor = ""
    while True:
        page = await get_json(api, f"{RUNS}?limit=2{cursor}")
        assert page["object"] == "list" and page["total"] == 5
        pages += page["data"]
        assert page["has_more"] == (len(pages) < 5)
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert [run["run_id"] for run in pages] == run_ids[::-1]
    assert [run["output"] for run in pages] == [f"Answer {n}." for n in range(4, -1, -1)]
    assert pages[0] == await get_json(api, f"{RUNS}/{run_ids[-1]}")
    for query, count in (("session_id=s0", 3), ("status=completed", 5), ("status=failed", 0), ("kind=chat", 0)):
        page = await get_json(api, f"{RUNS}?{query}")
        assert (len(page["data"]), page["total"]) == (count, count)


async def test_runs_of_subagents_and_other_owners_are_not_listed(api: Api) -> None:
    runs = api.app.store.blocking.runs
    for run_id, fields in (("run_sub", {"kind": "subagent"}), ("run_theirs", {"owner": "tablet"}), ("run_left", {})):
        spec = RunSpec("x", "s", run_id=run_id, **fields)  # type: ignore[arg-type]
        runs.create(spec)
        kinds = ("run.queued", "run.interrupted")
        runs.append(run_id, None, [Event(run_id, kind, 0, {}, at, 1.0) for at, kind in enumerate(kinds, 1)])
    assert [run["run_id"] for run in (await get_json(api, RUNS))["data"]] == ["run_left"]
    assert [run["run_id"] for run in (await get_json(api, f"{RUNS}?kind=subagent"))["data"]] == ["run_sub"]
    [queued] = (await get_json(api, f"{RUNS}?status=queued"))["data"]
    assert (queued["run_id"], queued["status"]) == ("run_left", "queued"), "one that is to be taken up waits"
    for path in ("", "/events"):
        async with api.get(f"{RUNS}/run_theirs{path}") as response:
            await read_error(response, 404, "run_not_found")
    async with api.post(f"{RUNS}/run_theirs/stop") as response:
        await read_error(response, 404, "run_not_found")


async def test_finished_run_can_be_deleted_and_session_stays(start: Start) -> None:
    held_model = HeldModel(Reply(text="Hello."))
    await held_model.start()
    api = await start(settings=held_model.settings)
    run_id = (await submitted(api))["run_id"]
    await held_model.wait_for_request()
    async with api.delete(f"{RUNS}/{run_id}") as response:
        await read_error(response, 409, "run_active")
    held_model.release_all()
    await wait_for_end(api, run_id)
    async with api.delete(f"{RUNS}/{run_id}") as response:
        assert (await read_json(response))["deleted"] is True
    for method, path in (("get", ""), ("get", "/events"), ("delete", "")):
        async with getattr(api, method)(f"{RUNS}/{run_id}{path}") as response:
            await read_error(response, 404, "run_not_found")
    assert (await get_json(api, f"/api/sessions/{run_id}/messages"))["total"] == 2
    await held_model.stop()


# ---- steering


async def test_run_stop(start: Start) -> None:
    held_model = HeldModel(Reply(text=["Hel", "lo", "."]))
    await held_model.start()
    api = await start(settings=held_model.settings)
    run_id = (await submitted(api))["run_id"]
    async with api.get(f"{RUNS}/{run_id}/events") as response:
        stream = Stream(response)
        held_model.release(2)
        await stream.until(lambda item: item.data["event"] == "message.delta")
        for _ in range(2):
            async with api.post(f"{RUNS}/{run_id}/stop") as stopped:
                if stopped.status == 409:  # it has ended between the two
                    await read_error(stopped, 409, "run_finished")
                else:
                    assert await read_json(stopped) == {"run_id": run_id, "status": "stopping"}
        final = (await stream.rest())[-1].data
    assert (final["event"], final["reason"]) == ("run.cancelled", "stop")
    run = await wait_for_end(api, run_id)
    assert (run["status"], run["interrupted"], run["partial"]) == ("cancelled", True, True)
    assert run["output"] == final["output"] and run["output"].startswith("Hel")
    for path, body in (("stop", None), ("steer", {"text": "x"})):
        async with api.post(f"{RUNS}/{run_id}/{path}", body) as response:
            await read_error(response, 409, "run_finished")
    held_model.release_all()
    await held_model.stop()


async def test_queued_run_stop(start: Start) -> None:
    held_model = HeldModel(Reply(text="One."))
    await held_model.start()
    api = await start(settings=held_model.settings)
    first = (await submitted(api, session_id="s"))["run_id"]
    await held_model.wait_for_request()
    second = (await submitted(api, session_id="s"))["run_id"]
    async with api.post(f"{RUNS}/{second}/stop") as response:
        await read_json(response)
    assert (await wait_for_end(api, second))["status"] == "cancelled"
    held_model.release_all()
    assert (await wait_for_end(api, first))["status"] == "completed"
    await held_model.stop()


@pytest.mark.parametrize("name", ["text", "input"])
async def test_run_steer(api: Api, name: str) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slow(ctx: ToolContext, args: Json) -> Json:
        started.set()
        await go_on.wait()
        return {"ok": True}

    offer(api, "slow", slow)
    api.model.script = [Reply(tool_calls=[Call("slow", id="call_1")]), Reply(text="Aye.")]
    run_id = (await submitted(api))["run_id"]
    await started.wait()
    async with api.post(f"{RUNS}/{run_id}/steer", {name: "Faster, please."}) as response:
        payload = await read_json(response, 202)
    assert payload == {"run_id": run_id, "steer_id": payload["steer_id"], "accepted": True}
    go_on.set()
    await wait_for_end(api, run_id)
    run_events = await events(api, run_id)
    accepted, applied = event_data(run_events, "steer.accepted"), event_data(run_events, "steer.applied")
    assert (accepted["steer_id"], accepted["text"]) == (payload["steer_id"], "Faster, please.")
    assert (applied["steer_ids"], applied["where"]) == ([payload["steer_id"]], "call_1")
    assert "Faster, please." in json.dumps(api.model.requests[1].body)
    for body, code, param in (
        ({}, "missing_required_parameter", "text"),
        ({name: " "}, "invalid_value", name),
        ({name: 5}, "invalid_type", name),
        ({"text": "a", "input": "b"}, "invalid_value", "input"),
    ):
        async with api.post(f"{RUNS}/{run_id}/steer", body) as response:
            await read_error(response, 400, code, param)


async def test_run_approval(api: Api) -> None:
    offer_dangerous(api)
    api.model.script = [Reply(tool_calls=[Call("danger", id="call_1")]), Reply(text="Gone.")]
    run_id = (await submitted(api))["run_id"]
    run = await until(lambda: get_json(api, f"{RUNS}/{run_id}"), lambda run: run["status"] == "waiting_for_approval")
    [asked] = run["pending_approvals"]
    assert (asked["command"], asked["description"], asked["pattern_key"]) == ("rm -r x", "It deletes.", "rm")
    assert asked["choices"] == ["once", "session", "deny"] and asked["allow_permanent"] is False
    path = f"{RUNS}/{run_id}/approval"
    for body, status, code in (
        ({"choice": "perhaps"}, 400, "invalid_approval_choice"),
        ({"choice": "always"}, 400, "invalid_approval_choice"),
        ({"choice": "once", "approval_id": "apr_none"}, 409, "approval_not_pending"),
        ({"choice": "once", "comment": "No."}, 400, "invalid_value"),
        ({"choice": "deny", "comment": " "}, 400, "invalid_value"),
        ({"choice": "deny", "comment": 5}, 400, "invalid_type"),
        ({}, 400, "missing_required_parameter"),
    ):
        async with api.post(path, body) as response:
            await read_error(response, status, code)
    async with api.post(path, {"choice": "approve", "approval_id": asked["approval_id"]}) as response:
        assert await read_json(response) == {
            "object": "hermes.run.approval_response", "run_id": run_id, "choice": "once", "resolved": 1,
        }  # fmt: skip
    await wait_for_end(api, run_id)
    run_events = await events(api, run_id)
    request = event_data(run_events, "approval.request")
    assert {name: request[name] for name in asked} == asked
    event = event_data(run_events, "approval.responded")
    assert (event["choice"], event["by"], event["approval_id"]) == ("once", "user", asked["approval_id"])
    assert json.loads(event_data(run_events, "tool.completed")["result"]) == {"done": True}
    async with api.post(path, {"choice": "once"}) as response:
        await read_error(response, 409, "approval_not_active")


async def test_run_approval_deny_all(api: Api) -> None:
    offer_dangerous(api)
    api.model.script = [Reply(tool_calls=[Call("danger", id="call_1")]), Reply(text="Well then.")]
    run_id = (await submitted(api))["run_id"]
    await until(lambda: get_json(api, f"{RUNS}/{run_id}"), lambda run: run["pending_approvals"])
    async with api.post(f"{RUNS}/{run_id}/approval", {"choice": "deny", "resolve_all": True}) as response:
        assert (await read_json(response))["resolved"] == 1
    assert (await wait_for_end(api, run_id))["output"] == "Well then."


async def test_unattended_run_approval_is_decided_by_rule(api: Api) -> None:
    offer_dangerous(api)
    api.model.script = [Reply(tool_calls=[Call("danger", id="call_1")]), Reply(text="Well then.")]
    async with api.post(RUNS, {"input": "x"}, headers={"X-Hermes-Approvals": "deny"}) as response:
        run_id = (await read_json(response, 202))["run_id"]
    await wait_for_end(api, run_id)
    assert event_data(await events(api, run_id), "approval.responded")["by"] == "rule"


async def test_run_clarify_is_answered_once(api: Api) -> None:
    api.model.script = [Reply(tool_calls=[Call("clarify", {"question": "Which?"}, id="call_1")]), Reply(text="Red.")]
    run_id = (await submitted(api))["run_id"]
    run = await until(lambda: get_json(api, f"{RUNS}/{run_id}"), lambda run: run["pending_question"])
    assert run["status"] == "waiting_for_input" and run["pending_question"]["question"] == "Which?"
    path, request_id = f"{RUNS}/{run_id}/clarify", run["pending_question"]["request_id"]
    async with api.post(path, {"answer": "red", "request_id": "clr_none"}) as response:
        await read_error(response, 409, "clarify_not_pending")
    async with api.post(path, {"answer": ""}) as response:
        await read_error(response, 400, "invalid_value", "answer")
    async with api.post(path, {"answer": "red", "request_id": request_id}) as response:
        assert (await read_json(response))["request_id"] == request_id
    assert (await wait_for_end(api, run_id))["output"] == "Red."
    async with api.post(path, {"answer": "blue"}) as response:
        await read_error(response, 409, "clarify_not_pending")


async def test_stream_whose_store_fails_is_cut_off(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head is out: there is no place for another answer, and no end that could be taken for the run's."""
    api = await start(Reply(text="Hi."))
    run = await run_to_end(api)
    batches = api.app.engine.batches

    async def cut_off(*args: Any) -> AsyncIterator[list[Event]]:
        async for batch in batches(*args):
            yield batch[:1]
            raise StoreUnreachable("PostgreSQL is out of reach.")

    monkeypatch.setattr(api.app.engine, "batches", cut_off)
    async with asyncio.timeout(DEADLINE_S), api.get(f"{RUNS}/{run['run_id']}/events") as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
