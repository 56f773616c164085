"""The responses protocol."""

from __future__ import annotations

from typing import Any

import pytest

from hermes.core.stream_parts import Finish, Model, Opaque, Reasoning, ServerError, Text, ToolDelta, Usage
from hermes.providers.base import WireEvent
from hermes.providers.codex_responses import PROVIDER

from .folding import PNG, WEATHER, ask, call, streamed, whole

USER = {"role": "user", "content": "hi"}
ITEM = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "enc"}


def body(model: str = "gpt-5.2", **fields: Any) -> dict[str, Any]:
    return ask(PROVIDER, model, **fields).body


def parts(data: Any, name: str = "") -> list[Any]:
    return list(PROVIDER.parts(WireEvent(name, data)))


# --- requests --------------------------------------------------------------------------------------------------------


def test_smallest_request() -> None:
    wire = ask(PROVIDER, "gpt-4o", stream=False)
    assert wire.url == "https://host.test/v1/responses"
    assert wire.headers["Authorization"] == "Bearer sk-secret-value"
    assert wire.body == {"model": "gpt-4o", "input": [USER], "store": False, "stream": False}


def test_request_with_everything() -> None:
    sampling = {
        "temperature": 0.5,
        "seed": 1,
        "verbosity": "low",
        "user": "u",
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
    }
    assert body(
        system=["You are.", "You work."],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        sampling=sampling,
        reasoning={"enabled": True, "effort": "high"},
        max_output=50,
        extra_body={"truncation": "auto"},
    ) == {
        "model": "gpt-5.2",
        "input": [USER],
        "instructions": "You are.\n\nYou work.",
        "store": False,
        "stream": True,
        "user": "u",
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "high", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 50,
        "text": {
            "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
            "verbosity": "low",
        },
        "tools": [
            {
                "type": "function",
                "name": "weather",
                "description": "Tells the weather.",
                "parameters": WEATHER.parameters,
                "strict": False,
            }
        ],
        "tool_choice": {"type": "function", "name": "weather"},
        "truncation": "auto",
    }


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_tool_choice_words(choice: str) -> None:
    assert body(tools=[WEATHER], tool_choice=choice)["tool_choice"] == choice
    assert "tool_choice" not in body(tool_choice=choice)


@pytest.mark.parametrize(
    ("model", "reasoning", "expected"),
    [
        ("gpt-5.2", None, {"summary": "auto"}),
        ("gpt-5.2", {"enabled": True}, {"summary": "auto"}),
        ("gpt-5.2", {"enabled": False}, {"effort": "none"}),
        ("gpt-5", {"enabled": False}, {"effort": "minimal", "summary": "auto"}),
        ("o3", {"effort": "xhigh"}, {"effort": "high", "summary": "auto"}),
        ("gpt-4o", {"effort": "high"}, None),
    ],
)
def test_reasoning(model: str, reasoning: Any, expected: Any) -> None:
    sent = body(model, reasoning=reasoning)
    assert sent.get("reasoning") == expected
    assert ("include" in sent) == (expected is not None)


@pytest.mark.parametrize(
    ("name", "fields", "absent"),
    [
        ("reasoning", {}, "reasoning"),
        ("include", {}, "include"),
        ("max_tokens", {"max_output": 1}, "max_output_tokens"),
        ("max_output_tokens", {"max_output": 1}, "max_output_tokens"),
        ("text", {"sampling": {"verbosity": "low"}}, "text"),
        ("verbosity", {"sampling": {"verbosity": "low"}}, "text"),
        ("response_format", {"response_format": {"type": "json_object"}}, "text"),
        ("prompt_cache_key", {"sampling": {"prompt_cache_key": "k"}}, "prompt_cache_key"),
    ],
)
def test_dropped(name: str, fields: dict[str, Any], absent: str) -> None:
    assert absent not in body(**fields, dropped=frozenset({name}))


def test_json_object_format() -> None:
    assert body(response_format={"type": "json_object"})["text"] == {"format": {"type": "json_object"}}


