"""Outages that last: nothing that was acknowledged is lost, health names what is away, and all recovers by itself."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from hermes.cluster.engines import Engine

from .checks import Checks
from .cluster import ENGINES, Cluster, cluster_of_three
from .faults import says
from .load import Load, model

OUTAGE_S = 30.0
TURNS = 12
pytestmark = pytest.mark.cluster


@asynccontextmanager
async def engine_away(cluster: Cluster, name: str, *, forget: bool = False) -> AsyncIterator[None]:
    engine: Engine = cluster.postgres if name == "postgresql" else cluster.nats
    await asyncio.to_thread(engine.kill)
    if forget:
        shutil.rmtree(engine.folder / "jetstream")
    try:
        await asyncio.gather(*(says(cluster, replica, name, away=True) for replica in cluster.replicas))
        yield
    finally:
        await asyncio.to_thread(engine.start)
    await asyncio.gather(*(says(cluster, replica, name, away=False) for replica in cluster.replicas))


@asynccontextmanager
async def replicas_cut_off(cluster: Cluster) -> AsyncIterator[None]:
    """One replica from each engine."""
    pairs = list(zip(cluster.replicas, ENGINES, strict=False))
    await asyncio.gather(*(replica.links[engine].set_mode("silent") for replica, engine in pairs))
    try:
        await asyncio.gather(*(says(cluster, replica, engine, away=True) for replica, engine in pairs))
        yield
    finally:
        await asyncio.gather(*(replica.links[engine].set_mode("open") for replica, engine in pairs))
    await asyncio.gather(*(says(cluster, replica, engine, away=False) for replica, engine in pairs))


@asynccontextmanager
async def slow_network(cluster: Cluster) -> AsyncIterator[None]:
    links = [link for replica in cluster.replicas for link in replica.links.values()]
    with ExitStack() as stack:
        for link in links:
            link.set_slow(slow=True)
            stack.callback(link.set_slow, slow=False)
        yield


OUTAGES: dict[str, Callable[[Cluster], AbstractAsyncContextManager[None]]] = {
    "PostgreSQL is away": lambda cluster: engine_away(cluster, "postgresql"),
    "NATS is away, and empty when it is back": lambda cluster: engine_away(cluster, "nats", forget=True),
    "replicas are cut off from an engine": replicas_cut_off,
    "the network is slow and loses packets": slow_network,
}


async def test_nothing_is_lost_in_outages_of_half_a_minute(home_folder: Path) -> None:
    async with cluster_of_three(home_folder, model) as cluster:
        load, checks = Load(cluster, random.Random(7)), Checks(cluster)
        for name, outage in OUTAGES.items():
            completed = checks.ends["run.completed"]
            try:
                load.begin(TURNS)
                async with outage(cluster):
                    load.begin(TURNS)
                    await asyncio.sleep(OUTAGE_S)
                load.begin(TURNS)
                await checks.check(await load.wait_for_end())
            except BaseException:
                print(name, load.open_turns(), sep="\n")
                load.cancel()
                raise
            assert checks.ends["run.completed"] - completed > TURNS, (name, checks.ends)
        await checks.check_all_again()
