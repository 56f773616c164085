"""Numbers that the workers of a server share: what is left of rates, and how many turns each has at work.

They are in a piece of memory that the parent makes and all have. A row is found by the hash of its name, and belongs to
it for good. Every change is made under a lock that a process which dies gives back.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from hermes.core.limits import SHARED_ROWS_MAX, WORKERS_MAX

_NAME_BYTES = 16
_VALUE = struct.Struct("=d")
_PAIR = struct.Struct("=2d")
_ROW_BYTES = _NAME_BYTES + _VALUE.size * WORKERS_MAX
_FREE = bytes(_NAME_BYTES)


def make() -> int:
    """The memory, as a file without a name."""
    fd = os.memfd_create("hermes-shared-numbers", os.MFD_CLOEXEC)
    os.ftruncate(fd, _ROW_BYTES * SHARED_ROWS_MAX)
    return fd


class SharedNumbers:
    """The memory as one process sees it; a worker has the column of its number in every row of counts."""

    def __init__(self, fd: int, worker: int = 0) -> None:
        self._fd, self._column = fd, worker * _VALUE.size
        self._memory = mmap.mmap(fd, _ROW_BYTES * SHARED_ROWS_MAX)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def row(self, name: str, *begin: float) -> int:
        """Where the row of a name is; a new one begins with these values."""
        wanted = hashlib.sha256(name.encode()).digest()[:_NAME_BYTES]
        with self._locked():
            for at in range(0, _ROW_BYTES * SHARED_ROWS_MAX, _ROW_BYTES):
                found = self._memory[at : at + _NAME_BYTES]
                if found == wanted:
                    return at + _NAME_BYTES
                if found == _FREE:
                    self._memory[at : at + _NAME_BYTES] = wanted
                    for place, value in enumerate(begin):
                        _VALUE.pack_into(self._memory, at + _NAME_BYTES + place * _VALUE.size, value)
                    return at + _NAME_BYTES
        raise LookupError(f"there is no room for more than {SHARED_ROWS_MAX} shared numbers")

    @contextmanager
    def pair(self, row: int) -> Iterator[list[float]]:
        """The two values of a row, which may be changed."""
        with self._locked():
            values = list(_PAIR.unpack_from(self._memory, row))
            yield values
            _PAIR.pack_into(self._memory, row, *values)

    def put(self, row: int, count: int) -> None:
        """This worker's count in a row. Nobody else writes it."""
        _VALUE.pack_into(self._memory, row + self._column, count)

    def others(self, row: int) -> int:
        """The counts of all other workers together."""
        values = struct.unpack_from(f"={WORKERS_MAX}d", self._memory, row)
        return int(sum(values) - values[self._column // _VALUE.size])

    def forget(self, rows: tuple[int, ...]) -> None:
        """A worker begins: what the one before it has left does not count."""
        for row in rows:
            self.put(row, 0)
