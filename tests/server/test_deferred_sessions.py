"""A plain chat that names no session: its session is made, and leased, when the turn is put on record."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from hermes.store.base import StoreError
from hermes.store.sqlite.connections import Connection
from support.gateway import SURELY_S
from support.model_server import Call, Reply, Request
from support.waiting import until

from .clients import Json, read_json, user
from .conftest import Api

CHAT = "/v1/chat/completions"


async def ask(api: Api, text: str = "hi", **headers: str) -> tuple[Json, str]:
    async with api.post(CHAT, user(text), headers=headers) as response:
        return await read_json(response), response.headers["X-Hermes-Session-Id"]


async def messages(api: Api, session_id: str) -> list[str]:
    async with api.get(f"/api/sessions/{session_id}/messages") as response:
        return [row["content"] for row in (await read_json(response))["data"]]


def lease_names(api: Api) -> list[str]:
    rows = api.app.store.blocking.engine.read(lambda tx: tx.rows("SELECT name FROM leases WHERE name <> ''"))
    return [row["name"] for row in rows]


async def test_plain_turn_is_one_transaction_without_lease(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.model.handler = lambda _: Reply(text="Hello.", continues=False)
    # However long the model takes here: a turn that takes longer is put on record before its end.
    monkeypatch.setattr("hermes.runs.writer.START_HELD_S_MAX", SURELY_S)
    await ask(api, "first")
    statements: list[tuple[Connection, str]] = []
    execute = Connection.execute

    def noted(db: Connection, sql: str, *params: Any) -> Any:
        statements.append((db, sql))
        return execute(db, sql, *params)

    monkeypatch.setattr(Connection, "execute", noted)
    await ask(api, "second")
    at = next(at for at, (_, sql) in enumerate(statements) if sql.startswith("INSERT INTO runs"))
    own = [sql for db, sql in statements if db is statements[at][0]]
    # Others, such as upkeep, have transactions, too.
    transactions = [part.split("\0") for part in "\0".join(own).split("\0COMMIT")]
    inserts = [[sql.split()[2] for sql in part if sql.startswith("INSERT")] for part in transactions]
    assert [tables for tables in inserts if {"messages", "runs"} & {*tables}] == [
        ["prompts", "sessions", "messages", "messages", "runs"]
    ]
    assert not [tables for tables in inserts if "leases" in tables]


async def test_same_opening_at_once_gives_two_sessions(api: Api) -> None:

    async def both(_: Request) -> Reply:
        await until(lambda: len(api.model.requests) == 2)
        return Reply(text="Hello.", continues=False)

    api.model.handler = both
    answers = await asyncio.gather(ask(api), ask(api))
    first, second = sorted(session_id for _, session_id in answers)
    assert second == f"{first}-2"
    for session_id in (first, second):
        assert await messages(api, session_id) == ["hi", "Hello."]


async def test_concurrent_deferred_sessions_get_separate_ids(api: Api) -> None:
    _, session_id = await ask_with(api, Reply(text="One.", continues=False))
    _, other = await ask_with(api, Reply(text="Two.", continues=False))
    assert other == f"{session_id}-2"
    assert [await messages(api, id_) for id_ in (session_id, other)] == [["hi", "One."], ["hi", "Two."]]
    async with api.get(f"/api/sessions/{other}") as response:
        session = (await read_json(response))["session"]
    assert (session["message_count"], session["api_call_count"]) == (2, 1)
    assert session["input_tokens"] > 0


async def ask_with(api: Api, reply: Reply) -> tuple[Json, str]:
    api.model.handler = lambda _: reply
    return await ask(api)


async def test_run_names_session_it_was_recorded_in(api: Api) -> None:
    await ask_with(api, Reply(text="One.", continues=False))
    async with api.post(CHAT, user("hi")) as response:
        run_id, session_id = response.headers["X-Hermes-Run-Id"], response.headers["X-Hermes-Session-Id"]
    async with api.get(f"/v1/runs/{run_id}") as response:
        assert (await read_json(response))["session_id"] == session_id
    started = (await api.app.store.runs.durable(run_id))[0]
    assert (started.type, started.data["session_id"]) == ("run.started", session_id)


async def test_session_is_leased_while_tools_run(api: Api) -> None:
    """The calls of a turn whose opening is another session's belong to its own session, which is held meanwhile."""
    await ask_with(api, Reply(text="One.", continues=False))
    leases: list[list[str]] = []

    def answer(request: Request) -> Reply:
        if request.body["messages"][-1]["role"] == "tool":
            leases.append(lease_names(api))
            return Reply(text="Done.", continues=False)
        return Reply(tool_calls=[Call("todo", {"todos": [{"id": "1", "content": "dig", "status": "pending"}]})])

    api.model.handler = answer
    _, session_id = await ask(api)
    assert session_id.endswith("-2")
    assert leases == [[f"session:{session_id}"]]
    assert lease_names(api) == []
    assert [row for row in await messages(api, session_id) if row][-1] == "Done."


