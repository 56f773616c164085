"""Answers that are remembered for a moment, while there is much to do."""

from __future__ import annotations

import pytest

from hermes.core import burst_cache
from hermes.core.burst_cache import BurstCache
from hermes.core.limits import LATELY_MAX, SAME_MOMENT_S


class RunResources:
    """A clock, and whether there is much to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.busy, self.asked = 100.0, True, 0
        monkeypatch.setattr(burst_cache.time, "monotonic", lambda: self.now)
        self.lately = BurstCache(lambda: self.busy)

    def ask(self, key: object = "key") -> int:
        cached: int | None = self.lately.get(key)
        return self.lately.keep(key, self.find()) if cached is None else cached

    def find(self) -> int:
        self.asked += 1
        return self.asked


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> RunResources:
    return RunResources(monkeypatch)


def test_burst_cache_computes_once_per_moment(world: RunResources) -> None:
    assert [world.ask(), world.ask()] == [1, 1]
    world.now += SAME_MOMENT_S
    assert world.ask() == 1
    world.now += 0.001
    assert [world.ask(), world.ask()] == [2, 2]


def test_burst_cache_hits_do_not_extend_lifetime(world: RunResources) -> None:
    for _ in range(5):
        world.ask()
        world.now += SAME_MOMENT_S / 3
    assert world.asked == 2


def test_burst_cache_is_bypassed_when_idle(world: RunResources) -> None:
    world.busy = False
    assert [world.ask(), world.ask()] == [1, 2]
    world.busy = True
    assert [world.ask(), world.ask()] == [2, 2]


def test_burst_cache_separates_keys(world: RunResources) -> None:
    assert [world.ask("a"), world.ask("b"), world.ask("a")] == [1, 2, 1]


def test_burst_cache_size_is_limited(world: RunResources) -> None:
    for key in range(2 * LATELY_MAX):
        world.ask(key)
    assert world.ask(0) == 1
    assert world.ask(LATELY_MAX) > 2 * LATELY_MAX
