"""What a turn leaves in its session, and what the next turn is therefore sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hermes.core.failures import KINDS
from hermes.core.spec import RunSpec
from support.model_server import Call, ModelServer, Protocol, Reply, Request
from support.waiting import until

from .conftest import MakeHarness
from .harness import (
    PROTOCOLS,
    Clock,
    CompletedRun,
    Harness,
    Json,
    cut_after,
    nothing_left,
    scripted,
    sent_messages,
    stall_after,
    tool,
)

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
SESSION = "the-session"


def system_of(request: Request) -> str:
    return "\n\n".join(turn.text for turn in request.turns if turn.role == "system")


async def transcript(harness: Harness) -> list[tuple[str, Any]]:
    return [(row.role, row.content) for row in await harness.rows(SESSION)]


async def turn(harness: Harness, server: ModelServer, message: Any = "hi", **fields: Any) -> CompletedRun:
    return await harness.run(server, message, persist=True, session_id=SESSION, **fields)


# ---- turns that go well


@each_protocol
async def test_completed_turn_is_stored_and_sent_in_next_turn(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    harness.offer(tool("look"))
    server.script = [
        Reply(text="Wait.", tool_calls=[Call("look", {"a": "x"}, id="call_1")]),
        Reply(text="Done."),
        Reply(text="Again."),
    ]
    first = await turn(harness, server, protocol=protocol)
    assert await transcript(harness) == [
        ("user", "hi"),
        ("assistant", "Wait."),
        ("tool", '{"echo": {"a": "x"}}'),
        ("assistant", "Done."),
    ]
    assert first.result["final_response"] == "Done."
    second = await turn(harness, server, "and now?", protocol=protocol)
    pairs = [pair for pair in sent_messages(server.requests[2]) if pair[0] != "call"]
    assert pairs == [
        ("user", "hi"),
        ("assistant", "Wait."),
        ("tool", '{"echo": {"a": "x"}}'),
        ("assistant", "Done."),
        ("user", "and now?"),
    ]
    assert [m["role"] for m in second.result["messages"]] == [
        *("user", "assistant", "tool", "assistant"),
        *("user", "assistant"),
    ]


async def test_rows_are_announced_by_events(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(text="Wait.", tool_calls=[Call("look")]), Reply(text="Done.")]
    run = await turn(harness, server)
    rows = await harness.rows(SESSION)
    announced = [run.event("run.started")["user_row"]]
    announced += [event["row"] for event in run.events_of("message.completed", "tool.finished")]
    assert announced == [row.id for row in rows]
    assert run.final["row"] == rows[-1].id
    assert {row.run_id for row in rows} == {run.spec.run_id}


async def test_reasoning_is_stored_apart_from_text(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(reasoning="hm", text="Done.")]
    await turn(harness, server)
    row = (await harness.rows(SESSION))[-1]
    assert (row.content, row.reasoning) == ("Done.", "hm")


async def test_user_row_is_stored_before_first_delta(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    spec = harness.spec(server, persist=True, session_id=SESSION)
    live = await harness.engine.start(spec)
    async for event in harness.engine.subscribe(spec.run_id):
        if event.type == "text.delta":
            assert (await transcript(harness))[0] == ("user", "hi")
    assert live.task is not None
    await live.task


async def test_client_supplied_history_is_used_unchanged(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    history = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "yes"}]
    run = await harness.run(server, "now", history=history)
    assert sent_messages(server.requests[0]) == [("user", "before"), ("assistant", "yes"), ("user", "now")]
    assert [m["content"] for m in run.result["messages"]] == ["before", "yes", "now", "Done."]
    assert history == [{"role": "user", "content": "before"}, {"role": "assistant", "content": "yes"}]


async def test_unpersisted_run_does_not_read_session(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="One."), Reply(text="Two.")]
    await turn(harness, server)
    await harness.run(server, "apart", session_id=SESSION, persist=False, history=[])
    assert sent_messages(server.requests[1]) == [("user", "apart")]
    assert len(await harness.rows(SESSION)) == 2


async def test_multipart_message_is_resent_identically(harness: Harness, server: ModelServer) -> None:
    import base64

    note = base64.b64encode(b"buy milk").decode()
    parts = [
        {"type": "text", "text": "See:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
        {"type": "file", "file": {"name": "notes.txt", "media_type": "text/plain", "data": note}},
    ]
    server.script = [Reply(text="One."), Reply(text="Two.")]
    await turn(harness, server, parts)
    first = server.requests[0].body["messages"][1:]
    assert "buy milk" in json.dumps(first)
    assert "notes.txt" in json.dumps(first)
    assert "iVBORw0KGgo=" in json.dumps(first)
    await turn(harness, server, "and now?")
    assert server.requests[1].body["messages"][1] == first[0]


# ---- turns that do not


@dataclass(frozen=True)
class Ending:
    """A turn that ends badly: how it is brought about, and the rows it leaves after the user's."""

    replies: list[Any]
    rows: list[tuple[str, str, str | None, bool]]
    fields: Json
    # Event upon which it is stopped, or its time is up.
    stop_at: str = ""
    late_at: str = ""


