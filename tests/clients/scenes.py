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


def _asked(request: Request) -> int:
    """The place of the last question: images that a tool showed follow it in the user's name."""
    turns = enumerate(request.turns)
    return max(place for place, turn in turns if turn.role == "user" and turn.text.strip() in SCENES)


def _using(*calls: Call, texts: list[str], then: Callable[[list[str]], str | list[str]]) -> Callable[[Request], Reply]:
    """Call the tools, and answer with what their results make of it."""

    def reply(request: Request) -> Reply:
        results = [turn.text for turn in request.turns[_asked(request) :] if turn.role == "tool"]
        if results:
            return _say(then(results))
        return _say(texts, tool_calls=[replace(call, id=_call_id()) for call in calls])

    return reply


def _call_id() -> str:
    """As with a real model no two calls have the same id: a conversation is known by them."""
    return f"call_{secrets.token_hex(8)}"


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


def _break_once(reply: Callable[[Request], Reply]) -> Callable[[Request], Reply]:
    """Fail when the result of a call comes for the first time."""
    known: set[str] = set()

    def breaking(request: Request) -> Reply:
        call = str(request.body["messages"][-1].get("tool_call_id", ""))
        if not call or call in known:
            return reply(request)
        known.add(call)
        return Reply(status=500, error=REFUSAL)

    return breaking


def _count_pictures(request: Request) -> Reply:
    """Those of all messages, wherever they stand."""
    lists = [message["content"] for message in request.body["messages"] if isinstance(message["content"], list)]
    return _say(f"{sum(part['type'] == 'image_url' for parts in lists for part in parts)} pictures.")


_weather = _using(_WEATHER, texts=[], then=lambda results: f"It is {results[-1]}.")

SCENES: dict[str, Callable[[Request], Reply]] = {
    "say hello": lambda _: _say(HELLO),
    # Pieces that follow each other at once may be put together on their way.
    "say hello slowly": lambda _: _say(HELLO, gap_s=0.1),
    "think, then say hello": lambda _: _say(HELLO, reasoning=THOUGHT),
    "say too much": lambda _: _say(HELLO, finish="length"),
    "use your list": _using(_TODO, texts=LOOKING, then=lambda _: FOUND),
    "misuse your list": _using(_TWICE, texts=LOOKING, then=lambda _: FOUND),
    "use my weather": _weather,
    "use my weather twice": _using(_WEATHER, _ELSEWHERE, texts=[], then=" and ".join),
    "use both": _using(_TODO, _WEATHER, texts=[], then=lambda results: f"{len(results)} results: {results[-1]}."),
    "name a person": _person,
    "count": _count,
    "look, then break": _look_then_break,
    "use my weather, break once": _break_once(_weather),
    "count pictures": _count_pictures,
    "break off": lambda _: _say(HELLO, error_event={"message": REFUSAL}),
    "be refused": lambda _: Reply(status=400, error=REFUSAL),
    "break": lambda _: Reply(status=500, error=REFUSAL),
}


def answer(request: Request) -> Reply:
    """The answer to the last question of the request."""
    return SCENES[request.turns[_asked(request)].text.strip()](request)
