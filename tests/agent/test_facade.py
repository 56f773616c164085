"""`AIAgent` as other programs hold it: blocking or awaited, with callbacks, totals, and a result that is always whole."""

from __future__ import annotations

import asyncio
import builtins
import inspect
import re
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import yaml

from hermes.app import current
from hermes.core.spec import RouteChoice, RunSpec
from hermes.facade import AgentError
from hermes.store.sessions import SessionDB
from hermes.tools.framework.registry import Registry
from run_agent import AIAgent
from support.model_server import Call, ModelServer, Protocol, Reply, Request
from support.waiting import DEADLINE_S, idle, until

from .harness import (
    KEY,
    MODES,
    PROTOCOLS,
    QUIET,
    Json,
    check_laws,
    in_thread,
    joined,
    nothing_left,
    sent_messages,
    tool,
)

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
T = TypeVar("T")
RESULT_KEYS = {
    *("final_response", "last_reasoning", "messages", "api_calls", "completed", "partial", "failed", "interrupted"),
    *(
        "error",
        "error_code",
        "failure",
        "run_id",
        "session_id",
        "model",
        "provider",
        "pending_calls",
        "pending_steer",
        "ignored_options",
        "retry_after_s",
    ),
    *("input_tokens", "output_tokens", "total_tokens", "usage_details"),
}
DETAIL_KEYS = {"cache_read_tokens", "cache_write_tokens", "reasoning_tokens", "cost_usd"}


@pytest.fixture(autouse=True)
def quiet_home(home_folder: Path) -> None:
    home_folder.mkdir()
    (home_folder / "config.yaml").write_text(yaml.safe_dump(QUIET))


def agent_for(server: ModelServer, protocol: str = "chat", **fields: Any) -> AIAgent:
    arguments = {"base_url": f"{server.url}/v1", "api_mode": MODES[protocol], "model": "m", "api_key": KEY}
    return AIAgent(**{**arguments, "enabled_toolsets": [], **fields})


async def offer(*tools: Any) -> dict[str, Any]:
    """Give the process these tools; the fields offer them to an agent."""
    from dataclasses import replace

    app = await current()
    registry = Registry(tools)
    app.services = replace(app.services, registry=lambda: registry)
    return {"enabled_toolsets": ["x"]}


# ---- construction

CALLS_MAX = 50


def calls_of(work: Callable[[], object]) -> int:
    """How many calls the work makes in this thread."""
    count = 0

    def count_call(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_agent_constructor_does_no_io_and_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("something was opened or started")

    build: list[Callable[[], object]] = [
        AIAgent,
        lambda: AIAgent(api_key=KEY, base_url="https://openrouter.ai/api/v1", model="test/model", quiet_mode=True),
        lambda: RunSpec("hi", "s", route=RouteChoice(model="m")),
    ]
    for make in build:
        make()
    with monkeypatch.context() as sealed:
        sealed.setattr(builtins, "open", refuse)
        sealed.setattr(Path, "open", refuse)
        sealed.setattr(Path, "stat", refuse)
        sealed.setattr(socket, "socket", refuse)
        sealed.setattr(threading.Thread, "start", refuse)
        for make in build:
            assert calls_of(make) < CALLS_MAX


def test_unknown_keyword_is_type_error() -> None:
    with pytest.raises(TypeError, match="no_such_thing"):
        AIAgent(no_such_thing=1)  # type: ignore[call-arg]


def test_arguments_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        AIAgent("sk-key")  # type: ignore[misc]


def test_contract_arguments_are_accepted() -> None:
    names = (
        "api_key base_url model provider api_mode reasoning_config max_tokens request_overrides fallback_model "
        "max_iterations enabled_toolsets disabled_toolsets client_tools session_id session_db parent_session_id "
        "platform gateway_session_key ephemeral_system_prompt skip_context_files skip_memory quiet_mode approvals "
        "stream_delta_callback reasoning_callback tool_start_callback tool_complete_callback tool_progress_callback "
        "approval_callback clarify_callback event_callback"
    )
    agent = AIAgent(**dict.fromkeys(names.split()))  # type: ignore[arg-type]
    assert agent.session_id, "a value of None counts as not given"
    assert set(names.split()) <= set(inspect.signature(AIAgent).parameters)


def test_default_session_id_format() -> None:
    ids = {AIAgent().session_id for _ in range(20)}
    assert len(ids) == 20
    assert all(re.fullmatch(r"\d{8}_\d{6}_[0-9a-f]{12}", session_id) for session_id in ids)
    assert AIAgent(session_id="mine").session_id == "mine"


# ---- results


@each_protocol
async def test_turn_returns_answer_with_history(server: ModelServer, protocol: Protocol) -> None:
    server.script = [Reply(text="Done.")]
    history = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "yes"}]
    agent = agent_for(server, protocol)
    result = await agent.arun_conversation("now", conversation_history=history)
    assert result["final_response"] == "Done."
    assert [m["content"] for m in result["messages"]] == ["before", "yes", "now", "Done."]
    assert sent_messages(server.requests[0]) == [("user", "before"), ("assistant", "yes"), ("user", "now")]
    assert len(history) == 2
    assert result["session_id"] == agent.session_id
    assert (result["completed"], result["failed"], result["interrupted"], result["error"]) == (True, False, False, None)


