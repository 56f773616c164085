"""The running server as its home shows it: the lock, its pid, and its state file.

One server holds a home alone, unless all of its servers share a bus: then each has its own state file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hermes.core import home as homes
from hermes.core.errors import HermesError
from hermes.core.home import Home
from hermes.core.json_types import JsonObject
from hermes.core.processes import is_alive, process_start
from hermes.guards.secrets import MARK, Secrets, redact_tree

STATES = ("starting", "running", "draining", "stopped", "startup_failed")
FIELDS = (
    *("pid", "argv", "start_time", "gateway_state", "exit_reason", "host", "port", "active_agents", "platforms"),
    "updated_at",
)
# Wildcard address: its local address.
ANYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
# A check of whether the home is served holds the lock for a moment only.
_TRIES, _WAIT_S = 5, 0.01


class HomeServed(HermesError):
    """Another server holds this home."""

    exit_code = 4


class ServerLock:
    """This process as the server of a home, until released or the process ends."""

    def __init__(self, home: Home, fd: int) -> None:
        self._home, self._fd = home, fd

    @property
    def fd(self) -> int:
        """The locked file: a process that inherits it holds the home too."""
        return self._fd

    def release(self) -> None:
        """May be called again."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        # The lock file stays: others may already have opened it to lock it.
        with contextlib.suppress(OSError):
            if read_pid(self._home) == os.getpid():
                self._home.pid_file.unlink()
        with contextlib.suppress(OSError):
            _own_state_file(self._home).unlink(missing_ok=True)
        os.close(fd)

    def __enter__(self) -> ServerLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def hold(home: Home, *, shared: bool = False) -> ServerLock:
    """Become the server of this home, or learn who is. `shared`: together with others that do so too."""
    homes.make_private_folder(home.path)
    for _ in range(_TRIES):
        fd = _try_lock(home, shared=shared)
        if fd is not None:
            break
        time.sleep(_WAIT_S)
    else:
        raise _served(home)
    lock = ServerLock(home, fd)
    try:
        if not shared:
            homes.write_private(home.pid_file, f"{os.getpid()}\n")
    except BaseException:
        lock.release()
        raise
    return lock


def read_runtime_status(home: Home | None = None) -> JsonObject | None:
    """The state of this home's server; None when there is none or its process has ended.

    `start_time` is that of `hermes.core.processes`: seconds since boot, whatever the clock does.
    """
    if home is None:
        try:
            home = homes.resolve()
        except HermesError:
            return None
    return next((state for file in _state_files(home) if _is_live(state := _read(file))), None)


def write_runtime_status(home: Home, **fields: Any) -> None:
    """Change this process's state file; only for the process that holds the home. Blocks.

    What another process wrote there is dropped. Nothing that looks like a credential is written.
    """
    _check(fields)
    with homes.locked(home.path):
        own = _own_state_file(home)
        file = own if own.exists() else home.state_file
        old = _read(file)
        pid = fields.get("pid", os.getpid())
        start = process_start(pid)
        same = old.get("pid") == pid and old.get("start_time") == start
        new = {**(old if same else _blank(pid, start)), **fields}
        new["argv"] = _masked(new["argv"])
        new["updated_at"] = fields.get("updated_at", time.time())
        text = json.dumps(redact_tree(new, Secrets().redact), ensure_ascii=False, indent=1)
        homes.write_private(file, text.encode("utf-8", "replace") + b"\n")


def _try_lock(home: Home, *, shared: bool) -> int | None:
    fd = homes.private_opener(home.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        # A lock on a file that was deleted meanwhile holds nothing.
        if os.path.samestat(os.fstat(fd), os.stat(home.lock_file)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        os.close(fd)
        message = f"The file cannot be locked ({error.strerror})."
        raise HermesError(message, where=str(home.lock_file), hint="a HERMES_HOME on a local disk") from error
    os.close(fd)
    return None


def _served(home: Home) -> HomeServed:
    state = read_runtime_status(home) or {}
    pid = state.get("pid") or read_pid(home)
    known = [f"pid {pid}"] if pid else []
    if address := server_url(state):
        known.append(address)
    flag = "" if home.profile == homes.DEFAULT_PROFILE else f" -p {home.profile}"
    return HomeServed(
        f"Another server{' (' + ', '.join(known) + ')' if known else ''} holds this home.",
        where=str(home.path),
        hint=f"hermes{flag} gateway stop, or hermes{flag} gateway run --replace",
    )


def server_url(state: JsonObject) -> str:
    host, port = state.get("host"), state.get("port")
    if not host or not port:
        return ""
    return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"


def local_url(home: Home) -> str:
    """The address of a home's running server on this machine; empty when there is none."""
    state = read_runtime_status(home) or {}
    host = str(state.get("host") or "")
    return server_url({**state, "host": ANYWHERE.get(host, host)}) if state.get("gateway_state") == "running" else ""


def read_pid(home: Home) -> int | None:
    try:
        pid = int(home.pid_file.read_text())
    except (OSError, ValueError):
        return None
    return pid if is_alive(pid, None) else None


def read_state(home: Home) -> JsonObject:
    return read_runtime_status(home) or _read(home.state_file)


def _own_state_file(home: Home) -> Path:
    """Of this process, where it shares the home with other servers."""
    return home.server_states / f"{os.uname().nodename}.{os.getpid()}.json"


def _state_files(home: Home) -> Iterator[Path]:
    """Where a server's state may be: this process's own file first, then the home's."""
    yield _own_state_file(home)
    yield home.state_file
    yield from sorted(home.server_states.glob(f"{os.uname().nodename}.*.json"))


def make_own_state(home: Home) -> None:
    """Have this process write its own state file until it releases the home."""
    for file in home.server_states.glob(f"{os.uname().nodename}.*.json"):
        if not is_alive(int(pid) if (pid := file.name.split(".")[-2]).isdecimal() else 0, None):
            file.unlink(missing_ok=True)
    homes.write_private(_own_state_file(home), "{}")


def _read(file: Path) -> JsonObject:
    try:
        state = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def _is_live(state: JsonObject) -> bool:
    pid, start = state.get("pid"), state.get("start_time")
    if type(pid) is not int or not isinstance(start, int | float | None):
        return False
    return is_alive(pid, start)


def _blank(pid: int, start: float | None) -> JsonObject:
    return {
        **dict.fromkeys(FIELDS),
        "pid": pid,
        "argv": list(sys.argv) if pid == os.getpid() else [],
        "start_time": start,
        "active_agents": 0,
        "platforms": {},
    }


def _check(fields: JsonObject) -> None:
    if unknown := sorted(set(fields) - set(FIELDS)):
        raise ValueError(f"The state of a server has no field {', '.join(unknown)}; it has {', '.join(FIELDS)}.")
    state = fields.get("gateway_state", STATES[0])
    if state not in STATES:
        raise ValueError(f"A server is never {state!r}; it is one of {', '.join(STATES)}.")


def _masked(argv: list[str]) -> list[str]:
    """The arguments with the values of credential-like options masked."""

    def takes_secret(option: str) -> bool:
        sample = f"{option}=anything"
        return option.startswith("-") and "=" not in option and Secrets().redact(sample) != sample

    return [MARK if takes_secret(before) else argument for before, argument in zip(["", *argv], argv, strict=False)]
