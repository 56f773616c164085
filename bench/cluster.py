"""`python -m bench cluster`: one, two and three replicas on PostgreSQL and NATS, and viewers of another replica's runs.

Replicas, engines, model and clients share all cores of the machine. Clients speak to the replicas themselves, spread evenly:
a proxy would be one more process on the same cores.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from bench.engines import Engines, engines
from bench.load import Client, Seen, chat, get
from bench.postgres import throughput
from bench.results import Figure, at, median
from bench.servers import Server, provider
from bench.serving import BEGIN_EVERY_S, STREAMS, VIEWERS, clients, leave
from bench.workers import Connection
from hermes.core.spec import RunSpec
from hermes.store.stores import open_store

REPLICAS, RUNS, PER_S = 3, 100, 20
# Viewers that have just come read what the store and the stream hold of their run: that is no cost of the tokens that follow.
CATCH_UP_S_MAX, LAG_TOKENS, UNFINISHED = 20, 2, 10_000
START_S_MAX = 30.0
_COMPLETION = re.compile(rb'"id":\s*"chatcmpl-([^"]+)"')


@dataclass(frozen=True, slots=True)
class Viewing:
    """Runs at one pace, each with a number of viewers: the tokens of the window, and what the processes used for them."""

    tokens: int
    owner_s: float
    foreign_s: float
    nats_s: float
    postgres_s: float


@dataclass(frozen=True, slots=True)
class Streams:
    clients: list[Client]
    ends: list[asyncio.Future[Seen]]
    run_ids: list[str]

    async def end(self) -> None:
        await asyncio.gather(*self.ends)
        leave(self.clients)


async def start_streams(server: Server, count: int, tokens: int) -> Streams:
    """Chat streams: a chat is carried out where it is asked for, a submitted run anywhere."""
    asking = await clients(server, count, keep=True)
    ends = []
    for client in asking:
        ends.append(client.ask(chat(f"paced-{PER_S}-{tokens}")))
        await asyncio.sleep(BEGIN_EVERY_S)
    until = time.perf_counter() + START_S_MAX
    while not all(client.seen.tokens for client in asking):
        assert time.perf_counter() < until, "Some streams did not begin."
        await asyncio.sleep(0.02)
    return Streams(asking, ends, [f"run_{_COMPLETION.findall(client.body)[0].decode()}" for client in asking])


async def viewing(
    engines: Engines, owner: Server, foreign: Server, viewers_at: Sequence[Server], seconds: int
) -> Viewing:
    """What paced runs of `owner` cost, with a viewer of each run's events at each of these servers."""
    streams = await start_streams(owner, RUNS, PER_S * (seconds + CATCH_UP_S_MAX + 2))
    watching = [(await clients(server, 1))[0] for server in viewers_at for _ in streams.run_ids]
    run_ids = streams.run_ids * len(viewers_at)
    ends = [client.ask(get(f"/v1/runs/{run_id}/events")) for client, run_id in zip(watching, run_ids, strict=True)]
    await asyncio.sleep(1)
    until = time.perf_counter() + CATCH_UP_S_MAX
    while _tokens(watching) < (_tokens(streams.clients) - RUNS * LAG_TOKENS) * len(viewers_at):
        assert time.perf_counter() < until, "Some viewers have not caught up."
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)

    def used_s() -> tuple[float, ...]:
        return owner.cpu_s(), foreign.cpu_s(), engines.nats_cpu_s(), engines.postgres_cpu_s()

    before = used_s()
    seen, streamed = _tokens(watching), _tokens(streams.clients)
    await asyncio.sleep(seconds)
    used = [n - m for n, m in zip(used_s(), before, strict=True)]
    seen, streamed = _tokens(watching) - seen, _tokens(streams.clients) - streamed
    leave([*watching, *streams.clients])
    await asyncio.gather(*ends, *streams.ends, return_exceptions=True)
    assert seen >= 0.9 * streamed * len(viewers_at), f"Viewers got {seen} of {streamed} tokens."
    return Viewing(streamed, *used)


def _tokens(watching: Iterable[Client]) -> int:
    return sum(client.seen.tokens for client in watching)


async def idle_cpu(server: Server, seconds: float) -> float:
    """Share of a core that a replica uses while nothing is asked of it."""
    before, started_at = server.cpu_s(), time.perf_counter()
    await asyncio.sleep(seconds)
    return (server.cpu_s() - before) / (time.perf_counter() - started_at)


async def connection(server: Server) -> Connection:
    host, port = server.url.removeprefix("http://").split(":")
    return Connection(*await asyncio.open_connection(host, int(port)))


async def delays_ms(owner: Server, foreign: Server, seconds: int) -> list[float]:
    """How much later each event of a run comes at another replica."""
    streams = await start_streams(owner, 1, PER_S * seconds)
    [run_id] = streams.run_ids
    near, far = [await connection(server) for server in (owner, foreign)]
    here: dict[int, float] = {}
    there: dict[int, float] = {}
    await asyncio.gather(near.follow(run_id, here), far.follow(run_id, there))
    await streams.end()
    for one in (near, far):
        one.close()
    assert here.keys() == there.keys()
    # The first ones are read from the store, at whatever moment each viewer was there.
    return [(there[seq] - here[seq]) * 1e3 for seq in sorted(here)[PER_S:]]


