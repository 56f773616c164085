"""The package `@openai/agents` of npm with its model that speaks over a WebSocket."""

from __future__ import annotations

from clients.drivers.node import NodeTalk


class AgentsWebSocketNodeTalk(NodeTalk):
    """An agent whose model keeps a socket open for the time of a question."""

    script = "agents_websocket.mjs"
