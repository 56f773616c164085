"""The official `anthropic` package: its blocking and its asynchronous client, stream helpers, schemas and tool runner."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
from anthropic import beta_tool

from clients.drivers import MODEL, OWN_TOOL, PLAIN, Answer, Conversation, How, Refused
from clients.drivers.shapes import Person

_TOOL = {"name": OWN_TOOL["name"], "description": OWN_TOOL["description"], "input_schema": OWN_TOOL["parameters"]}


def refusal(error: anthropic.APIError) -> Refused:
    """An error of this package; one in a stream has the status of the stream, which went well."""
    status = getattr(error, "status_code", None)
    return Refused(None if status == 200 else status, error.message)


class AnthropicTalk(Conversation):
    """Messages through the blocking client (`messages`), the asynchronous one (`async`) or the tool runner (`runner`)."""

    chains = False

    def __init__(self, url: str, key: str, api: str) -> None:
        super().__init__(url, key, api)
        # A client that takes nothing it does not know.
        self.client_options: dict[str, Any] = {
            "base_url": url.removesuffix("/v1"),
            "api_key": key,
            "_strict_response_validation": True,
        }
        self.history: list[Any] = []

    def ask(self, prompt: str, how: How = PLAIN) -> Answer:
        self.history.append({"role": "user", "content": prompt})
        answer = Answer()
        try:
            if self.api == "runner" and how.tools:
                self._run_tools(answer, how)
            else:
                while self._step(answer, how):
                    pass
        except anthropic.APIError as error:
            raise refusal(error) from error
        return answer

    def _request(self, how: How) -> dict[str, Any]:
        request: dict[str, Any] = {"model": MODEL, "max_tokens": 1000, "messages": self.history}
        if how.options:  # the package itself has no sampling parameters any more
            request["extra_body"] = how.options
        if how.system:
            request["system"] = [{"type": "text", "text": how.system, "cache_control": {"type": "ephemeral"}}]
        if how.schema:
            request["output_format"] = Person
        if how.tools:
            request["tools"] = [_TOOL]
        return request

    def _step(self, answer: Answer, how: How) -> bool:
        """One request; whether another must follow."""
        request = self._request(how)
        if self.api == "async":
            pieces, message = asyncio.run(self._asked_async(request, how))
        else:
            with anthropic.Anthropic(**self.client_options) as client:
                pieces, message = self._asked(client, request, how)
        texts = [block.text for block in message.content if block.type == "text"]
        answer.add(pieces or texts, "".join(texts))
        answer.tokens += message.usage.input_tokens + message.usage.output_tokens
        answer.value = message.parsed_output.model_dump() if how.schema else None
        self.history.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        if not calls:
            return False
        outputs = [answer.run(call.name, json.dumps(call.input)) for call in calls]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": output}
            for call, output in zip(calls, outputs, strict=True)
        ]
        self.history.append({"role": "user", "content": results})
        return True

    def _asked(self, client: anthropic.Anthropic, request: dict[str, Any], how: How) -> tuple[list[str], Any]:
        if how.stream:
            with client.messages.stream(**request) as stream:
                return list(stream.text_stream), stream.get_final_message()
        return [], (client.messages.parse if how.schema else client.messages.create)(**request)

    async def _asked_async(self, request: dict[str, Any], how: How) -> tuple[list[str], Any]:
        async with anthropic.AsyncAnthropic(**self.client_options) as client:
            if how.stream:
                async with client.messages.stream(**request) as stream:
                    return [text async for text in stream.text_stream], await stream.get_final_message()
            return [], await (client.messages.parse if how.schema else client.messages.create)(**request)

    def _run_tools(self, answer: Answer, how: How) -> None:
        @beta_tool
        def weather(city: str) -> str:
            """The weather in a city."""
            return answer.run("weather", json.dumps({"city": city}))

        request = {**self._request(how), "tools": [weather]}
        with anthropic.Anthropic(**self.client_options) as client:
            for step in client.beta.messages.tool_runner(stream=how.stream, **request):
                message: Any = step.get_final_message() if how.stream else step
                answer.text += "".join(block.text for block in message.content if block.type == "text")
                answer.tokens += message.usage.input_tokens + message.usage.output_tokens
        self.history.append({"role": "assistant", "content": answer.text})
