"""`python -m bench state`: a large database, read over HTTP while streams run, and written to without a server."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.corpus import FULL, QUICK, WORDS, copied, corpus, session_id, word
from bench.load import connect, get, post
from bench.results import Figure, at, median
from bench.servers import Server, hermes, provider
from bench.serving import paced
from hermes.store.stores import Async, open_store

STREAMS, PER_S, EXTRA_MS_MAX = 100, 20, 20.0
READ_MS_MAX, SEARCH_MS_MAX = 10.0, 50.0
SEARCHES, READ_P99_MS_MAX = 40, 50.0
APPEND_MS_MAX, FORK_MS_MAX = 1.0, 50.0
LONG_MESSAGES, CONTINUED_MS_MAX = 100_000, 2_000.0
ROLES = ("user", "assistant")


def timed(name: str, ms: list[float], target: float | None = None) -> Figure:
    note = f"p99 {at(0.99, ms):.1f} ms, {len(ms)} times"
    return Figure(f"{name}, p50", "ms", (None, median(ms)), "is", target, note=note)


async def reads(sessions: int, folder: Path, rounds: int, seconds: int) -> list[Figure]:
    """One read after the other without a pause while streams run; and the same streams without them."""
    chance = random.Random(7)
    search = "/api/sessions/search?q="
    paths: dict[str, Callable[[], str]] = {
        "session list": lambda: "/api/sessions",
        "open a session": lambda: f"/api/sessions/{session_id(chance.randrange(sessions))}/messages",
        "search, rare word": lambda: search + word(chance.randrange(WORDS - WORDS // 4, WORDS)),
        "search, two words": lambda: search + "+".join(word(n) for n in chance.sample(range(500, 5_000), 2)),
        "search, common word, newest": lambda: f"{search}{word(chance.randrange(10))}&sort=newest",
    }
    times = {name: list[float]() for name in paths}

    async def read(server: Server) -> None:
        client = await connect(server.url)
        while True:
            for name, path in paths.items():
                seen = await client.ask(get(path()))
                assert seen.status == 200, seen
                times[name].append(seen.total_s * 1e3)

    with provider() as model, hermes(model, folder) as ours:
        alone, beside = [], []
        for _ in range(rounds):
            alone.append(await paced(ours, STREAMS, PER_S, seconds))
            beside.append(await paced(ours, STREAMS, PER_S, seconds, lambda: read(ours)))
    largest, more = (median([max(one.gaps_ms) for one in side]) for side in (alone, beside))
    note = f"beside no reads; {sum(one.failed for one in (*alone, *beside))} streams failed"
    gap = Figure(f"{STREAMS} streams meanwhile, largest gap", "ms", (largest, more), "more", EXTRA_MS_MAX, note=note)
    targets = {name: SEARCH_MS_MAX if name.startswith("search") else READ_MS_MAX for name in times}
    return [*(timed(name, ms, targets[name]) for name, ms in times.items()), gap]


async def continued(rounds: int) -> list[Figure]:
    """The next turn of a very long session: of one that is compacted in it, and of the same one afterwards."""
    first, second = list[float](), list[float]()
    with provider() as model, tempfile.TemporaryDirectory() as folder, hermes(model, Path(folder)) as ours:
        client = await connect(ours.url)
        for number in range(rounds):
            answer = await client.ask(post("/api/sessions", {"id": f"long-{number}"}))
            assert answer.status == 201, answer
            rows = ((f"long-{number}", ROLES[n % 2], f"word {n} " * 8, time.time()) for n in range(LONG_MESSAGES))
            with closing(sqlite3.connect(Path(folder) / "state.db", timeout=30)) as db, db:
                db.executemany("INSERT INTO messages(session_id, role, content, timestamp) VALUES (?, ?, ?, ?)", rows)
            for times in (first, second):
                seen = await client.ask(post(f"/api/sessions/long-{number}/chat", {"message": "burst-1"}))
                assert seen.status == 200, seen
                times.append(seen.total_s * 1e3)
    what = f"a turn of a session of {LONG_MESSAGES:,} messages"
    return [timed(f"{what}, compacted", first, CONTINUED_MS_MAX), timed(f"{what}, then the next", second)]


async def reads_beside_searches(sessions: int, folder: Path, seconds: float) -> list[Figure]:
    """One read after the other while many clients search without a pause."""
    chance = random.Random(7)
    some: Callable[[], str] = lambda: f"/api/sessions/{session_id(chance.randrange(sessions))}"  # noqa: E731
    paths: dict[str, Callable[[], str]] = {
        "session list": lambda: "/api/sessions",
        "session list by start": lambda: "/api/sessions?order=started_at",
        "session": some,
        "messages of a session": lambda: f"{some()}/messages?limit=50",
        "run list": lambda: "/v1/runs",
    }
    times = {name: list[float]() for name in paths}
    statuses: Counter[int] = Counter()
    searches: list[float] = []

    async def search(server: Server, number: int) -> None:
        rng, client = random.Random(number), await connect(server.url)
        while True:
            query = "+".join(word(rng.choice((n, n * 100, n * 10_000))) for n in rng.sample(range(1, 20), 2))
            seen = await client.ask(get(f"/api/sessions/search?q={query}&sort={rng.choice(('relevance', 'newest'))}"))
            statuses[seen.status] += 1
            searches.append(seen.total_s * 1e3)

    async def read(server: Server) -> None:
        client, until = await connect(server.url), time.perf_counter() + seconds
        while time.perf_counter() < until:
            for name, path in paths.items():
                seen = await client.ask(get(path()))
                assert seen.status == 200, seen
                times[name].append(seen.total_s * 1e3)
                await asyncio.sleep(0.01)

    with provider() as model, hermes(model, folder) as ours:
        work = [asyncio.ensure_future(search(ours, number)) for number in range(SEARCHES)]
        await asyncio.sleep(1)  # until all of them wait
        await read(ours)
        for one in work:
            one.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    figures = []
    for name, ms in times.items():
        about = f"{name} beside {SEARCHES} searches"
        figures.append(timed(about, ms, READ_MS_MAX))
        figures.append(Figure(f"{about}, p99", "ms", (None, at(0.99, ms)), "is", READ_P99_MS_MAX))
    answered = ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
    figures.append(Figure("those searches, p50", "ms", (None, median(searches)), note=answered))
    return figures


async def writes(store: Any, size: int, count: int) -> list[Figure]:
    """What is added, one after the other."""
    chance, sessions = random.Random(7), store.sessions
    calls: tuple[tuple[str, float, Callable[[int], Awaitable[object]]], ...] = (
        ("append a message", APPEND_MS_MAX, lambda n: sessions.append_message(session_id(n), "user", "a question")),
        ("fork a session", FORK_MS_MAX, lambda n: sessions.fork_session(session_id(chance.randrange(size)))),
    )
    figures = []
    for name, target, call in calls:
        times = []
        for n in range(count):
            started_at = time.perf_counter()
            await call(n)
            times.append((time.perf_counter() - started_at) * 1e3)
        figures.append(timed(name, times, target))
    return figures


async def measure(quick: bool) -> list[Figure]:
    """Make the database if it is not there, and measure on a copy of it."""
    messages, sessions = QUICK if quick else FULL
    with copied(corpus(messages, sessions)) as copy:
        figures = await continued(1 if quick else 3)
        figures += await reads(sessions, copy.parent, *((1, 3) if quick else (3, 10)))
        figures += await reads_beside_searches(sessions, copy.parent, 3 if quick else 30)
        with closing(open_store(f"sqlite://{copy}")) as store:
            return figures + await writes(Async(store), sessions, 20 if quick else 200)
