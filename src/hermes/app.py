"""Wires the parts together, once per home and event loop: settings, store, log, engine, tools, HTTP client."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hermes.agent.model_lists import ModelLists
from hermes.agent.turn import Services
from hermes.bus.memory import MemoryBus
from hermes.bus.peers import Operation, Peers, PeerServer
from hermes.bus.replica import replica_of
from hermes.core.burst_cache import BurstCache
from hermes.core.errors import ConfigError
from hermes.core.home import Home, resolve
from hermes.core.limits import BUSY_TURNS
from hermes.core.result import Result
from hermes.core.spec import RouteChoice, RunSpec
from hermes.core.threads import Threads
from hermes.guards.network import Network
from hermes.guards.secrets import Secrets
from hermes.http_client.client import HttpClient
from hermes.local import status
from hermes.local.client import LocalModel
from hermes.logs import known_secrets
from hermes.providers.routes import primary
from hermes.runs.engine import EngineLimits, LiveRun, RunEngine
from hermes.runs.log import RunLog
from hermes.runs.remote_runs import Elsewhere
from hermes.runs.scheduler import Scheduler
from hermes.runs.traces import traces
from hermes.sandbox.choose import Sandboxes
from hermes.services.housekeeping import SWEEP_EVERY_S, sweep_if_due
from hermes.services.usage import WARM_UP, UsageCounter
from hermes.settings import config
from hermes.store.base import StoreError
from hermes.store.engine import Engine
from hermes.store.stores import AsyncStore, Store, address, store_at
from hermes.tools.framework.resources import ProcessResources
from hermes.tools.framework.toolsets import builtin
from hermes.tools.mcp import Servers

if TYPE_CHECKING:
    from hermes.services.delivery import Deliverer

log = logging.getLogger(__name__)
FILE_THREADS = 4
NAME_THREADS = 8
DRAIN_AT_LOOP_END_S = 0.0


class App:
    """Everything that runs on one event loop. Constructing it does no I/O beyond reading the settings."""

    def __init__(self, home: Home, settings: config.Settings, *, store: Store | None = None) -> None:
        self.home = home
        self._settings = settings
        self._notice: str | None = None
        self._background: set[asyncio.Task[object]] = set()
        # Further stores to close.
        self.also_closed: list[Any] = []
        self._guard: AsyncGenerator[None, None] | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # Ports of this process's server, which no tool may reach.
        self.own_ports: tuple[int, ...] = ()
        self.store = AsyncStore(store or store_of(home, settings))
        self.store.blocking.engine.deletion_listeners.append(self._sessions_deleted)
        self._ephemeral = AsyncStore(Store(None))
        proxy, bundle = settings.network.proxy, settings.variable("HERMES_CA_BUNDLE")
        self._names = Threads(NAME_THREADS)
        http = HttpClient(self._names.submit, ca_bundle=bundle or None, proxy=proxy or None)
        files = Threads(FILE_THREADS)
        outside = ProcessResources(
            Sandboxes(home),
            Network(self._names.submit, ca_bundle=bundle or None, proxy=proxy or None),
            lambda: self.engine,
            lambda: self.own_ports,
        )
        self.local = LocalModel(home, lambda: self._settings)
        self.services = Services(
            home=home,
            settings=self._current_settings,
            http=http,
            transport_for=lambda route, tell: self.local.telling(tell) if route.api_mode == "local" else http,
            free_memory=self.local.halve,
            model_lists=ModelLists(home, http, files, self._in_background),
            registry=builtin,
            threads=Threads(settings.agent.tool_threads),
            files=files,
            background=self._in_background,
            outside=outside,
            burst_cache=BurstCache(lambda: self.engine.permits.here > BUSY_TURNS),
            mcp=Servers(outside.network, lambda: self.secrets, outside.own_ports, files.call),
        )
        window_s = settings.agent.delta_window_ms / 1000
        self.replica = replica_of(home, settings)
        bus, peers = (self.replica.bus, self.replica.peers) if self.replica else (MemoryBus(), Peers(home.run_folder))
        self.run_log = log = RunLog(bus, window_s=window_s, journal=home.journal, elsewhere=Elsewhere(peers))
        limits = EngineLimits(
            turn_queue=settings.sessions.turn_queue, resume_within_s=settings.runs.resume_within_seconds
        )
        self.engine = RunEngine(self.store, self._ephemeral, log, self._execute, secrets=self._secrets, limits=limits)
        self.engine.lifecycle.on_new_session = self.services.forget
        self.usage = UsageCounter(self.store.usage_days, self._in_background)
        self.engine.listeners.append(self.usage.hear)
        self._traces = traces(settings)
        if self._traces is not None:
            self.engine.listeners.append(self._traces.hear)

    async def _execute(self, live: LiveRun) -> Result:
        from hermes.agent.loop import run_turn

        self._loop = asyncio.get_running_loop()
        return await run_turn(live, self.services)

    def _sessions_deleted(self, session_ids: Sequence[str]) -> None:
        """Called in the store's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._forget, list(session_ids))

    def _forget(self, session_ids: list[str]) -> None:
        self.services.forget(session_ids)
        # Other workers have state of sessions too.
        self._in_background(self.engine.peers.ask_all("forget", session_ids))

    async def answer_peers(self, more: Mapping[str, Operation]) -> None:
        self._loop = asyncio.get_running_loop()
        make_server = self.replica.peer_server if self.replica else partial(PeerServer, self.home.run_folder)

        async def forget(session_ids: list[str]) -> None:
            self.services.forget(session_ids)

        await self.engine.answer_peers(make_server, {"forget": forget, **more})
        if self.replica is not None:
            await self.replica.members.start()

    async def connect_bus(self) -> None:
        """Connect to the other replicas, if any are configured. Raises HermesError."""
        if self.replica is not None:
            await self.replica.connect()
            self.replica.members.on_gone.append(self._replica_gone)
            self.engine.permits.shared = self.replica.members
            await self.engine.become_replica(self.replica.queue, self.replica.max_inflight)

    def _replica_gone(self, holder: str) -> None:
        self.run_log.bus.cut()
        self.engine.look_now()

    def _current_settings(self) -> tuple[config.Settings, str | None]:
        notice, self._notice = self._notice, None
        return self._settings, notice

    def _reload(self) -> config.Settings:
        self._settings, notice = config.reload_if_changed(self._settings)
        self._notice = notice or self._notice
        return self._settings

    @property
    def settings(self) -> config.Settings:
        cache = self.services.burst_cache
        settings: config.Settings | None = cache.get(config.reload_if_changed)
        return cache.keep(config.reload_if_changed, self._reload()) if settings is None else settings

    @property
    def secrets(self) -> Secrets:
        return known_secrets(self._settings)

    def _secrets(self, spec: RunSpec) -> Secrets:
        """Those of the settings, which every run reads again, and those of the run."""
        configured, own = known_secrets(self.settings), set[str]()
        if spec.route is not None and (spec.route.api_key or spec.route.fallbacks):
            fallbacks = [entry.get("api_key") for entry in spec.route.fallbacks or () if not isinstance(entry, str)]
            own = {str(key) for key in (spec.route.api_key, *fallbacks) if key}
        if self.services.mcp.of_sessions:
            own |= self.services.mcp.secrets_of(self.engine.root_spec(spec).session_id)
        own -= set(configured.values)
        return Secrets([*configured.values, *own]) if own else configured

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def serve(self, *, leads: bool = True, begins: bool = True) -> None:
        """A server's background work: resume interrupted runs, and sweep.

        Of several workers one `leads`: it does what is to be done once. `begins`: the whole server is starting, not
        only this worker.
        """
        self.engine.start_background_tasks()
        self.usage.with_unstored_runs = True
        self.services.mcp.begin(self._settings)
        self._in_background(self._try_sandbox())
        if leads:
            self._in_background(self.warm_up())
        elif self.replica is None:  # else the replicas elect a leader
            return
        self._in_background(self._keep_house(begins=begins and leads))
        if self._settings.cron.enabled:
            at_once, deliver = lambda: self._settings.cron.max_parallel_jobs, self.deliverer()
            scheduler = Scheduler(self.engine, self.store.jobs, at_once, leads=self._leads, deliver=deliver)
            self._in_background(scheduler.run())

    def deliverer(self) -> Deliverer:
        from hermes.guards.urls import UrlGuard
        from hermes.services.delivery import Deliverer

        outside = self.services.outside

        def guard() -> UrlGuard:
            return UrlGuard(outside.network, self._settings, self.secrets, outside.own_ports)

        return Deliverer(self.home, lambda: self._settings, lambda: self.secrets, guard)

    async def warm_up(self) -> None:
        """Load a local model and evaluate the common prompt prefix before the first request."""
        with suppress(ConfigError):
            is_local = primary(self._settings, RouteChoice()).api_mode == "local"
            if is_local and not status(self.home, self._settings)["problem"]:
                await self.engine.run(RunSpec("hello", session_id=WARM_UP, persist=False, max_output_tokens=1))

    async def _try_sandbox(self) -> None:
        """Detect the sandbox, and clean up what an earlier process left there."""
        try:
            await self.services.outside.sandboxes.start(self._settings)
        except (ConfigError, OSError) as error:
            log.warning("the sandbox: %s", error)

    def _leads(self) -> bool:
        """Whether this process does what one of several replicas is to do."""
        leases = self.engine.replica_leases
        return leases is None or leases.leads

    async def _keep_house(self, *, begins: bool) -> None:
        with suppress(StoreError):
            if begins and self.replica is None:  # else another replica may be about to start it
                await self.store.idempotency.release_unstarted()
            await self.store.leases.release_gone()
        while True:
            try:
                if self._leads():
                    await self.services.files.call(partial(sweep_if_due, self.store.blocking, self._settings))
            except StoreError as error:
                log.warning("the sweep failed: %s", error)
            await asyncio.sleep(SWEEP_EVERY_S)

    async def close(self, drain_s: float = DRAIN_AT_LOOP_END_S) -> None:
        self._guard = None
        if self._closed:
            return
        self._closed = True
        self.store.blocking.engine.deletion_listeners.remove(self._sessions_deleted)
        for apps in tuple(_apps.values()):
            for key in [key for key, app in apps.items() if app is self]:
                del apps[key]
        await self.engine.drain(drain_s)
        await self.usage.write()
        self.run_log.shut()
        if self.replica is not None:
            await self.replica.close()
        for task in tuple(self._background):
            task.cancel()
        if self._background:
            await asyncio.wait(set(self._background))
        await self.local.close()
        await self.services.mcp.close()
        await self.services.outside.processes.close()
        await self.services.outside.sandboxes.close()
        await self.services.http.close()
        if self._traces is not None:
            await self.services.files.call(self._traces.close)
        for store in (*self.also_closed, self.store, self._ephemeral):
            await self.services.files.call(store.close)
        for threads in (self.services.threads, self.services.files, self._names):
            threads.close()

    async def close_with_loop(self) -> None:
        """Close when the loop ends: a loop finishes its open generators before it closes."""

        async def guard() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                await self.close()

        self._guard = guard()
        await anext(self._guard)


