"""Which protocol is spoken where."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hermes.providers.registry import (
    API_MODES,
    KNOWN_PROVIDERS,
    api_mode_for,
    available,
    capabilities_of,
    is_private,
    provider_for,
)
from hermes.providers.table import Capabilities

from .folding import route


@pytest.mark.parametrize("mode", ["chat_completions", "codex_responses", "anthropic_messages"])
def test_provider_for_protocol(mode: str) -> None:
    assert provider_for(mode).api_mode == mode
    assert provider_for(mode) is provider_for(mode)


def test_unknown_protocol_is_rejected() -> None:
    with pytest.raises(ValueError, match="carrier_pigeon"):
        provider_for("carrier_pigeon")


def test_uninstalled_protocol_is_not_available() -> None:
    assert available("chat_completions")
    assert not available("carrier_pigeon")


def test_capabilities_of_a_route() -> None:
    assert capabilities_of(route("chat_completions", "gpt-4o")).window == 128_000
    assert capabilities_of(route("carrier_pigeon")) == Capabilities()


def test_translators_are_imported_lazily() -> None:
    code = "import sys, hermes.providers.registry; print([m for m in sys.modules if 'completions' in m])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("provider", "base_url", "explicit", "mode"),
    [
        ("openai", "", None, "codex_responses"),
        ("openai", "https://api.openai.com/v1", None, "codex_responses"),
        ("", "https://api.openai.com/v1/", None, "codex_responses"),
        ("openai", "http://127.0.0.1:9000/v1", None, "chat_completions"),
        ("anthropic", "", None, "anthropic_messages"),
        ("anthropic", "http://127.0.0.1:9000", None, "anthropic_messages"),
        ("", "https://API.Anthropic.com", None, "anthropic_messages"),
        ("deepseek", "https://api.deepseek.com/anthropic", None, "anthropic_messages"),
        ("x", "https://h/anthropic/v1/", None, "anthropic_messages"),
        ("x", "https://h/anthropic-proxy", None, "chat_completions"),
        ("openrouter", "", None, "chat_completions"),
        ("", "https://openrouter.ai/api/v1", None, "chat_completions"),
        ("mine", "", "codex_responses", "codex_responses"),
        ("openai", "", "chat_completions", "chat_completions"),
        ("mine", "", None, "chat_completions"),
        ("local", "", None, "local"),
        ("", "http://[broken", None, "chat_completions"),
    ],
)
def test_api_mode(provider: str, base_url: str, explicit: str | None, mode: str) -> None:
    assert api_mode_for(provider, base_url, explicit) == mode


@pytest.mark.parametrize(
    ("url", "private"),
    [
        ("http://localhost:8080/v1", True),
        ("http://LOCALHOST.:80", True),
        ("http://box.localhost", True),
        ("localhost:1234", True),
        ("http://127.0.0.1:11434/v1", True),
        ("http://127.9.9.9", True),
        ("http://10.1.2.3", True),
        ("http://192.168.1.5:8000", True),
        ("http://172.16.0.1", True),
        ("http://169.254.1.1", True),
        ("http://[::1]:8080", True),
        ("http://[fd00::1]", True),
        ("http://[fe80::1%25eth0]", True),
        ("http://[::ffff:10.0.0.1]", True),
        ("http://[::ffff:8.8.8.8]", False),
        ("http://8.8.8.8", False),
        ("https://api.openai.com/v1", False),
        ("https://localhost.example.com", False),
        ("https://10.0.0.1.example.com", False),
        ("http://ollama:11434/v1", True),
        ("http://nas.local:11434", True),
        ("http://host.docker.internal:1234/v1", True),
        ("https://internal.example.com", False),
        ("http://[broken", False),
        ("", False),
    ],
)
def test_private_addresses(url: str, private: bool) -> None:
    assert is_private(url) is private


def test_known_providers_are_complete() -> None:
    for name, known in KNOWN_PROVIDERS.items():
        assert known.api_mode in API_MODES
        if name != "local":
            assert api_mode_for("", known.base_url) == known.api_mode
            assert bool(known.key_env) != is_private(known.base_url)
