"""Asking models under odd conditions: who is asked next, what is counted, when an answer is over, and what is kept."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from hermes.core.spec import RouteChoice
from support.model_server import Call, ModelServer, Protocol, Reply, Request
from support.waiting import DEADLINE_S, until
from support.wire import body_bytes

from .conftest import MakeHarness
from .harness import (
    FINAL,
    KEY,
    MODES,
    PROTOCOLS,
    QUIET,
    SILENT_S,
    Clock,
    Harness,
    Json,
    Running,
    cut_after,
    nothing_left,
    scripted,
    sent_messages,
    tool,
)

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
SESSION = "the-session"
TO_P = RouteChoice(provider="p", model="m")


def provider(url: str, protocol: str = "chat", **fields: Any) -> Json:
    """Settings with one provider `p`."""
    keyed = fields if "keys" in fields else {"api_key": KEY, **fields}
    return {"providers": {"p": {"base_url": f"{url}/v1", "api_mode": MODES[protocol], **keyed}}}


def spare(other: ModelServer, **fields: Any) -> Json:
    """Another route, to fall back to."""
    where = {"base_url": f"{other.url}/v1", "api_mode": "chat_completions", "api_key": "sk-other-9876543210"}
    return {"provider": "spare", "model": "n", **where, **fields}


def body_of(request: Request) -> str:
    """All that was sent, as text."""
    return json.dumps(request.body)


# ---- keys


async def test_concurrent_runs_rotate_rate_limited_key_once(make_harness: MakeHarness, server: ModelServer) -> None:
    first, second = "sk-test-AAAAAAAAAAAA", "sk-test-BBBBBBBBBBBB"
    both = asyncio.Barrier(2)

    async def answer(request: Request) -> Reply:
        if request.key == second:
            return Reply(text="Fine.")
        async with asyncio.timeout(DEADLINE_S):
            await both.wait()
        return Reply(status=429, error="slow down")

    server.handler = answer
    harness = make_harness(provider(server.url, keys=[first, second]) | {"agent": {"api_max_retries": 0}})
    runs = await asyncio.gather(*(harness.run(None, route=TO_P) for _ in range(2)))
    assert [run.result["final_response"] for run in runs] == ["Fine."] * 2
    assert [request.key for request in server.requests] == [first, first, second, second]


# ---- fallbacks


async def test_fallback_uses_own_output_limit(harness: Harness, server: ModelServer, other: ModelServer) -> None:
    harness.offer(tool("look"))
    cut = Reply(tool_calls=[Call("look", '{"a": "xx')], finish="length")
    server.script, other.script = [cut, Reply(status=403, error="no")], [Reply(text="Done.")]
    run = await harness.run(server, model="claude-sonnet-4-6", fallbacks=(spare(other, max_tokens=500),))
    assert run.actions() == ["raise_output", "fallback"]
    assert server.requests[1].body["max_tokens"] != 500
    assert other.requests[0].body["max_tokens"] == 500


async def test_fallback_without_output_limit_sends_none(
    harness: Harness, server: ModelServer, other: ModelServer
) -> None:
    harness.offer(tool("look"))
    cut = Reply(tool_calls=[Call("look", '{"a": "xx')], finish="length")
    server.script, other.script = [cut, Reply(status=403, error="no")], [Reply(text="Done.")]
    await harness.run(server, model="claude-sonnet-4-6", fallbacks=(spare(other),))
    assert {"max_tokens", "max_completion_tokens"}.isdisjoint(other.requests[0].body)


async def test_fallback_streams_although_primary_did_not(
    harness: Harness, server: ModelServer, other: ModelServer
) -> None:
    server.script = [Reply(refuse_stream=True), Reply(status=403, error="no")]
    other.script = [Reply(text="Done.")]
    run = await harness.run(server, fallbacks=(spare(other),))
    assert run.actions() == ["unstream", "fallback"]
    assert [request.stream for request in (*server.requests, *other.requests)] == [True, False, True]


# ---- when an answer is over


@each_protocol
async def test_answer_ends_with_last_event_on_open_connection(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    def hold(request: Request) -> Reply:
        reply = Reply(text="Done.")
        return replace(reply, stall_at=len(body_bytes(protocol, reply, request.body)))

    server.handler = hold
    running = await harness.begin(harness.spec(server, protocol=protocol))
    run = await running.end()
    assert (run.result["final_response"], run.result["completed"]) == ("Done.", True)
    assert (run.result["input_tokens"], run.result["output_tokens"]) == (10, 5)
    await nothing_left(server)


@asynccontextmanager
async def pinging(event: bytes) -> AsyncIterator[str]:
    """A provider that sends this event again and again and never an answer; its address."""
    serving: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            while True:
                writer.write(event)
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving)


PINGS = {
    "chat": b'data: {"object":"chat.completion.chunk","choices":[]}\n\n',
    "responses": b'event: keepalive\ndata: {"type":"keepalive"}\n\n',
    "anthropic": b'event: ping\ndata: {"type":"ping"}\n\n',
}


async def pass_pings(clock: Clock, running: Running) -> None:
    """Put the clock forward, pings in between, until an answer is late that has to be there within three SILENT_S."""
    await until(lambda: clock.answers and clock.answers[-1].status)
    for _ in range(5):
        await clock.hear()
        assert running.events[-1]["type"] not in FINAL
        await clock.put_forward(0.62 * SILENT_S)


@each_protocol
async def test_ping_events_extend_idle_timeout_threefold(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, clock: Clock, protocol: str
) -> None:
    monkeypatch.setenv("HERMES_STREAM_RETRIES", "0")
    async with pinging(PINGS[protocol]) as url:
        settings = provider(url, protocol, stale_timeout_seconds=SILENT_S)
        harness = make_harness(settings | {"agent": {"api_max_retries": 0}})
        running = await harness.begin(harness.spec(None, route=TO_P))
        await pass_pings(clock, running)
        run = await running.end()
        assert run.result["failure"] == "stale"


# ---- looking names up


@pytest.fixture
def hanging_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Names ending in `.hangs` are looked up until the test is over; `here.test` is this machine."""
    over, real, looking = threading.Event(), socket.getaddrinfo, list[Any]()

    def look_up(host: Any, *args: Any, **fields: Any) -> Any:
        if str(host).endswith(".hangs"):
            looking.append(host)
            over.wait(600)
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return real("127.0.0.1" if host == "here.test" else host, *args, **fields)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield looking
    over.set()


