"""A replica that is killed, or stopped for a while, in the middle of its runs: another takes them over, and what readers
were shown stays what it was."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from support.gateway import CUT
from support.model_server import Handler, Reply, Request
from support.replicas import Replicas, two_replicas
from support.waiting import DEADLINE_S, until
from support.workers import get, post

from .plans import stalling
from .test_viewers import Frames, read, two_answers
from .test_worker_crashes import wait_for_end, whole


def holder_pids(server: Replicas) -> list[int]:
    """The processes that hold sessions."""
    with contextlib.closing(sqlite3.connect(server.home.state_db)) as db:
        holders = db.execute("SELECT holder FROM leases WHERE name LIKE 'session:%' AND until > ?", (time.time(),))
        return [int(holder.split(":")[1]) for (holder,) in holders]


def endless_answer() -> Handler:
    """A model that talks for a minute and, asked again, is brief."""
    replies = [Reply(text=[f"Word {n}. " for n in range(1200)], gap_s=0.05)]

    def reply(_: Request) -> Reply:
        return replies.pop() if replies else Reply(text=[f"Another {n}. " for n in range(8)])

    return reply


async def test_viewer_of_killed_replica_continues_at_other(home_folder: Path) -> None:
    async with two_replicas(home_folder, two_answers()) as server:
        _, starter = await server.client()
        response = await post(starter, "/v1/responses", {"input": "Count.", "background": True})
        path = f"/v1/responses/{response['id']}?stream=true"
        await until(lambda: len(server.model.requests) == 1)
        [pid] = holder_pids(server)
        _, client = await server.client(pid)
        _, other = await server.client(other_than=pid)
        frames, elsewhere = Frames(), Frames()
        async with client.get(path) as at_owner, other.get(path) as at_other:
            await read(at_owner, frames, 4)
            await read(at_other, elsewhere, 3)
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(*CUT):
                await read(at_owner, frames)
            await asyncio.wait_for(read(at_other, elsewhere), DEADLINE_S)
        rest = await whole(other, response["id"], max(frames))
        assert not set(frames) & set(rest)
        assert frames | rest == elsewhere == await whole(other, response["id"])
        assert sorted(elsewhere) == list(range(len(elsewhere)))


async def test_viewers_of_stopped_replica_continue_when_it_is_replaced(home_folder: Path) -> None:
    async with two_replicas(home_folder, endless_answer()) as server:
        _, starter = await server.client()
        response = await post(starter, "/v1/responses", {"input": "Count.", "background": True})
        path = f"/v1/responses/{response['id']}?stream=true"
        await until(lambda: len(server.model.requests) == 1)
        [pid] = holder_pids(server)
        _, client = await server.client(pid)
        _, other = await server.client(other_than=pid)
        frames, elsewhere = Frames(), Frames()
        async with client.get(path) as at_owner, other.get(path) as at_other:
            await read(at_owner, frames, 4)
            await read(at_other, elsewhere, 3)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.wait_for(read(at_other, elsewhere), DEADLINE_S)
            os.kill(pid, signal.SIGCONT)
            # What it has been sent meanwhile, it does not show: others have gone on.
            await asyncio.wait_for(read(at_owner, frames), DEADLINE_S)
        assert frames == elsewhere == await whole(other, response["id"])
        assert sorted(elsewhere) == list(range(len(elsewhere)))


async def test_runs_of_killed_replica_are_resumed_once(home_folder: Path) -> None:
    names = [f"n{at}" for at in range(6)]
    handler = stalling(*((name, 1, 300) for name in names))
    async with two_replicas(home_folder, handler) as server:
        await server.gateways[1].end(signal.SIGTERM)  # so that the first has them all
        pid, client = await server.client()
        runs = [(await post(client, "/v1/runs", {"input": f"Turn {name}: c."}, 202))["run_id"] for name in names]
        await until(lambda: len(server.model.requests) == 2 * len(names))
        await server.gateways[1].start()
        _, other = await server.client(other_than=pid)
        os.kill(pid, signal.SIGKILL)
        assert [await wait_for_end(other, run_id) for run_id in runs] == ["completed"] * len(names)
        effects = (home_folder / "workspace" / "effects.txt").read_text().split()
        assert sorted(effects) == sorted(f"call-{name}-0-0" for name in names)
        for run_id in runs:
            async with other.get(f"/v1/runs/{run_id}/events") as response:
                data = await response.read()
            assert data.count(b'"event": "run.completed"') == 1


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
async def test_tool_of_replaced_replica_is_not_repeated(home_folder: Path, number: int) -> None:
    async with two_replicas(home_folder, stalling(("one", 1, 300))) as server:
        pid, client = await server.client()
        run_id = (await post(client, "/v1/runs", {"input": "Turn one: c."}, 202))["run_id"]
        await until(lambda: len(server.model.requests) == 2)
        [pid] = holder_pids(server)
        _, other = await server.client(other_than=pid)
        os.kill(pid, number)
        assert await wait_for_end(other, run_id) == "completed"
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
            _, back = await server.client(pid)
            assert (await get(back, f"/v1/runs/{run_id}"))["status"] == "completed"
        assert (home_folder / "workspace" / "effects.txt").read_text().split() == ["call-one-0-0"]
