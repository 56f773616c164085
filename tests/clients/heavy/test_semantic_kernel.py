"""Semantic Kernel's agent for the Responses API: its plugins are called by itself, its thread is a chain of responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from semantic_kernel.agents import OpenAIResponsesAgent, ResponsesAgentThread
from semantic_kernel.contents import TextContent
from semantic_kernel.functions import kernel_function

from clients.drivers import MODEL
from clients.scenes import FOUND, HELLO, LOOKING, PERSON, WEATHER, answer
from clients.server import Hermes
from support.model_server import Reply, Request


class Weather:
    """A plugin with the client's one function."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    @kernel_function(name="weather", description="The weather in a city.")
    def weather(self, city: str) -> str:
        self.requests.append(city)
        return WEATHER


@pytest.fixture(autouse=True)
def model(hermes: Hermes) -> Iterator[None]:
    """The model calls functions as this client names them, and does not mind that the question comes again after the
    results: beside outputs this client sends it once more."""

    def reply(request: Request) -> Reply:
        results = [turn.text for turn in request.turns if turn.role == "tool"]
        if results and request.turns[-1].text.startswith("use my weather"):
            return Reply(text=" and ".join(results), continues=False)
        response = answer(request)
        calls = [
            replace(call, name="Weather-weather") if call.name == "weather" else call for call in response.tool_calls
        ]
        return replace(response, tool_calls=calls)

    before, hermes.model.handler = hermes.model.handler, reply
    yield
    hermes.model.handler = before


class Person(BaseModel):
    """A person."""

    name: str
    born: int


def run(hermes: Hermes, flow: Callable[[openai.AsyncOpenAI], Awaitable[None]]) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=hermes.url, api_key=hermes.key, max_retries=0) as client:
            await flow(client)

    asyncio.run(main())


class Plain:
    """The agent asked without a stream."""

    async def ask(self, agent: OpenAIResponsesAgent, prompt: str, thread: Any = None) -> tuple[str, Any]:
        response = await agent.get_response(messages=prompt, thread=thread)
        # Its own text is the first message only; one before a tool of the server's is an item too.
        texts = [item.text for item in response.message.items if isinstance(item, TextContent)]
        return "".join(texts), response.thread


class Streamed:
    """The agent asked with a stream."""

    async def ask(self, agent: OpenAIResponsesAgent, prompt: str, thread: Any = None) -> tuple[str, Any]:
        pieces = []
        async for piece in agent.invoke_stream(messages=prompt, thread=thread):
            pieces.append(str(piece.message))
            thread = piece.thread
        return "".join(pieces), thread


both_ways = pytest.mark.parametrize("way", [Plain(), Streamed()], ids=["plain", "stream"])


@both_ways
def test_text_and_server_tools(hermes: Hermes, way: Any) -> None:
    async def flow(client: openai.AsyncOpenAI) -> None:
        agent = OpenAIResponsesAgent(ai_model_id=MODEL, client=client, name="Tester", instructions="Be brief.")
        assert (await way.ask(agent, "say hello"))[0] == "".join(HELLO)
        assert "Be brief." in hermes.model.requests[-1].turns[0].text
        text, _ = await way.ask(agent, "use your list")
        assert text.endswith("".join(FOUND)) and text.startswith("".join(LOOKING))

    run(hermes, flow)


@both_ways
@pytest.mark.parametrize("prompt", ["use my weather", "use my weather twice"])
def test_client_plugin_is_called(hermes: Hermes, way: Any, prompt: str) -> None:
    async def flow(client: openai.AsyncOpenAI) -> None:
        plugin = Weather()
        agent = OpenAIResponsesAgent(ai_model_id=MODEL, client=client, name="Tester", plugins=[plugin])
        text, _ = await way.ask(agent, prompt)
        assert text == " and ".join([WEATHER] * len(plugin.requests)) or text == f"It is {WEATHER}."
        assert plugin.requests == (["Paris", "Rome"] if prompt.endswith("twice") else ["Paris"])

    run(hermes, flow)


@both_ways
def test_thread_is_a_response_chain(hermes: Hermes, way: Any) -> None:
    async def flow(client: openai.AsyncOpenAI) -> None:
        agent = OpenAIResponsesAgent(ai_model_id=MODEL, client=client, name="Tester", plugins=[Weather()])
        thread: Any = ResponsesAgentThread(client=client)
        await way.ask(agent, "use my weather", thread)
        assert (await way.ask(agent, "say hello", thread))[0] == "".join(HELLO)
        assert last_messages(hermes) == [
            ("user", "use my weather"),
            ("assistant", ""),
            ("tool", WEATHER),
            ("user", "use my weather"),
            ("assistant", WEATHER),
            ("user", "say hello"),
        ]
        messages = [str(message) async for message in thread.get_messages()]
        assert "say hello" in messages
        await thread.delete()

    run(hermes, flow)


@both_ways
def test_thread_without_store_sends_everything(hermes: Hermes, way: Any) -> None:
    async def flow(client: openai.AsyncOpenAI) -> None:
        agent = OpenAIResponsesAgent(
            ai_model_id=MODEL, client=client, name="Tester", plugins=[Weather()], store_enabled=False
        )
        thread: Any = ResponsesAgentThread(client=client, enable_store=False)
        assert WEATHER in (await way.ask(agent, "use my weather", thread))[0]
        assert (await way.ask(agent, "say hello", thread))[0] == "".join(HELLO)
        # A thread of this kind holds what is asked already, and it is sent beside it.
        assert last_messages(hermes)[-2:] == [("user", "say hello")] * 2

    run(hermes, flow)


def last_messages(hermes: Hermes) -> list[tuple[str, str]]:
    """What the model was asked with last, without the system's part."""
    return [(turn.role, turn.text) for turn in hermes.model.requests[-1].turns if turn.role != "system"]


def test_answer_follows_schema(hermes: Hermes) -> None:
    async def flow(client: openai.AsyncOpenAI) -> None:
        text = OpenAIResponsesAgent.configure_response_format(Person)
        agent = OpenAIResponsesAgent(ai_model_id=MODEL, client=client, name="Tester", text=text)
        response = await agent.get_response(messages="name a person")
        assert Person.model_validate_json(str(response.message)).model_dump() == PERSON

    run(hermes, flow)