def failed(kind: str) -> str:
    return f"[The turn failed: {KINDS[kind].sentence}]"  # type: ignore[index]


STOPPED = "[Stopped by the user.]"
INTERRUPTED = '{"status": "interrupted"'
LOOK = Call("look", {"a": "x"}, id="call_1")
ENDINGS = {
    "refused": Ending([Reply(status=403)], [("assistant", failed("forbidden"), None, True)], {}),
    "auth": Ending([Reply(status=401)], [("assistant", failed("auth"), None, True)], {}),
    "filtered without text": Ending(
        [Reply(finish="content_filter")], [("assistant", failed("filtered"), None, True)], {}
    ),
    "stopped without text": Ending(
        [Reply(text="x", delay_s=600)], [("assistant", STOPPED, None, True)], {}, "model.started"
    ),
    "stopped with text": Ending(
        [Reply(text=["Once ", "upon"], gap_s=600)], [("assistant", "Once ", "interrupted", False)], {}, "text.delta"
    ),
    "filtered with text": Ending(
        [Reply(text="Once", finish="content_filter")], [("assistant", "Once", "content_filter", False)], {}
    ),
    "truncated": Ending(
        [Reply(text="Once", finish="length")], [("assistant", "Once", "length", False)], {"max_output_tokens": 64}
    ),
    "deadline with text": Ending(
        [Reply(text=["Once ", "upon"], gap_s=600)],
        [("assistant", "Once ", "error", False)],
        {"deadline_seconds": 300},
        late_at="text.delta",
    ),
    "failed after a tool round": Ending(
        [Reply(text="Wait.", tool_calls=[LOOK]), Reply(status=403)],
        [
            ("assistant", "Wait.", "tool_calls", False),
            ("tool", '{"echo": {"a": "x"}}', None, False),
            ("assistant", failed("forbidden"), None, True),
        ],
        {},
    ),
    "stopped in a tool": Ending(
        [Reply(text="Wait.", tool_calls=[Call("stuck", {}, id="call_1"), Call("look", {"a": "x"}, id="call_2")])],
        [
            ("assistant", "Wait.", "tool_calls", False),
            ("tool", INTERRUPTED, None, False),
            ("tool", "", None, False),
            ("assistant", STOPPED, None, True),
        ],
        {},
        "tool.started",
    ),
    "stopped in the second step": Ending(
        [Reply(tool_calls=[LOOK]), Reply(text=["Once ", "upon"], gap_s=600)],
        [
            ("assistant", "", "tool_calls", False),
            ("tool", '{"echo": {"a": "x"}}', None, False),
            ("assistant", "Once ", "interrupted", False),
        ],
        {},
        "text.delta",
    ),
    "stopped inside a call": Ending(
        [stall_after("SECOND", Reply(text="Wait.", tool_calls=[Call("look", ['{"a": "FIRST', 'SECOND"}'])]))],
        [("assistant", "Wait.", "interrupted", False)],
        {},
        "tool.drafted",
    ),
    "stopped inside a call with nothing said": Ending(
        [stall_after("SECOND", Reply(tool_calls=[Call("look", ['{"a": "FIRST', 'SECOND"}'])]))],
        [("assistant", STOPPED, None, True)],
        {},
        "tool.drafted",
    ),
    "out of steps": Ending(
        [Reply(text="Wait.", tool_calls=[LOOK]), Reply(text="So far.")],
        [
            ("assistant", "Wait.", "tool_calls", False),
            ("tool", '{"echo": {"a": "x"}}', None, False),
            ("assistant", "So far.", None, False),
        ],
        {"max_iterations": 1},
    ),
    "invalid calls": Ending(
        [Reply(text=f"Try {n}.", tool_calls=[Call("nonsense", {"a": str(n)}, id=f"call_{n}")]) for n in range(3)],
        [
            *[
                row
                for n in range(3)
                for row in [("assistant", f"Try {n}.", "tool_calls", False), ("tool", "", None, False)]
            ],
            ("assistant", failed("invalid_calls"), None, True),
        ],
        {},
    ),
}
each_ending = pytest.mark.parametrize("name", ENDINGS)


