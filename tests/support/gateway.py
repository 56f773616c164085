"""`hermes gateway run` on a home of its own: a real process, and a client of it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import yaml

from support.preloaded import HermesProcess

Json = dict[str, Any]
SURELY_S = 60.0
# A server imports for about a second of processor time, and one of two workers three times that.
_START_S = 120.0
# What a client sees when the server is killed under it.
CUT = (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError)


class Gateway:
    """The server of one home, which can be stopped and restarted."""

    # Where it listens; 0: at an address of its own each time.
    port = 0

    def __init__(
        self, folder: Path, *, within: tuple[str, ...] = (), environ: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        """`within` is a command that starts the server, whose own it is given; `environ` is added to the environment."""
        self.folder, self.url, self._within, self._environ = folder, "", within, dict(environ or {})
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = {"auxiliary": {"title_generation": {"enabled": False}}, "cron": {"enabled": False}, **settings}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        self.process: asyncio.subprocess.Process
        self.client: aiohttp.ClientSession

    async def start(self) -> None:
        """Start it, or start it again once everybody has noticed that it is gone; it listens afterwards."""
        command = (*self._within, sys.executable, "-m", "hermes", "gateway", "run", "--port", str(self.port))
        env = {**os.environ, "HERMES_HOME": str(self.folder), **self._environ}
        with (self.folder / "stderr.txt").open("ab") as file, patch.object(subprocess, "Popen", HermesProcess):
            self.process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=file, env=env
            )
        assert self.process.stdout is not None
        line = (await asyncio.wait_for(self.process.stdout.readline(), _START_S)).decode()
        match = re.search(r"listening on (http://\S+)", line)
        assert match, self.stderr_text
        if self.url:
            await self.client.close()
        self.url = match[1]
        self.client = aiohttp.ClientSession(
            self.url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)
        )

    async def end(self, number: int = signal.SIGKILL) -> int:
        """Stop it, and return the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.wait_for_exit()

    async def wait_for_exit(self) -> int:
        """Wait until it exits, and return the exit code."""
        return await asyncio.wait_for(self.process.wait(), SURELY_S)

    @property
    def stderr_text(self) -> str:
        """Its standard error so far."""
        return (self.folder / "stderr.txt").read_text()

    async def get(self, path: str, status: int = 200) -> Json:
        """GET, check the status, and return the JSON body."""
        async with self.client.get(path) as response:
            assert response.status == status, f"GET {path}: {response.status} {await response.text()}"
            body: Json = await response.json()
            return body

    async def post(self, path: str, body: Json, status: int = 200, **headers: str) -> Json:
        """POST a JSON body, check the status, and return the JSON body."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(path, json=body, headers=named) as response:
            assert response.status == status, f"POST {path}: {response.status} {await response.text()}"
            payload: Json = await response.json()
            return payload


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Gateway]:
    """Run a server, and stop it afterwards."""
    gateway = Gateway(folder, **settings)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.end()
        await gateway.client.close()
