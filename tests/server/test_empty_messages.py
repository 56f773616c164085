"""A turn needs something to answer: what is asked now must not be blank, on any route."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.model_server import Reply

from .clients import Json, read_error, read_json
from .conftest import Api

BLANK: list[Any] = ["", " \n\t", [], [{"type": "text", "text": ""}], [{"type": "text", "text": " "}, "\n"]]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


async def session(api: Api) -> str:
    async with api.post("/api/sessions", {}) as response:
        body: Json = await read_json(response, 201)
        return str(body["session"]["id"])


@pytest.mark.parametrize("content", BLANK)
async def test_blank_message_is_rejected_on_every_route(api: Api, content: Any) -> None:
    chat = f"/api/sessions/{await session(api)}/chat"
    before = [user("hi"), {"role": "assistant", "content": "Hello."}]
    bodies: list[tuple[str, Json, str]] = [
        ("/v1/chat/completions", {"messages": [user(content)]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": [*before, user(content)], "stream": True}, "messages[2].content"),
        ("/v1/chat/completions", {"messages": [user("hi"), user(content)]}, "messages[1].content"),
        ("/v1/responses", {"input": [user(content)]}, "input[0].content"),
        ("/v1/responses", {"input": [*before, user(content)], "stream": True}, "input[2].content"),
        ("/v1/responses", {"input": [user(content)], "background": True}, "input[0].content"),
        ("/v1/runs", {"input": [user(content)]}, "input[0].content"),
        (chat, {"message": content}, "message"),
        (f"{chat}/stream", {"input": content}, "input"),
    ]
    if isinstance(content, str):
        bodies += [(path, {"input": content}, "input") for path in ("/v1/responses", "/v1/runs")]
        bodies += [(path, {"input": [content]}, "input[0]") for path in ("/v1/responses", "/v1/runs")]
    for path, body, param in bodies:
        async with api.post(path, body) as response:
            await read_error(response, 400, "empty_message", param)
    assert api.model.requests == []


async def test_blank_message_is_rejected_over_websocket(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    async with api.client.ws_connect(f"{api.url}/v1/responses") as socket:
        for input_value, param in ((" ", "input"), ([user("")], "input[0].content")):
            await socket.send_json({"type": "response.create", "input": input_value})
            error = await socket.receive_json()
            assert (error["status"], error["error"]["code"]) == (400, "empty_message")
            assert error["error"]["param"] == param
        await socket.send_json({"type": "response.create", "input": "hi"})
        assert (await socket.receive_json())["type"] == "response.created"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [user(""), user(" "), user("hi")]}),
        ("/v1/chat/completions", {"messages": [user([]), {"role": "assistant", "content": "Hm?"}, user("hi")]}),
        ("/v1/responses", {"input": [user(""), user(" "), user("hi")]}),
        ("/v1/responses", {"input": [user([]), {"role": "assistant", "content": "Hm?"}, user("hi")]}),
    ],
)
async def test_earlier_blank_messages_are_kept(api: Api, path: str, body: Json) -> None:
    api.model.script = [Reply(text="Hello.")]
    async with api.post(path, body) as response:
        await read_json(response)
    _, *messages = api.model.requests[-1].body["messages"]
    sent = [(m["role"], m["content"] or "") for m in body.get("messages") or body["input"]]
    assert [(m["role"], m["content"]) for m in messages] == sent


@pytest.mark.parametrize("content", [[PICTURE], [{"type": "text", "text": ""}, PICTURE]])
async def test_image_only_message_is_accepted(api: Api, content: list[Json]) -> None:
    api.model.script = [Reply(text="A cat.")]
    async with api.post("/v1/chat/completions", {"messages": [user(content)]}) as response:
        await read_json(response)
    assert PICTURE["image_url"]["url"] in json.dumps(api.model.requests[-1].body["messages"])  # type: ignore[index]


async def test_session_chat_without_message_is_400(api: Api) -> None:
    async with api.post(f"/api/sessions/{await session(api)}/chat", {}) as response:
        await read_error(response, 400, "missing_message", "message")
