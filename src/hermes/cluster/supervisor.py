"""`hermes cluster up`: starts engines, replicas and the proxy, starts replicas again that have ended, and ends all."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping

import msgspec

import hermes
from hermes.cluster import state as states
from hermes.cluster.engines import HOST, Engine
from hermes.cluster.proxy import Proxy
from hermes.cluster.state import ClusterState, ReplicaState, process_state
from hermes.core.errors import HermesError
from hermes.core.home import Home, make_private_folder, private_opener
from hermes.core.limits import CLOSE_S_MAX, WORKER_RESTART_S, WORKER_RESTART_S_MAX, WORKER_STEADY_S
from hermes.logs import logging_to
from hermes.server.runner import raise_file_limit, signals, tell_state
from hermes.server.startup_checks import bind, check_exposure, check_settings, is_loopback, resolved
from hermes.server.status import hold, server_url
from hermes.settings import config
from hermes.settings.config import Settings

log = logging.getLogger(__name__)
REPLICAS_MAX = 32
_START_S_MAX = 120.0
# Beyond the drain: runs that are told to stop, then readers that are still to be told their end.
_END_S_MAX = 5 * CLOSE_S_MAX
_LISTENING = re.compile(rb"listening on http://\S+?:(\d+)[ /]")
_NOT_FOR_REPLICAS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ClusterRunning(HermesError):
    exit_code = 4


class ReplicaFailed(HermesError):
    """A replica has ended before it was ready: with its own words, and its own exit code."""

    def __init__(self, message: str, *, where: str, hint: str, exit_code: int) -> None:
        super().__init__(message, where=where, hint=hint)
        self.exit_code = exit_code


class _Replica:
    def __init__(self, number: int) -> None:
        self.state = ReplicaState(number=number)
        self.process: asyncio.subprocess.Process | None = None

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


class Supervisor:
    """The cluster of one home."""

    def __init__(
        self,
        home: Home,
        replicas: int,
        *,
        host: str,
        port: int,
        announce: Callable[[str], None],
        engines: Mapping[str, Engine] | None = None,
    ) -> None:
        """`announce` is called with one line when all is ready. `engines`: by the variable that names their address. With
        0 replicas nothing listens at the address and the home is left to others, such as `hermes migrate`."""
        self.home, self._announce = home, announce
        self._host, self._port = (host, port) if replicas else ("", 0)
        self._engines = dict(states.engines_of(home) if engines is None else engines)
        self._replicas = [_Replica(number) for number in range(1, replicas + 1)]
        self._proxy = Proxy()
        self._stopping = asyncio.Event()
        self._recording = asyncio.Lock()
        self._drain_s = 0.0

    async def serve(self, stop: asyncio.Event | None = None) -> int:
        """Start everything, keep it until `stop` or a signal, end it. Raises HermesError when it cannot start; nothing
        of it is left running then."""
        with contextlib.ExitStack() as held:
            if stop is None:
                stop = held.enter_context(signals(self._kill))
            held.enter_context(_sole(self.home))
            if self._replicas:
                held.enter_context(hold(self.home, shared=True))
            async with contextlib.AsyncExitStack() as stack:
                await self._start(stack)
                await self._write_status(gateway_state="running", host=self._host, port=self._port)
                self._announce(self._ready_line())
                await stop.wait()
                await self._write_status(gateway_state="draining")
            await self._write_status(gateway_state="stopped")
        return 0

    async def _write_status(self, **fields: object) -> None:
        if self._replicas:
            await asyncio.to_thread(tell_state, self.home, **fields)

    def _ready_line(self) -> str:
        engines = ", ".join(f"{engine.name} on {HOST}:{engine.state.port}" for engine in self._engines.values())
        if not self._replicas:
            return f"Hermes {hermes.__version__} cluster without replicas ({engines})"
        url = server_url({"host": self._host, "port": self._port})
        return f"Hermes {hermes.__version__} cluster listening on {url} ({len(self._replicas)} replicas, {engines})"

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        settings = config.load(self.home)
        stack.enter_context(logging_to(self.home, settings, verbose=False))
        check_settings(settings)
        self._drain_s = settings.api_server.drain_seconds
        sockets = self._listening_sockets(settings, stack) if self._replicas else []
        raise_file_limit()
        await asyncio.to_thread(states.remove_remains, self.home, self._engines.values())
        stack.push_async_callback(asyncio.to_thread, states.remove_remains, self.home, self._engines.values())
        await _all(asyncio.to_thread(engine.start) for engine in self._engines.values())
        await self._record()
        stack.push_async_callback(self._proxy.close)
        await stack.enter_async_context(self._started())
        await self._proxy.listen(sockets)

    def _listening_sockets(self, settings: Settings, stack: contextlib.AsyncExitStack) -> list[socket.socket]:
        addresses = resolved(self._host, self._port)
        check_exposure(settings, self._host, loopback=is_loopback(addresses), allow_local_exec=False)
        sockets = bind(self.home, self._host, addresses)
        for sock in sockets:
            stack.callback(sock.close)
        self._port = sockets[0].getsockname()[1]
        return sockets

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[None]:
        """All replicas, ready: the first before the others, so that what is made or refused is so once."""
        keeping: list[asyncio.Task[None]] = []
        try:
            for group in (self._replicas[:1], self._replicas[1:]):
                await _all(self._start_replica(replica) for replica in group)
                keeping += (asyncio.create_task(self._keep(replica)) for replica in group)
            yield
        finally:
            self._stopping.set()
            await asyncio.gather(*(self._end_replica(replica) for replica in self._replicas))
            await asyncio.gather(*keeping)

    async def _start_replica(self, replica: _Replica) -> None:
        """Return when it listens, and the proxy and the record know where."""
        log_path = states.log_file(self.home, replica.state.number)
        log_fd = private_opener(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        begin = os.fstat(log_fd).st_size
        try:
            replica.process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "hermes", "-p", self.home.profile, "gateway", "run"),
                *("--host", HOST, "--port", "0", "--workers", "1"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_fd,
                env=self._environ(),
                # What a terminal sends to all is for this process, which tells the replicas.
                start_new_session=True,
            )
        finally:
            os.close(log_fd)
        if self._stopping.is_set():
            replica.signal(signal.SIGTERM)
        started = process_state(process.pid)
        replica.state.pid, replica.state.start_time, replica.state.port = started.pid, started.start_time, 0
        await self._record()
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), _START_S_MAX)
        except TimeoutError:
            line = b""
            replica.signal(signal.SIGKILL)
        if (match := _LISTENING.search(line)) is None:
            code = await process.wait()
            message, hint = _last_error(log_path.read_bytes()[begin:])
            raise ReplicaFailed(
                message or f"It has ended with {code} before it was ready.",
                where=f"replica {replica.state.number}",
                hint=hint,
                exit_code=code if code > 0 else ReplicaFailed.exit_code,
            )
        replica.state.port = int(match[1])
        await self._record()

    def _environ(self) -> dict[str, str]:
        environ = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_REPLICAS}
        environ |= {variable: engine.url for variable, engine in self._engines.items()}
        return environ | {"HERMES_HOME": str(self.home.root)}

    async def _keep(self, replica: _Replica) -> None:
        """Start a replica again whenever it has ended, later each time, until the cluster stops."""
        wait_s, started_at = WORKER_RESTART_S, time.monotonic()
        number = replica.state.number
        while True:
            assert replica.process is not None
            code = await replica.process.wait()
            if self._stopping.is_set():
                return
            log.warning("replica %d (pid %d) has ended with %d", number, replica.process.pid, code)
            replica.state.port = 0
            await self._record()
            if states.stay_dead_file(self.home, number).exists():
                return
            if time.monotonic() - started_at > WORKER_STEADY_S:
                wait_s = WORKER_RESTART_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)
                return
            wait_s, started_at = min(WORKER_RESTART_S_MAX, 2 * wait_s), time.monotonic()
            replica.state.restarts += 1
            try:
                await self._start_replica(replica)
            except ReplicaFailed as error:
                log.warning("%s", error)

    async def _end_replica(self, replica: _Replica) -> None:
        if replica.process is None:
            return
        for number, patience in ((signal.SIGTERM, self._drain_s + _END_S_MAX), (signal.SIGKILL, None)):
            replica.signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(replica.process.wait(), patience)
                return

    async def _record(self) -> None:
        """Tell the proxy and the state file which replicas listen."""
        listening = [replica.state.port for replica in self._replicas if replica.state.port]
        self._proxy.set_targets((HOST, port) for port in listening)
        own = process_state(os.getpid())
        async with self._recording:
            state = ClusterState(
                own.pid,
                own.start_time,
                self._host,
                self._port,
                [replica.state for replica in self._replicas],
                [states.engine_address(engine) for engine in self._engines.values()],
            )
            await asyncio.to_thread(states.write, self.home, msgspec.json.encode(state))

    def _kill(self) -> None:
        """End all at once: what runs is on record."""
        for replica in self._replicas:
            replica.signal(signal.SIGKILL)
        for engine in self._engines.values():
            with contextlib.suppress(HermesError):
                engine.stop()


async def _all(works: Iterable[Awaitable[None]]) -> None:
    """Wait for all of them, then raise what the first that has failed has raised."""
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if outcome is not None:
            raise outcome


def end_s_max(home: Home) -> float:
    """How long a cluster may take to end."""
    try:
        drain_s = config.load(home).api_server.drain_seconds
    except HermesError:
        drain_s = 30.0
    return drain_s + 2 * _END_S_MAX


@contextlib.contextmanager
def _sole(home: Home) -> Iterator[None]:
    """Be the only supervisor of a home."""
    make_private_folder(home.cluster)
    fd = private_opener(home.cluster / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ClusterRunning(
            "A cluster is running in this home.", where=str(home.path), hint="hermes cluster status, or down"
        ) from None
    try:
        yield
    finally:
        os.close(fd)


def _last_error(output: bytes) -> tuple[str, str]:
    """What a command that has failed has told on standard error: what is wrong, and what to try."""
    *_, before, last = ["", "", *(line for line in output.decode(errors="replace").split("\n") if line.strip())]
    message, hint = (before, last.removeprefix("Try: ")) if last.startswith("Try: ") else (last, "")
    return message.removeprefix("hermes: "), hint
