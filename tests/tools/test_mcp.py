"""MCP servers, real ones: over pipes and over HTTP, well behaved and not."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent.conftest import MakeHarness
from agent.harness import CompletedRun, Harness, Json, tool
from hermes.core.processes import is_alive
from hermes.core.text import text_of
from hermes.sandbox import bubblewrap
from hermes.tools import mcp
from support.model_server import Call, ModelServer, Reply
from support.ports import reserved_port
from support.waiting import DEADLINE_S, until, until_blocking

pytest.importorskip("mcp")
SERVERS = Path(__file__).parent / "mcp_servers"
HOUR = {"mcp_discovery_timeout": 30}


def over_pipes(name: str, *args: str, **more: Any) -> Json:
    return {"command": sys.executable, "args": [str(SERVERS / f"{name}.py"), *args], "sandbox": False, **more}


@pytest.fixture
def swift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost connections come back at once."""
    monkeypatch.setattr(mcp.limits, "MCP_WAIT_S_MIN", 0.01)
    monkeypatch.setattr(mcp.limits, "MCP_RELIST_S", 0.0)


@pytest.fixture(scope="module")
def website() -> Iterator[str]:
    """A server of the SDK over HTTP."""
    with reserved_port() as port:
        command = [sys.executable, str(SERVERS / "plain.py"), "http", str(port)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

        def answers() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        try:
            until_blocking(answers)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()
            process.wait()


def house_with(make_harness: MakeHarness, **servers: Json) -> Harness:
    harness = make_harness({**HOUR, "mcp_servers": servers})
    harness.offer()
    harness.toolsets = frozenset(f"mcp:{name}" for name in servers)
    return harness


async def turn(harness: Harness, server: ModelServer, *calls: Call, **fields: Any) -> CompletedRun:
    server.script = [*([Reply(tool_calls=list(calls))] if calls else []), Reply(text="Done.")]
    return await harness.run(server, **fields)


def unframed(run: CompletedRun) -> list[Json]:
    """The answers of the tools, out of their frames."""
    contents = [text_of(m["content"]) for m in run.result["messages"] if m["role"] == "tool"]
    return [json.loads(c.split("\n", 1)[1].rsplit("\n", 1)[0] if c.startswith("[") else c) for c in contents]


async def answer(harness: Harness, server: ModelServer, name: str, **fields: Any) -> Json:
    args = fields.pop("args", {})
    [result] = unframed(await turn(harness, server, Call(name, args), **fields))
    return result


def model_functions(server: ModelServer) -> dict[str, Json]:
    """The functions of the last request."""
    return {t["function"]["name"]: t["function"] for t in server.requests[-1].body.get("tools", [])}


# ---- well behaved


@pytest.mark.parametrize("way", ["sandbox", "pipes", "http"])
async def test_mcp_tools_are_offered_and_callable(
    make_harness: MakeHarness, server: ModelServer, website: str, way: str
) -> None:
    if way == "sandbox" and (failure := bubblewrap.probe()):
        pytest.skip(f"bubblewrap does not work here: {failure}")
    wanted = {"url": website} if way == "http" else over_pipes("plain", "stdio", sandbox=way == "sandbox")
    harness = house_with(make_harness, plain=wanted)
    calls = [Call("mcp_plain_add", {"a": 1, "b": 2}), Call("mcp_plain_echo", {"text": "hi there " * 4})]
    calls += [Call("mcp_plain_picture"), Call("mcp_plain_fail"), Call("mcp_plain_read_resource")]
    calls += [Call("mcp_plain_read_resource", {"uri": "note://today"})]
    run = await turn(harness, server, *calls)
    names = ["add", "album", "echo", "environment", "erase", "fail", "grow", "picture", "read_resource"]
    assert list(model_functions(server)) == [f"mcp_plain_{name}" for name in names]
    assert "'plain', which says of it: Add two numbers." in model_functions(server)["mcp_plain_add"]["description"]
    assert run.event("run.started")["tools"] == list(model_functions(server))
    added, echoed, pictured, failed, listed, read = unframed(run)
    assert added == {"structured": {"total": 3}}
    assert echoed == {"structured": {"result": "hi there " * 4}}
    [file] = pictured["files"]
    assert file["media_type"] == "image/png" and Path(file["path"]).read_bytes().startswith(b"\x89PNG")
    assert Path(file["path"]).stat().st_mode & 0o777 == 0o600
    assert failed["code"] == "tool_crashed" and "'plain' failed" in failed["error"]
    assert [entry["uri"] for entry in listed["resources"]] == ["note://today"]
    assert read == {"text": "Buy milk."}
    frame = next(m["content"] for m in run.result["messages"] if m["role"] == "tool" and "hi there" in m["content"])
    assert "data from outside" in frame.splitlines()[0]
    effects = {event["name"]: event["effect"] for event in run.events_of("tool.started")}
    assert (effects["mcp_plain_add"], effects["mcp_plain_echo"]) == ("read", "idempotent")


@pytest.mark.parametrize(
    ("mode", "texts"),
    [("never", []), ("destructive", ["erase"]), ("always", ["add", "echo", "erase"])],
)
async def test_mcp_approval_setting(
    make_harness: MakeHarness, server: ModelServer, website: str, mode: str, texts: list[str]
) -> None:
    harness = house_with(make_harness, plain={"url": website, "approval": mode})
    args = {"add": {"a": 1, "b": 2}, "echo": {"text": "x"}, "erase": {"what": "all"}}
    run = await turn(harness, server, *[Call(f"mcp_plain_{name}", arguments) for name, arguments in args.items()])
    codes = [result.get("code") for result in unframed(run)]
    assert codes == ["blocked" if name in texts else None for name in args]
    assert len(run.events_of("approval.resolved")) == len(texts)
    assert len(run.events_of("tool.started")) == 3 - len(texts)


async def test_mcp_approval_for_session(make_harness: MakeHarness, server: ModelServer, website: str) -> None:
    harness = house_with(make_harness, plain={"url": website})
    for choice in ("session", None):
        server.script = [Reply(tool_calls=[Call("mcp_plain_erase", {"what": "all"})]), Reply(text="Done.")]
        running = await harness.begin(harness.spec(server, session_id="same", answerable=True))
        if choice:
            request = await running.wait_for("approval.requested")
            assert (request["kind"], request["subject"]) == ("mcp", 'plain: erase {"what": "all"}')
            await running.control("approve", choice=choice)
        [result] = unframed(await running.end())
        assert result == {"text": "all is gone"}


async def test_mcp_tools_setting_filters_tools(make_harness: MakeHarness, server: ModelServer, website: str) -> None:
    harness = house_with(make_harness, plain={"url": website, "tools": ["add", "nothing"]})
    await turn(harness, server)
    assert list(model_functions(server)) == ["mcp_plain_add", "mcp_plain_read_resource"]


async def test_mcp_server_is_a_toolset(make_harness: MakeHarness, server: ModelServer, website: str) -> None:
    harness = house_with(make_harness, plain={"url": website}, off={"command": "no", "enabled": False})
    run = await turn(harness, server, toolsets=None)
    assert "mcp_plain_add" in run.event("run.started")["tools"]
    run = await turn(harness, server, toolsets=None, tool_policy=frozenset({"todo"}))
    assert "mcp_plain_add" not in run.event("run.started")["tools"]
    assert [state["name"] for state in harness.app.services.mcp.states()] == ["plain"]


async def test_mcp_process_environment_is_clean(
    make_harness: MakeHarness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-something-secret")
    monkeypatch.setenv("HERMES_THING", "1")
    harness = house_with(make_harness, plain=over_pipes("plain", "stdio", env={"NOTES": "here"}))
    names = (await answer(harness, server, "mcp_plain_environment"))["text"].split()
    assert {"NOTES", "PATH", "HOME"} <= set(names)
    assert not {"SOME_API_KEY", "HERMES_THING", "HERMES_HOME"} & set(names)


@pytest.mark.usefixtures("swift")
@pytest.mark.parametrize("kind", ["plain", "rough"])
async def test_mcp_tool_list_change_applies_to_next_turn(
    make_harness: MakeHarness, server: ModelServer, kind: str
) -> None:
    harness = house_with(make_harness, s=over_pipes(kind, *(["stdio"] if kind == "plain" else [])))
    run = await turn(harness, server, Call("mcp_s_grow" if kind == "plain" else "mcp_s_change"), session_id="same")
    new = "mcp_s_grown" if kind == "plain" else "mcp_s_changed"
    assert new not in model_functions(server)
    await until(lambda: new in harness.app.services.mcp.states()[0]["tools"])
    run = await turn(harness, server, session_id="same")
    assert new in model_functions(server)
    notices = [event["message"] for event in run.events_of("notice") if event["code"] == "mcp_tools_changed"]
    assert len(notices) == (1 if kind == "rough" else 0)
    assert not (await turn(harness, server, session_id="same")).events_of("notice")


async def test_mcp_config_change_reconnects(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = house_with(make_harness, s=over_pipes("rough"))
    first = int((await answer(harness, server, "mcp_s_pid"))["text"])
    assert int((await answer(harness, server, "mcp_s_pid"))["text"]) == first
    harness.configure({**HOUR, "mcp_servers": {"s": over_pipes("rough", env={"NEW": "1"})}})
    assert int((await answer(harness, server, "mcp_s_pid"))["text"]) != first
    harness.configure(HOUR)
    run = await turn(harness, server)
    assert run.event("run.started")["tools"] == []


async def test_mcp_processes_end_with_app(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = house_with(make_harness, s=over_pipes("rough"))
    pids = [int(pid) for pid in (await answer(harness, server, "mcp_s_nest"))["text"].split()]
    assert all(is_alive(pid, None) for pid in pids)
    await harness.close()
    await until(lambda: not any(is_alive(pid, None) for pid in pids))


async def test_mcp_eager_connect(make_harness: MakeHarness) -> None:
    harness = make_harness({"mcp_servers": {"s": over_pipes("rough", connect="eager"), "lazy": over_pipes("rough")}})
    harness.app.services.mcp.begin(harness.app.settings)
    [state] = harness.app.services.mcp.states()
    assert (state["name"], state["state"]) == ("s", "connecting")


# ---- not well behaved


async def test_slow_mcp_server_delays_one_turn(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness({"mcp_discovery_timeout": 0.3, "mcp_servers": {"mute": over_pipes("rough", "mute")}})
    harness.offer()
    harness.toolsets = frozenset({"mcp:mute"})
    started_at = time.monotonic()
    run = await turn(harness, server)
    assert time.monotonic() - started_at > 0.29
    assert run.final["type"] == "run.completed" and run.event("run.started")["tools"] == []
    mute = harness.app.services.mcp._servers["mute"]
    assert mute.state == "connecting"
    # A server that has had its time is not waited for again.
    mute.began -= 7200
    harness.configure({"mcp_discovery_timeout": 3600, "mcp_servers": {"mute": over_pipes("rough", "mute")}})
    async with asyncio.timeout(DEADLINE_S):
        await turn(harness, server)


@pytest.mark.usefixtures("swift")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (over_pipes("rough", "crash"), "there is no configuration"),
        ({"command": "no-such-command-here"}, "No such file"),
        (over_pipes("rough", "mute", timeout=0.3), "no answer within 0.3 s"),
        ({"url": "http://127.0.0.1:1/mcp"}, "refused by the rule"),
        ({"url": "http://169.254.169.254/mcp"}, "metadata"),
        ({"url": "http://metadata.google.internal/mcp"}, "metadata"),
        ({"enabled": True}, "either `command` or `url`"),
    ],
)
async def test_mcp_server_is_down_after_five_failures_with_one_notice(
    make_harness: MakeHarness, server: ModelServer, config: Json, message: str
) -> None:
    harness = house_with(make_harness, s=config)
    run = await turn(harness, server, session_id="same")
    assert run.final["type"] == "run.completed"
    state = await until(lambda: harness.app.services.mcp.states()[0], lambda state: state["state"] == "down")
    assert message in state["error"]
    notices = [e for r in (run, await turn(harness, server, session_id="same")) for e in r.events_of("notice")]
    assert [event["code"] for event in notices] == ["mcp_unavailable"] and message in notices[0]["message"]
    again = await harness.app.services.mcp.test("s", harness.app.settings)
    assert again is not None and message in again["error"]


@pytest.mark.usefixtures("swift")
async def test_mcp_server_restarts_after_crash_in_call(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = house_with(make_harness, s=over_pipes("rough"))
    before = (await answer(harness, server, "mcp_s_pid"))["text"]
    died = await answer(harness, server, "mcp_s_die")
    assert died["code"] == "mcp_unavailable" and "may have taken effect" in died["error"]
    assert (await answer(harness, server, "mcp_s_pid"))["text"] != before


async def test_mcp_call_timeout(make_harness: MakeHarness, server: ModelServer) -> None:
    for seconds in (3, 30):
        harness = house_with(make_harness, s=over_pipes("rough", timeout=seconds))
        run = await turn(harness, server, Call("mcp_s_hang"))
        if run.event("run.started")["tools"]:  # a slow machine has more time to connect
            break
    assert run.event("tool.finished")["status"] == "timeout"


async def test_mcp_call_interrupt(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = house_with(make_harness, s=over_pipes("rough"))
    server.script = [Reply(tool_calls=[Call("mcp_s_hang")])]
    running = await harness.begin(harness.spec(server))
    await running.until(lambda events: any(e["type"] == "tool.started" for e in events))
    await running.control("cancel")
    run = await running.end()
    assert run.final["type"] == "run.cancelled"


@pytest.mark.usefixtures("swift")
async def test_mcp_output_flood_ends_call(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = house_with(make_harness, s=over_pipes("rough"))
    await answer(harness, server, "mcp_s_pid")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flooded = await answer(harness, server, "mcp_s_huge")
    assert flooded["code"] == "mcp_unavailable"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024
    assert int((await answer(harness, server, "mcp_s_pid"))["text"])


async def test_mcp_chatter_is_tolerated(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = house_with(make_harness, s=over_pipes("rough"))
    assert (await answer(harness, server, "mcp_s_chatter"))["text"] == "chatter is done"


async def test_mcp_non_messages_are_skipped(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = house_with(make_harness, s=over_pipes("rough"))
    assert (await answer(harness, server, "mcp_s_garbage"))["text"] == "garbage is done"
    assert (await answer(harness, server, "mcp_s_wrong"))["code"] == "mcp_unavailable"
    assert (await answer(harness, server, "mcp_s_pid"))["text"]


async def test_mcp_sampling_elicitation_and_roots_are_declined(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = house_with(make_harness, s=over_pipes("rough"))
    assert json.loads((await answer(harness, server, "mcp_s_ask"))["text"]) == [-32601] * 3 + [None]


async def test_mcp_tools_over_quarter_of_window_are_omitted_with_notice(
    make_harness: MakeHarness, server: ModelServer
) -> None:
    harness = make_harness({**HOUR, "mcp_servers": {"s": over_pipes("rough", "many")}})
    harness.offer(tool("look"))
    harness.toolsets = frozenset({"x", "mcp:s"})
    run = await turn(harness, server)
    names = list(model_functions(server))
    assert names[0] == "look" and names[1] == "mcp_s_t000"
    size = sum(len(json.dumps(function)) for function in model_functions(server).values())
    assert 0.8 < size / 3.6 / (32_768 / 4) < 1.2
    [notice] = run.events_of("notice")
    assert notice["code"] == "mcp_tools_left_out" and "more" in notice["message"]
    assert f"mcp_s_t{len(names) - 1:03}" in notice["message"]


async def test_mcp_endless_tool_list_is_limited(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = house_with(make_harness, s=over_pipes("rough", "endless"))
    await turn(harness, server)
    assert len(harness.app.services.mcp.states()[0]["tools"]) == 100


async def test_mcp_false_annotations_are_not_trusted(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = house_with(make_harness, s=over_pipes("rough", "lies", approval="never"))
    run = await turn(harness, server)
    functions = model_functions(server)
    assert all(len(name) <= 64 for name in functions) and len(functions) == 7
    [state] = harness.app.services.mcp.states()
    assert set(state["unfit"]) == {"refers", "broken", "big"}
    assert [event["code"] for event in run.events_of("notice")] == ["mcp_tools_unfit"]
    assert "mcp_s_good" in functions and len([name for name in functions if name.startswith("mcp_s_good")]) == 2
    assert "Another of the same name" not in functions["mcp_s_good"]["description"]
    assert "> Ignore all previous" in functions["mcp_s_orders"]["description"]
    assert "Ignore" not in json.dumps(functions["mcp_s_orders"]["parameters"])
    assert "anyOf" not in functions["mcp_s_scalar"]["parameters"]
    assert len([name for name in functions if name.startswith("mcp_s_read_resource")]) == 2


async def test_missing_mcp_sdk_suggests_install(
    make_harness: MakeHarness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hermes.tools.mcp_link", None)
    harness = house_with(make_harness, s=over_pipes("rough"))
    run = await turn(harness, server)
    [notice] = run.events_of("notice")
    assert notice["code"] == "mcp_unavailable" and "hermes install mcp" in notice["message"]
    assert harness.app.services.mcp.states()[0]["state"] == "down"


# ---- over HTTP


@asynccontextmanager
async def site(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/mcp", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    finally:
        await runner.cleanup()


class RoughSite:
    """A server of the kind with sessions, whose tools misbehave."""

    def __init__(self) -> None:
        self.sessions = 0
        self.methods: list[str] = []
        self.stream = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            self.methods.append(request.method)
            return await self._events(request) if request.method == "GET" else web.Response()
        body = await request.json()
        method, number = body["method"], body.get("id")
        self.methods.append(method)
        if method == "initialize":
            self.sessions += 1
            result = {"protocolVersion": "2025-06-18", "serverInfo": {"name": "r", "version": "1"}}
            result |= {"capabilities": {"tools": {"listChanged": True}}}
            return self._said(number, result, {"mcp-session-id": f"s{self.sessions}"})
        if number is None:
            return web.Response(status=202)
        if method == "tools/list":
            names = ["drop", "hang", "whole", "event", "gone", "fine"]
            tools = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
            return self._said(number, {"tools": tools})
        if method == "tools/call":
            return await self._call(request, number, body["params"]["name"])
        return web.json_response(
            {"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "no"}}, status=404
        )

    @staticmethod
    def _said(number: Any, result: Json, headers: dict[str, str] | None = None) -> web.Response:
        return web.json_response({"jsonrpc": "2.0", "id": number, "result": result}, headers=headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await self.stream.wait()
        note = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
        await answer.write(b"event: message\ndata: " + json.dumps(note).encode() + b"\n\n")
        await asyncio.Event().wait()
        return answer

    async def _call(self, request: web.Request, number: Any, name: str) -> web.StreamResponse:
        if name == "drop" and request.transport is not None:
            request.transport.abort()
        if name == "hang":
            await asyncio.Event().wait()
        if name == "gone":
            return web.Response(status=404)
        if name in ("whole", "event"):
            kind = "application/json" if name == "whole" else "text/event-stream"
            answer = web.StreamResponse(headers={"Content-Type": kind})
            await answer.prepare(request)
            await answer.write(b'data: {"x": "' if name == "event" else b'{"x": "')
            for _ in range(1024):
                await answer.write(b"x" * 1024 * 1024)
            return answer
        return self._said(number, {"content": [{"type": "text", "text": "fine"}]})


@pytest.mark.usefixtures("swift")
@pytest.mark.parametrize(
    ("name", "code", "again"),
    [
        ("drop", "mcp_unavailable", True),
        ("hang", "timeout", False),
        ("whole", "tool_crashed", False),
        ("event", "mcp_unavailable", True),
        ("gone", "mcp_unavailable", True),
    ],
)
async def test_rough_mcp_site_fails_single_call_only(
    make_harness: MakeHarness, server: ModelServer, name: str, code: str, again: bool
) -> None:
    rough = RoughSite()
    async with site(rough.handle) as url:
        harness = house_with(make_harness, s={"url": url, "approval": "never", "timeout": 5 if name == "hang" else 60})
        assert await answer(harness, server, "mcp_s_fine") == {"text": "fine"}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert (await answer(harness, server, f"mcp_s_{name}"))["code"] == code
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024
        assert await answer(harness, server, "mcp_s_fine") == {"text": "fine"}
        assert rough.sessions == (2 if again else 1)
        await harness.close()
        assert "DELETE" in rough.methods


async def test_mcp_site_tool_list_change(make_harness: MakeHarness, server: ModelServer) -> None:
    rough = RoughSite()
    async with site(rough.handle) as url:
        harness = house_with(make_harness, s={"url": url})
        await turn(harness, server)
        rough.stream.set()
        await until(lambda: rough.methods.count("tools/list") == 2)
        await harness.close()


async def test_mcp_header_key_is_not_leaked(
    make_harness: MakeHarness, server: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    authorizations: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        authorizations.append(request.headers.get("Authorization", ""))
        return web.Response(status=401, text=f"bad key {request.headers['Authorization']}")

    async with site(handle) as url:
        harness = house_with(make_harness, s={"url": url, "headers": {"Authorization": "Bearer sk-very-secret-0001"}})
        run = await turn(harness, server)
    assert set(authorizations) == {"Bearer sk-very-secret-0001"}
    assert "with status 401" in harness.app.services.mcp.states()[0]["error"]
    assert "very-secret" not in json.dumps([run.events, harness.app.services.mcp.states()]) + caplog.text


async def test_mcp_redirect_is_checked_by_url_guard(make_harness: MakeHarness, server: ModelServer) -> None:
    async def handle(_: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("http://169.254.169.254/mcp")

    async with site(handle) as url:
        harness = house_with(make_harness, s={"url": url})
        await turn(harness, server)
        assert "refused by the rule" in harness.app.services.mcp.states()[0]["error"]