@pytest.mark.parametrize("host", ["127.0.0.1", "here.test"])
async def test_hanging_dns_lookups_do_not_delay_other_runs(
    harness: Harness, server: ModelServer, hanging_names: list[Any], host: str
) -> None:
    stuck = [await harness.begin(harness.spec(f"http://h{n}.hangs")) for n in range(6)]
    await until(lambda: len(hanging_names) == 6)
    server.script = [Reply(text="Done.")]
    running = await harness.begin(harness.spec(server.url.replace("127.0.0.1", host)))
    assert (await running.end()).result["final_response"] == "Done."
    for run in stuck:
        await run.control("interrupt")


async def test_hanging_dns_lookups_do_not_delay_interrupts(
    harness: Harness, server: ModelServer, hanging_names: list[Any]
) -> None:
    stuck = [await harness.begin(harness.spec(f"http://h{n}.hangs")) for n in range(6)]
    await until(lambda: len(hanging_names) == 6)
    server.script = [Reply(text="Done.", delay_s=600)]
    waiting = await harness.begin(harness.spec(server))
    for run in (waiting, *stuck):
        assert await run.control("interrupt") == "applied"
    for run in (waiting, *stuck):
        assert (await run.end()).final["type"] == "run.cancelled"


# ---- helpers that are not configured well


async def test_compaction_with_unknown_auxiliary_provider(make_harness: MakeHarness, server: ModelServer) -> None:
    auxiliary = {**QUIET["auxiliary"], "compression": {"provider": "nonesuch", "model": "z"}}
    harness = make_harness({"model": {"default": "m", "context_length": 6000}, "auxiliary": auxiliary})
    server.handler = lambda _: Reply(text="Done.", continues=False)
    history = [{"role": role, "content": f"{n} " + "word " * 300} for n in range(12) for role in ("user", "assistant")]
    run = await harness.run(server, history=history)
    assert run.result["final_response"] == "Done."
    assert run.events_of("context.compacted")


