"""API keys: authentication, scopes, limits, rates, and isolation of owners."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from hermes.server.keys import Bucket, Keyring
from hermes.server.routes import ROUTES, Route
from support.model_server import Call, Reply
from support.waiting import until

from .clients import HeldModel, Json, read_error, read_json, tool_names, user
from .conftest import KEY, Api, Start

ANNA, BEN, NARROW = "sk-anna-0123456789abcdef", "sk-ben-0123456789abcdef", "sk-narrow-0123456789abcdef"
ALL = ["chat", "sessions:read", "sessions:write", "runs", "jobs"]
KEYS: list[Json] = [
    {"name": "anna", "key": ANNA, "scopes": ALL},
    {"name": "ben", "key_sha256": hashlib.sha256(BEN.encode()).hexdigest(), "scopes": ALL},
]
PROTECTED = [route for route in ROUTES if route.scope is not None]
# What a body must hold for the question of the key to come first.
BODIES: dict[str, Json] = {
    "job_create": {"schedule": "1h", "prompt": "x"},
    "job_update": {"name": "x"},
    "session_update": {"title": "x"},
    "run_steer": {"text": "x"},
    "run_approval": {"choice": "deny"},
    "run_clarify": {"answer": "x"},
    "conversation_update": {"metadata": {}},
    "conversation_items_add": {"items": [{"role": "user", "content": "x"}]},
    "memory_update": {"operations": [{"action": "add", "content": "x"}]},
    "skill_create": {"name": "x", "content": "x"},
    "skill_update": {"content": "x"},
    "session_chat": {"message": "x"},
    "session_chat_stream": {"message": "x"},
}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def path_of(route: Route, ids: Json) -> str:
    return re.sub(r"{(\w+)}", lambda match: str(ids.get(match[1], "x")), route.path)


async def called(api: Api, route: Route, key: str | None, ids: Json) -> tuple[int, Json, Any]:
    """Status, error and headers of a call without more than it needs."""
    headers = bearer(key) if key else {}
    body = BODIES.get(route.name, {}) if route.method in ("POST", "PATCH") else None
    async with (
        aiohttp.ClientSession() as client,
        client.request(route.method, api.url + path_of(route, ids), json=body, headers=headers) as response,
    ):
        is_json = response.content_type == "application/json"
        document = await response.json() if is_json and response.status >= 400 else {}
        error = document.get("error") or {}
        if isinstance(error, str):  # as Ollama has it
            error = {"message": error, "code": document["code"]}
        return response.status, error, response.headers


@dataclass
class TwoOwners:
    """A server with two owners, and what belongs to one of them."""

    api: Api
    ids: Json


@pytest.fixture
async def two(start: Start) -> AsyncIterator[TwoOwners]:
    others = [
        {"name": f"only-{scope.replace(':', '-')}", "key": f"{NARROW}-{scope}", "scopes": [scope]} for scope in ALL
    ]
    api = await start(*[Reply(text="Hi.", continues=False)] * 50, keys=[*KEYS, *others])
    yield TwoOwners(api, await _things(api, ANNA))


async def _things(api: Api, key: str) -> Json:
    """One object of each kind that has an owner."""
    more: Json = {"headers": bearer(key)}
    async with api.post("/v1/responses", {"input": "hi"}, **more) as response:
        ids = {"response_id": (await read_json(response))["id"]}
    async with api.post("/v1/conversations", {}, **more) as response:
        ids["conversation_id"] = (await read_json(response))["id"]
    async with api.post(
        f"/v1/conversations/{ids['conversation_id']}/items", BODIES["conversation_items_add"], **more
    ) as response:
        ids["item_id"] = (await read_json(response))["data"][0]["id"]
    async with api.post("/v1/runs", {"input": "hi", "session_id": f"of-{key[3:7]}"}, **more) as response:
        run = await read_json(response, 202)
    ids |= {"run_id": run["run_id"], "session_id": run["session_id"]}

    async def state() -> Json:
        async with api.get(f"/v1/runs/{run['run_id']}", **more) as response:
            return await read_json(response)

    await until(state, lambda value: value["finished_at"])
    async with api.post("/api/jobs", {"schedule": "1d", "prompt": "x"}, **more) as response:
        ids["job_id"] = (await read_json(response, 201))["job"]["id"]
    return ids


@pytest.mark.parametrize("route", PROTECTED, ids=lambda route: route.name)
async def test_every_route_requires_key_scope_and_owner(two: TwoOwners, route: Route) -> None:
    api, ids = two.api, two.ids
    for key in (None, "sk-nobody-0123456789", KEY[:-1]):
        status, error, headers = await called(api, route, key, ids)
        assert (status, error["code"]) == (401, "invalid_api_key")
        assert headers["WWW-Authenticate"] == "Bearer" and error["message"] == "Incorrect API key provided."
    for scope in ALL:
        status, error, headers = await called(api, route, f"{NARROW}-{scope}", ids)
        ways = [way.split() for way in ({"any": scope}.get(str(route.scope), str(route.scope))).split("|")]
        missing = [granted for granted in ways[0] if granted != scope]
        allowed = [scope] in ways
        assert (error.get("code") == "insufficient_scope") is not allowed
        if not allowed:
            assert status == 403 and all(f"'{missing_scope}'" in error["message"] for missing_scope in missing)
            assert f"'{scope}'" not in error["message"]
            assert headers["WWW-Authenticate"] == f'Bearer error="insufficient_scope", scope="{" ".join(ways[0])}"'
    if "{" in route.path and route.name != "model" and route.scope != "admin":
        unknown = {name: ("0" * 12 if name == "job_id" else "none") for name in ids}
        status, error, _ = await called(api, route, BEN, ids)
        known = await called(api, route, BEN, unknown)
        assert (status, error["code"]) == (known[0], known[1]["code"]) and status == 404
        assert error["message"].replace(_id_in(route, ids), "?") == known[1]["message"].replace(
            _id_in(route, unknown), "?"
        )
    status, error, _ = await called(api, route, KEY if route.scope == "admin" else ANNA, ids)
    assert status not in (401, 403), error


def _id_in(route: Route, ids: Json) -> str:
    name = re.findall(r"{(\w+)}", route.path)[0]
    return str(ids.get(name, "x"))


# kind of a run: how a key with all scopes begins one that waits for its model, and the scopes that cover it besides `runs`
KINDS: dict[str, tuple[str, Json, list[str]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}, ["chat"]),
    "response": ("/v1/responses", {"input": "hi", "stream": True}, ["chat"]),
    "session": ("/api/sessions/mine/chat/stream", {"message": "hi"}, ["chat", "sessions:write"]),
    "run": ("/v1/runs", {"input": "hi"}, []),
    "job": ("/api/jobs/{job_id}/run", {}, ["jobs"]),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_run_is_visible_under_scope_of_its_route_or_runs(start: Start, kind: str) -> None:
    path, body, own = KINDS[kind]
    sets = {"all": ALL, "runs": ["runs"], "chat": ["chat"], "jobs": ["jobs"], "sessions": ["sessions:write"]}
    sets |= {"talker": ["chat", "sessions:write"], "reader": ["sessions:read"]}
    async with HeldModel(Reply(text="Hi, all of you.")) as held_model:
        keys = [{"name": "anna", "key": ANNA, "scopes": ALL}]
        api = await start(settings=held_model.settings, keys=keys)
        anna: Json = {"headers": bearer(ANNA)}
        async with api.post("/api/sessions", {"id": "mine"}, **anna) as response:
            await read_json(response, 201)
        if kind == "job":
            async with api.post("/api/jobs", {"schedule": "1d", "prompt": "hi"}, **anna) as response:
                path = path.format(job_id=(await read_json(response, 201))["job"]["id"])
        async with api.post(path, body, **anna) as first_response:
            await held_model.wait_for_request()
            [record] = await api.app.engine.list(owner="anna")
            run_id = record.spec.run_id
            assert record.spec.kind == kind
            for scopes in sets.values():
                # The same owner, with fewer scopes: what belongs to others is not there at all.
                [key] = [key for key in api.context.keyring.keys if key.owner == "anna"]
                narrow = dataclasses.replace(key, scopes=frozenset(scopes))
                api.context.keyring.keys = [
                    other_key if other_key is not key else narrow for other_key in api.context.keyring.keys
                ]
                covered = "runs" in scopes or (bool(own) and set(own) <= set(scopes))
                for method, rest, payload, fine in (
                    ("GET", "", None, 200),
                    ("POST", "/steer", {"text": "x"}, 202),
                    ("POST", "/approval", {"choice": "once"}, 409),
                    ("POST", "/clarify", {"answer": "x"}, 409),
                    ("DELETE", "", None, 409),
                    ("HEAD", "/events", None, 200),
                ):
                    async with api.client.request(
                        method, f"{api.url}/v1/runs/{run_id}{rest}", json=payload, **anna
                    ) as answer:
                        assert answer.status == (fine if covered else 403), (scopes, method, rest)
                async with api.get("/v1/runs", **anna) as answer:
                    if not {"runs", "chat", "jobs"} & set(scopes):
                        await read_error(answer, 403, "insufficient_scope")
                    else:
                        listed = [run["run_id"] for run in (await read_json(answer))["data"]]
                        assert listed == ([run_id] if covered else [])
                        async with api.get(f"/v1/runs?kind={kind}", **anna) as list_response:
                            assert len((await read_json(list_response))["data"]) == len(listed)
            held_model.release_all()
            await first_response.read()


async def test_session_chat_requires_sessions_scope(start: Start) -> None:
    scopes = {"talker": ["chat"], "keeper": ["sessions:read", "sessions:write"], "both": ["chat", "sessions:write"]}
    keys = [{"name": name, "key": f"{NARROW}-{name}", "scopes": granted} for name, granted in scopes.items()]
    api = await start(*[Reply(text="Hi.")] * 5, keys=keys)
    for name in ("keeper", "both"):
        async with api.post("/api/sessions", {"id": name}, headers=bearer(f"{NARROW}-{name}")) as response:
            await read_json(response, 201)
    for name, missing in (("talker", "sessions:write"), ("keeper", "chat")):
        for path in ("chat", "chat/stream"):
            more: Json = {"headers": bearer(f"{NARROW}-{name}")}
            async with api.post(f"/api/sessions/keeper/{path}", {"message": "hi"}, **more) as response:
                message = (await read_error(response, 403, "insufficient_scope"))["message"]
                assert message == f"This key lacks the scope '{missing}'."
                assert response.headers["WWW-Authenticate"].endswith('scope="chat sessions:write"')
    async with api.post("/api/sessions/both/chat", {"message": "hi"}, headers=bearer(f"{NARROW}-both")) as response:
        await read_json(response)
    assert len(api.model.requests) == 1


async def test_lists_and_searches_are_scoped_to_owner(two: TwoOwners) -> None:
    theirs = await _things(two.api, BEN)

    async def names_of(path: str, key: str, name: str) -> set[str]:
        async with two.api.get(path, headers=bearer(key)) as response:
            return {item[name] for item in (await read_json(response))["data"]}

    for path, name, kind in (
        ("/v1/runs", "run_id", "run_id"),
        ("/api/jobs", "id", "job_id"),
        ("/api/sessions", "id", "session_id"),
    ):
        anna, ben, admin = [await names_of(path, key, name) for key in (ANNA, BEN, KEY)]
        assert two.ids[kind] in anna and theirs[kind] in ben and not anna & ben
        assert {two.ids[kind], theirs[kind]} <= admin
    assert await names_of("/api/sessions/search?q=hi", ANNA, "session_id") >= {two.ids["session_id"]}
    assert theirs["session_id"] not in await names_of("/api/sessions/search?q=hi", ANNA, "session_id")


async def test_admin_sees_owner_of_each_resource(two: TwoOwners) -> None:
    for path in (
        f"/v1/runs/{two.ids['run_id']}",
        f"/api/sessions/{two.ids['session_id']}",
        f"/api/jobs/{two.ids['job_id']}",
    ):
        async with two.api.get(path) as response:
            document = await read_json(response)
        session = document.get("session") or document.get("job") or document
        assert session["owner"] == "anna"
        async with two.api.get(path, headers=bearer(ANNA)) as response:
            assert "anna" not in (await response.text()).replace(two.ids["session_id"], "")


async def test_session_of_other_owner_is_404(two: TwoOwners) -> None:
    body = user("hi")
    async with two.api.post(
        "/v1/chat/completions", body, headers={**bearer(BEN), "X-Hermes-Session-Id": two.ids["session_id"]}
    ) as response:
        await read_error(response, 404, "session_not_found")
    async with two.api.post(
        "/v1/responses", {"input": "x", "previous_response_id": two.ids["response_id"]}, headers=bearer(BEN)
    ) as response:
        assert response.status == 404


async def test_key_toolsets_and_models_are_shown_and_enforced(start: Start) -> None:
    routes = {"fast": {"model": "quick"}, "slow": {"model": "big"}}
    keys = [{"name": "narrow", "key": NARROW, "scopes": ["chat", "runs"], "toolsets": ["todo"], "models": ["fast"]}]
    api = await start(*[Reply(text="Hi.", continues=False)] * 5, keys=keys, model_routes=routes)
    more: Json = {"headers": bearer(NARROW)}
    async with api.get("/v1/models", **more) as response:
        assert [model["id"] for model in (await read_json(response))["data"]] == ["fast"]
    async with api.get("/v1/toolsets", **more) as response:
        assert [run["name"] for run in (await read_json(response))["data"] if run["available"]] == ["todo"]
    async with api.get("/v1/capabilities", **more) as response:
        auth = (await read_json(response))["auth"]
    assert (auth["owner"], auth["scopes"], auth["required"]) == ("narrow", ["chat", "runs"], True)
    for model in ("slow", "hermes-agent", None):
        async with api.post(
            "/v1/chat/completions", user("hi", **({"model": model} if model else {})), **more
        ) as response:
            assert "fast" in (await read_error(response, 403, "model_not_allowed"))["message"]
    async with api.post("/v1/chat/completions", user("hi", model="fast"), **more) as response:
        await read_json(response)
    [request] = api.model.requests
    assert request.model == "quick" and tool_names(request) == ["todo"]
    headers = {**bearer(NARROW), "X-Hermes-Toolsets": "terminal,todo"}
    async with api.post("/v1/chat/completions", user("hi", model="fast"), headers=headers) as response:
        await read_json(response)
    assert tool_names(api.model.requests[-1]) == ["todo"]


async def test_key_concurrency_limit(start: Start) -> None:
    async with HeldModel(Reply(text="Hi."), Reply(text="Hi.")) as held_model:
        keys = [{**KEYS[0], "max_concurrent": 1}, KEYS[1]]
        api = await start(settings=held_model.settings, keys=keys)
        more: Json = {"headers": bearer(ANNA)}
        async with api.post("/v1/runs", {"input": "hi"}, **more) as response:
            await read_json(response, 202)
        await until(lambda: len(held_model.requests), lambda count: count == 1)
        async with api.post("/v1/chat/completions", user("hi"), **more) as response:
            assert "1 turns of 'anna'" in (await read_error(response, 429, "rate_limit_exceeded"))["message"]
        async with api.post("/v1/runs", {"input": "hi"}, headers=bearer(BEN)) as response:
            await read_json(response, 202)
        held_model.release_all()


async def test_key_request_rate_limit(start: Start) -> None:
    api = await start(keys=[{**KEYS[0], "requests_per_minute": 3}])
    for remaining in (2, 1, 0):
        async with api.get("/v1/models", headers=bearer(ANNA)) as response:
            await read_json(response)
            told_of = {
                name: response.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining", "reset")
            }
        assert (told_of["limit"], told_of["remaining"]) == ("3", str(remaining)) and re.fullmatch(
            r"\d+\.\ds", told_of["reset"]
        )
    async with api.get("/v1/models", headers=bearer(ANNA)) as response:
        assert "3 requests per minute" in (await read_error(response, 429, "rate_limit_exceeded"))["message"]
        assert 0 < int(response.headers["Retry-After"]) <= 20
    async with api.get("/v1/models") as response:
        await read_json(response)
        assert "x-ratelimit-limit-requests" not in response.headers


async def test_key_token_rate_limit(start: Start) -> None:
    usage = {"input": 80, "output": 40}
    api = await start(Reply(text="Hi.", usage=usage), keys=[{**KEYS[0], "tokens_per_minute": 100}])
    more: Json = {"headers": bearer(ANNA)}
    async with api.post("/v1/chat/completions", user("hi", stream=True), **more) as response:
        assert response.headers["x-ratelimit-limit-tokens"] == "100"
        await response.read()
    async with api.post("/v1/chat/completions", user("hi"), **more) as response:
        assert "100 tokens per minute" in (await read_error(response, 429, "rate_limit_exceeded"))["message"]
    async with api.get("/v1/models", **more) as response:  # what asks no model is not held back
        await read_json(response)
        assert response.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_always_approval_requires_admin(start: Start) -> None:
    call = Call("terminal", {"command": "rm -rf build"})
    api = await start(Reply(tool_calls=[call]), Reply(text="Done."), keys=KEYS)
    more: Json = {"headers": bearer(ANNA)}
    async with api.post("/v1/runs", {"input": "clean"}, **more) as response:
        run_id = (await read_json(response, 202))["run_id"]

    async def state() -> Json:
        async with api.get(f"/v1/runs/{run_id}", **more) as response:
            return await read_json(response)

    await until(state, lambda value: value["pending_approvals"])
    async with api.post(f"/v1/runs/{run_id}/approval", {"choice": "always"}, **more) as response:
        await read_error(response, 403, "insufficient_scope")
    async with api.post(f"/v1/runs/{run_id}/approval", {"choice": "deny"}, **more) as response:
        await read_json(response)
    await until(state, lambda value: value["finished_at"])


def test_rate_limit_bucket_refills_to_limit() -> None:
    now = [0.0]
    bucket = Bucket(60, lambda: now[0])
    bucket.spend(90)
    assert bucket.left == -30 and bucket.wait_s(1) == 31
    now[0] = 31
    assert bucket.left == 1 and bucket.headers("tokens")["x-ratelimit-remaining-tokens"] == "1"
    now[0] = 10_000
    assert bucket.left == 60 and bucket.wait_s(60) == 0


def test_key_is_not_in_repr() -> None:
    ring = Keyring("sk-own-0123456789", KEYS)
    assert "sk-" not in repr(ring.keys) and ring.find(BEN.encode()) == ring.by_owner["ben"]
    assert ring.find(b"") is None and ring.find(b"sk-own") is None
