"""Turns with tool calls over HTTP, with the records of model, client and run compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes.core.text import text_of
from support.model_server import Call, Reply, Request

from .clients import Frame, Stream, chat_text, check_stream_headers, frames, read_json, user

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .conftest import Api

Json = dict[str, Any]
# The calls of one message, or what makes them of the answers that the model has got so far.
Step = Sequence[Call] | Callable[[list[Json]], Sequence[Call]]
# What answers a request that is none of the conversation's: a question about an image, a subagent's turn.
Aside = Callable[[Request], Reply | None]

PLAIN = {"User-Agent": "curl/8.0"}
SURFACES = ("plain", "stream", "session")
SESSION = "hall"
DONE = "All done."
_ENDS = ("run.completed", "run.failed", "run.cancelled")
_FRAME = "data from outside"


def contents(request: Request) -> dict[str, str]:
    """The results of calls in a request to the model, by the call's id."""
    return {m["tool_call_id"]: m["content"] for m in request.body["messages"] if m["role"] == "tool"}


def parsed(content: str) -> Json:
    """A result as JSON, without the frame around what comes from outside, and the user's words behind it."""
    inside = content.partition("\n")[2] if _FRAME in content.partition("\n")[0] else content
    payload: Json = json.JSONDecoder().raw_decode(inside)[0]
    return payload


@dataclass
class Turn:
    """One turn as recorded by the model, the client and the run's events."""

    run_id: str = ""
    calls: dict[str, Call] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    text: str = ""

    @property
    def answers(self) -> list[Json]:
        """What the tools answered the model, in the order of the calls."""
        return [parsed(self.contents[call_id]) for call_id in self.calls]

    def stream_frames(self, name: str) -> list[Json]:
        """The frames of one name on the client's stream."""
        return [frame.data for frame in self.frames if frame.event == name]

    def run_events(self, name: str) -> list[Json]:
        """The run's own events of one name."""
        return [event for event in self.events if event["event"] == name]


class Conversation:
    """A conversation on one surface. Calls without an id are numbered: call_1, call_2, …"""

    def __init__(self, api: Api, surface: str, home: Path) -> None:
        self.api, self.surface, self.home = api, surface, home
        self.workspace = home / "workspace"
        self.headers = dict(PLAIN)
        self._made = 0

    async def begin(self) -> Conversation:
        await read_json(await self.api.post("/api/sessions", {"id": SESSION}), 201)
        return self

    async def turn(self, *steps: Step, aside: Aside | None = None, message: str = "Go.") -> Turn:
        """Run one turn, and compare all of its records."""
        async with self.open(*steps, aside=aside, message=message) as (turn, stream):
            if stream is not None:
                turn.frames += await stream.rest()
        await self.check_records(turn)
        return turn

    @asynccontextmanager
    async def open(
        self, *steps: Step, aside: Aside | None = None, message: str = "Go."
    ) -> AsyncIterator[tuple[Turn, Stream | None]]:
        """Start a turn and yield it with its stream; without a stream it has ended already."""
        turn = Turn()
        self.api.model.handler = self._handler(turn, list(steps), aside)
        path, body = {
            "plain": ("/v1/chat/completions", user(message)),
            "stream": ("/v1/chat/completions", user(message, stream=True)),
            "chat": (f"/api/sessions/{SESSION}/chat", {"message": message}),
            "session": (f"/api/sessions/{SESSION}/chat/stream", {"message": message}),
        }[self.surface]
        named = {} if "session" in path else {"X-Hermes-Session-Id": SESSION}
        async with self.api.post(path, body, headers={**self.headers, **named}) as response:
            turn.run_id = response.headers["X-Hermes-Run-Id"]
            if self.surface in ("plain", "chat"):
                body = await read_json(response)
                turn.text = (body if self.surface == "chat" else body["choices"][0])["message"]["content"]
                yield turn, None
            else:
                assert response.status == 200, await response.text()
                check_stream_headers(response.headers)
                yield turn, Stream(response)

    def _handler(self, turn: Turn, steps: list[Step], aside: Aside | None) -> Callable[[Request], Reply]:
        def handle(request: Request) -> Reply:
            if aside is not None and (reply := aside(request)) is not None:
                return reply
            texts = contents(request)
            turn.contents = {call_id: texts[call_id] for call_id in turn.calls}
            if not steps:
                return Reply(text=DONE, continues=False)
            step = steps.pop(0)
            calls = list(step(turn.answers) if callable(step) else step)
            for at, call in enumerate(calls):
                self._made += 1
                calls[at] = replace(call, id=call.id or f"call_{self._made}")
            turn.calls |= {str(call.id): call for call in calls}
            return Reply(tool_calls=calls)

        return handle

    async def check_records(self, turn: Turn, end: str = "run.completed") -> None:
        """Read the run's events, and check that all surfaces agree about every call."""
        turn.events = await events(self.api, turn.run_id)
        assert turn.events[-1]["event"] == end, turn.events[-1]
        if end == "run.completed":
            check_run(turn)
            {"plain": check_plain, "stream": check_chat, "session": check_session}[self.surface](turn)
            await self._check_rows(turn)

    async def _check_rows(self, turn: Turn) -> None:
        async with self.api.get(f"/api/sessions/{SESSION}/messages") as response:
            rows = [row for row in (await read_json(response))["data"] if row["run_id"] == turn.run_id]
        stored = {row["tool_call_id"]: text_of(row["content"]) for row in rows if row["role"] == "tool"}
        assert stored == turn.contents
        assert rows[-1]["content"] == DONE


