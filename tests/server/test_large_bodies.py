"""Large bodies: four photos on every route, received into files, and only so many of them in memory at once."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hermes.server import request_bodies
from hermes.server.body_memory import Budget, Spool
from support.model_server import Reply
from support.waiting import DEADLINE_S, until

from .clients import HeldModel, Json, RawConnection, RawResponse, read_error, read_json
from .conftest import KEY, Api, Start

PHOTO_BYTES = 5_900_000
LARGE = "word " * 400_000  # which is no message that is taken, but has to be read to know that
PNG = b"\x89PNG\r\n\x1a\n"


def photos(count: int = 4, size: int = PHOTO_BYTES) -> list[str]:
    """Data URLs of images, each another one."""
    images = (PNG + bytes([number]) * size for number in range(count))
    return [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]


def parts(urls: list[str]) -> list[Json]:
    images: list[Json] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"type": "text", "text": "Look."}, *images]


def items(urls: list[str]) -> list[Json]:
    content = [{"type": "input_text", "text": "Look."}, *({"type": "input_image", "image_url": url} for url in urls)]
    return [{"role": "user", "content": content}]


def send(api: Api, path: str, body: Json, **headers: str) -> Any:
    """A request whose body is read from a file: the client warns of large ones in memory."""
    all_headers = {
        "Content-Type": "application/json",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return api.client.post(api.url + path, data=io.BytesIO(json.dumps(body).encode()), headers=all_headers)


# --- four photos -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "route", ["chat", "response", *(pytest.param(r, marks=pytest.mark.long) for r in ("session", "run"))]
)
async def test_four_photos_fit_into_request(start: Start, route: str) -> None:
    api = await start(Reply(text="Fine.", continues=False))
    urls = photos()
    path, body = {
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": parts(urls)}]}),
        "response": ("/v1/responses", {"input": items(urls)}),
        "session": ("/api/sessions/mine/chat", {"message": parts(urls)}),
        "run": ("/v1/runs", {"input": items(urls)}),
    }[route]
    assert 31_000_000 < len(json.dumps(body)) < api.context.options.max_body_bytes == 32_000_000
    async with api.post("/api/sessions", {"id": "mine"}) as response:
        await read_json(response, 201)
    async with send(api, path, body) as response:
        assert response.status == (202 if route == "run" else 200), (await response.text())[:500]
    await api.model.until(lambda: bool(api.model.requests))
    content = api.model.requests[0].body["messages"][-1]["content"]
    assert [part["image_url"]["url"] for part in content if part["type"] == "image_url"] == urls


# --- where a body is while it comes ----------------------------------------------------------------------------------


def unnamed_files(folder: Path) -> int:
    """How many files without a name this process has open on the folder's disk."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        count += target.startswith(f"{folder}/") and target.endswith("(deleted)")
    return count


async def test_large_body_is_spooled_to_file(api: Api, home_folder: Path) -> None:
    api.model.script = [Reply(text="Fine.")]
    body = json.dumps({"messages": [{"role": "user", "content": parts(photos(1, 3_000_000))}]}).encode()
    before = unnamed_files(home_folder)

    def files() -> int:
        return unnamed_files(home_folder) - before

    async with await RawConnection.open(api.url) as wire:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        await wire.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:2_500_000])
        await until(files, lambda count: count == 1)
        await wire.send(body[2_500_000:])
        assert (await wire.answer()).status == 200
    await until(files, lambda count: count == 0)


async def test_full_disk_for_spooled_body_is_503(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.context, "spool_folder", Path("/dev/null/nowhere"))
    body = {"messages": [{"role": "user", "content": LARGE}]}
    async with send(api, "/v1/chat/completions", body) as response:
        await read_error(response, 503, "not_ready")
        assert response.headers["Retry-After"] == "1"


async def test_spooled_body_equals_sent_body(tmp_path: Path) -> None:
    for sizes in ([], [0], [10], [10, 20], [900_000] * 2, [600_000] * 7, [3_000_000, 1]):
        spool = Spool(tmp_path)
        pieces = [os.urandom(size) for size in sizes]
        for piece in pieces:
            await spool.add(piece)
        assert spool.size == sum(sizes)
        assert await spool.whole() == await spool.whole() == b"".join(pieces)
    assert list(tmp_path.iterdir()) == []


