"""Three replicas under mixed load and random faults (`make test-cluster`, `make test-cluster-long`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest

from hermes.cluster.engines import EngineError

from .checks import Checks
from .cluster import Cluster, cluster_of_three
from .faults import Faults
from .load import Load, model

FAULTS = int(os.environ.get("HERMES_CLUSTER_FAULTS", "100"))
SEED = int(os.environ.get("HERMES_CLUSTER_SEED", "0")) or random.randrange(1, 1_000_000)
TIMES = bool(os.environ.get("HERMES_CLUSTER_TIMES"))
FAULTS_PER_ROUND = 5
TURNS_PER_ROUND = 9
pytestmark = pytest.mark.cluster


async def test_invariants_hold_after_every_round_of_faults(home_folder: Path) -> None:
    async with cluster_of_three(home_folder, model) as cluster:
        await _rounds(cluster)


async def _rounds(cluster: Cluster) -> None:
    chance = random.Random(SEED)
    load, checks = Load(cluster, chance), Checks(cluster)
    faults = Faults(cluster, load, chance)
    checking: asyncio.Task[None] | None = None
    for first in range(0, FAULTS, FAULTS_PER_ROUND):
        times = [time.monotonic()]
        try:
            load.begin(TURNS_PER_ROUND)
            numbers = range(first, min(first + FAULTS_PER_ROUND, FAULTS))
            async with asyncio.TaskGroup() as group:
                for number in numbers:
                    group.create_task(faults.any(number))
            times.append(time.monotonic())
            turns = await load.wait_for_end()
            times.append(time.monotonic())
            if checking is not None:
                await checking
            # While the next faults happen: whoever reads what is over must not notice them.
            checking = asyncio.create_task(checks.check(turns))
            if numbers[-1] == FAULTS - 1:
                await checking
            times.append(time.monotonic())
        except BaseException:
            print(f"HERMES_CLUSTER_SEED={SEED}", *faults.log, load.open_turns(), sep="\n")
            with contextlib.suppress(EngineError):
                print(cluster.unfinished())
            load.cancel()
            if checking is not None:
                checking.cancel()
            raise
        if TIMES:
            took = [f"{b - a:.1f}" for a, b in pairwise(times)]
            print(first, *took, *faults.log[-len(numbers) :], flush=True)
    await checks.check_all_again()
    # The faults did not keep everything from being done.
    assert checks.ends["run.completed"] > FAULTS, checks.ends
