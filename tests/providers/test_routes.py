"""Which route a turn takes: what was asked for, what is configured, and where keys may go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermes.core.errors import ConfigError
from hermes.core.home import Home
from hermes.core.spec import RouteChoice
from hermes.providers.base import Route
from hermes.providers.routes import (
    LOCAL,
    auxiliary,
    fallback,
    listed,
    local,
    missing_key,
    named,
    of_session,
    primary,
    routes,
)
from hermes.settings import config
from hermes.settings.config import Settings

OPENAI, ANTHROPIC = "https://api.openai.com/v1", "https://api.anthropic.com"
KEYS = {"OPENAI_API_KEY": "key-of-openai", "ANTHROPIC_API_KEY": "key-of-anthropic"}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def load(home: Home, yaml: str = "", environ: dict[str, str] | None = None) -> Settings:
    home.config_file.write_text(yaml)
    settings = config.load(home, {}, KEYS if environ is None else environ)
    assert not settings.errors
    return settings


def choose(settings: Settings, session: str | None = None, **choice: Any) -> Route:
    asked = RouteChoice(**choice) if choice else of_session(settings, {"model": session, "source": "cli"})
    return primary(settings, asked or RouteChoice())


def route_fields(route: Route) -> tuple[str, str, str, str]:
    return route.provider, route.model, route.base_url, route.api_mode


def keys(route: Route) -> list[str]:
    return [credential.reveal() for credential in route.credentials]


# ---- what is chosen

CONFIGURED = "model: {default: gpt-x, provider: openai}"


def test_default_route_is_local_model(home: Home) -> None:
    assert routes(load(home)) == [local(load(home))]
    assert LOCAL.api_mode == "local" and LOCAL.credentials == ()


@pytest.mark.parametrize(
    ("yaml", "environ", "session", "choice", "expected"),
    [
        (CONFIGURED, {}, None, {}, ("openai", "gpt-x")),
        (CONFIGURED, {"HERMES_INFERENCE_MODEL": "gpt-env"}, None, {}, ("openai", "gpt-env")),
        (CONFIGURED, {"HERMES_INFERENCE_PROVIDER": "anthropic"}, None, {}, ("anthropic", "gpt-x")),
        (CONFIGURED, {"HERMES_INFERENCE_MODEL": "gpt-env"}, "gpt-session", {}, ("openai", "gpt-session")),
        (CONFIGURED, {}, "gpt-session", {"model": "gpt-run"}, ("openai", "gpt-run")),
        (CONFIGURED, {}, None, {"provider": "anthropic", "model": "claude-x"}, ("anthropic", "claude-x")),
        ("", {"HERMES_INFERENCE_PROVIDER": "openai", "HERMES_INFERENCE_MODEL": "m"}, None, {}, ("openai", "m")),
        ("", {}, None, {"provider": "openai", "model": "m"}, ("openai", "m")),
        ("model: {provider: local}", {}, None, {}, ("local", "local")),
        (CONFIGURED, {}, None, {"provider": "local"}, ("local", "local")),
        ("model: {default: m, base_url: 'http://127.0.0.1:9/v1'}", {}, None, {}, ("custom", "m")),
        ("model: {default: m, provider: mine, base_url: 'http://127.0.0.1:9/v1'}", {}, None, {}, ("mine", "m")),
    ],
)
def test_route_precedence_run_session_environment_file(
    home: Home,
    yaml: str,
    environ: dict[str, str],
    session: str | None,
    choice: dict[str, Any],
    expected: tuple[str, str],
) -> None:
    route = choose(load(home, yaml, {**KEYS, **environ}), session, **choice)
    assert (route.provider, route.model) == expected


NAMES = """
model: {default: m, provider: openai}
fallback_providers: [openrouter/org/big, {provider: elsewhere, model: x, base_url: 'https://x.test/v1'}]
providers: {mine: {base_url: 'https://llm.test/v1', models: [first]}}
api_server: {model_routes: {fast: {model: small}, mine/first: {model: other}}}
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fast", ("openai", "small")),
        ("mine/first", ("openai", "other")),  # an alias comes first
        ("mine/second", ("mine", "second")),
        ("openai/gpt-y", ("openai", "gpt-y")),
        ("openrouter/a/b", ("openrouter", "a/b")),
        ("custom/m", None),
        ("anthropic/claude-x", None),  # known, but not configured here
        ("elsewhere/x", None),  # configured with an address of its own
        ("mine/", None),
        ("/m", None),
        ("mine", None),
        ("", None),
    ],
)
def test_model_name_is_alias_or_provider_model(home: Home, name: str, expected: tuple[str, str] | None) -> None:
    settings = load(home, NAMES)
    choice = named(settings, name)
    assert (route_fields(primary(settings, choice))[:2] if choice else None) == expected
    assert listed(settings) == {"mine/first": "first", "openrouter/org/big": "org/big"}


