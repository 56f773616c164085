"""Open WebUI, a real one: chats, the tasks it has done for a chat, "Continue Response", tools of both sides."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from clients.drivers import MODEL
from clients.heavy.open_webui import TASKS, OpenWebUI, running
from clients.scenes import FOUND, HELLO, LOOKING, REFUSAL, answer
from clients.server import Hermes
from support.model_server import Call, Reply, Request

TEXT = "".join(HELLO)


@pytest.fixture(scope="module")
def webui(hermes: Hermes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenWebUI]:
    with running(tmp_path_factory.mktemp("open-webui"), hermes) as webui:
        yield webui


@pytest.fixture
def model(hermes: Hermes) -> Iterator[Any]:
    """The model, to be given an answer for one test."""
    before = hermes.model.handler
    yield hermes.model
    hermes.model.handler = before


def last_messages(hermes: Hermes) -> list[tuple[str, str]]:
    """What the model was asked with last, without the system's part."""
    return [(turn.role, turn.text) for turn in hermes.model.requests[-1].turns if turn.role != "system"]


@pytest.fixture(params=["chat", "responses"], scope="module")
def connected(request: pytest.FixtureRequest, hermes: Hermes, webui: OpenWebUI) -> OpenWebUI:
    """The same through each protocol that it speaks."""
    webui.connect(hermes, request.param)
    return webui


def test_chat_continues(hermes: Hermes, connected: OpenWebUI) -> None:
    assert MODEL in connected.models()
    chat = connected.begin("say hello")
    assert chat.messages[-1]["content"] == TEXT
    assert chat.ask("count")["content"] == "2 questions so far."
    assert last_messages(hermes) == [("user", "say hello"), ("assistant", TEXT), ("user", "count")]


def test_title_tags_and_follow_up_tasks(model: Any, connected: OpenWebUI) -> None:
    """Title, tags and follow-ups are questions of their own, which are no part of the chat."""
    answers = {
        "title": {"title": "A Greeting"},
        "tags": {"tags": ["Greetings", "Small Talk"]},
        "follow_ups": {"follow_ups": ["And in French?"]},
    }

    def reply(request: Request) -> Reply:
        text = request.turns[-1].text
        task = next((name for name in answers if f'"{name}"' in text), None)
        return Reply(text=json.dumps(answers[task]), continues=False) if task else answer(request)

    model.handler = reply
    chat = connected.begin("say hello", TASKS)
    assert chat.messages[-1]["content"] == TEXT
    state = chat.until(
        lambda loaded: loaded["title"] == "A Greeting" and loaded["history"]["messages"][chat.last].get("followUps")
    )
    assert state["history"]["messages"][chat.last]["followUps"] == ["And in French?"]
    chat.until(lambda _: len(connected.call("GET", f"/api/v1/chats/{chat.id}/tags")) == 2)
    assert chat.ask("count")["content"] == "2 questions so far."


@pytest.mark.parametrize("prompt", ["use your list", "misuse your list"])
def test_server_tool_is_not_treated_as_client_tool(connected: OpenWebUI, prompt: str) -> None:
    chat = connected.begin(prompt)
    assert "".join(LOOKING) in chat.messages[-1]["content"]
    assert chat.messages[-1]["content"].strip().endswith("".join(FOUND))
    assert chat.ask("count")["content"] == "2 questions so far."


@pytest.fixture(scope="module")
def garden(webui: OpenWebUI) -> str:
    """A tool of Open WebUI's own, with a long result."""
    webui.add_tool("garden", GARDEN)
    return "garden"


GARDEN = """
class Tools:
    def look(self, where: str) -> str:
        \"\"\"
        Look at the garden.
        :param where: which part of it
        \"\"\"
        return "rose " * 60_000
"""


def test_client_tools_and_long_answers(model: Any, connected: OpenWebUI, garden: str) -> None:
    """Tool results and answers of hundreds of kilobytes come whole, in both directions."""
    long = [f"word{number} " for number in range(30_000)]

    def reply(request: Request) -> Reply:
        results = [turn.text for turn in request.turns if turn.role == "tool"]
        if not results:
            call = Call("look", {"where": "front"}, id=f"call_{secrets.token_hex(8)}")
            return Reply(text="Let me look. ", tool_calls=[call], continues=False)
        assert results[-1].count("rose") == 60_000
        return Reply(text=long, continues=False)

    model.handler = reply
    message = connected.begin("What grows there?", tool_ids=[garden]).messages[-1]
    assert message["content"].endswith("".join(long).strip())


def test_failure_is_shown(connected: OpenWebUI) -> None:
    """Also one in the middle of a stream, which it finds only in a frame without choices."""
    chat = connected.begin("say hello")
    assert REFUSAL in json.dumps(chat.ask("break")["error"])
    assert REFUSAL in json.dumps(chat.ask("break off")["error"])


def test_continue_response(hermes: Hermes, model: Any, webui: OpenWebUI) -> None:
    """The request ends with the assistant's message; only what follows it is said."""
    webui.connect(hermes, "chat")
    story, end = "Once there was a queen", " and she lived happily."
    model.handler = lambda request: Reply(
        text=story if request.turns[-1].text == "Tell a story." else end, continues=False
    )
    chat = webui.begin("Tell a story.")
    assert chat.messages[-1]["content"] == story
    chat.go_on()
    assert chat.messages[-1]["content"] == story + end
    assert ("assistant", story) in last_messages(hermes)


def test_continue_response_is_unsupported_over_responses(hermes: Hermes, model: Any, webui: OpenWebUI) -> None:
    """The protocol has no such request: the user sees an error, and the chat continues."""
    webui.connect(hermes, "responses")
    chat = webui.begin("say hello")
    message = chat.go_on()
    assert "The last item of input" in json.dumps(message["error"])
    assert message["content"] == TEXT
