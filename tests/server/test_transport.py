"""What holds for every exchange: headers, ids, methods, keys, origins, hosts, and the one form of a refusal."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
import pytest

from support.model_server import Reply

from .clients import (
    JSON_TYPE,
    SECURITY,
    HeldModel,
    RawConnection,
    RawResponse,
    Stream,
    check_envelope,
    check_headers,
    check_stream_headers,
    read_error,
    read_json,
    user,
)
from .conftest import KEY, PROVIDER_KEY, Api, Start

CHAT = "/v1/chat/completions"
OPEN_PATHS = ["/health", "/v1/health", "/health/detailed", "/health/ready", "/", "/docs", "/openapi.json"]
PLAIN_GETS = ["/health", "/v1/models", "/v1/capabilities", "/v1/skills", "/v1/toolsets", "/api/sessions", "/v1/runs"]
REQUEST_HEADERS = [
    "Authorization",
    "Content-Type",
    "Idempotency-Key",
    "Last-Event-ID",
    "X-Request-Id",
    "X-Hermes-Session-Id",
    "X-Hermes-Session-Key",
    "X-Hermes-Seed-History",
    "X-Hermes-Detach",
    "X-Hermes-Approvals",
    "X-Hermes-Tool-Progress",
    "X-Hermes-Tool-Items",
    "X-Hermes-Reasoning",
    "X-Hermes-Toolsets",
    "X-Hermes-Timeout",
]
RESPONSE_HEADERS = [
    "X-Hermes-Session-Id",
    "X-Hermes-Session-Key",
    "X-Hermes-Run-Id",
    "X-Hermes-Model",
    "X-Hermes-History",
    "X-Hermes-Completed",
    "X-Hermes-Partial",
    "X-Hermes-Error",
    "X-Hermes-Ignored",
    "X-Hermes-Warning",
    "Idempotency-Replayed",
    "Retry-After",
    "x-should-retry",
]
ORIGIN = "https://app.example"


def bare(api: Api, method: str, path: str, **more: Any) -> Any:
    """A request without the key."""
    return aiohttp.request(method, api.url + path, **more)


# ---- headers of every response

ANSWERS: list[tuple[str, str, str, Any, dict[str, str], int, str | None]] = [
    ("ok", "GET", "/health", None, {}, 200, None),
    ("no key", "GET", "/v1/models", None, {"Authorization": ""}, 401, "invalid_api_key"),
    ("unknown path", "GET", "/v1/nowhere", None, {}, 404, "not_found"),
    ("unknown id", "GET", "/v1/models/nobody", None, {}, 404, "model_not_found"),
    ("wrong method", "PUT", "/health", None, {}, 405, "method_not_allowed"),
    ("bad body", "POST", CHAT, [], {}, 400, "invalid_body"),
    ("large body", "POST", CHAT, user("x" * 5000), {}, 413, "body_too_large"),
    ("foreign origin", "GET", "/health", None, {"Origin": "https://evil.example"}, 403, "origin_not_allowed"),
    ("form", "POST", CHAT, None, {"Content-Type": "multipart/form-data; boundary=x"}, 415, "unsupported_media_type"),
    ("no upgrade", "GET", "/v1/responses", None, {}, 426, "upgrade_required"),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "code"),
    [row[1:] for row in ANSWERS],
    ids=[row[0] for row in ANSWERS],
)
@pytest.mark.parametrize("own_id", [None, "my.id-1_A"])
async def test_common_headers_are_on_every_answer(
    start: Start, method: str, path: str, body: Any, headers: dict[str, str], status: int, code: str | None, own_id: str
) -> None:
    api = await start(max_body_bytes=2000)
    more = {"X-Request-Id": own_id} if own_id else {}
    async with api.client.request(method, api.url + path, json=body, headers={**headers, **more}) as response:
        assert response.status == status, await response.text()
        check_headers(response.headers, own_id)
        assert response.headers["Content-Type"] == JSON_TYPE
        if code is not None:
            assert check_envelope(status, await response.json())["code"] == code


async def test_common_headers_are_on_streams(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    async with api.post(CHAT, user(stream=True)) as response:
        assert response.status == 200
        check_stream_headers(response.headers)
        assert response.headers["X-Hermes-Session-Id"].startswith("api-")
        assert response.headers["X-Hermes-Run-Id"].startswith("run_")
        assert "X-Hermes-Session-Key" not in response.headers
    api.model.script = [Reply(text="Hello.")]
    async with api.post(CHAT, user(stream=True), headers={"X-Hermes-Session-Key": "kitchen"}) as response:
        assert response.headers["X-Hermes-Session-Key"] == "kitchen"


@pytest.mark.parametrize("request_id", ["", "with space", "ä", "x" * 129, "semi;colon", "<script>"])
async def test_invalid_request_id_is_replaced(api: Api, request_id: str) -> None:
    async with api.get("/health", headers={"X-Request-Id": request_id}) as response:
        check_headers(response.headers)


@pytest.mark.parametrize("request_id", ["a", "x" * 128, "req_7", "A.b_c-9"])
async def test_request_id_is_echoed(api: Api, request_id: str) -> None:
    async with api.get("/health", headers={"X-Request-Id": request_id}) as response:
        check_headers(response.headers, request_id)


PARSER = [
    ("garbage", b"\x00\x01\x02 garbage\r\n\r\n", 400, "bad_request"),
    ("odd version", b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n", 400, "bad_request"),
    ("header without colon", b"GET /health HTTP/1.1\r\nHost: x\r\nbroken\r\n\r\n", 400, "bad_request"),
    ("header folded into another", b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n", 400, "bad_request"),
    (
        "bad chunk",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        400,
        "bad_request",
    ),
    (
        "length and chunks",
        b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        400,
        None,
    ),
    (
        "bad length",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        400,
        "invalid_content_length",
    ),
    (
        "negative length",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        400,
        "invalid_content_length",
    ),
    (
        "two lengths",
        b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        400,
        None,
    ),
    ("long line", b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "headers_too_large"),
    ("long header", b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 20_000 + b"\r\n\r\n", 431, "headers_too_large"),
    (
        "many headers",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: aaaaaaaaaaaaaaaa\r\n" * 2000 + b"\r\n",
        431,
        "headers_too_large",
    ),
]


@pytest.mark.parametrize(("data", "status", "code"), [row[1:] for row in PARSER], ids=[row[0] for row in PARSER])
async def test_parser_errors_have_envelope(api: Api, data: bytes, status: int, code: str | None) -> None:
    async with await RawConnection.open(api.url) as wire:
        await wire.send(data)
        answer = await wire.answer()
    assert answer.status == status
    check_headers(answer.headers)
    error = check_envelope(status, answer.json)
    if code is not None:
        assert error["code"] == code


async def test_request_head_timeout_is_408(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes.server.application.HEADERS_S_MAX", 0.05)
    async with await RawConnection.open(api.url) as wire:
        await wire.send(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        answer = await wire.answer()
    assert answer.status == 408
    check_headers(answer.headers)
    assert check_envelope(408, answer.json)["code"] == "request_timeout"


async def test_second_request_head_timeout_is_408(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await RawConnection.open(api.url) as wire:
        await wire.request("GET", "/health")
        assert (await wire.answer()).status == 200
        monkeypatch.setattr("hermes.server.application.HEADERS_S_MAX", 0.05)
        await wire.send(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        answer = await wire.answer()
    assert answer.status == 408


async def test_keep_alive_connection_serves_several_requests(api: Api) -> None:
    async with await RawConnection.open(api.url) as wire:
        for _ in range(3):
            await wire.request("GET", "/health")
            answer: RawResponse = await wire.answer()
            assert (answer.status, answer.json["status"]) == (200, "ok")


# ---- methods and paths


@pytest.mark.parametrize("path", PLAIN_GETS)
async def test_head_method_matches_get(api: Api, path: str) -> None:
    async with api.get(path) as answer:
        status, headers = answer.status, dict(answer.headers)
        body = await answer.read()
    async with api.client.head(api.url + path) as response:
        assert response.status == status == 200
        assert await response.read() == b""
        check_headers(response.headers)
        assert response.headers["Content-Type"] == headers["Content-Type"]
        assert int(response.headers.get("Content-Length", len(body))) > 0


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/health", {"GET", "HEAD"}),
        ("GET", CHAT, {"POST"}),
        ("DELETE", "/v1/models", {"GET", "HEAD"}),
        ("PATCH", "/api/sessions", {"GET", "HEAD", "POST"}),
        ("POST", "/api/sessions/x", {"GET", "HEAD", "PATCH", "DELETE"}),
        ("PUT", "/v1/runs/x", {"GET", "HEAD", "DELETE"}),
    ],
)
async def test_wrong_method_is_405_with_allow(api: Api, method: str, path: str, allowed: set[str]) -> None:
    async with api.client.request(method, api.url + path) as response:
        await read_error(response, 405, "method_not_allowed")
        assert {name.strip() for name in response.headers["Allow"].split(",")} - {"OPTIONS"} == allowed


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "/v1",
        "/v1/chat",
        "/v1/embeddings",
        "/v1/completions",
        "/v1/audio/speech",
        "/health/more",
        "/%2e%2e/etc",
        "//healthy",
        "/v1/chat/completions/more",
        "/p/other/health",
    ],
)
async def test_unknown_path_is_404_without_key(api: Api, path: str) -> None:
    async with await RawConnection.open(api.url) as wire:
        await wire.request("GET", path)
        answer = await wire.answer()
    assert answer.status == 404
    check_headers(answer.headers)
    error = check_envelope(404, answer.json)
    assert error["code"] == ("profile_not_found" if path.startswith("/p/") else "not_found")


async def test_internal_error_names_only_request_id(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("the secret inside")

    monkeypatch.setattr(api.context, "toolsets", broken)
    with caplog.at_level(logging.ERROR):
        async with api.post(CHAT, user(), headers={"X-Request-Id": "trace-me"}) as response:
            assert response.status == 500
            check_headers(response.headers, "trace-me")
            error = check_envelope(500, await response.json())
    assert error["code"] == "internal_error"
    assert "trace-me" in error["message"]
    assert "secret inside" not in error["message"]
    assert "trace-me" in caplog.text


# ---- keys


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer schlüssel",
        f"Bearer {KEY} {KEY}",
        f"Token {KEY}",
    ],
)
async def test_invalid_key_is_401(api: Api, value: str | None) -> None:
    headers = {} if value is None else {"Authorization": value}
    async with bare(api, "GET", "/v1/models", headers=headers) as response:
        error = await read_error(response, 401, "invalid_api_key")
        assert error["message"] == "Incorrect API key provided."
        assert response.headers["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_auth_scheme_is_case_insensitive(api: Api, scheme: str) -> None:
    async with bare(api, "GET", "/v1/models", headers={"Authorization": f"{scheme} {KEY}"}) as response:
        await read_json(response)


async def test_non_text_key_is_rejected(api: Api) -> None:
    async with await RawConnection.open(api.url) as wire:
        await wire.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\x80\r\n\r\n")
        answer = await wire.answer()
    assert answer.status == 400
    assert check_envelope(400, answer.json)["param"] == "Authorization"


@pytest.mark.parametrize("path", OPEN_PATHS)
async def test_public_routes_need_no_key(api: Api, path: str) -> None:
    async with bare(api, "GET", path) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/capabilities"),
        ("POST", CHAT),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/r"),
        ("GET", "/v1/responses"),
        ("DELETE", "/v1/responses/r"),
        ("POST", "/v1/runs"),
        ("GET", "/v1/runs/r/events"),
        ("GET", "/api/sessions"),
        ("POST", "/api/sessions/s/chat"),
        ("GET", "/v1/skills"),
    ],
)
async def test_protected_routes_require_key(api: Api, method: str, path: str) -> None:
    async with bare(api, method, path) as response:
        await read_error(response, 401, "invalid_api_key")


async def test_key_is_checked_before_body(api: Api) -> None:
    async with bare(api, "POST", CHAT, data=b"not json") as response:
        await read_error(response, 401, "invalid_api_key")


# ---- origins


def check_cors(headers: Any, origin: str = ORIGIN) -> None:
    assert headers["Access-Control-Allow-Origin"] == origin
    assert headers.get("Vary") == (None if origin == "*" else "Origin")
    assert headers["Access-Control-Allow-Methods"] == "GET, POST, PATCH, DELETE, OPTIONS"
    allowed = {name.strip().lower() for name in headers["Access-Control-Allow-Headers"].split(",")}
    assert {name.lower() for name in REQUEST_HEADERS} <= allowed
    exposed = {name.strip().lower() for name in headers["Access-Control-Expose-Headers"].split(",")}
    assert {name.lower() for name in RESPONSE_HEADERS} <= exposed


@pytest.mark.parametrize("listed", [[ORIGIN, "http://localhost:3000"], ["*"]], ids=["listed", "any"])
@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("GET", "/health", KEY, 200),
        ("GET", "/v1/models", "no", 401),
        ("GET", "/nowhere", KEY, 404),
        ("PUT", "/health", KEY, 405),
        ("POST", CHAT, KEY, 400),
        ("OPTIONS", CHAT, "no", 200),
    ],
)
async def test_cors_allowed_origin_on_every_answer(
    start: Start, listed: list[str], method: str, path: str, key: str, status: int
) -> None:
    api = await start(cors_origins=listed)
    headers = {"Origin": ORIGIN, "Authorization": f"Bearer {key}"}
    if method == "OPTIONS":
        headers["Access-Control-Request-Method"] = "POST"
    async with bare(api, method, path, headers=headers) as response:
        assert response.status == status
        check_cors(response.headers, "*" if listed == ["*"] else ORIGIN)
        check_headers(response.headers)
        assert response.headers.get("Access-Control-Max-Age") == ("600" if method == "OPTIONS" else None)


async def test_cors_allowed_origin_on_streams(start: Start) -> None:
    api = await start(Reply(text="Hello."), cors_origins=[ORIGIN])
    async with api.post(CHAT, user(stream=True), headers={"Origin": ORIGIN}) as response:
        check_stream_headers(response.headers)
        check_cors(response.headers)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS", "PUT"])
@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "https://app.example.evil",
        "http://app.example",
        "https://APP.example:443x",
        "garbage",
    ],
)
async def test_cors_foreign_origin_is_403(start: Start, method: str, origin: str) -> None:
    api = await start(cors_origins=[ORIGIN])
    async with api.client.request(method, api.url + "/health", headers={"Origin": origin}) as response:
        assert response.status == 403
        assert "Access-Control-Allow-Origin" not in response.headers
        check_headers(response.headers)
        if method != "HEAD":
            assert check_envelope(403, await response.json())["code"] == "origin_not_allowed"


async def test_no_cors_headers_without_origin(start: Start) -> None:
    api = await start(cors_origins=[ORIGIN])
    async with api.get("/health") as response:
        assert [name for name in response.headers if name.startswith("Access-Control")] == []


@pytest.mark.parametrize("key", [KEY, ""], ids=["with key", "open"])
async def test_cors_same_origin_page_is_allowed(start: Start, key: str) -> None:
    api = await start(key=key)
    async with api.get("/v1/models", headers={"Origin": api.url}) as response:
        await read_json(response)
        assert "Access-Control-Allow-Origin" not in response.headers


# ---- hosts


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8642", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8642", 200),
        ("named.lan", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("0x7f.evil", 403),
        ("", 403),
    ],
)
async def test_open_server_checks_host_header(start: Start, host: str, status: int) -> None:
    api = await start(key="", allowed_hosts=["named.lan"])
    async with await RawConnection.open(api.url) as wire:
        await wire.send(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n")
        answer = await wire.answer()
    assert answer.status == status
    check_headers(answer.headers)
    if status == 403:
        assert check_envelope(403, answer.json)["code"] == "host_not_allowed"


async def test_dns_rebinding_page_is_rejected(start: Start) -> None:
    api = await start(key="")
    async with api.get("/v1/models", headers={"Host": "evil.example", "Origin": "http://evil.example"}) as response:
        assert response.status == 403


async def test_server_with_key_accepts_any_host(api: Api) -> None:
    async with api.get("/v1/models", headers={"Host": "hermes.example"}) as response:
        await read_json(response)


# ---- streams and silence


async def test_stream_request_errors_precede_first_byte(api: Api) -> None:
    async with api.post(CHAT, {"messages": [], "stream": True}) as response:
        await read_error(response, 400, "invalid_value", "messages")


async def test_stream_keepalive(start: Start) -> None:
    async with HeldModel(Reply(text="Hello.")) as model:
        api = await start(settings=model.settings, keepalive_seconds=0.05)
        async with api.post(CHAT, user(stream=True)) as response:
            stream = Stream(response)
            await stream.next()
            assert await stream.block() == ": keepalive"
            assert await stream.block() == ": keepalive"
            model.release_all()
            await stream.rest()


async def test_health_answers_while_turns_run(start: Start) -> None:
    async with HeldModel(*[Reply(text="Hello.")] * 3) as model:
        api = await start(settings=model.settings)
        turns = [asyncio.create_task(api.ask(f"question {number}")) for number in range(3)]
        await model.wait_for_request(3)
        async with api.get("/health") as response:
            assert (await read_json(response))["status"] == "ok"
        model.release_all()
        await asyncio.gather(*turns)


# ---- secrets


async def test_provider_error_text_is_redacted_everywhere(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    for stream in (False, True):
        api.model.script = [Reply(status=401, error="bad key", quote_key=True)]
        async with api.post(CHAT, user(f"hi {stream}", stream=stream)) as response:
            text = await response.text() + str(dict(response.headers))
        assert PROVIDER_KEY not in text
        assert "[redacted]" in text
    assert PROVIDER_KEY not in caplog.text


@pytest.mark.parametrize("secret", [KEY, PROVIDER_KEY], ids=["server key", "provider key"])
async def test_server_keys_are_redacted_in_answers(api: Api, secret: str) -> None:
    text = ["It is ", secret[:9], secret[9:20], secret[20:], " indeed, ", secret[:5], "."]
    api.model.script = [Reply(text=text), Reply(text=text, continues=False)]
    async with api.post(CHAT, user(stream=True)) as response:
        body = await response.text()
    assert secret[:12] not in body
    answer = await api.ask("once more")
    assert answer["choices"][0]["message"]["content"] == f"It is [redacted] indeed, {secret[:5]}."


def test_security_header_table_is_complete() -> None:
    assert len(SECURITY) == 8
