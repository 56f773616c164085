"""However a turn ends while its tools run: all that they have started is gone when the run says that it is over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hermes.core.home import Home
from hermes.sandbox import base, bubblewrap, cgroup
from hermes.sandbox.local import Local
from hermes.sandbox.mounts import Place
from support.model_server import Call, Reply, Request
from support.ports import reserved_port
from support.waiting import DEADLINE_S, until
from tools.commanding import new_mark, running

from .clients import RawConnection, Stream, read_json, user
from .conftest import Api, Start

Json = dict[str, Any]
ENDS = ("run.completed", "run.failed", "run.cancelled")

# In the background, deaf to signals, in sessions of their own, orphaned, at a port; `{own}` is what comes then.
TREE = """
sleep {mark} &
(trap '' INT TERM HUP; sleep {mark}; true) &
setsid sh -c "trap '' INT TERM HUP; sleep {mark}; true" &
(setsid sh -c "sleep {mark} & sleep {mark} & wait" &)
python3 -c "import socket, time; s = socket.create_server(('127.0.0.1', {port}), reuse_port=True); time.sleep({mark})" &
{own}
"""
TREE_SIZE = 6
STUBBORN = "trap '' INT TERM; while :; do sleep {mark}; done"
SCRIPT = """
import signal, subprocess, time
from hermes_tools import terminal
print("ready")
subprocess.Popen(["sh", "tree.sh"])
"""
SCRIPTS = {
    "waits": "time.sleep(1000)",
    "is deaf": "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "while True: time.sleep(1000)",
    "is in a call": "terminal('sh tree.sh')",
}


@dataclass
class ProcessTree:
    """A server on one backend, and a model that has a tree of processes grow."""

    api: Api
    home: Path
    mark: str
    port: int

    def plant(self, own: str) -> None:
        """What `sh tree.sh` does besides leaving all kinds of processes."""
        (self.home / "workspace").mkdir(parents=True, exist_ok=True)
        text = TREE.format(mark=self.mark, port=self.port, own=own.format(mark=self.mark))
        (self.home / "workspace/tree.sh").write_text(text)

    async def submit(self, call: Call, *replies: Reply, **headers: str) -> str:
        """Begin a run in which the model makes one call."""
        self.api.model.script = [Reply(tool_calls=[call]), *replies, Reply(text="Done.")]
        async with self.api.post("/v1/runs", {"input": "Go.", "session_id": "hall"}, headers=headers) as response:
            return str((await read_json(response, 202))["run_id"])

    async def grown(self, count: int = TREE_SIZE) -> None:
        """Wait until so many of the tree are there."""
        await until(lambda: len(waiting(self.mark)), lambda found: found >= count)

    async def wait_for_end(self, run_id: str) -> list[Json]:
        """A run's events. When the last one comes, nothing of the tree is there any more."""
        async with self.api.get(f"/v1/runs/{run_id}/events") as response:
            stream, events = Stream(response), list[Json]()
            while not events or events[-1]["event"] not in ENDS:
                events.append((await stream.next()).data)
            assert running(self.mark) == [], events[-1]
        return events

    async def stop(self, run_id: str) -> list[Json]:
        """Stop a run; its end comes."""
        async with self.api.post(f"/v1/runs/{run_id}/stop") as response:
            assert (await read_json(response))["status"] == "stopping"
        events = await self.wait_for_end(run_id)
        assert (events[-1]["event"], events[-1]["reason"]) == ("run.cancelled", "stop")
        return events


def waiting(mark: str) -> list[str]:
    """The processes of a tree that are where they wait; a shell may only mention the mark."""
    pids = []
    for pid in running(mark):
        with contextlib.suppress(OSError):
            pids += [pid] if Path(f"/proc/{pid}/comm").read_text().strip() in ("sleep", "python3") else []
    return pids


def leftovers(home: Path) -> set[str]:
    """What must not stay: processes below this one, temporary files, groups that bound processes."""
    parents: dict[str, str] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    below, new = set[str](), {str(os.getpid())}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - below
        below |= new
    files = {
        str(path)
        for path in (*home.glob("**/.hermes-*"), *home.glob("**/*.tmp"), *home.glob("cache/tool_results/**/*"))
    }
    groups = {str(group) for parent in cgroup._parents() for group in parent.glob(f"hermes-{os.getpid()}-*")}
    return below | files | groups


