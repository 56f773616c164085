"""openai-agents with `OpenAIConversationsSession`: the history is kept by the server as a conversation's items."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    ToolOutputImage,
    function_tool,
)
from agents.memory import SessionSettings

from clients.drivers import MODEL, weather
from clients.scenes import WEATHER
from clients.server import Hermes
from support.model_server import Call, Reply, Request

Flow = Callable[[openai.AsyncOpenAI], Awaitable[None]]


def run(hermes: Hermes, flow: Flow) -> None:
    """Run the flow with a client of its own."""

    async def main() -> None:
        # Takes nothing that it does not know.
        place = {"base_url": hermes.url, "api_key": hermes.key, "max_retries": 0}
        async with openai.AsyncOpenAI(**place, _strict_response_validation=True) as client:
            await flow(client)

    asyncio.run(main())


@pytest.fixture
def model(hermes: Hermes) -> Iterator[Any]:
    """The model, to be given an answer for one test."""
    before = hermes.model.handler
    yield hermes.model
    hermes.model.handler = before


def session_of(client: openai.AsyncOpenAI, **more: Any) -> OpenAIConversationsSession:
    return OpenAIConversationsSession(openai_client=client, **more)


async def ask(client: openai.AsyncOpenAI, session: OpenAIConversationsSession, prompt: str) -> str:
    """One run of an agent with a function, its history in the session."""
    agent = Agent(name="tester", model=OpenAIResponsesModel(MODEL, client), tools=[function_tool(weather)])
    result = await Runner.run(agent, prompt, session=session, run_config=RunConfig(tracing_disabled=True))
    return str(result.final_output)


def kinds(items: list[Any]) -> list[str]:
    return [item.get("role") or item["type"] for item in items]


def test_session_continues_and_items_are_popped(hermes: Hermes) -> None:
    async def flow(client: openai.AsyncOpenAI) -> None:
        session = session_of(client)
        assert await ask(client, session, "use my weather") == f"It is {WEATHER}."
        assert kinds(await session.get_items()) == ["user", "function_call", "function_call_output", "assistant"]
        assert await ask(client, session, "count") == "2 questions so far."

        # Taking back the last exchange is how an application lets its user correct a question.
        popped = [await session.pop_item(), await session.pop_item()]
        assert kinds(popped) == ["assistant", "user"]
        assert kinds(await session.get_items()) == ["user", "function_call", "function_call_output", "assistant"]
        assert await ask(client, session, "count") == "2 questions so far."

    run(hermes, flow)


def test_popping_all_items_empties_session(hermes: Hermes) -> None:
    async def flow(client: openai.AsyncOpenAI) -> None:
        session = session_of(client)
        await ask(client, session, "use your list")
        items = []
        while (item := await session.pop_item()) is not None:
            items.append(item)
        assert kinds(items) == ["assistant", "mcp_call", "assistant", "user"]
        assert await session.get_items() == []
        assert await ask(client, session, "count") == "1 questions so far."

    run(hermes, flow)


def test_long_session_pagination(hermes: Hermes) -> None:
    async def flow(client: openai.AsyncOpenAI) -> None:
        session = session_of(client)
        messages = [
            {"role": "user" if number % 2 == 0 else "assistant", "content": str(number)} for number in range(50)
        ]
        await session.add_items(messages)  # type: ignore[arg-type]
        texts = [item["content"][0]["text"] for item in await session.get_items()]  # type: ignore[typeddict-item, index]
        assert texts == [str(number) for number in range(50)]
        texts = [item["content"][0]["text"] for item in await session.get_items(limit=30)]  # type: ignore[typeddict-item, index]
        assert texts == [str(number) for number in range(20, 50)]
        assert await ask(client, session, "count") == "26 questions so far."

        short = session_of(client, conversation_id=session.session_id, session_settings=SessionSettings(limit=2))
        assert await ask(client, short, "count") == "2 questions so far."

    run(hermes, flow)


def test_cleared_session_starts_anew(hermes: Hermes) -> None:
    async def flow(client: openai.AsyncOpenAI) -> None:
        session = session_of(client)
        await ask(client, session, "say hello")
        await session.clear_session()
        assert await ask(client, session, "count") == "1 questions so far."

    run(hermes, flow)


def test_conversation_items_are_read_and_deleted_by_id(hermes: Hermes) -> None:
    """A response in a conversation goes on from the items that are left."""

    async def flow(client: openai.AsyncOpenAI) -> None:
        conversation = await client.conversations.create()
        for number in (1, 2):
            response = await client.responses.create(model=MODEL, input="count", conversation=conversation.id)
            assert response.output_text == f"{number} questions so far."
        items = [item async for item in client.conversations.items.list(conversation.id, order="asc")]
        for item in items:
            assert await client.conversations.items.retrieve(item.id, conversation_id=conversation.id) == item
        for item in items[2:]:
            remaining = await client.conversations.items.delete(item.id, conversation_id=conversation.id)
            assert remaining == conversation
        assert [item.id async for item in client.conversations.items.list(conversation.id, order="asc")] == [
            item.id for item in items[:2]
        ]
        response = await client.responses.create(model=MODEL, input="count", conversation=conversation.id)
        assert response.output_text == "2 questions so far."

    run(hermes, flow)


def test_server_side_conversation(hermes: Hermes) -> None:
    """The runner sends what is new only: a question, or the output of its function."""

    async def flow(client: openai.AsyncOpenAI) -> None:
        conversation = await client.conversations.create()
        agent = Agent(name="tester", model=OpenAIResponsesModel(MODEL, client), tools=[function_tool(weather)])
        for stream, prompt, expected in [
            (False, "use my weather", f"It is {WEATHER}."),
            (True, "use my weather twice", f"{WEATHER} and {WEATHER}"),
            (False, "count", "3 questions so far."),
        ]:
            more: Any = {"conversation_id": conversation.id, "run_config": RunConfig(tracing_disabled=True)}
            if stream:
                streamed = Runner.run_streamed(agent, prompt, **more)
                async for _ in streamed.stream_events():
                    pass
                assert streamed.final_output == expected
            else:
                assert (await Runner.run(agent, prompt, **more)).final_output == expected
        items = [item async for item in client.conversations.items.list(conversation.id, order="asc")]
        assert [item.type for item in items].count("function_call_output") == 3

    run(hermes, flow)


def test_image_result_of_function_stays_in_session(hermes: Hermes, model: Any) -> None:
    def pictures(request: Request) -> list[str]:
        contents = [message.get("content") for message in request.body["messages"]]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]

    def reply(request: Request) -> Reply:
        if not any(turn.role == "tool" for turn in request.turns):
            return Reply(tool_calls=[Call("photo", {})], continues=False)
        return Reply(text=f"{len(pictures(request))} pictures", continues=False)

    async def flow(client: openai.AsyncOpenAI) -> None:
        def photo() -> ToolOutputImage:
            """A photo of the garden."""
            return ToolOutputImage(image_url="data:image/png;base64,iVBORw0KGgo=")

        session = session_of(client)
        agent = Agent(name="tester", model=OpenAIResponsesModel(MODEL, client), tools=[function_tool(photo)])
        for _ in range(2):
            result = await Runner.run(agent, "Look.", session=session, run_config=RunConfig(tracing_disabled=True))
            assert result.final_output == "1 pictures"

    model.handler = reply
    run(hermes, flow)
