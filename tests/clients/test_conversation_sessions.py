"""openai-agents with `OpenAIConversationsSession`: the history is kept by the server as a conversation's items."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
from agents import Agent, OpenAIConversationsSession, OpenAIResponsesModel, RunConfig, Runner, function_tool
from agents.memory import SessionSettings

from clients.drivers import MODEL, weather
from clients.scenes import WEATHER
from clients.server import Hermes

Flow = Callable[[openai.AsyncOpenAI], Awaitable[None]]


def run(hermes: Hermes, flow: Flow) -> None:
    """Run the flow with a client of its own."""

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=hermes.url, api_key=hermes.key, max_retries=0) as client:
            await flow(client)

    asyncio.run(main())


def session_of(client: openai.AsyncOpenAI, **more: Any) -> OpenAIConversationsSession:
    return OpenAIConversationsSession(openai_client=client, **more)


async def ask(client: openai.AsyncOpenAI, session: OpenAIConversationsSession, prompt: str) -> str:
    """One run of an agent with a function, its history in the session."""
    agent = Agent(name="tester", model=OpenAIResponsesModel(MODEL, client), tools=[function_tool(weather)])
    result = await Runner.run(agent, prompt, session=session, run_config=RunConfig(tracing_disabled=True))
    return str(result.final_output)


def kinds(items: list[Any]) -> list[str]:
    return [item.get("role") or item["type"] for item in items]


def test_a_session_goes_on_and_its_items_are_popped(hermes: Hermes) -> None:
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


def test_popping_to_the_end_empties_the_session(hermes: Hermes) -> None:
    async def flow(client: openai.AsyncOpenAI) -> None:
        session = session_of(client)
        await ask(client, session, "use your list")
        taken = []
        while (item := await session.pop_item()) is not None:
            taken.append(item)
        assert kinds(taken) == ["assistant", "mcp_call", "assistant", "user"]
        assert await session.get_items() == []
        assert await ask(client, session, "count") == "1 questions so far."

    run(hermes, flow)


def test_a_long_session_is_listed_in_order_whole_and_in_part(hermes: Hermes) -> None:
    async def flow(client: openai.AsyncOpenAI) -> None:
        session = session_of(client)
        said = [{"role": "user" if number % 2 == 0 else "assistant", "content": str(number)} for number in range(50)]
        await session.add_items(said)  # type: ignore[arg-type]
        texts = [item["content"][0]["text"] for item in await session.get_items()]  # type: ignore[typeddict-item, index]
        assert texts == [str(number) for number in range(50)]
        texts = [item["content"][0]["text"] for item in await session.get_items(limit=30)]  # type: ignore[typeddict-item, index]
        assert texts == [str(number) for number in range(20, 50)]
        assert await ask(client, session, "count") == "26 questions so far."

        short = session_of(client, conversation_id=session.session_id, session_settings=SessionSettings(limit=2))
        assert await ask(client, short, "count") == "2 questions so far."

    run(hermes, flow)


def test_a_cleared_session_begins_anew(hermes: Hermes) -> None:
    async def flow(client: openai.AsyncOpenAI) -> None:
        session = session_of(client)
        await ask(client, session, "say hello")
        await session.clear_session()
        assert await ask(client, session, "count") == "1 questions so far."

    run(hermes, flow)


def test_items_are_read_and_deleted_by_id(hermes: Hermes) -> None:
    """A response in a conversation goes on from the items that are left."""

    async def flow(client: openai.AsyncOpenAI) -> None:
        begun = await client.conversations.create()
        for number in (1, 2):
            made = await client.responses.create(model=MODEL, input="count", conversation=begun.id)
            assert made.output_text == f"{number} questions so far."
        items = [item async for item in client.conversations.items.list(begun.id, order="asc")]
        for item in items:
            assert await client.conversations.items.retrieve(item.id, conversation_id=begun.id) == item
        for item in items[2:]:
            kept = await client.conversations.items.delete(item.id, conversation_id=begun.id)
            assert kept == begun
        assert [item.id async for item in client.conversations.items.list(begun.id, order="asc")] == [
            item.id for item in items[:2]
        ]
        made = await client.responses.create(model=MODEL, input="count", conversation=begun.id)
        assert made.output_text == "2 questions so far."

    run(hermes, flow)
