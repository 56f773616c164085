"""Connecting a model: the choices, testing one, and writing it to the settings. For server and command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hermes import local
from hermes.core.errors import ConfigError, ServiceError
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.spec import RouteChoice, RunSpec
from hermes.services.models import UNKNOWN, Route, capabilities_of, facts_for, primary, problem_of
from hermes.services.usage import TRIAL
from hermes.settings import config
from hermes.settings.known_providers import DEFAULT_API_MODE, KNOWN_PROVIDERS

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.runs.engine import RunEngine
    from hermes.settings.config import Settings

ABILITIES = ("images", "tools", "reasoning", "cache", "parallel_calls")
EMBEDDED = "local"
# Settings of one provider's address.
OF_ADDRESS: JsonObject = dict.fromkeys(
    f"model.{name}" for name in ("base_url", "api_key", "api_mode", "context_length", "max_tokens", "path")
)
_QUESTION = "Say hello in one short sentence."
_TRIAL_TOKENS_MAX = 1_000
_CHOSEN = ("model.default", "model.provider", "model.base_url")


def described(home: Home, settings: Settings, route: Route, windows: Mapping[str, int] | None = None) -> JsonObject:
    """A route with its window and abilities; whether there is a key, but not which. Blocks."""
    able = capabilities_of(route)
    return {
        "provider": route.provider,
        "model": route.model,
        "base_url": route.base_url,
        "api_mode": route.api_mode,
        "window": route.window_tokens or (windows or {}).get(route.model) or able.window,
        "max_output": route.max_output_tokens or able.max_output,
        "abilities": [name for name in ABILITIES if getattr(able, name)],
        "key": bool(route.credentials),
        "problem": problem_of(settings, route, home) or None,
    }


def status(home: Home, settings: Settings) -> JsonObject:
    """The configured model, or why none can be asked. Blocks."""
    try:
        route = primary(settings, RouteChoice())
    except ConfigError as error:
        nothing = dict.fromkeys(("provider", "model", "base_url", "api_mode", "window", "max_output"))
        return {**nothing, "abilities": [], "key": False, "problem": str(error), "embedded": False, **_file(None)}
    embedded = route.api_mode == "local"
    file = _file(local.model_file(home, settings) if embedded else None)
    return {**described(home, settings, route), "embedded": embedded, **file}


def _file(path: Any) -> JsonObject:
    if path is None or not path.is_file():
        return {"title": None, "bytes": None}
    from hermes.local.install import NAME, TITLE

    return {"title": TITLE if path.name == NAME else path.stem, "bytes": path.stat().st_size}


def providers(home: Home, settings: Settings) -> list[JsonObject]:
    """The embedded model, the known providers, and the configured ones."""
    rows: list[JsonObject] = []
    for name in dict.fromkeys([*KNOWN_PROVIDERS, *settings.providers]):
        known, entry = KNOWN_PROVIDERS.get(name), settings.providers.get(name)
        rows.append(
            {
                "name": name,
                "base_url": (entry.base_url if entry else None) or (known.base_url if known else "") or None,
                "api_mode": (entry.api_mode if entry else None) or (known.api_mode if known else DEFAULT_API_MODE),
                "needs_key": bool(known and known.key_env),
                "has_key": has_key(settings, name),
                "key_env": (known.key_env if known else "") or None,
                "configured": entry is not None or name == settings.model.provider,
                "problem": local.status(home, settings)["problem"] if name == EMBEDDED else None,
            }
        )
    return rows


def has_key(settings: Settings, provider: str) -> bool:
    """Whether the provider has the key it needs."""
    known, entry = KNOWN_PROVIDERS.get(provider), settings.providers.get(provider)
    return not (known and known.key_env) or bool(settings.variable(known.key_env) or (entry and entry.api_key))


def likely_model(names: Iterable[str]) -> str:
    """The listed model with the largest known window; else the first."""
    return max(names, key=lambda name: (facts_for(name) is not UNKNOWN, facts_for(name).window))


def choice_of(
    settings: Settings, *, provider: str | None, base_url: str | None, model: str | None, api_key: str | None
) -> RouteChoice:
    """The route for a known or configured provider, or an address."""
    given = {"provider": provider, "base_url": base_url, "model": model, "api_key": api_key}
    for name, value in given.items():
        if value is not None and ("${" in value or not value.strip() or not value.isprintable()):
            raise ServiceError(f"{name} must be plain text.", "invalid_arguments", field=name)
    if (provider is None) is (base_url is None):
        raise ServiceError("Name a provider or an address, and not both.", "invalid_arguments", field="provider")
    if provider is not None and provider not in KNOWN_PROVIDERS and provider not in settings.providers:
        names = ", ".join([*KNOWN_PROVIDERS, *settings.providers])
        raise ServiceError(
            f"There is no provider {provider!r}; there are {names}.", "invalid_arguments", field="provider"
        )
    if base_url is not None and not base_url.startswith(("http://", "https://")):
        raise ServiceError("An address begins with http:// or https://.", "invalid_arguments", field="base_url")
    # A key that was configured for another address is not sent to this one.
    return RouteChoice(provider=provider, base_url=base_url, model=model, api_key=api_key, fallbacks=())


def changes_of(settings: Settings, choice: RouteChoice) -> JsonObject:
    """The settings for a choice. Settings of the previous address are removed."""
    if choice.provider == EMBEDDED:
        return {**OF_ADDRESS, "model.default": None, "model.provider": EMBEDDED}
    moved = choice.base_url is not None or choice.provider != settings.model.provider
    changes: JsonObject = {**(OF_ADDRESS if moved else {}), "model.default": choice.model}
    changes |= {"model.provider": choice.provider} if choice.provider or moved else {}
    changes |= {"model.base_url": choice.base_url} if choice.base_url else {}
    return changes | ({"model.api_key": choice.api_key} if choice.api_key else {})


def check_changeable(settings: Settings) -> None:
    """Refuse where the environment or a flag overrides the settings files."""
    for name in _CHOSEN:
        if settings.source(name) in ("flag", "environment", ".env"):
            where = settings.origin(name).where
            raise ServiceError(f"{name} is decided by {where}; change it there.", "setting_overridden")


def write(home: Home, changes: JsonMapping, *, by: str = "cli") -> None:
    """Write settings; those without a value are removed first."""
    for key in sorted(changes, key=lambda key: changes[key] is not None):
        if changes[key] is None:
            config.unset_value(home, key, by=by)
        else:
            config.set_value(home, key, changes[key], by=by)


async def try_model(
    engine: RunEngine, settings: Settings, home: Home, choice: RouteChoice, seconds: float
) -> JsonObject:
    """Ask a model one small question, the way every turn asks it."""
    choice = replace(choice, fallbacks=())
    route = primary(settings, choice)
    trial = {"provider": route.provider, "model": route.model, "answer": "", "error": None}
    if problem := problem_of(settings, route, home):
        return trial | {"error": problem}
    alone: JsonObject = {"toolsets": frozenset(), "persist": False, "context_files": False, "memory": False}
    alone |= {"max_output_tokens": _TRIAL_TOKENS_MAX, "deadline_seconds": seconds, "max_iterations": 1}
    spec = RunSpec(_QUESTION, TRIAL, kind="cli", source="cli", route=choice, on_detach="cancel", **alone)
    result = await engine.run(spec)
    return trial | {"answer": result["final_response"], "error": result["error"] if result["failed"] else None}
