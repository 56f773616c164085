"""The server's lifecycle: start, state, signals and drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import hermes
from hermes.bus.nats_connection import is_nats
from hermes.core import home as homes
from hermes.core.errors import ConfigError, HermesError
from hermes.core.home import Home
from hermes.core.json_types import JsonObject
from hermes.core.limits import CLOSE_S_MAX
from hermes.core.processes import ending_signals
from hermes.logs import logging_to
from hermes.server.settings import Platform, load_gateway_config
from hermes.server.startup_checks import (
    BACKLOG,
    Unavailable,
    bind,
    check_exposure,
    check_profiles,
    check_settings,
    is_loopback,
    keys_of,
    resolved,
    sandbox_backend,
)
from hermes.server.status import ServerLock, hold, make_own_state, server_url, write_runtime_status
from hermes.server.supervisor import Supervisor
from hermes.services import health
from hermes.settings import config
from hermes.settings.check import without_secret_fields
from hermes.settings.keys import Key, KeyPath, at
from hermes.store.base import StoreBusy
from hermes.store.stores import address, held_alone, place_of

if TYPE_CHECKING:
    from hermes.app import App
    from hermes.server.context import ServerContext
    from hermes.server.worker import Worker

log = logging.getLogger(__name__)
EXIT_AT_ONCE = 130
STATE_EVERY_S = 2.0
_FILES_MAX = 65_536
# Settings that other profiles do not inherit from the environment.
_NOT_OF_OTHERS: JsonObject = {"key": "", "cors_origins": []}


# --- what is configured, for those who build agents -------------------------------------------------------------------

_loaded: dict[Home, config.Settings] = {}


def _settings() -> config.Settings:
    """The settings of the current home, reloaded when its files change."""
    home = homes.resolve()
    known = _loaded.get(home)
    _loaded[home] = settings = config.load(home) if known is None else config.reload_if_changed(known)[0]
    return settings


def _resolve_runtime_agent_kwargs() -> JsonObject:
    """Provider, address and protocol, as far as they are configured; never a key."""
    model = _settings().model
    options = {"provider": model.provider, "base_url": model.base_url, "api_mode": model.api_mode}
    return {name: value for name, value in options.items() if value}


def _resolve_gateway_model() -> str:
    """The configured model's name, or an empty string."""
    return _settings().model.default or ""


def _load_gateway_config() -> JsonObject:
    """All settings as nested mappings, without secrets."""
    return pickle.loads(_plain(_settings()))  # type: ignore[no-any-return]  # noqa: S301  (our own, a moment ago)


@lru_cache(maxsize=4)
def _plain(settings: config.Settings) -> bytes:
    """As bytes, which are the quickest to copy from."""
    return pickle.dumps(_without_secrets(settings.as_dict(), ()))


def _without_secrets(section: JsonObject, path: KeyPath) -> JsonObject:
    public: JsonObject = {}
    for name, value in section.items():
        key = at((*path, name))
        if not isinstance(key, Key):
            public[name] = _without_secrets(value, (*path, name))
        elif not key.mark.secret:
            public[name] = without_secret_fields(value)
    return public


def _handle_loop_exception(loop: asyncio.AbstractEventLoop, context: JsonObject) -> None:
    """Ignore exceptions of disconnected clients that nobody awaited."""
    if not isinstance(context.get("exception"), ConnectionError):
        loop.default_exception_handler(context)


# --- the server -------------------------------------------------------------------------------------------------------


