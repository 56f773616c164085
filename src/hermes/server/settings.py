"""The platforms that the gateway serves, and their options."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hermes.core import home
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.settings import config
from hermes.settings.check import coerce
from hermes.settings.keys import KEYS, nest
from hermes.settings.schema_server import ApiServer

_PLAIN_KEYS = [key for key in KEYS if key.path[0] == "api_server" and not key.is_pattern]


class Platform(enum.Enum):
    API_SERVER = "api_server"


@dataclass
class PlatformConfig:
    """`extra` holds what was set for the platform, and no defaults."""

    enabled: bool = False
    token: str | None = field(default=None, repr=False)
    extra: JsonObject = field(default_factory=dict, repr=False)


@dataclass
class GatewayConfig:
    platforms: dict[Platform, PlatformConfig] = field(default_factory=dict)

    def get_connected_platforms(self) -> list[Platform]:
        """The platforms to start. The API server needs no token: without a key it is open, on loopback only."""
        return [platform for platform, settings in self.platforms.items() if settings.enabled]


def load_gateway_config(settings: config.Settings | None = None) -> GatewayConfig:
    """The gateway of the current home, or of given settings."""
    if settings is None:
        settings = config.load(home.resolve())
    extra: JsonObject = {}
    for key in _PLAIN_KEYS:
        value = settings.origin(key.name)
        if key.name != "api_server.enabled" and value.source != "default":
            nest(extra, key.path[1:], value.value)
    if "keys" in extra:
        extra["keys"] = [_with_key(entry, settings) for entry in extra["keys"]]
    if routes := msgspec.to_builtins(settings.api_server.model_routes):
        extra["model_routes"] = routes
    enabled = settings.origin("api_server.enabled")
    # A key enables the server, unless it is switched off explicitly.
    is_on = bool(extra.get("key")) if enabled.source == "default" else enabled.value is True
    return GatewayConfig({Platform.API_SERVER: PlatformConfig(enabled=is_on, extra=extra)})


def _with_key(entry: JsonMapping, settings: config.Settings) -> JsonObject:
    """The entry with the key itself, where a variable holds it."""
    name = entry.get("key_env")
    return {**entry, "key": settings.variable(str(name)) or ""} if name else dict(entry)


def api_server_options(extra: JsonMapping, environ: Mapping[str, str] | None = None) -> ApiServer:
    """The options of the API server: each from `extra`, else its variable, else the default. A value that does not fit
    gives the default."""
    env = os.environ if environ is None else environ
    options: JsonObject = {"model_routes": dict(extra.get("model_routes") or {})}
    for key in _PLAIN_KEYS:
        value: Any = extra
        for part in key.path[1:]:
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            value = env.get(key.env) or None
        # Without a valid value the struct's default counts.
        if value is not None:
            with suppress(ValueError):
                nest(options, key.path[1:], coerce(key, value))
    return msgspec.convert(options, ApiServer)
