"""The chat completions protocol."""

from __future__ import annotations

from typing import Any

import pytest

from hermes.core.stream_parts import Finish, Model, Opaque, Reasoning, ServerError, Text, ToolDelta, Usage
from hermes.providers.base import WireEvent
from hermes.providers.chat_completions import PROVIDER

from .folding import PNG, WEATHER, ask, call, streamed, whole

USER = {"role": "user", "content": "hi"}


def body(model: str = "some-model", **fields: Any) -> dict[str, Any]:
    return ask(PROVIDER, model, **fields).body


def parts(data: Any) -> list[Any]:
    return list(PROVIDER.parts(WireEvent("", data)))


def chunk(delta: Any = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": more.pop("finish", None)}
    return {"choices": [choice], **more}


# --- requests --------------------------------------------------------------------------------------------------------


def test_smallest_request() -> None:
    wire = ask(PROVIDER)
    assert (wire.method, wire.url) == ("POST", "https://host.test/v1/chat/completions")
    assert wire.headers == {
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "Authorization": "Bearer sk-secret-value",
    }
    assert wire.body == {
        "model": "some-model",
        "messages": [USER],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_request_with_everything() -> None:
    wire = ask(
        PROVIDER,
        system=["You are.", "", "You work."],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        response_format={"type": "json_object"},
        sampling={"temperature": 0.5, "seed": 7, "parallel_tool_calls": False, "top_p": None, "verbosity": "low"},
        max_output=100,
        stream=False,
        headers={"authorization": "no", "X-Team": "a"},
        extra_body={"provider": {"only": ["x"]}, "seed": 8},
    )
    assert wire.headers == {
        "Content-Type": "application/json",
        "Accept": "application/json",
        "Authorization": "Bearer sk-secret-value",
        "X-Team": "a",
    }
    assert wire.body == {
        "model": "some-model",
        "messages": [{"role": "system", "content": "You are.\n\nYou work."}, USER],
        "stream": False,
        "temperature": 0.5,
        "seed": 8,
        "parallel_tool_calls": False,
        "max_tokens": 100,
        "response_format": {"type": "json_object"},
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "Tells the weather.",
                    "parameters": WEATHER.parameters,
                },
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "provider": {"only": ["x"]},
    }


def test_without_tools_no_tool_fields() -> None:
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & set(
        body(tool_choice="required", sampling={"parallel_tool_calls": True})
    )


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("https://h/v1/", "https://h/v1/chat/completions"),
        ("https://h/v1/chat/completions", "https://h/v1/chat/completions"),
        ("https://h/v1?api-version=1", "https://h/v1/chat/completions?api-version=1"),
    ],
)
def test_url(base: str, url: str) -> None:
    assert ask(PROVIDER, base_url=base).url == url


def test_operator_authorization_header_is_kept_without_credential() -> None:
    assert ask(PROVIDER, key=None, headers={"Authorization": "Basic x"}).headers["Authorization"] == "Basic x"


def test_credential_is_not_in_repr() -> None:
    assert "sk-secret" not in repr(ask(PROVIDER))


@pytest.mark.parametrize(
    ("model", "fields", "key", "value"),
    [
        ("some-model", {"max_output": 9}, "max_tokens", 9),
        ("some-model", {"max_output": 9, "dropped": {"max_tokens"}}, "max_completion_tokens", 9),
        ("openai/gpt-5", {"max_output": 9}, "max_completion_tokens", 9),
        ("gpt-5", {"max_output": 9, "dropped": {"max_completion_tokens"}}, "max_tokens", 9),
        ("some-model", {"max_output_tokens": 5}, "max_tokens", 5),
        ("gpt-5", {"reasoning": {"enabled": True, "effort": "high"}}, "reasoning_effort", "high"),
        ("gpt-5", {"reasoning": {"enabled": True, "effort": "xhigh"}}, "reasoning_effort", "high"),
        ("gpt-5", {"reasoning": {"enabled": False}}, "reasoning_effort", "minimal"),
        ("gpt-5.2", {"reasoning": {"enabled": False}}, "reasoning_effort", "none"),
        ("gpt-5.2", {"sampling": {"verbosity": "low"}}, "verbosity", "low"),
    ],
)
def test_limits_and_effort(model: str, fields: dict[str, Any], key: str, value: Any) -> None:
    fields = {**fields, "dropped": frozenset(fields.get("dropped", ()))}
    assert body(model, **fields)[key] == value