async def test_title_with_unknown_auxiliary_provider(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness({"auxiliary": {"title_generation": {"provider": "nonesuch", "model": "z"}}})
    server.handler = lambda _: Reply(text="Done.", continues=False)
    run = await harness.run(server, "Where is the tea?", persist=True, session_id=SESSION, kind="session")
    assert run.result["completed"] is True
    await nothing_left(server)
    session = await harness.app.store.sessions.get_session(SESSION)
    assert session is not None
    assert session["title"]


# ---- what is counted


async def test_usage_of_all_continuations_is_counted(harness: Harness, server: ModelServer) -> None:
    parts = [("one ", "length", 100, 50), ("two ", "length", 150, 40), ("three", "stop", 200, 10)]
    server.script = [
        Reply(text=text, finish=finish, usage={"input": prompt_tokens, "output": output}, continues=False)
        for text, finish, prompt_tokens, output in parts
    ]
    run = await harness.run(server, persist=True, session_id=SESSION)
    assert run.result["final_response"] == "one two three"
    assert (run.result["input_tokens"], run.result["output_tokens"]) == (450, 100)
    assert sum(event["input_tokens"] for event in run.events_of("usage")) == 450
    session = await harness.app.store.sessions.get_session(SESSION)
    assert session is not None
    assert (session["input_tokens"], session["output_tokens"]) == (450, 100)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("thought", "answer", "completed"),
    [("", "", False), ("hm", "", True), ("hm", "Done.", True)],
    ids=["never answered", "reasoning alone", "answered at last"],
)
async def test_usage_of_empty_answers_is_counted(
    harness: Harness, server: ModelServer, thought: str, answer: str, completed: bool
) -> None:
    empty = Reply(reasoning=thought, usage={"input": 100, "output": 500}, continues=False)
    server.script = [empty, empty, empty, replace(empty, text=answer)]
    run = await harness.run(server)
    assert run.result["completed"] is completed
    assert (run.result["input_tokens"], run.result["output_tokens"]) == (400, 2000)
    assert run.final["usage"]["total_tokens"] == 2400


