"""Requests that are wrong: each is refused with a 4xx in the one form, naming what is wrong."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from support.model_server import Reply

from .clients import Json, RawConnection, check_envelope, check_headers, read_error, read_json, sent_messages, user
from .conftest import Api, Start
from .wrong import ASK, BY_ID, CHAT, ODD_IDS, RESPONSES, RUNS, SESSIONS, WRONG_CHAT, WRONG_ELSEWHERE, WRONG_RESPONSES

# Every route that takes a body and needs nothing made before.
TAKERS = [CHAT, RESPONSES, "/v1/responses/compact", "/v1/conversations", RUNS, SESSIONS, "/api/sessions/import"]

# ---- bodies that are no JSON object

DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
NO_JSON = [
    b"{", b"nonsense", b"{'a': 1}", b'{"a": 1,}', b'{"a": 1} x', b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}',
    b"\xff\xfe\x00", b'{"a": "\xff"}', b'{"a": "\xed\xa0\x80"}', '{"a": 1}'.encode("utf-16"), DEEP,
    b'{"a":' * 60_000 + b"1" + b"}" * 60_000, b'{"a": "line\nbreak"}', b"{}{}", b'{"a": 01}',
]  # fmt: skip
NO_OBJECT = [b"[]", b"[{}]", b'"text"', b"1", b"true", b"null", b"1.5e3"]


@pytest.mark.parametrize("path", TAKERS)
async def test_non_object_body_is_400(api: Api, path: str) -> None:
    for data in NO_JSON:
        async with api.post(path, data=data, headers={"Content-Type": "application/json"}) as response:
            error = await read_error(response, 400, "invalid_json")
            assert "Invalid JSON" in error["message"], data[:50]
    for data in NO_OBJECT:
        async with api.post(path, data=data, headers={"Content-Type": "application/json"}) as response:
            await read_error(response, 400, "invalid_body")


async def test_empty_body_is_empty_object(api: Api) -> None:
    async with api.post(CHAT, data=b"") as response:
        await read_error(response, 400, "missing_required_parameter", "messages")
    async with api.post(SESSIONS, data=b"") as response:
        await read_json(response, 201)


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "application/x-www-form-urlencoded"])
async def test_form_body_is_415(api: Api, kind: str) -> None:
    for path in TAKERS:
        async with api.post(path, data=b"{}", headers={"Content-Type": kind}) as response:
            await read_error(response, 415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["text/plain", "application/octet-stream", "application/json; charset=latin-1", "x"])
async def test_other_content_types_are_read_as_json(api: Api, kind: str) -> None:
    api.model.script = [Reply(text="Hello.")]
    async with api.post(CHAT, data=json.dumps(user("grüße")).encode(), headers={"Content-Type": kind}) as response:
        await read_json(response)


async def test_lone_surrogate_is_replaced(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    async with api.post(CHAT, data=b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}') as response:
        await read_json(response)
    assert sent_messages(api.model.requests[0]) == [("user", "a\ufffdb")]


STREAM_FLAGS = [
    (True, True), (False, False), (1, True), (0, False), (None, False), ("true", True), ("FALSE", False), ("1", True),
    ("0", False), ("Yes", True), ("no", False), ("ON", True), ("off", False),
]  # fmt: skip


async def test_stream_flag_spellings(api: Api, subtests: pytest.Subtests) -> None:
    for value, streamed in STREAM_FLAGS:
        api.model.script = [Reply(text="Hello.", continues=False)]
        with subtests.test(value=value):
            async with api.post(CHAT, user(stream=value)) as response:
                assert response.status == 200
                assert response.content_type == ("text/event-stream" if streamed else "application/json")
                await response.read()


# ---- wrong values, wherever they stand


async def test_invalid_chat_completion_names_param(api: Api, subtests: pytest.Subtests) -> None:
    for body, code, param in WRONG_CHAT:
        with subtests.test(body=body):
            await refuses(api, "POST", CHAT, body, code, param)
            assert api.model.requests == []


async def refuses(api: Api, method: str, path: str, body: Any, code: str, param: str | None) -> Json:
    """The error of a 400; an empty code stands for any, and a beginning is enough."""
    async with api.client.request(method, api.url + path, json=body) as response:
        error: Json = (await read_json(response, 400))["error"]
    assert error["code"].startswith(code), error
    # Codes that say nothing in particular must not stand for a wrong body.
    assert error["code"] not in ("bad_request", "not_found"), error
    if param is not None:
        assert error["param"] == param, error
    return error


async def test_invalid_response_request_names_param(api: Api, subtests: pytest.Subtests) -> None:
    for body, code, param in WRONG_RESPONSES:
        with subtests.test(body=body):
            error = await refuses(api, "POST", RESPONSES, body, code, param)
            if "conversation" in body and "previous_response_id" in body:
                assert "Cannot use both" in error["message"]
            assert api.model.requests == []


async def test_invalid_request_on_other_routes_names_param(api: Api, subtests: pytest.Subtests) -> None:
    await read_json(await api.post(SESSIONS, {"id": "s1"}), 201)
    for method, path, body, code, param in WRONG_ELSEWHERE:
        with subtests.test(method=method, path=path, body=body):
            await refuses(api, method, path, body, code, param)


HEADERS = [
    ({"X-Hermes-Session-Id": "a/b"}, "invalid_session_id"),
    ({"X-Hermes-Session-Id": "..\\x"}, "invalid_session_id"),
    ({"X-Hermes-Session-Id": "a..b"}, "invalid_session_id"),
    ({"X-Hermes-Session-Id": "C:x"}, "invalid_session_id"),
    ({"X-Hermes-Session-Id": "x" * 257}, "invalid_session_id"),
    ({"X-Hermes-Session-Id": "search"}, "invalid_session_id"),
    ({"X-Hermes-Session-Id": "import"}, "invalid_session_id"),
    ({"X-Hermes-Session-Key": "x" * 257}, "invalid_session_key"),
    ({"X-Hermes-Toolsets": "todo,nonsense"}, "invalid_value"),
    ({"X-Hermes-Timeout": "soon"}, "invalid_value"),
    ({"X-Hermes-Timeout": "-1"}, "invalid_value"),
    ({"Idempotency-Key": "x" * 256}, "invalid_idempotency_key"),
    ({"Idempotency-Key": "a b"}, "invalid_idempotency_key"),
]


async def test_invalid_header_is_400(api: Api, subtests: pytest.Subtests) -> None:
    for headers, code in HEADERS:
        for path, body in ((CHAT, user()), (RESPONSES, ASK), (RUNS, ASK)):
            with subtests.test(path=path, headers=headers):
                async with api.post(path, body, headers=headers) as response:
                    await read_error(response, 400, code)


@pytest.mark.parametrize("value", [b"a\x01b", b"a\tb", b"a\x7fb"])
async def test_control_characters_in_header_are_rejected(api: Api, value: bytes) -> None:
    async with await RawConnection.open(api.url) as wire:
        body = json.dumps(user()).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        head += f"Authorization: {api.client.headers['Authorization']}\r\nX-Hermes-Session-Key: "
        await wire.send(head.encode() + value + b"\r\n\r\n" + body)
        answer = await wire.answer()
    assert answer.status == 400
    check_headers(answer.headers)
    assert check_envelope(400, answer.json)["code"] in ("invalid_session_key", "bad_request")


# ---- fields that nobody knows


async def test_ignored_parameters_are_named_in_header(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    body = user(store=True, prediction={}, hologram=1, moderation="x")
    async with api.post(CHAT, body) as response:
        await read_json(response)
        named = {name.strip() for name in response.headers["X-Hermes-Ignored"].split(",")}
    assert named == {"prediction", "hologram", "moderation"}


async def test_ignored_header_is_sanitised(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    odd = {"evil\r\nSet-Cookie: a=b": 1, "ü\x00": 1, **{f"field{n:04d}": 1 for n in range(400)}}
    async with api.post(CHAT, user(**odd)) as response:
        await read_json(response)
        assert "Set-Cookie" not in response.headers
        assert len(response.headers["X-Hermes-Ignored"].encode()) <= 512


async def test_strict_parameters_reject_unknown_fields(start: Start) -> None:
    api = await start(Reply(text="Hello."), strict_parameters=True)
    async with api.post(CHAT, user(hologram=1)) as response:
        await read_error(response, 400, "unknown_parameter", "hologram")
    async with api.post(CHAT, user(store=True)) as response:
        await read_json(response)


# ---- sizes and times


async def test_max_body_bytes_is_exact(start: Start) -> None:
    api = await start(Reply(text="Hello."), max_body_bytes=2000)
    exact = json.dumps(user()).encode().ljust(2000)
    async with api.post(CHAT, data=exact) as response:
        await read_json(response)

    async def chunks() -> Any:
        yield exact
        yield b" "

    for data in (exact + b" ", chunks()):
        async with api.post(CHAT, data=data) as response:
            await read_error(response, 413, "body_too_large")
    packed = gzip.compress(b" " * 1_000_000)
    assert len(packed) < 2000
    async with api.post(CHAT, data=packed, headers={"Content-Encoding": "gzip"}) as response:
        await read_error(response, 413, "body_too_large")


async def test_large_body_is_rejected_by_content_length(start: Start) -> None:
    api = await start(max_body_bytes=2000)
    key = api.client.headers["Authorization"]
    async with await RawConnection.open(api.url) as wire:
        await wire.send(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\nContent-Length: 99999999\r\n\r\n{{"
        )
        answer = await wire.answer()
    assert answer.status == 413
    assert check_envelope(413, answer.json)["code"] == "body_too_large"


async def test_body_timeout_is_408(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes.core.limits.BODY_S_MAX", 0.05)
    key = api.client.headers["Authorization"]
    async with await RawConnection.open(api.url) as wire:
        await wire.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\nContent-Length: 50\r\n\r\n{{")
        answer = await wire.answer()
    assert answer.status == 408
    check_headers(answer.headers)
    assert check_envelope(408, answer.json)["code"] == "request_timeout"


async def test_max_text_chars_rejects_without_truncation(start: Start) -> None:
    api = await start(Reply(text="Hello."), max_text_chars=100)
    async with api.post(CHAT, user("ü" * 101)) as response:
        await read_error(response, 400, "string_above_max_length", "messages[0].content")
    async with api.post(RESPONSES, {"input": "ü" * 101}) as response:
        await read_error(response, 400, "string_above_max_length", "input")
    async with api.post(CHAT, user("ü" * 100)) as response:
        await read_json(response)
    assert sent_messages(api.model.requests[0]) == [("user", "ü" * 100)]


async def test_too_long_lists_are_rejected(api: Api) -> None:
    parts = [{"type": "text", "text": "x"}] * 1001
    async with api.post(CHAT, user(parts)) as response:
        await read_error(response, 400, "array_above_max_length", "messages[0].content")
    async with api.post(CHAT, {"messages": [{"role": "user", "content": "x"}] * 10_001}) as response:
        await read_error(response, 400, "array_above_max_length", "messages")


# ---- ids


async def test_unknown_ids_of_any_form_are_404(api: Api, subtests: pytest.Subtests) -> None:
    for method, path, body, code in BY_ID:
        with subtests.test(method=method, path=path):
            for odd in ODD_IDS:
                await refuses_id(api, odd, method, path, body, code)


async def refuses_id(api: Api, odd: str, method: str, path: str, body: Any, code: str) -> None:
    async with await RawConnection.open(api.url) as wire:
        await wire.request(method, path.format(odd), body, Authorization=api.client.headers["Authorization"])
        answer = await wire.answer()
    assert answer.status in (400, 404), (odd, answer)
    check_headers(answer.headers)
    error = check_envelope(answer.status, answer.json)
    if odd == "nobody":
        assert answer.status == 404
        assert error["code"].startswith(code), error
    assert "passwd:" not in json.dumps(error)
    assert "root:" not in json.dumps(error)


async def test_unknown_references_in_body_are_404(api: Api) -> None:
    rows = [
        (RESPONSES, {**ASK, "previous_response_id": "resp_0"}, "previous_response_not_found", "previous_response_id"),
        (RESPONSES, {**ASK, "conversation": "conv_0"}, "conversation_not_found", "conversation"),
        (RESPONSES, {**ASK, "conversation": {"id": "conv_0"}}, "conversation_not_found", ...),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_0"}, "x"]}, "item_not_found", ...),
        (RUNS, {**ASK, "previous_response_id": "resp_0"}, "previous_response_not_found", "previous_response_id"),
    ]
    for path, body, code, param in rows:
        async with api.post(path, body) as response:
            await read_error(response, 404, code, param)


async def test_many_bad_requests_leave_server_working(api: Api) -> None:
    async def send_one(number: int) -> int:
        async with api.post(CHAT, data=NO_JSON[number % len(NO_JSON)]) as response:
            return response.status

    assert set(await asyncio.gather(*(send_one(number) for number in range(100)))) == {400}
    api.model.script = [Reply(text="Hello.")]
    assert (await api.ask("still there?"))["choices"][0]["message"]["content"] == "Hello."
