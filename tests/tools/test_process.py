"""Processes in the background: looked at, waited for, ended; seen by their session only, and gone with the server."""

from __future__ import annotations

from typing import Any

import pytest

from agent.conftest import MakeHarness
from agent.harness import Harness, Json, product_tasks
from hermes.tools import process as process_tool
from hermes.tools.process import Background, _slice
from support.model_server import Call, ModelServer, Reply
from support.waiting import until

from .commanding import SURELY_S, ToolSession, allowed, descriptors, each_backend, new_mark, running


@pytest.fixture
def tool_session(make_harness: MakeHarness, server: ModelServer) -> ToolSession:
    return allowed(make_harness, server)


async def started(tool_session: ToolSession, command: str, **arguments: Any) -> str:
    answer = await tool_session.sh(command, background=True, **arguments)
    assert answer["status"] == "started" and answer["pid"] > 0
    return str(answer["session_id"])


async def process(tool_session: ToolSession, action: str, session_id: str | None = None, **arguments: Any) -> Json:
    more = {} if session_id is None else {"session_id": session_id}
    return await tool_session.call("process", {"action": action, **more, **arguments})


async def until_said(tool_session: ToolSession, session_id: str, text: str) -> Json:
    """Its state, once it has said that."""
    return await until(
        lambda: process(tool_session, "wait", session_id, timeout=0.02), lambda state: text in state["output"]
    )


@each_backend
async def test_background_process_outlives_turn(make_harness: MakeHarness, server: ModelServer, backend: str) -> None:
    tool_session = allowed(make_harness, server, backend)
    first = await started(tool_session, "echo one; until [ -e go ]; do sleep 0.01; done; echo two; exit 3")
    state = await until_said(tool_session, first, "one")
    assert (state["state"], state["exit_code"], state["output"]) == ("running", None, "one\n")
    assert [process["session_id"] for process in (await process(tool_session, "list"))["processes"]] == [first]
    (tool_session.workspace / "go").touch()
    state = await process(tool_session, "wait", first, timeout=SURELY_S, offset=state["next_offset"])
    assert (state["state"], state["exit_code"], state["output"], state["offset"]) == ("exited", 3, "two\n", 4)
    assert (await process(tool_session, "poll", first))["output"] == "one\ntwo\n"


@each_backend
async def test_killing_background_process_ends_its_children(
    make_harness: MakeHarness, server: ModelServer, backend: str
) -> None:
    tool_session, mark = allowed(make_harness, server, backend), new_mark()
    await tool_session.sh("true")
    before = descriptors()
    process_id = await started(tool_session, f"echo up; (sleep {mark}); true")
    await until_said(tool_session, process_id, "up")
    assert running(mark)
    state = await process(tool_session, "kill", process_id)
    assert (state["state"], running(mark)) == ("killed", [])
    assert (await process(tool_session, "kill", process_id))["state"] == "killed", "once is enough; twice does no harm"
    limited = await started(tool_session, f"sleep {mark}", timeout=0.1)
    assert (await process(tool_session, "wait", limited))["state"] == "timeout"
    assert descriptors() <= before and tool_session.left_over() == []


async def test_background_command_keeps_shell_state_unchanged(tool_session: ToolSession) -> None:
    process_id = await started(tool_session, "cd /; export A=b")
    await process(tool_session, "wait", process_id)
    assert (await tool_session.sh("pwd; echo $A"))["output"] == f"{tool_session.workspace}\n\n"


async def test_background_processes_are_per_session(tool_session: ToolSession) -> None:
    process_id = await started(tool_session, f"sleep {new_mark()}")
    other: Any = {"session_id": "s2"}
    assert (await tool_session.call("process", {"action": "list"}, **other))["processes"] == []
    for action in ("poll", "kill"):
        result = await tool_session.call("process", {"action": action, "session_id": process_id}, **other)
        assert (result["state"], "output" in result) == ("lost", False)
    assert (await process(tool_session, "poll", process_id))["state"] == "running"


async def test_background_processes_end_with_server(make_harness: MakeHarness, server: ModelServer) -> None:
    tool_session, mark = allowed(make_harness, server), new_mark()
    process_id = await started(tool_session, f"sleep {mark}", notify_on_complete=True)
    await tool_session.harness.close()
    assert running(mark) == [] and product_tasks() == []
    again = allowed(make_harness, server)
    result = await process(again, "poll", process_id)
    assert (result["state"], result["exit_code"]) == ("lost", None) and "server" in result["note"]
    assert (await process(again, "list"))["processes"] == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"action": "poll"}, "invalid_arguments"),
        ({"action": "poll", "session_id": "proc_1"}, "not_found"),
        ({"action": "stop"}, "invalid_arguments"),
        ({"action": "wait", "session_id": "proc_00000000", "timeout": 601}, "invalid_arguments"),
        ({"action": "poll", "session_id": "proc_00000000", "offset": -1}, "invalid_arguments"),
    ],
)
async def test_process_tool_rejects_invalid_requests(tool_session: ToolSession, arguments: Json, code: str) -> None:
    assert (await tool_session.call("process", arguments))["code"] == code


