"""More JavaScript clients, each with the script that drives it."""

from __future__ import annotations

from clients.drivers.node import NodeTalk


class LangChainNodeTalk(NodeTalk):
    """The packages `@langchain/openai` and `langchain`."""

    script = "langchain.mjs"


class XsAITalk(NodeTalk):
    """The packages `@xsai/generate-text` and `@xsai/stream-text`."""

    script = "xsai.mjs"
    chains = False


class OpenAIFetchTalk(NodeTalk):
    """The package `openai-fetch`."""

    script = "openai-fetch.mjs"
    chains = False


class LibreChatTalk(NodeTalk):
    """The package `@librechat/agents`."""

    script = "librechat.mjs"
    chains = False
