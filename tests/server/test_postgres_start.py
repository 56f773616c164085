"""Starting on PostgreSQL: what keeps a command from it, and one server at a time where there is no bus."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from hermes.cli.main import main
from hermes.cluster.engines import PostgresEngine as Server
from hermes.store.postgres import opening, single_server
from hermes.store.postgres.opening import lock_key
from hermes.store.stores import open_store
from support.engines import execute, with_database
from support.gateway import Gateway, serving
from support.ports import refusing_port
from support.waiting import DEADLINE_S, until

PASSWORD = "hunter2secret"
COMMANDS = [("gateway", "run", "--port", "0"), ("sessions", "list")]


@pytest.fixture(params=COMMANDS, ids=lambda command: command[0])
def command(request: pytest.FixtureRequest) -> tuple[str, ...]:
    command: tuple[str, ...] = request.param
    return command


@pytest.fixture
def refuse(
    command: tuple[str, ...], home_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str, int], str]:
    """Run the command with this address; the sentence it prints, before what to do, when it ends with this exit code."""

    def run(url: str, code: int) -> str:
        monkeypatch.setenv("HERMES_DATABASE_URL", url)
        assert main(list(command)) == code
        out, err = capfd.readouterr()
        assert out == ""
        files = "".join(file.read_text(errors="replace") for file in home_folder.rglob("*") if file.is_file())
        assert PASSWORD not in err + files
        message, hint, *others = err.strip().splitlines()
        assert not others and message.startswith("hermes: ") and hint.startswith("Try: "), err
        return message + hint

    return run


Refuse = Callable[[str, int], str]


@pytest.fixture
def role(postgres_url: str) -> Iterator[str]:
    """A user who may connect, and no more."""
    name = f"role_{secrets.token_hex(8)}"
    execute(postgres_url, f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'")
    yield name
    execute(postgres_url, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def as_user(url: str, name: str, password: str = PASSWORD) -> str:
    return re.sub(r"//[^@]*@", f"//{name}:{password}@", url)


@pytest.mark.parametrize(
    "url",
    [
        f"mysql://u:{PASSWORD}@h/d",
        f"postgresql:u:{PASSWORD}@h",
        f"password={PASSWORD} host=h",
        f"{PASSWORD}",
        f"host=h password={PASSWORD}://x",
        "postgresql:///",
        "postgresql://",
        f"postgresql://u:{PASSWORD}@/d",
        "sqlite://relative.db",
        f"postgresql://u:{PASSWORD}@h:port/d",
        f"postgresql://u:{PASSWORD}@h:99999/d",
        f"postgresql://u:{PASSWORD}@[::1/d",
        f"postgresql://u:{PASSWORD}@127.0.0.1/d?bogus=1",
        f"postgresql://u:{PASSWORD}%zz@127.0.0.1/d",
        f"postgresql://u:{PASSWORD}@127.0.0.1/d?sslmode=perhaps",
        f"postgresql://u:a@{PASSWORD}@127.0.0.1/d",
        f"postgresql://u:12/{PASSWORD}@127.0.0.1/d",
    ],
)
def test_wrong_address(refuse: Refuse, url: str) -> None:
    refuse(url, 78)


@pytest.mark.parametrize("package", ["psycopg", "greenlet"])
def test_missing_extra(refuse: Refuse, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in list(sys.modules):
        if name.startswith("hermes.store.postgres.") or name.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    line = refuse(f"postgresql://u:{PASSWORD}@127.0.0.1/d", 78)
    assert "hermes install postgres" in line and package in line


def test_old_server(refuse: Refuse, postgres_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psycopg.ConnectionInfo, "server_version", property(lambda _: 130_014))
    line = refuse(postgres_database, 78)
    assert "PostgreSQL 13" in line and "14" in line


def test_wrong_password(refuse: Refuse, postgres_database: str, role: str) -> None:
    assert "password" in refuse(as_user(postgres_database, role, f"{PASSWORD}no"), 78)


def test_unknown_database(refuse: Refuse, postgres_url: str) -> None:
    assert "does not exist" in refuse(with_database(postgres_url, "nowhere"), 78)


def test_missing_right_to_create_the_schema(refuse: Refuse, postgres_database: str, role: str) -> None:
    assert "permission denied" in refuse(as_user(postgres_database, role), 78)


def test_missing_right_to_the_tables(refuse: Refuse, postgres_database: str, role: str) -> None:
    open_store(postgres_database).close()
    assert "permission denied" in refuse(as_user(postgres_database, role), 78)


def test_unreachable_server(refuse: Refuse) -> None:
    with refusing_port() as port:
        assert "out of reach" in refuse(f"postgresql://u:{PASSWORD}@127.0.0.1:{port}/d", 69)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "does not exist"])
def test_error_class_ignores_host_name(refuse: Refuse, host: str) -> None:
    assert "out of reach" in refuse(f"postgresql://u:{PASSWORD}@{quote(host)}/d", 69)


def test_socket_that_is_not_there(refuse: Refuse) -> None:
    assert "out of reach" in refuse(f"postgresql://u:{PASSWORD}@/d?host=/invalid/authentication%20failed", 69)


def test_missing_password(refuse: Refuse, postgres_database: str, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    monkeypatch.setenv("PGPASSFILE", "/nonexistent")
    assert "no password supplied" in refuse(re.sub(r"//[^@]*@", f"//{role}@", postgres_database), 78)


def test_server_without_tls(refuse: Refuse, postgres_database: str) -> None:
    assert "does not support SSL" in refuse(f"{postgres_database}?sslmode=require", 78)


def test_unknown_user(refuse: Refuse, postgres_database: str) -> None:
    refuse(as_user(postgres_database, "nobody_of_that_name"), 78)


def test_server_that_does_not_answer(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setitem(opening._CONNECTION, "connect_timeout", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        refuse(f"postgresql://u:{PASSWORD}@127.0.0.1:{silent.getsockname()[1]}/d", 69)


def test_refused_start_leaves_no_process(home_folder: Path, postgres_url: str) -> None:
    """The same with workers, in a process of its own."""
    home_folder.mkdir(mode=0o700)
    (home_folder / "config.yaml").write_text("api_server: {workers: 2}\n")
    env = {**os.environ, "HERMES_DATABASE_URL": with_database(postgres_url, "nowhere")}
    command = (sys.executable, "-m", "hermes", "gateway", "run", "--port", "0")
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (process.returncode, process.stdout) == (78, "")
    assert "does not exist" in process.stderr


# --- one server without a bus -----------------------------------------------------------------------------------------


def holders(url: str) -> int:
    return _locks(url, granted=True)


def waiters(url: str) -> int:
    return _locks(url, granted=False)


def _locks(url: str, *, granted: bool) -> int:
    key = lock_key("hermes", "server") & (2**64 - 1)
    with psycopg.connect(url) as db:
        row = db.execute(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted = %s AND classid = %s AND objid = %s "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
            (granted, key >> 32, key & 0xFFFFFFFF),
        ).fetchone()
        assert row is not None
        return int(row[0])


async def start_error(folder: Path, **settings: Any) -> str:
    gateway = Gateway(folder, **settings)
    with pytest.raises(AssertionError):
        await gateway.start()
    assert await gateway.wait_for_exit() == 4
    return gateway.stderr_text


@pytest.mark.parametrize("workers", [1, 2])
async def test_second_server_without_a_bus_is_refused(tmp_path: Path, postgres_database: str, workers: int) -> None:
    settings = {"storage": {"url": postgres_database}, "api_server": {"workers": workers}}
    async with serving(tmp_path / "first", **settings) as first:
        assert holders(postgres_database) == 1
        line = await start_error(tmp_path / "second", storage=settings["storage"])
        assert "Another server works on this database" in line and "bus.url" in line
        assert (await first.get("/health"))["status"] == "ok"
        if workers == 1:
            await first.end(signal.SIGKILL)
            async with serving(tmp_path / "second", **settings) as second:
                await second.get("/health")


async def test_servers_with_a_bus_share_a_database(tmp_path: Path, postgres_database: str, nats_url: str) -> None:
    settings = {
        "storage": {"url": postgres_database},
        "bus": {"url": nats_url, "namespace": f"start-{secrets.token_hex(4)}"},
    }
    async with serving(tmp_path / "first", **settings), serving(tmp_path / "second", **settings) as second:
        await second.get("/health")
        assert holders(postgres_database) == 0


async def test_lock_is_reacquired_after_database_restart(own_postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_server, "PG_SERVER_LOCK_EVERY_S", 0.1)
    monkeypatch.setattr(single_server, "PG_SERVER_LOCK_WAIT_S", 0.1)
    url = own_postgres.url
    async with single_server.held(url, "hermes", "here"):
        assert holders(url) == 1
        await asyncio.to_thread(own_postgres.restart)
        await until(lambda: holders(url) == 1)
        with pytest.raises(single_server.DatabaseServed):
            async with single_server.held(url, "hermes", "here"):
                pass
        async with single_server.held(url, "hermes_other", "here"):
            pass
    await until(lambda: holders(url) == 0)


async def test_second_holder_after_a_lost_connection_is_on_record(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(single_server, "PG_SERVER_LOCK_EVERY_S", 0.1)
    key = lock_key("hermes", "server")
    async with single_server.held(postgres_database, "hermes", "here"):
        with psycopg.connect(postgres_database, autocommit=True) as other:
            waiting = asyncio.create_task(asyncio.to_thread(other.execute, "SELECT pg_advisory_lock(%s)", (key,)))
            await until(lambda: waiters(postgres_database) == 1)
            # The one who waits gets the lock before its holder has noticed anything.
            execute(
                postgres_database,
                "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
            )
            await waiting
            await until(lambda: "Another server works on this database" in caplog.text)
        await until(lambda: holders(postgres_database) == 1)
