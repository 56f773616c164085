"""One worker of a server with several: what its parent has told it, and what it tells its parent.

The parent tells a worker its orders in the first line of standard input. A later line says that another worker has
ended; the end of the input, that the parent has. What a worker tells goes to a pipe of its own, a line each.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from hermes.core.errors import HermesError
from hermes.server.shared_counters import SharedNumbers

LOOK = b"look\n"
EXIT_PARENT_GONE = 130
_STDIN = 0
_READ_BYTES = 4096


class Orders(msgspec.Struct, frozen=True):
    """What a worker is to do. `leads`: it does what is done once. `begins`: the server is started, and not only it."""

    number: int
    home: str
    profile: str
    host: str
    port: int
    allow_local_exec: bool
    verbose: bool
    leads: bool
    begins: bool
    watchdog_s: float | None
    answers_fd: int
    numbers_fd: int
    lock_fds: tuple[int, ...]


class Worker:
    """This process as a worker. It stands in for the service manager, to whom the parent passes on what is told."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.period_s = orders.watchdog_s
        # None of the programs that it starts is to keep the home, or the parent waiting.
        for fd in (orders.answers_fd, orders.numbers_fd, *orders.lock_fds):
            os.set_inheritable(fd, False)
        self.numbers = SharedNumbers(orders.numbers_fd, orders.number)

    def tell(self, *lines: str) -> None:
        """Something for the service manager."""
        self.report(notify=list(lines))

    def report(self, **fields: Any) -> None:
        """Tell the parent. A parent that is gone is noticed elsewhere."""
        try:
            os.write(self.orders.answers_fd, json.dumps(fields).encode() + b"\n")
        except OSError:
            return

    @contextmanager
    def listening(self, look: Callable[[], None]) -> Iterator[None]:
        """Do what the parent says, and end with it: what runs is on record, and nobody would restart this worker."""

        def read() -> None:
            if not os.read(_STDIN, _READ_BYTES):
                os._exit(EXIT_PARENT_GONE)
            look()

        loop = asyncio.get_running_loop()
        loop.add_reader(_STDIN, read)
        try:
            yield
        finally:
            loop.remove_reader(_STDIN)


def main() -> int:
    """Serve as the parent says."""
    from hermes.server import process_tuning

    process_tuning.begin()
    from hermes.app import new_loop
    from hermes.core.home import Home
    from hermes.server.runner import GatewayRunner

    orders = msgspec.json.decode(_first_line(), type=Orders)
    worker = Worker(orders)
    server = GatewayRunner(
        Home(Path(orders.home), orders.profile),
        host=orders.host,
        port=orders.port,
        allow_local_exec=orders.allow_local_exec,
        verbose=orders.verbose,
        afterwards=process_tuning.settle,
        worker=worker,
    )
    try:
        with asyncio.Runner(loop_factory=new_loop) as loop:
            return loop.run(server.serve())
    except HermesError as error:
        told = {"message": error.message, "where": error.where, "hint": error.hint, "exit_code": error.exit_code}
        worker.report(failed=told)
        return error.exit_code


def _first_line() -> bytes:
    """The orders, and nothing of what follows them."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (byte := os.read(_STDIN, 1)):
            os._exit(EXIT_PARENT_GONE)
        line += byte
    return bytes(line)


if __name__ == "__main__":
    sys.exit(main())
