"""The model that answers, and connecting another over HTTP: tried first, written only if it answers, no key shown or lent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.model_server import ModelServer, Reply

from .clients import Json, read_error, read_json, user
from .conftest import PROVIDER_KEY, Api, Start
from .test_keys import ANNA, KEYS, bearer

MODEL = "/api/model"
NEW_KEY = "sk-new-0123456789abcdefghij"


@pytest.fixture
async def other() -> AsyncIterator[ModelServer]:
    """Another model's server."""
    server = ModelServer(*[Reply(text="Hello there.", continues=False)] * 9)
    server.models = [{"id": "small"}, {"id": "large", "max_model_len": 32_000}]
    await server.start()
    yield server
    await server.stop()


def file_of(home_folder: Path) -> Json:
    payload: Json = yaml.safe_load((home_folder / "config.yaml").read_text())
    return payload


async def test_status_names_the_answering_model(start: Start) -> None:
    api = await start(keys=KEYS)
    async with api.get(MODEL) as response:
        status = await read_json(response)
    assert (status["object"], status["provider"], status["model"]) == ("hermes.model_status", "custom", "test-model")
    assert (status["embedded"], status["problem"], status["title"], status["bytes"]) == (False, None, None, None)
    assert status["window"] > 0 and status["base_url"] == f"{api.model.url}/v1" and status["key"] is True
    async with api.get(MODEL, headers=bearer(ANNA)) as response:
        assert set(await read_json(response)) == set(status) - {"base_url", "key"}


async def test_status_without_a_model_has_a_hint(start: Start) -> None:
    api = await start(settings={"model": {"provider": "local", "path": "none"}})
    async with api.get(MODEL) as response:
        status = await read_json(response)
    assert status["embedded"] is True and "hermes" in status["problem"]
    broken = await start(settings={"model": {"provider": "nobody", "default": "x"}})
    async with broken.get(MODEL) as response:
        status = await read_json(response)
    assert (status["model"], status["embedded"]) == (None, False) and "nobody" in status["problem"]


async def test_providers_are_listed_with_whether_there_is_a_key(start: Start, monkeypatch: Any) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-or-0123456789abcdef")
    api = await start(settings={"providers": {"mine": {"base_url": "http://127.0.0.1:9/v1", "api_key": NEW_KEY}}})
    async with api.get(f"{MODEL}/providers") as response:
        providers = {provider["name"]: provider for provider in (await read_json(response))["data"]}
        assert NEW_KEY not in await response.text()
    assert (providers["openrouter"]["needs_key"], providers["openrouter"]["has_key"]) == (True, True)
    assert (providers["groq"]["has_key"], providers["groq"]["key_env"]) == (False, "GROQ_API_KEY")
    assert (providers["mine"]["configured"], providers["mine"]["base_url"]) == (True, "http://127.0.0.1:9/v1")
    assert providers["ollama"]["needs_key"] is False and "local" in providers


async def test_model_is_tried_then_used(api: Api, other: ModelServer, home_folder: Path) -> None:
    address = f"{other.url}/v1"
    async with api.post(f"{MODEL}/models", {"base_url": address, "api_key": NEW_KEY}) as response:
        listed = await read_json(response)
    assert listed["data"] == [{"id": "small", "window": None}, {"id": "large", "window": 32_000}]
    assert listed["likely"] in ("small", "large")
    before = (home_folder / "config.yaml").read_bytes()
    body = {"base_url": address, "model": "small", "api_key": NEW_KEY}
    async with api.post(MODEL, {**body, "test_only": True}) as response:
        tried = await read_json(response)
    assert (tried["written"], tried["test"]["answer"], tried["test"]["error"]) == (False, "Hello there.", None)
    assert (home_folder / "config.yaml").read_bytes() == before
    assert other.requests[-1].headers["Authorization"] == f"Bearer {NEW_KEY}"
    async with api.post(MODEL, body) as response:
        payload = await read_json(response)
        assert NEW_KEY not in await response.text()
    assert payload["written"] is True and (payload["status"]["base_url"], payload["status"]["model"]) == (
        address,
        "small",
    )
    model = file_of(home_folder)["model"]
    assert (model["default"], model["base_url"], model.get("provider")) == ("small", address, None)
    assert NEW_KEY not in (home_folder / "config.yaml").read_text() and NEW_KEY in (home_folder / ".env").read_text()
    async with api.post("/v1/chat/completions", user("hi")) as response:
        assert (await read_json(response))["choices"][0]["message"]["content"] == "Hello there."
    assert other.requests[-1].body["model"] == "small"


