"""Usage: counted while runs go on, written every few seconds, summed by day, owner and model.

Counts that are not yet written are lost when the process is killed; conversations keep their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from hermes.core.events import Event
from hermes.core.json_types import JsonObject
from hermes.core.limits import USAGE_WRITTEN_S
from hermes.runs.engine import LiveRun
from hermes.store.base import StoreError
from hermes.store.stores import AsyncUsageDays
from hermes.store.usage_days import DAY_S, TOKENS, Group, UsageKey

log = logging.getLogger(__name__)
# Sessions of runs that nobody has asked for: a model that is loaded, or tried.
WARM_UP, TRIAL = "warm_up", "trial"
_SECONDS = ("turn_seconds", "tool_seconds")
_COUNTS = ("turns", "failed", "cancelled", "calls", "retries", "tool_calls", "tool_errors")
# Histogram buckets of the time to the first token; the last has all that took longer.
BOUNDS_S = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0)
_GROUPS = (*(f"first_token_le_{bound:g}" for bound in BOUNDS_S), "first_token_le_inf")
_FIRST = "first_token_seconds"


class UsageCounter:
    def __init__(
        self, days: AsyncUsageDays, background: Callable[[Coroutine[Any, Any, object]], None], clock: Any = time.time
    ) -> None:
        self._days, self._background, self._clock = days, background, clock
        # A server has its store open; a command that stores nothing does not create one for this.
        self.with_unstored_runs = False
        self._amounts: dict[UsageKey, dict[str, float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def hear(self, live: LiveRun, event: Event) -> None:
        """Count an event of a run."""
        spec = live.spec
        if spec.count_only or spec.session_id in (WARM_UP, TRIAL) or not (spec.persist or self.with_unstored_runs):
            return
        kind, data, state = event.type, event.data, live.log.state
        if kind == "usage":
            tokens = {name: data.get(name) or 0 for name in TOKENS}
            cost = {} if data.get("cost_usd") is None else {"cost_usd": data["cost_usd"]}
            self._count(live, {"calls": 1, **tokens, **cost}, data["provider"], data["model"])
        elif kind == "tool.finished":
            failed = {} if data["status"] == "ok" else {"tool_errors": 1}
            self._count(live, {"tool_calls": 1, "tool_seconds": data["duration_ms"] / 1000, **failed})
        elif kind == "model.retrying":
            self._count(live, {"retries": 1})
        elif event.final and live.spec.parent is None:
            amounts: dict[str, float] = {"turns": 1}
            if state.status in _COUNTS:
                amounts[state.status] = 1
            if state.started_at is not None:
                amounts["turn_seconds"] = max(0.0, event.ts - state.started_at)
                if live.log.first_delta_at is not None and live.resumption is None:
                    seconds = max(0.0, live.log.first_delta_at - state.started_at)
                    index = next((i for i, bound in enumerate(BOUNDS_S) if seconds <= bound), len(BOUNDS_S))
                    amounts |= {_FIRST: seconds, _GROUPS[index]: 1}
            self._count(live, amounts)

    def _count(self, live: LiveRun, amounts: Mapping[str, float], provider: str = "", model: str = "") -> None:
        state, day = live.log.state, int(self._clock() // DAY_S)
        key = UsageKey(day, live.spec.owner, provider or state.provider, model or state.model)
        self._add(key, amounts)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(USAGE_WRITTEN_S, self._due)

    def _add(self, key: UsageKey, amounts: Mapping[str, float]) -> None:
        totals = self._amounts.setdefault(key, {})
        for name, amount in amounts.items():
            if amount:
                totals[name] = totals.get(name, 0) + amount

    def _due(self) -> None:
        self._timer = None
        self._background(self.write())

    async def write(self) -> None:
        """What cannot be written is kept until the next time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        amounts, self._amounts = self._amounts, {}
        if not amounts:
            return
        try:
            await self._days.add(amounts)
        except StoreError as error:
            log.warning("usage cannot be written: %s", error)
            for key, counted in amounts.items():
                self._add(key, counted)


# --- reports ---------------------------------------------------------------------------------------------------------


def total_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The sums of all rows; other fields are left out."""
    total: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float):
                total[name] = total.get(name, 0) + value
    return total


def labels(groups: Sequence[Group], key: Sequence[Any]) -> JsonObject:
    """The columns of a row of sums; days as dates."""
    named = dict(zip(groups, key, strict=True))
    return {**named, "day": date_of(named["day"])} if "day" in named else named


def date_of(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_S, UTC).date().isoformat()


def report(sums: Mapping[str, float]) -> JsonObject:
    """A group's numbers as shown. Unknown ones are None: costs, and times of which there are none."""
    groups = [int(sums.get(name, 0)) for name in _GROUPS]
    count = sum(groups)
    cost = sums.get("cost_usd")
    return {
        **{name: int(sums.get(name, 0)) for name in (*_COUNTS, *TOKENS)},
        "cost_usd": None if cost is None else round(cost, 6),
        **{name: round(sums.get(name, 0), 3) for name in _SECONDS},
        "first_token_mean": round(sums.get(_FIRST, 0) / count, 3) if count else None,
        "first_token_p50": _quantile(groups, 0.5),
        "first_token_p95": _quantile(groups, 0.95),
    }


def _quantile(groups: list[int], share: float) -> float | None:
    """The time within which this share of the turns had their first token, estimated from the groups."""
    wanted = sum(groups) * share
    if not wanted:
        return None
    below, lower = 0, 0.0
    for count, upper in zip(groups, BOUNDS_S, strict=False):
        if below + count >= wanted:
            return round(lower + (upper - lower) * (wanted - below) / count, 3)
        below, lower = below + count, upper
    return lower
