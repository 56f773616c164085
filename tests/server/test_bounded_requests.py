"""What a request may make the server do is bounded: fields, levels, echoed text, inflated bodies, odd heads."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from typing import Any

import pytest

from hermes.core.limits import JSON_DEPTH_MAX, JSON_FIELDS_MAX, JSON_VALUES_MAX
from hermes.server import request_bodies
from hermes.server.errors import ApiError
from support.model_server import Reply
from support.waiting import DEADLINE_S

from .clients import Json, RawConnection, check_envelope, check_headers, read_error, read_json, user
from .conftest import KEY, Api, Start

CHAT, RESPONSES, SESSIONS, JOBS = "/v1/chat/completions", "/v1/responses", "/api/sessions", "/api/jobs"
TAKERS = [CHAT, RESPONSES, "/v1/responses/compact", "/v1/conversations", "/v1/runs", SESSIONS, JOBS]
TAKERS += ["/api/sessions/import"]


def many(count: int) -> Json:
    return {f"field_{number}": 1 for number in range(count)}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"x": value}
    return value


# ---- fields, values and levels of a body

TOO_MUCH: list[tuple[str, Json, str, str | None, str]] = [
    ("fields", many(JSON_FIELDS_MAX + 1), "too_many_fields", None, str(JSON_FIELDS_MAX)),
    ("fields below", {"a": [1, {"b": many(JSON_FIELDS_MAX + 1)}]}, "too_many_fields", "a[1].b", str(JSON_FIELDS_MAX)),
    ("values", {"a": [0] * JSON_VALUES_MAX}, "too_many_fields", None, str(JSON_VALUES_MAX)),
    ("levels", {"a": nested(JSON_DEPTH_MAX)}, "invalid_json", "a" + ".x" * (JSON_DEPTH_MAX - 1), str(JSON_DEPTH_MAX)),
]


@pytest.mark.parametrize("path", TAKERS)
async def test_too_many_fields_are_rejected(api: Api, path: str) -> None:
    for name, body, code, param, limit in TOO_MUCH:
        data = json.dumps(body, separators=(",", ":")).encode()
        async with api.post(path, data=data, headers={"Idempotency-Key": name.replace(" ", "-")}) as response:
            error = await read_error(response, 400, code, param)
        assert limit in error["message"]
        assert (param or "body") in error["message"]


def test_too_many_json_values_are_rejected_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bodies.msgspec.json, "decode", lambda data: pytest.fail("it was read"))
    for item in (b"[]", b"{}", b'{"\\"[":"\\\\"}'):
        data = b'{"a": [' + b",".join([item] * (JSON_VALUES_MAX + 1)) + b"]}"
        for body in (data, data.decode()):
            with pytest.raises(ApiError) as caught:
                request_bodies.as_object(body)
            assert caught.value.code == "too_many_fields"


def test_brackets_in_text_are_not_counted() -> None:
    text = '[{"' * (JSON_VALUES_MAX + 1) + "\\"
    assert request_bodies.as_object(json.dumps({"a": text})) == {"a": text}


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (r"a\ud800b", "a\ufffdb"),
        (r"a\uDFFFb", "a\ufffdb"),
        (r"\ud800\ud83d\ude42\ude42", "\ufffd🙂\ufffd"),
        (r"\ude42\ud83d", "\ufffd\ufffd"),
        (r"\\ud800 \ud800", r"\ud800" + " \ufffd"),
        (r"\\\ud800", "\\\ufffd"),
        (r"\ud83d\\ude42", "\ufffd\\ude42"),
    ],
)
def test_lone_surrogates_in_json_are_replaced(escaped: str, text: str) -> None:
    for data in (f'{{"a": "{escaped}"}}', f'{{"a": "{escaped}"}}'.encode()):
        assert request_bodies.as_object(data) == {"a": text}


def test_surrogate_replacement_is_not_per_character() -> None:
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    data = b'{"a": [' + b",".join([rb'"\ud800"'] * 5000) + b"]}"
    sys.setprofile(count)
    try:
        request_bodies.as_object(data)
    finally:
        sys.setprofile(None)
    assert calls < 100


async def test_patch_with_too_many_fields_is_rejected(api: Api) -> None:
    async with api.post(SESSIONS, {}) as response:
        session_id = (await read_json(response, 201))["session"]["id"]
    async with api.patch(f"{SESSIONS}/{session_id}", many(JSON_FIELDS_MAX + 1)) as response:
        await read_error(response, 400, "too_many_fields")


async def test_websocket_message_with_too_many_fields_is_rejected(api: Api) -> None:
    async with api.client.ws_connect(f"{api.url}{RESPONSES}") as socket:
        for _, body, code, param, _ in TOO_MUCH:
            await socket.send_json({"type": "response.create", **body})
            error = (await socket.receive_json(timeout=DEADLINE_S))["error"]
            assert (error["code"], error["param"]) == (code, param)


async def test_ignored_header_is_limited(start: Start) -> None:
    api = await start(Reply(text="Hello."))
    unknown = {f"unknown_{number}_é": 1 for number in range(JSON_FIELDS_MAX - 1)}
    async with api.post(CHAT, {**unknown, **user()}) as response:
        await read_json(response)
        listed = response.headers["X-Hermes-Ignored"]
    assert 480 < len(listed.encode()) <= 512
    assert listed.split(", ") == list(unknown)[: listed.count(",") + 1]


# ---- what an error quotes

LONG = "sk-" * 3_000
ECHOES: list[tuple[str, str, Any, dict[str, str], int]] = [
    ("PATCH", f"{SESSIONS}/{{id}}", {LONG: 1}, {}, 400),
    ("GET", f"/v1/models/{LONG}", None, {}, 404),
    ("GET", f"/v1/runs/{LONG}", None, {}, 404),
    ("GET", f"/nowhere/{LONG}", None, {}, 404),
    ("PUT", f"/v1/models/{LONG}", None, {}, 405),
    ("POST", RESPONSES, {"input": "x", "previous_response_id": LONG}, {}, 404),
    ("POST", CHAT, {"messages": [{"role": LONG, "content": "x"}]}, {}, 400),
    ("POST", CHAT, user(model=LONG), {"X-Hermes-Toolsets": LONG}, 400),
    ("GET", f"{SESSIONS}?limit={LONG}", None, {}, 400),
    ("GET", f"{SESSIONS}?cursor={LONG}", None, {}, 400),
]


@pytest.mark.parametrize(("method", "path", "body", "headers", "status"), ECHOES)
async def test_error_quotes_input_briefly(
    api: Api, method: str, path: str, body: Any, headers: dict[str, str], status: int
) -> None:
    async with api.post(SESSIONS, {}) as response:
        path = path.replace("{id}", (await read_json(response, 201))["session"]["id"])
    async with api.client.request(method, api.url + path, json=body, headers=headers) as response:
        error = check_envelope(status, await response.json())
        assert response.status == status, error
    assert len(error["message"]) < 800
    assert len(error["param"] or "") < 800


async def test_secret_in_field_name_is_redacted(api: Api) -> None:
    async with api.post(SESSIONS, {}) as response:
        session_id = (await read_json(response, 201))["session"]["id"]
    async with api.patch(f"{SESSIONS}/{session_id}", {KEY: 1}) as response:
        error = await read_error(response, 400, "unsupported_session_field", "[redacted]")
    assert KEY not in json.dumps(error)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", f"/nowhere/{KEY}", 404), ("GET", f"/p/{KEY}/v1/models", 404), ("PUT", f"/v1/models/{KEY}", 405)],
)
async def test_secret_in_path_is_redacted(api: Api, method: str, path: str, status: int) -> None:
    async with api.client.request(method, api.url + path) as response:
        error = check_envelope(status, await response.json())
    assert KEY not in json.dumps(error) and "[redacted]" in error["message"]


# ---- compressed bodies

PACKED = gzip.compress(json.dumps(user("hello " * 50)).encode())
REFUSED: list[tuple[str, Json, str, str, dict[str, str], int]] = [
    ("no key", {}, "POST", CHAT, {"Authorization": ""}, 401),
    ("wrong key", {}, "POST", CHAT, {"Authorization": "Bearer wrong"}, 401),
    ("wrong origin", {}, "POST", CHAT, {"Origin": "https://other.example"}, 403),
    ("wrong host", {"key": ""}, "POST", CHAT, {"Host": "other.example"}, 403),
    ("unknown route", {}, "POST", "/v1/nowhere", {}, 404),
    ("wrong method", {}, "PUT", CHAT, {}, 405),
    ("wrong type", {}, "POST", CHAT, {"Content-Type": "multipart/form-data; boundary=x"}, 415),
    ("unknown encoding", {}, "POST", CHAT, {"Content-Encoding": "br"}, 415),
]


@pytest.fixture
def inflaters(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that anything in the process began to inflate."""
    starts: list[int] = []
    make = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", lambda *args, **more: starts.append(1) or make(*args, **more))
    return starts


