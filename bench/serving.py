"""`python -m bench serving`: Hermes against the bare relay, over HTTP, each server on a core of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load import Client, Seen, chat, connect, conversation, get, post
from bench.provider import TOKEN
from bench.results import Figure, at, median
from bench.servers import SERVER_CORE, Server, environment, hermes, pinned, provider, relay

STREAMS, TOKENS, VIEWERS, STEPS, STORM = 32, 500, 3, 20, 500
# A stream is begun every so often, so that it is the streams that are measured and not their beginning.
BEGIN_EVERY_S = 0.002


@dataclass(slots=True)
class Paced:
    """Streams that were held for some seconds."""

    cpu_us: float
    load: float
    gaps_ms: list[float]
    failed: int
    resident_mb: float


async def clients(server: Server, count: int, keep: bool = False) -> list[Client]:
    return [await connect(server.url, keep) for _ in range(count)]


def leave(connected: Iterable[Client]) -> None:
    for client in connected:
        client.close()


async def firsts(server: Server, count: int) -> list[float]:
    """Milliseconds to the first token, one question after the other."""
    [client] = await clients(server, 1)
    times = []
    for _ in range(count):
        seen = await client.ask(chat("burst-1"))
        assert (seen.status, seen.tokens) == (200, 1), seen
        times.append(seen.first_s * 1e3)
    client.close()
    return times


async def storm(server: Server) -> float:
    """Milliseconds to the first token, the median of many streams that are started in the same moment."""
    streams = await clients(server, STORM)
    seen = await asyncio.gather(*(client.ask(chat("paced-20-20")) for client in streams))
    assert all(one.tokens == 20 for one in seen), "Some streams did not bring all of their tokens."
    leave(streams)
    return median([one.first_s * 1e3 for one in seen])


async def together(server: Server, work: Callable[[int], Awaitable[int]]) -> tuple[float, float]:
    """What so many clients at once get done in a second, and the microseconds of CPU that each of it takes."""
    cpu, started_at = server.cpu_s(), time.perf_counter()
    done = sum(await asyncio.gather(*map(work, range(STREAMS))))
    return done / (time.perf_counter() - started_at), (server.cpu_s() - cpu) / done * 1e6


async def token_rate(server: Server, asks: int, tokens: int, stream: bool) -> tuple[float, float]:
    """Tokens of streams, or whole answers: how many in a second, and the CPU of each."""
    connected = await clients(server, STREAMS)

    async def work(n: int) -> int:
        for _ in range(asks):
            seen = await connected[n].ask(chat(f"burst-{tokens}", stream=stream))
            assert seen.tokens == tokens, seen
        return asks * tokens if stream else asks

    await asyncio.gather(*(client.ask(chat("burst-10", stream=stream)) for client in connected))
    figures = await together(server, work)
    leave(connected)
    return figures


async def paced(
    server: Server, streams: int, per_s: int, seconds: int, meanwhile: Callable[[], Awaitable[Any]] | None = None
) -> Paced:
    """Streams that go on for so long: what they cost while all are under way, and what came of each."""
    connected, tokens = await clients(server, streams), per_s * seconds
    answers: list[asyncio.Future[Seen]] = []
    for client in connected:
        answers.append(client.ask(chat(f"paced-{per_s}-{tokens}")))
        await asyncio.sleep(BEGIN_EVERY_S)
    await asyncio.sleep(0.5)
    cpu, started_at, before = server.cpu_s(), time.perf_counter(), sum(client.seen.tokens for client in connected)
    window = max(1.0, seconds - streams * BEGIN_EVERY_S - 1.5)
    work = asyncio.ensure_future((meanwhile or asyncio.Event().wait)())
    if (await asyncio.wait([work], timeout=window))[0]:
        work.result()  # it was to go on, so this tells why it did not
    work.cancel()
    used, passed, came = (
        server.cpu_s() - cpu,
        time.perf_counter() - started_at,
        sum(client.seen.tokens for client in connected),
    )
    resident = server.resident_mb()
    ended = await asyncio.gather(*answers, return_exceptions=True)
    failed = sum(isinstance(seen, BaseException) or seen.tokens != tokens for seen in ended)
    gaps = [gap * 1e3 for seen in ended if isinstance(seen, Seen) for gap in seen.gaps]
    leave(connected)
    return Paced(used / (came - before) * 1e6, used / passed, gaps, failed, resident)


async def step_ms(server: Server, turns: int) -> float:
    """Milliseconds that a step with one call adds to a turn."""
    [client] = await clients(server, 1, keep=True)
    times: dict[int, list[float]] = {STEPS: [], 0: []}
    for _ in range(turns + 1):
        for steps, latencies in times.items():
            seen = await client.ask(chat(f"tools-{steps}"))
            assert seen.tokens == 1 and client.body.count(b'"error": false') == steps, bytes(client.body)
            latencies.append(seen.total_s * 1e3)
    client.close()
    return (median(times[STEPS][1:]) - median(times[0][1:])) / STEPS


def deltas(body: bytes) -> int:
    """How many tokens came as deltas: what closes a stream repeats its text."""
    payloads = (json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {"))
    return sum(str(event.get("delta", "")).count(TOKEN) for event in payloads)


async def other(server: Server, asks: int, viewers: int, path: str, body: Callable[[], Mapping[str, Any]]) -> float:
    """Tokens per second, counted for each viewer, of streams that are asked for in some other way."""
    askers = await clients(server, STREAMS, keep=True)
    watching = [
        askers[n : n + 1] if viewers == 1 else await clients(server, viewers, keep=True) for n in range(STREAMS)
    ]
    marks = set()

    async def work(n: int) -> int:
        for _ in range(asks):
            request = post(path.format(n), body())
            if viewers > 1:
                seen = await askers[n].ask(request)
                assert seen.status == 202, seen
                run = json.loads(askers[n].body.partition(b"\r\n\r\n")[2])
                request = get(f"{path}/{run['run_id']}/events")
            marks.update([seen.tokens for seen in await asyncio.gather(*(one.ask(request) for one in watching[n]))])
        return asks * viewers * TOKENS

    await work(0)
    assert deltas(bytes(watching[0][0].body)) == TOKENS, bytes(watching[0][0].body)
    figure, _ = await together(server, work)
    assert len(marks) == 1, f"Of some streams not all tokens came: {marks}."
    leave({*askers, *(one for viewers in watching for one in viewers)})
    return figure


async def make_sessions(server: Server) -> None:
    """One for each client."""
    [client] = await clients(server, 1)
    for number in range(STREAMS):
        answer = await client.ask(post("/api/sessions", {"id": f"client-{number}"}))
        assert answer.status == 201, answer
    client.close()


def starts(times: int) -> list[Figure]:
    """Until there is an answer to `hermes --version`, and until a server listens, beside a Python that does nothing."""
    python = [*pinned(SERVER_CORE), sys.executable]
    took: tuple[list[float], ...] = ([], [], [])
    with tempfile.TemporaryDirectory() as folder:
        env = environment(Path(folder))
        for _ in range(times + 1):
            for ms, command in zip(took, (["-c", "pass"], ["-m", "hermes", "--version"]), strict=False):
                started_at = time.perf_counter()
                subprocess.run([*python, *command], stdout=subprocess.DEVNULL, check=True, env=env)
                ms.append((time.perf_counter() - started_at) * 1e3)
            started_at = time.perf_counter()
            with hermes(Server("http://127.0.0.1:9/v1", 0), Path(folder)):
                took[2].append((time.perf_counter() - started_at) * 1e3)
    # The first time of each fills the caches, and makes the database.
    bare, version, listens = (median(ms[1:]) for ms in took)
    return [
        Figure("hermes --version", "ms", (bare, version), "ratio", 8.0, note="beside a bare python"),
        Figure("start to listening", "ms", (bare, listens), "ratio", 8.0, note="beside a bare python"),
    ]


async def measure(quick: bool) -> list[Figure]:
    """All figures; what noise could tell apart is measured in turns, and its median counts."""
    rounds, seconds, asks = (1, 3, 3) if quick else (3, 10, 10)
    with provider() as model, relay(model) as bare, hermes(model) as ours:

        async def turns(work: Callable[[Server], Awaitable[Any]], times: int = rounds) -> list[tuple[Any, Any]]:
            return [(await work(bare), await work(ours)) for _ in range(times)]

        await turns(lambda server: firsts(server, 1), 1)
        idle_mb = bare.resident_mb(), ours.resident_mb()
        held = await turns(lambda server: paced(server, 500, 20, seconds))
        many = await turns(lambda server: paced(server, 2_000, 5, seconds + 3), 1)
        storms = await turns(storm, 3 if quick else 7)
        await turns(lambda server: firsts(server, 20), 1)
        first = await turns(lambda server: firsts(server, 40), 3 if quick else 10)
        bursts = await turns(lambda server: token_rate(server, asks, TOKENS, True))
        plains = await turns(lambda server: token_rate(server, asks, 20, False))
        step = await step_ms(ours, 3 if quick else 10)
        await make_sessions(ours)
        prompt = f"burst-{TOKENS}"
        messages = {"max_tokens": 2 * TOKENS, "stream": True}
        forms: tuple[tuple[str, int, str, Callable[[], dict[str, Any]]], ...] = (
            ("Messages stream", 1, "/v1/messages", lambda: {**conversation(prompt), **messages}),
            ("Responses stream", 1, "/v1/responses", lambda: {"model": "bench", "input": prompt, "stream": True}),
            ("session stream", 1, "/api/sessions/client-{}/chat/stream", lambda: {"message": prompt}),
            (f"run events, {VIEWERS} viewers each", VIEWERS, "/v1/runs", lambda: {"input": prompt}),
        )
        others = [
            (name, [await other(ours, max(2, asks // 2), viewers, path, body) for _ in range(rounds)])
            for name, viewers, path, body in forms
        ]

    def mid(pairs: list[tuple[Any, Any]], of: Callable[[Any], float]) -> tuple[float, float]:
        return median([of(one) for one, _ in pairs]), median([of(one) for _, one in pairs])

    def lost(pairs: list[tuple[Paced, Paced]]) -> tuple[float, float]:
        return sum(one.failed for one, _ in pairs), sum(one.failed for _, one in pairs)

    pooled = [([ms for times, _ in first for ms in times], [ms for _, times in first for ms in times])]
    loads = "{:.2f} / {:.2f} of a core".format(*mid(held, lambda one: one.load))
    full = max(one.resident_mb for one, _ in held), max(one.resident_mb for _, one in held)
    speed = mid(bursts, lambda one: one[0])
    return [
        Figure("first token, p50", "ms", mid(pooled, median), "more", 3.0),
        Figure("first token, p99", "ms", mid(pooled, lambda ms: at(0.99, ms)), "more", 10.0),
        Figure(f"{STORM} streams started together, first token p50", "ms", mid(storms, float), "ratio", 2.0),
        Figure(f"{STREAMS} streams at once", "tokens/s", speed, "ratio", 0.6, True),
        Figure("the same, CPU per token", "µs", mid(bursts, lambda one: one[1]), "ratio"),
        Figure("500 streams of 20/s, CPU per token", "µs", mid(held, lambda one: one.cpu_us), "ratio", 1.8, note=loads),
        Figure("the same, p99 gap", "ms", mid(held, lambda one: at(0.99, one.gaps_ms)), "more", 150.0),
        Figure("the same, failed", "streams", lost(held), "is", 0.0),
        Figure("2,000 streams of 5/s, failed", "streams", lost(many), "is", 0.0),
        Figure("the same, p99 gap", "ms", mid(many, lambda one: at(0.99, one.gaps_ms)), "more"),
        Figure("a step with one read_file call", "ms", (None, step), "is", 3.0),
        Figure(f"{STREAMS} clients, not streamed", "turns/s", mid(plains, lambda one: one[0]), "ratio", 0.35, True),
        # 0.7 ms where the relay takes 0.16.
        Figure("the same, CPU per turn", "ms", mid(plains, lambda one: one[1] / 1e3), "ratio", 4.4),
        Figure("resident memory, idle", "MB", idle_mb, "is", 60.0),
        Figure("resident memory, 500 streams", "MB", full, "is", 90.0),
        *starts(2 if quick else 11),
        *(
            Figure(name, "tokens/s", (speed[1], median(ratios)), "ratio", 0.8, True, "beside the chat stream")
            for name, ratios in others
        ),
    ]
