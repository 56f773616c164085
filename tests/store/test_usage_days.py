"""Usage by day: numbers are added up, and asked for by any of the columns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hermes.store.stores import Store
from hermes.store.usage_days import UsageKey


def test_numbers_of_a_day_add_up(store: Store) -> None:
    key, other = UsageKey(100, "ada", "p", "m"), UsageKey(101, "bob", "p", "m")
    store.usage_days.add({key: {"turns": 1, "tokens": 5}, other: {"turns": 1}})
    store.usage_days.add({key: {"turns": 2}})
    assert store.usage_days.sums(0, ["day"]) == {(100,): {"turns": 3, "tokens": 5}, (101,): {"turns": 1}}
    assert store.usage_days.sums(0, ["model", "owner"]) == {
        ("ada", "m"): {"turns": 3, "tokens": 5},
        ("bob", "m"): {"turns": 1},
    }
    assert store.usage_days.sums(0, []) == {(): {"turns": 4, "tokens": 5}}


def test_numbers_are_of_one_owner_and_since_a_day(store: Store) -> None:
    for day, owner in ((100, "ada"), (101, "ada"), (101, "bob")):
        store.usage_days.add({UsageKey(day, owner, "p", "m"): {"turns": 1}})
    assert store.usage_days.sums(101, ["day"], "ada") == {(101,): {"turns": 1}}
    assert store.usage_days.sums(0, ["owner"], "nobody") == {}
    assert store.usage_days.sweep(101) == 1
    assert store.usage_days.sums(0, ["day"]) == {(101,): {"turns": 2}}


def test_nothing_is_lost_when_many_add_at_once(store: Store) -> None:
    amounts = {UsageKey(100, owner, "p", "m"): {"turns": 1.0, "calls": 2.0} for owner in "abc"}
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: store.usage_days.add(amounts), range(40)))
    assert store.usage_days.sums(0, []) == {(): {"turns": 120, "calls": 240}}
