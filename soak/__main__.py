"""`make soak`: fifty turns at once, with lost connections, stops and a failing provider, for ten minutes or as asked.
Exits 1 when memory has grown, or something is left over once everything has ended."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import signal
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

import aiohttp

from soak.left import COMPLAINTS, Figures, gauges, held, resident_mb, rows
from soak.users import Users, answer
from support.gateway import Gateway, serving
from support.model_server import ModelServer

USERS, GROWTH_MAX, SAMPLES, TOLD_EVERY_S, TOLD_CHARS = 50, 1.15, 10, 10, 4000
WARM_UP_S, FIRST_S, END_S_MAX = 10.0, 60.0, 120
# Threads and connections that nobody uses are gone by then.
IDLE_S = 65.0
# The event loop's executor has a thread at least, gains more up to its size, and keeps them. Of a file that somebody has a
# lock on SQLite keeps one descriptor more, for whoever opens it next.
SPARE = {"threads": min(32, (os.cpu_count() or 1) + 4) - 1, "files": 2}
# name, before, after, at most
Line = tuple[str, float, float, float]


async def watch(pid: int, samples: list[float], users: Users, faults: Counter[str], model: ModelServer) -> None:
    """Look at the memory once a second, and tell now and then."""
    while True:
        model.requests.clear()
        samples.append(resident_mb(pid))
        if len(samples) % TOLD_EVERY_S == 0:
            did = f"{users.counts['turns']} turns, {faults.total()} faults, {len(users.defects)} defects"
            fds = len(os.listdir(f"/proc/{pid}/fd"))
            print(f"{len(samples):4} s: {samples[-1]:.1f} MB, {fds} descriptors, {did}", flush=True)
        await asyncio.sleep(1)


async def at_rest(gateway: Gateway) -> tuple[Figures, Figures]:
    """What is held, and what is unfinished, when all has ended and what nobody uses any more has been let go."""
    for _ in range(END_S_MAX):
        if not any(rows(gateway.folder).values()):
            break
        await asyncio.sleep(1)
    async with aiohttp.request("GET", f"{gateway.url}/metrics") as response:
        at_work = gauges(await response.text())
    await asyncio.sleep(IDLE_S)
    return held(gateway.process.pid), at_work | rows(gateway.folder)


async def soak(seconds: float, seed: str) -> bool:
    """The whole of it; whether every bound held."""
    chance, samples, faults = random.Random(seed), list[float](), Counter[str]()
    model = ModelServer(handler=lambda request: answer(chance, request, faults))
    with tempfile.TemporaryDirectory() as folder:
        async with model, serving(Path(folder) / "home", **settings(model)) as gateway:
            (gateway.folder / "workspace").mkdir()
            (gateway.folder / "workspace" / "notes.txt").write_text("milk\n")
            pid, users = gateway.process.pid, Users(gateway.url, chance)
            await users.come(USERS, WARM_UP_S)
            before, _ = await at_rest(gateway)
            watching = asyncio.create_task(watch(pid, samples, users, faults, model))
            await users.come(USERS, seconds)
            watching.cancel()
            after, unfinished = await at_rest(gateway)
            resting_mb = resident_mb(pid)
            code = await gateway.end(signal.SIGTERM)
            output, complaints = gateway.stderr_text, COMPLAINTS.findall(gateway.stderr_text)
    first = statistics.median(samples[: int(min(FIRST_S, seconds / 2))][-SAMPLES:])
    last = max(statistics.median(samples[-SAMPLES:]), resting_mb)
    found = {"defects met by users": len(users.defects), "complaints": len(complaints), "exit code": abs(code)}
    lines: list[Line] = [("resident memory, MB", first, last, first * GROWTH_MAX)]
    lines += [(name, before[name], after[name], before[name] + SPARE.get(name, 0)) for name in before]
    lines += [(name, 0, count, 0) for name, count in (unfinished | found).items()]
    for what, counts in ("users", users.counts), ("faults", faults):
        print(f"{what}: " + ", ".join(f"{count} {name}" for name, count in sorted((+counts).items())))
    print(*users.defects[:10], output[-TOLD_CHARS:] if complaints else "", sep="\n")
    return told(lines)


def settings(model: ModelServer) -> dict[str, object]:
    """A server that asks this model, and does not wait long for it."""
    return {
        "model": {"default": "m", "provider": "soak"},
        "providers": {"soak": {"base_url": f"{model.url}/v1", "api_key": "key-12345678", "stale_timeout_seconds": 2}},
        "terminal": {"backend": "local"},
        "agent": {"api_max_retries": 1},
        "api_server": {"max_concurrent_runs": 0},
    }


def told(lines: list[Line]) -> bool:
    """Print the table, and a line for each bound that did not hold; whether all did."""
    print(f"{'':26}{'before':>10}{'after':>10}{'at most':>10}")
    for name, *figures in lines:
        print(f"{name:26}" + "".join(f"{figure:10.4g}" for figure in figures))
    broken = [f"FAILED: {name}: {after:.4g}, at most {most:.4g}" for name, _, after, most in lines if after > most]
    print(*broken, sep="\n")
    return not broken


def main() -> int:
    """Read what is asked for, do it, and tell."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="have the same chances again")
    asked = parser.parse_args()
    print(f"{USERS} turns at once for {asked.minutes:g} minutes (--seed {asked.seed})", flush=True)
    return 0 if asyncio.run(soak(asked.minutes * 60, asked.seed)) else 1


sys.exit(main())
