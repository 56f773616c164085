"""The model lists of providers: fetched in the background, cached for a day, never waited for."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hermes.core.errors import ServiceError
from hermes.core.home import write_private
from hermes.core.json_types import JsonObject
from hermes.core.limits import MODEL_LIST_BYTES_MAX, MODEL_LIST_FETCH_S_MAX, MODEL_LIST_KEPT_S, MODEL_LIST_RETRY_S
from hermes.core.threads import Threads
from hermes.http_client.client import HttpClient
from hermes.http_client.exchange import Timeouts, TransportError
from hermes.providers.base import Route
from hermes.providers.registry import available, provider_for

if TYPE_CHECKING:
    from hermes.core.home import Home

log = logging.getLogger(__name__)

# The names that providers give to a model's context window.
_WINDOW = ("context_length", "max_model_len", "context_window", "max_context_length", "max_input_tokens")


def windows(body: object) -> dict[str, int]:
    models = body.get("data") if isinstance(body, dict) else None
    sizes: dict[str, int] = {}
    for model in models if isinstance(models, list) else ():
        if isinstance(model, dict) and isinstance(model.get("id"), str):
            values = (model.get(name) for name in _WINDOW)
            window = next((value for value in values if type(value) is int and value > 0), None)
            if window is not None:
                sizes[model["id"]] = window
    return sizes


async def list_models(http: HttpClient, route: Route) -> JsonObject:
    """Fetch a provider's models; raises `ServiceError`."""
    wire = provider_for(route.api_mode).listing(route, next(iter(route.credentials), None))
    timeouts = Timeouts(MODEL_LIST_FETCH_S_MAX, MODEL_LIST_FETCH_S_MAX)
    try:
        async with http.send(wire.method, wire.url, wire.headers, b"", timeouts) as answer:
            if answer.status in (401, 403):
                message = f"{route.base_url} refuses the key: it answers {answer.status}."
                raise ServiceError(message, "provider_unavailable", field="api_key")
            if answer.status == 404:
                mean = (
                    ""
                    if urlsplit(route.base_url).path.strip("/")
                    else f" Did you mean {route.base_url.rstrip('/')}/v1?"
                )
                message = f"{route.base_url} lists no models: it answers 404.{mean}"
                raise ServiceError(message, "provider_unavailable")
            if answer.status != 200:
                message = f"{route.provider} does not list its models: it answers {answer.status}."
                raise ServiceError(message, "provider_unavailable")
            body = json.loads(await answer.body(MODEL_LIST_BYTES_MAX))
            models = [str(model["id"]) for model in body["data"]]
    except (TransportError, ValueError, TypeError, KeyError) as error:
        why = (
            f"cannot be reached: {error}"
            if isinstance(error, TransportError)
            else "does not answer with a list of models"
        )
        message = f"{route.base_url} {why.rstrip('.')}."
        raise ServiceError(message, "provider_unavailable", field="base_url") from None
    return {"fetched_at": time.time(), "windows": windows(body), "models": models}


class ModelLists:
    """The lists of one home. A lookup never waits: a missing or old list is fetched for the next time."""

    def __init__(
        self,
        home: Home,
        http: HttpClient,
        files: Threads,
        background: Callable[[Coroutine[object, object, None]], None],
    ) -> None:
        self._home, self._http, self._files, self._background = home, http, files, background
        self._lists: dict[str, JsonObject] | None = None
        self._next_try: dict[str, float] = {}

    def window(self, route: Route) -> int | None:
        if not route.base_url or not available(route.api_mode):
            return None
        if time.monotonic() >= self._next_try.get(route.base_url, 0.0):
            self._next_try[route.base_url] = time.monotonic() + MODEL_LIST_RETRY_S
            self._background(self._refresh(route))
        windows = (self._lists or {}).get(route.base_url, {}).get("windows", {})
        window = windows.get(route.model)
        return window if isinstance(window, int) else None

    async def fetched_window(self, route: Route) -> int | None:
        """As `window`, after a missing or old list was fetched."""
        if route.window_tokens or not route.base_url or not available(route.api_mode):
            return route.window_tokens
        self._next_try[route.base_url] = time.monotonic() + MODEL_LIST_RETRY_S
        await self._refresh(route)
        return self.window(route)

    async def _refresh(self, route: Route) -> None:
        if self._lists is None:
            self._lists = await self._files.call(self._load)
        stored = self._lists.get(route.base_url)
        if stored is not None and 0 <= time.time() - stored["fetched_at"] < MODEL_LIST_KEPT_S:
            return
        try:
            models = await self._fetch(route)
        except (TransportError, ValueError) as error:
            log.debug("the models of %s could not be listed: %s", route.base_url, type(error).__name__)
            return
        self._lists[route.base_url] = {"fetched_at": time.time(), "windows": models}
        text = json.dumps(self._lists)
        await self._files.call(lambda: write_private(self._home.model_lists, text))

    async def _fetch(self, route: Route) -> Mapping[str, int]:
        credential = next((credential for credential in route.credentials if credential), None)
        wire = provider_for(route.api_mode).listing(route, credential)
        timeouts = Timeouts(MODEL_LIST_FETCH_S_MAX, MODEL_LIST_FETCH_S_MAX)
        async with self._http.send(wire.method, wire.url, wire.headers, b"", timeouts) as answer:
            body = await answer.body(MODEL_LIST_BYTES_MAX)
            return windows(json.loads(body)) if answer.status == 200 else {}

    def _load(self) -> dict[str, JsonObject]:
        try:
            lists = json.loads(self._home.model_lists.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        sound = isinstance(lists, dict) and all(
            isinstance(entry, dict)
            and isinstance(entry.get("fetched_at"), int | float)
            and isinstance(entry.get("windows"), dict)
            for entry in lists.values()
        )
        return lists if sound else {}