ENDINGS: dict[str, tuple[Reply, Json]] = {
    "completed": (Reply(text="Done."), {}),
    "failed": (Reply(status=403), {}),
    "auth": (Reply(status=401), {}),
    "truncated": (Reply(text="Once", finish="length"), {"max_tokens": 64}),
    "filtered": (Reply(text="Once", finish="content_filter"), {}),
    "out of steps": (Reply(text="Once", tool_calls=[Call("look")]), {"max_iterations": 1}),
    "pending": (
        Reply(tool_calls=[Call("ring")]),
        {"client_tools": [{"name": "ring", "parameters": {"type": "object"}}]},
    ),
    "interrupted": (Reply(text=["Once ", "upon"], gap_s=600), {}),
    "no model": (Reply(), {"base_url": "", "model": "", "api_mode": None}),
    "unknown provider": (Reply(), {"base_url": "", "provider": "nonesuch", "api_mode": None}),
}


@pytest.mark.parametrize("name", ENDINGS)
async def test_every_ending_has_all_result_keys(server: ModelServer, name: str) -> None:
    reply, fields = ENDINGS[name]
    fields = {**await offer(tool("look")), **fields}
    server.repeat, server.script = True, [reply]
    agent = agent_for(server, **fields)
    if name == "interrupted":
        agent.stream_delta_callback = lambda _: agent.interrupt()
    result = await agent.arun_conversation("hi")
    assert result.keys() >= RESULT_KEYS
    assert result["usage_details"].keys() >= DETAIL_KEYS
    assert isinstance(result["final_response"], str)
    states = [name for name in ("completed", "partial", "failed", "interrupted") if result[name]]
    assert len(states) >= 1
    assert (result["error"] is None) == result["completed"]


async def test_agent_totals_accumulate_over_turns(server: ModelServer) -> None:
    usage = {"input": 100, "output": 20, "cached": 60}
    server.script = [Reply(text="One.", usage=usage), Reply(status=403), Reply(text="Two.", usage=usage)]
    agent = agent_for(server)
    for _ in range(3):
        await agent.arun_conversation("hi")
    totals = (agent.session_prompt_tokens, agent.session_completion_tokens, agent.session_total_tokens)
    assert totals == (200, 40, 240)


async def test_turn_without_database_leaves_nothing(server: ModelServer) -> None:
    server.script = [Reply(text="One."), Reply(text="Two.")]
    agent = agent_for(server)
    first = await agent.arun_conversation("first")
    await agent.arun_conversation("second")
    assert sent_messages(server.requests[1]) == [("user", "second")]
    app = await current()
    assert await app.engine.get(first["run_id"]) is None
    assert await app.store.sessions.get_session(agent.session_id) is None


