"""A server of several processes: the parent that starts, watches, restarts and stops its workers.

Workers share the port and the home. The parent answers no request: it holds the home, reserves the port, writes the
state file, and notifies the service manager for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

import msgspec

import hermes
from hermes.core.errors import ConfigError, HermesError
from hermes.core.home import Home
from hermes.core.json_types import JsonObject
from hermes.core.limits import WORKER_RESTART_S, WORKER_RESTART_S_MAX, WORKER_STEADY_S
from hermes.logs import logging_to
from hermes.server import shared_counters
from hermes.server.runner import (
    STATE_EVERY_S,
    describe,
    hold_database,
    hold_home,
    is_replica,
    profiles_of,
    signals,
    tell_state,
)
from hermes.server.settings import Platform
from hermes.server.startup_checks import bind, check_settings, resolved
from hermes.server.status import ServerLock, hold, server_url
from hermes.server.supervisor import Supervisor
from hermes.server.worker import LOOK, Orders
from hermes.settings import config
from hermes.store.stores import address, is_server, path_of

log = logging.getLogger(__name__)
_LEADER = 0
_NOT_FOR_WORKERS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class WorkerFailed(HermesError):
    """A worker could not be started."""

    def __init__(self, message: str, *, where: str = "", hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message, where=where, hint=hint)
        self.exit_code = exit_code


class _Child:
    """A worker's process, and what it has reported."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.began = time.monotonic()
        self.listening: asyncio.Task[None]
        self.is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed: JsonObject = {}
        self.running = 0
        self.shows_life = False

    def look(self) -> None:
        """Have it look for runs that another worker has left."""
        if self.process.stdin is not None and not self.process.stdin.is_closing():
            self.process.stdin.write(LOOK)

    def signal(self, number: int) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


