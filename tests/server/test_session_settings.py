"""What a session keeps for its turns: a folder, toolsets, a number of steps; that it is pinned; and its compaction."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hermes.store.sessions import SessionDB
from support.model_server import Reply
from support.waiting import until

from .clients import HeldModel, Json, read_error, read_json, stream_of, system_of, tool_names, user
from .conftest import Api, Start
from .test_keys import bearer

SESSIONS = "/api/sessions"
WORDS = "lorem ipsum " * 200


def db_of(api: Api) -> SessionDB:
    return api.app.store.blocking.sessions


async def create_session(api: Api, **fields: Any) -> Json:
    async with api.post(SESSIONS, fields) as response:
        session: Json = (await read_json(response, 201))["session"]
        return session


async def changed(api: Api, session_id: str, **fields: Any) -> Json:
    async with api.patch(f"{SESSIONS}/{session_id}", fields) as response:
        session: Json = (await read_json(response))["session"]
        return session


async def get_json(api: Api, path: str) -> Json:
    async with api.get(path) as response:
        return await read_json(response)


# ---- settings of turns


async def _chat(api: Api, session_id: str, **fields: Any) -> str:
    headers = {"X-Hermes-Session-Id": session_id}
    async with api.post("/v1/chat/completions", user("hi", **fields), headers=headers) as response:
        await read_json(response)
        return response.headers["X-Hermes-Run-Id"]


async def _response(api: Api, session_id: str) -> str:
    async with api.post("/v1/responses", {"input": "hi"}, headers={"X-Hermes-Session-Id": session_id}) as response:
        await read_json(response)
        return response.headers["X-Hermes-Run-Id"]


async def _run(api: Api, session_id: str, **fields: Any) -> str:
    async with api.post("/v1/runs", {"input": "hi", "session_id": session_id, **fields}) as response:
        run_id: str = (await read_json(response, 202))["run_id"]

    async def record() -> Any:
        return await api.app.engine.get(run_id)

    await until(record, lambda value: value is not None and value.state.ended)
    return run_id


async def _session_chat(api: Api, session_id: str) -> str:
    async with api.post(f"{SESSIONS}/{session_id}/chat", {"message": "hi"}) as response:
        run_id: str = (await read_json(response))["run_id"]
        return run_id


async def _session_stream(api: Api, session_id: str) -> str:
    async with api.post(f"{SESSIONS}/{session_id}/chat/stream", {"message": "hi"}) as response:
        run_id: str = (await stream_of(response))[0].data["run_id"]
        return run_id


WAYS: dict[str, Callable[[Api, str], Awaitable[str]]] = {
    "chat": _chat,
    "response": _response,
    "run": _run,
    "session chat": _session_chat,
    "session stream": _session_stream,
}


async def turn_settings(api: Api, run_id: str) -> tuple[set[str], int, str]:
    """The effective settings of a turn: tools, step limit, and the working folder in the system prompt."""
    started = next(event.data for event in await api.app.engine.durable(run_id) if event.type == "run.started")
    [folder] = [line for line in system_of(api.model.requests[-1]).splitlines() if "Working folder" in line]
    return set(tool_names(api.model.requests[-1])), started["max_iterations"], folder


async def serving(start: Start, folder: Path, **more: Any) -> Api:
    return await start(*[Reply(text="Done.")] * 9, settings={"terminal": {"workspaces": [str(folder)]}}, **more)


async def test_turns_use_the_effort_of_their_session(start: Start) -> None:
    api = await start(*[Reply(text="Done.")] * 9, model_routes={"thinker": {"model": "gpt-5"}})
    assert (await create_session(api, id="s", model="thinker", reasoning_effort="low"))["reasoning_effort"] == "low"
    await _chat(api, "s")
    assert api.model.requests[-1].body["reasoning_effort"] == "low"
    await _run(api, "s", reasoning_effort="high")  # what the request names wins
    assert api.model.requests[-1].body["reasoning_effort"] == "high"
    assert (await changed(api, "s", reasoning_effort=None))["reasoning_effort"] is None
    await _run(api, "s")
    assert "reasoning_effort" not in api.model.requests[-1].body
    async with api.patch(f"{SESSIONS}/s", {"reasoning_effort": "loud"}) as response:
        await read_error(response, 400, "invalid_value", "reasoning_effort")
    db_of(api).update_session("s", reasoning_effort="loud")  # as an import may have brought it
    await _run(api, "s")
    assert "reasoning_effort" not in api.model.requests[-1].body


@pytest.mark.parametrize("way", WAYS)
async def test_turns_on_every_route_use_session_settings(start: Start, tmp_path: Path, way: str) -> None:
    api = await serving(start, tmp_path)
    folder = tmp_path / "garden"
    folder.mkdir()
    settings = {"workdir": str(folder), "toolsets": ["todo"], "max_iterations": 7}
    session = await create_session(api, id="s", **settings)
    assert {name: session[name] for name in settings} == settings
    tools, steps, told_folder = await turn_settings(api, await WAYS[way](api, "s"))
    assert (tools, steps, str(folder) in told_folder) == ({"todo"}, 7, True)
    session = await changed(api, "s", workdir=None, toolsets=None, max_iterations=None)
    assert {name: session[name] for name in settings} == dict.fromkeys(settings)
    tools, steps, told_folder = await turn_settings(api, await WAYS[way](api, "s"))
    assert (len(tools) > 1, steps, str(folder) in told_folder) == (True, 90, False)


async def test_run_settings_override_session_settings(start: Start, tmp_path: Path) -> None:
    api = await serving(start, tmp_path)
    for name in ("garden", "kitchen"):
        (tmp_path / name).mkdir()
    await create_session(api, id="s", workdir=str(tmp_path / "garden"), toolsets=["todo"], max_iterations=7)
    own = {"workdir": str(tmp_path / "kitchen"), "toolsets": ["memory"], "max_iterations": 3}
    tools, steps, folder = await turn_settings(api, await _run(api, "s", **own))
    assert (tools, steps, "kitchen" in folder) == ({"memory"}, 3, True)
    tools, steps, folder = await turn_settings(api, await _run(api, "s"))
    assert (tools, steps, "garden" in folder) == ({"todo"}, 7, True)


async def test_toolsets_header_overrides_session(start: Start, tmp_path: Path) -> None:
    api = await serving(start, tmp_path, toolsets=["todo", "memory"])
    await create_session(api, id="s", toolsets=["todo", "terminal"])
    await _session_chat(api, "s")
    assert set(tool_names(api.model.requests[-1])) == {"todo"}  # the server offers no commands
    headers = {"X-Hermes-Toolsets": "memory"}
    async with api.post(f"{SESSIONS}/s/chat", {"message": "hi"}, headers=headers) as response:
        await read_json(response)
    assert set(tool_names(api.model.requests[-1])) == {"memory"}


async def test_session_toolsets_respect_key_ceiling(start: Start, tmp_path: Path) -> None:
    secret = "sk-limited-0123456789abcdef01234567"
    scopes = ["chat", "sessions:read", "sessions:write"]
    keys = [{"name": "limited", "key": secret, "scopes": scopes, "toolsets": ["todo"]}]
    api = await serving(start, tmp_path, keys=keys)
    more = {"headers": bearer(secret)}
    async with api.post(SESSIONS, {"id": "s", "toolsets": ["todo", "terminal", "file"]}, **more) as response:
        await read_json(response, 201)
    async with api.post(f"{SESSIONS}/s/chat", {"message": "hi"}, **more) as response:
        await read_json(response)
    assert set(tool_names(api.model.requests[-1])) == {"todo"}


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("workdir", "/etc", "invalid_value"),
        ("workdir", "garden\x00", "invalid_value"),
        ("workdir", 5, "invalid_type"),
        ("toolsets", ["none such"], "invalid_value"),
        ("toolsets", "todo", "invalid_type"),
        ("max_iterations", 0, "invalid_value"),
        ("max_iterations", 91, "invalid_value"),
        ("max_iterations", True, "invalid_type"),
        ("pinned", "perhaps", "invalid_type"),
    ],
)
async def test_invalid_session_settings_are_rejected(
    start: Start, tmp_path: Path, field: str, value: Any, code: str
) -> None:
    api = await serving(start, tmp_path)
    await create_session(api, id="s")
    async with api.post(SESSIONS, {"id": "t", field: value}) as response:
        await read_error(response, 400, code, field)
    async with api.patch(f"{SESSIONS}/s", {field: value}) as response:
        await read_error(response, 400, code, field)
    if field != "pinned":
        async with api.post("/v1/runs", {"input": "hi", field: value}) as response:
            await read_error(response, 400, code, field)
    assert [session["id"] for session in (await get_json(api, SESSIONS))["data"]] == ["s"]


async def test_fork_keeps_session_settings(start: Start, tmp_path: Path) -> None:
    api = await serving(start, tmp_path)
    await create_session(api, id="s", pinned=True, workdir=str(tmp_path), toolsets=[], max_iterations=2)
    async with api.post(f"{SESSIONS}/s/fork", {"id": "f"}) as response:
        fork = (await read_json(response, 201))["session"]
    names = ("pinned", "workdir", "toolsets", "max_iterations")
    assert [fork[name] for name in names] == [False, str(tmp_path), [], 2]


# ---- pinned


async def test_pinned_sessions_filter(api: Api) -> None:
    assert (await create_session(api, id="a"))["pinned"] is False
    assert (await create_session(api, id="b", pinned=True))["pinned"] is True
    await create_session(api, id="c")
    assert (await changed(api, "a", pinned=True))["pinned"] is True

    async def list_sessions(query: str) -> tuple[list[str], int]:
        body = await get_json(api, SESSIONS + query)
        return [session["id"] for session in body["data"]], body["total"]

    assert await list_sessions("") == (["c", "b", "a"], 3)
    assert await list_sessions("?pinned=true") == (["b", "a"], 2)
    assert await list_sessions("?pinned=false") == (["c"], 1)
    await changed(api, "b", pinned=False)
    assert await list_sessions("?pinned=true&limit=1") == (["a"], 1)
    async with api.get(f"{SESSIONS}?pinned=perhaps") as response:
        await read_error(response, 400, "invalid_type", "pinned")


async def test_pinned_sessions_are_not_pruned(api: Api) -> None:
    for session_id in ("kept", "gone"):
        await create_session(api, id=session_id, pinned=session_id == "kept")
        db_of(api).end_session(session_id, "done")
    assert db_of(api).prune_sessions(older_than_days=-1) == ["gone"]


# ---- compaction


def add_messages(api: Api, turns: int) -> list[int]:
    """The ids of long messages in the session `s`."""
    ids = []
    for number in range(turns):
        ids.append(db_of(api).append_message("s", "user", f"question {number} {WORDS}"))
        ids.append(db_of(api).append_message("s", "assistant", f"answer {number} {WORDS}"))
    return ids


async def test_session_compaction_on_request(start: Start) -> None:
    api = await start(Reply(text="They spoke of foxes."), Reply(text="Yes."))
    await create_session(api, id="s")
    ids = add_messages(api, 30)
    headers = {"Idempotency-Key": "once"}
    async with api.post(f"{SESSIONS}/s/compact", {"focus": "the foxes"}, headers=headers) as response:
        payload = await read_json(response)
        assert response.headers["X-Hermes-Run-Id"] == payload["run_id"]
    assert (payload["object"], payload["session_id"], payload["compacted"]) == ("hermes.session.compaction", "s", True)
    assert 0 < payload["tokens_after"] < payload["tokens_before"]
    assert 0 < payload["messages_archived"] < len(ids)
    assert payload["usage"]["output_tokens"] >= 0
    assert "the foxes" in str(api.model.requests[0].body)
    body = await get_json(api, f"{SESSIONS}/s/messages")
    assert [message["id"] for message in body["data"]] == ids
    async with api.post(f"{SESSIONS}/s/compact", {"focus": "the foxes"}, headers=headers) as response:
        assert await read_json(response) == payload
    assert len(api.model.requests) == 1
    async with api.post(f"{SESSIONS}/s/chat", {"message": "Foxes?"}) as response:
        await read_json(response)
    summary_request = str(api.model.requests[1].body)
    assert (
        "They spoke of foxes." in summary_request
        and "question 12" not in summary_request
        and "Foxes?" in summary_request
    )


async def test_short_session_is_not_compacted(api: Api) -> None:
    await create_session(api, id="s")
    db_of(api).append_message("s", "user", "hi")
    async with api.post(f"{SESSIONS}/s/compact") as response:
        body = await read_json(response)
    assert (body["compacted"], body["messages_archived"], body["tokens_before"]) == (False, 0, None)
    assert api.model.requests == []


async def test_busy_session_is_not_compacted(start: Start) -> None:
    held_model = HeldModel(Reply(text="Slowly."))
    await held_model.start()
    api = await start(settings=held_model.settings)
    await create_session(api, id="s")
    turn = asyncio.ensure_future(_session_chat(api, "s"))
    await until(lambda: get_json(api, f"{SESSIONS}/s"), lambda value: value["session"]["active_run_id"] is not None)
    async with api.post(f"{SESSIONS}/s/compact") as response:
        await read_error(response, 409, "session_busy")
    held_model.release_all()
    await turn
    await held_model.stop()


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("none", {}, 404, "session_not_found"),
        ("s", {"focus": 5}, 400, "invalid_type"),
        ("s", {"focus": "x" * 101}, 400, "string_above_max_length"),
        ("s", {"instructions": "x" * 101}, 400, "string_above_max_length"),
    ],
)
async def test_invalid_compaction_is_rejected(start: Start, path: str, body: Json, status: int, code: str) -> None:
    api = await start(max_text_chars=100)
    await create_session(api, id="s")
    async with api.post(f"{SESSIONS}/{path}/compact", body) as response:
        await read_error(response, status, code)


async def test_compaction_requires_write_scope_and_counts_as_turn(start: Start) -> None:
    reader, writer = "sk-reader-0123456789abcdef01234567", "sk-writer-0123456789abcdef01234567"
    scopes = ["chat", "sessions:read"]
    keys = [
        {"name": "reader", "key": reader, "scopes": scopes},
        {"name": "writer", "key": writer, "scopes": [*scopes, "sessions:write"], "tokens_per_minute": 50},
    ]
    api = await start(Reply(text="Hi.", usage={"input": 600, "output": 400}), keys=keys)
    more = {"headers": bearer(writer)}
    async with api.post(SESSIONS, {"id": "s"}, **more) as response:
        await read_json(response, 201)
    async with api.post(f"{SESSIONS}/s/compact", headers=bearer(reader)) as response:
        await read_error(response, 403, "insufficient_scope")
    async with api.post(f"{SESSIONS}/s/compact", **more) as response:
        await read_json(response)
    async with api.post(f"{SESSIONS}/s/chat", {"message": "hi"}, **more) as response:
        await read_json(response)
    async with api.post(f"{SESSIONS}/s/compact", **more) as response:
        await read_error(response, 429, "rate_limit_exceeded")


async def test_workspaces_are_the_folders_that_a_session_can_name(start: Start, tmp_path: Path) -> None:
    api = await start(settings={"terminal": {"workspaces": [str(tmp_path), str(tmp_path / "missing")]}})
    assert (await get_json(api, "/api/workspaces"))["data"] == [{"path": str(tmp_path.resolve())}]
    (tmp_path / "garden").mkdir()
    await create_session(api, workdir=str(tmp_path / "garden"))
    plain = await start()
    assert (await get_json(plain, "/api/workspaces"))["data"] == []