async def test_turn_with_database_uses_stored_history(server: ModelServer, database: SessionDB) -> None:
    server.script = [Reply(text="One."), Reply(text="Two.")]
    for message in ("first", "second"):
        await agent_for(server, session_id="mine", session_db=database).arun_conversation(message)
    assert sent_messages(server.requests[1]) == [("user", "first"), ("assistant", "One."), ("user", "second")]
    assert [row["content"] for row in database.get_messages("mine")] == ["first", "One.", "second", "Two."]


async def test_turns_are_stored_in_given_database(server: ModelServer, tmp_path: Path) -> None:
    server.script = [Reply(text="One.")]
    own = SessionDB(tmp_path / "elsewhere" / "own.db")
    await agent_for(server, session_id="mine", session_db=own).arun_conversation("first")
    assert [row["content"] for row in own.get_messages("mine")] == ["first", "One."]
    own.close()
    assert await (await current()).store.sessions.get_session("mine") is None


async def test_stand_in_database_is_only_asked_for_history(server: ModelServer) -> None:
    class StandIn:
        def get_messages_as_conversation(self, session_id: str) -> list[dict[str, Any]]:
            return [{"role": "user", "content": session_id}, {"role": "assistant", "content": "Yes?"}]

    server.script = [Reply(text="One.")]
    await agent_for(server, session_id="mine", session_db=StandIn()).arun_conversation("first")
    assert sent_messages(server.requests[0]) == [("user", "mine"), ("assistant", "Yes?"), ("user", "first")]


