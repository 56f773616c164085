"""What a server tells the service manager that started it, over the socket that systemd names."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hermes.app import current
from hermes.core.home import Home
from hermes.server.runner import GatewayRunner
from hermes.server.supervisor import Supervisor
from support.waiting import until

from .test_runner import get, home, serving  # noqa: F401  (a fixture)


class Manager:
    """The other end: what it was told, as lists of lines."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.notifications = sock, list[list[str]]()

    def hears(self, line: str) -> bool:
        with self._sock_ready():
            while True:
                self.notifications.append(self._sock.recv(4096).decode().split("\n"))
        return any(line in message for message in self.notifications)

    @contextmanager
    def _sock_ready(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            return


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    name = str(tmp_path / "notify") if request.param == "file" else f"@hermes-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        sock.bind(f"\0{name[1:]}" if name.startswith("@") else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield Manager(sock)


async def test_systemd_ready_and_stopping_notifications(home: Home, manager: Manager) -> None:  # noqa: F811
    stop = asyncio.Event()
    served = asyncio.create_task(GatewayRunner(home, port=0).serve(stop))
    await until(lambda: manager.hears("READY=1"))
    (ready,) = manager.notifications
    url = ready[1].removeprefix("STATUS=Listening on ")
    assert await get(f"{url}/health") == 200
    stop.set()
    assert await served == 0
    assert manager.hears("STOPPING=1") and len(manager.notifications) == 2, (
        "without a watchdog there is nothing else to say"
    )


async def test_failed_start_is_not_notified_ready(home: Home, manager: Manager) -> None:  # noqa: F811
    home.config_file.write_text("api_server: {enabled: false}")
    with pytest.raises(Exception, match="nothing to run"):
        await GatewayRunner(home, port=0).serve(asyncio.Event())
    assert not manager.hears("READY=1")


async def test_systemd_watchdog_depends_on_store_writer(
    home: Home,  # noqa: F811
    manager: Manager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "40000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    async with serving(home):
        await until(lambda: manager.hears("WATCHDOG=1"))
        engine = (await current(home)).store.blocking.engine
        started, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def hold(_: object) -> None:
            loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()

        task = asyncio.create_task(asyncio.to_thread(engine.exclusive, hold))
        await started.wait()
        await until(lambda: manager.hears("STATUS=The database does not answer."))
        manager.notifications.clear()
        go_on.set()
        await task
        await until(lambda: manager.hears("WATCHDOG=1"))


async def test_damaged_store_keeps_watchdog(
    home: Home,  # noqa: F811
    manager: Manager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restart would not repair it; readiness reports it."""
    monkeypatch.setenv("WATCHDOG_USEC", "40000")
    async with serving(home):
        home.state_db.rename(home.path / "kept")
        manager.hears("")
        manager.notifications.clear()
        await until(lambda: manager.hears("WATCHDOG=1"))
        (home.path / "kept").rename(home.state_db)


PERIODS = [
    ({}, None),
    ({"WATCHDOG_USEC": "3000000"}, 1.5),
    ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
    ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
    ({"WATCHDOG_USEC": "soon"}, None),
    ({"WATCHDOG_USEC": "0"}, None),
]


@pytest.mark.parametrize(("environ", "period_s"), PERIODS)
def test_watchdog_period_is_half_of_given(environ: dict[str, str], period_s: float | None) -> None:
    assert Supervisor({"NOTIFY_SOCKET": "/nowhere", **environ}).period_s == period_s
    assert Supervisor(environ).period_s is None, "there is nobody to tell"


@pytest.mark.parametrize("name", ["", "/nowhere/at/all", "relative", "vsock:2:1234", "/" + "x" * 200, "@\0"])
def test_missing_notify_socket_is_ignored(name: str, caplog: pytest.LogCaptureFixture) -> None:
    Supervisor({"NOTIFY_SOCKET": name}).tell("READY=1", "STATUS=Listening")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_systemd_status_is_one_line(manager: Manager) -> None:
    Supervisor(os.environ).tell("STATUS=one\nREADY=1")
    assert manager.hears("STATUS=one READY=1")
