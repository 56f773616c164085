"""The messages protocol."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from hermes.core.stream_parts import Finish, Model, Opaque, Reasoning, ServerError, Text, ToolDelta, Usage
from hermes.providers.anthropic_messages import PROVIDER
from hermes.providers.base import Prompt, ToolSchemas, WireEvent

from .folding import KEY, PNG, WEATHER, ask, call, route, streamed, whole

MARK = {"type": "ephemeral"}
BUDGET, ADAPTIVE, ALWAYS = "claude-sonnet-4-5", "claude-opus-4-6", "claude-opus-5-5"


def body(model: str = "some-model", **fields: Any) -> dict[str, Any]:
    return ask(PROVIDER, model, **fields).body


def parts(data: Any) -> list[Any]:
    return list(PROVIDER.parts(WireEvent("", data)))


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def signed(thought: str, signature: str = "sig") -> dict[str, Any]:
    item = {"kind": "signed_reasoning", "data": {"text": thought, "signature": signature}}
    return {"anthropic_messages": [item]}


# --- requests: parameters --------------------------------------------------------------------------------------------


def test_smallest_request() -> None:
    wire = ask(PROVIDER, stream=False)
    assert wire.url == "https://host.test/v1/messages"
    assert wire.headers == {
        "Content-Type": "application/json",
        "Accept": "application/json",
        "anthropic-version": "2023-06-01",
        "x-api-key": "sk-secret-value",
    }
    assert wire.body == {"model": "some-model", "max_tokens": 8192, "messages": [user(text("hi"))], "stream": False}


def test_request_with_everything() -> None:
    assert body(
        BUDGET,
        system=["You are.", " ", "You work."],
        tools=[WEATHER],
        tool_choice="auto",
        sampling={
            "temperature": 1.5,
            "top_p": 0.5,
            "stop": "END",
            "user": "u",
            "service_tier": "default",
            "parallel_tool_calls": False,
            "seed": 1,
        },
        max_output=100,
        extra_body={"container": "x"},
    ) == {
        "model": BUDGET,
        "max_tokens": 100,
        "system": [text("You are."), text("You work.", cache_control=MARK)],
        "messages": [user(text("hi", cache_control=MARK))],
        "stream": True,
        "temperature": 1.0,
        "stop_sequences": ["END"],
        "service_tier": "standard_only",
        "metadata": {"user_id": "u"},
        "tools": [
            {
                "name": "weather",
                "description": "Tells the weather.",
                "input_schema": WEATHER.parameters,
                "cache_control": MARK,
            }
        ],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "container": "x",
    }


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("https://h", "https://h/v1/messages"),
        ("https://h/", "https://h/v1/messages"),
        ("https://h/v1", "https://h/v1/messages"),
        ("https://h/anthropic", "https://h/anthropic/v1/messages"),
        ("https://h/v1/messages", "https://h/v1/messages"),
    ],
)
def test_url(base: str, url: str) -> None:
    assert ask(PROVIDER, base_url=base).url == url


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 50_000),
        ({"max_output": 7}, 7),
        ({"max_output": 900_000}, 64_000),
        ({"window_tokens": 8_000}, 2_000),
        ({"max_output_tokens": 3_000}, 3_000),
        ({"max_output_tokens": 70_000, "max_output": 900_000}, 70_000),
    ],
)
def test_max_tokens_is_always_sent(fields: dict[str, Any], limit: int) -> None:
    assert body(BUDGET, **fields)["max_tokens"] == limit


def test_max_tokens_of_unknown_model_is_as_requested() -> None:
    assert body(max_output=100_000)["max_tokens"] == 100_000


@pytest.mark.parametrize(
    ("choice", "wire"),
    [
        ("auto", {"type": "auto"}),
        ("none", {"type": "none"}),
        ("required", {"type": "any"}),
        ({"type": "function", "function": {"name": "weather"}}, {"type": "tool", "name": "weather"}),
        (None, None),
    ],
)
def test_tool_choice(choice: Any, wire: Any) -> None:
    assert body(tools=[WEATHER], tool_choice=choice).get("tool_choice") == wire
    assert "tool_choice" not in body(tool_choice=choice)
    assert "tool_choice" not in body(tools=[WEATHER], tool_choice=choice, dropped=frozenset({"tool_choice"}))


def test_model_that_rejects_forced_tool_choice_gets_auto() -> None:
    assert body(ALWAYS, tools=[WEATHER], tool_choice="required")["tool_choice"] == {"type": "auto"}


@pytest.mark.parametrize(
    ("model", "reasoning", "expected"),
    [
        (BUDGET, None, {}),
        (BUDGET, {"enabled": False}, {}),
        (BUDGET, {"enabled": True}, {"thinking": {"type": "enabled", "budget_tokens": 8192}}),
        (BUDGET, {"effort": "minimal"}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        (BUDGET, {"effort": "high"}, {"thinking": {"type": "enabled", "budget_tokens": 16384}}),
        ("claude-3-5-haiku-latest", {"effort": "high"}, {}),
        ("some-model", {"effort": "high"}, {}),
        (ADAPTIVE, None, {}),
        (ADAPTIVE, {"enabled": False}, {}),
        (ADAPTIVE, {"enabled": True}, {"thinking": {"type": "adaptive", "display": "summarized"}}),
        (
            ADAPTIVE,
            {"effort": "xhigh"},
            {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "high"}},
        ),
        ("claude-opus-5", None, {"thinking": {"type": "adaptive", "display": "summarized"}}),
        ("claude-opus-5", {"enabled": False}, {"thinking": {"type": "disabled"}}),
        ("claude-sonnet-5-5", {"enabled": False}, {"thinking": {"type": "between_tools"}}),
        (
            ALWAYS,
            {"enabled": False},
            {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "low"}},
        ),
    ],
)
def test_thinking(model: str, reasoning: Any, expected: Any) -> None:
    sent = body(model, reasoning=reasoning)
    assert {key: sent[key] for key in ("thinking", "output_config") if key in sent} == expected


def test_thinking_budget_raises_limit_and_drops_sampling() -> None:
    sent = body(BUDGET, reasoning={"effort": "medium"}, max_output=1_000, sampling={"temperature": 0.1, "top_p": 0.2})
    assert (sent["max_tokens"], sent["thinking"]["budget_tokens"]) == (9_192, 8_192)
    assert "temperature" not in sent
    assert "top_p" not in sent


def test_thinking_budget_stays_below_model_limit() -> None:
    sent = body("claude-opus-4-1", reasoning={"effort": "xhigh"}, max_output=2_000)
    assert (sent["max_tokens"], sent["thinking"]["budget_tokens"]) == (32_000, 30_976)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [WEATHER], "tool_choice": "required"},
        {"prefill": "Well"},
        {"dropped": frozenset({"thinking"})},
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "", "tool_calls": [call()]},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            ]
        },
    ],
)
def test_thinking_budget_is_omitted_where_rejected(fields: dict[str, Any]) -> None:
    assert "thinking" not in body(BUDGET, reasoning={"effort": "low"}, **fields)


def test_thinking_round_keeps_thinking() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call()], "opaque": signed("hm")},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert "thinking" in body(BUDGET, reasoning={"effort": "low"}, messages=messages)


def test_forced_tool_choice_disables_default_thinking() -> None:
    sent = body("claude-opus-5", tools=[WEATHER], tool_choice="required")
    assert (sent["thinking"], sent["tool_choice"]) == ({"type": "disabled"}, {"type": "any"})


@pytest.mark.parametrize(
    ("model", "sampling", "sent"),
    [
        (BUDGET, {"top_p": 0.5}, {"top_p": 0.5}),
        (BUDGET, {"stop": [" ", "END"]}, {"stop_sequences": ["END"]}),
        (BUDGET, {"stop": "\n"}, {}),
        (BUDGET, {"service_tier": "flex"}, {}),
        (BUDGET, {"user": "u", "safety_identifier": "s"}, {"metadata": {"user_id": "s"}}),
        ("claude-opus-4-8", {"temperature": 0.5, "top_p": 0.5}, {}),
    ],
)
def test_sampling(model: str, sampling: dict[str, Any], sent: dict[str, Any]) -> None:
    keys = {"temperature", "top_p", "stop_sequences", "service_tier", "metadata"}
    assert {key: value for key, value in body(model, sampling=sampling).items() if key in keys} == sent


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("temperature", {"temperature": 0.5}, "temperature"),
        ("stop_sequences", {"stop": "END"}, "stop_sequences"),
        ("stop", {"stop": "END"}, "stop_sequences"),
        ("metadata", {"user": "u"}, "metadata"),
    ],
)
def test_dropped(name: str, value: dict[str, Any], key: str) -> None:
    assert key in body(sampling=value)
    assert key not in body(sampling=value, dropped=frozenset({name}))


def test_strict_schema_is_sent_where_supported() -> None:
    schema = {"type": "object", "additionalProperties": False}
    strict = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert body(BUDGET, response_format=strict)["output_config"] == {
        "format": {"type": "json_schema", "schema": schema}
    }
    loose = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for model, response_format in ((BUDGET, loose), (BUDGET, {"type": "json_object"}), ("claude-3-7-sonnet", strict)):
        assert "output_config" not in body(model, response_format=response_format)


def test_effort_and_format_share_output_config() -> None:
    strict = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "strict": True}}
    config = body(ADAPTIVE, response_format=strict, reasoning={"effort": "low"})["output_config"]
    assert set(config) == {"effort", "format"}


# --- requests: messages ----------------------------------------------------------------------------------------------


def test_cache_control_marks() -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "three"}, {"type": "text", "text": "four"}]},
    ]
    mark = {"type": "ephemeral", "ttl": "1h"}
    sent = body(BUDGET, messages=messages, system=["s"], tools=[WEATHER], cache_ttl="1h")
    assert sent["messages"] == [
        user(text("one")),
        assistant(text("a")),
        user(text("two", cache_control=mark)),
        assistant(text("b")),
        user(text("three"), text("four", cache_control=mark)),
    ]
    assert str(sent).count("cache_control") == 4


@pytest.mark.parametrize(
    "fields", [{"model": BUDGET, "dropped": frozenset({"cache_control"})}, {"model": "some-model"}]
)
def test_no_cache_control_marks(fields: dict[str, Any]) -> None:
    assert "cache_control" not in str(body(**fields, system=["s"], tools=[WEATHER]))


def test_roles_alternate_with_tool_results_first() -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "a", "tool_calls": [call(id="a.b:0"), call(id="c2", arguments="[1")]},
        {"role": "tool", "tool_call_id": "a.b:0", "content": "rain"},
        {"role": "user", "content": "steer"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "assistant", "content": " "},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "three"},
    ]
    assert body(messages=messages)["messages"] == [
        user(text("one"), text("two")),
        assistant(
            text("a"),
            {"type": "tool_use", "id": "a_b_0", "name": "weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "c2", "name": "weather", "input": {"arguments": "[1"}},
        ),
        user(
            {"type": "tool_result", "tool_use_id": "a_b_0", "content": "rain"},
            {"type": "tool_result", "tool_use_id": "c2", "content": ""},
            text("steer"),
        ),
        assistant(text("b"), text("c")),
        user(text("three")),
    ]


def test_first_message_is_from_user() -> None:
    messages = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert [m["role"] for m in body(messages=messages)["messages"]] == ["user", "assistant", "user"]


def test_only_signed_thinking_is_replayed_first() -> None:
    redacted = {"type": "redacted_thinking", "data": "x"}
    opaque = {
        "anthropic_messages": [
            *signed("hm")["anthropic_messages"],
            {"kind": "redacted_thinking", "data": redacted},
            {"kind": "signed_reasoning", "data": {"text": "unsigned", "signature": ""}},
            *signed("", "omitted")["anthropic_messages"],
        ],
        "chat_completions": [{"kind": "reasoning_content", "data": "no"}],
    }
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "a", "reasoning": "hidden", "opaque": opaque, "tool_calls": [call()]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert body(messages=messages)["messages"][1] == assistant(
        {"type": "thinking", "thinking": "hm", "signature": "sig"},
        redacted,
        {"type": "thinking", "thinking": "", "signature": "omitted"},
        text("a"),
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
    )


@pytest.mark.parametrize(
    ("url", "block"),
    [
        (PNG, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}),
        (
            "data:image/jpg;base64,AA",
            {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "AA"}},
        ),
        ("https://h/a.png", {"type": "image", "source": {"type": "url", "url": "https://h/a.png"}}),
        ("file:///etc/passwd", text("(An image that cannot be read.)")),
    ],
)
def test_images(url: str, block: Any) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    assert body(messages=[{"role": "user", "content": [part]}])["messages"] == [user(block)]
    result = body(messages=[{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "c", "content": [part]}])
    assert result["messages"][0]["content"][0] == {"type": "tool_result", "tool_use_id": "c", "content": [block]}


def test_prefill_has_no_trailing_whitespace() -> None:
    assert body(prefill="Once upon \n")["messages"][-1] == assistant(text("Once upon"))
    assert body(prefill=" \n")["messages"] == [user(text("hi"))]


def test_request_does_not_mutate_prompt() -> None:
    prompt = Prompt(
        system=["s"],
        tools=ToolSchemas([WEATHER]),
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b ", "opaque": signed("hm"), "tool_calls": [call()]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "c"}]},
        ],
    )
    before = deepcopy(prompt)
    first = PROVIDER.request(route(PROVIDER.api_mode, BUDGET), KEY, prompt)
    assert prompt == before
    assert PROVIDER.request(route(PROVIDER.api_mode, BUDGET), KEY, prompt) == first


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            {"type": "message_start", "message": {"model": "m", "usage": {"input_tokens": 3, "output_tokens": 1}}},
            [Model("m"), Usage(3, 1)],
        ),
        ({"type": "message_start", "message": None}, []),
        (
            {
                "type": "content_block_start",
                "index": 1,
                "content_block": {"type": "tool_use", "id": "t", "name": "f", "input": {}},
            },
            [ToolDelta(1, "t", "f")],
        ),
        ({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}, []),
        ({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "a"}}, [Text("a")]),
        ({"type": "content_block_start", "content_block": {"type": "thinking", "thinking": "", "signature": ""}}, []),
        (
            {"type": "content_block_start", "content_block": {"type": "redacted_thinking", "data": "x"}},
            [Opaque("redacted_thinking", {"type": "redacted_thinking", "data": "x"})],
        ),
        ({"type": "content_block_start", "content_block": {"type": "server_tool_use"}}, []),
        ({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}, [Text("a")]),
        (
            {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "h"}},
            [Reasoning("h")],
        ),
        (
            {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
            [Reasoning("", signature="s")],
        ),
        (
            {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a'}},
            [ToolDelta(2, arguments='{"a')],
        ),
        ({"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ""}}, []),
        ({"type": "content_block_delta", "delta": {"type": "citations_delta", "citation": {}}}, []),
        ({"type": "content_block_delta", "delta": {"type": ["text_delta"]}}, []),
        ({"type": "content_block_stop", "index": 0}, []),
        ({"type": "message_stop"}, []),
        ({"type": "ping"}, []),
        (
            {"type": "message_delta", "delta": {"stop_reason": None}, "usage": {"output_tokens": 2}},
            [Usage(output_tokens=2)],
        ),
        (None, []),
    ],
)
def test_events(data: Any, expected: list[Any]) -> None:
    assert parts(data) == expected


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("pause_turn", "stop"),
        ("tool_use", "tool_calls"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("refusal", "content_filter"),
        ("other", "unknown"),
    ],
)
def test_finish_reasons(word: str, reason: Any) -> None:
    assert parts({"type": "message_delta", "delta": {"stop_reason": word}}) == [Finish(reason)]


@pytest.mark.parametrize(
    ("start", "delta", "usage"),
    [
        ({"input_tokens": 10, "output_tokens": 1}, {"output_tokens": 5}, Usage(10, 5)),
        (
            {"input_tokens": 10, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 7, "output_tokens": 1},
            {"output_tokens": 5, "output_tokens_details": {"thinking_tokens": 3}},
            Usage(117, 5, None, 100, 7, 3),
        ),
        # The uncached input alone says less than the beginning did.
        (
            {"input_tokens": 10, "cache_read_input_tokens": 100, "output_tokens": 1},
            {"input_tokens": 10, "output_tokens": 5},
            Usage(110, 5, None, 100),
        ),
        (
            {"input_tokens": 0, "output_tokens": 0},
            {"input_tokens": 10, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 0, "output_tokens": 5},
            Usage(15, 5, None, 5, 0),
        ),
        ({"input_tokens": 10}, {"cache_read_input_tokens": 5, "output_tokens": 5}, Usage(10, 5)),
    ],
)
def test_usage(start: Any, delta: Any, usage: Usage) -> None:
    events = [
        {"type": "message_start", "message": {"usage": start}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": delta},
    ]
    assert streamed(PROVIDER, *events).usage == usage


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("overloaded_error", 529, "overloaded_error"),
        ("rate_limit_error", 429, "rate_limit_error"),
        ("api_error", 500, "api_error"),
        ("authentication_error", 401, "authentication_error"),
        ("timeout_error", 504, "timeout_error"),
        ("invalid_request_error", 400, ""),
        ("new_error", None, "new_error"),
    ],
)
def test_errors(kind: str, status: int | None, code: str) -> None:
    data = {"type": "error", "error": {"type": kind, "message": "m"}}
    assert parts(data) == [ServerError(status, code, "m")]
    assert whole(PROVIDER, data).error == ServerError(status, code, "m")


def test_streamed_and_whole_answers_are_equal() -> None:
    redacted = {"type": "redacted_thinking", "data": "x"}
    usage = {"input_tokens": 10, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 0, "output_tokens": 7}
    message = {
        "type": "message",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "let me", "signature": "sig"},
            redacted,
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ålesund"}},
            {"type": "tool_use", "id": "t2", "name": "time", "input": {}},
        ],
        "stop_reason": "tool_use",
        "usage": usage,
    }

    def delta(index: int, **fields: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": fields}

    def start(index: int, **fields: Any) -> dict[str, Any]:
        return {"type": "content_block_start", "index": index, "content_block": fields}

    events = [
        {"type": "message_start", "message": {"model": "m", "usage": {**usage, "output_tokens": 1}}},
        start(0, type="thinking", thinking="", signature=""),
        delta(0, type="thinking_delta", thinking="let "),
        delta(0, type="thinking_delta", thinking="me"),
        delta(0, type="signature_delta", signature="sig"),
        start(1, **redacted),
        start(2, type="text", text=""),
        delta(2, type="text_delta", text="I "),
        delta(2, type="text_delta", text="look."),
        start(3, type="tool_use", id="t1", name="weather", input={}),
        delta(3, type="input_json_delta", partial_json='{"city": '),
        delta(3, type="input_json_delta", partial_json='"Ålesund"}'),
        start(4, type="tool_use", id="t2", name="time", input={}),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 7}},
        {"type": "message_stop"},
    ]
    answer = whole(PROVIDER, message)
    assert streamed(PROVIDER, *events) == answer
    assert answer.calls == [("t1", "weather", {"city": "Ålesund"}, None), ("t2", "time", {}, None)]
    assert (answer.reasoning, answer.signatures, answer.finish) == ("let me", ["sig"], "tool_calls")
    assert answer.usage == Usage(15, 7, None, 5, 0)
