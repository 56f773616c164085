"""A server of two workers: real processes on one port and one home, which a client cannot tell from one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from crash.plans import answer
from hermes.core.home import Home, is_served
from hermes.core.processes import is_alive
from hermes.server.status import read_runtime_status
from support.gateway import SURELY_S, Gateway
from support.model_server import Call, Reply
from support.replicas import two_replicas
from support.waiting import until
from support.workers import Json, get, post, two_workers

from .test_supervisor import Manager, manager  # noqa: F401  (a fixture)

Start = Any


@pytest.fixture(params=[two_workers, two_replicas], ids=["workers", "replicas"])
def start(request: pytest.FixtureRequest) -> Start:
    """What starts two processes that a client cannot tell from one: workers of a server, or replicas over NATS."""
    return request.param


async def submitted(client: aiohttp.ClientSession, plan: str) -> str:
    """The id of a run that this client's worker has."""
    return str((await post(client, "/v1/runs", {"input": f"Turn {plan}."}, 202))["run_id"])


async def stream(client: aiohttp.ClientSession, path: str) -> bytes:
    """All bytes of a stream, without keepalives."""
    async with asyncio.timeout(SURELY_S), client.get(path) as response:
        assert response.status == 200, await response.text()
        return (await response.read()).replace(b": keepalive\n\n", b"")


async def has_seen(response: aiohttp.ClientResponse, event: bytes) -> None:
    async with asyncio.timeout(SURELY_S):
        while event not in (line := await response.content.readline()):
            assert line, f"the stream has ended without {event!r}"


async def has_status(client: aiohttp.ClientSession, run_id: str, *wanted: str) -> Json:
    return await until(lambda: get(client, f"/v1/runs/{run_id}"), lambda run: run["status"] in wanted)


async def test_both_workers_serve(home_folder: Path) -> None:
    async with two_workers(home_folder, answer) as server:
        await server.both()
        state = read_runtime_status(server.home)
        assert state is not None and state["pid"] == server.gateway.process.pid and state["gateway_state"] == "running"
        assert len(server.pids) == 2 and server.gateway.process.pid not in server.pids
        env = {**os.environ, "HERMES_HOME": str(home_folder)}
        command = (sys.executable, "-m", "hermes", "gateway")
        process = await asyncio.create_subprocess_exec(
            *command, "status", "--json", env=env, stdout=asyncio.subprocess.PIPE
        )
        payload = json.loads((await process.communicate())[0])
        assert payload["pid"] == server.gateway.process.pid and payload["address"] == server.gateway.url
        pids = server.pids
        stopped = await asyncio.create_subprocess_exec(*command, "stop", env=env)
        assert await stopped.wait() == 0 and await server.gateway.wait_for_exit() == 0
        assert not any(is_alive(pid, None) for pid in pids) and not is_served(server.home)
        assert not list(server.home.run_folder.glob("peer-*"))


async def test_worker_sockets_are_private(home_folder: Path) -> None:
    async with two_workers(home_folder, answer) as server:
        sockets = list(server.home.run_folder.glob("peer-*.sock"))
        assert len(sockets) == 2
        assert {stat.S_IMODE(sock.stat().st_mode) for sock in sockets} == {0o600}
        assert stat.S_IMODE(server.home.run_folder.stat().st_mode) == 0o700


