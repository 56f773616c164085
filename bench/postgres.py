"""`python -m bench postgres`: one replica on PostgreSQL and NATS beside the default on SQLite, in half a minute.

As with several workers, no server is held to a core: replica, PostgreSQL, NATS, model and clients share all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.engines import Engines, engines
from bench.load import Client, chat
from bench.results import Figure, at, median
from bench.servers import Server, hermes, provider
from bench.serving import STREAMS, clients, firsts, leave

PLAIN_TOKENS, STREAM_TOKENS = 20, 500


@dataclass(frozen=True, slots=True)
class Throughput:
    """What came in a second, and the CPU seconds of the servers for each."""

    per_s: float
    cpu_s: float
    count: int


async def throughput(servers: Sequence[Server], seconds: float, *, stream: bool) -> Throughput:
    """Tokens of streams, or whole turns, of clients that are spread over the servers and ask again and again."""
    askers = [(await clients(servers[n % len(servers)], 1))[0] for n in range(STREAMS)]
    tokens = STREAM_TOKENS if stream else PLAIN_TOKENS
    until = time.perf_counter() + seconds

    async def work(client: Client) -> int:
        count = 0
        while time.perf_counter() < until:
            seen = await client.ask(chat(f"burst-{tokens}", stream=stream))
            assert seen.tokens == tokens, seen
            count += tokens if stream else 1
        return count

    cpu, started_at = sum(server.cpu_s() for server in servers), time.perf_counter()
    count = sum(await asyncio.gather(*map(work, askers)))
    passed, used = time.perf_counter() - started_at, sum(server.cpu_s() for server in servers) - cpu
    leave(askers)
    return Throughput(count / passed, used / count, count)


@dataclass(slots=True)
class EngineCosts:
    """What plain turns cost at PostgreSQL."""

    turns: int = 0
    cpu_s: float = 0.0
    commits: int = 0
    wal_bytes: int = 0

    async def of_turns(self, engines: Engines, server: Server, seconds: float) -> Throughput:
        before = engines.postgres_cpu_s(), engines.commits(), engines.wal_bytes()
        turns = await throughput([server], seconds, stream=False)
        after = engines.postgres_cpu_s(), engines.commits(), engines.wal_bytes()
        cpu_s, commits, wal_bytes = (n - m for n, m in zip(after, before, strict=True))
        self.turns += turns.count
        self.cpu_s += cpu_s
        self.commits += int(commits)
        self.wal_bytes += int(wal_bytes)
        return turns


async def beside_sqlite(engines: Engines, sqlite: Server, replica: Server, quick: bool) -> list[Figure]:
    """Both in turns; the median of the rounds counts."""
    rounds, first_rounds = (3, 4) if quick else (6, 10)
    for server in (sqlite, replica):
        await throughput([server], 0.7, stream=False)
        await firsts(server, 20)
    costs = EngineCosts()
    turns = [
        (await throughput([sqlite], 1.5, stream=False), await costs.of_turns(engines, replica, 1.5))
        for _ in range(rounds)
    ]
    first = [(await firsts(sqlite, 40), await firsts(replica, 40)) for _ in range(first_rounds)]
    speeds = median([one.per_s for one, _ in turns]), median([one.per_s for _, one in turns])
    cpu_ms = median([one.cpu_s * 1e3 for one, _ in turns]), median([one.cpu_s * 1e3 for _, one in turns])
    times = [ms for one, _ in first for ms in one], [ms for _, one in first for ms in one]
    p50 = median(times[0]), median(times[1])
    p99 = at(0.99, times[0]), at(0.99, times[1])
    beside = "beside SQLite"
    per_turn = f"{costs.turns:,} turns"
    return [
        Figure(f"{STREAMS} clients, not streamed, PostgreSQL", "turns/s", speeds, "ratio", 0.5, True, beside),
        Figure("the same, CPU of the server per turn", "ms", cpu_ms, "ratio", note=beside),
        Figure("the same, CPU of PostgreSQL per turn", "ms", (None, costs.cpu_s / costs.turns * 1e3), note=per_turn),
        Figure("the same, commits per turn", "", (None, costs.commits / costs.turns), note=per_turn),
        Figure("the same, WAL per turn", "KB", (None, costs.wal_bytes / costs.turns / 1e3), note=per_turn),
        Figure("first token, p50, PostgreSQL and NATS", "ms", p50, "more", 4.0, note=beside),
        Figure("the same, p99", "ms", p99, "more", note=beside),
    ]


async def measure(quick: bool) -> list[Figure]:
    with (
        provider() as model,
        hermes(model, workers=1) as sqlite,
        engines() as running,
        running.replica(model) as replica,
    ):
        return await beside_sqlite(running, sqlite, replica, quick)