class GatewayRunner:
    def __init__(
        self,
        home: Home,
        *,
        host: str | None = None,
        port: int | None = None,
        allow_local_exec: bool = False,
        verbose: bool = False,
        afterwards: Callable[[], None] | None = None,
        worker: Worker | None = None,
    ) -> None:
        """`afterwards` runs in a thread once the server listens. A `worker` shares port and home with others; its
        parent holds both and reports the state."""
        self.home, self._verbose, self._afterwards = home, verbose, afterwards
        self._host, self._port, self._allow_local_exec = host, port, allow_local_exec
        self._worker = worker
        self._supervisor = worker or Supervisor(os.environ)
        self._app: App
        self._context: ServerContext
        self._profiles: dict[str, tuple[App, ServerContext]] = {}

    @staticmethod
    def _load_reasoning_config() -> JsonObject | None:
        """None leaves it to the model."""
        settings = _settings()
        effort = settings.agent.reasoning_overrides.get(settings.model.default or "") or settings.agent.reasoning_effort
        return {"enabled": effort != "none", "effort": effort} if effort else None

    @staticmethod
    def _load_fallback_model() -> list[Any] | None:
        return list(_settings().fallback_providers) or None

    async def serve(self, stop: asyncio.Event | None = None) -> int:
        """Start, serve until `stop` or a signal, drain, end. Raises HermesError when it cannot start."""
        with contextlib.ExitStack() as held:
            if stop is None:
                stop = held.enter_context(signals())
            if self._worker is None:
                held.enter_context(hold_home(self.home, shared=is_replica(self.home)))
            failed = "startup_failed"
            try:
                async with contextlib.AsyncExitStack() as stack:
                    settings = await self._start(stack)
                    failed = "stopped"
                    await self._run(settings, stop)
            except BaseException as error:
                reason = str(error) if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"
                self._tell(gateway_state=failed, exit_reason=reason, platforms={})
                raise
            self._tell(gateway_state="stopped", active_agents=0, platforms={})
        return 0

    def _tell(self, **fields: Any) -> None:
        """Update the server's state."""
        if self._worker is not None:
            self._worker.report(state=fields)
        else:
            tell_state(self.home, **fields)

    async def _tell_soon(self, **fields: Any) -> None:
        await self._app.services.files.call(partial(self._tell, **fields))

    async def _start(self, stack: contextlib.AsyncExitStack) -> config.Settings:
        """Everything before the first request, in order; `stack` undoes it."""
        settings = config.load(self.home)
        asyncio.get_running_loop().set_exception_handler(_handle_loop_exception)
        stack.enter_context(logging_to(self.home, settings, verbose=self._verbose))
        check_settings(settings)
        for problem in settings.problems:
            log.warning("%s", problem)
        for change in homes.tighten(self.home):
            log.warning("%s was open to others (%o) and is now %o.", *change)
        await self._open_store(stack, settings)
        host = settings.api_server.host if self._host is None else self._host
        addresses = resolved(host, settings.api_server.port if self._port is None else self._port)
        served = {self.home.profile: settings, **profiles_of(self.home, settings)}
        for its in served.values():
            check_exposure(its, host, loopback=is_loopback(addresses), allow_local_exec=self._allow_local_exec)
        check_profiles(served)
        raise_file_limit()
        sockets = bind(self.home, host, addresses, shared=self._worker is not None)
        for sock in sockets:
            stack.callback(sock.close)
        address = {"host": host, "port": sockets[0].getsockname()[1]}
        await self._listen(stack, served, sockets, address)
        connected = {Platform.API_SERVER.value: {"state": "connected"}}
        await self._tell_soon(gateway_state="running", platforms=connected, **address)
        ready = f"Hermes {hermes.__version__} listening on {server_url(address)} ({describe(self.home, settings)})"
        log.info("%s", ready)
        if self._worker is not None:
            return settings
        self._supervisor.tell("READY=1", f"STATUS=Listening on {server_url(address)}")
        with contextlib.suppress(BrokenPipeError):
            print(ready, flush=True)  # noqa: T201  (whoever started the server waits for this line)
        return settings

    async def _open_store(self, stack: contextlib.AsyncExitStack, settings: config.Settings) -> None:
        from hermes.app import current

        if self._worker is None:
            await stack.enter_async_context(hold_database(settings))
        self._app = await current(self.home)
        stack.push_async_callback(self._app.close)
        try:
            await self._app.services.files.call(self._app.store.blocking.open)
        except StoreBusy as error:
            raise Unavailable(error.message, where=error.where, hint=error.hint) from error
        await self._app.connect_bus()

    async def _listen(
        self,
        stack: contextlib.AsyncExitStack,
        served: dict[str, config.Settings],
        sockets: list[socket.socket],
        address: JsonObject,
    ) -> None:
        """Resume interrupted runs, and listen on these sockets."""
        from aiohttp import web

        from hermes.server.application import Runner, build
        from hermes.server.context import ServerContext

        own, *others = served.items()
        extra = load_gateway_config(own[1]).platforms[Platform.API_SERVER].extra
        self._context = ServerContext({**extra, **address})
        self._context.attach(self._app)
        for name, settings in others:
            await self._open_profile(stack, name, settings, address)
        contexts = {name: context for name, (_, context) in self._profiles.items()}
        server = Runner(build(self._context, contexts), shutdown_s=CLOSE_S_MAX)
        stack.push_async_callback(server.cleanup)
        await server.setup()
        orders = self._worker.orders if self._worker is not None else None
        for app, context in ((self._app, self._context), *self._profiles.values()):
            app.own_ports = (address["port"],)
            if self._worker is not None:
                context.share(self._worker.numbers)
            context.share_among_replicas()
            await app.answer_peers(context.peer_operations)
            app.serve(leads=orders is None or orders.leads, begins=orders is None or orders.begins)
        if self._worker is not None:
            stack.enter_context(self._worker.listening(self._look))
        for sock in sockets:
            await web.SockSite(server, sock, backlog=BACKLOG).start()

    def _look(self) -> None:
        """Another worker has ended: take over its runs at once."""
        for app in self._apps:
            app.engine.look_now()

    @property
    def _apps(self) -> list[App]:
        return [self._app, *(app for app, _ in self._profiles.values())]

    async def _open_profile(
        self, stack: contextlib.AsyncExitStack, name: str, settings: config.Settings, address: JsonObject
    ) -> None:
        """Serve another profile of this user below its name: with its own settings, keys and store."""
        from hermes.app import current
        from hermes.server.context import ServerContext

        if self._worker is None:
            stack.enter_context(hold(settings.home, shared=is_replica(settings.home)))
            await stack.enter_async_context(hold_database(settings))
        app = await current(settings.home)
        stack.push_async_callback(app.close)
        await app.services.files.call(app.store.blocking.open)
        await app.connect_bus()
        extra = load_gateway_config(settings).platforms[Platform.API_SERVER].extra
        extra = {"model_name": name, **_NOT_OF_OTHERS, **extra, **address}
        context = ServerContext(extra)
        context.attach(app)
        self._profiles[name] = (app, context)

    async def _run(self, settings: config.Settings, stop: asyncio.Event) -> None:
        """Serve until stopped; then drain: reads are still answered, and runs have time to end."""
        keeping = [asyncio.create_task(work) for work in (self._keep_state(), self._keep_alive())]
        try:
            if self._afterwards:
                await self._app.services.files.call(self._afterwards)
            await stop.wait()
            for context in (self._context, *(context for _, context in self._profiles.values())):
                context.drain()
            seconds = config.reload_if_changed(settings)[0].api_server.drain_seconds
            log.info("draining for up to %g s", seconds)
            if self._worker is None:
                self._supervisor.tell("STOPPING=1", f"STATUS=Draining for up to {seconds:g} s")
            drained = asyncio.gather(*(app.engine.drain(seconds) for app in self._apps))
            await self._tell_soon(gateway_state="draining")
            await drained
        finally:
            for task in keeping:
                task.cancel()

    async def _keep_state(self) -> None:
        """Report how many turns are running, when that has changed."""
        reported = 0
        while True:
            await asyncio.sleep(STATE_EVERY_S)
            if (running := sum(app.engine.active for app in self._apps)) != reported:
                await self._tell_soon(active_agents=running)
                reported = running

    async def _keep_alive(self) -> None:
        """Watchdog pings. They stop only for what a restart would fix: a store whose writer hangs, but not a full disk."""
        if (period_s := self._supervisor.period_s) is None:
            return
        answering = True
        while True:
            try:
                async with asyncio.timeout(period_s):
                    await asyncio.gather(*(_check_store(app) for app in self._apps))
            except TimeoutError:
                if answering:
                    self._supervisor.tell("STATUS=The database does not answer.")
                answering = False
                continue
            if not answering:
                self._supervisor.tell("STATUS=The database answers again.")
            answering = True
            self._supervisor.tell("WATCHDOG=1")
            await asyncio.sleep(period_s)


