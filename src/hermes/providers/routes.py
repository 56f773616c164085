"""Selects the route of a turn: model, address, protocol and keys, from the request and the settings."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from hermes.core.errors import ConfigError
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.spec import RouteChoice
from hermes.providers.base import Credential, Route
from hermes.providers.registry import EXAMPLE_PROVIDER, api_mode_for
from hermes.settings.known_providers import KNOWN_PROVIDERS
from hermes.settings.schema import Provider

if TYPE_CHECKING:
    from hermes.settings.config import Settings

_NO_ENTRY = Provider()
# The provider of a route that has an address and no other name.
CUSTOM = "custom"
_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop")
LOCAL = Route("local", "local", "http://local.localhost", "local")


@dataclass(slots=True)
class _Request:
    """The selection before settings and tables fill in the rest."""

    provider: str
    model: str
    base_url: str = ""
    api_mode: str | None = None
    api_key: str | None = None
    window_tokens: int | None = None
    max_output_tokens: int | None = None
    sampling: JsonMapping = field(default_factory=dict)


def routes(settings: Settings, choice: RouteChoice | None = None) -> list[Route]:
    choice = choice or RouteChoice()
    if choice == RouteChoice(choice.alias, choice.model, choice.provider):
        cached = _named_routes(settings, choice.alias, choice.model, choice.provider)
        # The room of the local model depends on what memory is free.
        if LOCAL.key not in cached:
            return [*cached.values()]
    return [*_routes(settings, choice).values()]


@lru_cache(maxsize=256)
def _named_routes(
    settings: Settings, alias: str | None = None, model: str | None = None, provider: str | None = None
) -> dict[tuple[str, ...], Route]:
    return _routes(settings, RouteChoice(alias, model, provider))


def _routes(settings: Settings, choice: RouteChoice) -> dict[tuple[str, ...], Route]:
    first = primary(settings, choice)
    by_key: dict[tuple[str, ...], Route] = {first.key: first}
    for entry in settings.fallback_providers if choice.fallbacks is None else choice.fallbacks:
        route = fallback(settings, entry)
        by_key.setdefault(route.key, route)
    return by_key


@lru_cache(maxsize=256)
def named(settings: Settings, name: str) -> RouteChoice | None:
    """The choice of a name: an alias, or `provider/model` of a configured provider."""
    if name in settings.api_server.model_routes:
        return RouteChoice(alias=name)
    provider, _, model = name.partition("/")
    return of_provider(settings, provider, model) if model else None


def of_provider(settings: Settings, provider: str, model: str | None = None) -> RouteChoice | None:
    """A model of a configured provider, by default its first. None if there is none."""
    main, entries = settings.model, settings.providers
    if provider == CUSTOM and not main.provider and CUSTOM not in entries:
        return RouteChoice(model=model) if model and main.base_url else None
    if provider not in {*entries, main.provider, *(name for name, _ in _fallbacks(settings))} or not provider:
        return None
    default = main.default if provider == main.provider else None
    model = model or default or next(iter(_models(entries.get(provider, _NO_ENTRY))), None)
    return RouteChoice(provider=provider, model=model) if model else None


def of_session(settings: Settings, session: JsonMapping | None) -> RouteChoice | None:
    """The choice of a session's own model; None means the configured one."""
    name = session["model"] if session else None
    if not session or not name:
        return None
    # The command line stores plain names; any other name that is unknown stands for the configured model.
    return named(settings, name) or (RouteChoice(model=name) if session["source"] == "cli" else None)


def listed(settings: Settings) -> dict[str, str]:
    """The models that the configuration names: selector to model name."""
    models = {
        f"{provider}/{model}": model for provider, entry in settings.providers.items() for model in _models(entry)
    }
    return models | {f"{provider}/{model}": model for provider, model in _fallbacks(settings) if model}


def _fallbacks(settings: Settings) -> list[tuple[str, str]]:
    entries = map(_fallback_entry, settings.fallback_providers)
    pairs = [(entry.get("provider"), entry.get("model")) for entry in entries if not entry.get("base_url")]
    return [(str(provider), str(model or "")) for provider, model in pairs if provider]


def _fallback_entry(entry: str | JsonMapping) -> JsonMapping:
    if not isinstance(entry, str):
        return entry
    provider, _, model = entry.partition("/")
    return {"provider": provider, "model": model}


def _aliased(settings: Settings, choice: RouteChoice, alias: str) -> RouteChoice:
    """The choice with its alias or `provider/model` resolved. An unknown one changes nothing."""
    entry = settings.api_server.model_routes.get(alias)
    if entry is None and (target := named(settings, alias)) is not None:
        return replace(choice, alias=None, provider=target.provider, model=target.model)
    fields = msgspec.structs.asdict(entry) if entry else {}
    return replace(choice, alias=None, **{name: value for name, value in fields.items() if value})


def primary(settings: Settings, choice: RouteChoice) -> Route:
    if choice.alias:
        choice = _aliased(settings, choice, choice.alias)
    configured = settings.model
    provider = choice.provider or configured.provider or ""
    model = choice.model or configured.default or ""
    own_address = choice.base_url is not None or (
        choice.provider is not None and choice.provider != configured.provider
    )
    base_url = choice.base_url if own_address else configured.base_url
    # A key goes only to the address it was configured for.
    api_key = choice.api_key if choice.api_key is not None else None if own_address else configured.api_key
    if not (provider or model or base_url):
        return local(settings)
    api_mode = choice.api_mode or (None if own_address else configured.api_mode)
    request = _Request(provider, model, base_url or "", api_mode, api_key)
    if model == configured.default:
        request.window_tokens, request.max_output_tokens = configured.context_length, configured.max_tokens
        request.sampling = _sampling(settings)
    route = _route(settings, request, "model.provider")
    return replace(route, extra_body={**route.extra_body, **choice.extra_body}) if choice.extra_body else route


