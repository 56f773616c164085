"""Single parts under odd conditions: tools that are defective, threads that leave, refusals that name two options."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hermes.agent.assembler import Assembler
from hermes.core import threads as threads_module
from hermes.core.failures import FailureFacts, classify, rejected_option
from hermes.core.stream_parts import Opaque
from hermes.core.threads import Threads
from hermes.guards.secrets import MARK
from hermes.providers.base import WireEvent
from hermes.providers.registry import provider_for
from support.model_server import Call, ModelServer, Protocol, Reply

from .house import KEY, PROTOCOLS, House, Json, Ran, Running, nothing_left, reading, sent, tool

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
SESSION = "the-session"


# ---- what a provider wants back unread


def test_opaque_words_of_other_kinds_stay_items_of_their_own() -> None:
    assembler = Assembler()
    for data in ("commentary", "final_answer"):
        assembler.feed(Opaque("phase", data))
    assert [item["data"] for item in assembler.message().opaque] == ["commentary", "final_answer"]


def test_pieces_of_reasoning_that_a_model_wants_back_are_one_item() -> None:
    provider, assembler = provider_for("chat_completions"), Assembler()
    for text in ("First ", "then."):
        chunk = {"model": "deepseek-reasoner", "choices": [{"index": 0, "delta": {"reasoning_content": text}}]}
        for part in provider.parts(WireEvent("", chunk)):
            assembler.feed(part)
    assert assembler.message().opaque == [{"kind": "reasoning_content", "data": "First then."}]


# ---- refusals that name an option

REFUSALS = [
    (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
        "max_tokens",
    ),
    (
        "Unsupported parameter: 'max_completion_tokens' is not supported here; use 'max_tokens' instead.",
        "max_completion_tokens",
    ),
    ("'temperature' is not supported with this model; set 'reasoning_effort' instead.", "temperature"),
    ("tool_choice 'required' is not supported when thinking is enabled", "tool_choice"),
    ("This model does not support tools; send user messages only", None),
    ("This model does not support tools, text only", None),
    ("Your request asks for something that is not supported; stop sending it", None),
    ("This endpoint does not support files; include a link", None),
    ("Images are not supported with reasoning models", None),
    ("Unsupported parameter: 'user' is not supported with this model.", "user"),
    ("`stop` is not supported with this model", "stop"),
    ('"reasoning" is not supported with this model', "reasoning"),
    ("Unsupported parameter: 'text' is not supported with this model.", "text"),
    ("Unsupported value: 'include' does not support this", "include"),
]


@pytest.mark.parametrize(("words", "option"), REFUSALS)
def test_the_option_that_is_refused_is_told_from_those_that_are_only_mentioned(words: str, option: str | None) -> None:
    facts = FailureFacts("headers", status=400, message=words)
    assert rejected_option(facts) == option
    assert (classify(facts) == "option_rejected") == (option is not None)


def test_an_option_that_the_provider_names_apart_from_its_words_is_the_one() -> None:
    words = "Unsupported parameter: use 'max_completion_tokens' instead of what you sent."
    facts = FailureFacts("headers", status=400, code="unsupported_parameter", param="user", message=words)
    assert rejected_option(facts) == "user"


# ---- threads


class Hesitant:
    """A queue whose readers, when nothing has come in time, stop to think before they leave."""

    leaving, go = threading.Event(), threading.Event()

    def __init__(self) -> None:
        self._jobs: queue.Queue[Any] = queue.Queue()
        self.put = self._jobs.put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        try:
            return self._jobs.get(block, timeout)
        except queue.Empty:
            self.leaving.set()
            self.go.wait(5)
            raise


@pytest.fixture
def hesitant(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hesitant]]:
    monkeypatch.setattr(threads_module, "THREAD_IDLE_S_MAX", 0.02)
    monkeypatch.setattr(queue, "SimpleQueue", Hesitant)
    Hesitant.leaving.clear()
    Hesitant.go.clear()
    yield Hesitant
    Hesitant.go.set()


async def test_a_job_that_comes_while_the_last_idle_thread_is_leaving_is_done(hesitant: type[Hesitant]) -> None:
    pool = Threads(4)
    assert await pool.call(lambda: 1) == 1
    async with asyncio.timeout(2):
        while not hesitant.leaving.is_set():
            await asyncio.sleep(0.005)
        job = pool.submit(lambda: 2)
        hesitant.go.set()
        assert await job.future == 2
    pool.close()


async def test_a_full_pool_whose_threads_are_all_leaving_still_does_every_job(hesitant: type[Hesitant]) -> None:
    pool = Threads(1)
    assert await pool.call(lambda: 1) == 1
    async with asyncio.timeout(2):
        while not hesitant.leaving.is_set():
            await asyncio.sleep(0.005)
        jobs = [pool.submit(lambda n=n: n) for n in range(3)]
        hesitant.go.set()
        assert [await job.future for job in jobs] == [0, 1, 2]
    pool.close()


# ---- what a tool says while it runs


class Talking:
    """A blocking tool that says two lines, on two streams, and then waits to be let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def run(self, ctx: Any, _: Json) -> Json:
        ctx.emit("stdout", "made\n")
        ctx.emit("stderr", "warned\n")
        self.go.wait(5)
        ctx.emit("stdout", "done\n")
        return {"ok": True}


