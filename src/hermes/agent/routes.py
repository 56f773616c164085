"""Which route a turn takes: model, address, protocol and keys, from what was asked for and what is configured."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hermes.errors import ConfigError
from hermes.providers.base import Credential, Route
from hermes.providers.registry import EXAMPLE_PROVIDER, KNOWN_PROVIDERS, api_mode_for
from hermes.runs.spec import RouteChoice

if TYPE_CHECKING:
    from hermes.config import Settings

LOCAL = Route("local", "local", "http://local.localhost", "local")


def routes(settings: Settings, choice: RouteChoice | None = None, session_model: str | None = None) -> list[Route]:
    """The primary route, then the fallbacks in order."""
    choice = choice or RouteChoice()
    first = primary(settings, choice, session_model)
    others = choice.fallbacks if choice.fallbacks is not None else settings.get("fallback_providers") or []
    if not others:
        return [first]
    rest = [fallback(settings, entry) for entry in others]
    found: dict[tuple[str, ...], Route] = {}
    for route in (first, *rest):
        found.setdefault(route.key, route)
    return list(found.values())


def primary(settings: Settings, choice: RouteChoice, session_model: str | None = None) -> Route:
    """What was asked for, else the session's, else what is configured, else the local model."""
    if choice.alias:
        named = settings.section("api_server.model_routes").get(choice.alias) or {}
        choice = replace(choice, alias=None, **{name: value for name, value in named.items() if value})
    configured = settings.section("model")
    provider = choice.provider or configured["provider"] or ""
    model = choice.model or session_model or configured["default"] or ""
    own_address = choice.base_url is not None or (
        choice.provider is not None and choice.provider != configured["provider"]
    )
    base_url = choice.base_url if own_address else configured["base_url"]
    # A key goes only to the address it was configured for.
    api_key = choice.api_key if choice.api_key is not None else None if own_address else configured["api_key"]
    if not (provider or model or base_url):
        return local(settings)
    route = _route(
        settings,
        provider,
        model,
        base_url or "",
        choice.api_mode or (None if own_address else configured["api_mode"]),
        api_key,
        configured["context_length"] if model == configured["default"] else None,
        configured["max_tokens"] if model == configured["default"] else None,
        where="model.provider",
    )
    return replace(route, extra_body={**route.extra_body, **choice.extra_body}) if choice.extra_body else route


def is_allowed(
    settings: Settings, aliases: frozenset[str] | None, choice: RouteChoice | None, model: str | None = None
) -> bool:
    """Whether a choice, or a session's model, leads to the model of one of these aliases. None allows every model."""
    if aliases is None:
        return True
    asked = primary(settings, choice or RouteChoice(), model)
    allowed = (primary(settings, RouteChoice(alias=alias)) for alias in aliases)
    return any((route.provider, route.model) == (asked.provider, asked.model) for route in allowed)


def local(settings: Settings) -> Route:
    """The embedded model, with the room it is given."""
    from hermes.local import context

    return replace(LOCAL, window_tokens=settings.get("model.context_length") or context(settings))


def fallback(settings: Settings, entry: str | Mapping[str, Any]) -> Route:
    """One entry of `fallback_providers`: a provider, `provider/model`, or a mapping."""
    if isinstance(entry, str):
        provider, _, model = entry.partition("/")
        entry = {"provider": provider, "model": model}
    key = entry.get("api_key") or (settings.variable(str(entry["key_env"])) if entry.get("key_env") else None)
    return _route(
        settings,
        str(entry.get("provider") or ""),
        str(entry.get("model") or ""),
        str(entry.get("base_url") or ""),
        entry.get("api_mode"),
        key,
        entry.get("context_length"),
        entry.get("max_tokens"),
        where="fallback_providers",
    )


def auxiliary(settings: Settings, task: str) -> Route | None:
    """The route that a task has of its own, if it has one."""
    provider, model = settings.get(f"auxiliary.{task}.provider"), settings.get(f"auxiliary.{task}.model")
    if provider in (None, "", "auto"):
        return primary(settings, RouteChoice(model=model)) if model else None
    return _route(settings, provider, model or "", "", None, None, None, None, where=f"auxiliary.{task}.provider")


def _route(
    settings: Settings,
    provider: str,
    model: str,
    base_url: str,
    api_mode: str | None,
    api_key: str | None,
    window: int | None,
    max_output: int | None,
    *,
    where: str,
) -> Route:
    entries = settings.section("providers")
    entry, known = entries.get(provider, {}), KNOWN_PROVIDERS.get(provider)
    address = base_url or entry.get("base_url") or (known.base_url if known else "")
    mode = api_mode_for(provider, address, api_mode, entry)
    if mode == "local":
        return local(settings)
    if not address:
        raise _unknown(provider, [*entries, *KNOWN_PROVIDERS], where)
    model = model or next(iter(_models(entry)), "")
    if not model:
        raise ConfigError(
            f"no model is named for the provider {provider or address}.",
            where=where,
            hint="hermes config set model.default NAME",
        )
    facts = _models(entry).get(model, {})
    return Route(
        provider=provider or "custom",
        model=model,
        base_url=address,
        api_mode=mode,
        credentials=_credentials(
            settings, provider, entry, api_key, own_address=bool(base_url) and base_url != entry.get("base_url")
        ),
        window_tokens=window or facts.get("context_length"),
        max_output_tokens=max_output or facts.get("max_tokens"),
        headers=entry.get("headers") or {},
        extra_body=entry.get("extra_body") or {},
        request_timeout_s=entry.get("request_timeout_seconds"),
        stale_timeout_s=entry.get("stale_timeout_seconds"),
    )


def _unknown(provider: str, names: list[str], where: str) -> ConfigError:
    if not provider:
        return ConfigError(
            "a model is named, but no provider and no base_url.",
            where=where,
            hint=f"hermes config set model.provider {EXAMPLE_PROVIDER}",
        )
    near = difflib.get_close_matches(provider, names, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(
        f"the provider {provider!r} is unknown and has no address.{meant}",
        where=where,
        hint=f"hermes config set providers.{provider}.base_url https://…",
    )


def _models(entry: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`models` of a provider: a list of names, or a mapping of names to what is known of them."""
    models = entry.get("models") or {}
    if isinstance(models, list):
        return {str(name): {} for name in models}
    return {str(name): facts if isinstance(facts, dict) else {} for name, facts in models.items()}


def _credentials(
    settings: Settings, provider: str, entry: Mapping[str, Any], api_key: str | None, *, own_address: bool
) -> tuple[Credential, ...]:
    if api_key:
        return (Credential(api_key, provider),)
    # The keys of an entry belong to the entry's address.
    values = [] if own_address and entry.get("base_url") else [entry.get("api_key"), *(entry.get("keys") or [])]
    if (name := entry.get("key_env")) and not (own_address and entry.get("base_url")):
        values.append(settings.variable(name))
    known = KNOWN_PROVIDERS.get(provider)
    if known is not None and known.key_env and not own_address and not entry.get("base_url"):
        values.append(settings.variable(known.key_env))
    return tuple(Credential(value, provider) for value in dict.fromkeys(values) if value)


def missing_key(settings: Settings, route: Route) -> str:
    """The name of the variable that should hold the route's key and does not, or nothing."""
    if route.credentials or route.api_mode == "local":
        return ""
    entry = settings.section("providers").get(route.provider, {})
    known = KNOWN_PROVIDERS.get(route.provider)
    return str(entry.get("key_env") or (known.key_env if known and route.base_url == known.base_url else ""))