@pytest.mark.parametrize(
    ("model", "fields", "absent"),
    [
        ("some-model", {"reasoning": {"enabled": True, "effort": "high"}}, "reasoning_effort"),
        ("gpt-5", {"reasoning": {"enabled": True}}, "reasoning_effort"),
        ("gpt-5", {"reasoning": {"effort": "low"}, "dropped": {"reasoning_effort"}}, "reasoning_effort"),
        ("gpt-5", {"sampling": {"temperature": 1.0}}, "temperature"),
        ("some-model", {"sampling": {"seed": 1}, "dropped": {"seed"}}, "seed"),
        ("some-model", {"dropped": {"stream_options"}}, "stream_options"),
        ("some-model", {"tools": [WEATHER], "tool_choice": "auto", "dropped": {"tool_choice"}}, "tool_choice"),
        ("some-model", {"response_format": {"type": "json_object"}, "dropped": {"response_format"}}, "response_format"),
        ("some-model", {"max_output": 1, "dropped": {"max_tokens", "max_completion_tokens"}}, "max_tokens"),
    ],
)
def test_omitted_fields(model: str, fields: dict[str, Any], absent: str) -> None:
    assert absent not in body(model, **{**fields, "dropped": frozenset(fields.get("dropped", ()))})


def test_internal_message_fields_are_stripped() -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": PNG}}],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hidden",
            "opaque": {"codex_responses": [{"kind": "reasoning", "data": {"id": "r"}}]},
            "tool_calls": [call(extra_content={"google": {"thought_signature": "s"}})],
        },
        {"role": "tool", "tool_call_id": "c1", "tool_name": "weather", "content": "rain"},
        {"role": "assistant", "content": "It rains.", "reasoning": "hidden", "id": 5},
    ]
    assert body(messages=messages)["messages"] == [
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": PNG}}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call(extra_content={"google": {"thought_signature": "s"}})],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]


def test_tool_result_images_follow_in_user_message() -> None:
    image = {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call(id="a"), call(id="b")]},
        {"role": "tool", "tool_call_id": "a", "tool_name": "shot", "content": [image]},
        {"role": "tool", "tool_call_id": "b", "tool_name": "w", "content": [{"type": "text", "text": "rain"}, image]},
        USER,
    ]
    sent = body(messages=messages)["messages"]
    assert [m["role"] for m in sent] == ["assistant", "tool", "tool", "user", "user"]
    assert [m["content"] for m in sent[1:3]] == ["The result is the image in the next message.", "rain"]
    assert [part["type"] for part in sent[3]["content"]] == ["text", "image_url", "text", "image_url"]
    assert sent[3]["content"][1] == image


def test_images_of_last_tool_result_come_last() -> None:
    image = {"type": "image_url", "image_url": {"url": PNG}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call()]}]
    messages.append({"role": "tool", "tool_call_id": "c1", "content": [image]})
    assert body(messages=messages)["messages"][-1]["role"] == "user"


def test_prefill_is_the_last_message() -> None:
    assert body(prefill="Once ")["messages"] == [USER, {"role": "assistant", "content": "Once "}]


def test_reasoning_details_are_replayed_joined() -> None:
    fragments = [
        [{"type": "reasoning.text", "index": 0, "text": "let ", "signature": None}],
        [{"type": "reasoning.text", "index": 0, "text": "me"}],
        [{"type": "reasoning.text", "index": 0, "signature": "sig"}],
        [
            {"type": "reasoning.encrypted", "index": 1, "data": "x"},
            {"type": "reasoning.encrypted", "index": 1, "data": "y"},
        ],
    ]
    opaque = {"chat_completions": [{"kind": "reasoning_details", "data": data} for data in fragments]}
    sent = body(messages=[{"role": "assistant", "content": "a", "opaque": opaque}])["messages"][0]
    assert sent["reasoning_details"] == [
        {"type": "reasoning.text", "index": 0, "text": "let me", "signature": "sig"},
        {"type": "reasoning.encrypted", "index": 1, "data": "x"},
        {"type": "reasoning.encrypted", "index": 1, "data": "y"},
    ]
    assert fragments[0][0]["text"] == "let "


