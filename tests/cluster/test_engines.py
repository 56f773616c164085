"""Engines: start, restart in place, kill, file modes, and what is said when a wheel is missing."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from hermes.cluster import engines
from hermes.cluster.engines import Engine, EngineError, NatsEngine, PostgresEngine
from hermes.core.errors import ConfigError
from hermes.core.processes import is_alive
from support.engines import running, shared


def test_postgres_keeps_data_and_address_over_stop_and_kill(own_postgres: PostgresEngine) -> None:
    own_postgres.query("CREATE TABLE t (x int)")
    address = own_postgres.url
    for end in (own_postgres.stop, own_postgres.kill):
        own_postgres.query("INSERT INTO t VALUES (1)")
        end()
        assert not own_postgres.is_running
        with pytest.raises(EngineError):
            own_postgres.query("SELECT 1")
        own_postgres.start()
    assert own_postgres.query("SELECT count(*) FROM t") == "2\n"
    assert own_postgres.url == address


def test_postgres_has_utf8_byte_order_and_scram(own_postgres: PostgresEngine) -> None:
    settings = own_postgres.query("SHOW server_encoding; SHOW password_encryption; SHOW server_version_num").split()
    assert settings[:2] == ["UTF8", "scram-sha-256"]
    assert int(settings[2]) >= 180_000
    assert own_postgres.query("SELECT upper('ä') || ('a' < 'B')") == "Äfalse\n"
    assert "trust" not in own_postgres.query("SELECT auth_method FROM pg_hba_file_rules")


def test_postgres_refuses_a_wrong_password(own_postgres: PostgresEngine) -> None:
    psql = str(engines.postgres_program("psql"))
    url = own_postgres.url.replace(own_postgres.state.password, "wrong")
    result = subprocess.run([psql, url, "-c", "SELECT 1"], capture_output=True, text=True, check=False)
    assert "password authentication failed" in result.stderr


def test_postgres_does_not_run_as_root(own_postgres: PostgresEngine) -> None:
    # Inside its user namespace; the map is "inside outside count".
    fields = Path(f"/proc/{own_postgres.state.pid}/uid_map").read_text().split()
    assert fields[0] != "0" if os.geteuid() == 0 else fields[1] == "0"


def test_nats_has_jetstream_and_wants_credentials(own_nats: NatsEngine) -> None:
    info, answer = _nats_connect(own_nats, '{"verbose":true}')
    assert '"jetstream":true' in info
    assert '"auth_required":true' in info
    assert "Authorization Violation" in answer
    credentials = f'{{"verbose":true,"user":"hermes","pass":"{own_nats.state.password}"}}'
    assert _nats_connect(own_nats, credentials)[1] == "+OK\r\n"


def test_nats_keeps_its_address_over_stop_and_kill(own_nats: NatsEngine) -> None:
    address = own_nats.url
    for end in (own_nats.stop, own_nats.kill, own_nats.restart):
        end()
        own_nats.start()
        assert _nats_connect(own_nats, "{}")[0].startswith("INFO")
    assert own_nats.url == address


def _nats_connect(engine: NatsEngine, options: str) -> tuple[str, str]:
    with socket.create_connection(("127.0.0.1", engine.state.port), timeout=30) as connection:
        file = connection.makefile("rw", newline="")
        info = file.readline()
        file.write(f"CONNECT {options}\r\nPING\r\n")
        file.flush()
        return info, file.readline()


def test_ports_are_not_those_of_outgoing_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(engines.free_port() < first for _ in range(50))


@pytest.mark.parametrize("make", [PostgresEngine, NatsEngine])
def test_files_are_private_and_another_object_controls_the_server(make: type[Engine], tmp_path: Path) -> None:
    engine = make(tmp_path / "engine")
    assert not engine.is_running
    with running(engine):
        pid = engine.state.pid
        for path in (engine.folder, *engine.folder.iterdir()):
            if not path.is_socket():
                assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        again = make(tmp_path / "engine")
        again.start()
        assert again.state.pid == pid
        again.stop()
        assert not engine.is_running
    assert not is_alive(pid, None)


@pytest.mark.parametrize("make", [PostgresEngine, NatsEngine])
def test_first_start_takes_another_port_when_its_own_is_taken(
    make: type[Engine], own_nats: NatsEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = own_nats.state.port
    ports = [port]
    real = engines.free_port
    monkeypatch.setattr(engines, "free_port", lambda: ports.pop() if ports else real())
    engine = make(tmp_path / "engine")
    with running(engine):
        assert ports == []
        assert engine.state.port != port


def test_start_failure_includes_the_server_log(own_postgres: PostgresEngine, tmp_path: Path) -> None:
    other = PostgresEngine(tmp_path / "engine", {"work_mem": "nonsense"})
    with pytest.raises(EngineError, match="work_mem") as refused:
        other.start()
    assert refused.value.exit_code == 69
    assert not other.is_running


def test_missing_wheel_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(engines.util, "find_spec", lambda name: None)
    monkeypatch.setattr(engines.metadata, "files", missing)
    for make in (PostgresEngine, NatsEngine):
        with pytest.raises(ConfigError, match="hermes install cluster") as refused:
            make(tmp_path / make.name).start()
        assert refused.value.exit_code == 78
        assert "\n" not in str(refused.value)


def test_engines_start_without_client_libraries() -> None:
    code = "import sys, hermes.cluster.engines; print([m for m in ('psycopg', 'nats', 'greenlet') if m in sys.modules])"
    assert find_spec("psycopg") is not None
    assert subprocess.check_output([sys.executable, "-c", code]) == b"[]\n"


def test_shared_server_ends_with_its_last_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with contextlib.ExitStack() as stack:
        stack.enter_context(shared("nats", NatsEngine))
        (folder,) = (path for path in tmp_path.iterdir() if path.is_dir() and "engines" in path.name)
        engine = NatsEngine(folder)
        assert engine.is_running
    assert not list(tmp_path.glob("hermes-engines-*"))


def test_shared_server_of_a_killed_run_is_stopped_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = (
        f"import os, tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from support.engines import NatsEngine, shared\n"
        "with shared('nats', NatsEngine): os.kill(os.getpid(), 9)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_XDIST_TESTRUNUID": "killed"}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == -signal.SIGKILL
    (path,) = (path for path in tmp_path.glob("hermes-engines-*") if path.is_dir())
    abandoned = NatsEngine(path).state
    assert is_alive(abandoned.pid, abandoned.start_time)
    with shared("nats", NatsEngine):
        assert not is_alive(abandoned.pid, abandoned.start_time)
        assert not path.exists()