async def test_model_is_chosen_where_none_is_named(api: Api, other: ModelServer) -> None:
    async with api.post(MODEL, {"base_url": f"{other.url}/v1"}) as response:
        body = await read_json(response)
    assert body["test"]["model"] in ("small", "large")
    assert "Authorization" not in other.requests[-1].headers, "a key goes only to the address it was given for"


async def test_model_that_does_not_answer_changes_nothing(api: Api, other: ModelServer, home_folder: Path) -> None:
    other.script = [Reply(status=401, error={"error": {"message": f"Incorrect key {NEW_KEY}"}})]
    before = (home_folder / "config.yaml").read_bytes()
    body = {"base_url": f"{other.url}/v1", "model": "small", "api_key": NEW_KEY}
    async with api.post(MODEL, body) as response:
        error = await read_error(response, 502, "provider_unavailable")
    assert NEW_KEY not in error["message"] and PROVIDER_KEY not in error["message"]
    assert (home_folder / "config.yaml").read_bytes() == before
    other.script = [Reply(status=401, error={"error": {"message": "no"}})]
    async with api.post(MODEL, {**body, "anyway": True}) as response:
        payload = await read_json(response)
    assert payload["written"] is True and payload["test"]["error"]
    assert file_of(home_folder)["model"]["default"] == "small"


async def test_provider_that_lists_nothing(api: Api, other: ModelServer) -> None:
    other.models = None
    async with api.post(f"{MODEL}/models", {"base_url": f"{other.url}/v1"}) as response:
        await read_error(response, 502, "provider_unavailable")
    other.models = []
    async with api.post(MODEL, {"base_url": f"{other.url}/v1"}) as response:
        await read_error(response, 400, "missing_required_parameter", "model")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "provider"),
        ({"provider": "openai", "base_url": "http://127.0.0.1:9/v1"}, "provider"),
        ({"provider": "nobody", "model": "x"}, "provider"),
        ({"base_url": "file:///etc/passwd", "model": "x"}, "base_url"),
        ({"base_url": "127.0.0.1:9", "model": "x"}, "base_url"),
        ({"base_url": "http://127.0.0.1:9/v1", "model": "x", "api_key": "${HOME}"}, "api_key"),
        ({"base_url": "http://127.0.0.1:9/${HOME}", "model": "x"}, "base_url"),
        ({"base_url": "http://127.0.0.1:9/v1", "model": "x\ny"}, "model"),
        ({"base_url": "http://127.0.0.1:9/v1", "model": " "}, "model"),
        ({"base_url": "http://127.0.0.1:9/v1", "model": "x" * 201}, "model"),
        ({"base_url": 5}, "base_url"),
        ({"provider": "groq"}, "api_key"),
    ],
)
async def test_refused_choice(api: Api, home_folder: Path, body: Json, param: str) -> None:
    before = (home_folder / "config.yaml").read_bytes()
    async with api.post(MODEL, body) as response:
        error = (await read_json(response, 400))["error"]
    assert error["param"] == param, error
    assert (home_folder / "config.yaml").read_bytes() == before


async def test_setting_overridden_by_environment_is_not_written(
    start: Start, other: ModelServer, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HERMES_INFERENCE_MODEL", "fixed")
    api = await start()
    async with api.post(MODEL, {"base_url": f"{other.url}/v1", "model": "small"}) as response:
        error = await read_error(response, 409, "setting_overridden")
    assert "HERMES_INFERENCE_MODEL" in error["message"]
    async with api.post(MODEL, {"base_url": f"{other.url}/v1", "model": "small", "test_only": True}) as response:
        await read_json(response)


async def test_back_to_the_embedded_model(start: Start, home_folder: Path) -> None:
    api = await start(settings={"local": {"context": 1024}})
    async with api.post(MODEL, {"provider": "local", "anyway": True}) as response:
        body = await read_json(response)
    assert body["written"] and body["status"]["embedded"] and body["test"]["error"]
    assert file_of(home_folder)["model"] == {"provider": "local"}