@pytest.fixture(params=["bubblewrap", "local"])
async def process_tree(start: Start, home_folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[ProcessTree]:
    """Nobody is asked for leave here. Behind every test nothing is left that was not there before."""
    if request.param == "bubblewrap" and (failure := bubblewrap.probe()):
        pytest.skip(f"bubblewrap does not work here: {failure}")
    api = await start(settings={"terminal": {"backend": request.param}, "approvals": {"mode": "off"}})
    before = leftovers(home_folder)
    with reserved_port() as port:
        yield ProcessTree(api, home_folder, new_mark(), port)
        await api.app.services.outside.sandboxes.close()  # they are kept for the next command
        # A process that was ended is gone a moment later.
        await until(lambda: leftovers(home_folder) - before, lambda left: not left)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, "nobody listens where the tree did"


@pytest.fixture
def impatient() -> None:
    """Who does not listen is told the next thing at once."""


@pytest.fixture(autouse=True)
def pauses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody is deaf, the first signal must do, however slowly the machine starts a command."""
    first, last = base.LADDER[:-1], base.LADDER[-1]
    if "impatient" in request.fixturenames:
        monkeypatch.setattr(base, "LADDER", (*((number, min(pause, 0.1)) for number, pause in first), last))
    else:
        monkeypatch.setattr(base, "LADDER", (*((number, 1000.0) for number, _ in first), last))
        monkeypatch.setattr(base, "_YOUNG_S", DEADLINE_S)
        monkeypatch.setattr(base, "_AGAIN", base._AGAIN * 300)


def terminal(command: str = "sh tree.sh", **arguments: Any) -> Call:
    return Call("terminal", {"command": command, **arguments}, id="call_t")


def told_of(items: list[Json], call_id: str) -> tuple[str, Json]:
    """How a call ended, and what the model was answered."""
    [event] = [event for event in items if event["event"] == "tool.completed" and event["tool_call_id"] == call_id]
    result = event["result"] or "{}"
    if result.startswith("["):  # the frame of what may come from outside
        result = result.split("\n", 1)[1].rsplit("\n", 1)[0]
    return event["status"], json.loads(result)


# ---- stopped


async def test_interrupt_ends_command_and_children(process_tree: ProcessTree) -> None:
    process_tree.plant("echo ready; sleep {mark}")
    run_id = await process_tree.submit(terminal())
    await process_tree.grown(TREE_SIZE + 1)
    status, answer = told_of(await process_tree.stop(run_id), "call_t")
    assert (status, answer["exit_code"], answer["output"]) == ("interrupted", 130, "ready\n")


@pytest.mark.usefixtures("impatient")
async def test_interrupt_kills_unresponsive_command(process_tree: ProcessTree) -> None:
    process_tree.plant(STUBBORN)
    run_id = await process_tree.submit(terminal())
    await process_tree.grown(TREE_SIZE + 1)
    status, answer = told_of(await process_tree.stop(run_id), "call_t")
    assert (status, answer["exit_code"]) == ("interrupted", 130)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("own", SCRIPTS)
async def test_interrupt_ends_script_and_children(process_tree: ProcessTree, own: str) -> None:
    process_tree.plant("sleep {mark}")
    run_id = await process_tree.submit(Call("execute_code", {"code": SCRIPT + SCRIPTS[own]}, id="call_x"))
    await process_tree.grown((TREE_SIZE + 1) * (2 if own == "is in a call" else 1))
    events = await process_tree.stop(run_id)
    status, answer = told_of(events, "call_x")
    assert (status, answer["exit_code"], answer["stdout"]) == ("interrupted", 130, "ready\n")
    if own == "is in a call":
        assert told_of(events, "call_x.1")[0] == "interrupted"


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_ends_command_and_children(process_tree: ProcessTree, stream: bool) -> None:
    process_tree.plant("sleep {mark}")
    process_tree.api.model.script = [Reply(tool_calls=[terminal()])]
    wire = await RawConnection.open(process_tree.api.url)
    key = process_tree.api.client.headers["Authorization"]
    await wire.request("POST", "/v1/chat/completions", user(stream=stream), Authorization=key)
    await process_tree.grown(TREE_SIZE + 1)
    async with process_tree.api.get("/v1/runs") as response:
        [run] = (await read_json(response))["data"]
    wire.reset()
    events = await process_tree.wait_for_end(run["run_id"])
    assert (events[-1]["event"], events[-1]["reason"]) == ("run.cancelled", "client_disconnected")
    assert told_of(events, "call_t")[0] == "interrupted"


async def test_interrupt_reaches_processes_of_subagent(process_tree: ProcessTree) -> None:
    process_tree.plant("sleep {mark}")

    def handle(request: Request) -> Reply:
        delegates = Call("delegate_task", {"goal": "Grow."}, id="call_d")
        child = any(turn.role == "user" and turn.text.startswith("Grow") for turn in request.turns)
        return Reply(tool_calls=[terminal() if child else delegates])

    process_tree.api.model.handler = handle
    run_id = await process_tree.submit(terminal())
    await process_tree.grown(TREE_SIZE + 1)
    await process_tree.stop(run_id)
    async with process_tree.api.get("/v1/runs?kind=subagent") as response:
        [child] = (await read_json(response))["data"]
    assert child["status"] == "cancelled"


# ---- other ends


async def test_finished_command_leaves_no_process(process_tree: ProcessTree) -> None:
    process_tree.plant("echo over")
    events = await process_tree.wait_for_end(await process_tree.submit(terminal()))
    status, answer = told_of(events, "call_t")
    assert (events[-1]["event"], status, answer["output"]) == ("run.completed", "ok", "over\n")


async def test_failed_run_leaves_no_process(process_tree: ProcessTree) -> None:
    process_tree.plant("echo over")
    events = await process_tree.wait_for_end(await process_tree.submit(terminal(), Reply(status=401, error="no")))
    assert (events[-1]["event"], events[-1]["error_code"]) == ("run.failed", "provider_auth_failed")


async def test_command_timeout_leaves_no_process(process_tree: ProcessTree) -> None:
    process_tree.plant(STUBBORN)
    events = await process_tree.wait_for_end(await process_tree.submit(terminal(timeout=1)))
    status, answer = told_of(events, "call_t")
    assert (events[-1]["event"], status, answer["exit_code"]) == ("run.completed", "timeout", 124)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("tool", ["terminal", "execute_code"])
async def test_turn_timeout_leaves_no_process(process_tree: ProcessTree, tool: str) -> None:
    process_tree.plant(STUBBORN)
    call = terminal() if tool == "terminal" else Call("execute_code", {"code": SCRIPT + SCRIPTS["is deaf"]})
    events = await process_tree.wait_for_end(await process_tree.submit(call, **{"X-Hermes-Timeout": "1"}))
    assert (events[-1]["event"], events[-1]["error_code"]) == ("run.failed", "turn_timeout")


# ---- in the background


def stalled(*calls: Call) -> list[Reply]:
    """A model that makes these calls, one a message, and then says nothing more."""
    return [*(Reply(tool_calls=[call]) for call in calls), Reply(text="Wait", stall_at=1)]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("way", ["stop", "timeout", "plain disconnect", "stream disconnect"])
async def test_ended_turn_ends_its_background_processes(process_tree: ProcessTree, way: str) -> None:
    process_tree.plant("sleep {mark}")
    process_tree.api.model.script = stalled(terminal(background=True, notify_on_complete=True))
    if "disconnect" in way:
        wire = await RawConnection.open(process_tree.api.url)
        key = process_tree.api.client.headers["Authorization"]
        body = user(stream=way.startswith("stream"))
        await wire.request("POST", "/v1/chat/completions", body, Authorization=key)
        await process_tree.grown(TREE_SIZE + 1)
        async with process_tree.api.get("/v1/runs") as response:
            [run] = (await read_json(response))["data"]
        wire.reset()
        events = await process_tree.wait_for_end(run["run_id"])
        assert (events[-1]["event"], events[-1]["reason"]) == ("run.cancelled", "client_disconnected")
        return
    headers = {"X-Hermes-Timeout": "300"} if way == "timeout" else {}
    async with process_tree.api.post("/v1/runs", {"input": "Go."}, headers=headers) as response:
        run_id = (await read_json(response, 202))["run_id"]
    await process_tree.grown(TREE_SIZE + 1)
    if way == "stop":
        events = await process_tree.stop(run_id)
    else:
        live = process_tree.api.app.engine.live(run_id)
        assert live is not None and live.deadline_timer is not None
        live.deadline_timer._run()  # its time is over now
        events = await process_tree.wait_for_end(run_id)
    assert events[-1]["event"] == ("run.cancelled" if way == "stop" else "run.failed")
    assert not [event for event in events if event["event"].startswith("steer")], "nobody waits to be told"


@pytest.mark.usefixtures("impatient")
async def test_interrupt_ends_background_processes_of_finished_subagent(process_tree: ProcessTree) -> None:
    process_tree.plant("sleep {mark}")

    def handle(request: Request) -> Reply:
        goals = [turn.text for turn in request.turns if turn.role == "user"]
        result = any(turn.role == "tool" for turn in request.turns)
        if goals[-1].startswith("Grow"):
            return Reply(text="Grown.") if result else Reply(tool_calls=[terminal(background=True)])
        return (
            Reply(text="Wait", stall_at=1) if result else Reply(tool_calls=[Call("delegate_task", {"goal": "Grow."})])
        )

    process_tree.api.model.handler = handle
    run_id = await process_tree.submit(terminal())
    await process_tree.grown(TREE_SIZE + 1)
    async with process_tree.api.get(f"/v1/runs/{run_id}/events") as response:
        stream = Stream(response)
        while (await stream.next()).data["event"] != "subagent.completed":
            pass
    await process_tree.stop(run_id)


async def test_kept_background_process_survives_interrupt(process_tree: ProcessTree) -> None:
    process_tree.api.model.script = stalled(terminal(f"sleep {process_tree.mark}", background=True, keep=True))
    async with process_tree.api.post("/v1/runs", {"input": "Go."}) as response:
        run_id = (await read_json(response, 202))["run_id"]
    await process_tree.grown(1)
    await read_json(await process_tree.api.post(f"/v1/runs/{run_id}/stop"))
    async with process_tree.api.get(f"/v1/runs/{run_id}/events") as response:
        assert '"run.cancelled"' in await response.text()
    assert len(waiting(process_tree.mark)) == 1
    await process_tree.api.app.close()
    assert running(process_tree.mark) == []


async def test_interrupt_keeps_background_processes_of_earlier_turns(process_tree: ProcessTree) -> None:
    process_tree.plant("sleep {mark}")
    process_tree.api.model.script = [Reply(tool_calls=[terminal(background=True)]), Reply(text="Begun.")]
    await process_tree.api.ask("Begin.")
    await process_tree.grown(TREE_SIZE + 1)
    own = new_mark()
    run_id = await process_tree.submit(terminal(f"sleep {own}"))
    await until(lambda: waiting(own))
    await read_json(await process_tree.api.post(f"/v1/runs/{run_id}/stop"))
    async with process_tree.api.get(f"/v1/runs/{run_id}/events") as response:
        assert '"run.cancelled"' in await response.text()
    assert len(waiting(process_tree.mark)) == TREE_SIZE + 1
    await process_tree.api.app.close()
    assert running(process_tree.mark) == []


# ---- at the very beginning


@pytest.mark.parametrize("tool", ["terminal", "background", "execute_code"])
async def test_interrupt_before_command_starts_ends_it(
    process_tree: ProcessTree, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process_tree.plant("sleep {mark}")
    code = Call("execute_code", {"code": SCRIPT + SCRIPTS["waits"]}, id="call_t")
    call = {"terminal": terminal(), "background": terminal(background=True), "execute_code": code}[tool]
    begin, requested, gate, pids = base.Sandbox._begin, asyncio.Event(), asyncio.Event(), list[int]()

    async def slowly(sandbox: base.Sandbox, command: base.Command) -> base.Process:
        requested.set()
        await gate.wait()
        process = await begin(sandbox, command)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(base.Sandbox, "_begin", slowly)
    run_id = await process_tree.submit(call)
    await asyncio.wait_for(requested.wait(), DEADLINE_S)
    await read_json(await process_tree.api.post(f"/v1/runs/{run_id}/stop"))
    gate.set()
    events = await process_tree.wait_for_end(run_id)
    assert events[-1]["event"] == "run.cancelled"
    assert told_of(events, "call_t")[0] == "interrupted"
    assert len(pids) == 1 and not os.path.exists(f"/proc/{pids[0]}")


@pytest.mark.parametrize("argv", [["sleep", "1000"], ["/bin/sh", "-c", "sleep 1000"]], ids=["bare", "shell"])
@pytest.mark.parametrize("backend", ["bubblewrap", "local"])
async def test_signal_before_command_starts_is_not_lost(tmp_path: Path, backend: str, argv: list[str]) -> None:
    if backend == "bubblewrap" and (failure := bubblewrap.probe()):
        pytest.skip(f"bubblewrap does not work here: {failure}")
    (tmp_path / "work").mkdir()
    (tmp_path / "private").mkdir()
    place = Place(Home(tmp_path / "home"), tmp_path / "work", tmp_path / "private", env={"PATH": "/usr/bin:/bin"})
    sandbox = Local(place) if backend == "local" else bubblewrap.Bubblewrap(place)
    odds = random.Random(5)
    for _ in range(20):
        process = await sandbox.spawn(argv)
        await asyncio.sleep(odds.uniform(0, 0.04))  # at any point of its start, whichever that is on this machine
        async with asyncio.timeout(DEADLINE_S), process:
            process.interrupt()
            data = b"".join([data async for data in process.chunks()])
            assert (await process.wait(), process.ended_by, data) == (130, "interrupted", b"")
    await sandbox.stop()


async def test_ignored_signals_of_server_are_not_inherited(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    place = Place(Home(tmp_path / "home"), tmp_path / "work", tmp_path / "private", env={"PATH": "/usr/bin:/bin"})
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        async with await Local(place).spawn(["grep", "SigIgn", "/proc/self/status"]) as process:
            data = b"".join([data async for data in process.chunks()])
    finally:
        signal.signal(signal.SIGINT, before)
    assert int(data.split()[1], 16) & (1 << (signal.SIGINT - 1)) == 0