@pytest.mark.parametrize(
    ("choice", "base_url", "mode"),
    [
        ({"provider": "openai", "model": "m"}, OPENAI, "codex_responses"),
        ({"provider": "anthropic", "model": "m"}, ANTHROPIC, "anthropic_messages"),
        ({"provider": "openrouter", "model": "m"}, "https://openrouter.ai/api/v1", "chat_completions"),
        ({"model": "m", "base_url": "https://x.test/anthropic"}, "https://x.test/anthropic", "anthropic_messages"),
        ({"model": "m", "base_url": "https://x.test/v1"}, "https://x.test/v1", "chat_completions"),
        ({"model": "m", "base_url": OPENAI}, OPENAI, "codex_responses"),
        ({"provider": "openai", "model": "m", "api_mode": "chat_completions"}, OPENAI, "chat_completions"),
    ],
)
def test_url_and_protocol_follow_from_provider_or_host(
    home: Home, choice: dict[str, Any], base_url: str, mode: str
) -> None:
    assert route_fields(choose(load(home), **choice))[2:] == (base_url, mode)


def test_provider_entry_settings(home: Home) -> None:
    yaml = """
model: {default: big, provider: mine}
providers:
  mine:
    base_url: https://llm.test/v1
    api_mode: codex_responses
    models: {big: {context_length: 64000, max_tokens: 900}, small: {}}
    headers: {X-Team: blue}
    extra_body: {priority: 1}
    request_timeout_seconds: 77
    stale_timeout_seconds: 33
"""
    route = choose(load(home, yaml))
    assert route_fields(route) == ("mine", "big", "https://llm.test/v1", "codex_responses")
    assert (route.window_tokens, route.max_output_tokens) == (64000, 900)
    assert (dict(route.headers), dict(route.extra_body)) == ({"X-Team": "blue"}, {"priority": 1})
    assert (route.request_timeout_s, route.stale_timeout_s) == (77, 33)
    assert choose(load(home, yaml), model="small").window_tokens is None


@pytest.mark.parametrize("models", ["[first, second]", "{first: {}, second: {}}"])
def test_default_model_is_first_of_provider(home: Home, models: str) -> None:
    settings = load(home, f"providers: {{mine: {{base_url: 'https://llm.test/v1', models: {models}}}}}")
    assert choose(settings, provider="mine").model == "first"


def test_window_and_limit_apply_to_configured_model_only(home: Home) -> None:
    settings = load(home, "model: {default: m, provider: openai, context_length: 50000, max_tokens: 700}")
    assert (choose(settings).window_tokens, choose(settings).max_output_tokens) == (50000, 700)
    other = choose(settings, model="other")
    assert (other.window_tokens, other.max_output_tokens) == (None, None)


def test_sampling_settings_apply_to_configured_model_only(home: Home) -> None:
    settings = load(home, "model: {default: m, provider: openai, temperature: 0.3, stop: [END]}")
    assert choose(settings).sampling == {"temperature": 0.3, "stop": ["END"]}
    assert choose(settings, model="other").sampling == {}
    assert local(load(home, "model: {temperature: 0.7, max_tokens: 99}")).sampling == {"temperature": 0.7}


def test_extra_body_of_run_is_merged_over_entry(home: Home) -> None:
    yaml = "providers: {mine: {base_url: 'https://x.test', models: [m], extra_body: {a: 1, b: 1}}}"
    route = choose(load(home, yaml), provider="mine", extra_body={"b": 2})
    assert dict(route.extra_body) == {"a": 1, "b": 2}


# ---- keys


@pytest.mark.parametrize(
    ("yaml", "choice", "expected"),
    [
        (CONFIGURED, {}, ["key-of-openai"]),
        ("model: {default: m, provider: openai, api_key: own}", {}, ["own"]),
        (CONFIGURED, {"api_key": "given"}, ["given"]),
        (CONFIGURED, {"provider": "anthropic"}, ["key-of-anthropic"]),
        ("model: {default: m, provider: openai, api_key: own}", {"provider": "anthropic"}, ["key-of-anthropic"]),
        # A key goes only to the address it belongs to.
        ("model: {default: m, provider: openai, api_key: own}", {"base_url": "https://evil.test/v1"}, []),
        (CONFIGURED, {"base_url": "https://evil.test/v1"}, []),
        ("model: {default: m, provider: openai, base_url: 'https://proxy.test/v1'}", {}, []),
        ("{model: {default: m, provider: openai}, providers: {openai: {base_url: 'https://proxy.test/v1'}}}", {}, []),
        (
            "{model: {default: m, provider: openai}, "
            "providers: {openai: {base_url: 'https://proxy.test/v1', api_key: of-proxy}}}",
            {"base_url": "https://evil.test/v1"},
            [],
        ),
    ],
)
def test_api_key_is_sent_only_to_its_provider(
    home: Home, yaml: str, choice: dict[str, Any], expected: list[str]
) -> None:
    assert keys(choose(load(home, yaml), **choice)) == expected


