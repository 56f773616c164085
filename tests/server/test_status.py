"""The running server in its home: one at a time, dead ones in nobody's way, its state readable while it lives."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes.core.errors import HermesError
from hermes.core.home import Home, is_served
from hermes.core.processes import process_start
from hermes.server import status
from hermes.server.status import HomeServed, hold, make_own_state, read_runtime_status, write_runtime_status
from support.waiting import until_blocking

SERVE = """
import sys
from pathlib import Path
from hermes.core.home import Home
from hermes.server.status import hold, write_runtime_status
home = Home(Path(sys.argv[1]))
hold(home)
write_runtime_status(home, gateway_state="running", host="127.0.0.1", port=8642)
print("up", flush=True)
input()
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "hermes")


@pytest.fixture
def server(home: Home) -> Iterator[subprocess.Popen[str]]:
    """Another process that serves the home."""
    command = [sys.executable, "-c", SERVE, str(home.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.communicate()


# ---- the lock


def test_home_lock_is_held_until_release(home: Home) -> None:
    before = is_served(home)
    lock = hold(home)
    during = is_served(home)
    lock.release()
    assert (before, during, is_served(home)) == (False, True, False)


def test_home_lock_ends_with_its_block(home: Home) -> None:
    with pytest.raises(RuntimeError), hold(home):
        raise RuntimeError
    assert not is_served(home)


def test_second_release_does_not_release_next_holder(home: Home) -> None:
    first = hold(home)
    first.release()
    with hold(home):
        first.release()
        assert is_served(home)
        assert home.pid_file.exists()


def test_pid_file_exists_while_home_is_held(home: Home) -> None:
    with hold(home):
        assert home.pid_file.read_text() == f"{os.getpid()}\n"
    assert not home.pid_file.exists()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777], ids=oct)
def test_lock_files_are_private_with_any_umask(home: Home, umask: int) -> None:
    before = os.umask(umask)
    try:
        with hold(home):
            write_runtime_status(home, gateway_state="starting")
            modes = {mode(path) for path in (home.pid_file, home.lock_file, home.state_file)}
            assert (modes, mode(home.path)) == ({0o600}, 0o700)
    finally:
        os.umask(before)


def test_second_holder_in_process_is_rejected(home: Home) -> None:
    with hold(home), pytest.raises(HomeServed, match=f"pid {os.getpid()}"):
        hold(home)


def test_second_holder_learns_pid_address_and_hint(home: Home, server: subprocess.Popen[str]) -> None:
    with pytest.raises(HomeServed) as caught:
        hold(home)
    assert caught.value.exit_code == 4
    assert caught.value.message == f"Another server (pid {server.pid}, http://127.0.0.1:8642) holds this home."
    assert caught.value.where == str(home.path)
    assert "hermes gateway stop" in caught.value.hint and "--replace" in caught.value.hint


def test_lock_hint_names_profile(home: Home) -> None:
    work = Home(home.path / "profiles" / "work", "work")
    with hold(work), pytest.raises(HomeServed, match="hermes -p work gateway stop"):
        hold(work)


@pytest.mark.parametrize(("host", "expected"), [("0.0.0.0", "http://0.0.0.0:1"), ("::1", r"http://\[::1\]:1")])
def test_lock_error_shows_url(home: Home, host: str, expected: str) -> None:
    with hold(home):
        write_runtime_status(home, host=host, port=1)
        with pytest.raises(HomeServed, match=expected):
            hold(home)


def test_holder_without_details_is_rejected(home: Home) -> None:
    with hold(home):
        home.pid_file.write_text("what?")
        with pytest.raises(HomeServed, match="Another server holds this home"):
            hold(home)


def test_killed_server_releases_lock_and_status(home: Home, server: subprocess.Popen[str]) -> None:
    alive = read_runtime_status(home)
    server.send_signal(signal.SIGKILL)
    server.wait()
    exists = [path.exists() for path in (home.pid_file, home.lock_file, home.state_file)]
    assert alive is not None and alive["pid"] == server.pid
    assert exists == [True, True, True]
    assert read_runtime_status(home) is None
    with hold(home):
        assert home.pid_file.read_text() == f"{os.getpid()}\n"


def test_lock_is_not_inherited_by_children(home: Home) -> None:
    lock = hold(home)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    lock.release()
    # Another thread's child may hold it for the moment before it becomes its program; ours lives on until it is told.
    try:
        until_blocking(lambda: not is_served(home))
    finally:
        child.communicate(b"\n")


