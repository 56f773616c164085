"""A turn that goes well: its events in order, its text, its tokens, and where the model was asked."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from hermes.core.spec import RouteChoice
from support.model_server import Call, ModelServer, Protocol, Reply

from .conftest import MakeHarness
from .harness import KEY, MODES, PROTOCOLS, Harness, rebuilt, sent_messages, tool

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)

# What the contract lists for each event beyond the envelope.
FIELDS = {
    "run.queued": "session_id source position",
    "run.started": "kind session_id model provider api_mode tools user_row max_iterations on_detach",
    "model.started": "attempt message_id model provider streaming prompt_tokens tools_count",
    "model.retrying": "attempt failure action wait_seconds message",
    "model.switched": "from to reason",
    "text.delta": "message_id offset text",
    "reasoning.delta": "message_id offset text form",
    "tool.drafted": "message_id index name",
    "reasoning.completed": "message_id chars cuts",
    "message.completed": "message_id row text_length finish_reason tool_calls partial cuts",
    "usage": "input_tokens output_tokens total_tokens cache_read_tokens cache_write_tokens reasoning_tokens cost_usd "
    "measured task",
    "tool.started": "call_id name args preview effect parent_call_id",
    "tool.output": "call_id stream offset text",
    "tool.finished": "call_id name status code duration_ms row chars spilled repeated",
    "notice": "level code message",
    "run.completed": "message_id row finish_reason steps usage pending_calls pending_steer",
    "run.failed": "failure error retryable partial_row text_length steps usage",
    "run.cancelled": "by reason partial_row text_length steps usage",
}


def without_repeats(types: list[str]) -> list[str]:
    return [kind for at, kind in enumerate(types) if at == 0 or types[at - 1] != kind]


# ---- order


@each_protocol
async def test_plain_turn_event_order(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    server.script = [Reply(text=["Hel", "lo"])]
    run = await harness.run(server, protocol=protocol)
    order = ["run.started", "model.started", "text.delta", "message.completed", "usage", "run.completed"]
    assert without_repeats(run.types) == order


@each_protocol
async def test_tool_turn_event_order(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(text="Wait.", tool_calls=[Call("look", {"a": "x"})]), Reply(text="Done.")]
    run = await harness.run(server, protocol=protocol)
    assert without_repeats(run.types) == [
        *("run.started", "model.started", "text.delta", "tool.drafted", "message.completed", "usage"),
        *("tool.started", "tool.finished"),
        *("model.started", "text.delta", "message.completed", "usage", "run.completed"),
    ]


@each_protocol
async def test_reasoning_completed_precedes_message_completed(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    server.script = [Reply(reasoning=["first ", "then"], text="Done.")]
    run = await harness.run(server, protocol=protocol)
    assert run.text("reasoning.delta") == "first then"
    at = run.types.index("reasoning.completed")
    assert run.types[at + 1] == "message.completed"
    assert run.event("reasoning.completed")["chars"] == len("first then")
    assert run.result["last_reasoning"] == "first then"
    assert run.result["final_response"] == "Done."


@pytest.mark.parametrize(("protocol", "form"), [("chat", "raw"), ("responses", "summary"), ("anthropic", "raw")])
async def test_reasoning_form(harness: Harness, server: ModelServer, protocol: Protocol, form: str) -> None:
    server.script = [Reply(reasoning="hm", text="Done.")]
    run = await harness.run(server, protocol=protocol)
    assert {event["form"] for event in run.events_of("reasoning.delta")} == {form}


async def test_submitted_run_is_queued_first(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    spec = harness.spec(server, persist=True)
    await harness.engine.submit(spec)
    events = [event.as_dict() async for event in harness.engine.subscribe(spec.run_id)]
    assert [event["type"] for event in events][:2] == ["run.queued", "run.started"]
    assert events[0]["position"] == 0
    assert events[0]["session_id"] == spec.session_id
    assert events[-1]["type"] == "run.completed"


# ---- fields


async def test_every_event_has_envelope_and_fields(harness: Harness, server: ModelServer) -> None:
    async def talk(ctx: Any, _: Any) -> dict[str, Any]:
        ctx.emit("stdout", "working\n")
        return {"ok": True}

    harness.offer(tool("talk", talk))
    server.script = [
        Reply(reset_before_headers=True),
        Reply(reasoning="hm", text="Wait.", tool_calls=[Call("talk")]),
        Reply(text="Done."),
    ]
    run = await harness.run(server, sampling={"verbosity": "low"})
    missing: dict[str, set[str]] = {}
    for event in run.events:
        assert event["run_id"] == run.spec.run_id
        assert isinstance(event["ts"], float)
        assert isinstance(event["step"], int)
        wanted = set(FIELDS[event["type"]].split())
        if not wanted <= event.keys():
            missing[event["type"]] = wanted - event.keys()
    assert missing == {}
    assert {"model.retrying", "tool.output", "notice", "reasoning.completed"} <= set(run.types)


async def test_events_of_step_carry_step_number(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(tool_calls=[Call("look")]), Reply(text="Done.")]
    run = await harness.run(server)
    steps = [
        event["step"] for event in run.events_of("model.started", "message.completed", "tool.started", "text.delta")
    ]
    assert steps == [1, 1, 1, 2, 2, 2]


async def test_events_outside_step_have_step_zero(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    run = await harness.run(server)
    assert [event["step"] for event in run.events_of("run.started", "run.completed")] == [0, 0]


async def test_run_started_names_model_and_tools(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"), tool("act"))
    server.script = [Reply(text="Done.")]
    run = await harness.run(server, kind="chat", max_iterations=7, on_detach="cancel", provider="someone")
    started = run.event("run.started")
    facts = {name: started[name] for name in ("kind", "model", "provider", "api_mode", "max_iterations", "on_detach")}
    assert facts == {
        "kind": "chat",
        "model": "m",
        "provider": "someone",
        "api_mode": "chat_completions",
        "max_iterations": 7,
        "on_detach": "cancel",
    }
    assert started["tools"] == ["act", "look"]
    assert started["session_id"] == run.spec.session_id


async def test_run_and_message_id_formats(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    run = await harness.run(server)
    assert re.fullmatch(r"run_[0-9a-f]{32}", run.spec.run_id)
    assert re.fullmatch(r"msg_[0-9a-f]{24}", run.event("message.completed")["message_id"])


async def test_message_id_is_stable_over_attempts(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(reset_before_headers=True), Reply(text="Done.")]
    run = await harness.run(server)
    started = run.events_of("model.started")
    assert [event["attempt"] for event in started] == [1, 2]
    assert {event["message_id"] for event in started} == {run.event("message.completed")["message_id"]}


# ---- text


@each_protocol
@pytest.mark.parametrize("packets", [None, 1, [3, 50, 7]])
async def test_deltas_rebuild_text_for_any_packets(
    harness: Harness, server: ModelServer, protocol: Protocol, packets: Any
) -> None:
    text = ["Grüße ", "aus 🙂 ", "Köln, ", "日本", "語"]
    server.script = [Reply(text=text, packets=packets)]
    run = await harness.run(server, protocol=protocol)
    assert run.text() == run.result["final_response"] == "".join(text)


async def test_first_delta_is_delivered_immediately(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text=["Hel", "lo"], gap_s=600)]
    running = await harness.begin(harness.spec(server))
    assert (await running.wait_for("text.delta"))["text"] == "Hel"
    assert server.open_streams == 1
    await running.control("interrupt")
    await running.end()


async def test_fast_chunks_are_coalesced_into_few_deltas(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text=[f"{n} " for n in range(500)])]
    run = await harness.run(server)
    assert run.text() == "".join(f"{n} " for n in range(500))
    assert len(run.events_of("text.delta")) < 100


@each_protocol
async def test_non_streamed_answer_emits_same_events(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    server.script = [Reply(reasoning="hm", text="Hello", as_json=True)]
    run = await harness.run(server, protocol=protocol)
    assert run.text() == run.result["final_response"] == "Hello"
    assert run.text("reasoning.delta") == "hm"
    assert run.final["type"] == "run.completed"


async def test_leading_newlines_of_answer_are_dropped(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text=["\n", "\n\n", "Hello\n", "you"])]
    run = await harness.run(server)
    assert run.text() == run.result["final_response"] == "Hello\nyou"
    assert run.result["messages"][-1]["content"] == "Hello\nyou"


@pytest.mark.parametrize("tag", ["think", "thinking", "reasoning", "thought", "REASONING_SCRATCHPAD", "Think"])
async def test_inline_think_tags_become_reasoning(harness: Harness, server: ModelServer, tag: str) -> None:
    server.script = [Reply(text=["<", tag[:3], tag[3:], ">se", f"cret</{tag}", ">\n\nHel", "lo"])]
    run = await harness.run(server)
    assert run.text() == run.result["final_response"] == "Hello"
    assert run.result["last_reasoning"] == "secret"


async def test_think_tag_in_code_fence_is_text(harness: Harness, server: ModelServer) -> None:
    text = "Look:\n```\n<think>\nx\n</think>\n```\nDone."
    server.script = [Reply(text=list(text))]
    run = await harness.run(server)
    assert run.result["final_response"] == text


async def test_text_after_tool_call_is_delivered_and_stored(harness: Harness, server: ModelServer) -> None:
    def chunk(finish: str | None = None, **delta: Any) -> str:
        return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}) + "\n\n"

    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    raw = chunk(content="Before") + chunk(tool_calls=[call]) + chunk(content=" after") + chunk("tool_calls")
    harness.offer(tool("look"))
    server.script = [Reply(raw=raw + "data: [DONE]\n\n"), Reply(text="Done.")]
    run = await harness.run(server)
    assert run.result["messages"][1]["content"] == "Before after"
    assert list(rebuilt(run.events).values()) == ["Before after", "Done."]


async def test_final_response_is_last_message(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(text="Wait.", tool_calls=[Call("look")]), Reply(text="Done.")]
    run = await harness.run(server)
    assert run.result["final_response"] == "Done."
    assert [m["role"] for m in run.result["messages"]] == ["user", "assistant", "tool", "assistant"]


# ---- what the next step is sent


@each_protocol
async def test_next_step_includes_call_and_result(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(text="Wait.", tool_calls=[Call("look", {"a": "x"})]), Reply(text="Done.")]
    await harness.run(server, protocol=protocol)
    messages = sent_messages(server.requests[1])
    assert messages[0] == ("user", "hi")
    assert ("assistant", "Wait.") in messages
    assert messages[-1] == ("tool", '{"echo": {"a": "x"}}')


async def test_signed_thinking_is_replayed(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(reasoning="hm", signature="c2ln", tool_calls=[Call("look")]), Reply(text="Done.")]
    await harness.run(server, protocol="anthropic")
    blocks = server.requests[1].body["messages"][1]["content"]
    assert {"type": "thinking", "thinking": "hm", "signature": "c2ln"} in blocks


async def test_encrypted_reasoning_is_replayed(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(reasoning="hm", encrypted="sealed", tool_calls=[Call("look")]), Reply(text="Done.")]
    await harness.run(server, protocol="responses", model="gpt-5")
    assert server.requests[0].body["store"] is False
    items = [item for item in server.requests[1].body["input"] if item.get("type") == "reasoning"]
    assert [item["encrypted_content"] for item in items] == ["sealed"]


async def test_encrypted_reasoning_is_not_sent_to_other_protocol(
    harness: Harness, server: ModelServer, other: ModelServer
) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(reasoning="hm", encrypted="c2VjcmV0LXN0YXRl", tool_calls=[Call("look")]), Reply(status=403)]
    other.script = [Reply(text="Done.")]
    fallback = {
        "provider": "f",
        "model": "n",
        "base_url": f"{other.url}/v1",
        "api_mode": "chat_completions",
        "api_key": KEY,
    }
    run = await harness.run(server, protocol="responses", model="gpt-5", fallbacks=(fallback,))
    assert run.result["final_response"] == "Done."
    assert "c2VjcmV0LXN0YXRl" not in json.dumps(other.requests[0].body)


async def test_tool_call_extra_content_is_replayed(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    extra = {"vendor": {"signature": "abc"}}
    server.script = [Reply(tool_calls=[Call("look", extra_content=extra)]), Reply(text="Done.")]
    await harness.run(server)
    calls = server.requests[1].body["messages"][-2]["tool_calls"]
    assert calls[0]["extra_content"] == extra


# ---- tokens


@each_protocol
async def test_usage_totals_include_cached_tokens_over_steps(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    harness.offer(tool("look"))
    usage = {"input": 100, "output": 20, "cached": 60, "cache_write": 10, "reasoning": 7}
    server.script = [
        Reply(tool_calls=[Call("look")], usage=usage),
        Reply(text="Done.", usage={"input": 130, "output": 5}),
    ]
    run = await harness.run(server, protocol=protocol)
    first = run.events_of("usage")[0]
    assert (first["input_tokens"], first["output_tokens"], first["total_tokens"]) == (100, 20, 120)
    assert (first["cache_read_tokens"], first["cache_write_tokens"], first["reasoning_tokens"]) == (60, 10, 7)
    assert first["measured"] == "provider"
    result = run.result
    assert (result["input_tokens"], result["output_tokens"], result["total_tokens"]) == (230, 25, 255)
    details = result["usage_details"]
    assert (details["cache_read_tokens"], details["cache_write_tokens"], details["reasoning_tokens"]) == (60, 10, 7)
    totals = run.final["usage"]
    assert (totals["input_tokens"], totals["total_tokens"], totals["cache_read_tokens"]) == (230, 255, 60)
    assert result["api_calls"] == 2


async def test_missing_usage_is_estimated(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Hello there, this is an answer.", no_usage=True)]
    run = await harness.run(server)
    usage = run.event("usage")
    assert usage["measured"] == "estimate"
    assert usage["input_tokens"] > 0
    assert usage["output_tokens"] > 0


# ---- options and routes


async def test_unsupported_option_is_dropped_with_notice(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    run = await harness.run(server, protocol="anthropic", sampling={"temperature": 0.5, "presence_penalty": 1.0})
    assert server.requests[0].body["temperature"] == 0.5
    assert "presence_penalty" not in server.requests[0].body
    assert "presence_penalty" in run.event("notice")["message"]


@each_protocol
async def test_turn_instructions_end_system_prompt(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    server.script = [Reply(text="Done.")]
    await harness.run(server, protocol=protocol, instructions="Speak like a pirate.")
    system = "\n\n".join(turn.text for turn in server.requests[0].turns if turn.role == "system")
    assert system.endswith("Speak like a pirate.")
    assert "Hermes" in system


async def test_configured_model_is_default(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness({"model": {"default": "mine", "base_url": f"{server.url}/v1", "api_key": KEY}})
    server.script = [Reply(text="Done.")]
    run = await harness.run(None)
    assert run.result["final_response"] == "Done."
    assert (server.requests[0].model, server.requests[0].key) == ("mine", KEY)


async def test_model_from_environment_overrides_config(
    make_harness: MakeHarness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_INFERENCE_MODEL", "theirs")
    harness = make_harness({"model": {"default": "mine", "base_url": f"{server.url}/v1", "api_key": KEY}})
    server.script = [Reply(text="Done.")]
    await harness.run(None)
    assert server.requests[0].model == "theirs"


async def test_model_of_run_overrides_environment(
    make_harness: MakeHarness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_INFERENCE_MODEL", "theirs")
    harness = make_harness({"model": {"default": "mine", "base_url": f"{server.url}/v1", "api_key": KEY}})
    server.script = [Reply(text="Done.")]
    await harness.run(None, route=RouteChoice(model="ours"))
    assert server.requests[0].model == "ours"


async def test_api_key_in_environment_selects_no_provider(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    run = await harness.run(None)
    assert run.result["failure"] == "local_unavailable"
    assert "hermes setup" in run.result["error"]


async def test_missing_key_fails_before_request(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a request was made")

    monkeypatch.setattr(type(harness.app.services.http), "send", refuse)
    run = await harness.run(None, route=RouteChoice(model="m", provider="openai"))
    assert (run.result["failure"], run.result["error_code"]) == ("auth", "provider_auth_failed")
    assert run.result["error"].endswith("No API key is configured for openai at api.openai.com.")


@pytest.mark.parametrize(("path", "mode"), [("/v1", "chat"), ("/anthropic", "anthropic")])
async def test_protocol_is_derived_from_url(harness: Harness, server: ModelServer, path: str, mode: str) -> None:
    server.script = [Reply(text="Done.")]
    run = await harness.run(None, route=RouteChoice(model="m", base_url=server.url + path, api_key=KEY))
    assert run.result["final_response"] == "Done."
    assert run.event("run.started")["api_mode"] == MODES[mode]


async def test_settings_reload_between_turns(make_harness: MakeHarness, server: ModelServer) -> None:
    model = {"default": "mine", "base_url": f"{server.url}/v1", "api_key": KEY}
    harness = make_harness({"model": model})
    server.script = [Reply(text="One."), Reply(text="Two."), Reply(text="Three.")]
    await harness.run(None)
    harness.configure({"model": {**model, "default": "another"}})
    await harness.run(None)
    harness.home.config_file.write_text("model: [broken")
    run = await harness.run(None)
    assert [request.model for request in server.requests] == ["mine", "another", "another"]
    assert run.events_of("notice") != []


# ---- effort


@pytest.mark.parametrize(
    ("settings", "wish", "effort"),
    [
        ({}, {"enabled": True, "effort": "low"}, "low"),
        ({"reasoning_effort": "high"}, None, "high"),
        ({"reasoning_effort": "high", "reasoning_overrides": {"gpt-5": "minimal"}}, None, "minimal"),
        ({"reasoning_effort": "high", "reasoning_overrides": {"gpt-5": "minimal"}}, {"effort": "medium"}, "medium"),
    ],
)
async def test_reasoning_effort_precedence(
    make_harness: MakeHarness, server: ModelServer, settings: dict[str, Any], wish: Any, effort: str
) -> None:
    harness = make_harness({"agent": settings})
    server.script = [Reply(text="Done.")] * 2
    await harness.run(server, protocol="responses", model="gpt-5", reasoning=wish)
    await harness.run(server, protocol="chat", model="gpt-5", reasoning=wish)
    assert server.requests[0].body["reasoning"]["effort"] == effort
    assert server.requests[1].body["reasoning_effort"] == effort


async def test_default_effort_sends_no_option(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    await harness.run(server, model="gpt-5")
    assert "reasoning_effort" not in server.requests[0].body
