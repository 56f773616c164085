"""A turn that goes well: its events in order, its text, its tokens, and where the model was asked."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from hermes.core.spec import RouteChoice
from support.model_server import Call, ModelServer, Protocol, Reply

from .conftest import MakeHouse
from .house import KEY, MODES, PROTOCOLS, House, rebuilt, sent, tool

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
async def test_a_plain_turn_is_started_asked_told_counted_and_completed(
    house: House, server: ModelServer, protocol: Protocol
) -> None:
    server.script = [Reply(text=["Hel", "lo"])]
    ran = await house.run(server, protocol=protocol)
    order = ["run.started", "model.started", "text.delta", "message.completed", "usage", "run.completed"]
    assert without_repeats(ran.types) == order


@each_protocol
async def test_a_tool_turn_tells_the_message_then_the_call_then_asks_again(
    house: House, server: ModelServer, protocol: Protocol
) -> None:
    house.offer(tool("look"))
    server.script = [Reply(text="Wait.", tool_calls=[Call("look", {"a": "x"})]), Reply(text="Done.")]
    ran = await house.run(server, protocol=protocol)
    assert without_repeats(ran.types) == [
        *("run.started", "model.started", "text.delta", "tool.drafted", "message.completed", "usage"),
        *("tool.started", "tool.finished"),
        *("model.started", "text.delta", "message.completed", "usage", "run.completed"),
    ]


@each_protocol
async def test_reasoning_is_completed_together_with_its_message_and_before_it(
    house: House, server: ModelServer, protocol: Protocol
) -> None:
    server.script = [Reply(reasoning=["first ", "then"], text="Done.")]
    ran = await house.run(server, protocol=protocol)
    assert ran.text("reasoning.delta") == "first then"
    at = ran.types.index("reasoning.completed")
    assert ran.types[at + 1] == "message.completed"
    assert ran.one("reasoning.completed")["chars"] == len("first then")
    assert ran.result["last_reasoning"] == "first then"
    assert ran.result["final_response"] == "Done."


@pytest.mark.parametrize(("protocol", "form"), [("chat", "raw"), ("responses", "summary"), ("anthropic", "raw")])
async def test_the_form_of_reasoning_says_whether_it_is_a_summary(
    house: House, server: ModelServer, protocol: Protocol, form: str
) -> None:
    server.script = [Reply(reasoning="hm", text="Done.")]
    ran = await house.run(server, protocol=protocol)
    assert {event["form"] for event in ran.of("reasoning.delta")} == {form}


async def test_a_submitted_run_is_queued_first(house: House, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    spec = house.spec(server, persist=True)
    await house.engine.submit(spec)
    events = [event.as_dict() async for event in house.engine.subscribe(spec.run_id)]
    assert [event["type"] for event in events][:2] == ["run.queued", "run.started"]
    assert events[0]["position"] == 0
    assert events[0]["session_id"] == spec.session_id
    assert events[-1]["type"] == "run.completed"


# ---- fields


async def test_every_event_has_the_envelope_and_the_fields_of_its_type(house: House, server: ModelServer) -> None:
    async def talk(ctx: Any, _: Any) -> dict[str, Any]:
        ctx.emit("stdout", "working\n")
        return {"ok": True}

    house.offer(tool("talk", talk))
    server.script = [
        Reply(reset_before_headers=True),
        Reply(reasoning="hm", text="Wait.", tool_calls=[Call("talk")]),
        Reply(text="Done."),
    ]
    ran = await house.run(server, sampling={"verbosity": "low"})
    missing: dict[str, set[str]] = {}
    for event in ran.events:
        assert event["run_id"] == ran.spec.run_id
        assert isinstance(event["ts"], float)
        assert isinstance(event["step"], int)
        wanted = set(FIELDS[event["type"]].split())
        if not wanted <= event.keys():
            missing[event["type"]] = wanted - event.keys()
    assert missing == {}
    assert {"model.retrying", "tool.output", "notice", "reasoning.completed"} <= set(ran.types)


async def test_events_of_a_step_carry_its_number_from_one_on(house: House, server: ModelServer) -> None:
    house.offer(tool("look"))
    server.script = [Reply(tool_calls=[Call("look")]), Reply(text="Done.")]
    ran = await house.run(server)
    steps = [event["step"] for event in ran.of("model.started", "message.completed", "tool.started", "text.delta")]
    assert steps == [1, 1, 1, 2, 2, 2]


async def test_events_outside_a_step_carry_step_zero(house: House, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    ran = await house.run(server)
    assert [event["step"] for event in ran.of("run.started", "run.completed")] == [0, 0]


async def test_the_start_says_what_will_run_where(house: House, server: ModelServer) -> None:
    house.offer(tool("look"), tool("act"))
    server.script = [Reply(text="Done.")]
    ran = await house.run(server, kind="chat", max_iterations=7, on_detach="cancel", provider="someone")
    started = ran.one("run.started")
    told = {name: started[name] for name in ("kind", "model", "provider", "api_mode", "max_iterations", "on_detach")}
    assert told == {
        "kind": "chat",
        "model": "m",
        "provider": "someone",
        "api_mode": "chat_completions",
        "max_iterations": 7,
        "on_detach": "cancel",
    }
    assert started["tools"] == ["act", "look"]
    assert started["session_id"] == ran.spec.session_id


async def test_run_and_message_ids_have_their_forms(house: House, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    ran = await house.run(server)
    assert re.fullmatch(r"run_[0-9a-f]{32}", ran.spec.run_id)
    assert re.fullmatch(r"msg_[0-9a-f]{24}", ran.one("message.completed")["message_id"])


async def test_one_message_id_per_step_also_over_several_attempts(house: House, server: ModelServer) -> None:
    server.script = [Reply(reset_before_headers=True), Reply(text="Done.")]
    ran = await house.run(server)
    started = ran.of("model.started")
    assert [event["attempt"] for event in started] == [1, 2]
    assert {event["message_id"] for event in started} == {ran.one("message.completed")["message_id"]}


# ---- text


@each_protocol
@pytest.mark.parametrize("packets", [None, 1, [3, 50, 7]])
async def test_deltas_rebuild_the_text_whatever_the_packets(
    house: House, server: ModelServer, protocol: Protocol, packets: Any
) -> None:
    text = ["Grüße ", "aus 🙂 ", "Köln, ", "日本", "語"]
    server.script = [Reply(text=text, packets=packets)]
    ran = await house.run(server, protocol=protocol)
    assert ran.text() == ran.result["final_response"] == "".join(text)


async def test_the_first_delta_leaves_before_the_rest_has_come(house: House, server: ModelServer) -> None:
    server.script = [Reply(text=["Hel", "lo"], gap_s=60)]
    running = await house.begin(house.spec(server))
    assert (await running.seen("text.delta"))["text"] == "Hel"
    assert server.open_streams == 1
    await running.control("interrupt")
    await running.end()


async def test_pieces_that_come_together_are_joined_into_few_deltas(house: House, server: ModelServer) -> None:
    server.script = [Reply(text=[f"{n} " for n in range(500)])]
    ran = await house.run(server)
    assert ran.text() == "".join(f"{n} " for n in range(500))
    assert len(ran.of("text.delta")) < 100


@each_protocol
async def test_an_answer_that_is_not_streamed_takes_the_same_road(
    house: House, server: ModelServer, protocol: Protocol
) -> None:
    server.script = [Reply(reasoning="hm", text="Hello", as_json=True)]
    ran = await house.run(server, protocol=protocol)
    assert ran.text() == ran.result["final_response"] == "Hello"
    assert ran.text("reasoning.delta") == "hm"
    assert ran.final["type"] == "run.completed"


async def test_line_breaks_before_the_first_visible_character_are_dropped(house: House, server: ModelServer) -> None:
    server.script = [Reply(text=["\n", "\n\n", "Hello\n", "you"])]
    ran = await house.run(server)
    assert ran.text() == ran.result["final_response"] == "Hello\nyou"
    assert ran.result["messages"][-1]["content"] == "Hello\nyou"


@pytest.mark.parametrize("tag", ["think", "thinking", "reasoning", "thought", "REASONING_SCRATCHPAD", "Think"])
async def test_inline_thought_becomes_reasoning_and_never_text(house: House, server: ModelServer, tag: str) -> None:
    server.script = [Reply(text=["<", tag[:3], tag[3:], ">se", f"cret</{tag}", ">\n\nHel", "lo"])]
    ran = await house.run(server)
    assert ran.text() == ran.result["final_response"] == "Hello"
    assert ran.result["last_reasoning"] == "secret"


async def test_a_tag_inside_a_code_fence_stays_text(house: House, server: ModelServer) -> None:
    text = "Look:\n```\n<think>\nx\n</think>\n```\nDone."
    server.script = [Reply(text=list(text))]
    ran = await house.run(server)
    assert ran.result["final_response"] == text


async def test_text_after_a_call_has_begun_is_still_delivered_and_stored(house: House, server: ModelServer) -> None:
    def chunk(finish: str | None = None, **delta: Any) -> str:
        return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}) + "\n\n"

    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    raw = chunk(content="Before") + chunk(tool_calls=[call]) + chunk(content=" after") + chunk("tool_calls")
    house.offer(tool("look"))
    server.script = [Reply(raw=raw + "data: [DONE]\n\n"), Reply(text="Done.")]
    ran = await house.run(server)
    assert ran.result["messages"][1]["content"] == "Before after"
    assert list(rebuilt(ran.events).values()) == ["Before after", "Done."]


async def test_the_answer_of_a_turn_is_its_last_message(house: House, server: ModelServer) -> None:
    house.offer(tool("look"))
    server.script = [Reply(text="Wait.", tool_calls=[Call("look")]), Reply(text="Done.")]
    ran = await house.run(server)
    assert ran.result["final_response"] == "Done."
    assert [m["role"] for m in ran.result["messages"]] == ["user", "assistant", "tool", "assistant"]


# ---- what the next step is sent


@each_protocol
async def test_the_next_step_is_sent_the_call_and_its_result(
    house: House, server: ModelServer, protocol: Protocol
) -> None:
    house.offer(tool("look"))
    server.script = [Reply(text="Wait.", tool_calls=[Call("look", {"a": "x"})]), Reply(text="Done.")]
    await house.run(server, protocol=protocol)
    said = sent(server.requests[1])
    assert said[0] == ("user", "hi")
    assert ("assistant", "Wait.") in said
    assert said[-1] == ("tool", '{"echo": {"a": "x"}}')


async def test_signed_thought_goes_back_unread_with_the_next_step(house: House, server: ModelServer) -> None:
    house.offer(tool("look"))
    server.script = [Reply(reasoning="hm", signature="c2ln", tool_calls=[Call("look")]), Reply(text="Done.")]
    await house.run(server, protocol="anthropic")
    blocks = server.requests[1].body["messages"][1]["content"]
    assert {"type": "thinking", "thinking": "hm", "signature": "c2ln"} in blocks


async def test_sealed_reasoning_goes_back_with_the_next_step(house: House, server: ModelServer) -> None:
    house.offer(tool("look"))
    server.script = [Reply(reasoning="hm", encrypted="sealed", tool_calls=[Call("look")]), Reply(text="Done.")]
    await house.run(server, protocol="responses", model="gpt-5")
    assert server.requests[0].body["store"] is False
    items = [item for item in server.requests[1].body["input"] if item.get("type") == "reasoning"]
    assert [item["encrypted_content"] for item in items] == ["sealed"]


async def test_what_one_protocol_sealed_is_not_sent_to_another(
    house: House, server: ModelServer, other: ModelServer
) -> None:
    house.offer(tool("look"))
    server.script = [Reply(reasoning="hm", encrypted="c2VjcmV0LXN0YXRl", tool_calls=[Call("look")]), Reply(status=403)]
    other.script = [Reply(text="Done.")]
    fallback = {
        "provider": "f",
        "model": "n",
        "base_url": f"{other.url}/v1",
        "api_mode": "chat_completions",
        "api_key": KEY,
    }
    ran = await house.run(server, protocol="responses", model="gpt-5", fallbacks=(fallback,))
    assert ran.result["final_response"] == "Done."
    assert "c2VjcmV0LXN0YXRl" not in json.dumps(other.requests[0].body)


async def test_extra_content_of_a_call_is_replayed(house: House, server: ModelServer) -> None:
    house.offer(tool("look"))
    extra = {"vendor": {"signature": "abc"}}
    server.script = [Reply(tool_calls=[Call("look", extra_content=extra)]), Reply(text="Done.")]
    await house.run(server)
    calls = server.requests[1].body["messages"][-2]["tool_calls"]
    assert calls[0]["extra_content"] == extra


# ---- tokens


@each_protocol
async def test_usage_counts_every_token_cached_ones_included_over_all_steps(
    house: House, server: ModelServer, protocol: Protocol
) -> None:
    house.offer(tool("look"))
    usage = {"input": 100, "output": 20, "cached": 60, "cache_write": 10, "reasoning": 7}
    server.script = [
        Reply(tool_calls=[Call("look")], usage=usage),
        Reply(text="Done.", usage={"input": 130, "output": 5}),
    ]
    ran = await house.run(server, protocol=protocol)
    first = ran.of("usage")[0]
    assert (first["input_tokens"], first["output_tokens"], first["total_tokens"]) == (100, 20, 120)
    assert (first["cache_read_tokens"], first["cache_write_tokens"], first["reasoning_tokens"]) == (60, 10, 7)
    assert first["measured"] == "provider"
    result = ran.result
    assert (result["input_tokens"], result["output_tokens"], result["total_tokens"]) == (230, 25, 255)
    details = result["usage_details"]
    assert (details["cache_read_tokens"], details["cache_write_tokens"], details["reasoning_tokens"]) == (60, 10, 7)
    totals = ran.final["usage"]
    assert (totals["input_tokens"], totals["total_tokens"], totals["cache_read_tokens"]) == (230, 255, 60)
    assert result["api_calls"] == 2


async def test_usage_is_estimated_where_the_provider_gives_none(house: House, server: ModelServer) -> None:
    server.script = [Reply(text="Hello there, this is an answer.", no_usage=True)]
    ran = await house.run(server)
    usage = ran.one("usage")
    assert usage["measured"] == "estimate"
    assert usage["input_tokens"] > 0
    assert usage["output_tokens"] > 0


# ---- options and routes


async def test_an_option_the_route_does_not_know_is_dropped_with_a_notice_naming_it(
    house: House, server: ModelServer
) -> None:
    server.script = [Reply(text="Done.")]
    ran = await house.run(server, protocol="anthropic", sampling={"temperature": 0.5, "presence_penalty": 1.0})
    assert server.requests[0].body["temperature"] == 0.5
    assert "presence_penalty" not in server.requests[0].body
    assert "presence_penalty" in ran.one("notice")["message"]


@each_protocol
async def test_instructions_of_the_turn_are_the_last_of_the_system_text(
    house: House, server: ModelServer, protocol: Protocol
) -> None:
    server.script = [Reply(text="Done.")]
    await house.run(server, protocol=protocol, instructions="Speak like a pirate.")
    system = "\n\n".join(turn.text for turn in server.requests[0].turns if turn.role == "system")
    assert system.endswith("Speak like a pirate.")
    assert "Hermes" in system


async def test_the_configured_model_is_asked_when_the_run_names_none(
    make_house: MakeHouse, server: ModelServer
) -> None:
    house = make_house({"model": {"default": "mine", "base_url": f"{server.url}/v1", "api_key": KEY}})
    server.script = [Reply(text="Done.")]
    ran = await house.run(None)
    assert ran.result["final_response"] == "Done."
    assert (server.requests[0].model, server.requests[0].key) == ("mine", KEY)


async def test_the_environment_names_the_model_before_the_configuration_does(
    make_house: MakeHouse, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_INFERENCE_MODEL", "theirs")
    house = make_house({"model": {"default": "mine", "base_url": f"{server.url}/v1", "api_key": KEY}})
    server.script = [Reply(text="Done.")]
    await house.run(None)
    assert server.requests[0].model == "theirs"


async def test_the_run_names_the_model_before_the_environment_does(
    make_house: MakeHouse, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_INFERENCE_MODEL", "theirs")
    house = make_house({"model": {"default": "mine", "base_url": f"{server.url}/v1", "api_key": KEY}})
    server.script = [Reply(text="Done.")]
    await house.run(None, route=RouteChoice(model="ours"))
    assert server.requests[0].model == "ours"


async def test_a_key_in_the_environment_alone_chooses_no_provider(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    ran = await house.run(None)
    assert ran.result["failure"] == "local_unavailable"
    assert "hermes setup" in ran.result["error"]


async def test_a_missing_key_for_a_remote_host_fails_before_any_request(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a request was made")

    monkeypatch.setattr(type(house.app.services.http), "send", refuse)
    ran = await house.run(None, route=RouteChoice(model="m", provider="openai"))
    assert (ran.result["failure"], ran.result["error_code"]) == ("auth", "provider_auth_failed")


@pytest.mark.parametrize(("path", "mode"), [("/v1", "chat"), ("/anthropic", "anthropic")])
async def test_the_protocol_follows_from_the_address(house: House, server: ModelServer, path: str, mode: str) -> None:
    server.script = [Reply(text="Done.")]
    ran = await house.run(None, route=RouteChoice(model="m", base_url=server.url + path, api_key=KEY))
    assert ran.result["final_response"] == "Done."
    assert ran.one("run.started")["api_mode"] == MODES[mode]


async def test_settings_changed_between_turns_hold_from_the_next_turn_on(
    make_house: MakeHouse, server: ModelServer
) -> None:
    model = {"default": "mine", "base_url": f"{server.url}/v1", "api_key": KEY}
    house = make_house({"model": model})
    server.script = [Reply(text="One."), Reply(text="Two."), Reply(text="Three.")]
    await house.run(None)
    house.configure({"model": {**model, "default": "another"}})
    await house.run(None)
    house.home.config_file.write_text("model: [broken")
    ran = await house.run(None)
    assert [request.model for request in server.requests] == ["mine", "another", "another"]
    assert ran.of("notice") != []


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
async def test_how_hard_the_model_thinks_is_said_by_the_run_then_for_the_model_then_in_general(
    make_house: MakeHouse, server: ModelServer, settings: dict[str, Any], wish: Any, effort: str
) -> None:
    house = make_house({"agent": settings})
    server.script = [Reply(text="Done.")] * 2
    await house.run(server, protocol="responses", model="gpt-5", reasoning=wish)
    await house.run(server, protocol="chat", model="gpt-5", reasoning=wish)
    assert server.requests[0].body["reasoning"]["effort"] == effort
    assert server.requests[1].body["reasoning_effort"] == effort


async def test_without_a_wish_the_models_own_effort_stands(house: House, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    await house.run(server, model="gpt-5")
    assert "reasoning_effort" not in server.requests[0].body