def test_removed_lock_file_is_recreated(home: Home) -> None:
    hold(home).release()
    home.lock_file.unlink()
    with hold(home):
        assert is_served(home)


def test_lock_query_does_not_block_start(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = hold(home)
    monkeypatch.setattr(status.time, "sleep", lambda seconds: asking.release())
    with hold(home):
        assert is_served(home)


def test_unlockable_home_is_reported(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(status.fcntl, "flock", refuse)
    with pytest.raises(HermesError, match=r"cannot be locked \(No locks available\)"):
        hold(home)


def test_unwritable_pid_file_releases_lock(home: Home) -> None:
    home.pid_file.mkdir(parents=True)
    with pytest.raises(OSError):
        hold(home)
    assert not is_served(home)


# ---- the state


def test_first_runtime_status_has_every_field(home: Home) -> None:
    write_runtime_status(home, gateway_state="starting")
    state = read_runtime_status(home)
    assert state is not None
    assert tuple(state) == status.FIELDS
    assert (state["pid"], state["argv"], state["start_time"]) == (os.getpid(), sys.argv, process_start(os.getpid()))
    assert (state["active_agents"], state["platforms"], state["exit_reason"]) == (0, {}, None)


def test_runtime_status_fields_are_merged(home: Home) -> None:
    write_runtime_status(home, gateway_state="starting", host="127.0.0.1", port=1)
    write_runtime_status(home, gateway_state="running", active_agents=2, platforms={"api_server": {"state": "up"}})
    state = read_runtime_status(home)
    assert state is not None
    assert {name: state[name] for name in ("gateway_state", "host", "port", "active_agents", "platforms")} == {
        "gateway_state": "running",
        "host": "127.0.0.1",
        "port": 1,
        "active_agents": 2,
        "platforms": {"api_server": {"state": "up"}},
    }


def test_runtime_status_is_dated(home: Home) -> None:
    write_runtime_status(home, updated_at=1.0)
    write_runtime_status(home, active_agents=1)
    state = read_runtime_status(home)
    assert state is not None and state["updated_at"] > 1_000_000_000


def test_runtime_status_of_earlier_process_is_dropped(home: Home, server: subprocess.Popen[str]) -> None:
    server.kill()
    server.wait()
    write_runtime_status(home, gateway_state="starting")
    state = read_runtime_status(home)
    assert state is not None and (state["pid"], state["port"]) == (os.getpid(), None)


@pytest.mark.parametrize("state", status.STATES)
def test_every_gateway_state_can_be_written(home: Home, state: str) -> None:
    write_runtime_status(home, gateway_state=state)
    status = read_runtime_status(home)
    assert status is not None and status["gateway_state"] == state


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"gateway_state": "asleep"}, "never 'asleep'"),
        ({"gateway_state": None}, "never None"),
        ({"mood": "good"}, "no field mood"),
    ],
)
def test_unknown_status_field_is_rejected(home: Home, fields: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        write_runtime_status(home, **fields)
    assert not home.path.exists()


def test_concurrent_status_changes_are_merged(home: Home) -> None:
    write_runtime_status(home, gateway_state="running")
    changes: list[dict[str, object]] = [{"host": "h"}, {"port": 7}, {"active_agents": 3}, {"exit_reason": "x"}]
    threads = [threading.Thread(target=write_runtime_status, args=(home,), kwargs=change) for change in changes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = read_runtime_status(home)
    assert state is not None
    assert [state["host"], state["port"], state["active_agents"], state["exit_reason"]] == ["h", 7, 3, "x"]


@pytest.mark.parametrize(
    "argv",
    [
        ["hermes", "--api-key", "correct horse, battery"],
        ["hermes", "--api-key=hunter2hunter2"],
        ["hermes", "-m", "sk-abcdefgh12345678"],
        ["hermes", "--base-url", "https://me:hunter2hunter2@host/v1"],
    ],
)
def test_credentials_in_argv_are_redacted(home: Home, argv: list[str]) -> None:
    write_runtime_status(home, argv=argv)
    text = home.state_file.read_text()
    assert "[redacted]" in text
    assert not any(secret in text for secret in ("battery", "hunter2", "abcdefgh"))


def test_argv_redaction_is_idempotent(home: Home) -> None:
    argv = ["hermes", "--token", "hunter2", "gateway", "run", "--port", "8642", "--max-tokens", "123456789"]
    write_runtime_status(home, argv=argv)
    write_runtime_status(home, active_agents=1)
    state = read_runtime_status(home)
    assert state is not None
    assert state["argv"] == [*argv[:2], "[redacted]", *argv[3:]]


def test_credentials_in_exit_reason_are_redacted(home: Home) -> None:
    write_runtime_status(home, exit_reason="401 for sk-abcdefgh12345678", platforms={"a": "api_key=hunter2hunter2"})
    text = home.state_file.read_text()
    assert "abcdefgh" not in text and "hunter2" not in text


def test_runtime_status_accepts_any_text(home: Home) -> None:
    write_runtime_status(home, exit_reason="\ud800 ä \0")
    state = read_runtime_status(home)
    assert state is not None and state["exit_reason"] == "? ä \0"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        b'{"pid": "1"}',
        b'{"pid": true}',
        b'{"pid": 0}',
        b'{"pid": -1}',
        b'{"pid": 99999999}',
        b'{"pid": 1, "start_time": "x"}',
    ],
    ids=repr,
)
def test_unreadable_runtime_status_is_none(home: Home, data: bytes) -> None:
    home.path.mkdir()
    home.state_file.write_bytes(data)
    assert read_runtime_status(home) is None
    write_runtime_status(home, gateway_state="running")
    assert read_runtime_status(home) is not None