_apps: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[Home, Engine | None], App]] = WeakKeyDictionary()


async def current(home: Home | None = None, engine: Engine | None = None) -> App:
    """The app of a home on the running loop, created when first asked for; with an engine, the one that stores its runs
    there."""
    home = home or resolve()
    apps = _apps.setdefault(asyncio.get_running_loop(), {})
    if (home, engine) not in apps:
        settings = config.load(home)
        store = store_of(home, settings) if engine is None else Store(engine)
        app = apps.get((home, store.engine))
        if app is None:
            app = apps[home, store.engine] = App(home, settings, store=store)
            await app.close_with_loop()
        else:
            store.close()
        apps[home, engine] = app
    return apps[home, engine]


def store_of(home: Home, settings: config.Settings) -> Store:
    return store_at(address(home, settings), read_threads=settings.storage.read_threads, home=home)


# --- a loop for programs that have none ------------------------------------------------------------------------------

_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def background_loop() -> asyncio.AbstractEventLoop:
    """The loop for the runs of all blocking callers, in one thread."""
    global _loop  # noqa: PLW0603  (one per process is the point)
    with _loop_lock:
        if _loop is None or _loop.is_closed():
            _loop = new_loop()
            thread = threading.Thread(target=_serve, args=(_loop,), name="hermes-loop", daemon=True)
            thread.start()
            atexit.register(_end, _loop, thread)
        return _loop


def _forget_loop() -> None:
    """A forked child has no thread for its parent's loop."""
    global _loop, _loop_lock
    _loop, _loop_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_loop)


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=5)
