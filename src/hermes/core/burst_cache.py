"""A short cache that concurrent turns share, so that a burst of them does the same work once."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from hermes.core.limits import LATELY_MAX, SAME_MOMENT_S

R = TypeVar("R")


class BurstCache:
    """Remembers answers for a moment, while there is much to do; otherwise everybody looks for itself."""

    __slots__ = ("_busy", "_known", "_since")

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._known: dict[Hashable, Any] = {}
        self._since = 0.0

    def __call__(self, key: Hashable, find: Callable[[], R]) -> R:
        found: R | None = self.get(key)
        return self.keep(key, find()) if found is None else found

    def get(self, key: Hashable) -> Any:
        now = time.monotonic()
        if self._known and (now - self._since > SAME_MOMENT_S or not self._busy()):
            self._known.clear()
        if not self._known:
            self._since = now
        return self._known.get(key)

    def keep(self, key: Hashable, found: R) -> R:
        if len(self._known) < LATELY_MAX:
            self._known[key] = found
        return found
