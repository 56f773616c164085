"""Whatever bytes come over a connection, the answer is HTTP in the one form, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from support.model_server import Reply
from support.waiting import DEADLINE_S

from .clients import RawConnection, RawResponse, check_envelope, check_headers, read_json, user
from .conftest import Api, Start

ROUNDS = 200
# Pieces that mean something to a parser, put where they do not belong.
ODD = [b"\r\n", b"\n", b"\r", b"\x00", b" ", b":", b"\t", b"\xff", b"HTTP/1.1", b"0", b"-1", b"chunked", b"Host: x\r\n",
       b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\n",
       b"Connection: upgrade\r\n", b"/../", b"%00", b"\xc3\x28", b"{", b"\"", b"A" * 300]  # fmt: skip


def request(key: str) -> bytes:
    body = json.dumps(user("hi")).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {key}\r\n"
    return head.encode() + f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def spoilt(data: bytes, luck: random.Random) -> bytes:
    """The request with a few bytes added, taken away or changed."""
    mutated = bytearray(data)
    for _ in range(luck.randint(1, 3)):
        at = luck.randrange(len(mutated))
        match luck.randrange(4):
            case 0:
                mutated[at:at] = luck.choice(ODD)
            case 1:
                del mutated[at : at + luck.randint(1, 12)]
            case 2:
                mutated[at] = luck.randrange(256)
            case _:
                mutated[at : at + 1] = luck.choice(ODD)
    return bytes(mutated)


async def first_answer(wire: RawConnection) -> RawResponse | None:
    """The first answer on the connection but for «go on»; None when the server closed without one."""
    try:
        answer = await wire.head(timeout=DEADLINE_S)
        if answer.status == 100:
            answer = await wire.head(timeout=DEADLINE_S)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    length = int(next((v for n, v in answer.headers.items() if n.lower() == "content-length"), "0"))
    answer.body = await wire.reader.readexactly(length)
    return answer


async def test_random_bytes_do_not_break_server(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes.server.application.HEADERS_S_MAX", 0.3)
    monkeypatch.setattr("hermes.core.limits.BODY_S_MAX", 0.3)
    api = await start(handler=lambda _: Reply(text="Fine."))
    luck, whole = random.Random(7), request(api.client.headers["Authorization"])
    for batch in range(0, ROUNDS, 20):
        await asyncio.gather(*(send_bytes(api, spoilt(whole, luck)) for _ in range(batch, batch + 20)))
    async with api.get("/health") as response:
        await read_json(response)


async def send_bytes(api: Api, data: bytes) -> None:
    async with await RawConnection.open(api.url) as wire:
        await wire.send(data)
        answer = await first_answer(wire)
    assert answer is not None, f"no answer to {data!r}"
    request_id = {name.lower(): value for name, value in answer.headers.items()}.get("x-request-id", "")
    check_headers(answer.headers, None if request_id.startswith("req_") else request_id)
    if answer.status >= 400:
        assert answer.status < 500, (data, answer.body)
        check_envelope(answer.status, answer.json)
    else:
        assert answer.status == 200, (data, answer)


async def test_request_may_arrive_byte_by_byte(api: Api) -> None:
    api.model.script = [Reply(text="Hello.")]
    async with await RawConnection.open(api.url) as wire:
        for byte in request(api.client.headers["Authorization"]):
            await wire.send(bytes([byte]))
        answer = await wire.answer()
    assert answer.json["choices"][0]["message"]["content"] == "Hello."


async def test_pipelined_requests_are_answered_in_order(api: Api) -> None:
    api.model.script = [Reply(text=f"answer {number}", continues=False) for number in range(3)]
    async with await RawConnection.open(api.url) as wire:
        await wire.send(request(api.client.headers["Authorization"]) * 3)
        contents = [(await wire.answer()).json["choices"][0]["message"]["content"] for _ in range(3)]
    assert contents == ["answer 0", "answer 1", "answer 2"]


async def test_expect_100_continue(start: Start) -> None:
    api = await start(Reply(text="Hello."), max_body_bytes=2000)
    key = api.client.headers["Authorization"]
    body = json.dumps(user("hi")).encode()
    for length, statuses in ((len(body), [100, 200]), (10_000_000, [100, 413])):
        async with await RawConnection.open(api.url) as wire:
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\nContent-Length: {length}\r\n"
            )
            await wire.send(f"{head}Expect: 100-continue\r\n\r\n")
            all_statuses = [(await wire.head()).status]
            if all_statuses == [100]:
                await wire.send(body)
                all_statuses.append((await wire.answer()).status)
        assert all_statuses[-1] == statuses[-1]
        assert set(all_statuses) <= set(statuses)


async def test_request_smuggled_in_body_is_not_served(api: Api) -> None:
    """A body that is refused must not be read as the next request."""
    inner = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(inner)
    async with await RawConnection.open(api.url) as wire:
        await wire.send(head + inner)
        assert (await wire.answer()).status == 401
        wire.writer.write_eof()
        rest = await wire.reader.read()
    assert b"HTTP/1.1" not in rest
