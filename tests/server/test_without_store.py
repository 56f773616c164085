"""A store that cannot be opened: what ends with its client goes on unrecorded, all else is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.model_server import Reply

from .clients import Json, read_error, read_json, sent_messages, stream_of, user
from .conftest import Api, Start

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture
async def broken(start: Start, home_folder: Path) -> Api:
    """A server whose database is a folder."""
    (home_folder / "state.db").mkdir(parents=True)
    return await start(handler=lambda _: Reply(text="Hello.", continues=False))


async def test_chat_without_store_is_unrecorded(broken: Api) -> None:
    async with broken.post(CHAT, user("hi")) as response:
        answer = await read_json(response)
    assert answer["choices"][0]["message"]["content"] == "Hello."
    async with broken.post(CHAT, user("hi", stream=True)) as response:
        assert "Hello." in str(await stream_of(response))
    async with broken.post(CHAT, user("hi"), headers={"X-Hermes-Session-Id": "hall"}) as response:
        await read_json(response)
        assert response.headers["X-Hermes-Session-Id"] == "hall"
    assert sent_messages(broken.model.requests[-1]) == [("user", "hi")]


async def test_unstored_responses_without_store(broken: Api) -> None:
    for body in ({"input": "hi", "store": False}, {"input": "hi", "store": False, "stream": True}):
        async with broken.post(RESPONSES, body) as response:
            assert response.status == 200
            assert "Hello." in await response.text()


REFUSED: list[tuple[str, str, Json | None]] = [
    ("POST", "/v1/runs", {"input": "hi"}),
    ("GET", "/v1/runs", None),
    ("GET", "/api/sessions", None),
    ("POST", "/api/sessions", {}),
    ("GET", "/api/sessions/s1", None),
    ("POST", "/api/sessions/s1/chat", {"message": "hi"}),
    ("POST", RESPONSES, {"input": "hi", "background": True}),
]


@pytest.mark.parametrize(("method", "path", "body"), REFUSED)
async def test_other_routes_without_store_are_503(broken: Api, method: str, path: str, body: Json | None) -> None:
    async with broken.client.request(method, broken.url + path, json=body) as response:
        await read_error(response, 503, "session_db_unavailable")


async def test_readiness_without_store_is_503(broken: Api) -> None:
    async with broken.get("/health") as response:
        await read_json(response)
    async with broken.get("/health/ready") as response:
        await read_error(response, 503, "not_ready")
