"""Numbers that the workers of a server share: rate limits, and how many turns each runs.

They are in shared memory that the parent creates. A row is found by the hash of its name, and never freed. Every change
is made under a lock that a dying process releases.
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
    """The memory, as an unnamed file."""
    fd = os.memfd_create("hermes-shared-numbers", os.MFD_CLOEXEC)
    os.ftruncate(fd, _ROW_BYTES * SHARED_ROWS_MAX)
    return fd


class SharedNumbers:
    """The memory as one process sees it; each worker has its own column in every row of counts."""

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
        """The offset of a name's row; a new one starts with these values."""
        wanted = hashlib.sha256(name.encode()).digest()[:_NAME_BYTES]
        with self._locked():
            for at in range(0, _ROW_BYTES * SHARED_ROWS_MAX, _ROW_BYTES):
                digest = self._memory[at : at + _NAME_BYTES]
                if digest == wanted:
                    return at + _NAME_BYTES
                if digest == _FREE:
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
        """Set this worker's count. Nobody else writes it."""
        _VALUE.pack_into(self._memory, row + self._column, count)

    def others(self, row: int) -> int:
        """The sum of all other workers' counts."""
        values = struct.unpack_from(f"={WORKERS_MAX}d", self._memory, row)
        return int(sum(values) - values[self._column // _VALUE.size])

    def forget(self, rows: tuple[int, ...]) -> None:
        """Reset the counts of an earlier worker in this place."""
        for row in rows:
            self.put(row, 0)
