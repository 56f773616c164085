"""Replicas of one home over NATS: who carries submitted runs out, and what goes on while NATS is away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from crash.plans import answer
from support.gateway import SURELY_S, Gateway
from support.model_server import Reply
from support.ports import refusing_port
from support.replicas import Replicas, two_replicas
from support.waiting import until
from support.workers import Json, get, post

from .test_workers import has_seen, has_status, stream, submitted


def carriers(server: Replicas) -> Counter[int]:
    """How many runs each process has carried out, or is carrying out."""
    with contextlib.closing(sqlite3.connect(server.home.state_db, timeout=SURELY_S)) as db:
        holders = db.execute("SELECT holder FROM runs WHERE started_at IS NOT NULL").fetchall()
    return Counter(int(holder.split(":")[1]) for (holder,) in holders)


def waiting(server: Replicas) -> int:
    with contextlib.closing(sqlite3.connect(server.home.state_db, timeout=SURELY_S)) as db:
        count: int = db.execute("SELECT count(*) FROM runs WHERE started_at IS NULL AND ended_at IS NULL").fetchone()[0]
        return count


async def test_submitted_runs_are_spread_and_bounded(home_folder: Path) -> None:
    async with two_replicas(home_folder, answer, bus={"max_inflight": 2}) as server:
        first, other = await server.both()
        runs = [await submitted(first, f"n{at}: w") for at in range(6)]
        await until(lambda: sum(carriers(server).values()) == 4)
        assert carriers(server) == dict.fromkeys(server.pids, 2) and waiting(server) == 2
        await until((home_folder / "workspace" / "effects.txt").exists)
        server.go()
        for run_id in runs:
            await has_status(other, run_id, "completed")
        assert sum(carriers(server).values()) == 6


async def test_queued_runs_of_one_session_are_carried_out_in_order(home_folder: Path) -> None:
    async with two_replicas(home_folder, answer) as server:
        first, other = await server.both()
        await post(first, "/api/sessions", {"id": "s"}, 201)
        runs = []
        for at in range(4):
            body = {"input": f"Turn n{at}: c.", "session_id": "s"}
            runs.append((await post((first, other)[at % 2], "/v1/runs", body, 202))["run_id"])
        for run_id in runs:
            await has_status(other, run_id, "completed")
        effects = (home_folder / "workspace" / "effects.txt").read_text().split()
        assert effects == [f"call-n{at}-0-0" for at in range(4)]


KEYS = {"alice": "q7Zr-4fJ0_pW2xLs9TnB6vYc1HdK8mGa", "bob": "k3Xw-9dN5_tR7yMf2QsV4hLz8JbP6cGe"}


async def test_queue_is_fair_between_owners(home_folder: Path) -> None:
    keys = [{"name": name, "key": key, "scopes": ["runs"]} for name, key in KEYS.items()]
    settings = {"bus": {"max_inflight": 1}, "api_server": {"keys": keys}}
    async with two_replicas(home_folder, answer, **settings) as server:
        first, other = await server.both()

        async def submit(name: str, plan: str) -> str:
            headers = {"Authorization": f"Bearer {KEYS[name]}"}
            async with first.post("/v1/runs", json={"input": f"Turn {plan}."}, headers=headers) as response:
                assert response.status == 202
                return str((await response.json())["run_id"])

        runs = [("alice", await submit("alice", f"a{at}: w")) for at in range(5)]
        await until(lambda: sum(carriers(server).values()) == 2)
        runs += [("bob", await submit("bob", f"b{at}: c")) for at in range(2)]
        scopes = home_folder / "workspace" / "scopes"
        await until(lambda: len(list(scopes.glob("*/effects.txt"))) == 1)
        for folder in scopes.iterdir():
            (folder / "go").touch()
        for name, run_id in runs:
            headers = {"Authorization": f"Bearer {KEYS[name]}"}

            async def status(run_id: str = run_id, headers: Json = headers) -> str:
                async with other.get(f"/v1/runs/{run_id}", headers=headers) as response:
                    return str((await response.json())["status"])

            assert await until(status, lambda value: value not in ("queued", "running")) == "completed"
            # What is another owner's is unknown, whichever replica carries it out.
            headers = {"Authorization": f"Bearer {KEYS['bob' if name == 'alice' else 'alice']}"}
            async with other.get(f"/v1/runs/{run_id}", headers=headers) as response:
                assert response.status == 404
        with contextlib.closing(sqlite3.connect(server.home.state_db, timeout=SURELY_S)) as db:
            owners = [owner for (owner,) in db.execute("SELECT owner FROM runs ORDER BY started_at")]
        # The first of the second owner came last, and was the next to be carried out.
        assert owners[:3] == ["alice", "alice", "bob"] and owners[-1] == "alice"


async def test_owner_run_limit_applies_across_replicas(home_folder: Path) -> None:
    keys = [{"name": name, "key": key, "scopes": ["runs"], "max_concurrent": 3} for name, key in KEYS.items()]
    async with two_replicas(home_folder, answer, api_server={"keys": keys}) as server:
        clients = await server.both()

        async def submit(at: int) -> int:
            headers = {"Authorization": f"Bearer {KEYS['alice']}"}
            _, client = await server.client(other_than=[*server.pids][at % 2])
            async with client.post("/v1/runs", json={"input": f"Turn n{at}: w."}, headers=headers) as response:
                if response.status == 429:
                    assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
                return response.status

        counts = Counter(await asyncio.gather(*(submit(at) for at in range(12))))
        assert counts == {202: 3, 429: 9}
        headers = {"Authorization": f"Bearer {KEYS['bob']}"}
        async with clients[0].post("/v1/runs", json={"input": "Turn b: c."}, headers=headers) as response:
            assert response.status == 202


async def test_queued_run_is_stopped_through_any_replica(home_folder: Path) -> None:
    async with two_replicas(home_folder, answer, bus={"max_inflight": 1}) as server:
        first, other = await server.both()
        for at in range(2):
            await submitted(first, f"n{at}: w")
        await until(lambda: sum(carriers(server).values()) == 2)
        run_id = await submitted(first, "late: c")
        assert (await get(other, f"/v1/runs/{run_id}"))["status"] == "queued"
        await post(other, f"/v1/runs/{run_id}/stop", {})
        await has_status(first, run_id, "cancelled")
        assert b"run.cancelled" in await stream(other, f"/v1/runs/{run_id}/events")


async def test_queued_run_fails_after_its_waiting_time(home_folder: Path) -> None:
    # Long enough for the first two to be taken before it is over.
    settings = {"bus": {"max_inflight": 1}, "api_server": {"run_queue_seconds": 10}}
    async with two_replicas(home_folder, answer, **settings) as server:
        first, other = await server.both()
        for at in range(2):
            await submitted(first, f"n{at}: w")
        await until(lambda: sum(carriers(server).values()) == 2)
        run_id = await submitted(first, "late: c")
        await has_status(other, run_id, "failed")
        assert b"session_busy" in await stream(other, f"/v1/runs/{run_id}/events")


async def readiness(client: aiohttp.ClientSession, wanted: str) -> Json:
    async def look() -> Json:
        return dict((await get(client, "/health/detailed"))["readiness"])

    return await until(look, lambda readiness: readiness["checks"]["bus"]["status"] == wanted)


async def test_replicas_go_on_while_nats_is_away(home_folder: Path) -> None:
    async with two_replicas(home_folder, answer) as server:
        first, other = await server.both()
        assert (await readiness(first, "ok"))["checks"]["bus"]["kind"] == "nats"
        running = await submitted(first, "one: w/c")
        await until((home_folder / "workspace" / "effects.txt").exists)
        _, readers = await server.client()
        async with readers.get(f"/v1/runs/{running}/events") as at_one:
            await has_seen(at_one, b"tool.started")
            server.nats.stop(forget=True)
            bus = (await readiness(other, "degraded"))["checks"]["bus"]
            assert bus["kind"] == "nats" and "out of reach" in bus["error"]
            late = await submitted(other, "two: w")
            await until(lambda: sum(carriers(server).values()) == 2)
            stopped = await submitted(other, "three: w")
            await until(lambda: sum(carriers(server).values()) == 3)
            await post(first, f"/v1/runs/{stopped}/stop", {})
            await has_status(first, stopped, "cancelled")
            server.go()
            await has_seen(at_one, b"run.completed")
        for client in (first, other):
            await has_status(client, late, "completed")
            assert await stream(client, f"/v1/runs/{running}/events") == await stream(
                first, f"/v1/runs/{running}/events"
            )
        server.nats.start()
        for client in (first, other):
            await readiness(client, "ok")
        again = await submitted(first, "four: c")
        assert b"run.completed" in await stream(other, f"/v1/runs/{again}/events")


async def follow(client: aiohttp.ClientSession, path: str, text: bytearray) -> None:
    async with asyncio.timeout(SURELY_S), client.get(path) as response:
        async for data in response.content.iter_any():
            text += data


async def test_viewers_see_same_bytes_across_nats_restart(home_folder: Path) -> None:
    words = Reply(text=[f"Word {n}. " for n in range(60)], gap_s=0.05)
    async with two_replicas(home_folder, lambda _: words) as server:
        first, other = await server.both()
        run_id = (await post(first, "/v1/runs", {"input": "Count."}, 202))["run_id"]
        path = f"/v1/runs/{run_id}/events"
        texts = bytearray(), bytearray()
        reading = [asyncio.ensure_future(follow(*at)) for at in zip((first, other), (path, path), texts, strict=True)]
        await until(lambda: all(text.count(b"Word ") >= 5 for text in texts))
        server.nats.stop(forget=True)
        [request] = server.model.requests
        sent = request.sent
        await until(lambda: request.sent > 2 * sent or not server.model.open_streams)
        server.nats.start()
        await asyncio.gather(*reading)
        at_one, at_other = (bytes(text).replace(b": keepalive\n\n", b"") for text in texts)
        assert at_one == at_other == await stream(other, path)
        assert at_one.count(b"Word ") >= 60 and b"run.completed" in at_one


REFUSED: list[tuple[str, Json, int, str]] = [
    ("no address", {"url": "natz://somewhere"}, 78, "bus.url"),
    ("a namespace with dots", {"url": "nats://127.0.0.1:1", "namespace": "a.b"}, 78, "bus.namespace"),
    ("nobody there", {"url": "nats://u:hunter2@127.0.0.1:{port}"}, 69, "out of reach"),
]


@pytest.mark.parametrize(("_", "bus", "code", "message"), REFUSED)
async def test_unusable_bus_is_reported_at_start(home_folder: Path, _: str, bus: Json, code: int, message: str) -> None:
    with refusing_port() as port:
        gateway = Gateway(home_folder, bus={**bus, "url": bus["url"].replace("{port}", str(port))})
        with pytest.raises(AssertionError, match=message):
            await gateway.start()
    assert await gateway.wait_for_exit() == code
    assert "hunter2" not in gateway.stderr_text and "Traceback" not in gateway.stderr_text
    # A server with a bus has a state file of its own, which goes with it.
    if (state_file := home_folder / "gateway_state.json").exists():
        state = json.loads(state_file.read_text())
        assert state["gateway_state"] == "startup_failed" and "hunter2" not in json.dumps(state)
    assert not any("hunter2" in path.read_text() for path in (home_folder / "logs").glob("*.log"))
