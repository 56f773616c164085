"""Forms that requests of other services' clients have: headers, paths, encodings, levels, and counting tokens."""

from __future__ import annotations

from typing import Any

import pytest

from support.model_server import Reply

from .clients import (
    Json,
    RawConnection,
    RawResponse,
    check_envelope,
    check_headers,
    read_error,
    read_json,
    sent_messages,
    user,
)
from .conftest import KEY, Api, Start
from .test_keys import ANNA, BEN, KEYS, bearer

CHAT = "/v1/chat/completions"


# --- effort ----------------------------------------------------------------------------------------------------------

EFFORTS: list[tuple[str, Json]] = [
    (CHAT, user("hi", reasoning_effort="max")),
    (CHAT, user("hi", reasoning={"effort": "max"})),
    ("/v1/responses", {"input": "hi", "reasoning": {"effort": "max"}}),
    ("/api/sessions/mine/chat", {"message": "hi", "reasoning_effort": "max"}),
    ("/v1/runs", {"input": "hi", "reasoning_effort": "max"}),
    ("/v1/messages", {**user("hi"), "max_tokens": 9, "output_config": {"effort": "max"}}),
    ("/api/chat", user("hi", think="max")),
]


@pytest.mark.parametrize(("model", "level"), [("gpt-5", "high"), ("gpt-5.2", "xhigh")])
@pytest.mark.parametrize(("path", "body"), EFFORTS)
async def test_highest_reasoning_effort_of_model(start: Start, path: str, body: Json, model: str, level: str) -> None:
    api = await start(Reply(text="Hi."), model_routes={"thinker": {"model": model}}, ollama=True)
    async with api.post("/api/sessions", {"id": "mine"}) as response:
        await read_json(response, 201)
    async with api.post(path, {**body, "model": "thinker"}) as response:
        assert response.status in (200, 202), await response.text()
    await api.model.until(lambda: bool(api.model.requests))
    assert api.model.requests[0].body["reasoning_effort"] == level


# --- the key ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "owner"),
    [
        ({"api-key": ANNA}, "anna"),
        ({"Api-Key": f" {ANNA} "}, "anna"),
        ({"api-key": ANNA, **bearer(ANNA)}, "anna"),
        ({"api-key": ANNA, **bearer(BEN)}, None),
        ({"api-key": "wrong", **bearer(ANNA)}, None),
        ({"api-key": "", **bearer(ANNA)}, None),
        ({"api-key": ANNA, "Authorization": f"Basic {ANNA}"}, None),
        ({"api-key": "wrong"}, None),
        ({"api-key": f"Bearer {ANNA}"}, None),
        ({"api-key": "schlüssel"}, None),
        ({"api-key": ""}, None),
        ({}, None),
    ],
)
async def test_api_key_in_either_header(start: Start, headers: dict[str, str], owner: str | None) -> None:
    api = await start(keys=KEYS)
    api.client.headers.popall("Authorization")
    async with api.get("/v1/capabilities", headers=headers) as response:
        if owner is not None:
            assert (await read_json(response))["auth"]["owner"] == owner
            return
        error = await read_error(response, 401, "invalid_api_key")
        assert error["message"] == "Incorrect API key provided."
        assert response.headers["WWW-Authenticate"] == "Bearer"


# --- paths -----------------------------------------------------------------------------------------------------------


async def raw(api: Api, method: str, target: str, body: Json | None = None, **headers: str) -> RawResponse:
    """The answer to a request whose target is sent as it stands."""
    async with await RawConnection.open(api.url) as wire:
        await wire.request(method, target, body, **headers)
        return await wire.answer()


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "//v1//chat/completions", "/v1/chat/completions///"])
async def test_extra_slashes_are_ignored(api: Api, path: str) -> None:
    api.model.script = [Reply(text="Hello.")]
    answer = await raw(api, "POST", path, user("hi"), Authorization=f"Bearer {KEY}")
    assert answer.status == 200 and answer.json["choices"][0]["message"]["content"] == "Hello."
    assert [text for _, text in sent_messages(api.model.requests[0])] == ["hi"]


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("//v1/models", "invalid_api_key"),
        ("/v1/models/", "invalid_api_key"),
        ("/v1//models?limit=1", "invalid_api_key"),
        ("//metrics//", "invalid_api_key"),
        ("/api/sessions//", "invalid_api_key"),
        ("http://127.0.0.1//v1/models/", "invalid_api_key"),
        ("/health/../v1/models", "not_found"),
        ("/health//..//v1/models", "not_found"),
        ("/v1%2Fmodels", "not_found"),
        ("//nothing//here/", "not_found"),
        ("/p//v1/models", "profile_not_found"),
    ],
)
async def test_extra_slashes_do_not_bypass_auth(api: Api, target: str, code: str) -> None:
    answer = await raw(api, "GET", target)
    check_headers(answer.headers)
    assert check_envelope(answer.status, answer.json)["code"] == code and answer.status in (401, 404)


