"""The package `litellm`, which reads answers and streams in its own way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Its price list comes with the package; a newer one would be fetched at import.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import openai

from clients.drivers import MODEL, OWN_TOOL, PLAIN, Answer, Conversation, How, Refused
from clients.drivers.shapes import Person

# Of a model that it does not know it would imitate the stream.
litellm.register_model({f"openai/{MODEL}": {"litellm_provider": "openai", "supports_native_streaming": True}})


class LiteLLMTalk(Conversation):
    """`completion` and `responses` with the provider `openai`."""

    def __init__(self, url: str, key: str, api: str) -> None:
        super().__init__(url, key, api)
        self.client_options = {"model": f"openai/{MODEL}", "api_base": url, "api_key": key}
        self.history: list[Any] = []
        self.last = ""

    def ask(self, prompt: str, how: How = PLAIN) -> Answer:
        self.history.append({"role": "user", "content": prompt})
        step = self._chat if self.api == "chat" else self._responses
        answer = Answer()
        with _refusing():
            while step(answer, how):
                pass
        answer.value = Person.model_validate_json(answer.text).model_dump() if how.schema else None
        return answer

    def _chat(self, answer: Answer, how: How) -> bool:
        """One request; whether another must follow."""
        system = [{"role": "system", "content": how.system}] if how.system else []
        request = {**self.client_options, "messages": [*system, *self.history], "stream": how.stream, **how.options}
        if how.stream:
            request["stream_options"] = {"include_usage": True}
        if how.tools:
            request["tools"] = [{"type": "function", "function": OWN_TOOL}]
        if how.schema:
            request["response_format"] = Person
        result = litellm.completion(**request)
        pieces = None
        if how.stream:
            chunks = list(result)
            pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
            result = litellm.stream_chunk_builder(chunks, messages=self.history)
        message = result.choices[0].message
        answer.add([message.content or ""] if pieces is None else pieces, message.content)
        answer.tokens += result.usage.total_tokens
        self.history.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            output = answer.run(call.function.name, call.function.arguments)
            self.history.append({"role": "tool", "tool_call_id": call.id, "content": output})
        return bool(message.tool_calls)

    def _responses(self, answer: Answer, how: How) -> bool:
        """One request; whether another must follow."""
        request = {**self.client_options, "input": self.history, "stream": how.stream, **how.options}
        if how.system:
            request["instructions"] = how.system
        if how.chain and self.last:
            request["previous_response_id"] = self.last
        if how.tools:
            request["tools"] = [{"type": "function", **OWN_TOOL}]
        if how.schema:
            request["text_format"] = Person
        response = litellm.responses(**request)
        pieces = None
        if how.stream:
            events = list(response)
            pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
            response = next(event.response for event in events if event.type == "response.completed")
        items = _items(response)
        answer.add([_text(items)] if pieces is None else pieces, _text(items))
        answer.tokens += (
            response.usage.total_tokens if hasattr(response.usage, "total_tokens") else response.usage["total_tokens"]
        )
        self.last = response.id
        self.history = [] if how.chain else [*self.history, *items]
        calls = [item for item in items if item["type"] == "function_call"]
        for call in calls:
            output = answer.run(call["name"], call["arguments"])
            self.history.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})
        return bool(calls)

    def text_of(self, response_id: str) -> str:
        """The text of a response that the server keeps."""
        with _refusing():
            stored = litellm.get_responses(response_id, custom_llm_provider="openai", **self.client_options)
        return _text(_items(stored))

    def delete(self, response_id: str) -> bool:
        """Delete a response that the server keeps."""
        return bool(litellm.delete_responses(response_id, custom_llm_provider="openai", **self.client_options).deleted)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except openai.APIError as error:
        raise Refused(getattr(error, "status_code", None), str(error)) from error


def _items(response: Any) -> list[dict[str, Any]]:
    return [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in response.output]


def _text(items: list[dict[str, Any]]) -> str:
    return "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
