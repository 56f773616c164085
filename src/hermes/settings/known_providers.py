"""Providers that need no entry in the settings."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_API_MODE = "chat_completions"


@dataclass(frozen=True, slots=True)
class KnownProvider:
    """Without `key_env` it needs no key."""

    base_url: str
    api_mode: str = DEFAULT_API_MODE
    key_env: str = ""


KNOWN_PROVIDERS: dict[str, KnownProvider] = {
    "local": KnownProvider("", "local"),
    "openai": KnownProvider("https://api.openai.com/v1", "codex_responses", "OPENAI_API_KEY"),
    "anthropic": KnownProvider("https://api.anthropic.com", "anthropic_messages", "ANTHROPIC_API_KEY"),
    "openrouter": KnownProvider("https://openrouter.ai/api/v1", key_env="OPENROUTER_API_KEY"),
    "gemini": KnownProvider("https://generativelanguage.googleapis.com/v1beta/openai", key_env="GEMINI_API_KEY"),
    "groq": KnownProvider("https://api.groq.com/openai/v1", key_env="GROQ_API_KEY"),
    "together": KnownProvider("https://api.together.xyz/v1", key_env="TOGETHER_API_KEY"),
    "mistral": KnownProvider("https://api.mistral.ai/v1", key_env="MISTRAL_API_KEY"),
    "deepseek": KnownProvider("https://api.deepseek.com/v1", key_env="DEEPSEEK_API_KEY"),
    "xai": KnownProvider("https://api.x.ai/v1", key_env="XAI_API_KEY"),
    "fireworks": KnownProvider("https://api.fireworks.ai/inference/v1", key_env="FIREWORKS_API_KEY"),
    "cerebras": KnownProvider("https://api.cerebras.ai/v1", key_env="CEREBRAS_API_KEY"),
    "moonshot": KnownProvider("https://api.moonshot.ai/v1", key_env="MOONSHOT_API_KEY"),
    "zai": KnownProvider("https://api.z.ai/api/paas/v4", key_env="ZAI_API_KEY"),
    "nous": KnownProvider("https://inference-api.nousresearch.com/v1", key_env="NOUS_API_KEY"),
    "nvidia": KnownProvider("https://integrate.api.nvidia.com/v1", key_env="NVIDIA_API_KEY"),
    "huggingface": KnownProvider("https://router.huggingface.co/v1", key_env="HF_TOKEN"),
    "ollama": KnownProvider("http://127.0.0.1:11434/v1"),
    "lmstudio": KnownProvider("http://127.0.0.1:1234/v1"),
    "vllm": KnownProvider("http://127.0.0.1:8000/v1"),
    "llamacpp": KnownProvider("http://127.0.0.1:8080/v1"),
}