@pytest.mark.parametrize("target", ["//health", "/health/", "///", "/v1/health//?x=1", "http://127.0.0.1//health/"])
async def test_public_routes_with_extra_slashes(api: Api, target: str) -> None:
    answer = await raw(api, "GET", target, Accept="application/json")
    assert answer.status == 200 and ("status" in answer.json or answer.json["name"] == "hermes")


async def test_extra_slashes_keep_query_and_owner_check(start: Start) -> None:
    api = await start(keys=KEYS)
    for name in ("one", "two"):
        async with api.post("/api/sessions//", {"id": name}, headers=bearer(ANNA)) as response:
            await read_json(response, 201)
    async with api.get("//api/sessions/?limit=1", headers=bearer(ANNA)) as response:
        assert len((await read_json(response))["data"]) == 1
    async with api.get("/api//sessions/one/", headers=bearer(BEN)) as response:
        await read_error(response, 404, "session_not_found")


# --- encodings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, zstd", "nonsense", "identitygzip"])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/runs", "/api/sessions/mine/chat"])
async def test_unsupported_content_encoding_names_supported(api: Api, path: str, encoding: str) -> None:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    # The magic number of zstd: bytes as a client would send them.
    async with api.client.post(api.url + path, data=b"\x28\xb5\x2f\xfd\x04\x00", headers=headers) as response:
        message = (await read_error(response, 415, "unsupported_media_type"))["message"]
        assert encoding in message and "gzip or deflate, or uncompressed" in message
        assert response.headers["Accept-Encoding"] == "gzip, deflate"


# --- counting --------------------------------------------------------------------------------------------------------

COUNT = "/v1/responses/input_tokens"


async def input_tokens(api: Api, **body: Any) -> int:
    async with api.post(COUNT, body, headers=body.pop("headers", {})) as response:
        payload = await read_json(response)
    assert payload == {"object": "response.input_tokens", "input_tokens": payload["input_tokens"]}
    return int(payload["input_tokens"])


async def test_count_tokens_asks_no_model(api: Api) -> None:
    few = await input_tokens(api, input="hi")
    long_text = "word " * 1000
    longer = {
        "input": await input_tokens(api, input=long_text),
        "items": await input_tokens(
            api, input=[{"role": "user", "content": long_text}, {"role": "user", "content": "hi"}]
        ),
        "instructions": await input_tokens(api, input="hi", instructions=long_text),
    }
    for name, tokens in longer.items():
        assert 800 < tokens - few < 2500, name
    brief, wordy = [
        await input_tokens(api, input="hi", tools=[{"type": "function", "name": "f", "description": description}])
        for description in ("x", long_text)
    ]
    assert 800 < wordy - brief < 2500
    assert few > 500  # the agent's own prompt and tools are part of every request
    assert await input_tokens(api, input="hi", headers={"X-Hermes-Toolsets": "none"}) < few
    assert api.model.requests == []
    for path in ("/api/sessions", "/v1/runs"):
        async with api.get(path) as response:
            assert (await read_json(response))["data"] == []


async def test_count_tokens_includes_history(api: Api) -> None:
    few = await input_tokens(api, input="hi")
    api.model.script = [Reply(text="word " * 1000)]
    headers = {"X-Hermes-Session-Id": "hall"}
    async with api.post("/v1/responses", {"input": "hi"}, headers=headers) as response:
        body = await read_json(response)
    assert await input_tokens(api, input="hi", previous_response_id=body["id"]) > few + 800
    assert await input_tokens(api, input="hi", headers=headers) > few + 800
    async with api.get("/api/sessions/hall/messages") as response:
        assert (await read_json(response))["total"] == 2
    assert len(api.model.requests) == 1


async def test_count_tokens_over_window_does_not_compact(start: Start) -> None:
    settings = {"model": {"default": "m", "base_url": "http://127.0.0.1:9/v1", "context_length": 4096}}
    api = await start(settings=settings)
    history = [{"role": ("user", "assistant")[n % 2], "content": "word " * 300} for n in range(30)]
    assert await input_tokens(api, input=[*history, {"role": "user", "content": "hi"}]) > 4096


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "missing_required_parameter"),
        ({"input": 1}, 400, "invalid_type"),
        ({"input": "hi", "previous_response_id": "resp_none"}, 404, "previous_response_not_found"),
        ({"input": "hi", "provider": "nobody"}, 400, "invalid_value"),
    ],
)
async def test_count_tokens_rejects_invalid_requests(api: Api, body: Json, status: int, code: str) -> None:
    async with api.post(COUNT, body) as response:
        await read_error(response, status, code)


async def test_count_tokens_of_foreign_session_is_404(start: Start) -> None:
    api = await start(keys=KEYS)
    async with api.post("/api/sessions", {"id": "hers"}, headers=bearer(ANNA)) as response:
        await read_json(response, 201)
    headers = {**bearer(BEN), "X-Hermes-Session-Id": "hers"}
    async with api.post(COUNT, {"input": "hi"}, headers=headers) as response:
        await read_error(response, 404, "session_not_found")
