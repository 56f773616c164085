"""What owners may have at once and use in a minute: granted one after the other, whoever asks."""

from __future__ import annotations

import asyncio

import pytest

from hermes.core.events import Event
from hermes.core.spec import RunSpec
from hermes.store.base import NoPlace
from hermes.store.owner_limits import OwnerBounds, Use
from hermes.store.stores import Async, Store

TTL_S = 30.0


async def use_limits(
    store: Store, bounds: OwnerBounds, *uses: Use, owner: str = "alice", ttl: float = TTL_S
) -> list[bool]:
    outcomes = await Async(store).owner_limits.use(owner, bounds, uses, ttl)
    return [outcome.granted for outcome in outcomes]


async def test_places_are_as_many_as_owner_may_have(store: Store) -> None:
    bounds = OwnerBounds(turns=3)
    answers = await asyncio.gather(*(use_limits(store, bounds, Use(takes_place=f"r{at}")) for at in range(12)))
    assert sum(granted for (granted,) in answers) == 3
    assert await use_limits(store, bounds, Use(takes_place="b"), owner="bob") == [True]
    assert await use_limits(store, OwnerBounds(), Use(takes_place="more")) == [True]


async def test_place_is_free_again_for_next_in_same_batch(store: Store) -> None:
    bounds = OwnerBounds(turns=1)
    uses = [
        Use(takes_place="a"),
        Use(takes_place="b"),
        Use(frees_place="a"),
        Use(takes_place="c"),
        Use(frees_place="c"),
    ]
    assert await use_limits(store, bounds, *uses) == [True, False, True, True, True]
    assert await use_limits(store, bounds, Use(takes_place="d")) == [True]


async def test_run_with_place_counts_once_and_as_long_as_it_has_no_end(store: Store) -> None:
    bounds, runs = OwnerBounds(turns=2), Async(store).runs
    spec = RunSpec("hi", session_id="s", owner="alice")
    assert await use_limits(store, bounds, Use(takes_place=spec.run_id)) == [True]
    await runs.create(spec)
    assert await use_limits(store, bounds, Use(takes_place="a"), Use(takes_place="b")) == [True, False]
    # What it has on record counts, wherever it goes on.
    assert await use_limits(store, bounds, Use(frees_place=spec.run_id), Use(takes_place="c")) == [True, False]
    submitted = RunSpec("hi", session_id="s2", owner="alice")
    event = Event(submitted.run_id, "run.queued", 0, {"session_id": "s2", "position": 0}, 1, 1.0)
    with pytest.raises(NoPlace):
        await runs.append(submitted.run_id, None, [event], creates=submitted, owner_max=2)


async def test_place_that_is_not_renewed_runs_out(store: Store) -> None:
    bounds, limits = OwnerBounds(turns=2), Async(store).owner_limits
    assert await use_limits(store, bounds, Use(takes_place="a"), Use(takes_place="b"), ttl=-1.0) == [True, True]
    await limits.renew_places([("alice", "a"), ("alice", "freed before")], TTL_S)
    assert await use_limits(store, bounds, Use(takes_place="c"), Use(takes_place="d")) == [True, False]


async def test_rates_are_consumed_in_order_and_may_go_below_zero(store: Store) -> None:
    bounds = OwnerBounds(requests=4, tokens=100)
    uses = [Use(requests=1, needs_tokens=True)] * 3
    answers = await asyncio.gather(*(use_limits(store, bounds, *uses) for _ in range(3)))
    assert sum(sum(granted) for granted in answers) == 4
    assert await use_limits(store, OwnerBounds(tokens=100), Use(tokens=1_000), Use(needs_tokens=True)) == [True, False]
    assert await use_limits(store, OwnerBounds(tokens=100), Use(requests=1)) == [True]


async def test_rate_limit_reports_remaining(store: Store) -> None:
    outcomes = await Async(store).owner_limits.use("alice", OwnerBounds(0, 60, 0), [Use(requests=1)] * 2, TTL_S)
    assert [outcome.left for outcome in outcomes] == [{"requests": 59.0}, {"requests": 58.0}]
