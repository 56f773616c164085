"""`hermes gateway run` with two workers: real processes on one port and one home, and clients of each of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from hermes.core.home import Home

from .gateway import SURELY_S, Gateway, serving
from .model_server import Handler, ModelServer

Json = dict[str, Any]


class Server:
    """A server of two workers, its model, and clients that are each connected to one of them."""

    def __init__(self, gateway: Gateway, model: ModelServer, clients: contextlib.AsyncExitStack) -> None:
        self.gateway, self.model, self._clients = gateway, model, clients
        self.home = Home(gateway.folder)

    async def client(
        self, pid: int | None = None, *, other_than: int | None = None
    ) -> tuple[int, aiohttp.ClientSession]:
        """A client with one connection, to this worker or to any other, and the worker's pid."""
        async with asyncio.timeout(SURELY_S):
            while True:
                connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=SURELY_S)
                client = aiohttp.ClientSession(self.gateway.url, connector=connector)
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with client.get("/health/detailed") as response:
                        worker_pid = (await response.json())["pid"]
                    if pid in (None, worker_pid) and worker_pid != other_than:
                        self._clients.push_async_callback(client.close)
                        return worker_pid, client
                await client.close()

    async def any(self) -> aiohttp.ClientSession:
        """A client of any worker."""
        return (await self.client())[1]

    async def both(self) -> tuple[aiohttp.ClientSession, aiohttp.ClientSession]:
        """A client of each worker."""
        pid, client = await self.client()
        _, other = await self.client(other_than=pid)
        return client, other

    @property
    def pids(self) -> set[int]:
        """PIDs of the workers."""
        pids = set()
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = entry.read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.gateway.process.pid and fields[0] != "Z":
                    pids.add(int(entry.parent.name))
        return pids

    def go(self) -> None:
        """Let waiting commands exit."""
        (self.gateway.folder / "workspace" / "go").touch()


@asynccontextmanager
async def two_workers(folder: Path, handler: Handler, **settings: Any) -> AsyncIterator[Server]:
    async with ModelServer(handler=handler) as model, contextlib.AsyncExitStack() as clients:
        config = {
            "model": {"default": "m", "base_url": f"{model.url}/v1", "api_key": "key-12345678"},
            "terminal": {"backend": "local"},
            "command_allowlist": ["> *"],
            "agent": {"delta_window_ms": 0},
            **settings,
            "api_server": {"workers": 2, **settings.get("api_server", {})},
        }
        async with serving(folder, **config) as gateway:
            yield Server(gateway, model, clients)


async def post(client: aiohttp.ClientSession, path: str, body: Json, status: int = 200) -> Json:
    async with client.post(path, json=body) as response:
        assert response.status == status, f"POST {path}: {response.status} {await response.text()}"
        payload: Json = await response.json()
        return payload


async def get(client: aiohttp.ClientSession, path: str) -> Json:
    async with client.get(path) as response:
        assert response.status == 200, f"GET {path}: {response.status} {await response.text()}"
        body: Json = await response.json()
        return body
