"""Requests that come again under their key: one run, the same answer byte for byte, whoever leaves or restarts."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from typing import Any

import pytest

from hermes.core.processes import host_of, this_process
from hermes.core.spec import RunSpec
from hermes.store.base import StoreError
from support.model_server import Call, Reply
from support.waiting import until

from .clients import HeldModel, Json, read_error, read_json, user
from .conftest import Api, Start

KEPT = ("X-Hermes-Session-Id", "X-Hermes-Run-Id", "X-Hermes-History", "Content-Type")
# route: what it is asked, and the status of its answer
ASKED: dict[str, tuple[Json, int]] = {
    "/v1/chat/completions": (user("hi"), 200),
    "/v1/responses": ({"input": "hi"}, 200),
    "/v1/runs": ({"input": "hi"}, 202),
    "/api/sessions": ({"title": "Kitchen"}, 201),
    "/api/sessions/there/chat": ({"message": "hi"}, 200),
    "/api/sessions/there/fork": ({}, 201),
    "/v1/conversations": ({}, 200),
    "/api/jobs": ({"schedule": "1d", "prompt": "x"}, 201),
}
STREAMS: dict[str, Json] = {
    "/v1/chat/completions": user("hi", stream=True),
    "/v1/responses": {"input": "hi", "stream": True},
    "/api/sessions/there/chat/stream": {"message": "hi"},
}


async def post_with_key(api: Api, path: str, body: Any, key: str = "key-1", **headers: str) -> tuple[int, bytes, Any]:
    async with api.post(path, body, headers={"Idempotency-Key": key, **headers}) as response:
        return response.status, await response.read(), response.headers


async def with_session(api: Api) -> Api:
    async with api.post("/api/sessions", {"id": "there"}) as response:
        await read_json(response, 201)
    return api


async def rows(api: Api) -> tuple[int, int, int]:
    """How many runs, sessions and jobs there are."""
    store = api.app.store
    runs, sessions = await store.runs.list(), await store.sessions.list_sessions(limit=100)
    return len(runs), len(sessions), len(await store.jobs.list())


@pytest.mark.parametrize("path", ASKED)
async def test_idempotent_retry_returns_same_answer(start: Start, path: str) -> None:
    api = await with_session(await start(*[Reply(text="Hi.", continues=False)] * 4))
    body, status = ASKED[path]
    first = await post_with_key(api, path, body)
    assert first[0] == status, first[1]
    await until(lambda: dict(api.app.engine.by_id), lambda live: not live)
    had = await rows(api)
    again = await post_with_key(api, path, body)
    assert again[:2] == first[:2] and await rows(api) == had
    assert "Idempotency-Replayed" not in first[2] and again[2]["Idempotency-Replayed"] == "true"
    assert {name: again[2].get(name) for name in KEPT} == {name: first[2].get(name) for name in KEPT}
    other = await post_with_key(api, path, body, "key-2") if path != "/api/sessions" else None
    assert other is None or other[1] != first[1]


@pytest.mark.parametrize("path", STREAMS)
async def test_idempotent_stream_is_replayed_frame_by_frame(start: Start, path: str) -> None:
    api = await with_session(await start(Reply(text=["Hel", "lo."]), Reply(text="never")))
    first, again = [await post_with_key(api, path, STREAMS[path]) for _ in range(2)]
    assert first[0] == again[0] == 200 and first[1] == again[1] and b"lo." in first[1]
    assert again[2]["Idempotency-Replayed"] == "true" and again[2]["Content-Type"] == first[2]["Content-Type"]
    assert len(api.model.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_hundred_concurrent_idempotent_requests_are_one_run(start: Start, stream: bool) -> None:
    async with HeldModel(Reply(text=["Hel", "lo."])) as held_model:
        api = await start(settings=held_model.settings)
        tasks = [
            asyncio.ensure_future(post_with_key(api, "/v1/chat/completions", user("hi", stream=stream)))
            for _ in range(100)
        ]
        await until(lambda: len(held_model.requests), lambda count: count == 1)
        held_model.release_all()
        answers = await asyncio.gather(*tasks)
        assert len({answer[1] for answer in answers}) == 1 and {answer[0] for answer in answers} == {200}
        assert sum("Idempotency-Replayed" not in answer[2] for answer in answers) == 1
        assert len(held_model.requests) == 1 and (await rows(api))[0] == 1


async def test_idempotency_key_conflict(start: Start) -> None:
    api = await start(Reply(text="Hi."))
    await post_with_key(api, "/v1/chat/completions", user("hi"))
    for body, headers in ((user("other"), {}), (user("hi"), {"X-Hermes-Toolsets": "none"})):
        status, text, _ = await post_with_key(api, "/v1/chat/completions", body, **headers)
        assert (status, json.loads(text)["error"]["code"]) == (409, "idempotency_key_conflict")
    # The order of fields is no difference, another route is another thing.
    body = dict(reversed(user("hi").items()))
    assert (await post_with_key(api, "/v1/chat/completions", body))[2]["Idempotency-Replayed"] == "true"


async def test_idempotent_request_survives_disconnect(start: Start) -> None:
    async with HeldModel(Reply(text="Hello.")) as held_model:
        api = await start(settings=held_model.settings)
        task = asyncio.ensure_future(post_with_key(api, "/v1/chat/completions", user("hi")))
        await until(lambda: len(held_model.requests), lambda count: count == 1)
        task.cancel()
        await asyncio.wait([task])
        held_model.release_all()
        status, text, headers = await post_with_key(api, "/v1/chat/completions", user("hi"))
        assert status == 200 and json.loads(text)["choices"][0]["message"]["content"] == "Hello."
        assert headers["Idempotency-Replayed"] == "true" and len(held_model.requests) == 1


async def test_idempotent_failed_turn_is_not_repeated(start: Start) -> None:
    api = await start(Reply(status=400, error="no"), Reply(text="Hi."))
    first, again = [await post_with_key(api, "/v1/chat/completions", user("hi")) for _ in range(2)]
    assert first[0] == again[0] >= 400 and first[1] == again[1] and len(api.model.requests) == 1


async def test_idempotency_key_of_rejected_request_can_be_reused(start: Start) -> None:
    api = await start(Reply(text="Hi."))
    status, _, _ = await post_with_key(api, "/v1/chat/completions", {"messages": []})
    assert status == 400
    status, _, headers = await post_with_key(api, "/v1/chat/completions", user("hi"))
    assert status == 200 and "Idempotency-Replayed" not in headers


async def test_idempotency_key_of_busy_session_can_be_reused(start: Start) -> None:
    async with HeldModel(Reply(text="One."), Reply(text="Two.")) as held_model:
        api = await with_session(await start(settings=held_model.settings, session_wait_seconds=0))
        async with api.post("/api/sessions/there/chat/stream", {"message": "a"}) as first:
            await held_model.wait_for_request()
            status, text, _ = await post_with_key(api, "/api/sessions/there/chat", {"message": "b"})
            assert (status, json.loads(text)["error"]["code"]) == (409, "session_busy")
            held_model.release_all()
            await first.read()
        status, _, headers = await post_with_key(api, "/api/sessions/there/chat", {"message": "b"})
        assert status == 200 and "Idempotency-Replayed" not in headers


@pytest.mark.parametrize("key", ["", "k" * 256, "with space", "ünï"])
async def test_invalid_idempotency_key_is_rejected(start: Start, key: str) -> None:
    api = await start(Reply(text="Hi."))
    async with api.post("/v1/runs", {"input": "hi"}, headers={"Idempotency-Key": key}) as response:
        await read_error(response, 400, "invalid_idempotency_key", "Idempotency-Key")


async def test_idempotent_answers_survive_restart(start: Start) -> None:
    started = await start(Reply(text="Hi."))
    first = await post_with_key(started, "/v1/chat/completions", user("hi"))
    await started.app.close()
    other = await start(Reply(text="never"))
    again = await post_with_key(other, "/v1/chat/completions", user("hi"))
    assert again[:2] == first[:2] and again[2]["Idempotency-Replayed"] == "true"
    assert other.model.requests == []


async def test_idempotent_turn_created_before_kill_is_executed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    api = await start(handler=lambda _: Reply(text="Hi.", continues=False))
    spec, body = RunSpec("hi", session_id="s", kind="chat", on_detach="continue"), user("hi")
    fingerprint, store = await _fingerprint(api, body), api.app.store
    with monkeypatch.context() as patched:
        patched.setattr("hermes.store.runs.this_process", lambda: f"{host_of(this_process())}:99999999:")
        await store.runs.create(spec)
    await store.idempotency.claim("default POST /v1/chat/completions", "key-1", fingerprint, 60.0, spec.run_id)
    status, text, headers = await post_with_key(api, "/v1/chat/completions", body)
    assert (status, headers["X-Hermes-Run-Id"]) == (200, spec.run_id), text
    assert b"Hi." in text


@pytest.mark.parametrize("stream", [False, True])
async def test_idempotent_turn_ended_by_restart_is_reported(
    start: Start, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start()
    store = api.app.store
    spec, body = RunSpec("hi", session_id="s", kind="chat", on_detach="cancel"), user("hi", stream=stream)
    fingerprint = await _fingerprint(api, body)
    with monkeypatch.context() as patched:
        patched.setattr("hermes.store.runs.this_process", lambda: f"{host_of(this_process())}:99999999:")
        await store.runs.create(spec)
    await store.idempotency.claim("default POST /v1/chat/completions", "key-1", fingerprint, 60.0, spec.run_id)
    status, text, headers = await post_with_key(api, "/v1/chat/completions", body)
    assert (status, json.loads(text)["error"]["code"]) == (503, "server_restarted")
    assert headers["X-Hermes-Run-Id"] == spec.run_id and spec.run_id in text.decode()
    assert (await post_with_key(api, "/v1/chat/completions", body))[1] == text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/runs", "/api/jobs"])
async def test_claim_without_run_is_taken_over_under_its_number(start: Start, path: str) -> None:
    """Whoever made the claim may be slow, and not gone: what it begins later has the same number, and is refused."""
    api = await start(handler=lambda _: Reply(text="Hi.", continues=False))
    body, status = ASKED[path]
    fingerprint, run_id = await _fingerprint(api, body, path), f"run_{'7' * 32}"
    await api.app.store.idempotency.claim(f"default POST {path}", "key-1", fingerprint, 60.0, run_id)
    first = await post_with_key(api, path, body)
    assert first[0] == status and "Idempotency-Replayed" not in first[2], first
    if path == "/api/jobs":
        assert json.loads(first[1])["job"]["id"] == "7" * 12
    else:
        assert first[2]["X-Hermes-Run-Id"] == run_id
        with pytest.raises((StoreError, sqlite3.IntegrityError), match="UNIQUE"):
            await api.app.store.runs.create(RunSpec("hi", run_id=run_id, session_id="s"))
    again = await post_with_key(api, path, body)
    assert again[:2] == first[:2] and again[2]["Idempotency-Replayed"] == "true"


async def _fingerprint(api: Api, body: Json, path: str = "/v1/chat/completions") -> str:
    """That of a request, as the server keeps it."""
    api.model.script = [Reply(text="x")]
    await post_with_key(api, path, body, "probe")

    def outcome() -> str:
        engine = api.app.store.blocking.engine
        assert engine is not None
        from hermes.store.idempotency import Idempotency

        return str(Idempotency(engine).claim(f"default POST {path}", "probe", "").state)

    assert outcome() == "conflict"
    import hashlib

    names = ("Session-Id", "Session-Key", "Seed-History", "Detach", "Approvals", "Tool-Progress", "Tool-Items")
    headers = {f"X-Hermes-{name}": None for name in (*names, "Reasoning", "Toolsets", "Timeout")}
    return hashlib.sha256(json.dumps([body, headers, []], sort_keys=True).encode()).hexdigest()


async def test_idempotency_keys_are_per_owner(start: Start) -> None:
    keys = [{"name": name, "key": f"sk-{name}-0123456789abcdef", "scopes": ["chat"]} for name in ("anna", "ben")]
    api = await start(Reply(text="One."), Reply(text="Two."), keys=keys)
    texts = []
    for entry in keys:
        _, text, _ = await post_with_key(
            api, "/v1/chat/completions", user("hi"), Authorization=f"Bearer {entry['key']}"
        )
        texts.append(json.loads(text)["choices"][0]["message"]["content"])
    assert texts == ["One.", "Two."]


async def test_effects_happen_once(start: Start) -> None:
    call = Call("terminal", {"command": "echo x >> count.txt"})
    api = await start(Reply(tool_calls=[call]), Reply(text="Done."))
    await asyncio.gather(*(post_with_key(api, "/v1/chat/completions", user("count")) for _ in range(5)))
    await post_with_key(api, "/v1/chat/completions", user("count"))
    assert (api.app.home.workspace / "count.txt").read_text() == "x\n"
