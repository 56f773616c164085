"""The official `openai` package, in its mode that validates every answer and every event against its own types."""

from __future__ import annotations

from typing import Any

import openai

from clients.drivers import MODEL, OWN_TOOL, PLAIN, Answer, Conversation, How, Refused
from clients.drivers.shapes import Person


def client(url: str, key: str) -> openai.OpenAI:
    """A client that takes nothing it does not know."""
    return openai.OpenAI(base_url=url, api_key=key, _strict_response_validation=True)


def refusal(error: openai.APIError) -> Refused:
    """An error of this package, which many others pass on."""
    return Refused(getattr(error, "status_code", None), error.message)


class OpenAITalk(Conversation):
    """Chat completions and responses, with the helpers `parse` and `stream`."""

    def __init__(self, url: str, key: str, api: str) -> None:
        super().__init__(url, key, api)
        self.client = client(url, key)
        self.history: list[Any] = []
        self.last: str | None = None

    def close(self) -> None:
        self.client.close()

    def ask(self, prompt: str, how: How = PLAIN) -> Answer:
        self.history.append({"role": "user", "content": prompt})
        step = self._chat if self.api == "chat" else self._responses
        answer = Answer()
        try:
            while step(answer, how):
                pass
        except openai.APIError as error:
            raise refusal(error) from error
        return answer

    def _chat(self, answer: Answer, how: How) -> bool:
        """One request; whether another must follow."""
        system = [{"role": "system", "content": how.system}] if how.system else []
        request = {"model": MODEL, "messages": [*system, *self.history], **how.options}
        if how.tools:
            request["tools"] = [{"type": "function", "function": OWN_TOOL}]
        if how.schema:
            request["response_format"] = Person
        endpoint = self.client.chat.completions
        if how.stream:
            with endpoint.stream(**request) as events:
                pieces = [event.delta for event in events if event.type == "content.delta"]
                result = events.get_final_completion()
        else:
            result = (endpoint.parse if how.schema else endpoint.create)(**request)
            pieces = [result.choices[0].message.content or ""]
        choice, message = result.choices[0], result.choices[0].message
        answer.add(pieces, message.content)
        answer.tokens += result.usage.total_tokens
        answer.value = message.parsed.model_dump() if how.schema else None
        self.history.append(message)
        calls = message.tool_calls or []
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        for call in calls:
            output = answer.run(call.function.name, call.function.arguments)
            self.history.append({"role": "tool", "tool_call_id": call.id, "content": output})
        return bool(calls)

    def _responses(self, answer: Answer, how: How) -> bool:
        """One request; whether another must follow."""
        request = {"model": MODEL, "input": self.history, "instructions": how.system or None, **how.options}
        if how.chain and self.last:
            request["previous_response_id"] = self.last
        if how.tools:
            request["tools"] = [{"type": "function", **OWN_TOOL}]
        if how.schema:
            request["text_format"] = Person
        endpoint = self.client.responses
        if how.stream:
            with endpoint.stream(**request) as events:
                pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
                result = events.get_final_response()
        else:
            result = (endpoint.parse if how.schema else endpoint.create)(**request)
            pieces = [result.output_text]
        assert result.status == "completed"
        answer.add(pieces, result.output_text)
        answer.tokens += result.usage.total_tokens
        answer.value = result.output_parsed.model_dump() if how.schema else None
        self.last = result.id
        self.history = [] if how.chain else [*self.history, *result.output]
        calls = [item for item in result.output if item.type == "function_call"]
        for call in calls:
            output = answer.run(call.name, call.arguments)
            self.history.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
        return bool(calls)