def is_allowed(settings: Settings, names: frozenset[str] | None, choice: RouteChoice | None) -> bool:
    """Whether a choice leads to a model that one of these names selects. None allows every model."""
    if names is None:
        return True
    target = primary(settings, choice or RouteChoice())
    # Another name than these is the configured model's own.
    aliases = (name for name in names if "/" not in name or named(settings, name))
    allowed = (primary(settings, RouteChoice(alias=name)) for name in aliases)
    return any((route.provider, route.model) == (target.provider, target.model) for route in allowed)


def local(settings: Settings) -> Route:
    from hermes.local import context

    window, limit = settings.model.context_length or context(settings), settings.model.max_tokens
    return replace(LOCAL, window_tokens=window, max_output_tokens=limit, sampling=_sampling(settings))


def _sampling(settings: Settings) -> JsonObject:
    """The sampling parameters of the configured model; a request's own take precedence."""
    given = ((name, getattr(settings.model, name)) for name in _SAMPLING)
    return {name: value for name, value in given if value not in (None, [])}


def fallback(settings: Settings, entry: str | JsonMapping) -> Route:
    """One entry of `fallback_providers`: a provider, `provider/model`, or a mapping."""
    entry = _fallback_entry(entry)
    key = entry.get("api_key") or (settings.variable(str(entry["key_env"])) if entry.get("key_env") else None)
    provider, model, base_url = (str(entry.get(name) or "") for name in ("provider", "model", "base_url"))
    window, max_output = entry.get("context_length"), entry.get("max_tokens")
    request = _Request(provider, model, base_url, entry.get("api_mode"), key, window, max_output)
    return _route(settings, request, "fallback_providers")


def auxiliary(settings: Settings, task: str) -> Route | None:
    provider, model = settings.auxiliary[task].provider, settings.auxiliary[task].model
    if provider in (None, "", "auto"):
        return primary(settings, RouteChoice(model=model)) if model else None
    return _route(settings, _Request(provider, model or ""), f"auxiliary.{task}.provider")


def _route(settings: Settings, request: _Request, where: str) -> Route:
    provider, model = request.provider, request.model
    entries = settings.providers
    entry, known = entries.get(provider, _NO_ENTRY), KNOWN_PROVIDERS.get(provider)
    address = request.base_url or entry.base_url or (known.base_url if known else "")
    api_mode = api_mode_for(provider, address, request.api_mode or entry.api_mode)
    if api_mode == "local":
        return local(settings)
    if not address:
        raise _unknown(provider, [*entries, *KNOWN_PROVIDERS], where)
    models = _models(entry)
    model = model or next(iter(models), "")
    if not model:
        raise ConfigError(
            f"no model is named for the provider {provider or address}.",
            where=where,
            hint="hermes config set model.default NAME",
        )
    facts = models.get(model, {})
    has_own_address = bool(request.base_url) and request.base_url != entry.base_url
    return Route(
        provider=provider or CUSTOM,
        model=model,
        base_url=address,
        api_mode=api_mode,
        credentials=_credentials(settings, provider, entry, request.api_key, own_address=has_own_address),
        window_tokens=request.window_tokens or facts.get("context_length"),
        max_output_tokens=request.max_output_tokens or facts.get("max_tokens"),
        sampling=request.sampling,
        headers=entry.headers,
        extra_body=entry.extra_body,
        request_timeout_s=entry.request_timeout_seconds,
        stale_timeout_s=entry.stale_timeout_seconds,
    )


def _unknown(provider: str, names: list[str], where: str) -> ConfigError:
    if not provider:
        return ConfigError(
            "a model is named, but no provider and no base_url.",
            where=where,
            hint=f"hermes config set model.provider {EXAMPLE_PROVIDER}",
        )
    matches = difflib.get_close_matches(provider, names, n=1)
    advice = f" Did you mean {matches[0]!r}?" if matches else ""
    return ConfigError(
        f"the provider {provider!r} is unknown and has no address.{advice}",
        where=where,
        hint=f"hermes config set providers.{provider}.base_url https://…",
    )


def _models(entry: Provider) -> dict[str, JsonObject]:
    """`models` of a provider: a list of names, or a mapping of names to facts."""
    models = entry.models or {}
    if isinstance(models, list):
        return {str(name): {} for name in models}
    return {str(name): facts if isinstance(facts, dict) else {} for name, facts in models.items()}


def _credentials(
    settings: Settings, provider: str, entry: Provider, api_key: str | None, *, own_address: bool
) -> tuple[Credential, ...]:
    if api_key:
        return (Credential(api_key, provider),)
    # The keys of an entry belong to the entry's address.
    values = [] if own_address and entry.base_url else [entry.api_key, *entry.keys]
    if entry.key_env and not (own_address and entry.base_url):
        values.append(settings.variable(entry.key_env))
    known = KNOWN_PROVIDERS.get(provider)
    if known is not None and known.key_env and not own_address and not entry.base_url:
        values.append(settings.variable(known.key_env))
    return tuple(Credential(value, provider) for value in dict.fromkeys(values) if value)


def missing_key(settings: Settings, route: Route) -> str:
    if route.credentials or route.api_mode == "local":
        return ""
    entry = settings.providers.get(route.provider, _NO_ENTRY)
    known = KNOWN_PROVIDERS.get(route.provider)
    return entry.key_env or (known.key_env if known and route.base_url == known.base_url else "")
