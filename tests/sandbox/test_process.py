"""Commands in every kind of sandbox: what they say, how they end, and that nothing of them stays."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from hermes.sandbox import base
from hermes.sandbox.base import Command, Handle, Parts, Process, Sandbox, SandboxError
from hermes.sandbox.local import Local
from hermes.sandbox.mounts import Place
from support.waiting import DEADLINE_S, until, until_blocking

from .conftest import Maker, finished, running, sh


@pytest.fixture
def mark() -> str:
    """A number of seconds that no other test sleeps for."""
    return str(int.from_bytes(os.urandom(4)) + 10_000_000)


def daemons(mark: str) -> str:
    """A script that leaves processes of all sorts behind: a child, one in its own session, an orphan of an orphan."""
    return f"sleep {mark} & setsid sleep {mark} & (setsid sh -c 'setsid sleep {mark} & sleep {mark}' &); sleep 0.05; "


async def until_said(process: Process, text: bytes) -> None:
    data = b""
    async for chunk in process.chunks():
        data += chunk
        if text in data:
            return


COMMANDS = [
    ("echo out; echo err >&2; echo out", 0, "out\nerr\nout\n"),
    ("exit 7", 7, ""),
    ("kill -9 $$", 137, ""),
    ("kill -15 $$", 143, ""),
    ("cat; echo no input", 0, "no input\n"),
    ("printf '\\377\\376'", 0, "\ufffd\ufffd"),
    ("echo $A; env | grep -c SECRET", 1, "b\n0\n"),
    ("pwd", 0, "{workspace}\n"),
    ("echo x > made; cat made", 0, "x\n"),
    ("test -t 0 || test -t 1 || echo no terminal", 0, "no terminal\n"),
    ("ls /proc/self/fd | wc -l", 0, "4\n"),
    ("no-such-command 2>/dev/null", 127, ""),
]


async def test_command_exit_code_and_output(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.setenv("SECRET", "planted")
    env = {**sandbox.place.env, "A": "b"}
    for script, code, output in COMMANDS:
        with subtests.test(script=script):
            result = await sh(sandbox, script, env=env)
            expected = output.format(workspace=sandbox.place.workspace)
            assert (result.code, result.output, result.ended_by) == (code, expected, "exit")


async def test_missing_program(sandbox: Sandbox) -> None:
    result = await finished(await sandbox.spawn(["/no/such/program"]))
    assert result.code in (126, 127)
    assert "/no/such/program" in result.output


async def test_too_many_arguments_are_rejected(make: Maker) -> None:
    with pytest.raises(SandboxError, match="Argument list too long"):
        await make().spawn(["echo", "x" * 200_000])


async def test_command_timeout(sandbox: Sandbox, mark: str) -> None:
    for seconds in (1, 10, 50):
        result = await sh(sandbox, f"echo before; {daemons(mark)} sleep {mark}", seconds=seconds)
        if result.output:  # a slow machine has more time for it
            break
    assert (result.code, result.output, result.ended_by) == (124, "before\n", "timeout")
    assert not running(mark)


async def test_interrupt_signal_reaches_command(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    monkeypatch.setattr(base, "LADDER", ((signal.SIGINT, 1000.0), *base.LADDER[1:]))
    script = f"trap 'echo heard; exit 3' INT; {daemons(mark)} echo ready; while :; do sleep 0.01; done"
    process = await sandbox.spawn(["/bin/sh", "-c", script])
    data = b""
    async with asyncio.timeout(DEADLINE_S), process:
        async for chunk in process.chunks():
            data += chunk
            process.interrupt()
        code = await process.wait()
    assert (code, process.ended_by, data.splitlines()[:2]) == (130, "interrupted", [b"ready", b"heard"])
    assert not running(mark)


@pytest.mark.parametrize(("deaf", "is_handled"), [("INT", True), ("INT TERM", False)])
async def test_interrupt_escalates_for_unresponsive_command(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, deaf: str, is_handled: bool, mark: str
) -> None:
    pauses = (0.05, 1000.0 if is_handled else 0.05, 1000.0)
    monkeypatch.setattr(base, "LADDER", tuple(zip((number for number, _ in base.LADDER), pauses, strict=True)))
    listening = "trap 'echo heard; exit' TERM; " if is_handled else ""
    script = f"{listening}trap '' {deaf}; {daemons(mark)} echo ready; while :; do sleep 0.01; done"
    async with asyncio.timeout(DEADLINE_S), await sandbox.spawn(["/bin/sh", "-c", script]) as process:
        output = b""
        async for chunk in process.chunks():
            output += chunk
            process.interrupt()
    assert (b"heard" in output) is is_handled
    assert (await process.wait(), process.ended_by) == (130, "interrupted")
    assert not running(mark)


async def test_kill_ends_everything_at_once(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    monkeypatch.setattr(base, "LADDER", ((signal.SIGINT, 1000.0), (signal.SIGTERM, 1000.0), (signal.SIGKILL, 1000.0)))
    for first in ("kill", "interrupt"):
        script = f"trap '' INT TERM; {daemons(mark)} echo ready; while :; do sleep 1; done"
        async with asyncio.timeout(DEADLINE_S), await sandbox.spawn(["/bin/sh", "-c", script]) as process:
            await until_said(process, b"ready")
            assert running(mark)
            getattr(process, first)()
            process.kill()
            assert await process.wait() == {"kill": 137, "interrupt": 130}[first]
            assert not running(mark)


async def test_background_children_end_with_command(sandbox: Sandbox, mark: str) -> None:
    result = await sh(sandbox, f"{daemons(mark)} echo done")
    assert (result.code, result.output.splitlines()[0]) == (0, "done")
    assert not running(mark)


async def test_cancelled_reader_ends_command(sandbox: Sandbox, mark: str) -> None:
    task = asyncio.ensure_future(sh(sandbox, f"echo {mark}; {daemons(mark)} sleep {mark}"))
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: running(f"sleep\0{mark}"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # It may have been cancelled while it was still being started: then it is ended a moment later.
        await until(lambda: not running(mark))


async def test_cancelled_start_is_cleaned_up(sandbox: Sandbox, mark: str) -> None:
    task = asyncio.ensure_future(sandbox.spawn(["/bin/sleep", mark]))
    await asyncio.sleep(0)  # it has begun, and is far from its end
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: len(asyncio.all_tasks()) == 1)
    assert not running(mark)


async def test_output_backpressure(sandbox: Sandbox) -> None:
    async with await sandbox.spawn(["/bin/sh", "-c", "head -c 4000000 /dev/zero; touch finished"]) as process:
        size = 0
        async for chunk in process.chunks():
            size += len(chunk)
            if size < 2_000_000:
                assert len(chunk) <= base.CHUNK_BYTES_MAX
                assert not (sandbox.place.workspace / "finished").exists()
    assert size == 4_000_000
    assert (sandbox.place.workspace / "finished").exists()


async def test_output_flood_uses_no_memory_and_keeps_loop_responsive(sandbox: Sandbox) -> None:
    before, turns = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    size = 1024**3 if sandbox.name == "bubblewrap" else 128 * 1024**2
    flood = asyncio.ensure_future(sh(sandbox, f"head -c {size} /dev/zero"))
    while not flood.done():
        turns += 1
        await asyncio.sleep(0)
    assert (await flood).bytes == size
    assert turns > 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes


async def test_many_concurrent_commands(sandbox: Sandbox) -> None:
    count = 50 if sandbox.name != "docker" else 10
    results = await asyncio.gather(*(sh(sandbox, f"echo {number}; exit {number}") for number in range(count)))
    assert [(result.code, result.output) for result in results] == [(n, f"{n}\n") for n in range(count)]


async def test_no_fd_or_zombie_leak(sandbox: Sandbox) -> None:
    await sh(sandbox, "true")
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await sh(sandbox, "echo x & exit 1")
        await sh(sandbox, "sleep 1000", seconds=0.01)
    assert sorted(os.listdir("/proc/self/fd")) == before
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in children]
    assert "Z" not in states


async def test_stopping_sandbox_ends_its_commands(sandbox: Sandbox, mark: str) -> None:
    async with await sandbox.spawn(["/bin/sleep", mark]) as process:
        await sandbox.stop()
        assert await process.wait() == 137
    assert not running(mark)
    assert (await sh(sandbox, "echo again")).output == "again\n"


def test_commands_work_on_asyncio_and_uvloop(place: Place, mark: str) -> None:
    async def scenario() -> None:
        result = await sh(Local(place), f"{daemons(mark)} echo hello", seconds=DEADLINE_S)
        assert (result.code, result.output) == (0, "hello\n")
        assert (await sh(Local(place), f"sleep {mark}", seconds=0.05)).code == 124

    for run in (asyncio.run, uvloop.run):
        run(scenario())
        assert not running(mark)


@pytest.mark.parametrize("backend", ["local", "bubblewrap"])
def test_commands_end_with_loop_and_process(tmp_path: Path, backend: str, mark: str) -> None:
    """A program starts a command and then forgets it, or is killed."""
    if backend == "bubblewrap":
        from .conftest import needs_bubblewrap

        needs_bubblewrap()
    script = Path(__file__).with_name("forgetful.py")
    for way in ("forget", "wait"):
        argv = [sys.executable, str(script), backend, way, mark, str(tmp_path)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == b"started\n"
            if way == "wait":
                program.kill()
            assert program.stdout.read() in (b"", b"forgotten\n")
        until_blocking(lambda: not running(f"sleep\0{mark}"))


async def test_starting_command_is_stopped_with_the_others(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    start = sandbox._start

    async def started(command: Command) -> tuple[Parts, Handle]:
        started = await start(command)
        sandbox.kill_commands("The files it may not write were replaced.")
        return started

    monkeypatch.setattr(sandbox, "_start", started)
    async with asyncio.timeout(DEADLINE_S), await sandbox.spawn(["sleep", mark]) as process:
        await process.wait()
    assert process.reason == "The files it may not write were replaced."
