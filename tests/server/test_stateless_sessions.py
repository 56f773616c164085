"""Sessions of calls that name none: which they are, and what makes them stay."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hermes.services.housekeeping import sweep_if_due
from support.model_server import Reply

from .conftest import Api, Start

NAMED = {"X-Hermes-Session-Id": "kitchen"}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def request_body(path: str, text: str) -> dict[str, Any]:
    return {"input": text} if path == RESPONSES else {"messages": [{"role": "user", "content": text}]}


async def session_made(api: Api, path: str, **headers: str) -> str:
    async with api.post(path, request_body(path, "Hello."), headers=headers) as response:
        assert response.status == 200, await response.text()
        return response.headers["X-Hermes-Session-Id"]


def is_left_after_a_month(api: Api, session_id: str) -> bool:
    store = api.app.store.blocking
    store.engine.write(lambda tx: tx.execute("UPDATE sessions SET last_active = ?", (time.time() - 30 * 86_400,)))
    store.responses._engine.write(lambda tx: tx.execute("DELETE FROM responses"))
    assert sweep_if_due(store, api.app.settings, every_s=0.0) is not None
    return store.sessions.get_session(session_id) is not None


@pytest.fixture
async def api(start: Start) -> Api:
    return await start(*(Reply(text=text) for text in ("One.", "Two.", "Three.")))


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(("headers", "stays"), [({}, False), (NAMED, True)], ids=["unnamed", "named"])
async def test_unnamed_session_is_pruned_after_a_month(
    api: Api, path: str, headers: dict[str, str], stays: bool
) -> None:
    assert is_left_after_a_month(api, await session_made(api, path, **headers)) is stays


@pytest.mark.parametrize("path", [CHAT, RESPONSES, "session chat", "run", "title"])
async def test_session_is_kept_once_named(api: Api, path: str) -> None:
    session_id = await session_made(api, CHAT)
    if path == "title":
        request = api.patch(f"/api/sessions/{session_id}", {"title": "Mine"})
    elif path == "session chat":
        request = api.post(f"/api/sessions/{session_id}/chat", {"message": "And?"})
    elif path == "run":
        request = api.post("/v1/runs", {"input": "And?", "session_id": session_id})
    else:
        request = api.post(path, request_body(path, "And?"), headers={"X-Hermes-Session-Id": session_id})
    async with request as response:
        assert response.status < 300, await response.text()
        body = await response.json()
    if path == "run":
        await api.app.engine.wait(body["run_id"], 10)
    assert is_left_after_a_month(api, session_id)


async def test_binding_by_content_does_not_name_session(api: Api) -> None:
    session_id = await session_made(api, CHAT)
    messages = [("user", "Hello."), ("assistant", "One."), ("user", "And?")]
    body = {"messages": [{"role": role, "content": text} for role, text in messages]}
    async with api.post(CHAT, body) as response:
        assert response.headers["X-Hermes-Session-Id"] == session_id
    assert not is_left_after_a_month(api, session_id)


async def test_response_branch_is_pruned_as_well(api: Api) -> None:
    async with api.post(RESPONSES, {"input": "Hello."}) as response:
        first = await response.json()
    session_ids = set()
    for text in ("And?", "Or?"):
        async with api.post(RESPONSES, {"input": text, "previous_response_id": first["id"]}) as response:
            assert response.status == 200, await response.text()
            session_ids.add(response.headers["X-Hermes-Session-Id"])
    assert len(session_ids) == 2
    assert [is_left_after_a_month(api, session_id) for session_id in sorted(session_ids)] == [False, False]
