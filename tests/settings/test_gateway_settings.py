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


def test_the_alias_is_the_same_module() -> None:
    assert importlib.import_module("gateway.config") is sys.modules["hermes.server.settings"]


def test_each_platform_has_options_of_its_own() -> None:
    PlatformConfig(enabled=True).extra["port"] = 1
    assert PlatformConfig(enabled=True).extra == {}


def test_the_api_server_is_connected_without_token_or_key() -> None:
    gateway = GatewayConfig()
    gateway.platforms[Platform.API_SERVER] = PlatformConfig(enabled=True)
    assert Platform.API_SERVER in gateway.get_connected_platforms()


def test_a_disabled_platform_is_not_connected() -> None:
    gateway = GatewayConfig()
    gateway.platforms[Platform.API_SERVER] = PlatformConfig(enabled=False)
    assert Platform.API_SERVER not in gateway.get_connected_platforms()


def test_an_empty_home_gives_a_server_that_is_off_and_has_nothing_set(home: Home) -> None:
    assert server() == PlatformConfig(enabled=False)
    assert list(home.path.iterdir()) == []


def test_a_missing_home_is_like_an_empty_one(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_server_is_enabled_by_word_or_by_a_key(
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
def test_a_variable_becomes_an_option(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, option: str, value: Any
) -> None:
    monkeypatch.setenv(variable, text)
    assert server().extra == {option: value}


def test_the_env_file_and_the_config_file_become_options(home: Home) -> None:
    home.env_file.write_text("API_SERVER_KEY=abc")
    home.config_file.write_text("gateway: {platforms: {api_server: {extra: {port: 5, responses: {max_stored: 9}}}}}")
    assert server().extra == {"key": "abc", "port": 5, "responses": {"max_stored": 9}}


def test_a_route_whose_alias_has_dots_stays_one_route(home: Home) -> None:
    home.config_file.write_text("api_server: {model_routes: {gpt-4.1: {model: x}}}")
    assert server().extra["model_routes"]["gpt-4.1"]["model"] == "x"


def test_a_value_that_does_not_fit_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_SERVER_PORT", "not-a-port")
    assert "port" not in server().extra


def test_given_settings_are_used_instead_of_the_present_home(home: Home) -> None:
    settings = config.load(home, {"api_server.port": 3}, {})
    assert load_gateway_config(settings).platforms[Platform.API_SERVER].extra == {"port": 3}


def test_the_profile_in_use_decides(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    (home.path / "profiles" / "work").mkdir(parents=True)
    (home.path / "profiles" / "work" / "config.yaml").write_text("api_server: {port: 7}")
    monkeypatch.setenv("HERMES_PROFILE", "work")
    assert server().extra == {"port": 7}


def test_a_broken_file_is_an_error(home: Home) -> None:
    home.config_file.write_text("a: [")
    with pytest.raises(config.ConfigError):
        load_gateway_config()


def test_secrets_are_in_no_representation() -> None:
    shown = PlatformConfig(enabled=True, token=SECRET, extra={"key": SECRET})
    assert SECRET not in repr(GatewayConfig({Platform.API_SERVER: shown}))


def test_options_come_from_extra_then_the_environment_then_the_default() -> None:
    options = api_server_options({"host": "::"}, {"API_SERVER_HOST": "1.2.3.4", "API_SERVER_PORT": "7"})
    assert (options["host"], options["port"], options["key"], options["max_concurrent_runs"]) == ("::", 7, "", 256)


def test_an_option_that_does_not_fit_is_the_default() -> None:
    options = api_server_options({"keepalive_seconds": "soon"}, {"API_SERVER_PORT": "not-a-port"})
    assert (options["keepalive_seconds"], options["port"]) == (15, 8642)


def test_nested_options_are_found_by_their_dotted_name() -> None:
    options = api_server_options({"responses": {"max_stored": 5}}, {})
    assert (options["responses.max_stored"], options["runs.max_stored"], options["model_routes"]) == (5, 1000, {})


def test_defaults_are_not_shared_between_servers() -> None:
    api_server_options({}, {})["cors_origins"].append("*")
    assert api_server_options({}, {})["cors_origins"] == []
