"""The API server as the gateway holds it: its configuration, its stores, who may come in, and its handlers."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aiohttp import web
from msgspec import UNSET, UnsetType

from hermes import app as apps
from hermes.bus.peers import Operation
from hermes.core import home
from hermes.core.events import Event
from hermes.core.limits import BODIES_MEMORY_BYTES_MAX
from hermes.core.spec import RunSpec
from hermes.guards.secrets import Secrets
from hermes.runs.engine import Admission, LiveRun, Refused
from hermes.server import (  # noqa: F401  (most are imported for the routes they declare)
    chat,
    conversations,
    discovery,
    documents,
    jobs,
    metrics,
    middleware,
    responses,
    runner,
    runs,
    session_chat,
    session_routes,
    websocket,
)
from hermes.server.body_memory import Budget
from hermes.server.compat import ReplaceableMethods
from hermes.server.errors import ApiError
from hermes.server.gate import gate_middleware
from hermes.server.idempotency import RECORDING, IdempotentExecutor, RecordedStream, Recording, Work, _IdempotencyCache
from hermes.server.keys import CALLER, Key, Keyring
from hermes.server.middleware import CORS_HEADERS, security_headers_middleware
from hermes.server.readiness import Probes
from hermes.server.request_options import RequestOptions, session_key_fault, user_scope
from hermes.server.response_record import level, level_revived
from hermes.server.routes import GROUPS, ROUTES, route_at
from hermes.server.session_ids import _derive_chat_session_id
from hermes.server.settings import Platform, PlatformConfig, api_server_options
from hermes.server.shared_counters import SharedNumbers
from hermes.server.sse import EventStream
from hermes.server.stored_result import said_until
from hermes.settings.config import Settings
from hermes.store import sessions
from hermes.store.base import StoreError
from hermes.store.repository import Repository
from hermes.store.responses import ResponseStore
from hermes.store.stores import Async
from hermes.tools.framework import toolsets

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
CHAT_COMPLETIONS_SSE_KEEPALIVE_SECONDS = 15.0
_CORS_HEADERS = CORS_HEADERS
cors_middleware = gate_middleware
_OWN_NAME = "hermes-agent"
Message = dict[str, Any]


def check_api_server_requirements() -> bool:
    """Whether what the server is built on is installed."""
    return bool(AIOHTTP_AVAILABLE)


def _given_key(request: web.Request) -> bytes:
    """The key that a request shows, as `Authorization: Bearer` or as `api-key`; nothing where the two differ."""
    shown = []
    if (given := request.headers.get("Authorization")) is not None:
        scheme, _, token = given.partition(" ")
        shown.append(token if scheme.lower() == "bearer" else "")
    if (given := request.headers.get("api-key")) is not None:
        shown.append(given)
    tokens = [token.strip().encode("utf-8", "surrogateescape") for token in shown]
    return tokens[0] if tokens and hmac.compare_digest(tokens[0], tokens[-1]) else b""


class APIServerAdapter(ReplaceableMethods):
    """The API server. Making one touches neither network nor disk: its responses begin in memory."""

    platform = Platform.API_SERVER

    def __init__(self, config: PlatformConfig) -> None:
        self._options = options = api_server_options(config.extra)
        self._set_keepalive = config.extra.get("keepalive_seconds") or os.environ.get("API_SERVER_KEEPALIVE_SECONDS")
        self._host: str = options["host"]
        self._port: int = options["port"]
        self._api_key: str = options["key"] or ""
        self._cors_origins: tuple[str, ...] = tuple(options["cors_origins"])
        self._model_name = self._resolve_model_name(options["model_name"] or "")
        self._response_store = ResponseStore(
            options["responses.max_stored"], max_age_days=options["responses.max_age_days"]
        )
        self._session_db: Any = None
        self._app: apps.App | None = None
        self._once = IdempotentExecutor(self)
        self.keyring = Keyring(self._api_key, options["keys"])
        self._secrets = Secrets([self._api_key] if self._api_key else [])
        self.metrics = metrics.Metrics()
        self.body_memory = Budget(BODIES_MEMORY_BYTES_MAX)
        self.started_at = time.time()
        self.draining = asyncio.Event()
        self.probes = Probes()
        self.seal: Any = None
        # The options of requests that ask for none, by whether their client is a strict one.
        self.usual_options: dict[bool, RequestOptions] = {}

    # --- configuration ----------------------------------------------------------------------------------------------

    @staticmethod
    def _resolve_model_name(explicit: str) -> str:
        """The model's name as clients see it: the given one, else the profile's."""
        if explicit:
            return explicit
        profile = home.get_active_profile_name()
        return _OWN_NAME if profile == home.DEFAULT_PROFILE else profile

    @property
    def model_name(self) -> str:
        """The name under which the agent is offered as a model."""
        return self._model_name

    def option(self, name: str) -> Any:
        """A setting of the API server."""
        return self._options[name]

    @property
    def settings(self) -> Settings:
        """All settings as they stand."""
        return self._app.settings if self._app is not None else runner._settings()

    @property
    def spool_folder(self) -> Path | None:
        """Where large bodies lie while they are read: on the disk of the home, since the usual place may be memory."""
        return self._app.home.path if self._app is not None else None

    def redact(self, text: str) -> str:
        """The text without anything that is, or looks like, a credential."""
        return self.secrets.redact(text)

    # --- what it works with -----------------------------------------------------------------------------------------

    def attach(self, app: apps.App) -> None:
        """Work with this app, its database and its file of responses, from now on."""
        self._app = app
        self._session_db = app.store.blocking.sessions
        path = app.store.blocking.responses_file
        if path is not None:
            self._response_store.close()
            limits = self._options["responses.max_stored"], self._options["responses.max_age_days"]
            self._response_store = ResponseStore(limits[0], path, max_age_days=limits[1])
            app.also_closed.append(self._response_store)
        self._limit(app)
        app.engine.listeners += (self._charge_tokens, self.metrics.hear)
        app.engine.revival_listeners.append(self._revived)
        app.services.background(level(self))

    def _revived(self, spec: RunSpec) -> None:
        """A run is taken up from a process that has left it: so is its response."""
        if spec.response_id is not None and self._app is not None:
            self._app.services.background(level_revived(self, spec.response_id))

    @property
    def peer_operations(self) -> dict[str, Operation]:
        """What other workers may ask besides runs."""
        return {"claimed": self._once.claimed, "metrics": self._metrics_for_peer}

    async def _metrics_for_peer(self) -> dict[str, Any]:
        return self.metrics.dump((await self.app()).engine)

    def share(self, numbers: SharedNumbers) -> None:
        """Count rates and turns together with the other workers of this server."""
        assert self._app is not None
        place = str(self._app.home.path)
        self.keyring.share(numbers, place)
        self._app.engine.permits.shared = self.keyring.counts(numbers, place)

    def drain(self) -> None:
        """The server is about to stop: what only waits for new work is told so."""
        self.draining.set()

    async def app(self) -> apps.App:
        """The app that runs turns on this loop."""
        if self._app is not None:
            return self._app
        app = await apps.current(engine=getattr(self._session_db, "engine", None) if self._has_database() else None)
        self._limit(app)
        return app

    def _limit(self, app: apps.App) -> None:
        app.engine.limit(
            runs_max=self._options["max_concurrent_runs"],
            owner_max=self.keyring.concurrent,
            ceiling=self.keyring.ceiling,
            charge=self._charge,
            session_wait_s=self._options["session_wait_seconds"],
            submitted_wait_s=self._options["run_queue_seconds"],
        )

    def _has_database(self) -> bool:
        return isinstance(self._session_db, Repository)

    @property
    def stores_runs(self) -> bool:
        """Whether the database of conversations is the one that runs are kept in."""
        return self._app is not None and self._session_db is self._app.store.blocking.sessions

    def _ensure_session_db(self) -> Any:
        """The database of conversations, opened when first needed; None when it cannot be."""
        if self._session_db is None:
            try:
                self._session_db = sessions.SessionDB()
            except Exception as error:  # noqa: BLE001  (whatever is wrong with it, turns go on without)
                log.warning("the database of sessions cannot be opened: %s", self.redact(str(error)))
        return self._session_db

    def database(self) -> Any:
        """The database of conversations, to be awaited; refused when there is none."""
        db = self._ensure_session_db()
        if db is None:
            raise ApiError(503, "The database of sessions cannot be opened.", "session_db_unavailable")
        return Async(db)

    @property
    def stored_responses(self) -> Any:
        """The store of responses, to be awaited."""
        return Async(self._response_store)

    async def stored_history(self, session_id: str, before: Admission | None = None) -> list[Message]:
        """What was said in a session so far, or before a run of it; nothing where that cannot be read."""
        db = self._ensure_session_db()
        if db is None:
            return []
        try:
            if before is not None:
                return await said_until(Async(db), session_id, before.run_id, with_it=False)
            found = await Async(db).get_messages_as_conversation(session_id)
        except Exception as error:  # noqa: BLE001  (a turn that somebody waits for goes on without)
            log.warning("the history of a session cannot be read: %s", self.redact(str(error)))
            return []
        return list(found) if isinstance(found, list) else []

    async def session(self, session_id: str) -> Message | None:
        """A session as it is stored."""
        if not self._has_database():
            return None
        with contextlib.suppress(StoreError):
            found: Message | None = await Async(self._session_db).get_session(session_id)
            return found
        return None

    async def waits(self, call_ids: Sequence[str], owner: str) -> bool:
        """Whether some of these calls still wait for their client."""
        return self._has_database() and bool(await Async(self._session_db).pending_calls(call_ids, owner))

    async def once(self, request: web.Request, work: Work) -> web.StreamResponse:
        """The answer to a request: what the work comes to, or came to when it was asked for under the same key."""
        key = request.headers.get("Idempotency-Key")
        if key is None or self._app is None:
            return await work(self, request)
        return await self._once.answer(request, key, work)

    def stream(self, request: web.Request, headers: Mapping[str, str]) -> EventStream:
        """The writer of a stream: to a client, or to all who ask for it under the same key."""
        if isinstance(recording := request.get(RECORDING), Recording):
            return RecordedStream(recording, request, headers)
        return self.socket_stream(request, headers)

    def socket_stream(self, request: web.Request, headers: Mapping[str, str]) -> EventStream:
        """The writer of a stream to a client."""
        told = {**middleware.own_headers(self, request), **self.rate_headers(), **headers}
        keepalive_s = (
            self._options["keepalive_seconds"] if self._set_keepalive else CHAT_COMPLETIONS_SSE_KEEPALIVE_SECONDS
        )
        stall_s = self._options["write_stall_seconds"]
        return EventStream(request, told, keepalive_s=keepalive_s, stall_s=stall_s, among=self.metrics.streams)

    def toolsets(self, narrowed: frozenset[str] | None) -> frozenset[str] | None:
        """The toolsets of a turn: what is configured for the server, narrowed by the request."""
        own = self._options["toolsets"]
        if own is None:
            if narrowed is None:
                return None
            return narrowed & toolsets._get_platform_tools(runner._load_gateway_config(), "api_server")
        return frozenset(own) if narrowed is None else frozenset(own) & narrowed

    async def offered(self, toolset: str, narrowed: frozenset[str] | None) -> frozenset[str]:
        """The tools of a toolset that a turn of the present caller can use."""
        app = await self.app()
        sets, ceiling = self.toolsets(narrowed), CALLER.get().toolsets
        if sets is None:
            sets = frozenset(toolsets.enabled_toolsets(app.settings, "api_server"))
        if toolset not in sets or (ceiling is not None and toolset not in ceiling):
            return frozenset()
        await app.services.outside.sandboxes.ready(app.settings)
        return frozenset(app.services.registry().offered([toolset], app.settings))

    # --- who may come in --------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether anybody may come in: no key is configured."""
        return not self.keyring.keys

    def owner_of(self, request: web.Request) -> str:
        """To whom belongs what the request makes."""
        return CALLER.get().owner

    def credential(self) -> str:
        """The name of the key that the present request has shown; none in open mode."""
        return "" if self.is_open else CALLER.get().owner

    def visible_owner(self, request: web.Request) -> str | None:
        """Whose things the request may see; None: everybody's. Where there is one owner, nobody is told of owners."""
        caller = CALLER.get()
        return None if self.keyring.shared and caller.is_admin else caller.owner

    def shown_owner(self, owner: str) -> str | UnsetType:
        """The owner of an object, for a caller that sees the objects of all owners."""
        return owner if self.keyring.shared and CALLER.get().is_admin else UNSET

    def may_see(self, request: web.Request, owner: str) -> bool:
        """Whether what belongs to this owner is there for the request."""
        return self.visible_owner(request) in (None, owner)

    @property
    def secrets(self) -> Secrets:
        """Every credential that is known here."""
        return self._app.secrets if self._app is not None else self._secrets

    def _check_auth(self, request: web.Request) -> web.Response | None:
        """Nothing when the request may come in, otherwise the refusal."""
        refusal = self._other_user(request) if self.is_open else self._refusal(request)
        if refusal is None and self.is_open:
            CALLER.set(Key())
        return refusal.response() if refusal else None

    def _other_user(self, request: web.Request) -> ApiError | None:
        """An open server serves the user who runs it; a connection that cannot be asked about is let in."""
        if getattr(request.protocol, "is_same_user", True):
            return None
        message = f"This server has no key and serves only the user who runs it (uid {os.geteuid()}). Make a key: hermes gateway key"
        return ApiError(401, message, "other_user", headers={"WWW-Authenticate": "Bearer"})

    def _refusal(self, request: web.Request) -> ApiError | None:
        """Why the request may not come in: its key, its key's scopes, or too many requests."""
        key = self.keyring.find(_given_key(request))
        if key is None:
            challenge = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, "Incorrect API key provided.", "invalid_api_key", headers=challenge)
        CALLER.set(key)
        route = route_at(request)
        if route is not None and (refusal := self.scope_refusal(key, route.scope)) is not None:
            return refusal
        return self.rate_refusal(key, begins_turns=route is not None and route.begins_turns)

    def scope_refusal(self, key: Key, scope: str | None) -> ApiError | None:
        """Why a key does not suffice for what needs this scope."""
        if not (missing := key.lacks(scope)):
            return None
        message = f"This key lacks the scope {' and '.join(map(repr, missing))}."
        needed = str(scope).partition("|")[0]
        challenge = {"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{needed}"'}
        return ApiError(403, message, "insufficient_scope", headers=challenge)

    def rate_refusal(self, key: Key, *, begins_turns: bool) -> ApiError | None:
        """Count a request of a key; one that has used up what it may do in a minute has to wait."""
        exceeded = self.keyring.charge(key.owner, begins_turn=begins_turns)
        if exceeded is None:
            return None
        wait = {"Retry-After": str(exceeded.retry_after_s), **self.keyring.headers(key.owner)}
        return ApiError(429, exceeded.message, "rate_limit_exceeded", headers=wait)

    def _charge(self, spec: RunSpec) -> None:
        """Count a turn that no request has asked for: a job's, or a subagent's."""
        if (exceeded := self.keyring.charge(spec.owner, begins_turn=True)) is not None:
            raise Refused("rate_limit_exceeded", exceeded.message)

    def rate_headers(self) -> dict[str, str]:
        """What answers to the present caller say of its limits."""
        return self.keyring.headers(CALLER.get().owner)

    def _charge_tokens(self, live: LiveRun, event: Event) -> None:
        """Count the tokens of a turn that has ended; those of a subagent are among its parent's."""
        if not event.final or live.spec.parent is not None:
            return
        if (bucket := self.keyring.bucket(live.spec.owner, "tokens")) is not None:
            bucket.spend(live.log.state.usage.get("total_tokens") or 0)

    def _parse_session_key_header(self, request: web.Request) -> tuple[str | None, web.Response | None]:
        """The scope of long-term memory that a request names, or why it may not."""
        key, refusal = self.session_key(request)
        return key, refusal.response() if refusal else None

    def session_key(self, request: web.Request, user: str | None = None) -> tuple[str | None, ApiError | None]:
        """The same, with the refusal to be raised. Where none is named, the user may be the scope (`memory_scope`)."""
        given = request.headers.get("X-Hermes-Session-Key", "")
        if not given:
            return user_scope(request, user) if self._options["memory_scope"] == "user" else (None, None)
        if fault := session_key_fault(given):
            return None, ApiError(400, fault, "invalid_session_key", "X-Hermes-Session-Key")
        if self.is_open:
            message = "X-Hermes-Session-Key requires API key authentication; the server is open."
            return None, ApiError(403, message, "session_key_requires_api_key")
        return given, None

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


ROUTES.sort(key=lambda route: GROUPS.index(route.group))
for _route in ROUTES:
    setattr(APIServerAdapter, _route.adapter_method, _route.endpoint())
