"""Pools of read-only connections: one for quick reads and one for slow ones, so that neither waits for the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hermes.core.threads import Threads
from hermes.store.sqlite.connections import Connection


class Readers:
    """At most `size` connections, opened when needed, and as many threads for callers on an event loop. `connect` opens
    a connection; `check_usable` raises if the database can no longer be used."""

    def __init__(
        self, size: int, connect: Callable[[], Connection], check_usable: Callable[[], None], *, niceness: int = 0
    ) -> None:
        self.threads = Threads(size, niceness=niceness)
        self.idle: list[Connection] = []
        self._size, self._connect, self._check_usable = size, connect, check_usable
        self._slots = threading.Semaphore(size)
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        with self._slots:
            self._check_usable()
            db = self.idle.pop() if self.idle else self._connect()
            try:
                yield db
            finally:
                if self._closed or db.stale:
                    db.close()
                else:
                    self.idle.append(db)

    def close(self, wait_s: float) -> None:
        """Close the connections, those in use when they are returned; waits for `wait_s` at most."""
        self._closed = True
        acquired = [self._slots.acquire(timeout=wait_s / self._size) for _ in range(self._size)]
        while self.idle:
            self.idle.pop().close()
        self._slots.release(max(1, sum(acquired)))  # waiting callers find that it is closed
        self.threads.close()
