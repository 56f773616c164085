"""Processes in the background: looked at, waited for, ended; seen by their session only, and gone with the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent.conftest import MakeHouse
from agent.house import House, Json, product_tasks
from hermes.tools import process as process_tool
from hermes.tools.process import Background, _slice
from support.model_server import Call, ModelServer, Reply

from .commanding import SURELY_S, Desk, allowed, descriptors, each_backend, new_mark, running


@pytest.fixture
def desk(make_house: MakeHouse, server: ModelServer) -> Desk:
    return allowed(make_house, server)


async def started(desk: Desk, command: str, **arguments: Any) -> str:
    answer = await desk.sh(command, background=True, **arguments)
    assert answer["status"] == "started" and answer["pid"] > 0
    return str(answer["session_id"])


async def process(desk: Desk, action: str, session_id: str | None = None, **arguments: Any) -> Json:
    more = {} if session_id is None else {"session_id": session_id}
    return await desk.call("process", {"action": action, **more, **arguments})


async def until_said(desk: Desk, session_id: str, text: str) -> Json:
    """Its state, once it has said that."""
    async with asyncio.timeout(SURELY_S):
        while text not in (state := await process(desk, "wait", session_id, timeout=0.02))["output"]:
            pass
    return state


@each_backend
async def test_background_process_outlives_turn(make_house: MakeHouse, server: ModelServer, backend: str) -> None:
    desk = allowed(make_house, server, backend)
    first = await started(desk, "echo one; until [ -e go ]; do sleep 0.01; done; echo two; exit 3")
    state = await until_said(desk, first, "one")
    assert (state["state"], state["exit_code"], state["output"]) == ("running", None, "one\n")
    assert [found["session_id"] for found in (await process(desk, "list"))["processes"]] == [first]
    (desk.workspace / "go").touch()
    state = await process(desk, "wait", first, timeout=SURELY_S, offset=state["next_offset"])
    assert (state["state"], state["exit_code"], state["output"], state["offset"]) == ("exited", 3, "two\n", 4)
    assert (await process(desk, "poll", first))["output"] == "one\ntwo\n"


@each_backend
async def test_killing_background_process_ends_its_children(
    make_house: MakeHouse, server: ModelServer, backend: str
) -> None:
    desk, mark = allowed(make_house, server, backend), new_mark()
    await desk.sh("true")
    before = descriptors()
    one = await started(desk, f"echo up; (sleep {mark}); true")
    await until_said(desk, one, "up")
    assert running(mark)
    state = await process(desk, "kill", one)
    assert (state["state"], running(mark)) == ("killed", [])
    assert (await process(desk, "kill", one))["state"] == "killed", "once is enough; twice does no harm"
    limited = await started(desk, f"sleep {mark}", timeout=0.1)
    assert (await process(desk, "wait", limited))["state"] == "timeout"
    assert descriptors() <= before and desk.left_over() == []


async def test_background_command_keeps_shell_state_unchanged(desk: Desk) -> None:
    one = await started(desk, "cd /; export A=b")
    await process(desk, "wait", one)
    assert (await desk.sh("pwd; echo $A"))["output"] == f"{desk.workspace}\n\n"


async def test_background_processes_are_per_session(desk: Desk) -> None:
    one = await started(desk, f"sleep {new_mark()}")
    other: Any = {"session_id": "s2"}
    assert (await desk.call("process", {"action": "list"}, **other))["processes"] == []
    for action in ("poll", "kill"):
        seen = await desk.call("process", {"action": action, "session_id": one}, **other)
        assert (seen["state"], "output" in seen) == ("lost", False)
    assert (await process(desk, "poll", one))["state"] == "running"


async def test_background_processes_end_with_server(make_house: MakeHouse, server: ModelServer) -> None:
    desk, mark = allowed(make_house, server), new_mark()
    one = await started(desk, f"sleep {mark}", notify_on_complete=True)
    await desk.house.close()
    assert running(mark) == [] and product_tasks() == []
    again = allowed(make_house, server)
    seen = await process(again, "poll", one)
    assert (seen["state"], seen["exit_code"]) == ("lost", None) and "server" in seen["note"]
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
async def test_process_tool_rejects_invalid_requests(desk: Desk, arguments: Json, code: str) -> None:
    assert (await desk.call("process", arguments))["code"] == code


async def test_background_process_limit(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tool.limits, "BACKGROUND_MAX", 2)
    short = await started(desk, "true")
    await process(desk, "wait", short)
    long = [await started(desk, f"sleep {new_mark()}") for _ in range(2)]
    listed = (await process(desk, "list"))["processes"]
    assert [found["session_id"] for found in listed] == long, "one that is over makes room"
    refused = await desk.sh("true", background=True)
    assert (refused["code"], "process" in refused["hint"]) == ("limit_reached", True)
    assert (await desk.sh("echo this runs"))["output"] == "this runs\n"


async def test_background_output_keeps_tail(desk: Desk) -> None:
    one = await started(desk, "seq -w 1 100000")
    state = await process(desk, "wait", one)
    assert (state["total"], state["next_offset"], len(state["output"])) == (700_000, 700_000, 10_000)
    assert state["output"].endswith("100000\n")
    state = await process(desk, "poll", one, offset=7, limit=14)
    assert (state["offset"], state["dropped"], len(state["output"])) == (500_000, 499_993, 14)


@pytest.mark.parametrize(
    ("offset", "limit", "told"),
    [
        (None, 3, ("789", 7, 10, None)),
        (None, 50, ("3456789", 3, 10, 3)),
        (0, 2, ("34", 3, 5, 3)),
        (5, 2, ("56", 5, 7, None)),
        (10, 2, ("", 10, 10, None)),
        (99, 2, ("", 10, 10, None)),
    ],
)
def test_background_output_slice(offset: int | None, limit: int, told: tuple[Any, ...]) -> None:
    found = Background("proc_1", "default", "s", "true", None, None, output="3456789", dropped=3)  # type: ignore[arg-type]
    slice_ = _slice(found, offset, limit)
    assert (slice_["output"], slice_["offset"], slice_["next_offset"], slice_.get("dropped")) == told


# ---- being told of the end


async def test_background_completion_is_told_to_running_turn(desk: Desk, server: ModelServer) -> None:
    command = {
        "command": "until [ -e go ]; do sleep 0.01; done; exit 4",
        "background": True,
        "notify_on_complete": True,
    }
    wait = "touch go; until [ -e told ]; do sleep 0.01; done"
    more = (Reply(tool_calls=[Call("terminal", {"command": wait}, id="call_w")]),)
    under_way = await desk.begin(Call("terminal", command), replies=more)
    steered = await under_way.seen("control.received")
    (desk.workspace / "told").touch()
    ran = await under_way.end()
    assert (steered["control"], steered["by"]) == ("steer", "process")
    assert ran.one("steer.applied")["where"] == "call_w"
    said = ran.result["messages"][-2]["content"]
    assert "has ended with exit code 4" in said


async def test_background_completion_is_notice_of_next_turn(desk: Desk) -> None:
    one = await started(desk, "until [ -e go ]; do sleep 0.01; done", notify_on_complete=True)
    (desk.workspace / "go").touch()
    on_desk = desk.house.app.services.session_states.of("default", "s1")
    async with asyncio.timeout(SURELY_S):
        while not on_desk.notices:
            await asyncio.sleep(0.01)
    ran = await desk.ran(Call("process", {"action": "list"}))
    notice = ran.one("notice")
    assert (notice["code"], one in notice["message"]) == ("process_ended", True)
    assert (await desk.ran(Call("process", {"action": "list"}))).of("notice") == []


async def test_background_process_keeps_no_turn_in_memory(desk: Desk, house: House) -> None:
    await started(desk, f"sleep {new_mark()}", notify_on_complete=True)
    [found] = desk.house.app.services.outside.processes.of("default", "s1")
    assert found.task is not None
    frame = found.task.get_coro().cr_frame  # type: ignore[union-attr]
    assert not any(type(value).__name__ in ("ToolContext", "World") for value in frame.f_locals.values())
