"""Ports that no other test can take."""

from __future__ import annotations

import fcntl
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Below the ports that the system gives to outgoing connections.
_SERVER_PORTS = range(10_000, 30_000)
_RESERVED = Path(tempfile.gettempdir()) / "hermes-test-ports"


@contextmanager
def refusing_port() -> Iterator[int]:
    """A port of 127.0.0.1 that refuses connections: it is bound, and nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port for a server that is started, and maybe started again: a file lock keeps other tests from it."""
    _RESERVED.mkdir(exist_ok=True)
    chance = random.SystemRandom()
    while True:
        port = chance.choice(_SERVER_PORTS)
        with (_RESERVED / str(port)).open("w") as file, socket.socket() as sock:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            sock.close()
            yield port
            return