async def test_ephemeral_system_prompt_comes_last(server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    agent = agent_for(server, ephemeral_system_prompt="Be brief.")
    await agent.arun_conversation("hi", system_message="Be a pirate.")
    system = server.requests[0].turns[0].text
    assert system.endswith("Be brief.\n\nBe a pirate.")


async def test_max_tokens_and_overrides_reach_request(server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    agent = agent_for(server, max_tokens=77, request_overrides={"temperature": 0.5, "vendor_field": {"a": 1}})
    await agent.arun_conversation("hi")
    body = server.requests[0].body
    assert (body["max_tokens"], body["temperature"], body["vendor_field"]) == (77, 0.5, {"a": 1})


async def test_agent_fallback_is_used(server: ModelServer, other: ModelServer) -> None:
    server.script, other.script = [Reply(status=403)], [Reply(text="From elsewhere.")]
    spare = {"provider": "spare", "model": "n", "base_url": f"{other.url}/v1", "api_key": KEY}
    result = await agent_for(server, fallback_model=spare).arun_conversation("hi")
    assert (result["final_response"], result["model"], result["provider"]) == ("From elsewhere.", "n", "spare")


async def test_enabled_and_disabled_toolsets(server: ModelServer) -> None:
    server.script = [Reply(text="Done.")] * 2
    await agent_for(server, enabled_toolsets=["todo", "memory"]).arun_conversation("hi")
    await agent_for(server, enabled_toolsets=None, disabled_toolsets=["memory"]).arun_conversation("hi")
    chosen, less = ([t["function"]["name"] for t in request.body["tools"]] for request in server.requests)
    assert chosen == ["memory", "todo"]
    assert "todo" in less
    assert "memory" not in less


async def test_skip_memory_and_context_files(server: ModelServer, home_folder: Path) -> None:
    (home_folder / "memories").mkdir()
    (home_folder / "memories" / "MEMORY.md").write_text("Likes tea.\n")
    (home_folder / "SOUL.md").write_text("You are a pirate.\n")
    server.script = [Reply(text="Done.")] * 2
    await agent_for(server).arun_conversation("hi")
    await agent_for(server, skip_memory=True, skip_context_files=True).arun_conversation("hi")
    full, bare = (request.turns[0].text for request in server.requests)
    assert "Likes tea." in full
    assert "pirate" in full
    assert "Likes tea." not in bare


# ---- blocking


async def test_blocking_call_in_running_loop_raises(server: ModelServer) -> None:
    agent = agent_for(server)
    with pytest.raises(RuntimeError, match="arun_conversation"):
        agent.run_conversation("hi")
    with pytest.raises(RuntimeError, match="arun_conversation"):
        agent.chat("hi")
    assert server.requests == []


async def test_blocking_turn_gives_same_result(server: ModelServer) -> None:
    server.script = [Reply(reasoning="hm", text="Done.")]
    agent = agent_for(server)
    result = await in_thread(lambda: agent.run_conversation("hi"))
    assert result["final_response"] == "Done."
    assert result["last_reasoning"] == "hm"
    assert agent.session_total_tokens == 15


async def test_callbacks_of_blocking_turn_run_in_caller_thread(server: ModelServer) -> None:
    server.script = [Reply(text=["Once ", "upon"], reasoning="hm")]
    where: dict[str, set[int]] = {}

    def noting(name: str) -> Callable[..., None]:
        return lambda *_: where.setdefault(name, set()).add(threading.get_ident())

    def work() -> int:
        agent = agent_for(
            server,
            event_callback=noting("event"),
            stream_delta_callback=noting("delta"),
            reasoning_callback=noting("reasoning"),
        )
        agent.run_conversation("hi", stream_callback=noting("stream"))
        return threading.get_ident()

    caller = await in_thread(work)
    assert where == {name: {caller} for name in ("event", "delta", "reasoning", "stream")}


async def test_callbacks_of_awaited_turn_run_on_loop(server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    where: set[int] = set()
    await agent_for(server, event_callback=lambda _: where.add(threading.get_ident())).arun_conversation("hi")
    assert where == {threading.get_ident()}


async def test_slow_callback_does_not_block_other_turns(server: ModelServer) -> None:
    server.repeat, server.script = True, [Reply(text=["Once ", "upon"], gap_s=0.01)]
    hold = threading.Event()
    slow = asyncio.create_task(
        in_thread(lambda: agent_for(server, stream_delta_callback=lambda _: hold.wait(600)).run_conversation("hi"))
    )
    await server.until(lambda: len(server.requests) == 1)
    try:
        result = await in_thread(lambda: agent_for(server).run_conversation("hi"))
    finally:
        hold.set()
    assert result["completed"] is True
    assert (await slow)["completed"] is True


async def test_chat_returns_text_and_raises_on_failure(server: ModelServer) -> None:
    server.script = [Reply(text="Done."), Reply(status=403, error="no way")]
    agent = agent_for(server)
    assert await in_thread(lambda: agent.chat("hi")) == "Done."
    with pytest.raises(AgentError, match="no way") as error:
        await in_thread(lambda: agent.chat("hi"))
    assert error.value.result["failure"] == "forbidden"
    assert error.value.result.keys() >= RESULT_KEYS


async def test_chat_streams_to_callback(server: ModelServer) -> None:
    server.script = [Reply(text=["Once ", "upon"])]
    texts: list[str] = []
    await in_thread(lambda: agent_for(server).chat("hi", stream_callback=texts.append))
    assert "".join(texts) == "Once upon"


async def test_many_blocking_turns_share_one_loop(server: ModelServer) -> None:
    gate = asyncio.Event()

    async def answer(_: Request) -> Reply:
        await gate.wait()
        return Reply(text="Done.")

    server.handler = answer
    turns = [asyncio.create_task(in_thread(lambda: agent_for(server).run_conversation("hi"))) for _ in range(8)]
    await server.until(lambda: server.open_streams == 8)
    loops = [thread for thread in threading.enumerate() if thread.name == "hermes-loop"]
    assert len(loops) == 1
    gate.set()
    assert all(result["completed"] for result in await asyncio.gather(*turns))


# ---- callbacks


async def test_stream_callbacks_receive_text_and_tool_boundary(server: ModelServer) -> None:
    fields = await offer(tool("look"))
    server.script = [Reply(text="Wait.", tool_calls=[Call("look")]), Reply(text="Done.")]
    first: list[str | None] = []
    second: list[str | None] = []
    agent = agent_for(server, stream_delta_callback=first.append, **fields)
    await agent.arun_conversation("hi", stream_callback=second.append)
    assert first == ["Wait.", None, "Done."]
    assert second == ["Wait.", "Done."]


async def test_tool_callbacks_receive_start_and_end(server: ModelServer) -> None:
    fields = await offer(tool("look"))
    server.script = [Reply(tool_calls=[Call("look", {"a": "x"}, id="c1")]), Reply(text="Done.")]
    started: list[Any] = []
    completed: list[Any] = []
    agent = agent_for(
        server,
        tool_start_callback=lambda *args: started.append(args),
        tool_complete_callback=lambda *args: completed.append(args),
        **fields,
    )
    await agent.arun_conversation("hi")
    assert started == [("c1", "look", {"a": "x"})]
    assert completed == [("c1", "look", {"a": "x"}, '{"echo": {"a": "x"}}')]


async def test_progress_callback_reports_tools_and_reasoning(server: ModelServer) -> None:
    def fail(_: Any, __: Any) -> Json:
        raise ZeroDivisionError

    fields = await offer(tool("look"), tool("trip", fail))
    thought = "x" * 900
    server.script = [
        Reply(reasoning=[thought[:400], thought[400:]], tool_calls=[Call("look", {"a": "x"})]),
        Reply(tool_calls=[Call("trip")]),
        Reply(text="Done."),
    ]
    reported: list[tuple[str, Json]] = []

    def progress(event: str, tool_name: Any = None, preview: Any = None, args: Any = None, **more: Any) -> None:
        reported.append((event, {"tool": tool_name, "preview": preview, "args": args, **more}))

    await agent_for(server, tool_progress_callback=progress, **fields).arun_conversation("hi")
    assert [(event, about["tool"]) for event, about in reported] == [
        ("reasoning.available", "_thinking"),
        ("tool.started", "look"),
        ("tool.completed", "look"),
        ("tool.started", "trip"),
        ("tool.completed", "trip"),
    ]
    assert reported[0][1]["preview"] == "x" * 500
    assert reported[1][1]["args"] == {"a": "x"}
    assert [about["is_error"] for event, about in reported if event == "tool.completed"] == [False, True]
    assert all(about["duration"] >= 0 for event, about in reported if event == "tool.completed")


async def test_event_callback_receives_whole_log(server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    events: list[Json] = []
    result = await agent_for(server, event_callback=events.append).arun_conversation("hi")
    check_laws(events)
    assert events[-1]["type"] == "run.completed"
    assert {event["run_id"] for event in events} == {result["run_id"]}


async def test_failing_callback_is_logged_once_and_ignored(
    server: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.script = [Reply(text=[f"{n} " for n in range(20)], gap_s=0.025)]

    def broken(_: Any) -> None:
        raise ZeroDivisionError("in a callback")

    result = await agent_for(server, stream_delta_callback=broken).arun_conversation("hi")
    assert result["completed"] is True
    assert sum("in a callback" in (record.exc_text or "") for record in caplog.records) == 1


@pytest.mark.parametrize("blocking", [False, True], ids=["awaited", "blocking"])
async def test_clarify_callback_answers_question(server: ModelServer, blocking: bool) -> None:
    server.script = [
        Reply(tool_calls=[Call("clarify", {"question": "Which?", "choices": ["a", "b"]})]),
        Reply(text="Done."),
    ]
    questions: list[Any] = []

    def answer(question: str, choices: list[str]) -> str:
        questions.append((question, choices))
        return choices[1]

    agent = agent_for(server, enabled_toolsets=["clarify"], clarify_callback=answer)
    if blocking:
        result = await in_thread(lambda: agent.run_conversation("hi"))
    else:
        result = await agent.arun_conversation("hi")
    assert questions == [("Which?", ["a", "b"])]
    assert '"answer": "b"' in result["messages"][2]["content"]


@pytest.mark.parametrize(("choice", "written"), [("once", True), ("deny", False)])
async def test_approval_callback_decides(server: ModelServer, home_folder: Path, choice: str, written: bool) -> None:
    (home_folder / "config.yaml").write_text(yaml.safe_dump({**QUIET, "memory": {"write_approval": True}}))
    call = Call("memory", {"target": "memory", "action": "add", "content": "Likes tea."})
    server.script = [Reply(tool_calls=[call]), Reply(text="Done.")]
    requests: list[Any] = []

    def approve(request: Any) -> str:
        requests.append(request)
        return choice

    agent = agent_for(server, enabled_toolsets=["memory"], approval_callback=approve)
    await agent.arun_conversation("hi")
    assert len(requests) == 1
    assert (home_folder / "memories" / "MEMORY.md").exists() is written


async def test_async_clarify_callback_is_awaited(server: ModelServer) -> None:
    server.script = [Reply(tool_calls=[Call("clarify", {"question": "Which?"})]), Reply(text="Done.")]

    async def answer(_: str, __: list[str]) -> str:
        await idle()
        return "this"

    result = await agent_for(server, enabled_toolsets=["clarify"], clarify_callback=answer).arun_conversation("hi")
    assert '"answer": "this"' in result["messages"][2]["content"]


# ---- control


async def test_interrupt_blocking_turn_from_another_thread(server: ModelServer) -> None:
    server.script = [Reply(text=["Once ", "upon"], gap_s=600)]
    has_text = threading.Event()
    agent = agent_for(server, stream_delta_callback=lambda _: has_text.set())

    def stop() -> None:
        assert has_text.wait(DEADLINE_S)
        agent.interrupt("no, the other")

    stopper = threading.Thread(target=stop)
    stopper.start()
    result = await in_thread(lambda: agent.run_conversation("hi"))
    stopper.join()
    assert (result["interrupted"], result["final_response"]) == (True, "Once ")
    assert agent.is_interrupted is True
    await nothing_left(server)


async def test_interrupt_awaited_turn_from_another_thread(server: ModelServer) -> None:
    server.script = [Reply(text=["Once ", "upon"], gap_s=600)]
    agent = agent_for(server)
    agent.stream_delta_callback = lambda _: threading.Thread(target=agent.interrupt).start()
    async with asyncio.timeout(DEADLINE_S):
        result = await agent.arun_conversation("hi")
    assert (result["interrupted"], result["final_response"]) == (True, "Once ")
    await server.until(lambda: server.open_streams == 0)


async def test_interrupt_is_cleared_for_next_turn(server: ModelServer) -> None:
    server.script = [Reply(text="Done.")] * 2
    agent = agent_for(server)
    agent.interrupt()
    assert agent.is_interrupted is True
    agent.clear_interrupt()
    assert agent.is_interrupted is False
    assert (await agent.arun_conversation("hi"))["completed"] is True


async def test_steer_reports_whether_turn_is_running(server: ModelServer) -> None:
    fields = await offer(tool("look"))
    server.script = [Reply(text="Wait.", tool_calls=[Call("look")]), Reply(text="Done.")]
    agent = agent_for(server, **fields)
    results: list[bool] = []
    agent.stream_delta_callback = lambda text: (
        results.append(agent.steer("Only red ones.")) if text == "Wait." else None
    )
    assert agent.steer("nobody hears") is False
    result = await agent.arun_conversation("hi")
    assert results == [True]
    assert "Only red ones." in sent_messages(server.requests[1], "tool")[-1][1] + str(result["pending_steer"])
    assert agent.steer("too late") is False


async def test_close_twice_closes_client_once(server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    closed: list[str] = []
    agent = agent_for(server)
    agent._anthropic_client = SimpleNamespace(close=lambda: closed.append("client"))
    await agent.arun_conversation("hi")
    agent.close()
    agent.close()
    assert (closed, agent._anthropic_client) == (["client"], None)


async def test_cancelled_waiter_cancels_run_and_reraises(server: ModelServer) -> None:
    server.script = [Reply(text=["Once ", "upon"], gap_s=600)]
    has_text = asyncio.Event()
    agent = agent_for(server, stream_delta_callback=lambda _: has_text.set())
    waiter = asyncio.create_task(agent.arun_conversation("hi"))
    await has_text.wait()
    app = await current()
    (run_id,) = app.engine.by_id
    following = asyncio.create_task(_read(app.engine.subscribe(run_id)))
    await joined(app.engine.log, run_id, 2)  # the agent reads as well
    waiter.cancel()
    await asyncio.wait([waiter], timeout=DEADLINE_S)
    assert waiter.cancelled()
    assert app.engine.by_id == {}
    events = await following
    assert (events[-1]["type"], events[-1]["reason"]) == ("run.cancelled", "client_disconnected")
    await nothing_left(server)


async def _read(events: AsyncIterator[Any]) -> list[Json]:
    return [event.as_dict() async for event in events]


async def test_cancelled_waiter_without_callbacks_cancels_run(server: ModelServer) -> None:
    server.script = [Reply(text=["Once ", "upon"], gap_s=600)]
    waiter = asyncio.create_task(agent_for(server).arun_conversation("hi"))
    await server.until(lambda: server.open_streams == 1)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await nothing_left(server)


# ---- many at once


async def test_five_hundred_concurrent_runs_use_no_extra_threads(server: ModelServer) -> None:
    gate = asyncio.Event()

    async def answer(_: Request) -> Reply:
        await gate.wait()
        return Reply(text=["Do", "ne."])

    server.handler = answer
    runs = [asyncio.create_task(agent_for(server).arun_conversation("hi"))]
    await server.until(lambda: server.open_streams == 1)
    threads = threading.active_count()
    runs += [asyncio.create_task(agent_for(server).arun_conversation("hi")) for _ in range(499)]
    await server.until(lambda: server.open_streams == 500)
    # Files are read in a small pool of the process; nothing else may have grown.
    assert threading.active_count() <= threads + 4
    gate.set()
    results = await asyncio.gather(*runs)
    assert {result["final_response"] for result in results} == {"Done."}
    assert threading.active_count() <= threads + 4


async def test_interrupt_reaches_turn_waiting_for_session(server: ModelServer) -> None:
    gate = asyncio.Event()

    async def answer(_: Request) -> Reply:
        await gate.wait()
        return Reply(text="Done.")

    server.handler = answer
    first = asyncio.create_task(agent_for(server, session_id="mine").arun_conversation("first"))
    await server.until(lambda: server.open_streams == 1)
    waiting = agent_for(server, session_id="mine")
    second = asyncio.create_task(waiting.arun_conversation("second"))
    leases = (await current()).engine.admissions.leases
    await until(lambda: leases.waiting("mine") == 2)
    waiting.interrupt()
    await idle()
    gate.set()
    assert (await first)["completed"] is True
    assert (await second)["interrupted"] is True
    assert len(server.requests) == 1


@pytest.mark.parametrize("leaving", [KeyboardInterrupt, SystemExit])
async def test_base_exception_in_blocking_call_ends_run(server: ModelServer, leaving: type[BaseException]) -> None:
    server.script = [Reply(text=["Once ", "upon"], gap_s=600)]

    def leave(_: Any) -> None:
        raise leaving

    def work() -> Any:
        try:
            return agent_for(server, stream_delta_callback=leave).run_conversation("hi")
        except leaving:
            return None

    result = await in_thread(work)
    assert result is None or result["interrupted"] is True
    await server.until(lambda: server.open_streams == 0)
