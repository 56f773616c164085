"""Every answer and every event is what the official package says it is, down to the last field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from clients.drivers import MODEL, OWN_TOOL
from clients.drivers.openai_sdk import client
from clients.scenes import HELLO, LOOKING, THOUGHT
from clients.server import Hermes

_FORMAT = {
    "name": "person",
    "schema": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "born": {"type": "integer"}},
        "required": ["name", "born"],
        "additionalProperties": False,
    },
    "strict": True,
}
CHAT: dict[str, dict[str, Any]] = {
    "say hello": {},
    "say too much": {"max_tokens": 5},
    "use your list": {},
    "misuse your list": {},
    "use my weather": {
        "tools": [{"type": "function", "function": OWN_TOOL}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    },
    "name a person": {"response_format": {"type": "json_schema", "json_schema": _FORMAT}},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "say hello": {"metadata": {"about": "nothing"}, "instructions": "Be kind.", "temperature": 0.5},
    "say too much": {"max_output_tokens": 5},
    "think, then say hello": {"reasoning": {"effort": "low", "summary": "auto"}},
    "use your list": {},
    "misuse your list": {},
    "use my weather": {
        "tools": [{"type": "function", **OWN_TOOL}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    },
    "name a person": {"text": {"format": {"type": "json_schema", **_FORMAT}}},
}
_EVENT = TypeAdapter(ResponseStreamEvent)
tool_items = pytest.mark.parametrize("form", ["function", "mcp", "none"])


@pytest.fixture
def sdk(hermes: Hermes) -> Iterator[openai.OpenAI]:
    with client(hermes.url, hermes.key) as sdk:
        yield sdk


def frames(answer: Any) -> list[tuple[str, Any]]:
    """The name and the data of each event of a stream, which ends as it should."""
    events, name = [], ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            events.append((name, line.removeprefix("data: ")))
            name = ""
    assert events[-1] == ("", "[DONE]")
    return [(name, json.loads(data)) for name, data in events[:-1]]


def texts_of(response: Response) -> list[str]:
    return [part.text for item in response.output if item.type == "message" for part in item.content]


@pytest.mark.parametrize("prompt", CHAT)
def test_chat_completion_types(sdk: openai.OpenAI, prompt: str) -> None:
    messages = [{"role": "user", "content": prompt}]
    raw = sdk.chat.completions.with_raw_response.create(model=MODEL, messages=messages, **CHAT[prompt])
    model = ChatCompletion.model_validate(json.loads(raw.text), strict=True)
    assert model.usage is not None and model.usage.total_tokens > 0


@pytest.mark.parametrize("prompt", CHAT)
@pytest.mark.parametrize("usage", [None, False, True])
def test_chat_completion_stream_types(sdk: openai.OpenAI, prompt: str, usage: bool | None) -> None:
    messages = [{"role": "user", "content": prompt}]
    more = {} if usage is None else {"stream_options": {"include_usage": usage}}
    endpoint = sdk.chat.completions.with_streaming_response
    with endpoint.create(model=MODEL, messages=messages, stream=True, **more, **CHAT[prompt]) as answer:
        events = frames(answer)
    assert {name for name, _ in events} == {""}
    chunks = [ChatCompletionChunk.model_validate(data, strict=True) for _, data in events]
    assert len({chunk.id for chunk in chunks}) == 1
    counted = [chunk for chunk in chunks if chunk.usage]
    assert counted == ([] if usage is False else [chunks[-1]])
    assert [chunk for chunk in chunks if not chunk.choices] == ([chunks[-1]] if usage else [])
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert all(end is None for end in ends[:-1]) and ends[-1] is not None


@tool_items
@pytest.mark.parametrize("prompt", RESPONSES)
def test_response_types(sdk: openai.OpenAI, prompt: str, form: str) -> None:
    options = {**RESPONSES[prompt], "extra_headers": {"X-Hermes-Tool-Items": form}}
    raw = sdk.responses.with_raw_response.create(model=MODEL, input=prompt, **options)
    model = Response.model_validate(json.loads(raw.text), strict=True)
    stored = sdk.responses.with_raw_response.retrieve(model.id)
    assert json.loads(stored.text) == json.loads(raw.text)


@tool_items
@pytest.mark.parametrize("prompt", RESPONSES)
def test_response_stream_types(sdk: openai.OpenAI, prompt: str, form: str) -> None:
    options = {**RESPONSES[prompt], "extra_headers": {"X-Hermes-Tool-Items": form}}
    with sdk.responses.with_streaming_response.create(model=MODEL, input=prompt, stream=True, **options) as answer:
        events = frames(answer)
    parsed = [_EVENT.validate_python(data, strict=True) for _, data in events]
    assert [event.type for event in parsed] == [name for name, _ in events]
    assert [event.sequence_number for event in parsed] == list(range(len(parsed)))
    final = parsed[-1].response
    # What came piece by piece is what stands at the end.
    items = [event.item for event in parsed if event.type == "response.output_item.done"]
    assert [item.id for item in items] == [item.id for item in final.output]
    assert [item.id for item in items] == [e.item.id for e in parsed if e.type == "response.output_item.added"]
    pieces = "".join(event.delta for event in parsed if event.type == "response.output_text.delta")
    assert pieces == "".join(texts_of(final))
    # The log of the stream is the stream.
    with sdk.responses.with_streaming_response.retrieve(final.id, stream=True, starting_after=1) as answer:
        assert frames(answer) == events[2:]


def test_truncated_answer_is_marked(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(model=MODEL, input="say too much", max_output_tokens=5)
    assert (response.status, response.output_text) == ("incomplete", "".join(HELLO))
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    messages = [{"role": "user", "content": "say too much"}]
    chat = sdk.chat.completions.create(model=MODEL, messages=messages, max_tokens=5).choices[0]
    assert (chat.finish_reason, chat.message.content) == ("length", "".join(HELLO))


def test_reasoning_is_summary_never_text(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(model=MODEL, input="think, then say hello", reasoning={"summary": "auto"})
    thought, text = response.output
    assert thought.type == "reasoning" and thought.summary[0].text == "".join(THOUGHT)
    assert response.output_text == "".join(HELLO)
    assert text.type == "message" and text.phase == "final_answer"


def test_server_tool_item_forms(sdk: openai.OpenAI) -> None:
    forms = {"function": ["function_call", "function_call_output"], "mcp": ["mcp_call"], "none": []}
    for form, tools in forms.items():
        response = sdk.responses.create(model=MODEL, input="use your list", extra_headers={"X-Hermes-Tool-Items": form})
        assert [item.type for item in response.output] == ["message", *tools, "message"]
        assert texts_of(response)[0] == "".join(LOOKING)


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"temperature": 9}, openai.BadRequestError, "invalid_value", "temperature"),
        ({"temperature": "warm"}, openai.BadRequestError, "invalid_type", "temperature"),
        ({"prompt": {"id": "p"}}, openai.BadRequestError, "unsupported_parameter", "prompt"),
        (
            {"previous_response_id": "resp_0"},
            openai.NotFoundError,
            "previous_response_not_found",
            "previous_response_id",
        ),
        ({"input": "be refused"}, openai.InternalServerError, "provider_rejected_request", None),
        ({"input": "break"}, openai.InternalServerError, "provider_unavailable", None),
    ],
)
def test_error_class_per_status(
    sdk: openai.OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], code: str, param: str | None
) -> None:
    with pytest.raises(kind) as raised:
        sdk.responses.create(**{"model": MODEL, "input": "say hello", **fields})
    assert (raised.value.code, raised.value.param) == (code, param)
    assert raised.value.request_id


def test_model_list_types(sdk: openai.OpenAI) -> None:
    listed = list(sdk.models.list())
    assert MODEL in [model.id for model in listed]
    assert sdk.models.retrieve(MODEL) == next(model for model in listed if model.id == MODEL)
