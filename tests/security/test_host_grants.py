"""Grants for hosts: who is asked when a sandboxed command wants to reach one, how often, and for how long it holds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import pytest
from aiohttp import web

from agent.conftest import MakeHarness
from agent.harness import Json, Running
from guards.stage import WORLD, Stage, serving
from hermes.settings.config import load
from hermes.tools.framework.session_state import HostGrants
from support.model_server import Call, ModelServer
from support.waiting import until
from tools.commanding import SURELY_S, ToolSession

# Runs until the test lets it go, and then fails, so that its answer has a hint.
WAITING = Call("terminal", {"command": "touch begun; until [ -e go ]; do sleep 0.02; done; rm go begun; exit 3"})
NOT_GRANTED = "Hermes: host page.test is not granted. Tell the user."


class Session:
    """A session whose command waits, and a client of its proxy."""

    def __init__(self, make: MakeHarness, server: ModelServer, **settings: Any) -> None:
        self.tool_session = ToolSession(make, server, "bubblewrap", **settings)
        self.stage = Stage(self.tool_session.harness.app.services.files)
        self.tool_session.harness.app.services.outside.network = self.stage
        for name in ("page.test", "a.page.test", "other.test"):
            self.stage.answers[name] = [[WORLD]]

    @property
    def hosts(self) -> HostGrants:
        return self.tool_session.harness.app.services.session_states.of("default", "s1").hosts

    async def begin(self, call: Call = WAITING, **fields: Any) -> Running:
        """A turn whose command has begun to run."""
        active_run = await self.tool_session.begin(call, **{"answerable": True, **fields})
        await until((self.tool_session.workspace / "begun").exists)
        return active_run

    async def end(self, active_run: Running) -> tuple[Json, list[Json]]:
        """The answer to the call, and the questions that were asked."""
        (self.tool_session.workspace / "go").touch()
        run = await active_run.end()
        [answer] = run.tool_results()
        return answer, run.events_of("approval.requested")

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        """Sends one request to a host through the session's proxy; the status and the body that come back."""

        async def page(_: web.Request) -> web.StreamResponse:
            return web.Response(text="page")

        proxy = self.hosts._proxy
        assert proxy is not None
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        task = asyncio.create_task(proxy.serve(listener))

        async def get(host: str = "page.test") -> tuple[int, str]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with closing(writer):
                writer.write(f"GET http://{host}/ HTTP/1.1\r\n\r\n".encode())
                async with asyncio.timeout(SURELY_S):
                    answer = (await reader.read()).decode()
            return int(answer.split(" ", 2)[1]), answer.partition("\r\n\r\n")[2].strip()

        async with serving(page) as upstream:
            self.stage.servers[WORLD] = upstream
            try:
                yield get
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def question(active_run: Running, count: int = 1) -> Json:
    """The question that was asked last, once there are so many."""

    def approval_requests(events: list[Json]) -> list[Json]:
        requests = [event for event in events if event["type"] == "approval.requested"]
        return requests if len(requests) >= count else []

    return (await active_run.until(approval_requests))[-1]  # type: ignore[no-any-return]


async def answer_with(active_run: Running, choice: str, count: int = 1) -> Json:
    request = await question(active_run, count)
    assert await active_run.control("approve", id=request["approval_id"], choice=choice) == "applied"
    return request


@pytest.mark.parametrize(
    ("choice", "status", "later_questions"),
    [("once", 200, 1), ("session", 200, 0), ("always", 200, 0), ("deny", 403, 1)],
)
async def test_host_approval_while_command_waits(
    make_harness: MakeHarness, server: ModelServer, choice: str, status: int, later_questions: int
) -> None:
    session = Session(make_harness, server)
    active_run = await session.begin()
    async with session.client() as get:
        first = asyncio.create_task(get())
        request = await answer_with(active_run, choice)
        assert (request["kind"], request["subject"]) == ("network", "page.test")
        assert request["choices"] == ["once", "session", "always", "deny"]
        call_id = next(event["call_id"] for event in active_run.events if event["type"] == "tool.started")
        assert request["call_id"] == call_id
        assert (await first)[0] == status
        # The same call is not asked about the same host again, whatever the answer was.
        assert (await get())[0] == status
        answer, questions = await session.end(active_run)
        assert len(questions) == 1
        assert answer["exit_code"] == 3 and answer.get("hint", "") == (NOT_GRANTED if status == 403 else "")

        active_run = await session.begin()
        if later_questions:
            again = asyncio.create_task(get())
            await answer_with(active_run, "once")
            assert (await again)[0] == 200
        else:
            assert await get() == (200, "page")
        _, questions = await session.end(active_run)
        assert len(questions) == later_questions
    assert load(session.tool_session.harness.home).terminal.allowed_hosts == (
        ["page.test"] if choice == "always" else []
    )


