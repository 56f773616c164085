"""One worker of a server with several processes, and its messages to and from the parent.

The first line of standard input has the worker's orders. A later line says that another worker has ended; the end of
the input, that the parent has. The worker reports through its own pipe, one JSON object per line.
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
    """`leads`: this worker does what is done once. `begins`: the whole server is starting, not only this worker."""

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
    """This process as a worker. It takes the supervisor's place: the parent forwards its notifications."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.period_s = orders.watchdog_s
        # Child processes must not inherit the home's lock or the parent's pipe.
        for fd in (orders.answers_fd, orders.numbers_fd, *orders.lock_fds):
            os.set_inheritable(fd, False)
        self.numbers = SharedNumbers(orders.numbers_fd, orders.number)

    def tell(self, *lines: str) -> None:
        self.report(notify=list(lines))

    def report(self, **fields: Any) -> None:
        """Report to the parent. A parent that has exited is noticed elsewhere."""
        try:
            os.write(self.orders.answers_fd, json.dumps(fields).encode() + b"\n")
        except OSError:
            return

    @contextmanager
    def listening(self, look: Callable[[], None]) -> Iterator[None]:
        """Follow the parent's orders, and exit with it: running turns are on record, and nobody would restart this
        worker."""

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
        failure = {"message": error.message, "where": error.where, "hint": error.hint, "exit_code": error.exit_code}
        worker.report(failed=failure)
        return error.exit_code


def _first_line() -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (byte := os.read(_STDIN, 1)):
            os._exit(EXIT_PARENT_GONE)
        line += byte
    return bytes(line)


if __name__ == "__main__":
    sys.exit(main())
