"""Three replicas on PostgreSQL and NATS, each behind links of its own, and clients that go from one to the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from hermes.cluster.engines import NatsEngine, PostgresEngine
from support.gateway import CUT, Gateway
from support.model_server import Handler, ModelServer
from support.ports import reserved_port

from .links import Link

Json = dict[str, Any]
REPLICAS = 3
ENGINES = ("postgresql", "nats")
# A request at a replica that is stopped, or cut off from its store, is made at another one after this time.
TRY_S = 8.0
# A run is taken over within 40 s, and then goes on to its end.
ENDED_S = 150.0
# An engine that is killed keeps what it has confirmed, whether or not the disk has it.
_POSTGRES = {"max_connections": "200", "shared_buffers": "64MB", "fsync": "off", "full_page_writes": "off"}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Replica:
    name: str
    gateway: Gateway
    links: dict[str, Link]
    # One fault at a time for each replica.
    fault: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def pid(self) -> int:
        return self.gateway.process.pid

    @property
    def url(self) -> str:
        return self.gateway.url

    async def kill(self) -> None:
        await self.gateway.end(signal.SIGKILL)

    async def start(self) -> None:
        await self.gateway.start()

    def stall(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        if self.gateway.process.returncode is None:
            os.kill(self.pid, signal.SIGCONT)


class Cluster:
    def __init__(
        self, folder: Path, replicas: list[Replica], postgres: PostgresEngine, nats: NatsEngine, model: ModelServer
    ) -> None:
        self.folder, self.replicas, self.postgres, self.nats, self.model = folder, replicas, postgres, nats, model
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(None)
        )
        self.engine_faults = {name: asyncio.Lock() for name in ENGINES}

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    def query(self, sql: str) -> str:
        return self.postgres.query(f"SET search_path TO hermes; {sql}")

    def unfinished(self) -> str:
        """What the store says of runs without an end, and of who holds what; for a failed test."""
        return self.query(
            "SELECT run_id, session_id, status, holder, started_at, last_seq FROM runs WHERE ended_at IS NULL;"
            "SELECT name, holder, token, until - extract(epoch FROM now()) FROM leases;"
            "SELECT now()"
        )

    async def ask(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        at: int = 0,
        headers: dict[str, str] | None = None,
        only: bool = False,
    ) -> Answer:
        """The first answer that does not say to try again; from the replica `at`, or `only` from it, or the next ones."""
        until, last = time.monotonic() + ENDED_S, list[Any]()
        while time.monotonic() < until:
            try:
                answer = await self.ask_once(method, path, body, at=at, headers=headers)
                if answer.status != 503:
                    return answer
                last = [at % REPLICAS, answer]
            except (*CUT, TimeoutError) as error:
                last = [at % REPLICAS, error]
            at += not only
            await asyncio.sleep(0.05)
        raise AssertionError(f"{method} {path} has no answer, the last was {last}")

    async def ask_once(
        self, method: str, path: str, body: Json | None = None, *, at: int, headers: dict[str, str] | None = None
    ) -> Answer:
        url = f"{self.replicas[at % REPLICAS].url}{path}"
        async with asyncio.timeout(TRY_S), self.http.request(method, url, json=body, headers=headers) as response:
            return Answer(response.status, dict(response.headers), await response.read())


@asynccontextmanager
async def cluster_of_three(folder: Path, handler: Handler, **settings: Any) -> AsyncIterator[Cluster]:
    async with ModelServer(handler=handler) as model, contextlib.AsyncExitStack() as stack:
        postgres = PostgresEngine(folder.with_name("pg"), _POSTGRES)
        nats = NatsEngine(folder.with_name("nats"))
        for engine in (postgres, nats):
            stack.push_async_callback(asyncio.to_thread, engine.kill)
            await asyncio.to_thread(engine.start)
        config = {
            "model": {"default": "m", "base_url": f"{model.url}/v1", "api_key": "key-12345678"},
            "terminal": {"backend": "local"},
            "command_allowlist": ["> *"],
            "api_server": {"drain_seconds": 1},
            "cron": {"enabled": True},
            **settings,
        }
        replicas = []
        for number in range(REPLICAS):
            links = {
                "postgresql": Link(stack.enter_context(reserved_port()), postgres.state.port),
                "nats": Link(stack.enter_context(reserved_port()), nats.state.port),
            }
            for link in links.values():
                await link.start()
                stack.push_async_callback(link.close)
            environ = {
                "HERMES_DATABASE_URL": _through(postgres.url, postgres.state.port, links["postgresql"].port),
                "HERMES_NATS_URL": _through(nats.url, nats.state.port, links["nats"].port),
            }
            replicas.append(Replica(f"r{number}", Gateway(folder, environ=environ, **config), links))
        cluster = Cluster(folder, replicas, postgres, nats, model)
        stack.push_async_callback(cluster.http.close)
        for replica in replicas:
            stack.push_async_callback(_end, replica)
        await asyncio.gather(*(replica.start() for replica in replicas))
        cluster.workspace.mkdir(exist_ok=True)
        (cluster.workspace / "notes.txt").write_text("milk\n")
        yield cluster


def _through(url: str, port: int, link_port: int) -> str:
    return url.replace(f":{port}", f":{link_port}")


async def _end(replica: Replica) -> None:
    if hasattr(replica.gateway, "process"):
        replica.go_on()
        await replica.gateway.end()
        if replica.url:
            await replica.gateway.client.close()


def spread(chance: random.Random) -> int:
    """Any replica."""
    return chance.randrange(REPLICAS)