async def test_connections_to_same_host_share_one_approval(make_harness: MakeHarness, server: ModelServer) -> None:
    session = Session(make_harness, server)
    active_run = await session.begin()
    async with session.client() as get:
        gets = [asyncio.create_task(get()) for _ in range(5)]
        request_task = asyncio.create_task(get())
        await question(active_run)
        request_task.cancel()  # one that gives up does not end the question of the others
        await answer_with(active_run, "once")
        assert await asyncio.gather(*gets) == [(200, "page")] * 5
        other = asyncio.create_task(get("other.test"))
        assert (await answer_with(active_run, "deny", 2))["subject"] == "other.test"
        assert (await other)[0] == 403
    assert len((await session.end(active_run))[1]) == 2


@pytest.mark.parametrize(
    ("settings", "statuses"),
    [
        ({"network": True}, {"page.test": 200, "a.page.test": 200, "other.test": 200}),
        ({"allowed_hosts": ["*.Page.test"]}, {"page.test": 200, "a.page.test": 200, "other.test": 403}),
        ({"allowed_hosts": ["a.page.test", "no host"]}, {"page.test": 403, "a.page.test": 200, "other.test": 403}),
        ({}, {"page.test": 403}),
    ],
)
async def test_unattended_session_reaches_only_configured_hosts(
    make_harness: MakeHarness, server: ModelServer, settings: Json, statuses: dict[str, int]
) -> None:
    session = Session(make_harness, server, terminal=settings)
    active_run = await session.begin(answerable=False)
    async with session.client() as get:
        assert {host: (await get(host))[0] for host in statuses} == statuses
    _, questions = await session.end(active_run)
    assert questions == []


async def test_network_grant_excludes_private_addresses(make_harness: MakeHarness, server: ModelServer) -> None:
    session = Session(make_harness, server, terminal={"network": True})
    session.stage.answers["page.test"] = [["127.0.0.1"]]
    active_run = await session.begin()
    async with session.client() as get:
        assert await get() == (403, "Hermes: host page.test is refused by the rule 'loopback'.")
    await session.end(active_run)


async def test_background_process_between_turns_uses_existing_grants(
    make_harness: MakeHarness, server: ModelServer
) -> None:
    session = Session(make_harness, server)
    active_run = await session.begin()
    async with session.client() as get:
        first = asyncio.create_task(get())
        await answer_with(active_run, "session")
        await first
        await session.end(active_run)
        assert await get() == (200, "page")
        assert (await get("other.test"))[0] == 403


async def test_host_approval_ends_with_its_call(make_harness: MakeHarness, server: ModelServer) -> None:
    session = Session(make_harness, server)
    active_run = await session.begin()
    async with session.client() as get:
        waiting = asyncio.create_task(get())
        await question(active_run)
        (session.tool_session.workspace / "go").touch()
        run = await active_run.end()
        assert (await waiting)[0] == 403
    [resolved] = run.events_of("approval.resolved")
    assert (resolved["choice"], resolved["by"]) == ("deny", "interrupt")


async def test_waiting_for_background_process_can_ask_for_hosts(make_harness: MakeHarness, server: ModelServer) -> None:
    session = Session(make_harness, server)
    started = await session.tool_session.call("terminal", {**WAITING.arguments, "background": True})
    wait = Call("process", {"action": "wait", "session_id": started["session_id"], "timeout": SURELY_S})
    active_run = await session.begin(wait)
    await active_run.wait_for("tool.started")
    async with session.client() as get:
        await until(lambda: session.hosts._calls)
        first = asyncio.create_task(get())
        await answer_with(active_run, "once")
        assert (await first)[0] == 200
    answer, _ = await session.end(active_run)
    assert answer["exit_code"] == 3


async def test_approvals_off_are_recorded_once_per_host(make_harness: MakeHarness, server: ModelServer) -> None:
    session = Session(make_harness, server, approvals={"mode": "off"})
    active_run = await session.begin(answerable=False)
    async with session.client() as get:
        assert [(await get())[0] for _ in range(3)] == [200] * 3
    (session.tool_session.workspace / "go").touch()
    run = await active_run.end()
    assert [(event["choice"], event["by"]) for event in run.events_of("approval.resolved")].count(("once", "rule")) == 1