@pytest.fixture
def talking(house: House, server: ModelServer) -> Iterator[Talking]:
    made = Talking()
    house.offer(tool("talk", made.run))
    server.script = [Reply(tool_calls=[Call("talk")]), Reply(text="Done.")]
    yield made
    made.go.set()


def outputs(events: list[Json]) -> list[tuple[str, int, str]]:
    return [(e["stream"], e["offset"], e["text"]) for e in events if e["type"] == "tool.output"]


async def test_what_a_blocking_tool_says_is_seen_at_once_and_under_its_own_label(
    house: House, server: ModelServer, talking: Talking
) -> None:
    running = await house.begin(house.spec(server))
    await running.until(lambda events: len(outputs(events)) == 2, timeout=2)
    talking.go.set()
    ran = await running.end()
    assert outputs(ran.events) == [("stdout", 0, "made\n"), ("stderr", 0, "warned\n"), ("stdout", 5, "done\n")]


async def test_a_reader_who_comes_while_a_blocking_tool_runs_sees_the_same_labels(
    house: House, server: ModelServer, talking: Talking
) -> None:
    early = await house.begin(house.spec(server, persist=True))
    await early.until(lambda events: len(outputs(events)) == 2, timeout=2)
    late = Running(house, early._live)
    await late.until(lambda events: len(outputs(events)) == 2, timeout=2)
    talking.go.set()
    ran = await early.end()
    assert outputs((await late.end()).events) == outputs(ran.events)


# ---- defective tools


def crash(_: Any) -> Any:
    raise ZeroDivisionError("a defect")


async def round_with(house: House, server: ModelServer, **broken: Any) -> dict[str, str]:
    """How each call of a round ended in which `c2` is of a tool with that defect; the turn ends well."""
    house.offer(tool("broken", **broken), tool("fine", **reading()))
    server.script = [
        Reply(tool_calls=[Call("fine", {"a": "1"}, id="c1"), Call("broken", id="c2"), Call("fine", id="c3")]),
        Reply(text="Done."),
    ]
    ran = await house.run(server, persist=True, session_id=SESSION)
    assert ran.result["final_response"] == "Done."
    assert [row.tool_call_id for row in await house.rows(SESSION) if row.role == "tool"] == ["c1", "c2", "c3"]
    await nothing_left(server)
    return {event["call_id"]: event["status"] for event in ran.of("tool.finished")}


@pytest.mark.parametrize("part", ["preview", "effect"])
async def test_a_tool_with_a_defective_part_fails_its_own_call_and_no_other(
    house: House, server: ModelServer, part: str
) -> None:
    assert await round_with(house, server, **{part: crash}) == {"c1": "ok", "c2": "error", "c3": "ok"}


async def test_a_tool_that_cannot_say_what_it_touches_spoils_no_other_call(house: House, server: ModelServer) -> None:
    ended = await round_with(house, server, scope=crash)
    assert (ended["c1"], ended["c3"]) == ("ok", "ok")


# ---- rounds that are stopped


