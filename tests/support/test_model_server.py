"""The scripted model server speaks the three protocols: the real client libraries parse what it sends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from support.model_server import Call, ModelServer, Reply

if TYPE_CHECKING:
    import anthropic
    import openai

ASK = [{"role": "user", "content": "hi"}]
FULL = Reply(
    text=["Grüße, ", "Welt ", "🙂"],
    reasoning=["first ", "then"],
    tool_calls=[Call("look", ['{"a"', ": 1}"]), Call("list", '{"b":"ü"}', id="given")],
    usage={"input": 100, "output": 20, "cached": 60, "cache_write": 10, "reasoning": 7},
    signature="signed",
    encrypted="sealed",
)
TEXT, THOUGHT = "Grüße, Welt 🙂", "first then"


@pytest.fixture
async def server(caplog: pytest.LogCaptureFixture) -> AsyncIterator[ModelServer]:
    async with ModelServer() as model:
        yield model
    assert [record for record in caplog.records if record.name.startswith(("aiohttp", "asyncio"))] == []


@pytest.fixture
async def gpt(server: ModelServer) -> AsyncIterator[openai.AsyncOpenAI]:
    import openai

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="sk-secret", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(server: ModelServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="sk-secret", max_retries=0) as client:
        yield client


async def test_chat_streamed(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [FULL]
    stream = await gpt.chat.completions.create(
        model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert [delta.content for delta in deltas if delta.content] == FULL.text
    assert [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")] == FULL.reasoning
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls if call.function.name] == [(0, "look"), (1, "list")]
    assert "".join(call.function.arguments for call in calls if call.index == 0) == '{"a": 1}'
    assert calls[0].id.startswith("call_") and calls[3].id == "given"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (100, 20, 120)
    assert usage.prompt_tokens_details.cached_tokens == 60
    assert usage.completion_tokens_details.reasoning_tokens == 7


async def test_chat_streams_usage_only_on_request(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [FULL]
    stream = await gpt.chat.completions.create(model="m", messages=ASK, stream=True)
    assert [chunk async for chunk in stream if not chunk.choices or chunk.usage is not None] == []


async def test_chat_plain(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [FULL]
    response = await gpt.chat.completions.create(model="asked", messages=ASK)
    message = response.choices[0].message
    assert (response.model, message.content, message.reasoning_content) == ("asked", TEXT, THOUGHT)
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("look", '{"a": 1}'),
        ("list", '{"b":"ü"}'),
    ]
    assert response.choices[0].finish_reason == "tool_calls"
    assert response.usage.prompt_tokens_details.cached_tokens == 60


async def test_responses_streamed(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [FULL]
    stream = await gpt.responses.create(model="m", input="hi", stream=True, include=["reasoning.encrypted_content"])
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output[0].encrypted_content == "sealed"
    assert final.output_text == TEXT


async def test_responses_plain(server: ModelServer, gpt: openai.AsyncOpenAI) -> None:
    server.script = [FULL, Reply(text="half", finish="length")]
    response = await gpt.responses.create(model="m", input="hi")
    assert (response.status, response.output_text, response.output[3].call_id) == ("completed", TEXT, "given")
    assert response.output[0].encrypted_content is None, "it is only sent when the request includes it"
    short = await gpt.responses.create(model="m", input="hi")
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_anthropic_plain(server: ModelServer, claude: anthropic.AsyncAnthropic) -> None:
    server.script = [FULL]
    response = await claude.messages.create(model="m", max_tokens=100, messages=ASK)
    thought, text, first, second = response.content
    assert (thought.thinking, thought.signature, text.text) == (THOUGHT, "signed", TEXT)
    assert (first.name, first.input, second.id, second.input) == ("look", {"a": 1}, "given", {"b": "ü"})
    assert first.id.startswith("toolu_") and response.stop_reason == "tool_use"
    usage = response.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (30, 60, 10)
    assert (usage.output_tokens, usage.output_tokens_details.thinking_tokens) == (20, 7)


async def test_anthropic_streamed(server: ModelServer, claude: anthropic.AsyncAnthropic) -> None:
    server.script = [FULL]
    stream = await claude.messages.create(model="m", max_tokens=100, messages=ASK, stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas == [
        *["thinking_delta"] * 2,
        "signature_delta",
        *["text_delta"] * 3,
        *["input_json_delta"] * 5,
    ]
