"""What the gateway is built from: platforms, and the options of the API server from every source."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hermes.core.home import Home
from hermes.server.settings import GatewayConfig, Platform, PlatformConfig, api_server_options, load_gateway_config
from hermes.settings import config

SECRET = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in list(os.environ):
        if name.startswith(("API_SERVER_", "HERMES_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HERMES_HOME", str(tmp_path))
    return Home(tmp_path)


def server() -> PlatformConfig:
    return load_gateway_config().platforms[Platform.API_SERVER]


def test_gateway_config_alias_is_same_module() -> None:
    assert importlib.import_module("gateway.config") is sys.modules["hermes.server.settings"]


def test_platform_options_are_not_shared() -> None:
    PlatformConfig(enabled=True).extra["port"] = 1
    assert PlatformConfig(enabled=True).extra == {}


def test_api_server_is_connected_without_token() -> None:
    gateway = GatewayConfig()
    gateway.platforms[Platform.API_SERVER] = PlatformConfig(enabled=True)
    assert Platform.API_SERVER in gateway.get_connected_platforms()


def test_disabled_platform_is_not_connected() -> None:
    gateway = GatewayConfig()
    gateway.platforms[Platform.API_SERVER] = PlatformConfig(enabled=False)
    assert Platform.API_SERVER not in gateway.get_connected_platforms()


def test_empty_home_gives_disabled_server(home: Home) -> None:
    assert server() == PlatformConfig(enabled=False)
    assert list(home.path.iterdir()) == []


def test_missing_home_gives_disabled_server(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_HOME", str(home.path / "none"))
    assert server() == PlatformConfig(enabled=False)


@pytest.mark.parametrize(
    ("variables", "yaml", "enabled"),
    [
        ({"API_SERVER_ENABLED": "true"}, "", True),
        ({"API_SERVER_KEY": "sk-mykey"}, "", True),
        ({"API_SERVER_KEY": "sk-mykey", "API_SERVER_ENABLED": "false"}, "", False),
        ({}, "api_server: {enabled: true}", True),
        ({}, "api_server: {key: sk-mykey}", True),
        ({}, "api_server: {key: sk-mykey, enabled: no}", False),
        ({"API_SERVER_ENABLED": "false"}, "api_server: {enabled: true}", False),
        ({}, "platforms: {api_server: {enabled: true}}", True),
        ({"API_SERVER_PORT": "1"}, "", False),
    ],
)
def test_server_is_enabled_by_setting_or_key(
    home: Home, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], yaml: str, enabled: bool
) -> None:
    home.config_file.write_text(yaml)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert server().enabled is enabled


@pytest.mark.parametrize(
    ("variable", "text", "option", "value"),
    [
        ("API_SERVER_KEY", "sk-mykey", "key", "sk-mykey"),
        ("API_SERVER_PORT", "9999", "port", 9999),
        ("API_SERVER_HOST", "0.0.0.0", "host", "0.0.0.0"),
        ("API_SERVER_CORS_ORIGINS", "http://a:3000, http://b:3000", "cors_origins", ["http://a:3000", "http://b:3000"]),
        ("API_SERVER_MODEL_NAME", "mine", "model_name", "mine"),
        ("API_SERVER_RUNS_MAX_STORED", "7", "runs", {"max_stored": 7}),
    ],
)
def test_variable_becomes_option(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, option: str, value: Any
) -> None:
    monkeypatch.setenv(variable, text)
    assert server().extra == {option: value}


def test_env_and_config_files_become_options(home: Home) -> None:
    home.env_file.write_text("API_SERVER_KEY=abc")
    home.config_file.write_text("gateway: {platforms: {api_server: {extra: {port: 5, responses: {max_stored: 9}}}}}")
    assert server().extra == {"key": "abc", "port": 5, "responses": {"max_stored": 9}}


def test_route_alias_with_dots_is_one_route(home: Home) -> None:
    home.config_file.write_text("api_server: {model_routes: {gpt-4.1: {model: x}}}")
    assert server().extra["model_routes"]["gpt-4.1"]["model"] == "x"


def test_invalid_value_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_SERVER_PORT", "not-a-port")
    assert "port" not in server().extra


def test_given_settings_override_home(home: Home) -> None:
    settings = config.load(home, {"api_server.port": 3}, {})
    assert load_gateway_config(settings).platforms[Platform.API_SERVER].extra == {"port": 3}


def test_active_profile_decides(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    (home.path / "profiles" / "work").mkdir(parents=True)
    (home.path / "profiles" / "work" / "config.yaml").write_text("api_server: {port: 7}")
    monkeypatch.setenv("HERMES_PROFILE", "work")
    assert server().extra == {"port": 7}


def test_broken_file_is_an_error(home: Home) -> None:
    home.config_file.write_text("a: [")
    with pytest.raises(config.ConfigError):
        load_gateway_config()


def test_secrets_are_not_in_repr() -> None:
    config = PlatformConfig(enabled=True, token=SECRET, extra={"key": SECRET})
    assert SECRET not in repr(GatewayConfig({Platform.API_SERVER: config}))


def test_option_precedence_extra_environment_default() -> None:
    options = api_server_options({"host": "::"}, {"API_SERVER_HOST": "1.2.3.4", "API_SERVER_PORT": "7"})
    assert (options.host, options.port, options.key, options.max_concurrent_runs) == ("::", 7, "", 256)


def test_invalid_option_is_default() -> None:
    options = api_server_options({"keepalive_seconds": "soon"}, {"API_SERVER_PORT": "not-a-port"})
    assert (options.keepalive_seconds, options.port) == (15, 8642)


def test_nested_options_by_dotted_name() -> None:
    options = api_server_options({"responses": {"max_stored": 5}}, {})
    assert (options.responses.max_stored, options.runs.max_stored, options.model_routes) == (5, 1000, {})


def test_default_options_are_not_shared() -> None:
    options = api_server_options({}, {})
    assert isinstance(options.cors_origins, list)
    options.cors_origins.append("*")
    assert api_server_options({}, {}).cors_origins == []