def test_required_reasoning_is_replayed_with_every_answer() -> None:
    opaque = {"chat_completions": [{"kind": "reasoning_content", "data": t} for t in ("hm ", "so")]}
    messages = [
        {"role": "assistant", "content": "x", "opaque": opaque},
        {"role": "assistant", "content": "x", "tool_calls": [call()], "opaque": opaque},
        {"role": "assistant", "content": "x", "tool_calls": [call()]},
    ]
    sent = body("deepseek/deepseek-v4-pro", messages=messages)["messages"]
    assert [m.get("reasoning_content") for m in sent] == ["hm so", "hm so", " "]
    assert all("reasoning_content" not in m for m in body("gpt-4o", messages=messages)["messages"])


def test_foreign_tool_calls_are_signed_for_requiring_family() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [call(), call(id="c2")]}]
    sent = body("gemini-3-pro", messages=messages)["messages"][0]["tool_calls"]
    assert ["extra_content" in c for c in sent] == [True, False]


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (chunk({"content": "a"}), [Text("a")]),
        (chunk({"content": ""}), []),
        (chunk({"role": "assistant", "content": ""}, model="m"), [Model("m")]),
        (chunk({"content": "a"}, model="m"), [Text("a")]),
        (chunk({"content": [{"type": "text", "text": "a"}, "b"]}), [Text("a"), Text("b")]),
        (
            chunk({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]}),
            [Reasoning("hm")],
        ),
        (chunk({"content": None, "refusal": "no"}), [Text("no")]),
        (chunk({"reasoning_content": "hm"}), [Reasoning("hm")]),
        (chunk({"reasoning": "hm", "content": "a"}), [Reasoning("hm"), Text("a")]),
        (chunk({"reasoning": "hm", "reasoning_content": "hm"}), [Reasoning("hm")]),
        (chunk({"function_call": {"name": "f", "arguments": "{}"}}), []),
        (chunk({"content": "a"}, error=None), [Text("a")]),
        ({"choices": [{"index": 1, "delta": {"content": "other"}}]}, []),
        (
            {"choices": [{"index": 1, "delta": {"content": "no"}}, {"index": 0, "delta": {"content": "yes"}}]},
            [Text("yes")],
        ),
        ({"choices": []}, []),
        ({"choices": None}, []),
        ({"object": "ping"}, []),
        ("text", []),
        (None, []),
        ([], []),
    ],
)
def test_chunks(data: Any, expected: list[Any]) -> None:
    assert parts(data) == expected


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        (
            {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm", "index": 0}]},
            [Reasoning("hm"), Opaque("reasoning_details", [{"type": "reasoning.text", "text": "hm", "index": 0}])],
        ),
        (
            {"reasoning_details": [{"type": "reasoning.summary", "summary": "hm"}, 5]},
            [Reasoning("hm", "summary"), Opaque("reasoning_details", [{"type": "reasoning.summary", "summary": "hm"}])],
        ),
        (
            {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]},
            [Opaque("reasoning_details", [{"type": "reasoning.encrypted", "data": "x"}])],
        ),
    ],
)
def test_reasoning_details_are_parsed(delta: Any, expected: list[Any]) -> None:
    assert parts(chunk(delta)) == expected


def test_reasoning_to_be_replayed_is_kept() -> None:
    data = chunk({"reasoning_content": "hm"}, model="deepseek-v4-flash")
    assert parts(data) == [Reasoning("hm"), Opaque("reasoning_content", "hm", joins=True)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}, ToolDelta(0, "c", "f", "")),
        ({"index": 2, "function": {"arguments": '{"a'}}, ToolDelta(2, arguments='{"a')),
        ({"function": {"name": "f"}}, ToolDelta(None, name="f")),
        ({"index": "0", "id": 5, "function": None}, ToolDelta()),
        ({"index": 0, "function": {"arguments": {"a": "é"}}}, ToolDelta(0, arguments='{"a": "é"}', whole=True)),
        ({"index": 0, "extra_content": {"g": 1}}, ToolDelta(0, extra={"g": 1})),
        ({"index": 0, "model_extra": {"extra_content": {"g": 1}}}, ToolDelta(0, extra={"g": 1})),
    ],
)
def test_tool_call_fragments(value: Any, expected: ToolDelta) -> None:
    assert parts(chunk({"tool_calls": [value, None]})) == [expected]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("stop", "stop"),
        ("STOP", "stop"),
        ("tool_calls", "tool_calls"),
        ("function_call", "stop"),
        ("length", "length"),
        ("MAX_TOKENS", "length"),
        ("content_filter", "content_filter"),
        ("SAFETY", "content_filter"),
        ("error", "error"),
        ("something", "unknown"),
    ],
)
def test_finish_reasons(word: str, reason: Any) -> None:
    assert parts(chunk({}, finish=word, model="m")) == [Model("m"), Finish(reason)]


