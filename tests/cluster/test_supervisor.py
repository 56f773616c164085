"""A cluster of one home: replicas behind one address, killed and started again, and what its commands tell."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import aiohttp
import pytest
import yaml

import hermes
from hermes.cli.main import main
from hermes.cluster import state as states
from hermes.cluster.engines import Engine, NatsEngine
from hermes.cluster.state import ClusterState
from hermes.cluster.supervisor import ClusterRunning, ReplicaFailed, Supervisor
from hermes.core.errors import HermesError
from hermes.core.home import Home, is_served
from hermes.core.processes import is_alive
from hermes.server.status import HomeServed, hold, local_url
from hermes.store.stores import open_store
from support.model_server import ModelServer, Reply
from support.waiting import until

SURELY_S = 120.0
has_postgres_store = (Path(hermes.__file__).parent / "store" / "postgres" / "engine.py").exists()


@pytest.fixture
def home(home_folder: Path) -> Home:
    home_folder.mkdir(mode=0o700)
    return configured(Home(home_folder))


def configured(home: Home, **settings: object) -> Home:
    document = {"auxiliary": {"title_generation": {"enabled": False}}, "cron": {"enabled": False}, **settings}
    home.config_file.write_text(yaml.safe_dump(document))
    return home


def nats_only(home: Home) -> dict[str, Engine]:
    """What a supervisor is about does not depend on the store, and the embedded one starts at once."""
    return {"HERMES_NATS_URL": NatsEngine(home.cluster / "nats")}


@asynccontextmanager
async def cluster(home: Home, replicas: int = 2) -> AsyncIterator[str]:
    """The address of a running one."""
    lines: asyncio.Queue[str] = asyncio.Queue()
    supervisor = Supervisor(
        home, replicas, host="127.0.0.1", port=0, announce=lines.put_nowait, engines=nats_only(home)
    )
    stop = asyncio.Event()
    serving = asyncio.create_task(supervisor.serve(stop))
    ready = asyncio.create_task(lines.get())
    await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=SURELY_S)
    try:
        if not ready.done():
            ready.cancel()
            await serving
        yield local_url(home)
    finally:
        stop.set()
        if not serving.done():
            assert await asyncio.wait_for(serving, SURELY_S) == 0


def state_of(home: Home) -> ClusterState:
    state = states.read(home)
    assert state is not None
    return state


async def command(*args: str) -> int:
    """In a thread: the cluster is in this process."""
    return await asyncio.to_thread(main, args)


def pids(state: ClusterState) -> list[int]:
    return [process.pid for process in (*state.replicas, *state.engines)]


async def test_cluster_serves_replaces_a_killed_replica_and_ends(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ModelServer() as model:
        configured(home, model={"default": "m", "base_url": f"{model.url}/v1"})
        async with cluster(home) as url, aiohttp.ClientSession(url) as client:
            # Any replica answers, each on a connection of its own.
            servers = set()
            for _ in range(4):
                async with client.get("/health/detailed", headers={"Connection": "close"}) as response:
                    servers.add((await response.json())["pid"])
            state = state_of(home)
            assert servers == {replica.pid for replica in state.replicas}

            model.script = [Reply(text="Hello.")]
            async with client.post("/v1/chat/completions", json=_chat("m")) as response:
                assert "Hello" in (await response.text())

            # Its state is private, and holds no password.
            for path in (home.cluster, home.cluster / "state.json", home.cluster / "replica-1.log"):
                assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
            passwords = [engine.state.password for engine in nats_only(home).values()]
            assert not any(password in (home.cluster / "state.json").read_text() for password in passwords)

            assert await command("cluster", "status", "--json") == 0
            document = json.loads(capsys.readouterr().out)
            assert document["state"] == "running" and document["address"] == url
            assert [replica["state"] for replica in document["replicas"]] == ["ready", "ready"]
            assert [engine["name"] for engine in document["engines"]] == ["NATS"]

            killed = state.replicas[0].pid
            assert await command("cluster", "kill", "1") == 0
            await until(lambda: state_of(home).replicas[0].pid != killed and state_of(home).replicas[0].port > 0)
            assert state_of(home).replicas[0].restarts == 1
            assert state_of(home).replicas[1].pid == state.replicas[1].pid

            assert await command("cluster", "kill", "2", "--stay-dead") == 0
            await until(lambda: state_of(home).replicas[1].port == 0)
            capsys.readouterr()
            assert await command("cluster", "status") == 1
            output = capsys.readouterr().out
            assert "replica 2  dead" in output and "started again once" in output
            assert await command("cluster", "kill", "2") == 5
            assert await command("cluster", "kill", "9") == 5
            async with client.get("/health", headers={"Connection": "close"}) as response:
                assert response.status == 200

            # The home is taken: by a second cluster, and by a server that would have it alone.
            with pytest.raises(ClusterRunning):
                async with cluster(home):
                    pass
            with pytest.raises(HomeServed):
                hold(home)
            last = state_of(home)
    assert not any(is_alive(pid, None) for pid in pids(last))
    assert not is_served(home)
    assert await command("cluster", "status") == 5
    assert await command("cluster", "down") == 5


def _chat(model: str) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": "Hi."}]}


async def test_cluster_whose_own_process_was_killed_is_cleaned_up(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    process = await _supervisor_process(home)
    state = state_of(home)
    process.kill()
    await process.wait()
    assert await command("cluster", "status", "--json") == 5
    assert sorted(json.loads(capsys.readouterr().out)["remains"]) == sorted(pids(state))
    assert all(is_alive(pid, None) for pid in pids(state))
    assert await command("cluster", "down") == 0
    assert not any(is_alive(pid, None) for pid in pids(state))

    # Starting again cleans up as well.
    process = await _supervisor_process(home)
    before = state_of(home)
    process.kill()
    await process.wait()
    async with cluster(home, 1):
        assert not any(is_alive(pid, None) for pid in pids(before))
        assert state_of(home).engines[0].port == before.engines[0].port


async def _supervisor_process(home: Home) -> asyncio.subprocess.Process:
    code = (
        "import asyncio, sys; from pathlib import Path; from hermes.core.home import Home\n"
        "from hermes.cluster.supervisor import Supervisor; from hermes.cluster.engines import NatsEngine\n"
        f"home = Home(Path({str(home.path)!r}))\n"
        "engines = {'HERMES_NATS_URL': NatsEngine(home.cluster / 'nats')}\n"
        "announce = lambda line: print(line, flush=True)\n"
        "asyncio.run(Supervisor(home, 1, host='127.0.0.1', port=0, announce=announce, engines=engines).serve())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert b"cluster listening on" in await asyncio.wait_for(process.stdout.readline(), SURELY_S)
    return process


async def test_interrupt_ends_all_in_order(home: Home) -> None:
    process = await _supervisor_process(home)
    state = state_of(home)
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), SURELY_S) == 0
    assert not any(is_alive(pid, None) for pid in pids(state))
    assert states.read(home) is None


async def start_error(home: Home, **options: object) -> HermesError:
    supervisor = Supervisor(home, 2, **{"host": "127.0.0.1", "port": 0, "announce": print, **options})  # type: ignore[arg-type]
    with pytest.raises(HermesError) as raised:
        await supervisor.serve(asyncio.Event())
    assert states.read(home) is None
    assert not is_served(home)
    for engine in states.engines_of(home).values():
        assert not engine.is_running
    return raised.value


async def test_nothing_is_left_of_a_cluster_that_cannot_start(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        error = await start_error(home, port=server.getsockname()[1])
        assert error.exit_code == 69 and "cannot be bound" in error.message
    error = await start_error(home, host="0.0.0.0")
    assert error.exit_code == 78 and "api_server.key" in error.message
    # A replica that refuses its settings: its own sentence is told, with its exit code.
    home.config_file.write_text("storage: {url: 'nonsense://here'}\n")
    error = await start_error(home, engines=nats_only(home))
    assert isinstance(error, ReplicaFailed)
    assert error.exit_code == 78 and "nonsense" in error.message and error.where == "replica 1"
    assert error.hint and "Try" not in error.hint


async def test_missing_wheel_is_one_sentence(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes.cluster.engines.util.find_spec", lambda name: None)
    error = await start_error(home)
    assert error.exit_code == 78 and error.hint == "hermes install cluster"


@pytest.mark.parametrize(
    "args", [("up", "--replicas", "-1"), ("up", "--replicas", "99"), ("up", "--port", "x"), ("kill", "x")]
)
def test_bad_arguments_are_usage_errors(args: tuple[str, ...], home: Home) -> None:
    with pytest.raises(SystemExit) as ended:
        main(("cluster", *args))
    assert ended.value.code == 2


def test_commands_without_a_cluster_say_so(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (("status",), ("env",), ("kill", "1"), ("down",)):
        assert main(("cluster", *args)) == 5
    assert main(("cluster", "status", "--json")) == 5
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"state": "stopped", "remains": []}


@pytest.mark.skipif(not has_postgres_store, reason="the store on PostgreSQL is not there yet")
def test_up_detached_status_and_down(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(("cluster", "up", "--replicas", "2", "--port", "0", "--detach")) == 0
        assert "2 replicas, PostgreSQL on" in capsys.readouterr().out
        assert main(("cluster", "status")) == 0
    finally:
        assert main(("cluster", "down")) == 0
    assert main(("cluster", "status")) == 5


@pytest.mark.skipif(not has_postgres_store, reason="the store on PostgreSQL is not there yet")
def test_store_is_migrated_into_the_engines_of_its_home_and_out(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HERMES_HOME", str(home.path))
    with closing(open_store(f"sqlite://{home.state_db}")) as store:
        store.sessions.create_session("s-1", "cli")
    assert main(("cluster", "up", "--replicas", "0", "--detach", "--json")) == 0
    try:
        assert json.loads(capsys.readouterr().out)["address"] is None
        assert main(("cluster", "status", "--json")) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["state"] == "running" and document["replicas"] == [] and document["address"] is None
        assert main(("cluster", "status")) == 0
        assert "proxy" not in capsys.readouterr().out
        assert main(("cluster", "kill", "1")) == 5
        assert main(("cluster", "up", "--port", "0")) == ClusterRunning.exit_code
        capsys.readouterr()

        assert main(("cluster", "env")) == 0
        variables = dict(line.removeprefix("export ").split("=", 1) for line in capsys.readouterr().out.splitlines())
        assert list(variables) == ["HERMES_DATABASE_URL", "HERMES_NATS_URL"]
        [url] = shlex.split(variables["HERMES_DATABASE_URL"])
        assert main(("migrate", "--from", f"sqlite://{home.state_db}", "--to", url)) == 0
        monkeypatch.setenv("HERMES_DATABASE_URL", url)
        other = tmp_path / "other" / "state.db"
        assert main(("migrate", "--to", f"sqlite://{other}")) == 0
        with closing(open_store(f"sqlite://{other}")) as store:
            assert store.sessions.get_session("s-1") is not None
    finally:
        assert main(("cluster", "down")) == 0
    assert main(("cluster", "env")) == 5
    assert not any(engine.is_running for engine in states.engines_of(home).values())


def test_rejected_second_start_keeps_the_log_of_the_first(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.cluster.mkdir(mode=0o700)
    log_file = home.cluster / "up.log"
    log_file.write_text("said by the first\n")
    with hold(home):
        assert main(("cluster", "up", "--port", "0", "--detach")) == HomeServed.exit_code
    err = capsys.readouterr().err
    assert "holds this home" in err and "said by the first" not in err
    assert log_file.read_text() == f"said by the first\n{err}"


def test_detached_process_that_is_killed_before_it_is_ready_is_one_sentence(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "killed"
    program.write_text("#!/bin/sh\nkill -KILL $$\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    assert main(("cluster", "up", "--port", "0", "--detach")) == 69
    assert "was killed (signal 9) before it was ready." in capsys.readouterr().err
