"""Turns whose every word and call follows from the message that asks for them, and the ways to ask for them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from support.model_server import Call, Reply, Request

Json = dict[str, Any]
EFFECTS = "effects.txt"
_ASKED = re.compile(r"Turn (\S+): (\S*)\.")
_WORDS = ("It", " goes", " on", " and", " on", ".")
# letter: what a call does. Only the commands have an effect, which is a line with the call's id.
_CALLS: dict[str, Callable[[str], Call]] = {
    "c": lambda id_: Call("terminal", {"command": f"echo {id_} >> {EFFECTS}"}, id=id_),
    "s": lambda id_: Call("terminal", {"command": f"echo {id_} >> {EFFECTS}; sleep 0.1"}, id=id_),
    "w": lambda id_: Call(
        "terminal", {"command": f"echo {id_} >> {EFFECTS}; until [ -e go ]; do sleep 0.02; done"}, id=id_
    ),
    "a": lambda id_: Call("terminal", {"command": f"mkdir -p junk; rm -r junk; echo {id_} >> {EFFECTS}"}, id=id_),
    "q": lambda id_: Call("clarify", {"question": "Which one?"}, id=id_),
    "r": lambda id_: Call("read_file", {"path": "notes.txt"}, id=id_),
    "t": lambda id_: Call("todo", {"todos": [{"id": "1", "content": id_, "status": "pending"}]}, id=id_),
}


@dataclass(frozen=True)
class Plan:
    """One turn: a name of its own, and the calls of each message before the answer."""

    name: str
    steps: tuple[str, ...]
    gap_s: float = 0.004

    @classmethod
    def random(cls, name: str, chance: random.Random) -> Plan:
        """Up to three messages with up to two calls each."""
        steps = ("".join(chance.choices("ccsrt", k=chance.randint(1, 2))) for _ in range(chance.randint(0, 3)))
        return cls(name, tuple(steps))

    @property
    def message(self) -> str:
        """What asks for it."""
        return f"Turn {self.name}: {'/'.join(self.steps)}."

    @property
    def texts(self) -> list[str]:
        """All that the model says, message by message."""
        return ["".join(self._pieces(step)) for step in range(len(self.steps) + 1)]

    def _pieces(self, step: int) -> list[str]:
        return [f"Turn {self.name}, message {step}. ", *_WORDS]

    @property
    def effects(self) -> list[str]:
        """The ids of the calls that leave a line."""
        return [c.id or "" for step in range(len(self.steps)) for c in self.calls(step) if c.name == "terminal"]

    def calls(self, step: int) -> list[Call]:
        """The calls of a message."""
        letters = self.steps[step] if step < len(self.steps) else ""
        return [_CALLS[letter](f"call-{self.name}-{step}-{at}") for at, letter in enumerate(letters)]

    def reply(self, step: int) -> Reply:
        """A message as the model gives it."""
        return Reply(text=self._pieces(step), tool_calls=self.calls(step), gap_s=self.gap_s)


def asked_in(messages: list[Json]) -> tuple[Plan, int]:
    """The last plan of a conversation, and how many of its messages with calls there are."""
    for at in reversed(range(len(messages))):
        if messages[at]["role"] == "user" and (match := _ASKED.match(str(messages[at]["content"]))):
            steps = tuple(filter(None, match[2].split("/")))
            return Plan(match[1], steps), sum(bool(m.get("tool_calls")) for m in messages[at:])
    raise AssertionError("nobody asked for this")


def answer(request: Request) -> Reply:
    """The model of all plans."""
    plan, step = asked_in(request.body["messages"])
    return plan.reply(step)


def stalling(*moments: tuple[str, int, int]) -> Callable[[Request], Reply]:
    """The same, which stops for ever after so many bytes of a plan's message; asked again, it answers."""
    stalls = {(name, step): size for name, step, size in moments}

    def reply(request: Request) -> Reply:
        plan, step = asked_in(request.body["messages"])
        return replace(plan.reply(step), stall_at=stalls.pop((plan.name, step), None))

    return reply


@dataclass(frozen=True)
class Way:
    """A way to ask for a turn; whether it goes on without its client, and is answered as soon as it is on record."""

    path: str
    body: Callable[[str], Json]
    headers: tuple[tuple[str, str], ...] = ()
    goes_on: bool = True
    submitted: bool = False


def _chat(**fields: Any) -> Callable[[str], Json]:
    return lambda text: {"messages": [{"role": "user", "content": text}], **fields}


_DETACHED = (("X-Hermes-Detach", "true"),)
_CHAT, _RESPONSES = "/v1/chat/completions", "/v1/responses"
WAYS = {
    "chat": Way(_CHAT, _chat(), goes_on=False),
    "chat stream": Way(_CHAT, _chat(stream=True), goes_on=False),
    "chat detached": Way(_CHAT, _chat(stream=True), _DETACHED),
    "response": Way(_RESPONSES, lambda text: {"input": text, "stream": True}, goes_on=False),
    "response detached": Way(_RESPONSES, lambda text: {"input": text}, _DETACHED),
    "response background": Way(_RESPONSES, lambda text: {"input": text, "background": True}, submitted=True),
    "session": Way("/api/sessions/{session}/chat", lambda text: {"message": text}),
    "session stream": Way("/api/sessions/{session}/chat/stream", lambda text: {"message": text}),
    "run": Way("/v1/runs", lambda text: {"input": text}, submitted=True),
}