async def test_stream_head_names_session_it_was_recorded_in(api: Api) -> None:
    _, session_id = await ask_with(api, Reply(text="One.", continues=False))
    async with api.post(CHAT, user("hi", stream=True)) as response:
        other = response.headers["X-Hermes-Session-Id"]
        assert "One." in await response.text()
    assert other == f"{session_id}-2"
    assert await messages(api, other) == ["hi", "One."]
    assert lease_names(api) == []


async def test_failed_plain_turn_is_recorded(api: Api) -> None:
    api.model.handler = lambda _: Reply(status=400, error={"message": "No."})
    async with api.post(CHAT, user("hi")) as response:
        assert response.status >= 400
        session_id = response.headers["X-Hermes-Session-Id"]
    assert (await messages(api, session_id))[0] == "hi"
    assert lease_names(api) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wait_s", [0.002, 0.006, 0.015])
async def test_clients_that_leave_early_do_not_share_a_session(api: Api, stream: bool, wait_s: float) -> None:
    """A client that goes is on record before the turn's own beginning; that too needs a session of its own."""
    api.model.handler = lambda _: Reply(text="Hello.", delay_s=0.05, continues=False)
    await ask(api)

    async def leave_early() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s), api.post(CHAT, user("hi", stream=stream)) as response:
                await response.read()

    await asyncio.gather(*(leave_early() for _ in range(8)))
    engine = api.app.store.blocking.engine

    def unfinished() -> list[object]:
        return [*engine.read(lambda tx: tx.rows("SELECT 1 FROM runs WHERE ended_at IS NULL")), *lease_names(api)]

    await until(lambda: api.app.engine.by_id or unfinished(), lambda left: not left)
    rows = engine.read(
        lambda tx: tx.rows("SELECT session_id, count(DISTINCT run_id) AS runs FROM messages GROUP BY session_id")
    )
    assert {row["runs"] for row in rows} == {1}


async def test_turn_that_cannot_begin_is_recorded_under_its_own_id(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    _, session_id = await ask_with(api, Reply(text="One.", continues=False))
    forgotten: list[str] = []
    monkeypatch.setattr(api.app.engine.lifecycle, "on_new_session", forgotten.extend)

    async def fail(*_: Any) -> Any:
        raise OSError("the disk")

    monkeypatch.setattr("hermes.agent.turn_start.set_system_prompt", fail)
    async with api.post(CHAT, user("hi")) as response:
        assert (response.status, response.headers["X-Hermes-Session-Id"]) == (500, f"{session_id}-2")
    assert forgotten == [f"{session_id}-2"]
    assert await messages(api, session_id) == ["hi", "One."]


@pytest.mark.parametrize("stream", [False, True])
async def test_turn_without_record_names_no_other_session(
    api: Api, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    _, session_id = await ask_with(api, Reply(text="One.", continues=False))
    append = api.app.store.runs.append
    failures = iter([StoreError("The disk is full.")])

    async def fail_once(*args: Any, **options: Any) -> Any:
        if (error := next(failures, None)) is not None:
            raise error
        return await append(*args, **options)

    monkeypatch.setattr(api.app.store.runs, "append", fail_once, raising=False)
    async with api.post(CHAT, user("hi", stream=stream)) as response:
        assert response.status == 200
        assert "One." in await response.text()
    assert await messages(api, session_id) == ["hi", "One."]
    assert lease_names(api) == []