def test_several_keys_are_ordered_and_unique(home: Home) -> None:
    yaml = "providers: {openai: {api_key: a, keys: [b, a, c], key_env: MINE, models: [m]}}"
    route = choose(load(home, yaml, {"MINE": "d", "OPENAI_API_KEY": "b"}), provider="openai")
    assert keys(route) == ["a", "b", "c", "d"]


def test_api_key_is_not_in_route_repr(home: Home) -> None:
    assert "key-of-openai" not in repr(choose(load(home, CONFIGURED)))


@pytest.mark.parametrize(
    ("yaml", "choice", "name"),
    [
        ("", {"provider": "openai", "model": "m"}, "OPENAI_API_KEY"),
        ("", {"provider": "ollama", "model": "m"}, ""),
        ("", {"model": "m", "base_url": "https://x.test/v1"}, ""),
        ("", {"provider": "openai", "model": "m", "base_url": "https://x.test/v1"}, ""),
        ("providers: {mine: {base_url: 'https://x.test', key_env: MINE, models: [m]}}", {"provider": "mine"}, "MINE"),
        ("", {"provider": "openai", "model": "m", "api_key": "given"}, ""),
        ("", {"provider": "local"}, ""),
    ],
)
def test_missing_key_names_variable(home: Home, yaml: str, choice: dict[str, Any], name: str) -> None:
    settings = load(home, yaml, {})
    assert missing_key(settings, choose(settings, **choice)) == name


# ---- faults


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"model": "gpt-x"}, "no provider"),
        ({"provider": "openia", "model": "m"}, "openai"),
        ({"provider": "nobody", "model": "m"}, "nobody"),
        ({"provider": "openai"}, "no model"),
        ({"base_url": "https://x.test/v1"}, "no model"),
    ],
)
def test_unreachable_route_is_rejected_with_hint(home: Home, choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(load(home), **choice)
    assert message in str(refused.value) and refused.value.hint


# ---- fallbacks and tasks


FALLBACKS = """
fallback_providers:
  - anthropic/claude-x
  - openrouter/meta/llama
  - {model: m, base_url: "http://127.0.0.1:1/v1"}
  - anthropic/claude-x
"""


def test_fallbacks_are_ordered_and_unique(home: Home) -> None:
    assert [(r.provider, r.model) for r in routes(load(home, CONFIGURED + FALLBACKS))] == [
        ("openai", "gpt-x"),
        ("anthropic", "claude-x"),
        ("openrouter", "meta/llama"),
        ("custom", "m"),
    ]


def test_primary_among_fallbacks_stays_first(home: Home) -> None:
    settings = load(home, CONFIGURED + "\nfallback_providers: [anthropic/claude-x, openai/gpt-x]")
    assert [r.provider for r in routes(settings)] == ["openai", "anthropic"]


def test_run_can_override_fallbacks(home: Home) -> None:
    settings = load(home, CONFIGURED + "\nfallback_providers: [anthropic/claude-x]")
    assert len(routes(settings, RouteChoice(fallbacks=()))) == 1
    own = routes(settings, RouteChoice(fallbacks=("groq/m",)))
    assert [r.provider for r in own] == ["openai", "groq"]


def test_fallback_entry_fields(home: Home) -> None:
    settings = load(home, "", {"MINE": "of-mine"})
    entry = {
        "provider": "mine",
        "model": "m",
        "base_url": "https://x.test/v1",
        "key_env": "MINE",
        "context_length": 9000,
        "api_mode": "anthropic_messages",
    }
    route = fallback(settings, entry)
    assert (keys(route), route.window_tokens, route.api_mode) == (["of-mine"], 9000, "anthropic_messages")
    assert fallback(settings, "local") == local(settings)


def test_auxiliary_task_defaults_to_main_route(home: Home) -> None:
    assert auxiliary(load(home, CONFIGURED), "compression") is None
    settings = load(home, CONFIGURED + "\nauxiliary: {compression: {model: gpt-small}}")
    small = auxiliary(settings, "compression")
    assert small is not None and (small.provider, small.model) == ("openai", "gpt-small")
    assert auxiliary(settings, "title_generation") is None


def test_auxiliary_task_with_own_provider(home: Home) -> None:
    settings = load(home, CONFIGURED + "\nauxiliary: {vision: {provider: anthropic, model: claude-x}}")
    route = auxiliary(settings, "vision")
    assert route is not None and route_fields(route) == ("anthropic", "claude-x", ANTHROPIC, "anthropic_messages")
    assert keys(route) == ["key-of-anthropic"]
