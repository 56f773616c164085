"""`python -m bench workers`: a server of two workers beside one, events of a run at the other worker, and a killed worker.

Here servers are not held to one core: two workers are to use two, which they share with the model and the clients.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from itertools import pairwise

from bench.load import Client, chat, get, post
from bench.results import Figure, median
from bench.servers import Server, hermes, provider
from bench.serving import STREAMS, clients, leave

PER_S = 20


class Connection:
    """A connection to one worker, which can be followed line by line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.pid = 0

    async def ask(self, request: bytes) -> dict[str, object]:
        """The answer to a request, which is one object."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        message: dict[str, object] = json.loads(await self._reader.readexactly(size))
        return message

    async def follow(self, run_id: object, times: dict[int, float]) -> None:
        """Note when each event of a run comes, to the end of the stream or of the server."""
        self._writer.write(get(f"/v1/runs/{run_id}/events"))
        while line := await self._reader.readline():
            if line.startswith(b"id: "):
                times[int(line[4:])] = time.perf_counter()
            elif line.startswith(b": stream closed"):
                return

    def close(self) -> None:
        """Leave."""
        self._writer.close()


@asynccontextmanager
async def connected(server: Server, *, other_than: int = 0, pid: int = 0) -> AsyncIterator[Connection]:
    """A connection to a worker, to this one, or to another than that."""
    host, port = server.url.removeprefix("http://").split(":")
    while True:
        connection = Connection(*await asyncio.open_connection(host, int(port)))
        connection.pid = int(str((await connection.ask(get("/health/detailed")))["pid"]))
        if connection.pid != other_than and pid in (0, connection.pid):
            break
        connection.close()
    try:
        yield connection
    finally:
        connection.close()


async def turns_per_s(server: Server, seconds: float) -> float:
    """Whole turns in a second, of clients that ask again and again for so long.

    Not a number of turns for each: connections are spread by chance, and the last ones would have a worker to themselves.
    """
    askers = await clients(server, STREAMS)
    until = time.perf_counter() + seconds

    async def work(client: Client) -> int:
        count = 0
        while time.perf_counter() < until:
            seen = await client.ask(chat("burst-20", stream=False))
            assert seen.tokens == 20, seen
            count += 1
        return count

    started_at = time.perf_counter()
    turns = sum(await asyncio.gather(*map(work, askers)))
    passed = time.perf_counter() - started_at
    leave(askers)
    return turns / passed


async def lag_ms(server: Server, seconds: int) -> list[float]:
    """How much later each event of a run comes at the other worker."""
    async with (
        connected(server) as one,
        connected(server, pid=one.pid) as near,
        connected(server, other_than=one.pid) as far,
    ):
        run = await one.ask(post("/v1/runs", {"input": f"paced-{PER_S}-{PER_S * seconds}"}))
        there: dict[int, float] = {}
        here: dict[int, float] = {}
        await asyncio.gather(near.follow(run["run_id"], here), far.follow(run["run_id"], there))
    assert here.keys() == there.keys()
    # The first ones are read from the store, at whatever moment each viewer was there.
    return [(there[seq] - here[seq]) * 1e3 for seq in sorted(here)[PER_S:]]


async def taken_up_s(server: Server) -> float:
    """Seconds from the end of a worker to the next event of its run, at the other."""
    async with (
        connected(server) as one,
        connected(server, other_than=one.pid) as far,
        connected(server, pid=far.pid) as stopping,
    ):
        run = await one.ask(post("/v1/runs", {"input": f"paced-{PER_S}-{PER_S * 600}"}))
        times: dict[int, float] = {}
        following = asyncio.create_task(far.follow(run["run_id"], times))
        while len(times) < PER_S:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(one.pid, signal.SIGKILL)
        before = len(times)
        while len(times) < before + PER_S:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        following.cancel()
        await stopping.ask(post(f"/v1/runs/{run['run_id']}/stop", {}))
    came = sorted(times.values())[before - 1 :]
    return max(later - earlier for earlier, later in pairwise(came))


async def measure(quick: bool) -> list[Figure]:
    """All figures, in turns."""
    rounds, seconds = (1, 3) if quick else (5, 10)
    with provider() as model, ExitStack() as held:
        servers = [held.enter_context(hermes(model, workers=count)) for count in (1, 2)]
        for server in servers:
            await turns_per_s(server, 0.5)
        rates = [[await turns_per_s(server, 2) for server in servers] for _ in range(rounds)]
        lag = await lag_ms(servers[1], seconds)
        delays = [await taken_up_s(servers[1]) for _ in range(rounds)]
    one, two = (median([times[at] for times in rates]) for at in (0, 1))
    beside = "beside one worker; the model and the clients share the cores"
    return [
        Figure("32 clients, not streamed, 2 workers", "turns/s", (one, two), "ratio", 1.8, True, beside),
        Figure("an event at the other worker, p50", "ms", (None, median(lag)), "is", 5.0),
        Figure("a dead worker's run goes on after", "s", (None, median(delays)), "is", 2.0),
    ]
