"""Who has how many turns at work: in this process, and in the others that serve the same home."""

from __future__ import annotations

from collections import Counter
from typing import Protocol


class SharedCounts(Protocol):
    """How many turns the other processes have. An owner of `None` stands for all."""

    def put(self, owner: str | None, count: int) -> None: ...

    def others(self, owner: str | None) -> int: ...


class Permits:
    """The permits that are given out."""

    def __init__(self) -> None:
        self._own: Counter[str] = Counter()
        self.shared: SharedCounts | None = None

    def take(self, owner: str) -> None:
        """Give one out."""
        self._change(owner, 1)

    def give_back(self, owner: str) -> None:
        """Take one back."""
        self._change(owner, -1)

    def _change(self, owner: str, by: int) -> None:
        self._own[owner] += by
        if self.shared is not None:
            self.shared.put(owner, self._own[owner])
            self.shared.put(None, self.here)

    @property
    def here(self) -> int:
        """Those of this process."""
        return self._own.total()

    @property
    def everywhere(self) -> int:
        """Those of all processes."""
        return self.here + (self.shared.others(None) if self.shared is not None else 0)

    def of(self, owner: str) -> int:
        """Those of an owner, in all processes."""
        return self._own[owner] + (self.shared.others(owner) if self.shared is not None else 0)
