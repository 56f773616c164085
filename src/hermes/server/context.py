"""`ServerContext`, which every handler gets: options, stores, keys and authentication."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from hermes import app as apps
from hermes.bus.peers import Operation
from hermes.core import home
from hermes.core.events import Event
from hermes.core.json_types import JsonMapping, Message
from hermes.core.limits import BODIES_MEMORY_BYTES_MAX
from hermes.core.spec import RunSpec
from hermes.guards.secrets import Secrets
from hermes.runs.engine import Admission, LiveRun, Refused
from hermes.server import metrics
from hermes.server.body_memory import Budget
from hermes.server.errors import ApiError
from hermes.server.headers import CORS_HEADERS, common_headers
from hermes.server.idempotency import RECORDING, IdempotentExecutor, RecordedStream, Recording
from hermes.server.keys import CALLER, SIGNED_IN, Key, Keyring, RateExceeded, WrongKeys, caller_of
from hermes.server.readiness import Probes
from hermes.server.request_options import RequestOptions, check_session_key, user_scope
from hermes.server.response_record import level, level_revived
from hermes.server.routes import route_at
from hermes.server.settings import api_server_options
from hermes.server.shared_counters import SharedNumbers
from hermes.server.sse import KEEPALIVE, EventStream
from hermes.server.start_gate import StartGate
from hermes.server.stored_result import conversation_until
from hermes.settings.config import Settings
from hermes.store import sessions
from hermes.store.base import StoreError
from hermes.store.owner_limits import Use
from hermes.store.repository import Repository
from hermes.store.responses import ResponseStore
from hermes.store.stores import Async
from hermes.tools.framework import toolsets

if TYPE_CHECKING:
    from hermes.server.turns import ReplacedRun, Turn

    class ReplaceRun(Protocol):
        def __call__(self, turn: Turn, *, streamed: bool) -> ReplacedRun | None: ...


log = logging.getLogger(__name__)
_OWN_NAME = "hermes-agent"


def resolve_model_name(explicit: str) -> str:
    """The model name that clients see: the given one, else the profile's."""
    if explicit:
        return explicit
    profile = home.get_active_profile_name()
    return _OWN_NAME if profile == home.DEFAULT_PROFILE else profile


def given_key(request: web.Request) -> bytes:
    """The key in `Authorization: Bearer`, `api-key` or `x-api-key`; empty where they differ."""
    shown = []
    if (given := request.headers.get("Authorization")) is not None:
        scheme, _, token = given.partition(" ")
        shown.append(token if scheme.lower() == "bearer" else "")
    shown += [request.headers[name] for name in ("api-key", "x-api-key") if name in request.headers]
    tokens = [token.strip().encode("utf-8", "surrogateescape") for token in shown]
    return tokens[0] if tokens and all(hmac.compare_digest(tokens[0], other) for other in tokens) else b""


def _begins_turn(request: web.Request) -> bool:
    route = route_at(request)
    return route is not None and route.begins_turns


