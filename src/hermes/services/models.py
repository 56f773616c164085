"""Models: routes, what is known of each, and why one cannot be asked; for server and command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes import local
from hermes.core.spec import RouteChoice
from hermes.providers.base import SAMPLING, Route
from hermes.providers.chat_completions import reasoning_of
from hermes.providers.registry import EXAMPLE_PROVIDER, available, capabilities_of, provider_for, window_of
from hermes.providers.routes import listed, missing_key, named, of_provider, of_session, primary, routes
from hermes.providers.table import UNKNOWN, facts_for

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.settings.config import Settings

__all__ = [
    "EXAMPLE_PROVIDER",
    "SAMPLING",
    "UNKNOWN",
    "Route",
    "capabilities_of",
    "facts_for",
    "listed",
    "missing_key",
    "named",
    "of_provider",
    "of_session",
    "primary",
    "problem_of",
    "provider_for",
    "reasoning_of",
    "routes",
    "window_of",
]
NOT_CONFIGURED = "No model is configured."


def problem_of(settings: Settings, route: Route, home: Home | None = None) -> str:
    """Why a route cannot be asked, as far as known without asking; with a home, also of an embedded model."""
    if not available(route.api_mode):
        return NOT_CONFIGURED
    if variable := missing_key(settings, route):
        return f"The provider {route.provider} needs a key in {variable}, and that is not set."
    return (local.status(home, settings)["problem"] or "") if home is not None and route.api_mode == "local" else ""


def configured_route(settings: Settings) -> tuple[Route, str]:
    """The route of the settings, and why it cannot be asked. Raises ConfigError."""
    route = primary(settings, RouteChoice())
    return route, problem_of(settings, route)
