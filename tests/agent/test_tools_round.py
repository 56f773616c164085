"""Tool rounds: names, arguments, order, limits, and the errors that the model receives."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hermes.core.threads import Threads
from hermes.tools import clarify
from hermes.tools.framework import round as tool_round
from hermes.tools.framework.registry import ToolArguments, ToolError
from hermes.tools.framework.round import ToolRound
from support.model_server import Call, ModelServer, Protocol, Reply
from support.waiting import DEADLINE_S, idle, until

from .conftest import MakeHarness
from .harness import KEY, PROTOCOLS, CompletedRun, Harness, Json, nothing_left, reading, schema, sent_messages, tool

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
SESSION = "the-session"


def recording(calls: list[Json]) -> Callable[[Any, Json], Json]:
    """A blocking tool's body that notes its arguments."""

    def run(_: Any, args: Json) -> Json:
        calls.append(args)
        return {"ok": True}

    return run


def script(server: ModelServer, *calls: Call, then: str = "Done.") -> None:
    server.script = [Reply(tool_calls=list(calls)), Reply(text=then)]


async def one_round(harness: Harness, server: ModelServer, *calls: Call, **fields: Any) -> CompletedRun:
    """A turn of one message with these calls and an answer after them."""
    script(server, *calls)
    run = await harness.run(server, **fields)
    assert run.result["final_response"] == "Done."
    return run


# ---- order