async def viewers(engines: Engines, owner: Server, foreign: Server, quick: bool) -> list[Figure]:
    rounds, seconds = (1, 4) if quick else (3, 8)
    idle_s = await idle_cpu(foreign, seconds)
    lag = await delays_ms(owner, foreign, 4 if quick else 10)
    nobody, near, lone_near, far, lone = [], [], [], [], []
    for _ in range(rounds):
        for viewed, viewers_at in (
            (nobody, []),
            (near, [owner] * VIEWERS),
            (lone_near, [owner]),
            (far, [foreign] * VIEWERS),
            (lone, [foreign]),
        ):
            viewed.append(await viewing(engines, owner, foreign, viewers_at, seconds))

    def cost_us(used: Sequence[float], of: Sequence[Viewing]) -> list[float]:
        return [cpu / one.tokens * 1e6 for cpu, one in zip(used, of, strict=True)]

    unwatched = cost_us([one.owner_s for one in nobody], nobody)
    local_us, lone_local_us = (
        median(
            [(n - m) / count for n, m in zip(cost_us([one.owner_s for one in viewed], viewed), unwatched, strict=True)]
        )
        for viewed, count in ((near, VIEWERS), (lone_near, 1))
    )
    foreign_us, lone_us = (
        median(cost_us([(one.foreign_s - idle_s * seconds) / count for one in viewed], viewed))
        for viewed, count in ((far, VIEWERS), (lone, 1))
    )
    nats_us = median(cost_us([one.nats_s for one in lone], lone))
    postgres_ms = median([one.postgres_s * 1e3 / RUNS / seconds for one in nobody])
    pace = f"{RUNS} streams of {PER_S}/s"
    return [
        Figure(f"{pace}, CPU per token", "µs", (None, median(unwatched)), note="of the replica that has the run"),
        Figure(
            "the same, a foreign viewer's", "µs", (local_us, foreign_us), "ratio", 2.0,
            note=f"{VIEWERS} viewers of each run at another replica, beside as many at its own",
        ),
        Figure(
            "the same, a lone foreign viewer's", "µs", (lone_local_us, lone_us), "ratio", 2.0,
            note="beside a lone viewer at the replica that has the run",
        ),
        Figure("the same, NATS", "µs", (None, nats_us), note="per token, with the foreign viewer"),
        Figure("the same, PostgreSQL", "ms", (None, postgres_ms), note="for a second of a stream"),
        Figure("an idle replica", "% of a core", (None, idle_s * 100)),
        Figure("a foreign viewer's token, p50 later", "ms", (None, median(lag)), "is", 25.0),
        Figure("the same, p99", "ms", (None, at(0.99, lag))),
    ]  # fmt: skip


async def scaling(replicas: Sequence[Server], quick: bool) -> list[Figure]:
    """With the clients spread over one, two and three of the replicas, in turns."""
    rounds, seconds = (2, 1.5) if quick else (5, 2.0)
    counts, figures = range(1, len(replicas) + 1), list[Figure]()
    for name, unit, stream in (
        (f"{STREAMS} clients, not streamed", "turns/s", False),
        (f"{STREAMS} streams at once", "tokens/s", True),
    ):
        await throughput(replicas, 1.0, stream=stream)
        rows = [[(await throughput(replicas[:n], seconds, stream=stream)).per_s for n in counts] for _ in range(rounds)]
        speeds = [median([row[n] for row in rows]) for n in range(len(replicas))]
        figures.append(Figure(f"{name}, 1 replica", unit, (None, speeds[0])))
        figures += (
            Figure(f"{name}, {n} replicas", unit, (speeds[0], speeds[n - 1]), "ratio", note="beside one replica")
            for n in counts[1:]
        )
    return figures


def scans(engines: Engines) -> list[Figure]:
    """What grows with the runs that have no end: the reads of a submitted run, and of every replica now and then."""
    store = open_store(engines.postgres.url)
    runs, query = store.runs, engines.postgres.query
    try:
        store.runs.create(RunSpec("fill", "fill"))
        copy = (
            "jsonb_build_object('run_id', 'fill-' || n, 'session_id', 'fill-' || n, 'owner', 'owner-' || n % 100,"
            " 'rowid', 1e9 + n, 'started_at', 1, 'status', 'running', 'holder', 'elsewhere:1:1')"
        )
        query(
            f"INSERT INTO hermes.runs SELECT (jsonb_populate_record(r, {copy})).* FROM hermes.runs r,"
            f" generate_series(1, {UNFINISHED}) n WHERE session_id = 'fill';"
            " INSERT INTO hermes.leases SELECT 'session:fill-' || n, 'elsewhere:1:1', 1e9 + n, 1e12"
            f" FROM generate_series(1, {UNFINISHED}) n; ANALYZE hermes.runs, hermes.leases"
        )
        works: tuple[tuple[str, Callable[[], object]], ...] = (
            ("a replica's look for left runs", runs.left_behind),
            ("the counts of a submitted run", runs.unfinished_counts),
            ("a take from an empty queue", runs.take_queued),
        )
        return [
            Figure(f"{name}, {UNFINISHED:,} without an end", "ms", (None, median([timed_ms(work) for _ in range(11)])))
            for name, work in works
        ]
    finally:
        store.close()


def timed_ms(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return (time.perf_counter() - started_at) * 1e3


async def measure(quick: bool) -> list[Figure]:
    with provider() as model, engines() as running, ExitStack() as held:
        replicas = [held.enter_context(running.replica(model)) for _ in range(REPLICAS)]
        figures = [*await scaling(replicas, quick), *await viewers(running, replicas[0], replicas[1], quick)]
        held.close()  # or the replicas would take up the runs that are made up now
        return [*figures, *await asyncio.to_thread(scans, running)]