async def bring_about(
    harness: Harness, server: ModelServer, clock: Clock, ending: Ending, protocol: Protocol = "chat"
) -> CompletedRun:
    async def stuck(_: Any, __: Any) -> Json:
        await asyncio.Event().wait()
        return {}

    harness.offer(tool("look"), tool("stuck", stuck))
    server.handler = scripted(*ending.replies)
    spec = harness.spec(server, persist=True, session_id=SESSION, protocol=protocol, **ending.fields)
    running = await harness.begin(spec)
    if ending.stop_at:
        await running.wait_for(ending.stop_at)
        await running.control("interrupt")
    if ending.late_at:
        await running.wait_for(ending.late_at)
        await clock.put_forward(301)
    run = await running.end()
    assert run.final["type"] != "run.completed"
    return run


@each_ending
async def test_closing_row_of_every_ending(harness: Harness, server: ModelServer, clock: Clock, name: str) -> None:
    ending = ENDINGS[name]
    await bring_about(harness, server, clock, ending)
    rows = await harness.rows(SESSION)
    assert (rows[0].role, rows[0].content) == ("user", "hi")
    assert [row.role for row in rows[1:]] == [role for role, *_ in ending.rows]
    for row, (_, content, finish, synthetic) in zip(rows[1:], ending.rows, strict=True):
        assert str(row.content or "").startswith(content)
        if row.role == "assistant":
            assert row.content == content or content == ""
            assert row.synthetic is synthetic
        if finish is not None:
            assert row.finish_reason == finish
    await nothing_left(server)


@each_ending
@each_protocol
async def test_history_after_every_ending_is_well_formed(
    harness: Harness, server: ModelServer, clock: Clock, name: str, protocol: Protocol
) -> None:
    await bring_about(harness, server, clock, ENDINGS[name], protocol)
    server.handler, server.script = None, [Reply(text="Fine.")]
    run = await turn(harness, server, "and now?", protocol=protocol)
    assert run.result["final_response"] == "Fine."
    request = server.requests[-1]
    roles = [role for role, _ in sent_messages(request) if role != "call"]
    assert roles[0] == "user"
    assert roles[-1] == "user"
    assert [role for at, role in enumerate(roles) if at and role == roles[at - 1] == "user"] == []
    call_ids_sent, result_ids = call_ids(request)
    assert sorted(call_ids_sent) == sorted(result_ids)


def call_ids(request: Request) -> tuple[list[str], list[str]]:
    """The ids of the calls and of the results in a request, whatever the protocol."""
    ids: list[str] = []
    tool_call_ids: list[str] = []
    for item in request.body.get("input") or request.body["messages"]:
        ids += [call["id"] for call in item.get("tool_calls") or ()]
        if item.get("role") == "tool":
            tool_call_ids.append(item["tool_call_id"])
        if item.get("type") in ("function_call", "function_call_output"):
            (ids if item["type"] == "function_call" else tool_call_ids).append(item["call_id"])
        for block in item["content"] if isinstance(item.get("content"), list) else ():
            ids += [block["id"]] if block.get("type") == "tool_use" else []
            tool_call_ids += [block["tool_use_id"]] if block.get("type") == "tool_result" else []
    return ids, tool_call_ids


@each_protocol
async def test_history_after_failed_turn(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    server.script = [Reply(status=403, error="ZEBRA"), Reply(text="Fine.")]
    await turn(harness, server, "first", protocol=protocol)
    await turn(harness, server, "second", protocol=protocol)
    assert sent_messages(server.requests[1]) == [
        ("user", "first"),
        ("assistant", failed("forbidden")),
        ("user", "second"),
    ]
    assert "ZEBRA" not in json.dumps(server.requests[1].body)


async def test_history_after_turn_interrupted_in_tool(harness: Harness, server: ModelServer, clock: Clock) -> None:
    await bring_about(harness, server, clock, ENDINGS["stopped in a tool"])
    server.handler, server.script = None, [Reply(text="Fine.")]
    await turn(harness, server, "second")
    messages = server.requests[-1].body["messages"][1:]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["call_1", "call_2"]
    assert [m["tool_call_id"] for m in messages[2:4]] == ["call_1", "call_2"]
    assert json.loads(messages[2]["content"])["status"] == "interrupted"
    assert messages[4]["content"] == STOPPED


@pytest.mark.parametrize(
    ("kind", "reply"),
    [
        ("bad_request", Reply(status=400, error="no")),
        ("payload_too_large", Reply(status=413)),
        ("policy_blocked", Reply(status=400, error={"code": "content_policy_violation", "message": "Rejected."})),
        ("context_overflow", Reply(status=400, error={"code": "context_length_exceeded", "message": "Too long."})),
    ],
)
async def test_poisonous_message_does_not_fail_next_turn(
    harness: Harness, server: ModelServer, kind: str, reply: Reply
) -> None:
    server.handler = lambda request: reply if "POISON" in json.dumps(request.body) else Reply(text="Fine.")
    first = await turn(harness, server, "POISON")
    assert first.result["failure"] == kind
    row = (await harness.rows(SESSION))[0]
    assert row.content == "POISON"
    assert isinstance(row.api_content, str)
    assert "\n" not in row.api_content
    second = await turn(harness, server, "and now?")
    assert second.result["final_response"] == "Fine."
    assert sent_messages(server.requests[-1]) == [
        ("user", row.api_content),
        ("assistant", failed(kind)),
        ("user", "and now?"),
    ]


async def test_innocent_message_is_resent_after_failure(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(status=401), Reply(text="Fine.")]
    await turn(harness, server, "hello")
    await turn(harness, server, "and now?")
    assert sent_messages(server.requests[1])[0] == ("user", "hello")


async def test_unpersisted_result_includes_synthetic_rows(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(status=403)]
    run = await harness.run(server)
    assert run.result["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": failed("forbidden")},
    ]
    assert run.result["final_response"] == ""