async def test_usage_of_abandoned_answer_is_counted_once(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Once", finish="content_filter", usage={"input": 100, "output": 50})]
    run = await harness.run(server)
    assert run.result["final_response"] == "Once"
    assert (run.result["input_tokens"], run.result["output_tokens"]) == (100, 50)
    assert len(run.events_of("usage")) == 1


# ---- calls that were not asked for


async def test_tool_calls_in_max_iterations_summary_are_dropped(harness: Harness, server: ModelServer) -> None:
    items: list[Json] = []

    async def look(_: Any, args: Json) -> Json:
        items.append(args)
        return {}

    harness.offer(tool("look", look))
    server.script = [
        Reply(tool_calls=[Call("look", id="c1")]),
        Reply(text="So far so good.", tool_calls=[Call("look", {"a": "more"}, id="c2")]),
        Reply(text="Done."),
    ]
    run = await harness.run(server, max_iterations=1, persist=True, session_id=SESSION)
    assert (run.result["failure"], run.result["final_response"]) == ("max_iterations", "So far so good.")
    assert items == [{}]
    assert run.events_of("message.completed")[-1]["tool_calls"] == []
    assert (await harness.rows(SESSION))[-1].tool_calls in (None, [])
    assert run.result["messages"][-1].get("tool_calls") in (None, [])
    await harness.run(server, "go on", persist=True, session_id=SESSION)
    assert "c2" not in body_of(server.requests[-1])


@each_protocol
async def test_tool_calls_after_tool_limit_are_not_executed(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    items: list[Json] = []

    async def look(_: Any, args: Json) -> Json:
        items.append(args)
        return {}

    harness.offer(tool("look", look))
    server.script = [
        Reply(tool_calls=[Call("look", {"a": "1"})]),
        Reply(tool_calls=[Call("look", {"a": "2"})]),
        Reply(text="Done."),
    ]
    run = await harness.run(server, protocol=protocol, max_tool_calls=1)
    assert items == [{"a": "1"}]
    assert (run.result["completed"], run.result["final_response"]) == (True, "Done.")
    assert [bool(request.body.get("tools")) for request in server.requests] == [True, False, False]


# ---- messages at fault

POISON = "POISON " + "word " * 300


async def add_turns(harness: Harness, server: ModelServer, turns: int = 5) -> None:
    """Turns that nearly fill the window."""
    server.handler = lambda _: Reply(text="answer " * 150, continues=False)
    for number in range(turns):
        await harness.run(server, f"q{number} " + "word " * 250, persist=True, session_id=SESSION)


def refusing(reply: Reply) -> Any:
    """Refuses every turn and makes every summary."""
    return lambda request: Reply(text="the summary") if "Below is a conversation" in body_of(request) else reply


NONSENSE = Reply(status=400, error={"message": "nonsense"})
TOO_LONG = Reply(status=400, error={"message": "too long", "code": "context_length_exceeded"})


@pytest.mark.parametrize(
    ("refusal", "failure"),
    [(NONSENSE, "bad_request"), (TOO_LONG, "context_overflow")],
    ids=["compacted before", "compacted because of it"],
)
async def test_faulty_message_is_replaced_by_note_after_compaction(
    make_harness: MakeHarness, server: ModelServer, refusal: Reply, failure: str
) -> None:
    harness = make_harness({"model": {"default": "m", "context_length": 6000}})
    await add_turns(harness, server)
    server.handler = refusing(refusal)
    run = await harness.run(server, POISON, persist=True, session_id=SESSION)
    assert run.result["failure"] == failure
    assert run.events_of("context.compacted")
    server.handler = lambda _: Reply(text="Fine.", continues=False)
    run = await harness.run(server, "next", persist=True, session_id=SESSION)
    assert run.result["completed"] is True
    assert "POISON" not in body_of(server.requests[-1])


@pytest.mark.parametrize("status", [400, 413])
async def test_faulty_message_is_replaced_by_note_in_unpersisted_run(
    harness: Harness, server: ModelServer, status: int
) -> None:
    server.script = [Reply(status=status, error="nonsense")] * 4
    history = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "yes"}]
    run = await harness.run(server, "POISON", history=history)
    assert [message["role"] for message in run.result["messages"]] == ["user", "assistant"] * 2
    server.script = [Reply(text="Fine.")]
    await harness.run(server, "next", history=run.result["messages"])
    messages = sent_messages(server.requests[-1])
    assert "POISON" not in body_of(server.requests[-1])
    assert (messages[0], messages[-1]) == (("user", "before"), ("user", "next"))
    assert [role for role, _ in messages] == ["user", "assistant", "user", "assistant", "user"]


# ---- text that looks like a secret


@each_protocol
@pytest.mark.parametrize("text", [f"It begins with {KEY[:8]}", KEY[:8], f"{KEY[:-1]}"], ids=["tail", "all", "nearly"])
async def test_answer_ending_in_key_prefix_is_delivered_whole(
    harness: Harness, server: ModelServer, protocol: Protocol, text: str
) -> None:
    server.repeat, server.script = True, [Reply(text=text, continues=False)]
    run = await harness.run(server, protocol=protocol, persist=True, session_id=SESSION)
    assert run.actions() == []
    assert run.result["completed"] is True
    row = (await harness.rows(SESSION))[-1]
    assert [run.result["final_response"], row.content, run.text()] == [text] * 3


# ---- going on


@pytest.mark.parametrize("white", ["\n", "\n\n", "  \n"], ids=repr)
async def test_whitespace_between_continuations_is_kept_with_prefill(
    harness: Harness, server: ModelServer, white: str
) -> None:
    whole = Reply(text=[f"List:{white}", f"{white}- one"], continues=False)
    # Cut in the middle of the second piece, which is lost with it.
    server.handler = scripted(cut_after("- o", whole), Reply(text=f"{white}- one", continues=False))
    run = await harness.run(server, model="claude-sonnet-4-5")
    assert run.actions() == ["continue"]
    assert sent_messages(server.requests[1])[-1] == ("assistant", f"List:{white}")
    assert run.result["final_response"] == run.text() == f"List:{white}{white}- one"
