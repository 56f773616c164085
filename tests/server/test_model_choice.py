"""Which model serves a turn: the request's, the session's, the configured one; on every route, within a key's ceiling."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from support.model_server import ModelServer, Reply
from support.waiting import until

from .clients import Json, read_error, read_json, user
from .conftest import PROVIDER_KEY, Api, Start
from .test_keys import ALL, bearer

LIMITED = "sk-limited-0123456789abcdef"
DEFAULT, FAST, DEEP, MAIN_OTHER = ("main", "test-model"), ("main", "quick"), ("second", "deep"), ("main", "other")
ANSWERS = [Reply(text="Hi.", continues=False)] * 4


@dataclass
class TwoModels:
    """A server with two providers: the configured one, and `second`."""

    api: Api
    second: ModelServer

    @property
    def model_calls(self) -> list[tuple[str, str]]:
        """Provider and model of every call so far."""
        pairs = [("main", request.model) for request in self.api.model.requests]
        return pairs + [("second", request.model) for request in self.second.requests]


@pytest.fixture
async def two(start: Start) -> AsyncIterator[Callable[..., Awaitable[TwoModels]]]:
    second = ModelServer(*ANSWERS)
    await second.start()

    async def begin(**options: Any) -> TwoModels:
        entry = {"base_url": f"{second.url}/v1", "api_key": PROVIDER_KEY, "models": ["deep", "deeper"]}
        routes = {"fast": {"model": "quick"}, "far": {"model": "deep", "provider": "second"}}
        own = {"name": "limited", "key": LIMITED, "scopes": ALL}
        keys = [{**own, "models": options.pop("models")}] if "models" in options else []
        api = await start(
            *ANSWERS, settings={"providers": {"second": entry}}, model_routes=routes, keys=keys, **options
        )
        return TwoModels(api, second)

    yield begin
    await second.stop()


# --- ways to begin a turn --------------------------------------------------------------------------------------------


async def _ended(api: Api, run_id: str) -> Any:
    async def record() -> Any:
        return await api.app.engine.get(run_id)

    return await until(record, lambda value: value is not None and value.state.ended)


async def _chat(api: Api, fields: Json, **more: Any) -> str | None:
    async with api.post("/v1/chat/completions", user("hi", **fields), **more) as response:
        await read_json(response)
        return response.headers.get("X-Hermes-Model")


async def _response(api: Api, fields: Json, **more: Any) -> str | None:
    async with api.post("/v1/responses", {"input": "hi", **fields}, **more) as response:
        await read_json(response)
        return response.headers.get("X-Hermes-Model")


async def _background(api: Api, fields: Json, **more: Any) -> None:
    async with api.post("/v1/responses", {"input": "hi", "background": True, **fields}, **more) as response:
        await _ended(api, (await read_json(response))["id"].replace("resp_", "run_"))


async def _websocket(api: Api, fields: Json, **more: Any) -> None:
    async with api.client.ws_connect(f"{api.url}/v1/responses", **more) as socket:
        await socket.send_json({"type": "response.create", "input": "hi", **fields})
        while (event := await socket.receive_json())["type"] not in ("response.completed", "error"):
            pass
        assert event["type"] == "response.completed", event


async def _session_chat(api: Api, fields: Json, **more: Any) -> str | None:
    async with api.post("/api/sessions", {"id": "mine"}, **more):
        pass
    async with api.post("/api/sessions/mine/chat", {"message": "hi", **fields}, **more) as response:
        await read_json(response)
        return response.headers.get("X-Hermes-Model")


async def _run(api: Api, fields: Json, **more: Any) -> None:
    async with api.post("/v1/runs", {"input": "hi", **fields}, **more) as response:
        await _ended(api, (await read_json(response, 202))["run_id"])


async def _job(api: Api, fields: Json, **more: Any) -> None:
    async with api.post("/api/jobs", {"schedule": "1h", "prompt": "hi", **fields}, **more) as response:
        job = (await read_json(response, 201))["job"]
    async with api.post(f"/api/jobs/{job['id']}/run", **more) as response:
        await _ended(api, (await read_json(response, 202))["run_id"])


Way = Callable[..., Awaitable[str | None]]
WAYS: dict[str, Way] = {
    "chat": _chat,
    "response": _response,
    "background": _background,
    "websocket": _websocket,
    "session": _session_chat,
    "run": _run,
    "job": _job,
}
NAMED: list[tuple[Json, tuple[str, str]]] = [
    ({}, DEFAULT),
    ({"model": "hermes-agent"}, DEFAULT),
    ({"model": "fast"}, FAST),
    ({"model": "far"}, DEEP),
    ({"model": "second/deep"}, DEEP),
    ({"model": "second/anything"}, ("second", "anything")),
    ({"model": "deep", "provider": "second"}, DEEP),
    ({"model": "a/b", "provider": "second"}, ("second", "a/b")),
    ({"provider": "second"}, DEEP),
    ({"model": "hermes-agent", "provider": "second"}, DEEP),
    ({"model": "custom/other"}, MAIN_OTHER),
]


@pytest.mark.parametrize(("fields", "expected"), NAMED, ids=[str(fields) for fields, _ in NAMED])
@pytest.mark.parametrize("way", WAYS)
async def test_requested_model_serves_turn(
    two: Callable[..., Awaitable[TwoModels]], way: str, fields: Json, expected: tuple[str, str]
) -> None:
    served = await two()
    shown = await WAYS[way](served.api, fields)
    assert served.model_calls == [expected]
    provider, model = expected
    if shown is not None:
        assert shown == f"{'custom' if provider == 'main' else provider}/{model}"


async def test_unknown_model_name_falls_back_to_default(
    two: Callable[..., Awaitable[TwoModels]],
) -> None:
    served = await two()
    async with served.api.post("/api/sessions", {"id": "mine", "model": "fast"}) as response:
        await read_json(response, 201)
    for name in ("gpt-4o", "nobody/gpt-4o"):
        async with served.api.post("/api/sessions/mine/chat", {"message": "hi", "model": name}) as response:
            await read_json(response)
    assert served.model_calls == [DEFAULT, DEFAULT]


async def test_provider_object_is_ignored(two: Callable[..., Awaitable[TwoModels]]) -> None:
    served = await two()
    body = user("hi", provider={"order": ["a"]})
    async with served.api.post("/v1/chat/completions", body) as response:
        await read_json(response)
        assert response.headers["X-Hermes-Ignored"] == "provider"
    assert served.model_calls == [DEFAULT]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", user("hi")),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/responses/compact", {"input": "hi", "model": "m"}),
        ("/v1/runs", {"input": "hi"}),
        ("/api/jobs", {"schedule": "1h", "prompt": "hi"}),
    ],
)
async def test_unconfigured_provider_is_rejected(
    two: Callable[..., Awaitable[TwoModels]], path: str, body: Json
) -> None:
    served = await two()
    async with served.api.post(path, {**body, "provider": "nobody"}) as response:
        await read_error(response, 400, "invalid_value", "provider")
    assert served.model_calls == []


@pytest.mark.parametrize("model", ["gpt-4o", "nobody/gpt-4o"])
async def test_strict_models_reject_other_names(two: Callable[..., Awaitable[TwoModels]], model: str) -> None:
    served = await two(strict_models=True)
    for path, body in (
        ("/v1/chat/completions", user("hi")),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/runs", {"input": "hi"}),
        ("/api/sessions", {"id": "mine"}),
        ("/api/jobs", {"schedule": "1h", "prompt": "hi"}),
    ):
        async with served.api.post(path, {**body, "model": model}) as response:
            await read_error(response, 404, "model_not_found", "model")
    await _chat(served.api, {"model": "second/deep"})
    assert served.model_calls == [DEEP]


# --- the session's model ---------------------------------------------------------------------------------------------


async def _in_chat(api: Api, **more: Any) -> None:
    headers = {**more.get("headers", {}), "X-Hermes-Session-Id": "mine"}
    await _chat(api, {}, headers=headers)


async def _in_response(api: Api, **more: Any) -> None:
    headers = {**more.get("headers", {}), "X-Hermes-Session-Id": "mine"}
    await _response(api, {"model": "hermes-agent"}, headers=headers)


async def _in_background_response(api: Api, **more: Any) -> None:
    headers = {**more.get("headers", {}), "X-Hermes-Session-Id": "mine"}
    await _background(api, {}, headers=headers)


async def _in_session(api: Api, **more: Any) -> None:
    async with api.post("/api/sessions/mine/chat", {"message": "hi"}, **more) as response:
        await read_json(response)


async def _in_run(api: Api, **more: Any) -> None:
    await _run(api, {"session_id": "mine"}, **more)


async def _in_job(api: Api, **more: Any) -> None:
    await _job(api, {"session_id": "mine"}, **more)


IN_SESSION = {
    "chat": _in_chat,
    "response": _in_response,
    "background": _in_background_response,
    "session": _in_session,
    "run": _in_run,
    "job": _in_job,
}


@pytest.mark.parametrize(("model", "expected"), [("fast", FAST), ("far", DEEP), ("second/deep", DEEP), ("m", DEFAULT)])
@pytest.mark.parametrize("way", IN_SESSION)
async def test_session_turns_use_session_model(
    two: Callable[..., Awaitable[TwoModels]], way: str, model: str, expected: tuple[str, str]
) -> None:
    served = await two()
    async with served.api.post("/api/sessions", {"id": "mine", "model": model}) as response:
        await read_json(response, 201)
    await IN_SESSION[way](served.api)
    assert served.model_calls == [expected]


async def test_bound_session_uses_its_model(
    two: Callable[..., Awaitable[TwoModels]],
) -> None:
    served = await two()
    async with served.api.post("/v1/chat/completions", user("hi")) as response:
        await read_json(response)
        session_id = response.headers["X-Hermes-Session-Id"]
    async with served.api.patch(f"/api/sessions/{session_id}", {"model": "second/deep"}) as response:
        assert (await read_json(response))["session"]["model"] == "second/deep"
    messages = [*user("hi")["messages"], {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "and?"}]
    async with served.api.post("/v1/chat/completions", {"messages": messages}) as response:
        await read_json(response)
        assert response.headers["X-Hermes-Session-Id"] == session_id
        assert response.headers["X-Hermes-Model"] == "second/deep"


# --- ceilings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "fields", "status"),
    [
        (["fast"], {"model": "fast"}, 200),
        (["fast"], {}, 403),
        (["fast"], {"model": "far"}, 403),
        (["fast"], {"model": "custom/quick"}, 403),
        (["far"], {"model": "second/deep"}, 403),
        (["far"], {"model": "deep", "provider": "second"}, 403),
        (["second/deep"], {"model": "second/deep"}, 200),
        (["second/deep"], {"model": "deep", "provider": "second"}, 200),
        (["second/deep"], {"model": "second/deeper"}, 403),
        (["second/deep"], {"provider": "second"}, 200),
        (["second/deep"], {"provider": "nobody"}, 403),
        (["nobody/deep"], {"model": "nobody/deep"}, 404),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/runs"])
async def test_key_models_ceiling_by_name(
    two: Callable[..., Awaitable[TwoModels]], path: str, models: list[str], fields: Json, status: int
) -> None:
    served = await two(models=models)
    body = {**(user("hi") if "chat" in path else {"input": "hi"}), **fields}
    async with served.api.post(path, body, headers=bearer(LIMITED)) as response:
        if status == 200:
            assert response.status in (200, 202)
        else:
            await read_error(response, status, {403: "model_not_allowed", 404: "model_not_found"}[status], "model")
            assert served.model_calls == []


@pytest.mark.parametrize("way", IN_SESSION)
async def test_key_may_use_session_with_allowed_model(two: Callable[..., Awaitable[TwoModels]], way: str) -> None:
    served = await two(models=["far"])
    more: Json = {"headers": bearer(LIMITED)}
    async with served.api.post("/api/sessions", {"id": "mine", "model": "fast"}, **more) as response:
        await read_error(response, 403, "model_not_allowed", "model")
    async with served.api.post("/api/sessions", {"id": "mine", "model": "far"}, **more) as response:
        await read_json(response, 201)
    await IN_SESSION[way](served.api, **more)
    assert served.model_calls == [DEEP]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/runs", "/api/sessions/mine/chat"])
async def test_session_with_disallowed_model_is_rejected(two: Callable[..., Awaitable[TwoModels]], path: str) -> None:
    served = await two(models=["far"])
    await served.api.app.store.sessions.create_session("mine", "api_server", owner="limited", model="fast")
    headers = {**bearer(LIMITED), "X-Hermes-Session-Id": "mine"}
    body = {**user("hi"), "input": "hi", "message": "hi", "stream": True}
    async with served.api.post(path, body, headers=headers) as response:
        await read_error(response, 403, "model_not_allowed", "model")
    assert served.model_calls == []
    async with served.api.patch("/api/sessions/mine", {"model": "far"}, headers=bearer(LIMITED)) as response:
        await read_json(response)
    await _in_session(served.api, headers=bearer(LIMITED))  # the refused turn has left nothing behind
    assert served.model_calls == [DEEP]


@pytest.mark.parametrize("fields", [{}, {"background": True}])
async def test_model_rejection_reveals_nothing_of_foreign_session(
    two: Callable[..., Awaitable[TwoModels]], fields: Json
) -> None:
    served = await two(models=["fast"])
    await served.api.app.store.sessions.create_session("hers", "api_server", owner="default", model="second/hidden")
    headers = {**bearer(LIMITED), "X-Hermes-Session-Id": "hers"}
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        async with served.api.post(path, {"input": "hi", **fields}, headers=headers) as response:
            assert response.status in (403, 404) and "hidden" not in await response.text()


# --- what is on offer ------------------------------------------------------------------------------------------------


async def test_models_list_respects_key_ceiling(two: Callable[..., Awaitable[TwoModels]]) -> None:
    served = await two(models=["fast", "second/deeper"])
    async with served.api.get("/v1/models") as response:
        rows = [(model["id"], model["root"], model["parent"]) for model in (await read_json(response))["data"]]
    assert rows == [
        ("hermes-agent", "hermes-agent", None),
        ("far", "deep", "hermes-agent"),
        ("fast", "quick", "hermes-agent"),
        ("second/deep", "deep", None),
        ("second/deeper", "deeper", None),
    ]
    async with served.api.get("/v1/models", headers=bearer(LIMITED)) as response:
        assert [model["id"] for model in (await read_json(response))["data"]] == ["fast", "second/deeper"]
    async with served.api.get("/v1/models/second/deeper", headers=bearer(LIMITED)) as response:
        assert (await read_json(response))["id"] == "second/deeper"
    async with served.api.get("/v1/models/second/deep", headers=bearer(LIMITED)) as response:
        await read_error(response, 404, "model_not_found", "model")
    assert served.second.requests == []


async def test_run_reports_requested_model_name(two: Callable[..., Awaitable[TwoModels]]) -> None:
    served = await two()
    async with served.api.post("/v1/runs", {"input": "hi", "model": "second/deep"}) as response:
        run_id = (await read_json(response, 202))["run_id"]
    async with served.api.get(f"/v1/runs/{run_id}") as response:
        assert (await read_json(response))["model"] == "second/deep"