def test_missing_runtime_status_is_none(home: Home) -> None:
    before = read_runtime_status(home)
    home.state_file.mkdir(parents=True)
    assert (before, read_runtime_status(home)) == (None, None)


@pytest.mark.skipif(process_start(os.getpid()) is None, reason="this system does not tell starts")
def test_runtime_status_of_reused_pid_is_none(home: Home) -> None:
    write_runtime_status(home, gateway_state="running")
    state = json.loads(home.state_file.read_bytes())
    home.state_file.write_text(json.dumps({**state, "start_time": state["start_time"] - 60}))
    assert read_runtime_status(home) is None


def test_runtime_status_without_start_time_uses_pid(home: Home) -> None:
    home.path.mkdir()
    home.state_file.write_text(json.dumps({"pid": os.getpid(), "gateway_state": "running"}))
    assert read_runtime_status(home) == {"pid": os.getpid(), "gateway_state": "running"}


def test_runtime_status_defaults_to_current_home(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_HOME", str(home.path))
    before = read_runtime_status()
    write_runtime_status(home, gateway_state="running")
    after = read_runtime_status()
    assert before is None and after is not None


def test_runtime_status_of_missing_profile_is_none(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_HOME", str(home.path))
    monkeypatch.setenv("HERMES_PROFILE", "gone")
    assert read_runtime_status() is None


def test_reading_runtime_status_creates_nothing(home: Home) -> None:
    read_runtime_status(home)
    assert not home.path.exists()


def test_servers_that_share_a_home_have_a_state_each_and_keep_a_sole_one_out(home: Home) -> None:
    with hold(home, shared=True):
        make_own_state(home)
        write_runtime_status(home, gateway_state="running", port=1)
        assert is_served(home)
        with pytest.raises(HomeServed):
            hold(home)
        code = (
            "import sys; from pathlib import Path; from hermes.core.home import Home; from hermes.server import status\n"
            f"home = Home(Path({str(home.path)!r}))\n"
            "with status.hold(home, shared=True):\n"
            "    status.make_own_state(home)\n"
            "    status.write_runtime_status(home, gateway_state='running', port=2)\n"
            "    print(status.read_runtime_status(home)['port'], flush=True)\n"
            "    sys.stdin.read()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "2\n"
            assert (read_runtime_status(home) or {})["port"] == 1
            assert len(list(home.server_states.iterdir())) == 2
            other.kill()
        assert not home.state_file.exists()
    assert not is_served(home)
    with hold(home, shared=True):
        make_own_state(home)  # what was left by the one that was killed goes
        assert len(list(home.server_states.iterdir())) == 1
    with hold(home), pytest.raises(HomeServed):
        hold(home, shared=True)


def test_state_of_a_server_that_shares_its_home_is_seen_by_others(home: Home) -> None:
    with hold(home, shared=True):
        make_own_state(home)
        write_runtime_status(home, gateway_state="running", host="127.0.0.1", port=7)
        code = f"from pathlib import Path; from hermes.core.home import Home; from hermes.server import status; print(status.local_url(Home(Path({str(home.path)!r}))))"
        assert subprocess.check_output([sys.executable, "-c", code], text=True) == "http://127.0.0.1:7\n"
