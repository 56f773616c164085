"""What is on record about a cluster, in `cluster/state.json` of its home: commands find it there, running or dead."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hermes.cluster.engines import Engine, NatsEngine, PostgresEngine
from hermes.core.errors import HermesError
from hermes.core.home import Home, write_private
from hermes.core.processes import is_alive, process_start

END_S_MAX = 10.0
# More than those of all replicas that a cluster may have: 32 of 28 each.
_CONNECTIONS_MAX = 1000
_POLL_S = 0.02


class ProcessState(msgspec.Struct):
    pid: int = 0
    start_time: float | None = None

    @property
    def is_running(self) -> bool:
        return is_alive(self.pid, self.start_time)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.is_running:
                os.kill(self.pid, number)


class ReplicaState(ProcessState):
    """`port` is 0 until it listens."""

    number: int = 0
    port: int = 0
    restarts: int = 0


class EngineAddress(ProcessState):
    name: str = ""
    port: int = 0


class ClusterState(ProcessState):
    """The process is that of `hermes cluster up`."""

    host: str = ""
    port: int = 0
    replicas: list[ReplicaState] = []
    engines: list[EngineAddress] = []


class ClusterNotFound(HermesError):
    exit_code = 5


def engines_of(home: Home) -> dict[str, Engine]:
    """The engines of a home's cluster, by the environment variable that tells their address to a replica."""
    return {
        "HERMES_DATABASE_URL": PostgresEngine(home.cluster / "postgres", {"max_connections": str(_CONNECTIONS_MAX)}),
        "HERMES_NATS_URL": NatsEngine(home.cluster / "nats"),
    }


def engine_address(engine: Engine) -> EngineAddress:
    state = engine.state
    return EngineAddress(state.pid, state.start_time, engine.name, state.port)


def process_state(pid: int) -> ProcessState:
    return ProcessState(pid, process_start(pid))


def read(home: Home) -> ClusterState | None:
    """None where there is no cluster, or nothing that can be read of it."""
    try:
        return msgspec.json.decode(_file(home).read_bytes(), type=ClusterState)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def write(home: Home, encoded: bytes) -> None:
    write_private(_file(home), msgspec.json.format(encoded))


def running(home: Home) -> ClusterState:
    state = read(home)
    if state is None or not state.is_running:
        raise ClusterNotFound("No cluster is running in this home.", hint="hermes cluster up")
    return state


def replica(home: Home, number: int) -> ReplicaState:
    """A replica of a running cluster."""
    for one in running(home).replicas:
        if one.number == number:
            return one
    raise ClusterNotFound(f"There is no replica {number}.", hint="hermes cluster status")


def stay_dead_file(home: Home, number: int) -> Path:
    """Where it exists, the replica is not started again."""
    return home.cluster / f"replica-{number}.stay-dead"


def log_file(home: Home, number: int) -> Path:
    return home.cluster / f"replica-{number}.log"


def remove_remains(home: Home, engines: Iterable[Engine]) -> None:
    """End what is left of a cluster whose own process is gone."""
    state = read(home)
    if state is not None and not state.is_running:
        end(state.replicas, END_S_MAX)
    for engine in engines:
        engine.stop()
    for file in home.cluster.glob("*.stay-dead"):
        file.unlink(missing_ok=True)
    _file(home).unlink(missing_ok=True)


def end(processes: Iterable[ProcessState], seconds: float) -> None:
    """Ask these processes to end, and make them end when the time is over."""
    for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, END_S_MAX)):
        running = [process for process in processes if process.is_running]
        for process in running:
            process.signal(number)
        until = time.monotonic() + patience
        while any(process.is_running for process in running) and time.monotonic() < until:
            time.sleep(_POLL_S)


def _file(home: Home) -> Path:
    return home.cluster / "state.json"
