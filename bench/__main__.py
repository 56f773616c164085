"""`make bench`: what a token costs on its way from the provider's bytes to the log, what a turn costs, and the store.

`python -m bench turn`, `tools` or `state` measures one part; `--quick` takes a smaller database.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bench.provider import chunk_bytes, serve
from bench.results import keep
from hermes import config
from hermes.agent.assembler import Assembler
from hermes.agent.facade import AIAgent
from hermes.app import App, new_loop
from hermes.bus.memory import MemoryBus
from hermes.home import Home
from hermes.http import HttpClient, SseDecoder, Timeouts
from hermes.providers.base import WireEvent
from hermes.providers.registry import provider_for
from hermes.runs.spec import RouteChoice, RunSpec
from hermes.runs.writer import RunWriter
from hermes.store.bundle import AsyncStore, Store

TOKENS = 20_000
TURNS, TURN_TOKENS = 60, 500
ROUNDS = 5


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds, the best of some rounds: the machine's noise only ever adds."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def bare_decode() -> float:
    """The floor: only the JSON of each chunk."""
    chunk, decode = chunk_bytes(), msgspec.json.decode

    def work() -> None:
        for _ in range(TOKENS):
            decode(chunk)

    return cpu(work) / TOKENS


async def delta_path(window_s: float) -> float:
    """Frame, decode, translate, assemble, log and hand to one reader, token by token."""
    provider = provider_for("chat_completions")
    frame = b"data: " + chunk_bytes() + b"\n\n"
    best = float("inf")
    for _ in range(ROUNDS):
        store, bus = AsyncStore(Store(None)), MemoryBus()
        await store.runs.create(RunSpec("x", session_id="s", run_id="r"))
        reader = bus.subscribe("r")
        writer = RunWriter("r", store.runs, bus, window_s=window_s)
        assembler, decoder = Assembler("r:1"), SseDecoder()
        began = time.process_time()
        for n in range(TOKENS):
            for name, data in decoder.feed(frame):
                for part in provider.parts(WireEvent(name, msgspec.json.decode(data))):
                    for delta in assembler.feed(part):
                        writer.text("msg", delta.text)  # type: ignore[union-attr]
            if n % 500 == 0:
                await asyncio.sleep(0)
                reader._events.clear()
                reader._bytes = 0
        writer.flush()
        best = min(best, time.process_time() - began)
        await writer.close()
    return best / TOKENS


async def turns(home: Path) -> tuple[float, float, float]:
    """CPU per token of whole turns, of a bare client on the same bytes, and the added time to the first token."""
    server, url = await serve(TURN_TOKENS)
    app = App(Home(home), config.load(Home(home)))
    route = RouteChoice(model="bench", base_url=url, api_mode="chat_completions")

    async def one() -> float:
        spec = RunSpec("hi", session_id="s", route=route, history=[], persist=False, toolsets=frozenset(), memory=False)
        began = time.perf_counter()
        await app.engine.start(spec)
        first = 0.0
        async for event in app.engine.subscribe(spec.run_id):
            if event.type == "text.delta" and not first:
                first = time.perf_counter() - began
        return first

    async def bare(client: HttpClient) -> float:
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
        began, first = time.perf_counter(), 0.0
        async with client.send("POST", f"{url}/chat/completions", {}, body, Timeouts()) as answer:
            decoder = SseDecoder()
            while chunk := await answer.read():
                first = first or time.perf_counter() - began
                for _, data in decoder.feed(chunk):
                    if data != b"[DONE]":
                        msgspec.json.decode(data)
        return first

    client = HttpClient(app.services.files.submit)
    await one()
    await bare(client)
    began = time.process_time()
    ours = [await one() for _ in range(TURNS)]
    hermes_cpu = time.process_time() - began
    began = time.process_time()
    theirs = [await bare(client) for _ in range(TURNS)]
    bare_cpu = time.process_time() - began
    await client.close()
    await app.close()
    server.close()
    tokens = TURNS * TURN_TOKENS
    return hermes_cpu / tokens, bare_cpu / tokens, statistics.median(ours) - statistics.median(theirs)


def construction() -> float:
    """Seconds to build an agent."""
    AIAgent()
    return cpu(lambda: [AIAgent(model="m", base_url="http://127.0.0.1:1/v1") for _ in range(200)]) / 200


async def measure(home: Path) -> dict[str, float]:
    """All figures, in seconds."""
    figures = {"decode": bare_decode(), "delta": await delta_path(0.0), "delta_joined": await delta_path(0.02)}
    figures["turn_token"], figures["bare_token"], figures["first_token_added"] = await turns(home)
    figures["agent"] = construction()
    return figures


def turn() -> None:
    """Measure, print, and leave the figures in `bench/results.json`."""
    with tempfile.TemporaryDirectory() as folder:
        loop = new_loop()
        f = loop.run_until_complete(measure(Path(folder)))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    us = 1e6
    rows = [
        ("bare JSON decode of a chunk", f"{f['decode'] * us:8.2f} µs", "1.0"),
        ("assemble and emit a delta, each on its own", f"{f['delta'] * us:8.2f} µs", f"{f['delta'] / f['decode']:.1f}"),
        (
            "the same, joined as by default",
            f"{f['delta_joined'] * us:8.2f} µs",
            f"{f['delta_joined'] / f['decode']:.1f}",
        ),
        ("bare client, per token of a turn", f"{f['bare_token'] * us:8.2f} µs", f"{f['bare_token'] / f['decode']:.1f}"),
        ("whole turn, per token", f"{f['turn_token'] * us:8.2f} µs", f"{f['turn_token'] / f['decode']:.1f}"),
        ("time to first token added to a bare client", f"{f['first_token_added'] * 1e3:8.2f} ms", ""),
        ("building an agent", f"{f['agent'] * 1e3:8.3f} ms", ""),
    ]
    print(f"{'':44}{'CPU':>11}   × decode")
    for name, figure, ratio in rows:
        print(f"{name:44}{figure:>11}   {ratio:>8}")
    keep(f)


def state(quick: bool) -> None:
    """The store on a large database."""
    from bench.state import run

    run(quick)


def main() -> None:
    """Measure what is asked for, or everything."""
    parser = argparse.ArgumentParser(prog="bench")
    parser.add_argument("part", nargs="?", choices=["turn", "tools", "state"])
    parser.add_argument("--quick", action="store_true", default=os.environ.get("HERMES_BENCH_QUICK") == "1")
    asked = parser.parse_args()
    if asked.part in (None, "turn"):
        turn()
    if asked.part in (None, "tools"):
        from bench.tools import run

        run()
    if asked.part in (None, "state"):
        state(asked.quick)


main()