async def _check_store(app: App) -> None:
    with contextlib.suppress(Exception):  # an error is an answer, too
        await app.store.blocking.engine.check()


def is_replica(home: Home) -> bool:
    """Whether other servers may serve this home too. Unreadable settings are reported later."""
    try:
        return is_nats(config.load(home).bus.url)
    except HermesError:
        return False


def hold_database(settings: config.Settings) -> contextlib.AbstractAsyncContextManager[None]:
    """Be the only server of a PostgreSQL database, unless a bus shares it with others."""
    if is_nats(settings.bus.url):
        return contextlib.nullcontext()
    return held_alone(address(settings.home, settings), settings.home)


def hold_home(home: Home, *, shared: bool = False) -> ServerLock:
    """Become the server of this home, or with `shared` one of them."""
    try:
        lock = hold(home, shared=shared)
    except OSError as error:
        message = f"The home cannot be written to: {error.strerror}."
        raise Unavailable(message, where=str(home.path), hint="another HERMES_HOME") from error
    if shared:
        with contextlib.suppress(OSError):  # then the home's state file is used
            make_own_state(home)
    tell_state(home, gateway_state="starting")
    return lock


def tell_state(home: Home, **fields: Any) -> None:
    """Write the server's state. A full disk is no reason to stop."""
    try:
        write_runtime_status(home, **fields)
    except OSError as error:
        log.warning("the state of the server could not be written: %s", error)


