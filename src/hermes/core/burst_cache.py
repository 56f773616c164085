"""A short cache that concurrent turns share, so that a burst of them does the same work once."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from hermes.core.limits import LATELY_MAX, SAME_MOMENT_S

R = TypeVar("R")


class BurstCache:
    """Caches results briefly under load; otherwise every caller computes its own."""

    __slots__ = ("_busy", "_since", "_values")

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._values: dict[Hashable, Any] = {}
        self._since = 0.0

    def get(self, key: Hashable) -> Any:
        now = time.monotonic()
        if self._values and (now - self._since > SAME_MOMENT_S or not self._busy()):
            self._values.clear()
        if not self._values:
            self._since = now
        return self._values.get(key)

    def keep(self, key: Hashable, value: R) -> R:
        if len(self._values) < LATELY_MAX:
            self._values[key] = value
        return value
