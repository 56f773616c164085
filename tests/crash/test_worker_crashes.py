"""A worker killed during its runs: another resumes them at once, and no reader gets an event twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
from pathlib import Path

import aiohttp
import pytest

from hermes.core.home import is_served
from hermes.core.processes import is_alive
from support.gateway import CUT, SURELY_S
from support.model_server import Handler, Reply, Request
from support.waiting import until
from support.workers import Server, get, post, two_workers

from .plans import answer, stalling
from .test_viewers import Frames, read, two_answers


async def wait_for_end(client: aiohttp.ClientSession, run_id: str) -> str:
    path = f"/v1/runs/{run_id}"
    run = await until(lambda: get(client, path), lambda run: run["status"] in ("completed", "failed", "cancelled"))
    return str(run["status"])


async def whole(client: aiohttp.ClientSession, response_id: str, after: int | None = None) -> Frames:
    frames: Frames = {}
    query = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    async with asyncio.timeout(SURELY_S), client.get(f"/v1/responses/{response_id}", params=query) as response:
        assert response.status == 200
        await read(response, frames)
    return frames


async def test_viewer_of_killed_worker_continues_at_other_worker(home_folder: Path) -> None:
    async with two_workers(home_folder, two_answers()) as server:
        pid, client = await server.client()
        _, other = await server.client(other_than=pid)
        frames, elsewhere = Frames(), Frames()
        response = await post(client, "/v1/responses", {"input": "Count.", "background": True})
        path = f"/v1/responses/{response['id']}?stream=true"
        async with client.get(path) as at_owner, other.get(path) as at_other:
            await read(at_owner, frames, 4)
            await read(at_other, elsewhere, 3)
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(*CUT):
                await read(at_owner, frames)
            await read(at_other, elsewhere)
        rest = await whole(other, response["id"], max(frames))
        assert not set(frames) & set(rest)
        assert frames | rest == elsewhere == await whole(other, response["id"])
        assert sorted(elsewhere) == list(range(len(elsewhere)))
        path = f"/v1/responses/{response['id']}"
        await until(lambda: get(other, path), lambda response: response["status"] == "completed")


async def test_runs_of_killed_worker_are_resumed_once(home_folder: Path) -> None:
    names = [f"n{at}" for at in range(6)]
    handler = stalling(*((name, 1, 300) for name in names))
    async with two_workers(home_folder, handler) as server:
        pid, client = await server.client()
        other_pid, other = await server.client(other_than=pid)
        runs = [(await post(client, "/v1/runs", {"input": f"Turn {name}: c."}, 202))["run_id"] for name in names]
        await until(lambda: len(server.model.requests) == 2 * len(names))
        os.kill(pid, signal.SIGKILL)
        assert [await wait_for_end(other, run_id) for run_id in runs] == ["completed"] * len(names)
        effects = (home_folder / "workspace" / "effects.txt").read_text().split()
        assert sorted(effects) == sorted(f"call-{name}-0-0" for name in names)
        for run_id in runs:
            async with other.get(f"/v1/runs/{run_id}/events") as response:
                data = await response.read()
            assert data.count(b'"event": "run.completed"') == 1
        await until(lambda: len(server.pids) == 2 and pid not in server.pids)
        _, again = await server.client(other_than=other_pid)
        assert (await get(again, f"/v1/runs/{runs[0]}"))["status"] == "completed"


async def test_workers_end_with_parent_and_next_server_resumes(home_folder: Path) -> None:
    async with two_workers(home_folder, stalling(("one", 1, 300))) as server:
        client = await server.any()
        run_id = (await post(client, "/v1/runs", {"input": "Turn one: c."}, 202))["run_id"]
        await until(lambda: len(server.model.requests) == 2)
        pids = server.pids
        await server.gateway.end()
        await until(lambda: not any(is_alive(pid, None) for pid in pids))
        assert not is_served(server.home)
        await server.gateway.start()
        assert await wait_for_end(await server.any(), run_id) == "completed"


def holders(server: Server) -> list[int]:
    """The processes that hold sessions."""
    with contextlib.closing(sqlite3.connect(server.home.state_db)) as db:
        rows = db.execute("SELECT holder FROM leases WHERE name LIKE 'session:%'").fetchall()
    return [int(holder.split(":")[1]) for (holder,) in rows]


async def test_runs_of_killed_worker_are_resumed_by_survivor(home_folder: Path) -> None:
    async with two_workers(home_folder, hanging()) as server:
        pid, client = await server.client()
        other_pid, _ = await server.client(other_than=pid)
        for _ in range(3):
            await post(client, "/v1/runs", {"input": "Hello."}, 202)
        await until(lambda: len(server.model.requests) == 3)
        assert holders(server) == [pid] * 3
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(server.model.requests) == 6)
        assert holders(server) == [other_pid] * 3


def hanging() -> Handler:
    """A model that never answers."""

    def reply(_: Request) -> Reply:
        return Reply(text="Hi.", stall_at=1)

    return reply


@pytest.mark.long
async def test_all_workers_drain(home_folder: Path) -> None:
    server_settings = {"drain_seconds": 0}
    async with two_workers(home_folder, hanging(), api_server=server_settings) as server:
        runs = [(await post(client, "/v1/runs", {"input": "Hello."}, 202))["run_id"] for client in await server.both()]
        await until(lambda: len(server.model.requests) == 2)
        assert await server.gateway.end(signal.SIGTERM) == 0
        await server.gateway.start()
        client = await server.any()
        await until(lambda: len(server.model.requests) == 4)
        for run_id in runs:
            assert (await get(client, f"/v1/runs/{run_id}"))["status"] == "running"


@pytest.mark.long
async def test_crashing_worker_restart_backoff(home_folder: Path) -> None:
    async with two_workers(home_folder, answer) as server:
        for _ in range(3):
            pid, _ = await server.client()
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: len(server.pids) == 2 and pid not in server.pids)  # type: ignore[misc]
        await server.both()
        assert server.gateway.stderr_text.count("has ended with -9") == 3
