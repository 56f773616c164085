"""The model of these tests: what is asked last decides what it answers."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from support.model_server import Call, Reply, Request

HELLO = ["Hel", "lo, ", "Wörld ", "🌍!"]
LOOKING = ["Let me ", "look."]
FOUND = ["Two things ", "to do."]
THOUGHT = ["A greeting ", "will do."]
PERSON = {"name": "Ada", "born": 1815}
CITY = {"city": "Paris"}
WEATHER = "21 degrees"
REFUSAL = "This model takes no such request."
# What each answer of the model costs.
TOKENS = 15

_TODO = Call("todo", {"todos": [{"id": "1", "content": "Water the plants", "status": "pending"}]})
_TWICE = Call("todo", {"todos": [{"id": "1", "content": "Rest", "status": "pending"}] * 2})
_WEATHER = Call("weather", CITY)
_ELSEWHERE = Call("weather", ['{"ci', 'ty": "Ro', 'me"}'])


def _say(text: str | list[str], **more: object) -> Reply:
    return Reply(text=text, continues=False, **more)  # type: ignore[arg-type]


def _using(*calls: Call, said: list[str], then: Callable[[list[str]], str | list[str]]) -> Callable[[Request], Reply]:
    """Call the tools, and answer with what their results make of it."""

    def reply(request: Request) -> Reply:
        turns = request.turns
        asked = max(place for place, turn in enumerate(turns) if turn.role == "user")
        results = [turn.text for turn in turns[asked:] if turn.role == "tool"]
        if results:
            return _say(then(results))
        # As with a real model no two calls have the same id: a conversation is known by them.
        return _say(said, tool_calls=[replace(call, id=f"call_{secrets.token_hex(8)}") for call in calls])

    return reply


def _person(request: Request) -> Reply:
    """A person as text, or as the call of a tool that a client has for its results."""
    names = {tool["function"]["name"] for tool in request.body.get("tools") or []}
    if "final_result" in names:
        return _say("", tool_calls=[Call("final_result", PERSON)])
    return _say(['{"name": "A', 'da", "born"', ": 1815}"])


def _count(request: Request) -> Reply:
    return _say(f"{sum(turn.role == 'user' for turn in request.turns)} questions so far.")


def _look_then_break(request: Request) -> Reply:
    used = request.turns[-1].role == "tool"
    return Reply(status=500, error=REFUSAL) if used else _say(LOOKING, tool_calls=[_TODO])


SCENES: dict[str, Callable[[Request], Reply]] = {
    "say hello": lambda _: _say(HELLO),
    # Pieces that follow each other at once may be put together on their way.
    "say hello slowly": lambda _: _say(HELLO, gap_s=0.1),
    "think, then say hello": lambda _: _say(HELLO, reasoning=THOUGHT),
    "say too much": lambda _: _say(HELLO, finish="length"),
    "use your list": _using(_TODO, said=LOOKING, then=lambda _: FOUND),
    "misuse your list": _using(_TWICE, said=LOOKING, then=lambda _: FOUND),
    "use my weather": _using(_WEATHER, said=[], then=lambda results: f"It is {results[-1]}."),
    "use my weather twice": _using(_WEATHER, _ELSEWHERE, said=[], then=" and ".join),
    "use both": _using(_TODO, _WEATHER, said=[], then=lambda results: f"{len(results)} results: {results[-1]}."),
    "name a person": _person,
    "count": _count,
    "look, then break": _look_then_break,
    "break off": lambda _: _say(HELLO, error_event={"message": REFUSAL}),
    "be refused": lambda _: Reply(status=400, error=REFUSAL),
    "break": lambda _: Reply(status=500, error=REFUSAL),
}


def answer(request: Request) -> Reply:
    """The answer to the last question of the request."""
    asked = next(turn.text for turn in reversed(request.turns) if turn.role == "user")
    return SCENES[asked.strip()](request)
