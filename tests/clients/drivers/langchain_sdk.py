"""The package `langchain-openai`."""

from __future__ import annotations

import json
from functools import reduce
from operator import add
from typing import Any

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from clients.drivers import MODEL, PLAIN, Answer, Conversation, How, weather
from clients.drivers.openai_sdk import refusal
from clients.drivers.shapes import Person


class LangChainTalk(Conversation):
    """`ChatOpenAI` in both of its protocols."""

    def __init__(self, url: str, key: str, api: str) -> None:
        super().__init__(url, key, api)
        self.history: list[Any] = []

    def ask(self, prompt: str, how: How = PLAIN) -> Answer:
        self.history.append(HumanMessage(prompt))
        answer = Answer()
        try:
            while self._step(answer, how):
                pass
        except openai.APIError as error:
            raise refusal(error) from error
        return answer

    def _step(self, answer: Answer, how: How) -> bool:
        """One request; whether another must follow."""
        model: Any = ChatOpenAI(
            model=MODEL,
            base_url=self.url,
            api_key=self.key,
            use_responses_api=self.api == "responses",
            use_previous_response_id=how.chain,
            stream_usage=True,
            **how.options,
        )
        if how.schema:
            model = model.with_structured_output(Person)
            answer.value = (
                list(model.stream(self.history))[-1] if how.stream else model.invoke(self.history)
            ).model_dump()
            return False
        if how.tools:
            model = model.bind_tools([tool(weather)])
        messages = [*([SystemMessage(how.system)] if how.system else []), *self.history]
        parts = list(model.stream(messages)) if how.stream else [model.invoke(messages)]
        message: AIMessage = reduce(add, parts)
        assert not message.invalid_tool_calls
        answer.add([part.text for part in parts if part.text], message.text)
        answer.tokens += message.usage_metadata["total_tokens"]
        self.history.append(message)
        for call in message.tool_calls:
            output = answer.run(call["name"], json.dumps(call["args"]))
            self.history.append(ToolMessage(output, tool_call_id=call["id"]))
        return bool(message.tool_calls)
