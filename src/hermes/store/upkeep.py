"""Maintenance of the database: backup, checks, shrinking, sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hermes.store.repository import Repository, blocks

Progress = Callable[[str], None]


class Upkeep(Repository):
    @blocks
    def backup(self, path: str | Path) -> None:
        """Back up the database while it is in use; only its owner can read the copy."""
        self._engine.maintenance.backup(self._engine, Path(path))

    @blocks
    def check(self, deep: bool = False, progress: Progress = lambda _: None) -> list[str]:
        """The faults of the database, as sentences; empty if it is sound. Without `deep` it takes seconds at most."""
        return self._engine.maintenance.check(self._engine, deep, progress)

    @blocks
    def optimize(self) -> dict[str, int]:
        """Merge the search index and give free space back."""
        return self._engine.maintenance.optimize(self._engine)

    @blocks
    def vacuum_if_worthwhile(self) -> bool:
        """Vacuum if the database does not shrink by itself and much of it is free."""
        return self._engine.maintenance.vacuum_if_worthwhile(self._engine)

    @blocks
    def give_back_space(self) -> None:
        """Return free space to the file system now instead of in idle moments."""
        self._engine.maintenance.give_back_space(self._engine)

    @blocks
    def total_bytes(self) -> int:
        return self._engine.maintenance.total_bytes(self._engine)

    @blocks
    def sizes(self, seconds_max: float | None = None) -> dict[str, int]:
        """Bytes by use: `rows`, `index`, `blobs`, `logs`, `other`, `free`; empty if the database cannot say or it takes
        too long."""
        return self._engine.maintenance.sizes(self._engine, seconds_max)
