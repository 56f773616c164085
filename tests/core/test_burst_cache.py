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
        return self.lately(key, self.find)

    def find(self) -> int:
        self.asked += 1
        return self.asked


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> RunResources:
    return RunResources(monkeypatch)


def test_it_is_found_out_once_in_a_moment(world: RunResources) -> None:
    assert [world.ask(), world.ask()] == [1, 1]
    world.now += SAME_MOMENT_S
    assert world.ask() == 1
    world.now += 0.001
    assert [world.ask(), world.ask()] == [2, 2]


def test_asking_again_does_not_make_a_moment_longer(world: RunResources) -> None:
    for _ in range(5):
        world.ask()
        world.now += SAME_MOMENT_S / 3
    assert world.asked == 2


def test_while_there_is_little_to_do_everybody_looks(world: RunResources) -> None:
    world.busy = False
    assert [world.ask(), world.ask()] == [1, 2]
    world.busy = True
    assert [world.ask(), world.ask()] == [2, 2]


def test_what_is_asked_for_are_different_things(world: RunResources) -> None:
    assert [world.ask("a"), world.ask("b"), world.ask("a")] == [1, 2, 1]


def test_only_so_many_are_remembered(world: RunResources) -> None:
    for key in range(2 * LATELY_MAX):
        world.ask(key)
    assert world.ask(0) == 1
    assert world.ask(LATELY_MAX) > 2 * LATELY_MAX


def test_what_fails_is_asked_again(world: RunResources) -> None:
    def fails() -> int:
        raise ValueError

    with pytest.raises(ValueError):
        world.lately("key", fails)
    assert world.ask() == 1
