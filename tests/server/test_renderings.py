"""One turn in five renderings, which must agree: plain, streamed, replayed, over a WebSocket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.model_server import Call, Reply
from support.waiting import DEADLINE_S

from .clients import Frame, Json, chat_text, function, read_json, responses_tool, stream_of, user
from .conftest import Api
from .open_responses import event_faults, faults

LAMP = function("lamp", room={"type": "string"})
SCRIPTS = 15
# Which tools there are depends on who listens; here it is always the same one.
ALONE = {"User-Agent": "curl", "X-Hermes-Toolsets": "todo"}
WORDS = st.sampled_from(
    ["Hello", " there", "\n", "\n\n", " ", "é", "🙂", "`code`", "```\n", "<b>", "data: x", "…", "0", "a" * 50]
)
PIECES = st.lists(WORDS, max_size=6)
STEP = st.builds(
    lambda text, thought, calls: {"text": text, "reasoning": thought, "calls": calls},
    PIECES,
    st.lists(st.sampled_from(["hm", " so", "\n", "é"]), max_size=3),
    st.lists(st.sampled_from(["todo", "list", "wrong", "unknown"]), min_size=1, max_size=3),
)
LAST = st.tuples(PIECES.filter(lambda text: "".join(text).strip()), st.sampled_from(["stop", "lamp", "length"]))
CALLS: dict[str, tuple[str, Any]] = {
    "todo": ("todo", {"todos": [{"id": "1", "content": "té", "status": "pending"}]}),
    "list": ("todo", ["{", "}"]),
    "wrong": ("todo", {"todos": 5}),
    "unknown": ("no_such_tool", {}),
}


def script(steps: list[Json], last: tuple[list[str], str]) -> list[Reply]:
    """The replies of a turn: rounds of server tools, then an answer, a client's call, or an answer cut short."""
    replies = []
    for number, step in enumerate(steps):
        calls = [Call(*CALLS[name], id=f"call_{number}_{at}") for at, name in enumerate(step["calls"])]
        replies.append(Reply(text=step["text"], reasoning=step["reasoning"], tool_calls=calls, continues=False))
    text, way = last
    end = [Call("lamp", ['{"room": ', '"hall"}'], id="call_lamp")] if way == "lamp" else []
    finish = "length" if way == "length" else None
    return [*replies, Reply(text=text, reasoning="last thought", tool_calls=end, finish=finish, continues=False)]


def timeless(response: Json) -> Json:
    """A response without what differs from one to the next: ids and times."""
    stable = {name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at")}
    output = []
    for item in stable["output"]:
        fields = {name: value for name, value in item.items() if name != "id"}
        if isinstance(fields.get("output"), list):
            fields["output"] = "".join(part["text"] for part in fields["output"])
        output.append(fields)
    return {**stable, "output": output}


def events_of(frames: list[Frame]) -> list[Json]:
    assert frames[-1].data == "[DONE]"
    events = [frame.data for frame in frames[:-1]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def in_all_ways(api: Api, replies: list[Reply]) -> None:
    limit = {"max_tokens": 50} if replies[-1].finish else {}
    chat = {**user("hi", tools=[LAMP], include_reasoning=True), **limit}
    api.model.script = list(replies)
    async with api.post("/v1/chat/completions", chat, headers=ALONE) as response:
        plain = await read_json(response)
    api.model.script = list(replies)
    async with api.post("/v1/chat/completions", {**chat, "stream": True}, headers=ALONE) as response:
        streamed = await stream_of(response)
    check_chat(plain["choices"][0], streamed, replies)

    body = {"input": "hi", "tools": [responses_tool(LAMP)], "reasoning": {"summary": "auto"}, **limit}
    headers = {**ALONE, "X-Hermes-Tool-Items": "function"}
    api.model.script = list(replies)
    async with api.post("/v1/responses", body, headers=headers) as response:
        payload = await read_json(response)
    assert faults("response object", payload) == []
    api.model.script = list(replies)
    async with api.post("/v1/responses", {**body, "stream": True}, headers=headers) as response:
        frames = await stream_of(response)
    events = events_of(frames)
    assert [fault for event in events for fault in event_faults(event)] == []
    final = events[-1]["response"]
    assert timeless(final) == timeless(payload)
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == final["output"]
    async with api.get(f"/v1/responses/{final['id']}?stream=true") as response:
        assert await stream_of(response) == frames
    async with api.get(f"/v1/responses/{payload['id']}?stream=true") as response:
        again = events_of(await stream_of(response))
    assert timeless(again[-1]["response"]) == timeless(payload)
    assert again[-1]["response"]["id"] == payload["id"]

    api.model.script = list(replies)
    async with api.client.ws_connect(f"{api.url}/v1/responses", headers=headers) as socket:
        await socket.send_json({"type": "response.create", **body})
        received = [await socket.receive_json(timeout=DEADLINE_S)]
        while received[-1]["type"] not in ("response.completed", "response.incomplete", "response.failed"):
            received.append(await socket.receive_json(timeout=DEADLINE_S))
    assert timeless(received[-1]["response"]) == timeless(payload)
    assert folded(received) == folded(events)


def folded(events: list[Json]) -> list[str]:
    """The kinds of events, a run of deltas counted once: how text is divided depends on when it comes."""
    kinds = [event["type"] for event in events]
    return [kind for at, kind in enumerate(kinds) if not (kind.endswith(".delta") and kinds[at - 1] == kind)]


def check_chat(choice: Json, streamed: list[Frame], replies: list[Reply]) -> None:
    """What the stream said is what the plain answer holds, with what came before the tools in front of it."""
    chunks = [frame.data for frame in streamed[:-1] if frame.event is None]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == [
        choice["finish_reason"]
    ]
    # Empty lines before the first word of a message are nobody's.
    texts = [text for text in ("".join(reply.text) for reply in replies) if text.strip()]
    assert choice["message"]["content"].lstrip() == texts[-1].lstrip()
    assert chat_text(streamed).endswith(choice["message"]["content"])
    assert "".join(chat_text(streamed).split()) == "".join("".join(texts).split())
    thoughts = chat_text(streamed, "reasoning_content")
    assert thoughts.endswith(choice["message"]["reasoning_content"])
    calls: dict[int, Json] = {}
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
        for piece in delta.get("tool_calls", []):
            call = calls.setdefault(piece["index"], {"id": piece.get("id"), "arguments": ""})
            call["arguments"] += piece["function"].get("arguments", "")
    plain = [{"id": c["id"], "arguments": c["function"]["arguments"]} for c in choice["message"].get("tool_calls", [])]
    assert list(calls.values()) == plain
    progress = [frame.data for frame in streamed if frame.event == "hermes.tool.progress"]
    tool_call_ids = [entry["toolCallId"] for entry in progress if entry["status"] == "running"]
    ended = [entry["toolCallId"] for entry in progress if entry["status"] == "completed"]
    assert sorted(tool_call_ids) == sorted(ended)
    assert len(set(tool_call_ids)) == len(tool_call_ids)


async def test_renderings_of_turn_agree_property(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[list[Json], tuple[list[str], str]]] = []

    @settings(max_examples=SCRIPTS, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.lists(STEP, max_size=2), LAST)
    def draw(steps: list[Json], last: tuple[list[str], str]) -> None:
        drawn.append((steps, last))

    draw()
    for steps, last in drawn:
        try:
            await in_all_ways(api, script(steps, last))
        except AssertionError as error:
            raise AssertionError(f"{error}\nwith {json.dumps([steps, last], ensure_ascii=False)}") from error
