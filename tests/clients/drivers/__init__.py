"""One interface to all clients: a conversation with the server, question by question."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from clients.scenes import WEATHER

MODEL = "hermes-agent"
# The one function that a client has.
OWN_TOOL = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def weather(city: str) -> str:
    """The weather in a city."""
    return WEATHER


@dataclass(frozen=True)
class How:
    """How a question is put: streamed, with the client's function, with a schema, with the last response's id."""

    stream: bool = False
    tools: bool = False
    schema: bool = False
    chain: bool = False
    system: str = ""
    options: dict[str, Any] = field(default_factory=dict)


PLAIN = How()


@dataclass
class Answer:
    """What a client made of an answer: its text, the pieces it came in, its own functions that were called."""

    text: str = ""
    pieces: int = 0
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    value: object = None
    tokens: int = 0

    def add(self, pieces: list[str], whole: str | None) -> None:
        """Take in the pieces of a text that the client also has whole."""
        assert "".join(pieces) == (whole or "")
        self.text += "".join(pieces)
        self.pieces += len(pieces)

    def run(self, name: str, arguments: str) -> str:
        """Carry out a function call as a client does."""
        parsed = json.loads(arguments)
        self.calls.append((name, parsed))
        return weather(**parsed) if name == "weather" else f"There is no {name} here."


class Refused(Exception):
    """An error as the client reported it; that of a broken stream has no status."""

    def __init__(self, status: int | None, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message


class Conversation:
    """A conversation of one client through one of its protocols; each question continues the one before."""

    # Whether the client can continue by the id of the last response.
    chains = True
    # Whether a history that it sends holds the items of server tools that it was shown.
    returns_server_items = True
    # Whether the client shows the pieces of a stream.
    shows_pieces = True
    # A value that no server can take, and that the client sends all the same.
    bad_option: tuple[str, object] = ("temperature", 9)

    def __init__(self, url: str, key: str, api: str) -> None:
        self.url, self.key, self.api = url, key, api

    def ask(self, prompt: str, how: How = PLAIN) -> Answer:
        """Put a question and follow it to its answer; what the client raises becomes `Refused`."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the resources of the conversation."""
