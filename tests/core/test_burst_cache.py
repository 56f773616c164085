"""Answers that are remembered for a moment, while there is much to do."""

from __future__ import annotations

import pytest

from hermes.core import burst_cache
from hermes.core.burst_cache import BurstCache
from hermes.core.limits import LATELY_MAX, SAME_MOMENT_S


class CacheUser:
    """A user of the cache, with a clock and a load that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.busy, self.lookups = 100.0, True, 0
        monkeypatch.setattr(burst_cache.time, "monotonic", lambda: self.now)
        self.cache = BurstCache(lambda: self.busy)

    def ask(self, key: object = "key") -> int:
        cached: int | None = self.cache.get(key)
        return self.cache.keep(key, self.look_up()) if cached is None else cached

    def look_up(self) -> int:
        self.lookups += 1
        return self.lookups


@pytest.fixture
def cache_user(monkeypatch: pytest.MonkeyPatch) -> CacheUser:
    return CacheUser(monkeypatch)


def test_burst_cache_computes_once_per_moment(cache_user: CacheUser) -> None:
    assert [cache_user.ask(), cache_user.ask()] == [1, 1]
    cache_user.now += SAME_MOMENT_S
    assert cache_user.ask() == 1
    cache_user.now += 0.001
    assert [cache_user.ask(), cache_user.ask()] == [2, 2]


def test_burst_cache_hits_do_not_extend_lifetime(cache_user: CacheUser) -> None:
    for _ in range(5):
        cache_user.ask()
        cache_user.now += SAME_MOMENT_S / 3
    assert cache_user.lookups == 2


def test_burst_cache_is_bypassed_when_idle(cache_user: CacheUser) -> None:
    cache_user.busy = False
    assert [cache_user.ask(), cache_user.ask()] == [1, 2]
    cache_user.busy = True
    assert [cache_user.ask(), cache_user.ask()] == [2, 2]


def test_burst_cache_separates_keys(cache_user: CacheUser) -> None:
    assert [cache_user.ask("a"), cache_user.ask("b"), cache_user.ask("a")] == [1, 2, 1]


def test_burst_cache_size_is_limited(cache_user: CacheUser) -> None:
    for key in range(2 * LATELY_MAX):
        cache_user.ask(key)
    assert cache_user.ask(0) == 1
    assert cache_user.ask(LATELY_MAX) > 2 * LATELY_MAX
