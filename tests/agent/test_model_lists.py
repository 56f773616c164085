"""What providers tell of their models' windows: fetched once a day, in the background, and never in the way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from hermes.agent.model_lists import windows
from hermes.app import App
from recovery.harness import running_app, turn
from support.waiting import until

MODELS = {"data": [{"id": "m", "context_length": 70_000}, {"id": "small", "max_model_len": 5000}, {"id": "silent"}]}


class Listing:
    """A provider that lists its models and answers one question."""

    def __init__(self, body: Any, status: int = 200) -> None:
        self.body, self.status, self.requests = body, status, list[web.Request]()
        self.prompts = list[str]()
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        self.requests.append(request)
        return web.Response(status=self.status, text=json.dumps(self.body), content_type="application/json")

    async def chat(self, request: web.Request) -> web.Response:
        self.prompts.append((await request.json())["messages"][0]["content"])
        message = {"role": "assistant", "content": "Done."}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


@pytest.fixture
async def listing() -> AsyncIterator[Listing]:
    listing = Listing(MODELS)
    app = web.Application()
    app.router.add_get("/v1/models", listing.models)
    app.router.add_post("/v1/chat/completions", listing.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    listing.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield listing
    await runner.cleanup()


async def background_done(app: App) -> None:
    await asyncio.gather(*app._background)
    await until(lambda: not app._background)  # one that has ended leaves a moment later


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (MODELS, {"m": 70_000, "small": 5000}),
        ({"data": [{"id": "m", "context_length": "many"}, {"id": 5, "context_length": 1}, "x"]}, {}),
        ({"data": [{"id": "m", "context_length": True}, {"id": "n", "context_window": 0}]}, {}),
        ([], {}),
        (None, {}),
        ({"data": None}, {}),
    ],
)
def test_windows_are_parsed_from_any_model_list(body: Any, expected: dict[str, int]) -> None:
    assert windows(body) == expected


async def test_model_window_is_known_from_second_turn(listing: Listing, tmp_path: Path) -> None:
    async with running_app(tmp_path) as app:
        result, _ = await turn(app, listing.url, "chat_completions", "one")
        assert result["completed"]
        await background_done(app)
        cached = json.loads((tmp_path / "cache" / "models.json").read_text())
        assert cached[f"{listing.url}/v1"]["windows"] == {"m": 70_000, "small": 5000}
        assert (tmp_path / "cache" / "models.json").stat().st_mode & 0o777 == 0o600
        await turn(app, listing.url, "chat_completions", "two")
        await background_done(app)
    assert len(listing.requests) == 1
    assert listing.requests[0].headers["Authorization"] == "Bearer key-12345678"


async def test_small_listed_window_uses_lean_prompt(listing: Listing, tmp_path: Path) -> None:
    listing.body = {"data": [{"id": "m", "context_length": 8000}]}
    async with running_app(tmp_path) as app:
        for question in ("one", "two"):
            await turn(app, listing.url, "chat_completions", question)
            await background_done(app)
    full, lean = listing.prompts
    assert len(lean) < len(full) / 2


async def test_model_list_is_cached_for_a_day_over_restarts(listing: Listing, tmp_path: Path) -> None:
    for age_s, request_count in ((3600.0, 0), (90_000.0, 1)):
        cached = {f"{listing.url}/v1": {"fetched_at": time.time() - age_s, "windows": {"m": 9999}}}
        (tmp_path / "cache").mkdir(exist_ok=True)
        (tmp_path / "cache" / "models.json").write_text(json.dumps(cached))
        async with running_app(tmp_path) as app:
            await turn(app, listing.url, "chat_completions", "one")
            await background_done(app)
        assert len(listing.requests) == request_count


@pytest.mark.parametrize("cached", ["", "[]", '{"x": 5}', '{"x": {"fetched_at": "y", "windows": {}}}'])
async def test_damaged_model_list_cache_is_refetched(listing: Listing, cached: str, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "models.json").write_text(cached)
    async with running_app(tmp_path) as app:
        await turn(app, listing.url, "chat_completions", "one")
        await background_done(app)
    assert len(listing.requests) == 1


@pytest.mark.parametrize(("status", "body"), [(404, {}), (500, "no"), (200, "no list")])
async def test_provider_without_model_list_is_tolerated(
    listing: Listing, status: int, body: Any, tmp_path: Path
) -> None:
    listing.status, listing.body = status, body
    async with running_app(tmp_path) as app:
        for question in ("one", "two"):
            result, _ = await turn(app, listing.url, "chat_completions", question)
            assert result["completed"]
            await background_done(app)
    assert len(listing.requests) == 1