async def test_events_are_same_at_other_worker(start: Start, home_folder: Path) -> None:
    async with start(home_folder, answer) as server:
        pid, client = await server.client()
        run_id = await submitted(client, "one: c/w")
        _, reader = await server.client(pid)
        _, other = await server.client(other_than=pid)
        path = f"/v1/runs/{run_id}/events"
        reading = [asyncio.ensure_future(stream(client, path)) for client in (reader, other)]
        await has_status(client, run_id, "running")
        await until(lambda: len(server.model.requests) == 2)
        server.go()
        at_owner, at_other = await asyncio.gather(*reading)
        assert at_owner == at_other and b"run.completed" in at_owner
        frames = at_owner.split(b"\n\n")
        for at in (3, len(frames) // 2):
            seq = frames[at].split(b"id: ")[1].split(b"\n")[0].decode()
            assert await stream(other, f"{path}?starting_after={seq}") == b"\n\n".join(frames[at + 1 :])


async def test_response_is_same_at_other_worker(start: Start, home_folder: Path) -> None:
    async with start(home_folder, answer) as server:
        pid, client = await server.client()
        body = {"input": "Turn one: c/w.", "background": True}
        response_id = (await post(client, "/v1/responses", body))["id"]
        _, reader = await server.client(pid)
        path = f"/v1/responses/{response_id}?stream=true"
        reading = [asyncio.ensure_future(stream(reader, path))]
        for after in ("", "&starting_after=0", "&starting_after=4"):
            _, other = await server.client(other_than=pid)
            reading.append(asyncio.ensure_future(stream(other, path + after)))
        await until(lambda: len(server.model.requests) == 2)
        server.go()
        at_owner, whole, *rest = await asyncio.gather(*reading)
        assert at_owner == whole and b"response.completed" in whole
        frames = whole.split(b"\n\n")
        assert rest == [b"\n\n".join(frames[1:]), b"\n\n".join(frames[5:])]


async def test_run_control_through_other_worker(start: Start, home_folder: Path) -> None:
    async with start(home_folder, answer) as server:
        first, other = await server.both()
        run_id = await submitted(first, "ask: a/q/w")
        approval = (await has_status(other, run_id, "waiting_for_approval"))["pending_approvals"][0]["approval_id"]
        decision = {"choice": "once", "approval_id": approval}
        assert (await post(other, f"/v1/runs/{run_id}/approval", decision))["resolved"] == 1
        await has_status(other, run_id, "waiting_for_input")
        await post(other, f"/v1/runs/{run_id}/approval", decision, 409)
        await post(other, f"/v1/runs/{run_id}/clarify", {"answer": "The red one."})
        await until(lambda: "The red one." in str(server.model.requests[-1].body))
        await until(lambda: "call-ask-2-0" in (home_folder / "workspace" / "effects.txt").read_text())
        await post(other, f"/v1/runs/{run_id}/steer", {"text": "Be brief."}, 202)
        assert (await post(other, f"/v1/runs/{run_id}/stop", {}))["status"] == "stopping"
        # What the owner has recorded when the other answers is there for everybody.
        assert (await get(first, f"/v1/runs/{run_id}"))["status"] in ("stopping", "cancelled")
        await has_status(other, run_id, "cancelled")
        events = [
            json.loads(line[6:])
            for line in (await stream(other, f"/v1/runs/{run_id}/events")).splitlines()
            if line.startswith(b"data: {")
        ]
        assert [event["event"] for event in events].count("run.cancelled") == 1


async def test_response_cancel_through_other_worker(start: Start, home_folder: Path) -> None:
    async with start(home_folder, answer) as server:
        first, other = await server.both()
        response = await post(first, "/v1/responses", {"input": "Turn one: w.", "background": True})
        await until((home_folder / "workspace" / "effects.txt").exists)
        cancelled = await post(other, f"/v1/responses/{response['id']}/cancel", {})
        assert cancelled["status"] == "cancelled"
        assert (await get(first, f"/v1/responses/{response['id']}"))["status"] == "cancelled"


async def test_mcp_request_is_cancelled_through_other_worker(start: Start, home_folder: Path) -> None:
    pytest.importorskip("mcp")
    info = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    async with start(home_folder, answer) as server:
        one, other = await server.both()
        async with one.post("/mcp", json=_rpc("initialize", info, id=0)) as response:
            session = {"Mcp-Session-Id": response.headers["Mcp-Session-Id"]}
        ask = {"name": "ask", "arguments": {"message": "Turn one: w."}}

        async def asked() -> Json:
            async with one.post("/mcp", json=_rpc("tools/call", ask, id=1), headers=session) as response:
                lines = (await response.text()).splitlines()  # JSON, or a stream whose last event is the answer
            found: Json = json.loads(next(line for line in reversed(lines) if "{" in line).removeprefix("data: "))
            return found

        asking = asyncio.ensure_future(asked())
        await until(lambda: server.model.requests)
        cancelled = _rpc("notifications/cancelled", {"requestId": 1})
        async with other.post("/mcp", json=cancelled, headers=session) as response:
            assert response.status == 202
        async with asyncio.timeout(SURELY_S):
            assert (await asking)["error"]["code"] == -32800
        [run] = (await get(other, "/v1/runs"))["data"]
        await has_status(other, run["run_id"], "cancelled")


def _rpc(method: str, params: Json, **fields: Any) -> Json:
    return {"jsonrpc": "2.0", "method": method, "params": params, **fields}


async def test_unstored_run_is_known_at_other_worker(start: Start, home_folder: Path) -> None:
    async with start(home_folder, answer) as server:
        pid, client = await server.client()
        other_pid, other = await server.client(other_than=pid)
        body = {"messages": [{"role": "user", "content": "Turn one: w."}], "store": False, "stream": True}
        async with client.post("/v1/chat/completions", json=body) as response:
            run_id = response.headers["X-Hermes-Run-Id"]
            await until((home_folder / "workspace" / "effects.txt").exists)
            assert (await get(other, f"/v1/runs/{run_id}"))["status"] == "running"
            _, reader = await server.client(other_pid)
            async with reader.get(f"/v1/runs/{run_id}/events") as events:
                await has_seen(events, b"tool.started")
                assert (await post(other, f"/v1/runs/{run_id}/stop", {}))["status"] == "stopping"
                await has_seen(events, b"run.cancelled")
            await response.read()


async def test_client_tool_outputs_at_other_worker(start: Start, home_folder: Path) -> None:
    script = [Reply(tool_calls=[Call("weather", {"city": "Oslo"}, id="call-1")]), Reply(text="Rain.")]
    async with start(home_folder, lambda _: script.pop(0)) as server:
        one, other = await server.both()
        tools = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}]
        first = await post(one, "/v1/responses", {"input": "Weather?", "tools": tools})
        [call] = [item for item in first["output"] if item["type"] == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}]
        body = {"input": outputs, "previous_response_id": first["id"], "tools": tools}
        assert "Rain." in json.dumps(await post(other, "/v1/responses", body))


