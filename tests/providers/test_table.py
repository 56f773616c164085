"""The table of models and what follows from it."""

from __future__ import annotations

import pytest

from hermes.providers.base import Prompt, Route
from hermes.providers.registry import provider_for
from hermes.providers.table import UNKNOWN, Capabilities, facts_for, nearest_effort


@pytest.mark.parametrize(
    ("model", "window", "max_output", "reasoning", "prefill"),
    [
        ("claude-3-haiku-20240307", 200_000, 4_096, False, True),
        ("claude-3-5-sonnet-20241022", 200_000, 8_192, False, True),
        ("anthropic/claude-3.7-sonnet:thinking", 200_000, 64_000, True, True),
        ("claude-opus-4-20250514", 200_000, 32_000, True, True),
        ("us.anthropic.claude-opus-4-1-20250805-v1:0", 200_000, 32_000, True, True),
        ("claude-sonnet-4-5-20250929", 200_000, 64_000, True, True),
        ("anthropic/claude-haiku-4.5", 200_000, 64_000, True, True),
        ("claude-opus-4-6", 200_000, 128_000, True, False),
        ("claude-sonnet-4-6", 200_000, 64_000, True, False),
        ("claude-opus-4-8", 1_000_000, 128_000, True, False),
        ("claude-sonnet-5", 1_000_000, 128_000, True, False),
        ("claude-haiku-5-5", 1_000_000, 128_000, True, False),
        ("claude-fable-5-1", 1_000_000, 128_000, True, False),
        ("claude-something-9", 200_000, 64_000, True, False),
        ("gpt-4o-mini", 128_000, 16_384, False, False),
        ("openai/gpt-4.1-nano", 1_047_576, 32_768, False, False),
        ("gpt-4-1106-preview", 128_000, 4_096, False, False),
        ("gpt-5", 400_000, 128_000, True, False),
        ("gpt-5-2025-08-07", 400_000, 128_000, True, False),
        ("gpt-5-chat-latest", 128_000, 16_384, False, False),
        ("gpt-5.6-sol", 1_050_000, 128_000, True, False),
        ("gpt-6-astra", 1_050_000, 128_000, True, False),
        ("o3-mini", 200_000, 100_000, True, False),
        ("o4-mini-2025-04-16", 200_000, 100_000, True, False),
        ("models/gemini-2.5-flash", 1_048_576, 65_536, True, False),
        ("gemini-3-pro-preview", 1_048_576, 65_536, True, False),
        ("deepseek-chat", 131_072, 8_192, False, False),
        ("deepseek/deepseek-v4-pro", 1_000_000, 65_536, True, False),
        ("Qwen/Qwen3-Coder-480B", 262_144, 65_536, False, False),
        ("meta-llama/Llama-3.3-70B-Instruct", 131_072, 8_192, False, False),
        ("llama3.1:8b", 131_072, 8_192, False, False),
        ("mistral-large-latest", 131_072, 8_192, False, False),
        ("test/model", 32_768, 8_192, False, False),
        ("", 32_768, 8_192, False, False),
    ],
)
def test_model_families(model: str, window: int, max_output: int, reasoning: bool, prefill: bool) -> None:
    facts = facts_for(model)
    assert (facts.window, facts.max_output, facts.reasoning, facts.prefill) == (window, max_output, reasoning, prefill)


def test_every_table_row_is_usable() -> None:
    for model in ("claude-opus-5-5", "gpt-6-luna", "grok-4", "kimi-k2-thinking", "glm-4.6", "gpt-oss-120b"):
        facts = facts_for(model)
        assert facts is not UNKNOWN
        assert facts.max_output < facts.window


def test_unknown_model_has_default_capabilities() -> None:
    for mode in ("chat_completions", "codex_responses", "anthropic_messages"):
        capabilities = provider_for(mode).capabilities("test/model")
        defaults = Capabilities(options=capabilities.options)
        assert all(getattr(capabilities, name) == getattr(defaults, name) for name in Capabilities.__struct_fields__)


@pytest.mark.parametrize(
    ("mode", "model", "ignored"),
    [
        ("chat_completions", "test/model", ["verbosity"]),
        (
            "chat_completions",
            "gpt-5",
            ["frequency_penalty", "logit_bias", "presence_penalty", "stop", "temperature", "top_p"],
        ),
        (
            "codex_responses",
            "gpt-4o",
            ["frequency_penalty", "logit_bias", "presence_penalty", "seed", "stop", "verbosity"],
        ),
        (
            "anthropic_messages",
            "claude-opus-4-8",
            [
                "frequency_penalty",
                "logit_bias",
                "presence_penalty",
                "prompt_cache_key",
                "seed",
                "temperature",
                "top_p",
                "verbosity",
            ],
        ),
    ],
)
def test_unsupported_options_are_named(mode: str, model: str, ignored: list[str]) -> None:
    names = "temperature top_p presence_penalty frequency_penalty seed stop logit_bias verbosity service_tier"
    names += " prompt_cache_key parallel_tool_calls user safety_identifier"
    sampling = {**dict.fromkeys(names.split(), "1"), "temperature": 1, "service_tier": "auto", "other": None}
    wire = provider_for(mode).request(Route("p", model, "https://x.test", mode), None, Prompt(sampling=sampling))
    assert list(wire.left_out) == ignored


@pytest.mark.parametrize(
    ("wanted", "offered", "chosen"),
    [
        ("medium", ("low", "medium", "high"), "medium"),
        ("xhigh", ("low", "medium", "high"), "high"),
        ("minimal", ("low", "medium"), "low"),
        ("none", ("none", "low"), "none"),
        ("medium", ("low", "high"), "low"),
        ("high", (), None),
        ("", ("low",), None),
        ("odd", ("low",), None),
    ],
)
def test_nearest_effort(wanted: str, offered: tuple[str, ...], chosen: str | None) -> None:
    assert nearest_effort(wanted, offered) == chosen