class Workers:
    """The parent of a server's workers."""

    def __init__(
        self,
        home: Home,
        count: int,
        *,
        host: str | None = None,
        port: int | None = None,
        allow_local_exec: bool = False,
        verbose: bool = False,
    ) -> None:
        self.home, self._count = home, count
        self._host, self._port, self._allow_local_exec, self._verbose = host, port, allow_local_exec, verbose
        self._supervisor = Supervisor(os.environ)
        self._children: dict[int, _Child] = {}
        self._stopping = asyncio.Event()
        self._orders: Orders
        self._tell = partial(tell_state, home)

    async def serve(self, stop: asyncio.Event | None = None) -> int:
        """Start the workers, serve until `stop` or a signal, drain, end. Raises HermesError when they cannot start."""
        with contextlib.ExitStack() as held:
            if stop is None:
                stop = held.enter_context(signals(self._kill))
            lock = held.enter_context(hold_home(self.home, shared=is_replica(self.home)))
            failed = "startup_failed"
            try:
                async with contextlib.AsyncExitStack() as stack:
                    settings = config.load(self.home)
                    stack.enter_context(logging_to(self.home, settings, verbose=self._verbose))
                    await self._prepare(stack, settings, lock)
                    keeping = await stack.enter_async_context(self._started())
                    failed = "stopped"
                    await self._run(settings, stop, keeping)
            except BaseException as error:
                reason = str(error) if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"
                self._tell(gateway_state=failed, exit_reason=reason, platforms={})
                raise
            self._tell(gateway_state="stopped", active_agents=0, platforms={})
        return 0

    async def _prepare(self, stack: contextlib.AsyncExitStack, settings: config.Settings, lock: ServerLock) -> None:
        """What is done once for all workers: the port, the homes of other profiles, and the orders."""
        check_settings(settings)
        url = address(self.home, settings)
        if not is_server(url) and path_of(url) is None:
            message = "Several workers need a database on disk, and storage.url names none."
            raise ConfigError(message, where="storage.url", hint="api_server.workers 1")
        served = profiles_of(self.home, settings).values()
        locks = [lock, *(stack.enter_context(hold(its.home, shared=is_replica(its.home))) for its in served)]
        for its in (settings, *served):
            await stack.enter_async_context(hold_database(its))
        host = settings.api_server.host if self._host is None else self._host
        addresses = resolved(host, settings.api_server.port if self._port is None else self._port)
        # A shared port could be another server's, so a check without sharing comes first.
        probes = bind(self.home, host, addresses)
        port = probes[0].getsockname()[1]
        for sock in probes:
            sock.close()
        addresses = [(family, (where[0], port, *where[2:])) for family, where in addresses]
        for sock in bind(self.home, host, addresses, shared=True, listen=False):
            stack.callback(sock.close)
        numbers = shared_counters.make()
        stack.callback(os.close, numbers)
        self._orders = Orders(
            number=_LEADER,
            home=str(self.home.path),
            profile=self.home.profile,
            host=host,
            port=port,
            allow_local_exec=self._allow_local_exec,
            verbose=self._verbose,
            leads=True,
            begins=True,
            watchdog_s=self._supervisor.period_s,
            answers_fd=-1,
            numbers_fd=numbers,
            lock_fds=tuple(one.fd for one in locks),
        )

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[Sequence[asyncio.Task[None]]]:
        """All workers, ready: the first before the others, so that setup and refusals happen once."""
        keeping: list[asyncio.Task[None]] = []
        try:
            for group in ([_LEADER], [number for number in range(self._count) if number != _LEADER]):
                children = [(number, await self._start(number, begins=True)) for number in group]
                keeping += (asyncio.create_task(self._keep(number, child)) for number, child in children)
                await asyncio.gather(*(child.is_ready for _, child in children))
            yield keeping
        finally:
            self._stopping.set()
            for child in self._children.values():
                child.signal(signal.SIGTERM)
            if keeping:
                await asyncio.wait(keeping)

    async def _start(self, number: int, *, begins: bool) -> _Child:
        read_fd, report_fd = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "hermes.server.worker"),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(report_fd, self._orders.numbers_fd, *self._orders.lock_fds),
                env={name: value for name, value in os.environ.items() if name not in _NOT_FOR_WORKERS},
                # Signals of a terminal are for the parent, which signals the workers.
                process_group=0,
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(report_fd)
        child = self._children[number] = _Child(process)
        lead = number == _LEADER
        orders = msgspec.structs.replace(self._orders, number=number, answers_fd=report_fd, leads=lead, begins=begins)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(orders) + b"\n")
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(read_fd, "rb"))
        child.listening = asyncio.create_task(self._listen(child, reader))
        return child

    async def _keep(self, number: int, child: _Child) -> None:
        """Restart a worker whenever it ends, with backoff, until the server stops."""
        wait_s = WORKER_RESTART_S
        while True:
            code = await child.process.wait()
            await asyncio.wait([child.listening])
            if not child.is_ready.done():
                reason = child.failed or {"message": f"A worker has ended with {code} before it was ready."}
                child.is_ready.set_exception(WorkerFailed(**reason))
                child.is_ready.exception()  # marks it as retrieved
            child.running = 0
            if self._stopping.is_set():
                return
            why = child.failed.get("message", "")
            log.warning("worker %d (pid %d) has ended with %d. %s", number, child.process.pid, code, why)
            for other in self._children.values():
                other.look()
            if time.monotonic() - child.began > WORKER_STEADY_S:
                wait_s = WORKER_RESTART_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)
                return
            wait_s = min(WORKER_RESTART_S_MAX, 2 * wait_s)
            child = await self._start(number, begins=False)
            if self._stopping.is_set():
                child.signal(signal.SIGTERM)

    async def _listen(self, child: _Child, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            report = json.loads(line)
            if "failed" in report:
                child.failed = report["failed"]
            for field, value in report.get("state", {}).items():
                if field == "active_agents":
                    child.running = value
                elif field == "gateway_state" and value == "running" and not child.is_ready.done():
                    child.is_ready.set_result(None)
            if "notify" in report:
                self._forward(child, report["notify"])

    def _forward(self, child: _Child, lines: list[str]) -> None:
        """Ping the watchdog when every worker has; other notifications are forwarded as they are."""
        if "WATCHDOG=1" not in lines:
            self._supervisor.tell(*lines)
            return
        child.shows_life = True
        alive = [one for one in self._children.values() if one.process.returncode is None]
        if all(one.shows_life for one in alive):
            for one in alive:
                one.shows_life = False
            self._supervisor.tell("WATCHDOG=1")

    async def _run(self, settings: config.Settings, stop: asyncio.Event, keeping: Sequence[asyncio.Task[None]]) -> None:
        address = {"host": self._orders.host, "port": self._orders.port}
        connected = {Platform.API_SERVER.value: {"state": "connected"}}
        self._tell(gateway_state="running", platforms=connected, **address)
        facts = f"{describe(self.home, settings)}, {self._count} workers"
        ready = f"Hermes {hermes.__version__} listening on {server_url(address)} ({facts})"
        log.info("%s", ready)
        self._supervisor.tell("READY=1", f"STATUS=Listening on {server_url(address)}")
        with contextlib.suppress(BrokenPipeError):
            print(ready, flush=True)  # noqa: T201  (whoever started the server waits for this line)
        counting = asyncio.create_task(self._keep_state())
        try:
            await stop.wait()
            self._stopping.set()
            seconds = config.reload_if_changed(settings)[0].api_server.drain_seconds
            log.info("draining for up to %g s", seconds)
            self._supervisor.tell("STOPPING=1", f"STATUS=Draining for up to {seconds:g} s")
            for child in self._children.values():
                child.signal(signal.SIGTERM)
            await asyncio.to_thread(self._tell, gateway_state="draining")
            await asyncio.wait(keeping)
        finally:
            counting.cancel()

    async def _keep_state(self) -> None:
        """Report how many turns are running, when that has changed."""
        reported = 0
        while True:
            await asyncio.sleep(STATE_EVERY_S)
            if (running := sum(child.running for child in self._children.values())) != reported:
                await asyncio.to_thread(self._tell, active_agents=running)
                reported = running

    def _kill(self) -> None:
        """Kill all workers at once: running turns are on record."""
        for child in self._children.values():
            child.signal(signal.SIGKILL)
