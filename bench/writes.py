"""`python -m bench writes`: bytes and system calls with which a plain turn is stored, one client at a time and many."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from bench.load import chat, connect
from bench.results import Figure
from bench.servers import Server, hermes, provider

CLIENTS = 32


def write_counts(server: Server) -> tuple[int, int]:
    """Bytes and calls with which the server's threads have written, without its main thread: that one writes to sockets,
    the others to the database."""

    def counters(folder: str) -> tuple[int, int]:
        text = Path(f"/proc/{server.pid}/{folder}io").read_text()
        counters = dict(re.findall(r"(\w+): (\d+)", text))
        return int(counters["wchar"]), int(counters["syscw"])

    of_all, of_main = counters(""), counters(f"task/{server.pid}/")
    return of_all[0] - of_main[0], of_all[1] - of_main[1]


async def per_turn(server: Server, clients: int, turns: int) -> tuple[float, float]:
    """KB and calls that a plain turn writes, with so many clients that ask one question after the other."""
    connections = [await connect(server.url) for _ in range(clients)]

    async def ask(count: int) -> None:
        async def run_client(client: int) -> None:
            for _ in range(count):
                seen = await connections[client].ask(chat("burst-20", stream=False))
                assert seen.tokens == 20, seen

        await asyncio.gather(*map(run_client, range(clients)))

    await ask(3)
    await asyncio.sleep(0.5)
    before = write_counts(server)
    await ask(turns)
    await asyncio.sleep(0.5)
    total, calls = (after - first for after, first in zip(write_counts(server), before, strict=True))
    for connection in connections:
        connection.close()
    return total / 1000 / (turns * clients), calls / (turns * clients)


async def measure(quick: bool) -> list[Figure]:
    """What one turn after another writes, and what each of many at once does."""
    turns = 300 if quick else 2_000
    with provider() as model, hermes(model) as ours:
        alone = await per_turn(ours, 1, turns)
        many = await per_turn(ours, CLIENTS, turns // 10)
    return [
        Figure("a plain turn writes", "KB", (None, alone[0]), "is", 30.0),
        Figure("the same, system calls", "calls", (None, alone[1]), "is", 12.0),
        Figure(f"a plain turn of {CLIENTS} clients writes", "KB", (None, many[0]), "is", 30.0),
        Figure("the same, system calls", "calls", (None, many[1]), "is", 12.0),
    ]
