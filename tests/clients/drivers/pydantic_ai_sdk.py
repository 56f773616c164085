"""The package `pydantic-ai`, whose agent calls the functions itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Any

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import AgentRunError, ModelHTTPError
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ToolCallPart,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from clients.drivers import MODEL, PLAIN, Answer, Conversation, How, Refused, weather
from clients.drivers.shapes import Person

_MODELS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
# Its own way to a result is a function that the model must call; the other way is a schema for the text.
_RESULTS = {"chat": Person, "responses": NativeOutput(Person)}


class PydanticAITalk(Conversation):
    """An agent with one function at most."""

    returns_server_items = False

    def __init__(self, url: str, key: str, api: str) -> None:
        super().__init__(url, key, api)
        self.history: list[ModelMessage] = []

    def ask(self, prompt: str, how: How = PLAIN) -> Answer:
        try:
            return asyncio.run(self._ask(prompt, how))
        except AgentRunError as error:
            status = error.status_code if isinstance(error, ModelHTTPError) else None
            raise Refused(status, str(error)) from error

    async def _ask(self, prompt: str, how: How) -> Answer:
        pieces: list[str] = []

        async def watch(_: object, events: AsyncIterable[object]) -> None:
            async for event in events:
                match event:
                    case PartStartEvent(part=TextPart(content=text)):
                        pieces.append(text)
                    case PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
                        pieces.append(text)

        agent: Any = Agent(
            _MODELS[self.api](MODEL, provider=OpenAIProvider(base_url=self.url, api_key=self.key)),
            tools=[weather] if how.tools else [],
            instructions=how.system or None,
            output_type=_RESULTS[self.api] if how.schema else str,
        )
        result = await agent.run(
            prompt,
            message_history=self.history,
            model_settings={**how.options, **({"openai_previous_response_id": "auto"} if how.chain else {})},
            event_stream_handler=watch if how.stream else None,
        )
        self.history = result.all_messages()
        answers = [message for message in result.new_messages() if isinstance(message, ModelResponse)]
        parts = [part for message in answers for part in message.parts]
        texts = [part.content for part in parts if isinstance(part, TextPart)]
        calls = [part for part in parts if isinstance(part, ToolCallPart)]
        answer = Answer(
            # The function that takes the result is the library's own.
            calls=[(call.tool_name, call.args_as_dict()) for call in calls if call.tool_name != "final_result"],
            value=result.output.model_dump() if how.schema else None,
            tokens=result.usage.total_tokens,
        )
        answer.add(pieces if how.stream else texts, "".join(texts))
        return answer
