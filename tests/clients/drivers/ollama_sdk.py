"""The official `ollama` package: its blocking and its asynchronous client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import ollama

from clients.drivers import MODEL, OWN_TOOL, PLAIN, Answer, Conversation, How, Refused
from clients.drivers.shapes import Person


class OllamaTalk(Conversation):
    """Chats through the blocking client (`chat`) or the asynchronous one (`async`)."""

    chains = False

    def __init__(self, url: str, key: str, api: str) -> None:
        super().__init__(url, key, api)
        self.client_options: dict[str, Any] = {
            "host": url.removesuffix("/v1"),
            "headers": {"Authorization": f"Bearer {key}"},
            "trust_env": False,
        }
        self.history: list[Any] = []

    def ask(self, prompt: str, how: How = PLAIN) -> Answer:
        self.history.append({"role": "user", "content": prompt})
        answer = Answer()
        try:
            while self._step(answer, how):
                pass
        except ollama.ResponseError as error:
            raise Refused(error.status_code if error.status_code > 0 else None, error.error) from error
        return answer

    def _step(self, answer: Answer, how: How) -> bool:
        """One request; whether another must follow."""
        system = [{"role": "system", "content": how.system}] if how.system else []
        request = {"model": MODEL, "messages": [*system, *self.history], "options": how.options, "stream": how.stream}
        if how.tools:
            request["tools"] = [{"type": "function", "function": OWN_TOOL}]
        if how.schema:
            request["format"] = Person.model_json_schema()
        parts = asyncio.run(self._asked_async(request)) if self.api == "async" else self._asked(request)
        text = "".join(part.message.content or "" for part in parts)
        answer.add([part.message.content or "" for part in parts], text)
        answer.tokens += parts[-1].prompt_eval_count + parts[-1].eval_count
        answer.value = json.loads(text) if how.schema else None
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        assert parts[-1].done and parts[-1].done_reason == "stop"
        self.history.append(ollama.Message(role="assistant", content=text, tool_calls=calls or None))
        for call in calls:
            output = answer.run(call.function.name, json.dumps(dict(call.function.arguments)))
            self.history.append({"role": "tool", "content": output, "tool_name": call.function.name})
        return bool(calls)

    def _asked(self, request: dict[str, Any]) -> list[Any]:
        answer = ollama.Client(**self.client_options).chat(**request)
        return list(answer) if request["stream"] else [answer]

    async def _asked_async(self, request: dict[str, Any]) -> list[Any]:
        answer: Any = await ollama.AsyncClient(**self.client_options).chat(**request)
        return [part async for part in answer] if request["stream"] else [answer]