async def test_job_runs_once_with_two_workers(start: Start, home_folder: Path) -> None:
    async with start(home_folder, answer, cron={"enabled": True}) as server:
        first, other = await server.both()
        at = datetime.fromtimestamp(time.time() + 2, UTC).isoformat()
        job = (await post(first, "/api/jobs", {"name": "j", "prompt": "Turn job: c.", "schedule": at}, 201))["job"]
        assert job["next_run_at"] is not None, job
        path = f"/api/jobs/{job['id']}"
        job = (await until(lambda: get(other, path), lambda body: body["job"]["last_status"] not in (None, "running")))[
            "job"
        ]
        assert job["last_status"] == "completed", job
        assert len((await get(other, f"{path}/runs"))["data"]) == 1
        assert (home_folder / "workspace" / "effects.txt").read_text().split() == ["call-job-0-0"]


WAYS = {
    "a plain answer": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Turn one: w."}]}),
    "a stream": ("/v1/responses", {"input": "Turn one: w.", "stream": True}),
    "a run": ("/v1/runs", {"input": "Turn one: w."}),
}


@pytest.mark.parametrize("way", WAYS)
async def test_idempotency_key_is_shared_by_workers(start: Start, home_folder: Path, way: str) -> None:
    path, body = WAYS[way]
    async with start(home_folder, answer) as server:

        async def ask(client: aiohttp.ClientSession) -> tuple[int, str, bytes]:
            async with client.post(path, json=body, headers={"Idempotency-Key": "k"}) as response:
                return response.status, response.headers["X-Hermes-Run-Id"], await response.read()

        tasks = [asyncio.ensure_future(ask(client)) for client in await server.both()]
        effects = home_folder / "workspace" / "effects.txt"
        await until(effects.exists)
        server.go()
        first, other = await asyncio.gather(*tasks)
        assert first == other
        await has_status(await server.any(), first[1], "completed")
        assert effects.read_text().split() == ["call-one-0-0"]


KEY = "q7Zr-4fJ0_pW2xLs9TnB6vYc1HdK8mGa"