def profiles_of(home: Home, settings: config.Settings) -> dict[str, config.Settings]:
    """The settings of the profiles that are served below their names.

    The environment belongs to the server's own profile: it sets no key and no origin of another.
    """
    variables = {f"API_SERVER_{name.upper()}" for name in _NOT_OF_OTHERS}
    environ = {name: value for name, value in os.environ.items() if name not in variables}
    served: dict[str, config.Settings] = {}
    for name in settings.api_server.profiles:
        if name == home.profile:
            message = f"api_server.profiles names {name!r}, the profile that the server runs with."
            raise ConfigError(message, where="api_server.profiles", hint="hermes config edit")
        try:
            profile = homes.open_profile(home.root, name)
        except HermesError as error:
            raise ConfigError(error.message, where="api_server.profiles", hint="hermes profile list") from None
        served[name] = config.load(profile, environ=environ)
        check_settings(served[name])
    return served


def raise_file_limit() -> None:
    """Every connection is an open file: raise the soft limit as far as the system allows, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, _FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def describe(home: Home, settings: config.Settings) -> str:
    keys, store = keys_of(settings), place_of(address(home, settings))
    auth = f"{len(keys)} keys" if len(keys) > 1 else "key" if keys else "open: hermes gateway key makes a key"
    return f"model {_model(settings)}, auth {auth}, sandbox {sandbox_backend(settings)}, store {store}"


def _model(settings: config.Settings) -> str:
    """The first model's name. A server without one starts, and can be given one."""
    try:
        finding = health.CHECKS["model"].look(health.Subject(settings.home, settings))
    except ConfigError as error:
        log.warning("%s", error)
        return "none"
    if finding.state == "fail":
        log.warning("%s", finding)
    return f"{finding.facts['provider']}/{finding.facts['model']}" if finding.facts else "none"


@contextlib.contextmanager
def signals(before_exit: Callable[[], None] = lambda: None) -> Iterator[asyncio.Event]:
    """An event that the first signal sets. A second one exits at once: running turns are on record."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    received: list[int] = []

    def end(number: int, _: object) -> None:
        if received:
            before_exit()
            os._exit(EXIT_AT_ONCE)
        received.append(number)
        loop.call_soon_threadsafe(stop.set)

    before = {one: signal.signal(one, end) for one in ending_signals()}
    try:
        yield stop
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
