"""Several `hermes gateway run` of one home over NATS: real processes, each with a port and clients of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from hermes.core.home import Home

from .gateway import SURELY_S, Gateway
from .model_server import Handler, ModelServer
from .nats_server import NatsServer, nats_server


class Replicas:
    """The replicas by pid, their model and their NATS; clients as those of `workers.Server`."""

    def __init__(
        self, gateways: list[Gateway], model: ModelServer, nats: NatsServer, clients: contextlib.AsyncExitStack
    ) -> None:
        self.gateways, self.model, self.nats, self._clients = gateways, model, nats, clients
        self.home = Home(gateways[0].folder)

    @property
    def pids(self) -> set[int]:
        return {gateway.process.pid for gateway in self.gateways if gateway.process.returncode is None}

    async def client(
        self, pid: int | None = None, *, other_than: int | None = None
    ) -> tuple[int, aiohttp.ClientSession]:
        pids = [gateway.process.pid for gateway in self.gateways]
        at = next(at for at, candidate in enumerate(pids) if pid in (None, candidate) and candidate != other_than)
        connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=SURELY_S)
        client = aiohttp.ClientSession(self.gateways[at].url, connector=connector)
        self._clients.push_async_callback(client.close)
        return pids[at], client

    async def any(self) -> aiohttp.ClientSession:
        return (await self.client())[1]

    async def both(self) -> tuple[aiohttp.ClientSession, aiohttp.ClientSession]:
        pid, client = await self.client()
        _, other = await self.client(other_than=pid)
        return client, other

    def go(self) -> None:
        """Let waiting commands exit."""
        (self.home.workspace / "go").touch()


@asynccontextmanager
async def two_replicas(folder: Path, handler: Handler, **settings: Any) -> AsyncIterator[Replicas]:
    async with (
        ModelServer(handler=handler) as model,
        contextlib.AsyncExitStack() as stack,
        contextlib.AsyncExitStack() as clients,
    ):
        nats = stack.enter_context(nats_server(folder.with_name("nats")))
        config = {
            "model": {"default": "m", "base_url": f"{model.url}/v1", "api_key": "key-12345678"},
            "terminal": {"backend": "local"},
            "command_allowlist": ["> *"],
            "agent": {"delta_window_ms": 0},
            **settings,
            "bus": {"url": nats.url, **settings.get("bus", {})},
        }
        gateways = [Gateway(folder, **config) for _ in range(2)]
        for gateway in gateways:
            await gateway.start()
            stack.push_async_callback(_close, gateway)
        yield Replicas(gateways, model, nats, clients)


async def _close(gateway: Gateway) -> None:
    if gateway.process.returncode is None:
        os.kill(gateway.process.pid, signal.SIGCONT)
    await gateway.end()
    await gateway.client.close()