@each_protocol
async def test_non_conflicting_calls_run_in_parallel_in_result_order(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    second_done, both = asyncio.Event(), asyncio.Barrier(2)

    async def look(_: Any, args: Json) -> Json:
        async with asyncio.timeout(DEADLINE_S):
            await both.wait()
            if args["a"] == "one":
                await second_done.wait()
            else:
                second_done.set()
        return {"saw": args["a"]}

    harness.offer(tool("look", look, **reading()))
    calls = [Call("look", {"a": "one"}), Call("look", {"a": "two"})]
    run = await one_round(harness, server, *calls, protocol=protocol)
    ids = [call["id"] for call in run.events_of("message.completed")[0]["tool_calls"]]
    assert [event["call_id"] for event in run.events_of("tool.finished")] == ids[::-1]
    assert run.tool_results() == [{"saw": "one"}, {"saw": "two"}]
    text = "".join(text for _, text in sent_messages(server.requests[1], "tool"))
    assert text == '{"saw": "one"}{"saw": "two"}'


@pytest.mark.parametrize(
    ("scopes", "together"),
    [
        (({"file:/a"}, {"file:/b"}), True),
        (({"file:/a"}, {"file:/a"}), False),
        (({"tree:/d"}, {"file:/d/x"}), False),
        (({"tree:/d"}, {"file:/e/x"}), True),
        (({"*"}, {"todo"}), False),
        (({"todo"}, {"memory"}), True),
    ],
)
async def test_calls_with_same_scope_run_sequentially(
    harness: Harness, server: ModelServer, scopes: tuple[set[str], set[str]], together: bool
) -> None:
    at_once, most, both = 0, 0, asyncio.Barrier(2)

    async def act(_: Any, __: Json) -> Json:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        async with asyncio.timeout(DEADLINE_S):
            await (both.wait() if together else idle())
        at_once -= 1
        return {"ok": True}

    of = {"one": frozenset(scopes[0]), "two": frozenset(scopes[1])}
    harness.offer(tool("act", act, scope=lambda args: of[args["a"]]))
    await one_round(harness, server, Call("act", {"a": "one"}), Call("act", {"a": "two"}))
    assert most == (2 if together else 1)


async def test_read_calls_never_conflict(harness: Harness, server: ModelServer) -> None:
    both = asyncio.Barrier(2)

    async def look(_: Any, __: Json) -> Json:
        async with asyncio.timeout(DEADLINE_S):
            await both.wait()
        return {"ok": True}

    harness.offer(tool("look", look, effect="read", scope=lambda _: frozenset({"*"})))
    run = await one_round(harness, server, Call("look", {"a": "one"}), Call("look", {"a": "two"}))
    assert [event["status"] for event in run.events_of("tool.finished")] == ["ok", "ok"]


async def test_max_parallel_tools_setting(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness({"agent": {"max_parallel_tools": 3}})
    at_once, most, three = 0, 0, asyncio.Event()

    async def look(_: Any, __: Json) -> Json:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once == 3:
            await idle()  # a fourth would come now
            three.set()
        async with asyncio.timeout(DEADLINE_S):
            await three.wait()
        at_once -= 1
        return {"ok": True}

    harness.offer(tool("look", look, **reading()))
    await one_round(harness, server, *[Call("look", {"a": str(n)}) for n in range(10)])
    assert most == 3


@pytest.mark.parametrize("seed", range(3))
async def test_tool_results_are_in_order_of_calls(harness: Harness, server: ModelServer, seed: int) -> None:
    import random

    delays = random.Random(seed)

    async def look(_: Any, args: Json) -> Json:
        await asyncio.sleep(delays.random() / 50)  # in whatever order they end
        return {"saw": args["a"]}

    harness.offer(tool("look", look, **reading()))
    run = await one_round(harness, server, *[Call("look", {"a": str(n)}) for n in range(8)], persist=True)
    assert run.tool_results() == [{"saw": str(n)} for n in range(8)]
    rows = [row for row in await harness.rows(run.spec.session_id) if row.role == "tool"]
    assert [json.loads(str(row.content))["saw"] for row in rows] == [str(n) for n in range(8)]


async def test_identical_calls_are_executed_once(harness: Harness, server: ModelServer) -> None:
    calls: list[Json] = []
    harness.offer(tool("look", recording(calls)))
    same = [Call("look", '{"a": "x"}'), Call("look", '{ "a":"x" }'), Call("look", {"a": "y"})]
    run = await one_round(harness, server, *same)
    assert sorted(calls, key=str) == [{"a": "x"}, {"a": "y"}]
    assert run.tool_results() == [{"ok": True}] * 3
    ids = [call["id"] for call in run.events_of("message.completed")[0]["tool_calls"]]
    assert [m["tool_call_id"] for m in run.result["messages"] if m["role"] == "tool"] == ids


async def test_tool_started_is_recorded_before_execution(harness: Harness, server: ModelServer) -> None:
    texts: list[str] = []

    async def look(ctx: Any, _: Json) -> Json:
        texts.extend(event.type for event in await harness.app.store.runs.read(ctx.run_id, 0, 1000))
        return {"ok": True}

    harness.offer(tool("look", look))
    await one_round(harness, server, Call("look"), persist=True)
    assert texts[-3:] == ["message.completed", "usage", "tool.started"]


@pytest.mark.parametrize(("effect", "synced"), [("effect", True), ("read", False)])
async def test_only_tool_started_with_effect_is_synced(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, effect: Any, synced: bool
) -> None:
    syncs: dict[str, bool] = {}
    append = type(harness.app.store.runs).append

    async def noted(self: Any, run_id: str, token: Any, events: Any, rows: Any = (), **more: Any) -> None:
        syncs.update({event.type: bool(more.get("sync")) for event in events})
        await append(self, run_id, token, events, rows, **more)

    monkeypatch.setattr(type(harness.app.store.runs), "append", noted)
    harness.offer(tool("look", effect=effect))
    await one_round(harness, server, Call("look"), persist=True)
    assert syncs["tool.started"] is synced
    assert syncs["text.delta" if "text.delta" in syncs else "usage"] is False


# ---- names


NEAR_NAMES = [
    *("look_up", "Look_Up", "look-up", "LOOK.UP", "look up", "LookUp", "lookUp", "Look-Up"),
    *("look_up_tool", "LookUpTool", "functions.look_up", "functions.look_up:0", "tool.lookUp"),
]


@pytest.mark.parametrize("name", NEAR_NAMES)
async def test_tool_name_is_repaired_before_it_is_recorded(harness: Harness, server: ModelServer, name: str) -> None:
    calls: list[Json] = []
    harness.offer(tool("look_up", recording(calls)))
    run = await one_round(harness, server, Call(name))
    assert calls == [{}]
    assert run.event("tool.finished")["name"] == "look_up"
    assert [call["name"] for call in run.events_of("message.completed")[0]["tool_calls"]] == ["look_up"]
    (again,) = [m["tool_calls"] for m in server.requests[1].body["messages"] if m.get("tool_calls")]
    assert [call["function"]["name"] for call in again] == ["look_up"], "some providers refuse other names"


@each_protocol
@pytest.mark.parametrize("name", ["LookUp", "look_up_tool", "functions.look_up"])
async def test_client_tool_name_is_repaired(
    harness: Harness, server: ModelServer, name: str, protocol: Protocol
) -> None:
    server.script = [Reply(tool_calls=[Call(name, id="c1")])]
    run = await harness.run(server, protocol=protocol, client_tools=(client_tool("look_up"),))
    assert [call["function"]["name"] for call in run.result["pending_calls"]] == ["look_up"]
    assert [call["name"] for call in run.event("message.completed")["tool_calls"]] == ["look_up"]


# ---- calls that the provider passed on as text

LEAKED = [
    '<tool_call>\n{"name": "look_up", "arguments": {"n": 5}}\n</tool_call>',
    "<tool_call>\n<function=look_up>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
    '<function=functions.look_up>{"n": "5"}</function>',
    '[TOOL_CALLS][{"name": "LookUp", "arguments": {"n": 5}}]',
    '<|tool_call|>[{"name": "look_up_tool", "arguments": {"n": 5}}]<|/tool_call|>',
]
NUMBER = schema(["n"], n={"type": "integer"})


@each_protocol
@pytest.mark.parametrize("how", ["whole", "by character", "by event", "not streamed"])
@pytest.mark.parametrize("block", LEAKED)
async def test_leaked_call_is_executed_and_hidden(
    harness: Harness, server: ModelServer, protocol: Protocol, block: str, how: str
) -> None:
    calls: list[Json] = []
    harness.offer(tool("look_up", recording(calls), parameters=NUMBER))
    text = f"Let me see. {block}"
    server.script = [
        Reply(
            text=[*text] if how == "by event" else text,
            packets=1 if how == "by character" else None,
            as_json=how == "not streamed",
        ),
        Reply(text="Done."),
    ]
    run = await harness.run(server, protocol=protocol)
    assert calls == [{"n": 5}]
    assert run.text() == "Let me see. Done."
    assert run.result["final_response"] == "Done."
    assert [m["content"] for m in run.result["messages"] if m["role"] == "assistant"] == ["Let me see. ", "Done."]
    assert block not in json.dumps(server.requests[1].body, ensure_ascii=False)


@each_protocol
async def test_leaked_client_tool_call_is_handed_on(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    server.script = [Reply(text="<function=ring><parameter=n>5</parameter></function>")]
    schema = {"type": "function", "function": {"name": "ring", "parameters": NUMBER}}
    run = await harness.run(server, protocol=protocol, client_tools=(schema,))
    (call,) = run.result["pending_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("ring", {"n": 5})
    assert (run.text(), run.final["finish_reason"]) == ("", "tool_calls")


@each_protocol
async def test_invalid_leaked_call_is_removed_and_retried(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(text='So.<tool_call>{"name": "nonsense"}</tool_call>'), Reply(text=" All done.")]
    run = await harness.run(server, protocol=protocol)
    assert run.result["final_response"] == run.text() == "So. All done."
    assert run.event("model.retrying")["failure"] == "missing_call"
    assert run.events_of("tool.started") == []


async def test_leaked_call_is_removed_without_offered_tools(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text='Five.<tool_call>{"name": "look"}</tool_call>')]
    run = await harness.run(server)
    assert (run.result["final_response"], run.actions()) == ("Five.", [])


async def test_leaked_call_in_code_block_is_text(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    text = 'Write:\n```\n<tool_call>{"name": "look"}</tool_call>\n```\n'
    server.script = [Reply(text=[*text])]
    run = await harness.run(server)
    assert (run.result["final_response"], run.events_of("tool.started")) == (text, [])


async def test_leaked_call_in_broken_stream_is_not_executed_twice(harness: Harness, server: ModelServer) -> None:
    calls: list[Json] = []
    harness.offer(tool("look", recording(calls)))
    block = '<tool_call>{"name": "look"}</tool_call>'
    server.script = [Reply(text=["See. ", block], error_event={}), Reply(text=f"See. {block}"), Reply(text="Done.")]
    run = await harness.run(server)
    assert (len(calls), run.text()) == (1, "See. Done.")


async def test_unknown_tool_suggests_five_nearest_names(harness: Harness, server: ModelServer) -> None:
    names = ["read_file", "write_file", "read_files", "reed_file", "read_filed", "bread_file", "zzz"]
    harness.offer(*(tool(name) for name in names))
    run = await one_round(harness, server, Call("raed_file"))
    answer = run.tool_results()[0]
    assert answer["code"] == "unknown_tool"
    text = json.dumps(answer)
    assert sum(f"{name}" in text.replace("raed_file", "") for name in ["read_file", "zzz"]) == 1
    assert run.event("tool.finished")["status"] == "error"


@pytest.mark.parametrize("call", [Call("nonsense"), Call("look", "[5]")], ids=["unknown", "bad arguments"])
async def test_call_that_never_starts_has_no_tool_started(harness: Harness, server: ModelServer, call: Call) -> None:
    harness.offer(tool("look"))
    run = await one_round(harness, server, call)
    assert run.events_of("tool.started") == []


async def test_unknown_tool_does_not_block_other_calls(harness: Harness, server: ModelServer) -> None:
    calls: list[Json] = []
    harness.offer(tool("look", recording(calls)))
    run = await one_round(harness, server, Call("nonsense"), Call("look"))
    assert calls == [{}]
    assert [answer.get("code") for answer in run.tool_results()] == ["unknown_tool", None]


async def test_three_steps_of_invalid_calls_end_turn_with_text(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(text=f"Try {n}.", tool_calls=[Call("nonsense", {"a": str(n)})]) for n in range(3)]
    run = await harness.run(server)
    assert run.final["type"] == "run.failed"
    assert (run.result["failure"], run.result["error_code"]) == ("invalid_calls", "agent_incomplete")
    assert len(server.requests) == 3
    assert run.result["final_response"] == "Try 2."
    assert run.result["failed"] is True


async def test_valid_call_resets_count_of_invalid_steps(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    bad = [Reply(tool_calls=[Call("nonsense", {"a": str(n)})]) for n in range(4)]
    server.script = [*bad[:2], Reply(tool_calls=[Call("look")]), *bad[2:], Reply(text="Done.")]
    run = await harness.run(server)
    assert run.result["final_response"] == "Done."


# ---- arguments

TYPED = schema(["n"], n={"type": "integer"}, b={"type": "boolean"}, x={"type": "number"}, s={"type": "string"})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('{"n": "5"}', {"n": 5}),
        ('{"n": 5.0}', {"n": 5}),
        ('{"n": 5, "b": "true"}', {"n": 5, "b": True}),
        ('{"n": 5, "x": "2.5"}', {"n": 5, "x": 2.5}),
        ('{"n": 5, "s": 7}', {"n": 5, "s": "7"}),
        ('{"n": 5,}', {"n": 5}),
        ('{"n": 5, "s": "x"', {"n": 5, "s": "x"}),
        ('{"n": 5, "s": "x\ny"}', {"n": 5, "s": "x\ny"}),
    ],
)
async def test_tool_arguments_are_repaired_and_coerced(
    harness: Harness, server: ModelServer, value: str, expected: Json
) -> None:
    calls: list[Json] = []
    harness.offer(tool("look", recording(calls), parameters=TYPED))
    await one_round(harness, server, Call("look", value))
    assert calls == [expected]


@pytest.mark.parametrize(
    "value", ['{"n": "five"}', '{"n": 5.5}', "{}", '{"n": 5, "z": 1}', '{"n": five}', "[5]", '{"n": 5} and more']
)
async def test_invalid_tool_arguments_are_not_executed(harness: Harness, server: ModelServer, value: str) -> None:
    calls: list[Json] = []
    harness.offer(tool("look", recording(calls), parameters=TYPED))
    run = await one_round(harness, server, Call("look", value))
    assert calls == []
    assert run.tool_results()[0]["code"] == "invalid_arguments"
    assert run.event("tool.finished")["status"] == "error"


class _Wait(ToolArguments):
    seconds: float


async def test_number_too_large_for_a_float_is_an_invalid_argument(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("wait", arguments=_Wait))
    run = await one_round(harness, server, Call("wait", json.dumps({"seconds": 10**400})))
    assert run.tool_results()[0]["code"] == "invalid_arguments"


async def test_broken_json_arguments_report_position(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look", parameters=TYPED))
    run = await one_round(harness, server, Call("look", '{"n": five}'))
    assert any(place in run.tool_results()[0]["error"] for place in ("6", "7"))


async def test_empty_arguments_mean_empty_object(harness: Harness, server: ModelServer) -> None:
    calls: list[Json] = []
    harness.offer(tool("look", recording(calls)))
    await one_round(harness, server, Call("look", ""))
    assert calls == [{}]


async def test_recorded_tool_arguments_are_redacted(harness: Harness, server: ModelServer) -> None:
    calls: list[Json] = []
    harness.offer(tool("look", recording(calls)))
    run = await one_round(harness, server, Call("look", {"a": f"use {KEY}"}))
    assert calls == [{"a": f"use {KEY}"}]
    assert KEY not in json.dumps(run.events_of("tool.started", "tool.finished"))


async def test_tool_preview_is_at_most_200_characters(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    run = await one_round(harness, server, Call("look", {"a": "x" * 5000}))
    assert len(run.event("tool.started")["preview"]) <= 200


# ---- tools that go wrong


async def test_tool_exception_is_tool_crashed_with_traceback_in_log_only(
    harness: Harness, server: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(_: Any, __: Json) -> Json:
        raise ZeroDivisionError("by nought")

    harness.offer(tool("look", crash))
    run = await one_round(harness, server, Call("look"))
    answer = run.tool_results()[0]
    assert answer["code"] == "tool_crashed"
    assert answer["error"]
    assert "Traceback" not in json.dumps(run.result)
    assert "Traceback" in caplog.text
    finished = run.event("tool.finished")
    assert (finished["status"], finished["code"]) == ("error", "tool_crashed")


@pytest.mark.parametrize("limit", [600.0, None])
async def test_timeout_error_raised_by_tool_is_tool_crashed(
    harness: Harness, server: ModelServer, limit: float | None
) -> None:
    async def crash(_: Any, __: Json) -> Json:
        raise TimeoutError("the other side is silent")

    harness.offer(tool("look", crash, timeout_s=limit))
    run = await one_round(harness, server, Call("look"))
    assert run.tool_results()[0]["code"] == "tool_crashed"


async def test_tool_error_is_answer(harness: Harness, server: ModelServer) -> None:
    async def refuse(_: Any, __: Json) -> Json:
        raise ToolError("There is no such place.", "not_found", "Look elsewhere.")

    harness.offer(tool("look", refuse))
    run = await one_round(harness, server, Call("look"))
    assert run.tool_results() == [{"error": "There is no such place.", "code": "not_found", "hint": "Look elsewhere."}]
    assert (run.event("tool.finished")["status"], run.event("tool.finished")["code"]) == ("error", "not_found")


@pytest.mark.parametrize("blocking", [False, True], ids=["coroutine", "blocking"])
async def test_tool_timeout_cancels_call(harness: Harness, server: ModelServer, blocking: bool) -> None:
    async def coroutine(_: Any, __: Json) -> Json:
        await asyncio.Event().wait()
        return {}

    def thread(ctx: Any, _: Json) -> Json:
        assert ctx.cancelled.wait(DEADLINE_S)
        return {}

    harness.offer(tool("look", thread if blocking else coroutine, timeout_s=0.05))
    run = await one_round(harness, server, Call("look"))
    assert run.tool_results()[0]["code"] == "timeout"
    assert run.event("tool.finished")["status"] == "timeout"
    await nothing_left(server)


async def test_tool_stopped_twice_logs_no_unhandled_exception() -> None:
    complaints: list[Json] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    started, go, ended = threading.Event(), threading.Event(), threading.Event()

    def look(_: Any, __: Json) -> Json:
        started.set()
        go.wait(600)
        ended.set()
        raise ToolError("It was stopped.", "interrupted")

    threads = Threads(1)
    rounds = object.__new__(ToolRound)
    rounds.threads = threads
    ctx: Any = SimpleNamespace(cancelled=threading.Event())
    work = asyncio.create_task(rounds._in_thread(tool("look", look), ctx, {}))
    await until(started.is_set)
    work.cancel()
    await until(ctx.cancelled.is_set)
    work.cancel()
    await asyncio.wait([work])
    assert work.cancelled()
    go.set()
    await until(ended.is_set)
    await threads.call(lambda: None)  # behind which the other has been told
    del work
    gc.collect()
    assert not complaints
    threads.close()


async def test_stubborn_blocking_tool_is_abandoned(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_round.limits, "STUBBORN_S_MAX", 0.1)
    release = threading.Event()

    def deaf(_: Any, __: Json) -> Json:
        release.wait(600)
        return {"late": True}

    harness.offer(tool("look", deaf, timeout_s=0.05))
    run = await one_round(harness, server, Call("look"))
    assert run.tool_results()[0]["code"] == "timeout"
    assert harness.app.services.threads.abandoned == 1
    release.set()


async def test_blocking_tool_runs_in_thread(harness: Harness, server: ModelServer) -> None:
    where: list[str] = []
    turned = threading.Event()

    def block(_: Any, __: Json) -> Json:
        where.append(threading.current_thread().name)
        asyncio.run_coroutine_threadsafe(turn(), loop)
        assert turned.wait(DEADLINE_S)
        return {"ok": True}

    async def turn() -> None:
        turned.set()

    loop = asyncio.get_running_loop()
    harness.offer(tool("look", block))
    run = await one_round(harness, server, Call("look"))
    assert run.tool_results() == [{"ok": True}]
    assert where != [threading.current_thread().name]


async def test_tool_output_has_offsets_and_is_redacted(harness: Harness, server: ModelServer) -> None:
    async def talk(ctx: Any, _: Json) -> Json:
        ctx.emit("stdout", "Grüße\n")
        ctx.emit("stdout", f"key {KEY[:8]}")
        ctx.emit("stdout", f"{KEY[8:]}\n")
        return {"ok": True}

    harness.offer(tool("talk", talk))
    run = await one_round(harness, server, Call("talk"))
    printed = ""
    for event in run.events_of("tool.output"):
        assert event["offset"] == len(printed)
        printed += event["text"]
    assert printed == "Grüße\nkey [redacted]\n"


# ---- client tools


def client_tool(name: str) -> Json:
    return {"name": name, "description": name, "parameters": schema()}


@each_protocol
async def test_client_tool_call_is_pending_after_server_calls(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    calls: list[Json] = []
    harness.offer(tool("look", recording(calls)))
    server.script = [Reply(text="Wait.", tool_calls=[Call("ring"), Call("look")])]
    run = await harness.run(server, protocol=protocol, client_tools=(client_tool("ring"),))
    assert calls == [{}]
    assert run.final["type"] == "run.completed"
    assert run.final["finish_reason"] == "tool_calls"
    pending = run.result["pending_calls"]
    assert [call["function"]["name"] for call in pending] == ["ring"]
    assert pending == run.final["pending_calls"]
    assert run.result["completed"] is True
    assert [event["name"] for event in run.events_of("tool.started")] == ["look"]


async def test_client_tool_hides_server_tool_of_same_name(harness: Harness, server: ModelServer) -> None:
    calls: list[Json] = []
    harness.offer(tool("look", recording(calls)))
    server.script = [Reply(tool_calls=[Call("look")])]
    run = await harness.run(server, client_tools=(client_tool("look"),))
    assert [entry["function"]["name"] for entry in server.requests[0].body["tools"]] == ["look"]
    assert calls == []
    assert len(run.result["pending_calls"]) == 1


async def test_required_tool_choice_limits_first_call_to_client_tools(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(tool_calls=[Call("ring")])]
    await harness.run(server, client_tools=(client_tool("ring"),), tool_choice="required")
    body = server.requests[0].body
    assert [entry["function"]["name"] for entry in body["tools"]] == ["ring"]
    assert body["tool_choice"] == "required"


async def test_tools_are_offered_sorted_by_name(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("zeta"), tool("alpha"))
    server.script = [Reply(text="Done.")]
    await harness.run(server, client_tools=(client_tool("mid"),))
    assert [entry["function"]["name"] for entry in server.requests[0].body["tools"]] == ["alpha", "mid", "zeta"]


async def test_policy_only_removes_toolsets(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look", toolset="x"), tool("act", toolset="y"))
    server.script = [Reply(text="Done.")]
    run = await harness.run(server, tool_policy=frozenset({"x", "z"}))
    assert run.event("run.started")["tools"] == ["look"]


# ---- limits


@each_protocol
async def test_max_iterations_ends_with_summary_without_tools(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    harness.offer(tool("look"))
    looks = [Reply(text=f"Look {n}.", tool_calls=[Call("look", {"a": str(n)})]) for n in range(2)]
    server.script = [*looks, Reply(text="I looked twice.")]
    run = await harness.run(server, protocol=protocol, max_iterations=2)
    assert run.final["type"] == "run.failed"
    assert run.final["failure"] == run.result["error_code"] == "max_iterations"
    assert run.result["final_response"] == "I looked twice."
    assert (run.result["failed"], run.result["partial"], run.result["completed"]) == (False, True, False)
    assert not server.requests[2].body.get("tools")
    assert [m["role"] for m in run.result["messages"]] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert len(run.events_of("tool.started")) == 2


async def test_max_turns_setting(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness({"agent": {"max_turns": 1}})
    harness.offer(tool("look"))
    server.script = [Reply(tool_calls=[Call("look")]), Reply(text="Summary.")]
    run = await harness.run(server)
    assert run.result["failure"] == "max_iterations"


async def test_max_iterations_without_summary_fails(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(tool_calls=[Call("look")]), Reply(status=403)]
    run = await harness.run(server, max_iterations=1)
    assert run.final["type"] == "run.failed"
    assert run.result["failed"] is True
    assert run.result["final_response"] == ""


@each_protocol
async def test_tool_call_limit_forces_answer_without_tools(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    harness.offer(tool("look"))
    server.script = [
        Reply(tool_calls=[Call("look", {"a": "1"})]),
        Reply(tool_calls=[Call("look", {"a": "2"})]),
        Reply(text="Done."),
    ]
    run = await harness.run(server, protocol=protocol, max_tool_calls=2)
    assert [bool(request.body.get("tools")) for request in server.requests] == [True, True, False]
    assert run.result["final_response"] == "Done."
    assert run.final["type"] == "run.completed"


# ---- the loop guard


def hints(run: CompletedRun) -> list[bool]:
    return ["hint" in answer for answer in run.tool_results()]


async def test_repeated_failing_call_gets_hint(harness: Harness, server: ModelServer) -> None:
    async def fail(_: Any, __: Json) -> Json:
        raise ToolError("No.", "not_found")

    harness.offer(tool("look", fail))
    server.script = [*[Reply(tool_calls=[Call("look", {"a": "x"})])] * 2, Reply(text="Done.")]
    assert hints(await harness.run(server)) == [False, True]


async def test_tool_failing_three_times_gets_hint(harness: Harness, server: ModelServer) -> None:
    async def fail(_: Any, __: Json) -> Json:
        raise ToolError("No.", "not_found")

    harness.offer(tool("look", fail))
    server.script = [*(Reply(tool_calls=[Call("look", {"a": str(n)})]) for n in range(3)), Reply(text="Done.")]
    assert hints(await harness.run(server)) == [False, False, True]


async def test_repeated_read_with_same_result_gets_hint(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look", **reading()))
    server.script = [*[Reply(tool_calls=[Call("look", {"a": "x"})])] * 2, Reply(text="Done.")]
    run = await harness.run(server)
    assert hints(run) == [False, True]
    assert run.tool_results()[1]["echo"] == {"a": "x"}


async def test_repeated_call_with_effect_gets_no_hint(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("act"))
    server.script = [*[Reply(tool_calls=[Call("act", {"a": "x"})])] * 2, Reply(text="Done.")]
    assert hints(await harness.run(server)) == [False, False]


# ---- how calls are written


@pytest.mark.parametrize("odd", [{"missing_index": True}, {"duplicate_index": True}, {"missing_id": True}])
async def test_tool_calls_are_separated_for_any_numbering(harness: Harness, server: ModelServer, odd: Json) -> None:
    harness.offer(tool("look", **reading()))
    calls = [Call("look", ['{"a": ', '"one"}']), Call("look", ['{"a": ', '"two"}'])]
    server.script = [Reply(tool_calls=calls, **odd), Reply(text="Done.")]
    run = await harness.run(server)
    assert run.tool_results() == [{"echo": {"a": "one"}}, {"echo": {"a": "two"}}]
    ids = [call["id"] for call in run.events_of("message.completed")[0]["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(ids)


async def test_tool_result_is_sent_as_unicode(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look", lambda _, __: {"saw": "Füchse 🦊"}))
    await one_round(harness, server, Call("look"))
    assert sent_messages(server.requests[1], "tool") == [("tool", '{"saw": "Füchse 🦊"}')]


async def test_tool_result_is_redacted_for_model_row_and_log(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look", lambda _, __: {"saw": [f"key {KEY}", {"deep": KEY}]}))
    run = await one_round(harness, server, Call("look"), persist=True)
    assert KEY not in json.dumps(server.requests[1].body)
    assert KEY not in json.dumps(run.events)
    assert KEY not in repr(await harness.rows(run.spec.session_id))
    assert run.tool_results() == [{"saw": ["key [redacted]", {"deep": "[redacted]"}]}]


@pytest.mark.parametrize("answer", ["plain text", None, ["a", "list"], {"when": object()}])
async def test_malformed_tool_answer_breaks_only_its_call(harness: Harness, server: ModelServer, answer: Any) -> None:
    harness.offer(tool("look", lambda _, __: answer))
    run = await one_round(harness, server, Call("look"))
    assert run.result["messages"][2]["content"]


async def test_tool_output_streams_have_own_offsets(harness: Harness, server: ModelServer) -> None:
    async def talk(ctx: Any, _: Json) -> Json:
        for stream, text in [("stdout", "one\n"), ("stderr", "oops\n"), ("stdout", "two\n"), ("info", "note\n")]:
            ctx.emit(stream, text)
            await idle()
        return {"ok": True}

    harness.offer(tool("talk", talk))
    run = await one_round(harness, server, Call("talk"))
    outputs: dict[str, str] = {}
    for event in run.events_of("tool.output"):
        assert event["offset"] == len(outputs.get(event["stream"], ""))
        outputs[event["stream"]] = outputs.get(event["stream"], "") + event["text"]
    assert outputs == {"stdout": "one\ntwo\n", "stderr": "oops\n", "info": "note\n"}


async def test_blocking_tool_can_emit_from_thread(harness: Harness, server: ModelServer) -> None:
    def talk(ctx: Any, _: Json) -> Json:
        for number in range(50):
            ctx.emit("stdout", f"{number}\n")
        return {"ok": True}

    harness.offer(tool("talk", talk))
    run = await one_round(harness, server, Call("talk"))
    assert "".join(e["text"] for e in run.events_of("tool.output")) == "".join(f"{n}\n" for n in range(50))


async def test_output_of_abandoned_tool_is_dropped(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tool_round.limits, "STUBBORN_S_MAX", 0.05)
    release, over = threading.Event(), threading.Event()

    def deaf(ctx: Any, _: Json) -> Json:
        release.wait(600)
        ctx.emit("stdout", "late\n")
        over.set()
        return {"late": True}

    harness.offer(tool("look", deaf, timeout_s=0.05))
    run = await one_round(harness, server, Call("look"), persist=True)
    release.set()
    await until(over.is_set)
    await idle()
    assert "late" not in json.dumps(run.events)
    assert caplog.records == []


async def test_clarify_runs_alone(harness: Harness, server: ModelServer) -> None:
    harness.offer(clarify.TOOL, tool("look", **reading()))
    script(server, Call("clarify", {"question": "Which?"}), Call("look"))
    running = await harness.begin(harness.spec(server, answerable=True))
    event = await running.wait_for("clarify.requested")
    await idle()
    assert [event["name"] for event in running.events if event["type"] == "tool.started"] == ["clarify"]
    await running.control("answer", id=event["request_id"], answer="this")
    run = await running.end()
    assert [event["name"] for event in run.events_of("tool.started")] == ["clarify", "look"]


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"max_tool_calls": 0}], ids=["none", "no calls"])
async def test_tool_choice_none(harness: Harness, server: ModelServer, fields: Json) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(text="Done.")]
    run = await harness.run(server, **fields)
    assert not server.requests[0].body.get("tools")
    assert run.result["final_response"] == "Done."


async def test_named_tool_choice_limits_first_call(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(tool_calls=[Call("ring")])]
    choice = {"type": "function", "function": {"name": "ring"}}
    await harness.run(server, client_tools=(client_tool("ring"), client_tool("rang")), tool_choice=choice)
    body = server.requests[0].body
    assert body["tool_choice"] == choice
    assert "look" not in [entry["function"]["name"] for entry in body["tools"]]


async def test_single_iteration_is_enough_for_answer(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(text="Done.")]
    run = await harness.run(server, max_iterations=1)
    assert run.result["completed"] is True


# ---- defective tools


def crash(_: Any) -> Any:
    raise ZeroDivisionError("a defect")


async def round_with(harness: Harness, server: ModelServer, **broken: Any) -> dict[str, str]:
    """How each call of a round ended in which `c2` is of a tool with that defect; the turn ends well."""
    harness.offer(tool("broken", **broken), tool("fine", **reading()))
    server.script = [
        Reply(tool_calls=[Call("fine", {"a": "1"}, id="c1"), Call("broken", id="c2"), Call("fine", id="c3")]),
        Reply(text="Done."),
    ]
    run = await harness.run(server, persist=True, session_id=SESSION)
    assert run.result["final_response"] == "Done."
    assert [row.tool_call_id for row in await harness.rows(SESSION) if row.role == "tool"] == ["c1", "c2", "c3"]
    await nothing_left(server)
    return {event["call_id"]: event["status"] for event in run.events_of("tool.finished")}


@pytest.mark.parametrize("part", ["preview", "effect"])
async def test_defective_tool_part_fails_only_its_own_call(harness: Harness, server: ModelServer, part: str) -> None:
    assert await round_with(harness, server, **{part: crash}) == {"c1": "ok", "c2": "error", "c3": "ok"}


async def test_defective_tool_scope_fails_no_other_call(harness: Harness, server: ModelServer) -> None:
    ended = await round_with(harness, server, scope=crash)
    assert (ended["c1"], ended["c3"]) == ("ok", "ok")
