"""A request with very many messages or calls does not hold up the others: its work is done in threads, or in steps."""

from __future__ import annotations

import io
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from hermes.core.limits import MESSAGES_MAX
from support.loop_steps import loop_steps
from support.model_server import Call, Reply

from .clients import Json
from .conftest import Api, Start

# About as many as are made in five milliseconds; and for a turn with very many tool calls in fifteen.
STEPS_MAX = 12_000
CALL_STEPS_MAX = 36_000
STORED_MESSAGES = 100_000
FINE = Reply(text="Fine.", continues=False)


def messages_of(count: int = MESSAGES_MAX) -> list[Json]:
    """A conversation of so many messages, the last of them the user's."""
    roles = ("user", "assistant")
    return [{"role": roles[(count - 1 - at) % 2], "content": f"word {at} " * 8} for at in range(count)]


async def send(api: Api, path: str, body: Json) -> tuple[int, Json]:
    data = io.BytesIO(json.dumps(body).encode())
    headers = {"Content-Type": "application/json"}
    async with api.client.post(api.url + path, data=data, headers=headers) as response:
        return response.status, await response.json()


ROUTES: dict[str, tuple[str, Json]] = {
    "chat": ("/v1/chat/completions", {"messages": messages_of()}),
    "chat that is kept": ("/v1/chat/completions", {"messages": messages_of(), "store": True}),
    "response": ("/v1/responses", {"input": messages_of()}),
}


@pytest.mark.parametrize(
    "window",
    [pytest.param(8_000_000, id="all of it", marks=pytest.mark.long), pytest.param(32_000, id="compacted")],
)
@pytest.mark.parametrize("route", ROUTES)
async def test_request_with_many_messages_does_not_block_loop(
    start: Start, home_folder: Path, route: str, window: int
) -> None:
    api = await start(FINE, FINE, FINE)
    config = yaml.safe_load((home_folder / "config.yaml").read_text())
    config["model"]["context_length"] = window
    (home_folder / "config.yaml").write_text(yaml.safe_dump(config))
    path, body = ROUTES[route]
    assert (await send(api, path, {"messages": messages_of(1)} if "messages" in body else {"input": "hi"}))[0] == 200
    with loop_steps() as steps:
        assert (await send(api, path, body))[0] == 200
    assert steps.most < STEPS_MAX


def store_messages(database: Path, session_id: str, count: int) -> None:
    rows = [
        (session_id, role, time.time(), f"word {at} ") for at in range(count // 2) for role in ("user", "assistant")
    ]
    with closing(sqlite3.connect(database, timeout=30)) as db, db:
        db.executemany("INSERT INTO messages (session_id, role, timestamp, content) VALUES (?, ?, ?, ?)", rows)
        db.execute("UPDATE sessions SET message_count = ? WHERE id = ?", (count, session_id))


@pytest.mark.parametrize(
    "window",
    [pytest.param(8_000_000, id="all of it", marks=pytest.mark.long), pytest.param(32_000, id="compacted")],
)
async def test_session_with_many_messages_does_not_block_loop(start: Start, home_folder: Path, window: int) -> None:
    api = await start(FINE, FINE, FINE)
    config = yaml.safe_load((home_folder / "config.yaml").read_text())
    config["model"]["context_length"] = window
    (home_folder / "config.yaml").write_text(yaml.safe_dump(config))
    for session_id in ("small", "large"):
        assert (await send(api, "/api/sessions", {"id": session_id}))[0] == 201
    store_messages(home_folder / "state.db", "large", STORED_MESSAGES)
    assert (await send(api, "/api/sessions/small/chat", {"message": "hi"}))[0] == 200
    with loop_steps() as steps:
        assert (await send(api, "/api/sessions/large/chat", {"message": "Go on."}))[0] == 200
    assert steps.most < STEPS_MAX
    assert str(api.model.requests[-1].body["messages"][-1]["content"]) == "Go on."


@pytest.mark.parametrize("are_alike", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_message_with_thousand_calls_does_not_block_loop(start: Start, are_alike: bool) -> None:
    ids = [0 if are_alike else at for at in range(1_000)]
    calls = [Call("todo", {"todos": [{"id": str(at), "content": "x", "status": "pending"}]}) for at in ids]
    api = await start(FINE, Reply(tool_calls=calls), FINE)
    assert (await send(api, "/v1/chat/completions", {"messages": messages_of(1)}))[0] == 200
    with loop_steps() as steps:
        assert (await send(api, "/v1/chat/completions", {"messages": messages_of(1)}))[0] == 200
    assert steps.most < CALL_STEPS_MAX


async def test_work_for_many_calls_is_linear(start: Start) -> None:
    async def all_steps(count: int) -> int:
        calls = [Call("todo", {"merge": True, "todos": []})] * count
        api = await start(Reply(tool_calls=calls), FINE)
        with loop_steps() as steps:
            assert (await send(api, "/v1/chat/completions", {"messages": messages_of(1)}))[0] == 200
        return steps.all

    await all_steps(1)
    once, twice = await all_steps(200), await all_steps(400)
    assert twice <= 2.3 * once
