"""Forms that requests of other services' clients have: headers, paths, encodings, levels, and counting tokens."""

from __future__ import annotations

import pytest

from support.model_server import Reply

from .clients import Json, RawAnswer, Wire, check_envelope, check_headers, refused, sent, told, user
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
]


@pytest.mark.parametrize(("model", "level"), [("gpt-5", "high"), ("gpt-5.2", "xhigh")])
@pytest.mark.parametrize(("path", "body"), EFFORTS)
async def test_the_highest_effort_becomes_the_highest_that_the_model_has(
    start: Start, path: str, body: Json, model: str, level: str
) -> None:
    api = await start(Reply(text="Hi."), model_routes={"thinker": {"model": model}})
    async with api.post("/api/sessions", {"id": "mine"}) as response:
        await told(response, 201)
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
async def test_the_key_may_be_in_either_header(start: Start, headers: dict[str, str], owner: str | None) -> None:
    api = await start(keys=KEYS)
    api.client.headers.popall("Authorization")
    async with api.get("/v1/capabilities", headers=headers) as response:
        if owner is not None:
            assert (await told(response))["auth"]["owner"] == owner
            return
        error = await refused(response, 401, "invalid_api_key")
        assert error["message"] == "Incorrect API key provided."
        assert response.headers["WWW-Authenticate"] == "Bearer"


# --- paths -----------------------------------------------------------------------------------------------------------


async def raw(api: Api, method: str, target: str, body: Json | None = None, **headers: str) -> RawAnswer:
    """The answer to a request whose target is sent as it stands."""
    async with await Wire.open(api.url) as wire:
        await wire.request(method, target, body, **headers)
        return await wire.answer()


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "//v1//chat/completions", "/v1/chat/completions///"])
async def test_slashes_too_many_change_nothing_about_a_request(api: Api, path: str) -> None:
    api.model.script = [Reply(text="Hello.")]
    answer = await raw(api, "POST", path, user("hi"), Authorization=f"Bearer {KEY}")
    assert answer.status == 200 and answer.json["choices"][0]["message"]["content"] == "Hello."
    assert [text for _, text in sent(api.model.requests[0])] == ["hi"]


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
async def test_slashes_too_many_open_nothing(api: Api, target: str, code: str) -> None:
    answer = await raw(api, "GET", target)
    check_headers(answer.headers)
    assert check_envelope(answer.status, answer.json)["code"] == code and answer.status in (401, 404)


@pytest.mark.parametrize("target", ["//health", "/health/", "///", "/v1/health//?x=1", "http://127.0.0.1//health/"])
async def test_what_is_open_stays_open(api: Api, target: str) -> None:
    answer = await raw(api, "GET", target, Accept="application/json")
    assert answer.status == 200 and ("status" in answer.json or answer.json["name"] == "hermes")


async def test_a_query_is_kept_and_an_id_is_still_its_owners(start: Start) -> None:
    api = await start(keys=KEYS)
    for name in ("one", "two"):
        async with api.post("/api/sessions//", {"id": name}, headers=bearer(ANNA)) as response:
            await told(response, 201)
    async with api.get("//api/sessions/?limit=1", headers=bearer(ANNA)) as response:
        assert len((await told(response))["data"]) == 1
    async with api.get("/api//sessions/one/", headers=bearer(BEN)) as response:
        await refused(response, 404, "session_not_found")


# --- encodings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, zstd", "nonsense"])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/runs", "/api/sessions/mine/chat"])
async def test_an_encoding_that_is_not_taken_says_which_are(api: Api, path: str, encoding: str) -> None:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    # The magic number of zstd: bytes as a client would send them.
    async with api.client.post(api.url + path, data=b"\x28\xb5\x2f\xfd\x04\x00", headers=headers) as response:
        message = (await refused(response, 415, "unsupported_media_type"))["message"]
        assert encoding in message and "gzip or deflate, or uncompressed" in message
        assert response.headers["Accept-Encoding"] == "gzip, deflate"
