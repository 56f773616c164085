"""pydantic-ai beyond plain turns: tools whose results come later, and tools that return images."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic_ai import Agent, BinaryContent, DeferredToolRequests, DeferredToolResults, ToolDenied, ToolReturn
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from clients.drivers import MODEL
from clients.server import Hermes
from support.model_server import Call, Reply, Request

MODELS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
ADDRESS = f"data:image/png;base64,{base64.b64encode(DOT).decode()}"
SEEN = "I see a dot."
both = pytest.mark.parametrize("api", ["chat", "responses"])


def calls_then_tells(*calls: Call) -> Any:
    """A model that calls these tools and then repeats their results."""

    def reply(request: Request) -> Reply:
        results = [turn.text for turn in request.turns if turn.role == "tool"]
        if not results:
            return Reply(tool_calls=list(calls), continues=False)
        return Reply(text=" | ".join(results), continues=False)

    return reply


def looks(request: Request) -> Reply:
    """A model that asks for a picture and says whether it got it."""
    if not any(turn.role == "tool" for turn in request.turns):
        return Reply(tool_calls=[Call("photo", {})], continues=False)
    return Reply(text=SEEN if ADDRESS in pictures(request) else "I see nothing.", continues=False)


def pictures(request: Request) -> list[str]:
    """The pictures of a request, wherever they are."""
    parts = [part for message in request.body["messages"] for part in as_list(message.get("content"))]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def as_list(content: Any) -> list[Any]:
    return content if isinstance(content, list) else []


@pytest.fixture
def model(hermes: Hermes) -> Iterator[Any]:
    """The model, to be given an answer for one test."""
    before = hermes.model.handler
    yield hermes.model
    hermes.model.handler = before


def agent_of(hermes: Hermes, api: str, **more: Any) -> Agent[Any, Any]:
    provider = OpenAIProvider(base_url=hermes.url, api_key=hermes.key)
    return Agent(MODELS[api](MODEL, provider=provider), **more)


def deferring(hermes: Hermes, api: str) -> Agent[Any, Any]:
    """An agent with a tool that needs approval, and one whose result is supplied by the caller."""
    from pydantic_ai import CallDeferred

    agent = agent_of(hermes, api, output_type=[str, DeferredToolRequests])

    @agent.tool_plain(requires_approval=True)
    def delete(path: str) -> str:
        return f"deleted {path}"

    @agent.tool_plain
    def research(question: str) -> str:
        raise CallDeferred

    @agent.tool_plain
    def clock() -> str:
        return "noon"

    return agent


@both
@pytest.mark.parametrize("chain", [False, True], ids=["history", "chain"])
@pytest.mark.parametrize(
    ("approval", "expected"), [(True, "deleted a.txt"), (ToolDenied("Not that one."), "Not that one.")]
)
def test_deferred_tools(hermes: Hermes, model: Any, api: str, chain: bool, approval: Any, expected: str) -> None:
    if chain and api == "chat":
        pytest.skip("chat completions have no chain")
    model.handler = calls_then_tells(
        Call("delete", {"path": "a.txt"}), Call("research", {"question": "why?"}), Call("clock", {})
    )
    agent = deferring(hermes, api)
    settings: Any = {"openai_previous_response_id": "auto"} if chain else {}

    async def flow() -> tuple[Any, Any]:
        first = await agent.run("Tidy up.", model_settings=settings)
        waiting = first.output
        assert isinstance(waiting, DeferredToolRequests)
        (pending_approval,), (outside,) = waiting.approvals, waiting.calls
        assert (pending_approval.tool_name, outside.tool_name) == ("delete", "research")
        results = DeferredToolResults(
            approvals={pending_approval.tool_call_id: approval}, calls={outside.tool_call_id: "because"}
        )
        second = await agent.run(
            message_history=first.all_messages(), deferred_tool_results=results, model_settings=settings
        )
        return second.output, second.all_messages()

    output, messages = asyncio.run(flow())
    assert sorted(output.split(" | ")) == sorted([expected, "because", "noon"])
    assert messages


@both
def test_deferred_result_with_new_question(hermes: Hermes, model: Any, api: str) -> None:
    """The user says something while the result is on its way: results and question come in one request."""
    model.handler = calls_then_tells(Call("research", {"question": "why?"}))
    agent = deferring(hermes, api)

    async def flow() -> str:
        first = await agent.run("Look it up.")
        (outside,) = first.output.calls
        results = DeferredToolResults(calls={outside.tool_call_id: "because"})
        second = await agent.run("And be brief.", message_history=first.all_messages(), deferred_tool_results=results)
        return str(second.output)

    assert asyncio.run(flow()) == "because"
    texts = [turn.text for turn in model.requests[-1].turns if turn.role == "user"]
    assert texts == ["Look it up.", "And be brief."]


@both
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("form", ["alone", "with-text", "as-content"])
def test_tools_that_return_images(hermes: Hermes, model: Any, api: str, stream: bool, form: str) -> None:
    model.handler = looks
    agent = agent_of(hermes, api)
    dot = BinaryContent(DOT, media_type="image/png")
    returned = {
        "alone": dot,
        "with-text": ["The garden:", dot],
        "as-content": ToolReturn(return_value="Taken.", content=["The garden:", dot]),
    }[form]

    @agent.tool_plain
    def photo() -> Any:
        return returned

    async def flow() -> tuple[str, list[Any]]:
        if not stream:
            result = await agent.run("Look at the garden.")
            return result.output, result.all_messages()
        async with agent.run_stream("Look at the garden.") as streamed:
            return await streamed.get_output(), streamed.all_messages()

    output, messages = asyncio.run(flow())
    assert output == SEEN

    # The picture is still there when the conversation goes on.
    assert asyncio.run(agent.run("And now?", message_history=messages)).output == SEEN