@each_protocol
@pytest.mark.parametrize("persist", [True, False], ids=["kept", "not kept"])
async def test_the_messages_of_a_turn_that_was_stopped_in_a_tool_round_have_a_result_for_every_call(
    house: House, server: ModelServer, protocol: Protocol, persist: bool
) -> None:
    async def slow(_: Any, __: Json) -> Json:
        await asyncio.sleep(60)
        return {}

    house.offer(tool("quick", **reading()), tool("slow", slow, **reading()))
    calls = [Call("slow", id="c1"), Call("quick", {"a": "tea"}, id="c2"), Call("slow", {"a": "x"}, id="c3")]
    server.script = [Reply(tool_calls=calls), Reply(text="Fine.")]
    running = await house.begin(house.spec(server, protocol=protocol, persist=persist))
    await running.seen("tool.finished")
    await running.control("interrupt")
    ran = await running.end()
    messages = ran.result["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "tool", "assistant"]
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == ["c1", "c2", "c3"]
    assert "tea" in messages[3]["content"]
    again = await house.run(server, "next", protocol, history=messages)
    assert again.result["completed"] is True
    results = "".join(text for role, text in sent(server.requests[-1]) if role == "tool")
    assert results.count("interrupted") == 2


# ---- steers


async def test_a_steer_is_said_to_be_where_its_words_are(house: House, server: ModelServer) -> None:
    go = asyncio.Event()

    async def slow(_: Any, __: Json) -> Json:
        await go.wait()
        return {"slow": True}

    house.offer(tool("slow", slow, **reading()), tool("fast", **reading()))
    server.script = [Reply(tool_calls=[Call("slow", id="c1"), Call("fast", id="c2")]), Reply(text="Done.")]
    running = await house.begin(house.spec(server))
    await running.seen("tool.finished")
    await running.control("steer", text="only red ones")
    go.set()
    ran = await running.end()
    holding = [m["tool_call_id"] for m in ran.result["messages"] if "only red ones" in str(m["content"])]
    assert [ran.one("steer.applied")["where"]] == holding


# ---- secrets


def leaks(ran: Ran) -> list[str]:
    return [event["type"] for event in ran.events if KEY in json.dumps(event)]


@each_protocol
async def test_a_known_key_in_the_arguments_of_a_call_is_in_no_event(
    house: House, server: ModelServer, protocol: Protocol
) -> None:
    house.offer(tool("look"))
    server.script = [Reply(tool_calls=[Call("look", {"a": f"use {KEY} here"})]), Reply(text="Done.")]
    ran = await house.run(server, protocol=protocol)
    assert leaks(ran) == []
    (call,) = ran.of("message.completed")[0]["tool_calls"]
    assert json.loads(call["arguments"]) == {"a": f"use {MARK} here"}


async def test_a_reader_who_comes_later_is_not_shown_a_known_key_either(house: House, server: ModelServer) -> None:
    house.offer(tool("look"))
    server.script = [Reply(tool_calls=[Call("look", {"a": KEY})]), Reply(text="Done.")]
    ran = await house.run(server, persist=True)
    again = [event.as_dict() async for event in house.engine.subscribe(ran.spec.run_id)]
    assert KEY not in json.dumps(again)


@pytest.mark.parametrize("blocking", [False, True], ids=["coroutine", "blocking"])
async def test_the_process_log_holds_no_key_that_a_tool_fell_over(
    house: House, server: ModelServer, caplog: pytest.LogCaptureFixture, blocking: bool
) -> None:
    caplog.set_level(logging.DEBUG)

    def fail(_: Any, __: Json) -> Json:
        raise ValueError(f"could not use {KEY}")

    async def fail_softly(ctx: Any, args: Json) -> Json:
        return fail(ctx, args)

    house.offer(tool("look", fail if blocking else fail_softly))
    server.script = [Reply(tool_calls=[Call("look")]), Reply(text="Done.")]
    ran = await house.run(server)
    assert ran.result["completed"] is True
    assert "look" in caplog.text
    assert "could not use" in caplog.text
    assert KEY not in caplog.text
    assert not any(KEY in str(record.exc_info) + (record.exc_text or "") for record in caplog.records)
    assert leaks(ran) == []
