"""The agents SDKs with their models that speak over a WebSocket: the turns of every client, and tools of further types."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import pytest

from clients.drivers import Conversation, How, Refused
from clients.scenes import REFUSAL, SCENES
from clients.server import Hermes
from clients.test_turns import Turns, both_ways, failing_both_ways
from support.model_server import Call, Reply, Request


class SocketTurns(Turns):
    """A socket has no status of its own for a turn, and a handshake that is refused no reason."""

    apis = ("responses",)
    # What the client says of an error that the server reports as `reason`.
    tells_reasons = True

    def says(self, reason: str) -> str:
        return reason if self.tells_reasons else 'unsuccessful terminal state "error"'

    def test_wrong_key_is_reported(self, api: str, hermes: Hermes) -> None:
        conversation = self.begin(hermes, api, key="wrong")
        with pytest.raises(Refused) as refused:
            conversation.ask("say hello")
        assert refused.value.status == (401 if self.tells_reasons else None)

    def test_invalid_field_is_reported(self, conversation: Conversation) -> None:
        name, value = conversation.bad_option
        with pytest.raises(Refused, match=self.says(name)):
            conversation.ask("say hello", How(stream=True, options={name: value}))

    @failing_both_ways
    def test_model_failure_is_reported_and_not_retried(
        self, hermes: Hermes, conversation: Conversation, stream: bool, failing: str, steps: int
    ) -> None:
        before = len(hermes.model.requests)
        with pytest.raises(Refused, match=self.says(REFUSAL)):
            conversation.ask(failing, How(stream=stream))
        assert len(hermes.model.requests) - before == steps

    def test_broken_stream_is_an_error(self, conversation: Conversation) -> None:
        with pytest.raises(Refused, match=self.says(REFUSAL)):
            conversation.ask("break off", How(stream=True))


class TestAgentsWebSocket(SocketTurns):
    driver = "agents_websocket.AgentsWebSocketTalk"


class TestAgentsNodeWebSocket(SocketTurns):
    driver = "agents_websocket_node.AgentsWebSocketNodeTalk"
    tells_reasons = False


# ---- tools of the agents SDK that are no functions

_CALLS = [
    Call("shell", {"commands": ["whoami"]}),
    Call("local_shell", {"command": ["pwd"]}),
    Call("apply_patch", {"type": "create_file", "path": "poem.txt", "diff": "+Roses are red."}),
    Call("shout", {"input": "größe"}),
    Call("garden__weather", {"city": "Paris"}),
]


def _use_all(request: Request) -> Reply:
    """Call each tool of the client that is offered, one after the other, and repeat the last result."""
    offered = {tool["function"]["name"] for tool in request.body["tools"]}
    turns = request.turns
    last_user = max(place for place, turn in enumerate(turns) if turn.role == "user")
    results = [turn.text for turn in turns[last_user:] if turn.role == "tool"]
    wanted = [call for call in _CALLS if call.name in offered]
    if len(results) == len(wanted):
        return Reply(text=" / ".join(results), continues=False)
    call = replace(wanted[len(results)], id=f"call_{secrets.token_hex(8)}")
    return Reply(tool_calls=[call], continues=False)


SCENES["use every tool"] = _use_all


class _Editor:
    def __init__(self) -> None:
        self.created: dict[str, str | None] = {}

    def create_file(self, operation: Any) -> str:
        self.created[operation.path] = operation.diff
        return "created"

    update_file = delete_file = create_file


@pytest.mark.parametrize("transport", ["responses", "websocket"])
@pytest.mark.parametrize("shell", ["shell", "local_shell"])
@both_ways
def test_tools_of_further_types(hermes: Hermes, transport: str, shell: str, stream: bool) -> None:
    """Two turns on one connection, the second chained to the first, which is not stored."""
    from clients.drivers.agents_websocket import run_with_tools

    editor = _Editor()
    texts = run_with_tools(hermes.url, hermes.key, transport, shell, editor, stream, ["use every tool", "count"])
    path = {"shell": "ada", "local_shell": "/home/ada"}[shell]
    assert path in texts[0]
    assert texts[0].endswith(" / created / GRÖSSE / 21 degrees")
    assert texts[1] == "2 questions so far."
    assert editor.created == {"poem.txt": "+Roses are red."}