async def test_background_process_limit(tool_session: ToolSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tool.limits, "BACKGROUND_MAX", 2)
    short = await started(tool_session, "true")
    await process(tool_session, "wait", short)
    long = [await started(tool_session, f"sleep {new_mark()}") for _ in range(2)]
    listed = (await process(tool_session, "list"))["processes"]
    assert [process_entry["session_id"] for process_entry in listed] == long, "one that is over makes room"
    refused = await tool_session.sh("true", background=True)
    assert (refused["code"], "process" in refused["hint"]) == ("limit_reached", True)
    assert (await tool_session.sh("echo this runs"))["output"] == "this runs\n"


async def test_background_output_keeps_tail(tool_session: ToolSession) -> None:
    process_id = await started(tool_session, "seq -w 1 100000")
    state = await process(tool_session, "wait", process_id)
    assert (state["total"], state["next_offset"], len(state["output"])) == (700_000, 700_000, 10_000)
    assert state["output"].endswith("100000\n")
    state = await process(tool_session, "poll", process_id, offset=7, limit=14)
    assert (state["offset"], state["dropped"], len(state["output"])) == (500_000, 499_993, 14)


@pytest.mark.parametrize(
    ("offset", "limit", "expected"),
    [
        (None, 3, ("789", 7, 10, None)),
        (None, 50, ("3456789", 3, 10, 3)),
        (0, 2, ("34", 3, 5, 3)),
        (5, 2, ("56", 5, 7, None)),
        (10, 2, ("", 10, 10, None)),
        (99, 2, ("", 10, 10, None)),
    ],
)
def test_background_output_slice(offset: int | None, limit: int, expected: tuple[Any, ...]) -> None:
    background = Background("proc_1", "default", "s", "true", None, None, output="3456789", dropped=3)  # type: ignore[arg-type]
    slice_ = _slice(background, offset, limit)
    assert (slice_["output"], slice_["offset"], slice_["next_offset"], slice_.get("dropped")) == expected


# ---- being told of the end


async def test_background_completion_is_reported_to_running_turn(
    tool_session: ToolSession, server: ModelServer
) -> None:
    command = {
        "command": "until [ -e go ]; do sleep 0.01; done; exit 4",
        "background": True,
        "notify_on_complete": True,
    }
    wait = "touch go; until [ -e told ]; do sleep 0.01; done"
    more = (Reply(tool_calls=[Call("terminal", {"command": wait}, id="call_w")]),)
    active_run = await tool_session.begin(Call("terminal", command), replies=more)
    steered = await active_run.wait_for("control.received")
    (tool_session.workspace / "told").touch()
    run = await active_run.end()
    assert (steered["control"], steered["by"]) == ("steer", "process")
    assert run.event("steer.applied")["where"] == "call_w"
    content = run.result["messages"][-2]["content"]
    assert "has ended with exit code 4" in content


async def test_background_completion_is_notice_of_next_turn(tool_session: ToolSession) -> None:
    process_id = await started(tool_session, "until [ -e go ]; do sleep 0.01; done", notify_on_complete=True)
    (tool_session.workspace / "go").touch()
    on_desk = tool_session.harness.app.services.session_states.of("default", "s1")
    await until(lambda: on_desk.notices)
    run = await tool_session.run(Call("process", {"action": "list"}))
    notice = run.event("notice")
    assert (notice["code"], process_id in notice["message"]) == ("process_ended", True)
    assert (await tool_session.run(Call("process", {"action": "list"}))).events_of("notice") == []


async def test_background_process_keeps_no_turn_in_memory(tool_session: ToolSession, harness: Harness) -> None:
    await started(tool_session, f"sleep {new_mark()}", notify_on_complete=True)
    [background] = tool_session.harness.app.services.outside.processes.of("default", "s1")
    assert background.task is not None
    frame = background.task.get_coro().cr_frame  # type: ignore[union-attr]
    assert not any(type(value).__name__ in ("ToolContext", "World") for value in frame.f_locals.values())