async def test_continued_answer_is_one_row(harness: Harness, server: ModelServer) -> None:
    text = ["The quick brown fox ", "jumps over ", "the lazy dog."]
    server.handler = scripted(cut_after("the lazy", Reply(text=text)), Reply(text=text), Reply(text="Fine."))
    await turn(harness, server)
    await turn(harness, server, "and now?")
    assert sent_messages(server.requests[2]) == [("user", "hi"), ("assistant", "".join(text)), ("user", "and now?")]


# ---- the prompt of a session


@each_protocol
async def test_system_prompt_is_identical_between_turns(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    (harness.home.path / "memories").mkdir(parents=True)
    (harness.home.memories / "MEMORY.md").write_text("Likes tea.\n")
    server.script = [Reply(text="One."), Reply(text="Two.")]
    await turn(harness, server, protocol=protocol)
    (harness.home.memories / "MEMORY.md").write_text("Likes coffee.\n")
    await turn(harness, server, "and now?", protocol=protocol)
    first, second = (system_of(request) for request in server.requests)
    assert "Likes tea." in first
    assert second == first


async def test_memory_is_in_prompt_of_next_session(harness: Harness, server: ModelServer) -> None:
    (harness.home.path / "memories").mkdir(parents=True)
    server.script = [Reply(text="One."), Reply(text="Two.")]
    await turn(harness, server)
    (harness.home.memories / "MEMORY.md").write_text("Likes coffee.\n")
    (harness.home.memories / "USER.md").write_text("Is called Ada.\n")
    await harness.run(server, "hi", persist=True, session_id="another")
    assert "Likes coffee." in system_of(server.requests[1])
    assert "Is called Ada." in system_of(server.requests[1])


def change_tools(harness: Harness) -> None:
    harness.offer(tool("look"))


def change_soul(harness: Harness) -> None:
    harness.home.soul_file.write_text("You are a pirate.")


@pytest.mark.parametrize("change", [change_tools, change_soul])
async def test_tool_or_identity_change_rebuilds_prompt(
    harness: Harness, server: ModelServer, change: Callable[[Harness], None]
) -> None:
    server.script = [Reply(text="One."), Reply(text="Two.")]
    await turn(harness, server)
    change(harness)
    await turn(harness, server, "and now?")
    assert system_of(server.requests[0]) != system_of(server.requests[1])


async def test_model_change_rebuilds_prompt(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="One."), Reply(text="Two.")]
    await turn(harness, server)
    await turn(harness, server, "and now?", model="n")
    assert system_of(server.requests[0]) != system_of(server.requests[1])


async def test_turn_instructions_are_not_stored(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="One."), Reply(text="Two.")]
    await turn(harness, server, instructions="Speak like a pirate.")
    await turn(harness, server, "and now?")
    first, second = (system_of(request) for request in server.requests)
    assert first == f"{second}\n\nSpeak like a pirate."