class ServerContext:
    """One server. Constructing it touches neither network nor disk: responses are in memory until `attach`."""

    def __init__(self, extra: JsonMapping, model_name: str | None = None) -> None:
        self.options = options = api_server_options(extra)
        self.model_name = resolve_model_name(options.model_name) if model_name is None else model_name
        self.response_store = self._make_response_store()
        self.session_db: Any = None
        self.idempotency = IdempotentExecutor(self)
        self.keyring = Keyring(options.key, options.keys)
        # No key is configured.
        self.is_open = not self.keyring.keys
        self.metrics = metrics.Metrics()
        self.start_gate = StartGate()
        self.body_memory = Budget(BODIES_MEMORY_BYTES_MAX)
        self.started_at = time.time()
        self.draining = asyncio.Event()
        # Running calls of MCP clients by run id, for cancellation by another request.
        self.mcp_calls: dict[str, asyncio.Task[Any]] = {}
        self.probes = Probes()
        self.wrong_keys = WrongKeys()
        self.seal: Any = None
        # The options of requests without any, by whether their client is strict.
        self.usual_options: dict[bool, RequestOptions] = {}
        # For large bodies: on the home's disk, since the system's temporary folder may be in memory.
        self.spool_folder: Path | None = None
        # Starts a turn through a replaced agent, if there is one.
        self.replaced_run: ReplaceRun | None = None
        self.is_agent_replaced: Callable[[], bool] = bool  # False
        self._secrets = Secrets([options.key] if options.key else [])
        self._app: apps.App | None = None
        self.is_attached = False

    # --- what it works with -----------------------------------------------------------------------------------------

    def attach(self, app: apps.App) -> None:
        """Use this app, its database and its response store from now on."""
        self._app, self.is_attached = app, True
        self.spool_folder = app.home.path
        self.session_db = app.store.blocking.sessions
        if not app.store.blocking.in_memory:
            self.response_store.close()
            limits = self.options.responses
            self.response_store = app.store.blocking.make_responses(limits.max_stored, limits.max_age_days)
            app.also_closed.append(self.response_store)
        self._limit(app)
        app.engine.listeners += (self.metrics.hear,)
        if self.keyring.limited:
            app.engine.listeners += (self._charge_tokens,)
        app.engine.revival_listeners.append(self._revived)
        app.services.background(level(self))

    def _make_response_store(self, path: Path | str | None = None) -> ResponseStore:
        limits = self.options.responses
        return ResponseStore(limits.max_stored, path, max_age_days=limits.max_age_days)

    async def use_current_app(self) -> None:
        """Attach the app of the running loop, unless one is attached."""
        engine = self.session_db.engine if isinstance(self.session_db, Repository) else None
        self._app = await apps.current(engine=engine)
        self._limit(self._app)

    @property
    def app(self) -> apps.App:
        assert self._app is not None
        return self._app

    @property
    def attached_app(self) -> apps.App | None:
        return self._app if self.is_attached else None

    @property
    def settings(self) -> Settings:
        return self.app.settings

    @property
    def secrets(self) -> Secrets:
        return self._app.secrets if self._app is not None and self.is_attached else self._secrets

    def redact(self, text: str) -> str:
        return self.secrets.redact(text)

    def _revived(self, spec: RunSpec) -> None:
        """A run of another process was taken over: so is its response."""
        if spec.response_id is not None:
            self.app.services.background(level_revived(self, spec.response_id))

    @property
    def peer_operations(self) -> dict[str, Operation]:
        return {
            "claimed": self.idempotency.claimed,
            "metrics": self._metrics_for_peer,
            "cancel_mcp_call": self.cancel_mcp_call,
        }

    async def cancel_mcp_call(self, run_id: str) -> bool:
        """Whether a client waits for this run here; its request is cancelled then."""
        task = self.mcp_calls.get(run_id)
        return task is not None and task.cancel()

    async def _metrics_for_peer(self) -> list[metrics.Dump]:
        return self.metrics.dump(self.app.engine)

    def share(self, numbers: SharedNumbers) -> None:
        """Share rate limits and turn counts with the other workers of this server."""
        if self.app.replica is not None:  # then the workers are replicas too
            return
        place = str(self.app.home.path)
        self.keyring.share(numbers, place)
        self.app.engine.permits.shared = self.keyring.counts(numbers, place)

    def share_among_replicas(self) -> None:
        if (shared := self.app.engine.shared_limits) is not None:
            shared.rates = self.keyring

    def drain(self) -> None:
        """Tell idle WebSocket connections and the like that the server is stopping."""
        self.draining.set()

    def _limit(self, app: apps.App) -> None:
        app.engine.limit(
            runs_max=self.options.max_concurrent_runs,
            owner_max=self.keyring.concurrent,
            rates=self.keyring.rates,
            ceiling=self.keyring.ceiling,
            charge=self._charge,
            session_wait_s=self.options.session_wait_seconds,
            submitted_wait_s=self.options.run_queue_seconds,
        )

    @property
    def stores_runs(self) -> bool:
        """Whether conversations and runs are in the same database."""
        return self._app is not None and self.is_attached and self.session_db is self._app.store.blocking.sessions

    def open_session_db(self) -> Any:
        """The session database, opened when first needed; None when it cannot be."""
        if self.session_db is None:
            try:
                self.session_db = sessions.SessionDB()
            except Exception as error:  # noqa: BLE001  (whatever is wrong with it, turns go on without)
                log.warning("the database of sessions cannot be opened: %s", self.redact(str(error)))
        return self.session_db

    def database(self) -> Any:
        """The async session database; refused when there is none."""
        db = self.open_session_db()
        if db is None:
            raise ApiError(503, "The database of sessions cannot be opened.", "session_db_unavailable")
        return Async(db)

    @property
    def stored_responses(self) -> Any:
        return Async(self.response_store)

    async def stored_history(
        self, session_id: str, before: Admission | None = None, *, until_run: str | None = None
    ) -> list[Message]:
        """The messages of a session: all, those before one of its runs, or those up to the end of one; empty where they
        cannot be read."""
        db = self.open_session_db()
        if db is None:
            return []
        try:
            if before is not None:
                return await conversation_until(Async(db), session_id, before.run_id, with_it=False)
            if until_run is not None:
                return await conversation_until(Async(db), session_id, until_run, with_it=True)
            messages = await Async(db).get_messages_as_conversation(session_id)
        except Exception as error:  # noqa: BLE001  (a turn that somebody waits for goes on without)
            log.warning("the history of a session cannot be read: %s", self.redact(str(error)))
            return []
        return list(messages) if isinstance(messages, list) else []

    async def session(self, session_id: str) -> Message | None:
        if not isinstance(self.session_db, Repository):
            return None
        with contextlib.suppress(StoreError):
            session: Message | None = await Async(self.session_db).get_session(session_id)
            return session
        return None

    async def waits(self, call_ids: Sequence[str], owner: str) -> bool:
        """Whether any of these calls still waits for its client."""
        has_database = isinstance(self.session_db, Repository)
        return has_database and bool(await Async(self.session_db).pending_calls(call_ids, owner))

    def stream(self, request: web.Request, headers: Mapping[str, str]) -> EventStream:
        """A stream to the client, or for a request with an Idempotency-Key one that is recorded."""
        if isinstance(recording := request.get(RECORDING), Recording):
            return RecordedStream(recording, request, headers)
        return self.socket_stream(request, headers)

    def socket_stream(self, request: web.Request, headers: Mapping[str, str]) -> EventStream:
        all_headers = {**common_headers(request), **headers}
        if self.keyring.limited:
            all_headers |= self.rate_headers(request)
        route = route_at(request)
        return EventStream(
            request,
            all_headers,
            keepalive_s=self.keepalive_s,
            stall_s=self.options.write_stall_seconds,
            among=self.metrics.streams,
            keepalive=KEEPALIVE if route is None else route.keepalive,
        )

    @property
    def keepalive_s(self) -> float:
        return self.options.keepalive_seconds

    def toolsets(self, narrowed: frozenset[str] | None) -> frozenset[str] | None:
        """The server's toolsets, narrowed by the request."""
        own = self.options.toolsets
        if own is None:
            return None if narrowed is None else narrowed & toolsets.enabled_toolsets(self.settings, "api_server")
        return frozenset(own) if narrowed is None else frozenset(own) & narrowed

    async def offered(self, toolset: str, narrowed: frozenset[str] | None, caller: Key) -> frozenset[str]:
        """The tools of a toolset that a turn of the caller can use."""
        app = self.app
        sets, ceiling = self.toolsets(narrowed), caller.toolsets
        if sets is None:
            sets = frozenset(toolsets.enabled_toolsets(app.settings, "api_server"))
        if toolset not in sets or (ceiling is not None and toolset not in ceiling):
            return frozenset()
        await app.services.outside.sandboxes.ready(app.settings)
        return frozenset(app.services.registry().offered([toolset], app.settings))

    # --- who may come in --------------------------------------------------------------------------------------------

    def check_auth(self, request: web.Request) -> ApiError | None:
        """None when the request is authenticated, and its caller set; otherwise the error."""
        if self.is_open:
            # An open server serves the user who runs it, and peers whose user is unknown.
            if getattr(request.protocol, "is_same_user", True):
                return None
            message = f"This server has no key and serves only the user who runs it (uid {os.geteuid()}). Make a key: hermes gateway key"
            return ApiError(401, message, "other_user", headers={"WWW-Authenticate": "Bearer"})
        given = given_key(request)
        key = self.keyring.find(given) if given else request.get(SIGNED_IN)
        if isinstance(key, ApiError):
            return key
        if not isinstance(key, Key):
            challenge = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, "Incorrect API key provided.", "invalid_api_key", headers=challenge)
        request[CALLER] = key
        route = route_at(request)
        if route is not None and (refusal := self.scope_refusal(key, route.scope)) is not None:
            return refusal
        if route is not None and route.scope is None:  # it is open to all
            return None
        return self._rate_refusal(key, self.keyring.charge(key.owner, begins_turn=_begins_turn(request)))

    def scope_refusal(self, key: Key, scope: str | None) -> ApiError | None:
        if not (missing := key.lacks(scope)):
            return None
        message = f"This key lacks the scope {' and '.join(map(repr, missing))}."
        needed = str(scope).partition("|")[0]
        challenge = {"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{needed}"'}
        return ApiError(403, message, "insufficient_scope", headers=challenge)

    def _rate_refusal(self, key: Key, exceeded: RateExceeded | None) -> ApiError | None:
        if exceeded is None:
            return None
        wait = {"Retry-After": str(exceeded.retry_after_s), **self.keyring.headers(key.owner)}
        return ApiError(429, exceeded.message, "rate_limit_exceeded", headers=wait)

    async def rate_refusal(self, key: Key, *, counted: bool = False) -> ApiError | None:
        """Count a request that begins a turn, unless it is `counted`; a key that has used up what it may do in a minute
        waits."""
        return self._rate_refusal(key, await self._charge_owner(key.owner, counted=counted))

    async def shared_refusal(self, request: web.Request) -> ApiError | None:
        """Count a request, which `check_auth` has let in, among those of its key at all replicas."""
        key = caller_of(request)
        if not self.keyring.limited or not any(self.keyring.rates(key.owner)):
            return None
        exceeded = await self._charge_everywhere(key.owner, begins_turn=_begins_turn(request), counted=False)
        return self._rate_refusal(key, exceeded)

    async def _charge_owner(self, owner: str, *, counted: bool = False) -> RateExceeded | None:
        """Count the beginning of a turn, here and among all replicas."""
        exceeded = self.keyring.charge(owner, begins_turn=True, counted=counted)
        return exceeded or await self._charge_everywhere(owner, begins_turn=True, counted=counted)

    async def _charge_everywhere(self, owner: str, *, begins_turn: bool, counted: bool) -> RateExceeded | None:
        shared = self.app.engine.shared_limits if self.is_attached else None
        if shared is None or not any(self.keyring.rates(owner)):
            return None
        try:
            outcome = await shared.use(owner, Use(requests=0 if counted else 1, needs_tokens=begins_turn))
        except StoreError as error:
            log.warning("the requests of other replicas are not counted exactly: %s", error)
            return None
        if outcome.granted:
            return None
        exceeded = self.keyring.exceeded(owner, begins_turn=begins_turn, counted=counted)
        return exceeded or RateExceeded("This key has used up what it may do in a minute.", 1)

    async def _charge(self, spec: RunSpec) -> None:
        """Count a turn that no request has asked for: a job's, or a subagent's."""
        if (exceeded := await self._charge_owner(spec.owner)) is not None:
            raise Refused("rate_limit_exceeded", exceeded.message)

    def rate_headers(self, request: web.Request) -> dict[str, str]:
        return self.keyring.headers(caller_of(request).owner)

    def _charge_tokens(self, live: LiveRun, event: Event) -> None:
        """Count the tokens of a turn that has ended; those of a subagent are among its parent's."""
        if event.final and live.spec.parent is None and live.log.count_end is None:
            self.keyring.spend(live.spec.owner, live.log.state.usage.get("total_tokens") or 0)

    def session_key(self, request: web.Request, user: str | None = None) -> str | None:
        """The memory scope that a request names. Without one, the user may be the scope (`memory_scope`)."""
        given = request.headers.get("X-Hermes-Session-Key", "")
        if not given:
            return user_scope(request, user) if self.options.memory_scope == "user" else None
        check_session_key(given)
        if self.is_open:
            message = "X-Hermes-Session-Key requires API key authentication; the server is open."
            raise ApiError(403, message, "session_key_requires_api_key")
        return given

    def origin_allowed(self, origin: str) -> bool:
        """Clients that are not browsers send no origin."""
        allowed = self.options.cors_origins
        return not origin or "*" in allowed or origin in allowed

    def cors_headers(self, origin: str) -> dict[str, str] | None:
        """None when pages of this origin may not read the answer."""
        if not origin or not self.origin_allowed(origin):
            return None
        if "*" in self.options.cors_origins:
            return {"Access-Control-Allow-Origin": "*", **CORS_HEADERS}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", **CORS_HEADERS}
