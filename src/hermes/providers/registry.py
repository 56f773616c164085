"""The known providers: protocol and address of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from ipaddress import IPv6Address, ip_address
from typing import cast
from urllib.parse import urlsplit

from hermes.core.json_types import JsonMapping
from hermes.providers.base import Provider, Route
from hermes.providers.table import Capabilities
from hermes.settings.known_providers import DEFAULT_API_MODE, KNOWN_PROVIDERS

# Loaded when first asked for: a protocol that no route speaks costs nothing.
_MODULES = {
    "chat_completions": "hermes.providers.chat_completions",
    "codex_responses": "hermes.providers.codex_responses",
    "anthropic_messages": "hermes.providers.anthropic_messages",
    "local": "hermes.providers.local",
}
API_MODES = tuple(_MODULES)


@dataclass(frozen=True, slots=True)
class Prefill:
    """How a provider takes the beginning of an answer: as the assistant's last message, with fields in it or in the
    body that say so. With `echoes` the answer repeats it."""

    message: JsonMapping = field(default_factory=dict)
    body: JsonMapping = field(default_factory=dict)
    echoes: bool = False


_PLAIN_PREFILL = Prefill()
_PREFILL_BY_HOST = {
    "api.mistral.ai": Prefill(message={"prefix": True}, echoes=True),
    "api.moonshot.ai": Prefill(message={"partial": True}),
    "api.moonshot.cn": Prefill(message={"partial": True}),
}
_PREFILL_BY_ID = {"vllm": Prefill(body={"continue_final_message": True, "add_generation_prompt": False})}
# Named in advice to people who have configured none.
EXAMPLE_PROVIDER = "openai"
_MODE_BY_HOST = {"api.openai.com": "codex_responses", "api.anthropic.com": "anthropic_messages"}
_MODE_BY_PATH_END = {"/anthropic": "anthropic_messages", "/anthropic/v1": "anthropic_messages"}
# An id under which an address of its own is used still tells the protocol only if that protocol is the id's own.
_MODES_OF_ANY_ADDRESS = ("anthropic_messages", "local")


@cache
def provider_for(api_mode: str) -> Provider:
    if api_mode not in _MODULES:
        raise ValueError(f"unknown api_mode {api_mode!r}; one of {', '.join(API_MODES)}")
    return cast("Provider", import_module(_MODULES[api_mode]).PROVIDER)


@cache
def available(api_mode: str) -> bool:
    return api_mode in _MODULES and find_spec(_MODULES[api_mode]) is not None


def capabilities_of(route: Route) -> Capabilities:
    return provider_for(route.api_mode).capabilities(route.model) if available(route.api_mode) else Capabilities()


def window_of(route: Route) -> int:
    return route.window_tokens or capabilities_of(route).window


def prefill_of(route: Route) -> Prefill | None:
    """How a prefill is sent on a route; None if it is not supported."""
    if capabilities_of(route).prefill:
        return _PLAIN_PREFILL
    if route.api_mode != DEFAULT_API_MODE:
        return None
    return _PREFILL_BY_HOST.get(_host_and_path(route.base_url)[0]) or _PREFILL_BY_ID.get(route.provider)


def api_mode_for(provider_id: str, base_url: str = "", explicit: str | None = None) -> str:
    """The configured protocol, else the known one of the address or provider."""
    if explicit:
        return explicit
    known = KNOWN_PROVIDERS.get(provider_id)
    if not base_url:
        return known.api_mode if known else DEFAULT_API_MODE
    host, path = _host_and_path(base_url)
    if mode := _MODE_BY_HOST.get(host) or next((m for end, m in _MODE_BY_PATH_END.items() if path.endswith(end)), None):
        return mode
    return known.api_mode if known and known.api_mode in _MODES_OF_ANY_ADDRESS else DEFAULT_API_MODE


# Names that only a local network or this machine knows; a name without a dot is one too.
_PRIVATE_NAMES = (".localhost", ".local", ".internal", ".lan", ".home.arpa")


@lru_cache(maxsize=1024)
def is_private(base_url: str) -> bool:
    host, _ = _host_and_path(base_url)
    if host.endswith(_PRIVATE_NAMES) or (host and not {".", ":"} & set(host)):
        return True
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address.is_loopback or address.is_private or address.is_link_local


def address_of(base_url: str) -> str:
    """Host and port of a URL, without user name and password."""
    return urlsplit(base_url).netloc.rpartition("@")[2]


@lru_cache(maxsize=1024)
def _host_and_path(base_url: str) -> tuple[str, str]:
    try:
        parts = urlsplit(base_url if "://" in base_url else f"//{base_url}")
        return (parts.hostname or "").rstrip("."), parts.path.rstrip("/")
    except ValueError:
        return "", ""