@pytest.mark.parametrize(
    ("data", "usage"),
    [
        (
            {
                "usage": {
                    "prompt_tokens": 10,
                    "completion_tokens": 5,
                    "total_tokens": 15,
                    "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 2},
                    "completion_tokens_details": {"reasoning_tokens": 3},
                    "cost": 0.25,
                }
            },
            Usage(10, 5, 15, 4, 2, 3, 0.25),
        ),
        ({"usage": {"prompt_tokens": 10, "prompt_cache_hit_tokens": 6}}, Usage(10, cache_read_tokens=6)),
        ({"usage": {"prompt_tokens": 10.0, "completion_tokens": -1, "cost": "1"}}, Usage(10)),
        ({"usage": {"prompt_tokens": True, "completion_tokens": 1, "cost": float("nan")}}, Usage(output_tokens=1)),
        ({"usage": {"completion_tokens": 1, "cost": 10**400}}, Usage(output_tokens=1)),
        ({"x_groq": {"usage": {"prompt_tokens": 3}}}, Usage(3)),
        ({"choices": [{"index": 0, "delta": {}, "usage": {"prompt_tokens": 3}}]}, Usage(3)),
    ],
)
def test_usage(data: Any, usage: Usage) -> None:
    assert parts({"choices": [], **data}) == [usage]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"error": {"message": "down", "code": 502}}, ServerError(502, "", "down")),
        ({"error": {"message": "slow", "code": "429"}}, ServerError(429, "429", "slow")),
        ({"error": {"message": "m", "type": "overloaded_error"}}, ServerError(529, "overloaded_error", "m")),
        ({"error": {"message": "bad", "type": "invalid_request_error"}}, ServerError(400, "", "bad")),
        ({"error": "Network connection lost."}, ServerError(None, "", "Network connection lost.")),
        (
            {"object": "error", "message": "m", "code": 400, "type": "BadRequestError"},
            ServerError(400, "BadRequestError", "m"),
        ),
        ({"choices": [{"error": {"code": 503, "message": "m"}, "delta": {}}]}, ServerError(503, "", "m")),
    ],
)
def test_errors_in_the_stream(data: Any, error: ServerError) -> None:
    assert parts(data) == [error]
    assert whole(PROVIDER, data).error == error


def test_streamed_and_whole_answers_are_equal() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    extra = {"google": {"thought_signature": "s"}}
    first = {"index": 0, "id": "c1", "extra_content": extra, "function": {"name": "weather", "arguments": ""}}
    events = [
        chunk({"role": "assistant", "content": None}, model="m"),
        chunk({"reasoning_content": "let "}),
        chunk({"reasoning_content": "me"}),
        chunk({"content": "I "}),
        chunk({"content": "look."}),
        chunk({"tool_calls": [first]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]}),
        chunk({"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "time", "arguments": "{}"}}]}),
        chunk({}, finish="tool_calls"),
        {"choices": [], "model": "m", "usage": usage},
    ]
    message = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "let me",
        "tool_calls": [call(extra_content=extra), call("time", "{}", "c2")],
    }
    body = {"model": "m", "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}], "usage": usage}
    answer = whole(PROVIDER, body)
    assert streamed(PROVIDER, *events) == answer
    assert answer.calls == [("c1", "weather", {"city": "Oslo"}, extra), ("c2", "time", {}, None)]
    assert (answer.text, answer.finish, answer.usage) == ("I look.", "tool_calls", Usage(1, 2, 3))


@pytest.mark.parametrize(("message", "finish"), [({"content": "a"}, "stop"), ({"tool_calls": [call()]}, "tool_calls")])
def test_whole_body_without_finish_reason_is_finished(message: Any, finish: str) -> None:
    assert whole(PROVIDER, {"choices": [{"message": message}]}).finish == finish
