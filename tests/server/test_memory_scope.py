"""Whose memory a turn uses: that of the key, of the session key, or of the user that the request names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermes.core.ids import scope_name
from support.model_server import Call, Reply

from .clients import Json, read_error, read_json, user
from .conftest import Api, Start
from .test_keys import ALL, BEN, bearer

FORWARDED = "X-OpenWebUI-User-Id"
SESSION_KEY = "X-Hermes-Session-Key"
ADD = Call("memory", {"target": "memory", "action": "add", "content": "Likes tea."})


async def remember(api: Api, route: str, body: Json, headers: Json) -> Any:
    """A turn in which the model remembers something; the answer's headers."""
    api.model.script = [Reply(tool_calls=[ADD]), Reply(text="Noted.")]
    if route == "websocket":
        async with api.client.ws_connect(f"{api.url}/v1/responses", headers=headers) as socket:
            await socket.send_json({"type": "response.create", "input": "hi", **body})
            while (event := await socket.receive_json())["type"] not in ("response.completed", "error"):
                pass
        assert event["type"] == "response.completed", event
        return {}
    path, default_body = {
        "chat": ("/v1/chat/completions", user("hi")),
        "responses": ("/v1/responses", {"input": "hi"}),
        "session": ("/api/sessions/hall/chat", {"message": "hi"}),
    }[route]
    if route == "session":
        await read_json(await api.post("/api/sessions", {"id": "hall"}), 201)
    async with api.post(path, {**default_body, **body}, headers=headers) as response:
        await read_json(response)
        return response.headers


def remembered(home: Path) -> list[str]:
    """The scopes that hold a memory."""
    memories = home / "memories"
    return sorted(str(file.parent.relative_to(memories)) for file in memories.rglob("MEMORY.md"))


def scope(owner: str, key: str) -> str:
    return f"scopes/{scope_name(owner, key)}"


@pytest.mark.parametrize("route", ["chat", "responses", "websocket", "session"])
@pytest.mark.parametrize(
    ("body", "headers", "key"),
    [
        ({"user": "anna"}, {}, "user:anna"),
        ({}, {FORWARDED: "anna"}, "user:anna"),
        ({"user": "ben"}, {FORWARDED: "anna"}, "user:anna"),
        ({"user": "anna"}, {SESSION_KEY: "kitchen", FORWARDED: "ben"}, "kitchen"),
        ({}, {}, None),
    ],
)
async def test_memory_scope_user_without_session_key(
    start: Start, home_folder: Path, route: str, body: Json, headers: Json, key: str | None
) -> None:
    api = await start(memory_scope="user")
    headers_sent = await remember(api, route, body, headers)
    assert remembered(home_folder) == ["." if key is None else scope("default", key)]
    assert headers_sent.get(SESSION_KEY) == (headers.get(SESSION_KEY) if route != "websocket" else None)


async def test_memory_scope_defaults_to_key(api: Api, home_folder: Path) -> None:
    await remember(api, "chat", {"user": "anna"}, {FORWARDED: "anna"})
    assert remembered(home_folder) == ["."]


async def test_memory_scope_users_are_per_key(start: Start, home_folder: Path) -> None:
    api = await start(memory_scope="user", keys=[{"name": "ben", "key": BEN, "scopes": ALL}])
    await remember(api, "chat", {"user": "anna"}, bearer(BEN))
    assert remembered(home_folder) == [scope("ben", "user:anna")]
    api.model.script = [Reply(text="Hi.")]
    api.model.requests.clear()
    async with api.post("/v1/chat/completions", user("hi", user="anna")) as response:
        await read_json(response)
    assert "Likes tea." not in str(api.model.requests[0].body)


async def test_memory_scope_user_on_open_server(start: Start, home_folder: Path) -> None:
    api = await start(key="", memory_scope="user")
    await remember(api, "chat", {"user": "anna"}, {})
    assert remembered(home_folder) == [scope("default", "user:anna")]


async def test_idempotency_key_is_not_shared_between_users(start: Start) -> None:
    api = await start(Reply(text="Hi."), memory_scope="user")
    key = {"Idempotency-Key": "k1"}
    async with api.post("/v1/chat/completions", user("hi"), headers={**key, FORWARDED: "anna"}) as response:
        await read_json(response)
    async with api.post("/v1/chat/completions", user("hi"), headers={**key, FORWARDED: "ben"}) as response:
        await read_error(response, 409, "idempotency_key_conflict")


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"user": "x" * 129}, {}, "user"),
        ({"user": "a\nb"}, {}, "user"),
        ({}, {FORWARDED: "x" * 129}, FORWARDED),
    ],
)
async def test_invalid_memory_scope_user_is_rejected(start: Start, body: Json, headers: Json, param: str) -> None:
    api = await start(memory_scope="user")
    async with api.post("/v1/chat/completions", user("hi", **body), headers=headers) as response:
        assert (await read_error(response, 400, "invalid_value"))["param"] == param