async def events(api: Api, run_id: str) -> list[Json]:
    """The run's events, whose sequence numbers are checked."""
    async with api.get(f"/v1/runs/{run_id}/events") as response:
        assert response.status == 200, await response.text()
        stream_frames = frames(await response.text())
    numbers = [frame.data["seq"] for frame in stream_frames]
    assert numbers == sorted(set(numbers)) and [str(number) for number in numbers] == [
        frame.id for frame in stream_frames
    ]
    assert all(frame.data["run_id"] == run_id and frame.data["timestamp"] > 0 for frame in stream_frames)
    ends = [frame.data["event"] for frame in stream_frames if frame.data["event"] in _ENDS]
    assert len(ends) == 1 and stream_frames[-1].data["event"] == ends[0], ends
    return [frame.data for frame in stream_frames]


def _in_conversation(turn: Turn, items: list[Json], key: str) -> dict[str, Json]:
    """Those that are about calls of the conversation, each once; calls within calls have ids of their own."""
    matching = [item for item in items if item[key] in turn.calls]
    assert len({match[key] for match in matching}) == len(matching)
    assert all(item[key].partition(".")[0] in turn.calls for item in items)
    return {match[key]: match for match in matching}


def _failed(content: str) -> bool:
    answer = parsed(content)
    return "code" in answer or answer.get("status") in ("blocked", "interrupted")


def check_run(turn: Turn) -> None:
    """Check the events of `/v1/runs/{run_id}/events` about each call."""
    calls = _in_conversation(turn, turn.run_events("tool.started"), "tool_call_id")
    ended = _in_conversation(turn, turn.run_events("tool.completed"), "tool_call_id")
    assert set(ended) == set(turn.calls)
    for call_id, call in turn.calls.items():
        end, content = ended[call_id], turn.contents[call_id]
        assert (end["tool"], end["error"]) == (call.name, _failed(content))
        assert (end["result"], end["result_chars"]) == (content[:20_000], len(content))
        assert (end["status"] == "ok") is not end["error"]
        assert end["duration"] >= 0
        if call_id in calls:
            start = calls[call_id]
            assert (start["tool"], start["arguments"]) == (call.name, call.arguments)
            assert (start["preview"] or end["error"]) and start["iteration"] >= 1
            assert start["seq"] < end["seq"]
        else:
            assert end["error"], "only what is refused ends without having begun"
    assert turn.events[-1]["output"] == DONE


def check_plain(turn: Turn) -> None:
    """Check the body of a plain request."""
    assert turn.text == DONE


def check_chat(turn: Turn) -> None:
    """Check what a chat completion's stream has of each call."""
    assert chat_text(turn.frames).endswith(DONE) and turn.frames[-1].data == "[DONE]"
    progress = turn.stream_frames("hermes.tool.progress")
    calls = _in_conversation(turn, [entry for entry in progress if entry["status"] == "running"], "toolCallId")
    ended = _in_conversation(turn, [entry for entry in progress if entry["status"] == "completed"], "toolCallId")
    started = {event["tool_call_id"]: event for event in turn.run_events("tool.started")}
    assert set(calls) == set(ended) == set(started) & set(turn.calls)
    for call_id, start in calls.items():
        end = ended[call_id]
        assert start["tool"] == end["tool"] == turn.calls[call_id].name
        assert start["label"] == end["label"] == (started[call_id]["preview"] or start["tool"])
        assert start["emoji"] and end["duration"] >= 0
        assert end["error"] is _failed(turn.contents[call_id])


def check_session(turn: Turn) -> None:
    """Check what a session's stream has of each call."""
    data = [frame.data for frame in turn.frames]
    assert [item["seq"] for item in data] == list(range(1, len(data) + 1))
    assert {(item["session_id"], item["run_id"]) for item in data} == {(SESSION, turn.run_id)}
    assert [frame.event for frame in turn.frames[:2]] == ["run.started", "message.started"]
    assert [frame.event for frame in turn.frames[-3:]] == ["assistant.completed", "run.completed", "done"]
    calls = _in_conversation(turn, turn.stream_frames("tool.started"), "tool_call_id")
    ended = _in_conversation(turn, turn.stream_frames("tool.completed"), "tool_call_id")
    assert set(ended) == set(turn.calls)
    for call_id, end in ended.items():
        call, content = turn.calls[call_id], turn.contents[call_id]
        assert (end["tool_name"], end["error"], end["result"]) == (call.name, _failed(content), content[:20_000])
        assert end["duration"] >= 0
        if call_id in calls:
            for event in (calls[call_id], end):
                assert (event["tool_name"], event["args"]) == (call.name, call.arguments)
                assert event["preview"] or end["error"]
    messages = turn.stream_frames("run.completed")[0]["messages"]
    assert {m["tool_call_id"]: m["content"] for m in messages if m["role"] == "tool"} == turn.contents
