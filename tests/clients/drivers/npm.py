"""More JavaScript clients, each with the script that drives it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from clients.drivers import PLAIN, How
from clients.drivers.node import NodeTalk


class NpmTalk(NodeTalk):
    """A conversation that can send images."""

    chains = False

    def show(self, prompt: str, image: str, how: How = PLAIN) -> str:
        """Put a question beside a picture; the text of its answer."""
        return str(self.call(prompt=prompt, image=image, **asdict(how))["text"])


class LangChainNodeTalk(NpmTalk):
    """The packages `@langchain/openai` and `langchain`."""

    script = "langchain.mjs"
    chains = True

    def send_again(self, how: How) -> dict[str, Any]:
        """Send once more what was sent last."""
        return self.call(**asdict(how))


class XsAITalk(NpmTalk):
    """The packages `@xsai/generate-text` and `@xsai/stream-text`."""

    script = "xsai.mjs"


class OpenAIFetchTalk(NpmTalk):
    """The package `openai-fetch`."""

    script = "openai-fetch.mjs"


class LibreChatTalk(NpmTalk):
    """The package `@librechat/agents`."""

    script = "librechat.mjs"


class ChatPage(NodeTalk):
    """A chat of the package `ai` with its UI messages."""

    script = "ui.mjs"