async def test_rate_limits_are_shared_by_workers(start: Start, home_folder: Path) -> None:
    entry = {"name": "alice", "key": KEY, "scopes": ["runs"], "requests_per_minute": 6, "max_concurrent": 2}
    async with start(home_folder, lambda _: Reply(text="Hi.", stall_at=1), api_server={"keys": [entry]}) as server:
        clients = await server.both()
        headers = {"Authorization": f"Bearer {KEY}"}

        async def status(client: aiohttp.ClientSession, method: str, path: str, body: Json | None = None) -> int:
            async with client.request(method, path, json=body, headers=headers) as response:
                return response.status

        started_at = time.monotonic()
        runs = [await status(clients[at % 2], "POST", "/v1/runs", {"input": f"Hello {at}."}) for at in range(3)]
        assert runs == [202, 202, 429]
        count = 0
        while await status(clients[count % 2], "GET", "/v1/runs") == 200:
            count += 1
        refilled = int((time.monotonic() - started_at) * 6 / 60)
        # Replicas tell each other what was taken; one more may come in before that is heard.
        assert 3 <= count <= 3 + refilled + (start is not two_workers)


REFUSED: list[tuple[str, Json, int, str]] = [
    ("an open server for all", {"api_server": {"host": "0.0.0.0", "workers": 2}}, 78, "api_server.key"),
    ("a database in memory", {"storage": {"url": "sqlite://"}, "api_server": {"workers": 2}}, 78, "storage.url"),
]


@pytest.mark.parametrize(("_", "settings", "code", "message"), REFUSED)
async def test_startup_failure_is_reported_by_parent(
    home_folder: Path, _: str, settings: Json, code: int, message: str
) -> None:
    gateway = Gateway(home_folder, **settings)
    with pytest.raises(AssertionError, match=message):
        await gateway.start()
    assert await gateway.wait_for_exit() == code
    assert not is_served(Home(home_folder))


async def test_port_shared_by_workers_of_other_server_is_taken(home_folder: Path, tmp_path: Path) -> None:
    async with two_workers(home_folder, answer) as server:
        port = int(server.gateway.url.rpartition(":")[2])
        env = {**os.environ, "HERMES_HOME": str(tmp_path / "other")}
        command = (sys.executable, "-m", "hermes", "gateway", "run", "--workers", "2", "--port", str(port))
        other = await asyncio.create_subprocess_exec(*command, env=env, stderr=asyncio.subprocess.PIPE)
        _, stderr = await asyncio.wait_for(other.communicate(), SURELY_S)
        assert other.returncode == 69 and b"cannot be bound" in stderr


async def test_processes_of_deleted_session_end_at_every_worker(start: Start, home_folder: Path) -> None:
    command = {"command": "echo $$ > pid; until [ -e go ]; do sleep 0.02; done", "background": True}
    script = [Reply(tool_calls=[Call("terminal", command, id="call-1")]), Reply(text="Begun.")]
    async with start(home_folder, lambda _: script.pop(0)) as server:
        first, other = await server.both()
        await post(first, "/api/sessions", {"id": "s"}, 201)
        await post(first, "/api/sessions/s/chat", {"message": "Begin."})
        file = home_folder / "workspace" / "pid"
        await until(lambda: file.exists() and file.read_text().strip())
        async with other.delete("/api/sessions/s") as response:
            assert response.status == 200
        await until(lambda: not is_alive(int(file.read_text()), None))


async def test_metrics_are_summed_over_workers(start: Start, home_folder: Path) -> None:
    async with start(home_folder, answer) as server:
        first, other = await server.both()
        for client in (first, other):
            await post(client, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Turn one: ."}]})
        for client in (first, other):
            async with client.get("/metrics") as response:
                assert 'hermes_turns_total{kind="chat",outcome="completed"} 2.0' in await response.text()


@pytest.mark.parametrize("manager", ["file"], indirect=True)
async def test_parent_notifies_systemd_for_all_workers(
    home_folder: Path,
    manager: Manager,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "100000")
    async with two_workers(home_folder, answer) as server:
        await until(lambda: manager.hears("READY=1"))
        manager.notifications.clear()
        await until(lambda: manager.hears("WATCHDOG=1"))
        assert await server.gateway.end(signal.SIGTERM) == 0
        manager.hears("")
        first = [lines[0] for lines in manager.notifications]
        assert first.count("STOPPING=1") == 1 and "READY=1" not in first