# --- how much is in memory -------------------------------------------------------------------------------------------


async def ask(api: Api) -> RawResponse:
    body = {"messages": [{"role": "user", "content": parts(photos(1, 1_500_000))}]}
    async with send(api, "/v1/chat/completions", body) as response:
        return RawResponse(response.status, dict(response.headers), await response.read())


async def test_large_bodies_wait_on_disk(start: Start) -> None:
    async with HeldModel(*[Reply(text="Fine.", continues=False)] * 3) as held_model:
        api = await start(settings=held_model.settings)
        api.context.body_memory = Budget(5_000_000)
        asking = [asyncio.create_task(ask(api)) for _ in range(3)]
        await held_model.wait_for_request(2)
        memory = api.context.body_memory

        await until(lambda: len(memory._waiting) == 1)
        assert len(held_model.requests) == 2
        held_model.release_all()
        assert [answer.status for answer in await asyncio.gather(*asking)] == [200, 200, 200]
        await until(lambda: memory._used == 0)


async def test_large_body_without_memory_in_time_is_rejected(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bodies.limits, "BODIES_WAIT_S_MAX", 0.05)
    async with HeldModel(*[Reply(text="Fine.", continues=False)] * 2) as held_model:
        api = await start(settings=held_model.settings)
        memory = api.context.body_memory = Budget(3_000_000)
        first = asyncio.create_task(ask(api))
        await held_model.wait_for_request()
        late = await ask(api)
        assert late.status == 429 and late.json["error"]["code"] == "rate_limit_exceeded"
        assert late.headers["Retry-After"] and late.headers["x-should-retry"] == "true"
        held_model.release_all()
        assert (await first).status == 200
        await until(lambda: memory._used == 0)
        assert (await ask(api)).status == 200


async def test_websocket_releases_body_memory(start: Start) -> None:
    async with HeldModel(Reply(text="Fine.")) as held_model:
        api = await start(settings=held_model.settings)
        memory = api.context.body_memory = Budget(5_000_000)

        async with api.client.ws_connect(f"{api.url}/v1/responses") as socket:
            for _ in range(3):
                await socket.send_json({"type": "response.create", "input": items(photos(1, 1_500_000))})
            while (event := await socket.receive_json())["type"] != "error":
                pass
            assert event["error"]["code"] == "rate_limit_exceeded"
            assert memory._used == pytest.approx(4_000_000, rel=0.01)
        await until(lambda: memory._used == 0)


async def test_detached_work_releases_body_memory(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    api = await start(Reply(text="Fine.", continues=False))
    memory = api.context.body_memory = Budget(5_000_000)
    claim, claim_started, disconnected = api.context.idempotency._claim, asyncio.Event(), asyncio.Event()

    async def claim_later(*args: Any) -> Any:
        claim_started.set()
        await disconnected.wait()
        return await claim(*args)

    monkeypatch.setattr(api.context.idempotency, "_claim", claim_later)

    body = json.dumps({"messages": [{"role": "user", "content": parts(photos(1, 1_500_000))}]}).encode()
    async with await RawConnection.open(api.url) as wire:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        await wire.send(f"{head}Idempotency-Key: one\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await asyncio.wait_for(claim_started.wait(), DEADLINE_S)
        assert memory._used > 0
    await until(lambda: memory._used == 0)
    disconnected.set()
    await api.model.until(lambda: bool(api.model.requests))
    assert memory._used == 0


async def test_body_memory_budget_is_fair_and_never_lost() -> None:
    budget = Budget(10)
    await budget.take(25, 0)  # more than there is, but alone
    amounts: list[int] = []

    async def want(amount: int, wait_s: float = 5) -> None:
        await budget.take(amount, wait_s)
        amounts.append(amount)

    tasks = [asyncio.create_task(want(amount)) for amount in (6, 7, 4)]
    hurried = asyncio.create_task(want(1, 0))
    with pytest.raises(TimeoutError):
        await hurried
    assert amounts == [] and not budget.take_now(1)
    tasks[1].cancel()
    budget.give_back(25)  # also while one that waits is being cancelled
    await asyncio.wait(tasks)
    assert amounts == [6, 4] and not budget.take_now(1)
    for amount in amounts:
        budget.give_back(amount)
    assert budget.take_now(10) and not budget.take_now(1)
