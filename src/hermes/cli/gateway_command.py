"""`hermes gateway`: run the server, look at it, stop it, and its key."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from typing import NoReturn

from hermes.cli import service  # which declares `install` and `uninstall`, too
from hermes.cli.command import Argument, command, flag
from hermes.cli.output import note, tell
from hermes.core.errors import HermesError
from hermes.core.home import Home, is_served
from hermes.core.json_types import JsonObject
from hermes.core.limits import CLOSE_S_MAX, WORKERS_MAX
from hermes.core.processes import is_alive
from hermes.server import status
from hermes.settings import config

EXIT_DEGRADED, EXIT_NOT_RUNNING = 1, 5
NOW_S = 2.0
_POLL_S = 0.05
_HEALTH_S_MAX = 5.0
_KEY_BYTES = 32
# Beyond the drain: runs that are told to stop, then readers that are still to be told their end.
_END_S_MAX = 5 * CLOSE_S_MAX
# Global options that stand for a setting: as variables, everything in this process sees them.
_VARIABLES = {
    "model": "HERMES_INFERENCE_MODEL",
    "provider": "HERMES_INFERENCE_PROVIDER",
    "toolsets": "API_SERVER_TOOLSETS",
}


class NotStopped(HermesError):
    pass


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 0 to 65535")
    return int(text)


def _workers(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= WORKERS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of workers: from 1 to {WORKERS_MAX}")
    return int(text)


# ---- serving


@command(
    "gateway run",
    Argument("--host", metavar="H", help="listen on this address instead of api_server.host"),
    Argument("--port", metavar="N", type=port, help="listen on this port; 0 takes a free one"),
    flag("--replace", help="stop the server of this home first, if there is one"),
    flag("--allow-local-exec", help="run commands without a sandbox although other machines can connect"),
    Argument("--workers", metavar="N", type=_workers, help="serve with N processes instead of api_server.workers"),
    flag("-v", "--verbose", help="show the log on standard error"),
    help="run the server in the foreground",
)
def _run(args: argparse.Namespace, home: Home) -> int:
    import asyncio

    os.environ |= {"HERMES_HOME": str(home.root), "HERMES_PROFILE": home.profile}
    os.environ |= {variable: getattr(args, flag) for flag, variable in _VARIABLES.items() if getattr(args, flag)}
    if args.replace and is_served(home):
        _end(home, _patience(home))
    options = {
        "host": args.host,
        "port": args.port,
        "allow_local_exec": args.allow_local_exec,
        "verbose": args.verbose,
    }
    if (count := args.workers or _workers_set(home)) > 1:
        from hermes.server.workers import Workers

        return asyncio.run(Workers(home, count, **options).serve())
    from hermes.server import process_tuning

    process_tuning.begin()
    from hermes.app import new_loop
    from hermes.server.runner import GatewayRunner

    server = GatewayRunner(home, **options, afterwards=process_tuning.settle)
    with asyncio.Runner(loop_factory=new_loop) as loop:
        return loop.run(server.serve())


def _workers_set(home: Home) -> int:
    """How many workers are configured. Settings that cannot be read are told by the server, as it starts."""
    try:
        return config.load(home).api_server.workers
    except HermesError:
        return 1


# ---- looking


@command(
    "gateway status",
    flag("--deep", help="show every check with its result"),
    help="show the state of the server; exit 0 running, 1 degraded, 5 not running",
)
def _status(args: argparse.Namespace, home: Home) -> int:
    state = status.read_runtime_status(home)
    if state is None or not is_served(home):
        return _not_running(args, home)
    health, fault = _health(state, _key(home) if args.deep else "")
    readiness = health.get("readiness") or {}
    checks = readiness.get("checks") or {}
    fine = state["gateway_state"] == "running" and readiness.get("status") == "ok"
    document = {
        "state": state["gateway_state"] if fine or state["gateway_state"] != "running" else "degraded",
        "address": status.server_url(state) or None,
        "pid": state["pid"],
        "runs": health.get("active_agents", state.get("active_agents")),
        "store": (checks.get("state_db") or {}).get("status"),
        "bus": (checks.get("bus") or {}).get("status"),
        "profile": home.profile,
        "home": str(home.path),
        "error": fault or None,
    }
    lines = [f"{name}: {'unknown' if value is None else value}" for name, value in document.items() if name != "error"]
    if args.deep:
        document["checks"] = checks
        lines += [f"check {name}: {_told(check)}" for name, check in checks.items()]
    else:
        lines += [f"check {name}: {_told(check)}" for name, check in checks.items() if check.get("status") != "ok"]
    tell(args, document, *lines)
    if fault:
        note(fault)
    return 0 if fine else EXIT_DEGRADED


def _not_running(args: argparse.Namespace, home: Home) -> int:
    last = status.read_state(home)
    reason = last.get("exit_reason") if last.get("gateway_state") == "startup_failed" else None
    document = {"state": "stopped", "address": None, "pid": None, "profile": home.profile, "home": str(home.path)}
    tell(args, {**document, "error": reason}, "state: stopped")
    if reason:
        note(f"The last start failed: {reason}")
    return EXIT_NOT_RUNNING


def _told(check: JsonObject) -> str:
    more = ", ".join(f"{name} {value}" for name, value in check.items() if name != "status" and value is not None)
    return f"{check.get('status')} ({more})" if more else str(check.get("status"))


def _health(state: JsonObject, key: str) -> tuple[JsonObject, str]:
    from http.client import HTTPConnection, HTTPException

    host = str(state.get("host") or "")
    if not state.get("port"):
        return {}, "It does not listen yet."
    connection = HTTPConnection(status.ANYWHERE.get(host, host), state.get("port"), timeout=_HEALTH_S_MAX)
    try:
        connection.request("GET", "/health/detailed", headers={"Authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        document = json.loads(answer.read())
        return (
            (document, "")
            if isinstance(document, dict) and answer.status == 200
            else ({}, f"It answers {answer.status}.")
        )
    except (OSError, HTTPException, ValueError, TypeError) as error:
        return {}, f"It does not answer: {error}."
    finally:
        connection.close()


# ---- stopping


@command(
    "gateway stop",
    flag("--now", help=f"running turns have {NOW_S:g} s"),
    help="stop the server after running turns have ended",
)
def _stop(args: argparse.Namespace, home: Home) -> int:
    if not is_served(home):
        tell(args, {"stopped": False, "pid": None})
        note("No server is running in this home.")
        return EXIT_NOT_RUNNING
    pid = _end(home, NOW_S if args.now else _patience(home), now=args.now)
    tell(args, {"stopped": True, "pid": pid}, f"The server (pid {pid}) has stopped.")
    return 0


def _patience(home: Home) -> float:
    """How long a server of this home may take to end, in seconds."""
    try:
        drain = config.load(home).api_server.drain_seconds
    except HermesError:
        drain = 30.0
    return drain + _END_S_MAX


def _end(home: Home, seconds: float, *, now: bool = False) -> int:
    """Ask the server of a home to end and wait until it has; with `now` it is made to when the time is over."""
    state = status.read_runtime_status(home) or {}
    pid, start = state.get("pid") or status.read_pid(home), state.get("start_time")
    if pid is None:
        if _is_free(home, seconds):
            return 0
        raise NotStopped("A server holds this home, but does not say which process it is.", where=str(home.path))
    if running := state.get("active_agents"):
        note(f"Waiting for {running} running turn{'s' if running > 1 else ''} to end, {seconds:g} s at most.")
    # The second signal ends it at once; the last one cannot be refused.
    steps = [(signal.SIGTERM, seconds), *([(signal.SIGTERM, NOW_S), (signal.SIGKILL, NOW_S)] if now else [])]
    for number, patience in steps:
        try:
            if is_alive(pid, start):
                os.kill(pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            raise NotStopped(f"The server (pid {pid}) belongs to another user.", where=str(home.path)) from None
        if _is_free(home, patience):
            return int(pid)
    raise NotStopped(
        f"The server (pid {pid}) has not stopped within {seconds:g} s.",
        where=str(home.path),
        hint="hermes gateway stop --now",
    )


def _is_free(home: Home, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while is_served(home):
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_S)
    return True


@command("gateway restart", help="restart the installed service, or stop the server and run it here as before")
def _restart(args: argparse.Namespace, home: Home) -> int:
    installed = service.of(home)
    if not installed.is_running():
        _stop_and_run(home)
    installed.restart(_patience(home))
    tell(args, {"restarted": True, "file": str(installed.file)}, f"{installed.manager} has restarted the server.")
    return 0


def _stop_and_run(home: Home) -> NoReturn:
    """Run the server in the place of this command, with the arguments of the one before."""
    state = status.read_state(home)
    if is_served(home):
        _end(home, _patience(home))
    else:
        note("No server was running in this home.")
    argv = [str(word) for word in state.get("argv") or ()][1:]
    if "gateway" not in argv or "run" not in argv:
        argv = ["gateway", "run"]
    command = [sys.executable, "-P", "-m", "hermes", *argv, "-p", home.profile]
    os.environ["HERMES_HOME"] = str(home.root)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)  # noqa: S606  (the server takes the place of this command)


# ---- the key


def _key(home: Home) -> str:
    try:
        return config.load(home).api_server.key
    except HermesError:
        return ""


@command("gateway key", flag("--new", help="make a new key"), help="print the API key; one is made if there is none")
def _show_key(args: argparse.Namespace, home: Home) -> int:
    settings = config.load(home)
    key = settings.api_server.key
    is_new = args.new or not key
    if is_new:
        import secrets

        key = secrets.token_urlsafe(_KEY_BYTES)
        file = config.set_value(home, "api_server.key", key).file
        note(f"A new key is in {file}.")
        origin = config.load(home).origin("api_server.key")
        if origin.source == "environment":
            note(f"The key in the variable {origin.where} still comes first.")
        if is_served(home):
            note("The running server does not know it yet. Try: hermes gateway restart")
    tell(args, {"key": key, "new": is_new}, key)
    return 0