async def test_session_keeps_prompt_on_another_day(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hermes.agent import prompt_context

    server.script = [Reply(text="One."), Reply(text="Two.")]
    await turn(harness, server)
    monkeypatch.setattr(prompt_context, "_day", lambda *_: "Monday, 2031-01-06")
    await turn(harness, server, "and now?")
    assert system_of(server.requests[0]) == system_of(server.requests[1])


# ---- titles and counters


async def test_title_is_generated_after_first_turn(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness({"auxiliary": {"title_generation": {"enabled": True}}})
    server.script = [Reply(text="Done."), Reply(text="Greeting a fox", usage={"input": 1000, "output": 9})]
    run = await turn(harness, server, "Say hello to the fox", kind="session")
    session = await until(lambda: harness.app.store.sessions.get_session(SESSION), lambda row: row and row["title"])
    assert session is not None
    assert session["title"] == "Greeting a fox"
    assert not server.requests[1].body.get("tools")
    assert run.result["input_tokens"] == 10
    assert session["input_tokens"] == 10


@pytest.mark.parametrize("kind", ["chat", "response", "run", "job", "subagent"])
async def test_api_turn_uses_first_words_as_title(make_harness: MakeHarness, server: ModelServer, kind: str) -> None:
    harness = make_harness({"auxiliary": {"title_generation": {"enabled": True}}})
    server.script = [Reply(text="Done."), Reply(text="Again.")]
    history = [{"role": "user", "content": "Say hello  to the fox"}, {"role": "assistant", "content": "Hello."}]
    await turn(harness, server, "and the hen", kind=kind, history=history, base_id=SESSION)
    await turn(harness, server, "and the dog", kind=kind)
    await nothing_left(server)
    session = await harness.app.store.sessions.get_session(SESSION)
    assert session is not None and session["title"] == "Say hello to the fox"
    assert len(server.requests) == 2


async def test_untitled_session_gets_first_words_as_title(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness({"auxiliary": {"title_generation": {"enabled": True}}})
    await harness.app.store.sessions.create_session(SESSION, "api_server")
    server.script = [Reply(text="Done.")]
    await turn(harness, server, "Say hello to the fox", kind="chat")

    async def title() -> str | None:
        session = await harness.app.store.sessions.get_session(SESSION)
        return session["title"] if session else None

    assert await until(title) == "Say hello to the fox" and len(server.requests) == 1


async def test_failed_title_generation_is_ignored(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness({"auxiliary": {"title_generation": {"enabled": True}}})
    server.handler = lambda request: Reply(text="Done.") if request.number == 1 else Reply(status=403)
    run = await turn(harness, server, kind="cli")
    assert run.result["completed"] is True
    await server.until(lambda: len(server.requests) >= 2)
    await nothing_left(server)


async def test_session_token_totals_over_turns(harness: Harness, server: ModelServer) -> None:
    usage = {"input": 100, "output": 20, "cached": 60}
    server.script = [Reply(text="One.", usage=usage), Reply(text="Two.", usage=usage)]
    await turn(harness, server)
    await turn(harness, server, "and now?")
    session = await harness.app.store.sessions.get_session(SESSION)
    assert session is not None
    assert (session["input_tokens"], session["output_tokens"]) == (200, 40)
    assert session["cache_read_tokens"] == 120


def test_stored_spec_has_no_credentials() -> None:
    from hermes.core.spec import RouteChoice

    spec = RunSpec("hi", "s", route=RouteChoice(model="m", api_key="sk-secret-123456"))
    assert "sk-secret-123456" not in json.dumps(spec.stored(), default=str)
    assert "sk-secret-123456" not in repr(spec)


async def titled(make_harness: MakeHarness, server: ModelServer, title: str) -> tuple[Harness, str]:
    """The title that a model's proposal becomes."""
    harness = make_harness({"auxiliary": {"title_generation": {"enabled": True}}})
    server.handler = lambda r: (
        Reply(text="Done.", continues=False) if sent_messages(r)[-1][1] == "hi" else Reply(text=title)
    )
    await turn(harness, server, kind="session")
    await server.until(lambda: len(server.requests) >= 2)
    await nothing_left(server)
    session = await harness.app.store.sessions.get_session(SESSION)
    assert session is not None
    return harness, session["title"] or ""


@pytest.mark.parametrize(
    "proposal", ['"Greeting a fox"', "Greeting\n a fox", " Greeting a fox. ", "word " * 100, "\x07Greeting\u200b a fox"]
)
async def test_generated_title_is_one_clean_line(make_harness: MakeHarness, server: ModelServer, proposal: str) -> None:
    _, title = await titled(make_harness, server, proposal)
    assert 0 < len(title) <= 100
    assert title == " ".join(title.split())
    assert title.isprintable()


async def test_titled_session_is_not_titled_again(make_harness: MakeHarness, server: ModelServer) -> None:
    harness, title = await titled(make_harness, server, "Greeting a fox")
    assert title == "Greeting a fox"
    count = len(server.requests)
    await turn(harness, server)
    await nothing_left(server)
    assert len(server.requests) == count + 1
