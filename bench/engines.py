"""PostgreSQL and NATS for the bench, from the wheels of the extra `cluster`, and the replicas on them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.servers import CORES, Server, cpu_s, hermes
from hermes.cluster.engines import Engine, NatsEngine, PostgresEngine

# One connection more than the pools of three replicas, whatever the server's own default is.
_SETTINGS = {"max_connections": "200"}


@dataclass(frozen=True, slots=True)
class Engines:
    """`home` is shared by the replicas, as `hermes cluster` does."""

    postgres: PostgresEngine
    nats: NatsEngine
    home: Path

    def environment(self) -> dict[str, str]:
        return {"HERMES_DATABASE_URL": self.postgres.url, "HERMES_NATS_URL": self.nats.url}

    def replica(self, model: Server) -> contextlib.AbstractContextManager[Server]:
        return hermes(model, self.home, workers=1, env=self.environment())

    def nats_cpu_s(self) -> float:
        return cpu_s(self.nats.state.pid)

    def postgres_cpu_s(self) -> float:
        """Of all its processes, those that have ended included."""
        server = self.postgres.state.pid
        own = _stat(server)
        ended = (int(own[13]) + int(own[14])) / os.sysconf("SC_CLK_TCK")
        return cpu_s(server) + ended + sum(map(cpu_s, _children(server)))

    def commits(self) -> int:
        """Transactions of the database so far; a backend reports its own within a second or when it is idle."""
        return int(
            self.postgres.query(
                "SELECT pg_stat_clear_snapshot(); SELECT sum(xact_commit) FROM pg_stat_database"
            ).split()[-1]
        )

    def wal_bytes(self) -> int:
        return int(self.postgres.query("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"))


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _children(parent: int) -> list[int]:
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(_stat(int(folder.name))[1]) == parent:
                pids.append(int(folder.name))
    return pids


@contextlib.contextmanager
def _running(engine: Engine) -> Iterator[None]:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)  # which the engine inherits
    try:
        engine.start()
    finally:
        os.sched_setaffinity(0, mine)
    try:
        yield
    finally:
        engine.stop()


@contextlib.contextmanager
def engines() -> Iterator[Engines]:
    """Servers of their own, on every core."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
        root = Path(folder)
        postgres, nats = PostgresEngine(root / "postgres", _SETTINGS), NatsEngine(root / "nats")
        for engine in (postgres, nats):
            held.enter_context(_running(engine))
        (root / "home").mkdir()
        yield Engines(postgres, nats, root / "home")
