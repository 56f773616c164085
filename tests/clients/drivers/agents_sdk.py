"""The package `openai-agents`, whose runner calls the functions itself."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from agents import (
    Agent,
    ItemHelpers,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from agents.exceptions import AgentsException

from clients.drivers import MODEL, PLAIN, Answer, Conversation, How, Refused, weather
from clients.drivers.openai_sdk import refusal
from clients.drivers.shapes import Person

_MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class AgentsTalk(Conversation):
    """An agent with one function at most."""

    def __init__(self, url: str, key: str, api: str) -> None:
        super().__init__(url, key, api)
        self.history: list[Any] = []
        self.last: str | None = None

    def ask(self, prompt: str, how: How = PLAIN) -> Answer:
        try:
            return asyncio.run(self._ask([{"role": "user", "content": prompt}], how))
        except openai.APIError as error:
            raise refusal(error) from error
        except AgentsException as error:
            raise Refused(None, str(error)) from error

    def model(self, client: openai.AsyncOpenAI) -> Any:
        """What asks the server."""
        return _MODELS[self.api](MODEL, client)

    async def _ask(self, question: list[Any], how: How) -> Answer:
        messages = question if how.chain else [*self.history, *question]
        settings = {
            "run_config": RunConfig(tracing_disabled=True),
            "previous_response_id": self.last if how.chain else None,
        }
        async with openai.AsyncOpenAI(base_url=self.url, api_key=self.key) as client:
            agent = Agent(
                name="tester",
                instructions=how.system or None,
                model=self.model(client),
                tools=[function_tool(weather)] if how.tools else [],
                output_type=Person if how.schema else None,
                model_settings=ModelSettings(include_usage=True, **how.options),
            )
            pieces = None
            if how.stream:
                result = Runner.run_streamed(agent, messages, **settings)
                pieces = [event.data.delta async for event in result.stream_events() if _is_text(event)]
            else:
                result = await Runner.run(agent, messages, **settings)
        self.last = result.last_response_id
        self.history = result.to_input_list()
        items = result.new_items
        texts = [ItemHelpers.text_message_output(item) for item in items if item.type == "message_output_item"]
        calls = [item.raw_item for item in items if item.type == "tool_call_item"]
        answer = Answer(
            calls=[(call.name, json.loads(call.arguments)) for call in calls if call.type == "function_call"],
            value=result.final_output.model_dump() if how.schema else None,
            tokens=result.context_wrapper.usage.total_tokens,
        )
        answer.add(texts if pieces is None else pieces, "".join(texts))
        return answer


def _is_text(event: Any) -> bool:
    return event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
