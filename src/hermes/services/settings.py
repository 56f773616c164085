"""Settings as shown to a person, and changed over the API. Blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hermes.core.errors import ConfigError, ServiceError
from hermes.core.json_types import JsonObject
from hermes.providers.routes import CUSTOM
from hermes.runs.schedule import BadTimeZone, zone_named
from hermes.settings import config
from hermes.settings.check import Problem, has_reference, masked
from hermes.settings.keys import closest, did_you_mean, find
from hermes.settings.known_providers import KNOWN_PROVIDERS

if TYPE_CHECKING:
    from hermes.settings.config import Settings, Value
    from hermes.settings.keys import Key

# What may be changed over the API, by an admin: how much, how long and how. Nothing that decides who may come in, what is
# run where, which files and addresses are reached, what needs approval, or where something is kept; and nothing that
# counts only after a restart.
EDITABLE = frozenset(
    {
        *(f"model.{name}" for name in ("max_tokens", "temperature", "top_p")),
        *(f"agent.{name}" for name in ("max_turns", "api_max_retries", "max_answer_chars", "max_parallel_tools")),
        *("agent.reasoning_effort", "agent.clarify_timeout"),
        *(f"compression.{name}" for name in ("enabled", "threshold", "target_ratio", "protect_first_n")),
        "prompt_caching.cache_ttl",
        *(f"memory.{name}_enabled" for name in ("memory", "user_profile")),
        *(f"memory.{name}_char_limit" for name in ("memory", "user")),
        *(f"delegation.{name}" for name in ("max_iterations", "max_concurrent_children", "max_summary_chars")),
        *(f"auxiliary.{name}.timeout" for name in ("compression", "vision", "title_generation")),
        "auxiliary.title_generation.enabled",
        *("terminal.timeout", "terminal.max_timeout"),
        *("tool_output.max_bytes", "tool_output.max_chars", "file_read_max_chars", "web.extract_char_limit"),
        *(f"sessions.{name}" for name in ("auto_prune", "retention_days", "api_retention_days")),
        "cron.max_parallel_jobs",
    }
)


def doubtful_values(settings: Settings) -> list[Problem]:
    """Values that fit their type and lead nowhere: addresses that are none, unknown providers and time zones."""
    rows = [*settings.items()]
    addressed = {name.rpartition(".")[0] for name, _, value in rows if name.endswith(".base_url") and value.value}
    problems: list[Problem] = []
    for name, key, value in rows:
        section, _, field = name.rpartition(".")
        near = message = ""
        if field == "base_url" and value.value and not _is_address(str(value.value)):
            message = f"{name} is no address such as http://127.0.0.1:8000/v1: {masked(key, value.value)!r}."
        elif field == "provider" and section not in addressed:
            near, message = _unknown_provider(settings, name, value.value)
        elif name == "fallback_providers":
            providers = [entry.partition("/")[0] for entry in value.value if isinstance(entry, str)]
            near, message = max((_unknown_provider(settings, name, one) for one in providers), default=("", ""))
        elif name == "timezone" and value.value:
            near, message = _unknown_zone(name, value.value)
        if message:
            hint = f"hermes config describe {key.name}"
            problems.append(Problem("warn", name, None, message, near, where=value.where or "", hint=hint))
    return problems


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and " " not in text
    except ValueError:
        return False


def _unknown_provider(settings: Settings, name: str, provider: Any) -> tuple[str, str]:
    known = {*KNOWN_PROVIDERS, *settings.providers, "auto", CUSTOM}
    if not provider or provider in known:
        return "", ""
    near = closest(str(provider), known)
    return near, f"{name} names no provider that is known or has an address: {provider!r}.{did_you_mean(near)}"


def _unknown_zone(name: str, zone: str) -> tuple[str, str]:
    try:
        zone_named(zone)
    except BadTimeZone:
        from zoneinfo import available_timezones

        near = closest(zone, available_timezones())
        return near, f"{name} is no time zone: {zone!r}.{did_you_mean(near)}"
    return "", ""


def rows(settings: Settings) -> list[JsonObject]:
    """Every setting with its value and source; secrets are masked."""
    return [_row(name, key, value) for name, key, value in settings.items()]


def _row(name: str, key: Key, value: Value) -> JsonObject:
    return {
        "key": name,
        "description": key.mark.text,
        "value": masked(key, value.value),
        "source": value.source,
        "where": value.where or None,
        "default": masked(key, key.default),
        "expected": key.expected,
        "choices": list(key.choices),
        "secret": key.mark.secret,
        "editable": key.name in EDITABLE,
    }


def change(settings: Settings, name: str, value: Any, *, by: str) -> JsonObject:
    """Write a setting that may be changed over the API, or with None remove it from the files. Returns the setting as
    it is then, which a stronger source may still decide."""
    try:
        key, path = find(name)
    except config.UnknownKey as error:
        raise ServiceError(error.message, "setting_not_found") from None
    if key.name not in EDITABLE:
        message = f"{key.name} cannot be changed over the API; change it at the machine: hermes config set."
        raise ServiceError(message, "setting_read_only")
    if has_reference(value):
        raise ServiceError("A value may not refer to a variable here.", "invalid_arguments", field="value")
    try:
        if value is None:
            config.unset_value(settings.home, key.name, by=by)
        else:
            config.set_value(settings.home, key.name, value, by=by)
    except config.BadValue as error:
        raise ServiceError(error.message, "invalid_arguments", field="value") from None
    except ConfigError as error:
        raise ServiceError(f"{error.message} Change it at the machine.", "setting_read_only") from None
    fresh = config.reload_if_changed(settings)[0]
    return _row(".".join(path), key, fresh.origin(key.name))
