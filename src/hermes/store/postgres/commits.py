"""Whether a transaction counts whose connection was lost during COMMIT.

A transaction that changes something writes a marker with a number chosen here. After a lost COMMIT the marker says
whether it counts; one that does not is refused for good, since the server may still be working on it.
"""

from __future__ import annotations

import uuid

MARKERS_KEPT_S = 86_400
_NOW = "extract(epoch FROM clock_timestamp())::float8"
_MARK = (
    f"INSERT INTO commit_markers (slot, serial, used_at) VALUES (?, ?, {_NOW}) "
    "ON CONFLICT (slot) DO UPDATE SET serial = excluded.serial, used_at = excluded.used_at"
)
# The server may not know yet that the connection is lost. If the process id was reused, that process only loses its
# connection.
END_BACKEND = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE pid = %s AND usename = current_user AND application_name LIKE 'hermes%%'"
)
# Waits for a transaction that has written the marker and not ended. A refused number can no longer be written: the
# table has a constraint against it.
RESOLVE = (
    f"INSERT INTO commit_markers AS marker (slot, serial, refused, used_at) VALUES (%s, 0, %s, {_NOW}) "
    "ON CONFLICT (slot) DO UPDATE SET refused = "
    "CASE WHEN marker.serial = excluded.refused THEN marker.refused ELSE excluded.refused END "
    "RETURNING marker.serial = %s"
)
CLEAN_UP = f"DELETE FROM commit_markers WHERE used_at < {_NOW} - {MARKERS_KEPT_S}"


class Marker:
    """A row of `commit_markers`, used by one transaction at a time."""

    __slots__ = ("backend_pid", "serial", "slot")

    def __init__(self) -> None:
        self.slot, self.serial = uuid.uuid4().hex, 0
        self.backend_pid = 0  # the server process of the transaction

    def next_statement(self) -> tuple[str, tuple[str, int]]:
        """The statement that the transaction runs right before COMMIT."""
        self.serial += 1
        return _MARK, (self.slot, self.serial)

    @property
    def question(self) -> tuple[str, tuple[str, int, int]]:
        return RESOLVE, (self.slot, self.serial, self.serial)


class Markers:
    """The markers of one process, reused so that there are no more rows than concurrent transactions."""

    def __init__(self) -> None:
        self._free: list[Marker] = []

    def take(self) -> Marker:
        try:
            return self._free.pop()
        except IndexError:
            return Marker()

    def put(self, marker: Marker) -> None:
        """Return a marker whose last transaction has ended."""
        self._free.append(marker)
