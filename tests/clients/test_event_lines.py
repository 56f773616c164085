"""Lines of a stream for clients that read no longer ones: Open WebUI's HTTP library gives up on those over 128 KiB."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from clients.drivers import MODEL
from clients.server import Hermes
from support.model_server import Call, Reply, Request

LINE_BYTES_MAX = 100_000
ROUNDS = 8


@pytest.fixture
def model(hermes: Hermes) -> Iterator[Any]:
    """A model that uses a tool of the server with a long output several times before it answers."""

    def reply(request: Request) -> Reply:
        tool_results = sum(turn.role == "tool" for turn in request.turns)
        if tool_results == ROUNDS:
            return Reply(text="Counted.", continues=False)
        command = f"seq {tool_results}00000 {tool_results}09000"
        return Reply(tool_calls=[Call("terminal", {"command": command}, id=f"call_{tool_results}")], continues=False)

    before, hermes.model.handler = hermes.model.handler, reply
    yield hermes.model
    hermes.model.handler = before


def lines(hermes: Hermes, path: str, body: dict[str, Any]) -> list[bytes]:
    """The lines of a stream as they come."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {hermes.key}"}
    data = json.dumps({"model": MODEL, "stream": True, **body}).encode()
    with urllib.request.urlopen(urllib.request.Request(hermes.url + path, data, headers), timeout=120) as response:
        return list(response)


def test_chat_event_line_length(hermes: Hermes, model: Any) -> None:
    event_lines = lines(hermes, "/chat/completions", {"messages": [{"role": "user", "content": "Count."}]})
    assert max(map(len, event_lines)) <= LINE_BYTES_MAX
    assert any(b"Counted." in line for line in event_lines)


def test_responses_event_line_length(hermes: Hermes, model: Any) -> None:
    event_lines = lines(hermes, "/responses", {"input": "Count."})
    events = [json.loads(line.removeprefix(b"data: ")) for line in event_lines if line.startswith(b"data: {")]
    outputs = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    outputs = [item for item in outputs if item["type"] == "function_call_output"]
    assert len(outputs) == ROUNDS
    assert sum(len(json.dumps(item)) for item in outputs) > LINE_BYTES_MAX
    assert events[-1]["type"] == "response.completed"
    assert max(map(len, event_lines)) <= LINE_BYTES_MAX