def test_input_items() -> None:
    image = {"type": "image_url", "image_url": {"url": PNG}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "see"}, image]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "hidden",
            "tool_calls": [call(extra_content={"google": 1})],
            "opaque": {
                "codex_responses": [
                    {"kind": "reasoning", "data": {**ITEM, "status": "completed"}},
                    {"kind": "reasoning", "data": {"type": "reasoning", "id": "rs_2", "summary": []}},
                    {"kind": "phase", "data": "commentary"},
                ],
                "chat_completions": [{"kind": "reasoning_details", "data": [{"text": "no"}]}],
            },
        },
        {"role": "tool", "tool_call_id": "c1", "tool_name": "weather", "content": "rain"},
        {"role": "assistant", "content": None, "tool_calls": [call(id="c2", arguments="")]},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "shot"}, image]},
    ]
    input_image = {"type": "input_image", "image_url": PNG, "detail": "auto"}
    assert body(messages=messages, prefill="Well")["input"] == [
        {"role": "user", "content": [{"type": "input_text", "text": "see"}, input_image]},
        ITEM,
        {"role": "assistant", "content": "I look.", "phase": "commentary"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "shot"}, input_image],
        },
        {"role": "assistant", "content": "Well"},
    ]


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"type": "response.output_text.delta", "delta": "a"}, [Text("a")]),
        ({"type": "response.output_text.delta", "delta": None}, []),
        ({"type": "response.refusal.delta", "delta": "no"}, [Text("no")]),
        ({"type": "response.reasoning_summary_text.delta", "delta": "hm"}, [Reasoning("hm", "summary")]),
        ({"type": "response.reasoning_text.delta", "delta": "hm"}, [Reasoning("hm")]),
        ({"type": "response.reasoning_summary_part.added", "summary_index": 0}, []),
        ({"type": "response.reasoning_summary_part.added", "summary_index": 1}, [Reasoning("\n\n", "summary")]),
        (
            {
                "type": "response.output_item.added",
                "output_index": 2,
                "item": {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": ""},
            },
            [ToolDelta(2, "c1", "f")],
        ),
        (
            {"type": "response.function_call_arguments.delta", "output_index": 2, "delta": '{"a'},
            [ToolDelta(2, arguments='{"a')],
        ),
        (
            {
                "type": "response.output_item.done",
                "output_index": 2,
                "item": {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            },
            [ToolDelta(2, "c1", "f", "{}", whole=True)],
        ),
        ({"type": "response.output_item.done", "item": {**ITEM, "status": "completed"}}, [Opaque("reasoning", ITEM)]),
        ({"type": "response.output_item.done", "item": {"type": "message", "content": []}}, []),
        ({"type": "response.created", "response": {"model": "m"}}, [Model("m")]),
        ({"type": "response.completed"}, [Finish("stop")]),
        ({"type": "response.completed", "response": {"output": []}}, [Finish("stop")]),
        ({"type": "response.completed", "response": {"output": [{"type": "function_call"}]}}, [Finish("tool_calls")]),
        (
            {
                "type": "response.incomplete",
                "response": {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            },
            [Finish("length")],
        ),
        (
            {
                "type": "response.incomplete",
                "response": {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
            },
            [Finish("content_filter")],
        ),
        ({"type": "response.incomplete", "response": {"status": "incomplete"}}, [Finish("unknown")]),
        (
            {
                "type": "response.failed",
                "response": {"status": "failed", "error": {"code": "rate_limit_exceeded", "message": "slow"}},
            },
            [ServerError(429, "rate_limit_exceeded", "slow")],
        ),
        ({"type": "response.failed"}, [ServerError(None, "", "")]),
        ({"type": "error", "code": "server_error", "message": "m"}, [ServerError(500, "server_error", "m")]),
        ({"type": "error", "code": None, "message": "m"}, [ServerError(None, "", "m")]),
        (
            {"type": "error", "error": {"type": "invalid_request_error", "message": "m", "code": None}},
            [ServerError(400, "", "m")],
        ),
        ({"error": {"message": "m", "code": 503}}, [ServerError(503, "", "m")]),
        ({"type": "response.some_new_thing", "delta": "x"}, []),
        ({"type": ["x"]}, []),
        (5, []),
    ],
)
def test_events(data: Any, expected: list[Any]) -> None:
    assert parts(data) == expected


def test_event_name_is_used_without_data_type() -> None:
    assert parts({"delta": "a"}, "response.output_text.delta") == [Text("a")]


def test_usage_and_model_at_the_end() -> None:
    usage = {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 1},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 15,
        "cost": 1,
    }
    data = {"type": "response.completed", "response": {"model": "m", "output": [], "usage": usage}}
    assert parts(data) == [Usage(10, 5, 15, 4, 1, 3, 1.0), Model("m"), Finish("stop")]


def test_streamed_and_whole_answers_are_equal() -> None:
    item = {**ITEM, "summary": [{"type": "summary_text", "text": "one"}, {"type": "summary_text", "text": "two"}]}
    message = {
        "type": "message",
        "role": "assistant",
        "phase": "commentary",
        "content": [{"type": "output_text", "text": "I look."}, {"type": "refusal", "refusal": " No."}],
    }
    function = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
    response = {
        "status": "completed",
        "model": "m",
        "output": [item, message, function],
        "usage": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
        "error": None,
    }
    events = [
        {"type": "response.created", "response": {"model": "m"}},
        {"type": "response.output_item.added", "output_index": 0, "item": {"type": "reasoning"}},
        {"type": "response.reasoning_summary_part.added", "summary_index": 0},
        {"type": "response.reasoning_summary_text.delta", "delta": "one"},
        {"type": "response.reasoning_summary_part.added", "summary_index": 1},
        {"type": "response.reasoning_summary_text.delta", "delta": "two"},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.output_text.delta", "output_index": 1, "delta": "I "},
        {"type": "response.output_text.delta", "output_index": 1, "delta": "look."},
        {"type": "response.refusal.delta", "output_index": 1, "delta": " No."},
        {"type": "response.output_item.done", "output_index": 1, "item": message},
        {"type": "response.output_item.added", "output_index": 2, "item": {**function, "arguments": ""}},
        {"type": "response.function_call_arguments.delta", "output_index": 2, "delta": '{"city": '},
        {"type": "response.function_call_arguments.delta", "output_index": 2, "delta": '"Oslo"}'},
        {"type": "response.output_item.done", "output_index": 2, "item": function},
        {"type": "response.completed", "response": response},
    ]
    answer = whole(PROVIDER, response)
    assert streamed(PROVIDER, *events) == answer
    assert (answer.text, answer.reasoning, answer.finish) == ("I look. No.", "one\n\ntwo", "tool_calls")
    assert answer.calls == [("c1", "weather", {"city": "Oslo"}, None)]
    assert answer.opaque == [("reasoning", item), ("phase", "commentary")]


def test_opaque_items_round_trip() -> None:
    answer = whole(PROVIDER, {"output": [{**ITEM, "status": "completed"}], "status": "completed"})
    opaque = {"codex_responses": [{"kind": kind, "data": data} for kind, data in answer.opaque]}
    assert body(messages=[{"role": "assistant", "content": "a", "opaque": opaque}])["input"][0] == ITEM


def test_whole_body_error() -> None:
    assert whole(PROVIDER, {"error": {"message": "m", "code": "server_error"}}).error == ServerError(
        500, "server_error", "m"
    )
