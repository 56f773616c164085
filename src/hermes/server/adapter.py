"""The API server as the gateway holds it: its configuration, its stores, and who may come in."""

from __future__ import annotations

import hmac
import logging
from importlib.util import find_spec
from typing import Any

from aiohttp import web

from hermes import home
from hermes.server.errors import error_response
from hermes.server.idempotency import _IdempotencyCache
from hermes.server.middleware import CORS_HEADERS, cors_middleware, security_headers_middleware
from hermes.server.session_ids import _derive_chat_session_id
from hermes.server.settings import Platform, PlatformConfig, api_server_options
from hermes.store import sessions
from hermes.store.base import StoreError
from hermes.store.responses import ResponseStore

__all__ = [
    "AIOHTTP_AVAILABLE",
    "APIServerAdapter",
    "ResponseStore",
    "_IdempotencyCache",
    "_derive_chat_session_id",
    "check_api_server_requirements",
    "cors_middleware",
    "security_headers_middleware",
]
log = logging.getLogger(__name__)
AIOHTTP_AVAILABLE = find_spec("aiohttp") is not None
_CORS_HEADERS = CORS_HEADERS
_OWN_NAME = "hermes-agent"


def check_api_server_requirements() -> bool:
    """Whether what the server is built on is installed."""
    return bool(AIOHTTP_AVAILABLE)


class APIServerAdapter:
    """The API server. Making one touches neither network nor disk: its responses begin in memory."""

    platform = Platform.API_SERVER

    def __init__(self, config: PlatformConfig) -> None:
        options = api_server_options(config.extra)
        self._host: str = options["host"]
        self._port: int = options["port"]
        self._api_key: str = options["key"] or ""
        self._cors_origins: tuple[str, ...] = tuple(options["cors_origins"])
        self._model_name = self._resolve_model_name(options["model_name"] or "")
        self._response_store = ResponseStore(
            options["responses.max_stored"], max_age_days=options["responses.max_age_days"]
        )
        self._session_db: Any = None

    @staticmethod
    def _resolve_model_name(explicit: str) -> str:
        """The model's name as clients see it: the given one, else the profile's."""
        if explicit:
            return explicit
        profile = home.get_active_profile_name()
        return _OWN_NAME if profile == home.DEFAULT_PROFILE else profile

    def _ensure_session_db(self) -> Any:
        """The database of conversations, opened when first needed; None when it cannot be."""
        if self._session_db is None:
            try:
                self._session_db = sessions.SessionDB()
            except (StoreError, OSError) as error:
                log.warning("the database of sessions cannot be opened: %s", error)
        return self._session_db

    def _check_auth(self, request: web.Request) -> web.Response | None:
        """Nothing when the request may come in, otherwise the refusal."""
        if not self._api_key:
            return None
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._api_key.encode()):
            return None
        refusal = {"WWW-Authenticate": "Bearer"}
        return error_response(401, "Incorrect API key provided.", "invalid_api_key", headers=refusal)

    def _origin_allowed(self, origin: str) -> bool:
        """Whether pages of this origin may call; what is no browser says none."""
        return not origin or "*" in self._cors_origins or origin in self._cors_origins

    def _cors_headers_for_origin(self, origin: str) -> dict[str, str] | None:
        """What tells a browser that the page may read the answer; None when it may not."""
        if not origin or not self._origin_allowed(origin):
            return None
        if "*" in self._cors_origins:
            return {"Access-Control-Allow-Origin": "*", **CORS_HEADERS}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", **CORS_HEADERS}
