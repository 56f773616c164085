"""A replica that stalls for longer than its leases last: others take its runs over, and it writes nothing when it wakes."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from crash.plans import Plan, stalling
from support.waiting import until

from .checks import Checks
from .cluster import Cluster, Replica, cluster_of_three
from .load import Load, Turn

TAKEN_OVER_S = 100.0
RUNS = 6
pytestmark = pytest.mark.cluster


def runs_of(cluster: Cluster, replica: Replica) -> list[str]:
    """The runs that a replica carries out."""
    rows = cluster.query(f"SELECT run_id FROM runs WHERE ended_at IS NULL AND holder LIKE '%:{replica.pid}:%'")
    return rows.split()


async def has_ended(cluster: Cluster, run_id: str, at: int) -> None:
    async def status() -> str:
        answer = await cluster.ask("GET", f"/v1/runs/{run_id}", at=at, only=True)
        return str(json.loads(answer.body)["status"])

    await until(status, lambda status: status == "completed", seconds=TAKEN_OVER_S)


@pytest.mark.parametrize("stalled_s", [36.0, pytest.param(60.0, marks=pytest.mark.long)])
async def test_stalled_replica_is_replaced_and_writes_nothing(home_folder: Path, stalled_s: float) -> None:
    plans = [Plan(f"n{number}", ("c",)) for number in range(RUNS)]
    # Every run is in the middle of its second message; asked again, the model answers.
    async with cluster_of_three(home_folder, stalling(*((plan.name, 1, 300) for plan in plans))) as cluster:
        load, checks = Load(cluster), Checks(cluster)
        for plan in plans:
            load.add(Turn(plan, "run", key=plan.name))
        await until(lambda: len(cluster.model.requests) >= 2 * RUNS, seconds=TAKEN_OVER_S)
        runs = [runs_of(cluster, replica) for replica in cluster.replicas]
        stalled = max(range(len(runs)), key=lambda at: len(runs[at]))
        assert runs[stalled], runs
        # Those of the others wait for ever: their model does not answer again.
        cluster.replicas[stalled].stall()
        started_at = time.monotonic()
        async with asyncio.timeout(TAKEN_OVER_S):
            for run_id in runs[stalled]:
                await has_ended(cluster, run_id, stalled + 1)
        await asyncio.sleep(max(0.0, started_at + stalled_s - time.monotonic()))
        logs = [await checks.log(run_id, stalled + 1) for run_id in runs[stalled]]
        cluster.replicas[stalled].go_on()
        assert logs == [await checks.log(run_id, stalled) for run_id in runs[stalled]]
        for at, replica in enumerate(cluster.replicas):
            if at != stalled and runs[at]:
                await replica.kill()
                await replica.start()
        await checks.check(await load.wait_for_end())
        await checks.check_all_again()
        assert checks.ends == {"run.completed": RUNS}
