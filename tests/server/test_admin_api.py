"""Settings, keys and MCP servers over HTTP: for an admin only, without secrets, and changed only where that is safe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermes.services.settings import EDITABLE
from hermes.settings.keys import find
from tools.test_mcp import over_pipes

from .clients import Json, read_error, read_json
from .conftest import KEY, PROVIDER_KEY, Api, Start
from .test_keys import ANNA, BEN, KEYS

SETTINGS = "/api/settings"


async def settings_of(api: Api) -> dict[str, Json]:
    async with api.get(SETTINGS) as response:
        return {row["key"]: row for row in (await read_json(response))["data"]}


# ---- settings


async def test_settings_report_the_source_of_each_value(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_SERVER_KEEPALIVE_SECONDS", "7")
    api = await start(settings={"network": {"proxy": "http://me:hidden-password@127.0.0.1:9"}})
    rows = await settings_of(api)
    assert rows["agent.api_max_retries"] == {
        "key": "agent.api_max_retries",
        "description": "How often a failed request to the provider is repeated.",
        "value": 0,
        "source": "file",
        "where": rows["agent.api_max_retries"]["where"],
        "default": 3,
        "expected": "a whole number from 0 to 100",
        "choices": [],
        "secret": False,
        "editable": True,
    }
    assert rows["agent.api_max_retries"]["where"].startswith("config.yaml line ")
    assert (rows["agent.max_turns"]["source"], rows["agent.max_turns"]["where"]) == ("default", None)
    keepalive = rows["api_server.keepalive_seconds"]
    assert (keepalive["value"], keepalive["source"], keepalive["where"]) == (
        7,
        "environment",
        "API_SERVER_KEEPALIVE_SECONDS",
    )
    assert rows["model.api_key"]["value"] == rows["api_server.key"]["value"] == "***"
    async with api.get(SETTINGS) as response:
        text = await response.text()
    assert PROVIDER_KEY not in text and KEY not in text and "hidden-password" not in text


async def test_settings_that_are_safe_can_be_changed(api: Api, home_folder: Path) -> None:
    for name, value, expected in (
        ("agent.max_turns", 33, 33),
        ("agent.reasoning_effort", "high", "high"),
        ("compression.enabled", False, False),
        ("terminal.timeout", 45.5, 45.5),
    ):
        async with api.patch(f"{SETTINGS}/{name}", {"value": value}) as response:
            row = await read_json(response)
        assert (row["key"], row["value"], row["source"]) == (name, expected, "file")
    assert (await settings_of(api))["agent.max_turns"]["value"] == 33
    assert api.app.settings.agent.max_turns == 33
    async with api.patch(f"{SETTINGS}/agent.max_turns", {"value": None}) as response:
        row = await read_json(response)
    assert (row["value"], row["source"]) == (90, "default")
    assert "max_turns" not in (home_folder / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "body", "status", "code", "param"),
    [
        ("agent.max_turns", {"value": "many"}, 400, "invalid_value", "value"),
        ("agent.max_turns", {"value": 0}, 400, "invalid_value", "value"),
        ("agent.max_turns", {"value": [1]}, 400, "invalid_value", "value"),
        ("agent.max_turns", {"value": {"a": {}}}, 400, "invalid_value", "value"),
        ("agent.reasoning_effort", {"value": "${HOME}"}, 400, "invalid_value", "value"),
        ("agent.max_turns", {}, 400, "missing_required_parameter", "value"),
        ("agent.max_turnz", {"value": 5}, 404, "setting_not_found", None),
        ("agent", {"value": 5}, 404, "setting_not_found", None),
        ("terminal.backend", {"value": "local"}, 403, "setting_read_only", None),
        ("terminal.allow_local", {"value": True}, 403, "setting_read_only", None),
        ("approvals.mode", {"value": "off"}, 403, "setting_read_only", None),
        ("mcp_servers.x.command", {"value": "sh"}, 403, "setting_read_only", None),
        ("model.api_key", {"value": "sk-0123456789"}, 403, "setting_read_only", None),
        ("api_server.keys", {"value": []}, 403, "setting_read_only", None),
        ("gateway.api_server.host", {"value": "0.0.0.0"}, 403, "setting_read_only", None),
    ],
)
async def test_refused_change_of_a_setting(
    api: Api, home_folder: Path, name: str, body: Json, status: int, code: str, param: str | None
) -> None:
    before = (home_folder / "config.yaml").read_bytes()
    async with api.patch(f"{SETTINGS}/{name}", body) as response:
        await read_error(response, status, code, param)
    assert (home_folder / "config.yaml").read_bytes() == before


def test_editable_settings_exist_and_hold_no_secret() -> None:
    for name in EDITABLE:
        key, _ = find(name)
        assert key.name == name and not key.mark.secret and not key.mark.names_variable
        assert name.partition(".")[0] not in ("api_server", "approvals", "security", "mcp_servers", "storage", "bus")


# ---- keys


async def test_key_list_has_no_secrets(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TABLET_KEY", "sk-tablet-0123456789abcdef")
    tablet: Json = {"name": "tablet", "key_env": "TABLET_KEY", "scopes": ["chat"], "toolsets": ["web", "file"]}
    tablet |= {"requests_per_minute": 60, "models": []}
    api = await start(keys=[*KEYS, tablet])
    async with api.get("/api/keys") as response:
        keys = {key["name"]: key for key in (await read_json(response))["data"]}
        text = await response.text()
    assert list(keys) == ["default", "anna", "ben", "tablet"]
    assert keys["tablet"] == {
        "object": "hermes.key",
        "name": "tablet",
        "scopes": ["chat"],
        "max_concurrent": 0,
        "requests_per_minute": 60,
        "tokens_per_minute": 0,
        "toolsets": ["file", "web"],
        "models": [],
        "source": "TABLET_KEY",
        "current": False,
    }
    assert (keys["default"]["source"], keys["default"]["current"]) == ("api_server.key", True)
    assert "admin" in keys["default"]["scopes"] and keys["anna"]["source"] == "api_server.keys"
    digest = KEYS[1]["key_sha256"]
    assert not any(secret in text for secret in (KEY, ANNA, BEN, digest, "sk-tablet-0123456789abcdef"))


async def test_open_server_has_no_keys(start: Start) -> None:
    api = await start(key="")
    async with api.get("/api/keys") as response:
        assert (await read_json(response))["data"] == []


# ---- MCP servers


async def test_mcp_servers_with_their_state(start: Start) -> None:
    servers: dict[str, Any] = {
        "plain": over_pipes("plain", "stdio"),
        "off": {"command": "nothing", "enabled": False},
        "broken": {"command": "no-such-program", "args": ["--token=sk-abcdefghijklmnopqrstuvwx"]},
    }
    api = await start(settings={"mcp_servers": servers, "mcp_discovery_timeout": 30})
    async with api.get("/api/mcp") as response:
        providers = {provider["name"]: provider for provider in (await read_json(response))["data"]}
        assert "sk-abcdefghijklmnopqrstuvwx" not in await response.text()
    assert {name: provider["state"] for name, provider in providers.items()} == {
        "plain": "idle",
        "off": "off",
        "broken": "idle",
    }
    async with api.post("/api/mcp/plain/test") as response:
        plain = await read_json(response)
    assert (plain["state"], plain["error"]) == ("up", None) and "mcp_plain_add" in plain["tools"]
    async with api.post("/api/mcp/broken/test") as response:
        broken = await read_json(response)
    assert broken["state"] != "up" and broken["error"]
    async with api.post("/api/mcp/off/test") as response:
        assert (await read_json(response))["state"] == "off"
    async with api.post("/api/mcp/none/test") as response:
        await read_error(response, 404, "mcp_server_not_found")