@pytest.mark.parametrize(
    ("options", "method", "path", "headers", "status"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
async def test_body_of_rejected_request_is_not_inflated(
    start: Start,
    inflaters: list[int],
    options: Json,
    method: str,
    path: str,
    headers: dict[str, str],
    status: int,
) -> None:
    api = await start(**options)
    sent = {"Content-Encoding": "gzip", **headers}
    async with api.client.request(method, api.url + path, data=PACKED, headers=sent) as response:
        check_envelope(status, await response.json())
        assert response.status == status
    assert inflaters == []


async def test_body_of_rate_limited_request_is_not_inflated(start: Start, inflaters: list[int]) -> None:
    api = await start(
        Reply(text="Hello."), keys=[{"name": "a", "key": "k" * 8 + KEY, "scopes": ["chat"], "requests_per_minute": 1}]
    )
    headers = {"Authorization": f"Bearer {'k' * 8 + KEY}", "Content-Encoding": "gzip"}
    async with api.post(CHAT, data=PACKED, headers=headers) as response:
        await read_json(response)
    assert len(inflaters) == 1
    async with api.post(CHAT, data=PACKED, headers=headers) as response:
        await read_error(response, 429, "rate_limit_exceeded")
    assert len(inflaters) == 1


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate", "Deflate", "identity"])
async def test_compressed_bodies_are_read(start: Start, encoding: str) -> None:
    api = await start(Reply(text="Hello."))
    data = json.dumps(user()).encode()
    packed = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress}.get(encoding.lower(), bytes)
    async with api.post(CHAT, data=packed(data), headers={"Content-Encoding": encoding}) as response:
        await read_json(response)


BROKEN = [
    ("too repetitive", gzip.compress(b'{"a": "' + b" " * 5_000_000 + b'"}'), 413, "body_too_large"),
    ("too large", gzip.compress(bytes(range(256)) * 42_000, 1), 413, "body_too_large"),
    ("no gzip", b'{"messages": []}', 400, "bad_request"),
    ("cut", PACKED[:-9], 400, "bad_request"),
    ("more after it", PACKED + b"more", 400, "bad_request"),
]


@pytest.mark.parametrize(("packed", "status", "code"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
async def test_invalid_compressed_body_is_rejected(api: Api, packed: bytes, status: int, code: str) -> None:
    async with api.post(CHAT, data=packed, headers={"Content-Encoding": "gzip"}) as response:
        await read_error(response, status, code)


# ---- heads

HEADERS = [
    *("Authorization", "Origin", "X-Request-Id", "X-Hermes-Session-Id", "X-Hermes-Session-Key", "Idempotency-Key"),
    *("X-Hermes-Toolsets", "traceparent", "Content-Type", "Content-Encoding", "Last-Event-ID", "X-Forwarded-Host"),
    *("Cookie", "X-Anything"),
]


@pytest.mark.parametrize(("name", "param"), [*((name, name) for name in HEADERS), (KEY, "[redacted]")])
async def test_non_utf8_header_is_rejected(api: Api, name: str, param: str) -> None:
    lines = {"Host": b"127.0.0.1", "Authorization": f"Bearer {KEY}".encode(), name: b"Bearer caf\xe9"}
    head = b"".join(b"%s: %s\r\n" % (key.encode(), value) for key, value in lines.items())
    body = json.dumps(user()).encode()
    async with await RawConnection.open(api.url) as wire:
        await wire.send(b"POST %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n" % (CHAT.encode(), head, len(body)) + body)
        answer = await wire.answer()
    assert check_envelope(400, answer.json)["param"] == param
    assert answer.status == 400
    check_headers(answer.headers)


async def test_utf8_header_is_read(start: Start) -> None:
    api = await start(Reply(text="Hello."))
    async with api.post(CHAT, user(), headers={"X-Hermes-Session-Key": "café"}) as response:
        assert (await read_json(response))["choices"]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("hosts", ["", "Host: 127.0.0.1\r\nHost: 127.0.0.1\r\n"], ids=["none", "two"])
@pytest.mark.parametrize("key", ["", KEY], ids=["open", "keyed"])
async def test_missing_or_duplicate_host_is_rejected(start: Start, version: str, hosts: str, key: str) -> None:
    api = await start(key=key)
    async with await RawConnection.open(api.url) as wire:
        await wire.send(f"GET /health HTTP/{version}\r\n{hosts}Connection: close\r\n\r\n")
        answer = await wire.answer()
    assert answer.status == 400
    assert check_envelope(400, answer.json)["code"] == "bad_request"
    check_headers(answer.headers)


async def test_http_1_0_request_is_answered(api: Api) -> None:
    async with await RawConnection.open(api.url) as wire:
        await wire.send("GET /health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await wire.answer()).status == 200


UPGRADE = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
ODD_HEADS = [
    ("/health", "Expect: a-miracle\r\n", 417, "Expect"),
    ("/nowhere", "Expect: a-miracle\r\n", 417, "Expect"),
    (RESPONSES, f"{UPGRADE}Sec-WebSocket-Version: 13\r\n", 400, "Handshake"),
    (
        RESPONSES,
        f"{UPGRADE}Sec-WebSocket-Version: 1\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n",
        400,
        "version",
    ),
]


@pytest.mark.parametrize(("path", "lines", "status", "word"), ODD_HEADS)
async def test_http_library_rejections_have_error_envelope(
    api: Api, path: str, lines: str, status: int, word: str
) -> None:
    async with await RawConnection.open(api.url) as wire:
        await wire.send(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n{lines}\r\n")
        answer = await wire.answer()
    assert answer.status == status
    error = check_envelope(status, answer.json)
    assert error["code"] == "bad_request"
    assert word in error["message"]
    check_headers(answer.headers)


# ---- schemas of a client


def doubling(levels: int) -> Json:
    """A small schema that is checked 2 ** levels times."""
    named: Json = {"a0": {"type": "integer"}}
    for level in range(levels):
        named[f"a{level + 1}"] = {"anyOf": [{"$ref": f"#/$defs/a{level}"}] * 2}
    return {"$defs": named, "$ref": f"#/$defs/a{levels}"}


SCHEMAS: list[tuple[str, Json, str]] = [
    ("references that double", doubling(64), "unfolds"),
    ("a long chain of references", doubling(900), "unfolds|nested"),
    ("another document", {"$ref": "{url}/schema.json"}, "not in it"),
    ("another document by its id", {"$id": "{url}/a", "$ref": "b"}, "not in it"),
    ("a file", {"$ref": "file:///etc/hostname"}, "not in it"),
    ("another language of schemas", {"$schema": "{url}/schema"}, "malformed"),
    ("nothing there", {"$ref": "#/$defs/none"}, "not in it"),
    ("no pattern", {"type": "string", "pattern": "("}, "malformed"),
    ("a huge pattern", {"type": "string", "pattern": "((a{1,1000}){1,1000})"}, "malformed"),
]


@pytest.mark.parametrize(("schema", "message"), [row[1:] for row in SCHEMAS], ids=[row[0] for row in SCHEMAS])
async def test_uncheckable_strict_schema_is_rejected(api: Api, schema: Json, message: str) -> None:
    schema = json.loads(json.dumps(schema).replace("{url}", api.model.url))
    chat = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    text = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": schema}}
    for path, body in ((CHAT, user(response_format=chat)), (RESPONSES, {"input": "x", "text": text})):
        async with api.post(path, body) as response:
            error = await read_error(response, 400, "invalid_value")
        assert any(word in error["message"] for word in message.split("|")), error
    assert api.model.requests == []
