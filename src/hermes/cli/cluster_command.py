"""`hermes cluster`: several servers with PostgreSQL and NATS on this machine, for trying them out."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection, HTTPException

from hermes.cli.command import Argument, command, flag, number
from hermes.cli.gateway_command import EXIT_DEGRADED, EXIT_NOT_RUNNING, port
from hermes.cli.output import note, tell
from hermes.cli.table import print_table
from hermes.cluster import state as states
from hermes.cluster.engines import HOST
from hermes.cluster.supervisor import REPLICAS_MAX, end_s_max
from hermes.core.errors import HermesError
from hermes.core.home import Home, make_private_folder, private_opener
from hermes.core.json_types import JsonObject
from hermes.server.status import server_url

_READY_S_MAX = 2.0
_POLL_S = 0.05


class NotStarted(HermesError):
    exit_code = 69


class NotStopped(HermesError):
    pass


def _replicas(text: str) -> int:
    if not text.isdecimal() or int(text) > REPLICAS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of replicas: from 0 to {REPLICAS_MAX}")
    return int(text)


@command(
    "cluster up",
    Argument("--replicas", metavar="N", type=_replicas, default=3, help="how many servers (3); 0: engines alone"),
    Argument("--host", metavar="H", default=HOST, help=f"listen on this address ({HOST})"),
    Argument("--port", metavar="N", type=port, default=8642, help="listen on this port (8642); 0 takes a free one"),
    flag("--detach", help="run in the background; return when it is ready"),
    help="start PostgreSQL, NATS and servers behind one address",
)
def _up(args: argparse.Namespace, home: Home) -> int:
    if args.detach:
        return _detach(args, home)
    from hermes.app import new_loop
    from hermes.cluster.supervisor import Supervisor

    supervisor = Supervisor(home, args.replicas, host=args.host, port=args.port, announce=_announce)
    with asyncio.Runner(loop_factory=new_loop) as loop:
        return loop.run(supervisor.serve())


def _announce(line: str) -> None:
    print(line, flush=True)


def _detach(args: argparse.Namespace, home: Home) -> int:
    """Start the same command in a session of its own, and wait for its line."""
    make_private_folder(home.cluster)
    options = ["--replicas", str(args.replicas), "--host", args.host, "--port", str(args.port)]
    # That of a running cluster is the same file, which a second one that is refused must leave as it is.
    with open(home.cluster / "up.log", "a+b", opener=private_opener) as errors:
        begin = errors.seek(0, os.SEEK_END)
        process = subprocess.Popen(  # noqa: S603  (this very command)
            [sys.executable, "-P", "-m", "hermes", "-p", home.profile, "cluster", "up", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "HERMES_HOME": str(home.root)},
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout as output:
            ready = output.readline()
        if ready:
            process.returncode = 0  # it goes on without this process
            tell(args, {"address": address(home) or None, "pid": process.pid}, ready.rstrip())
            return 0
        code = process.wait()
        errors.seek(begin)
        sys.stderr.write(errors.read().decode(errors="replace"))
    if code < 0:
        message = f"The cluster's process was killed (signal {-code}) before it was ready."
        raise NotStarted(message, where=errors.name, hint="hermes cluster up, which also ends what is left of it")
    return code


# ---- looking


def address(home: Home) -> str:
    state = states.read(home)
    return server_url({"host": state.host, "port": state.port}) if state is not None else ""


@command("cluster status", help="exit 0 when all of it runs, 1 when a part does not, 5 when it does not run")
def _status(args: argparse.Namespace, home: Home) -> int:
    state = states.read(home)
    if state is None or not state.is_running:
        remains = [] if state is None else [one for one in (*state.replicas, *state.engines) if one.is_running]
        tell(args, {"state": "stopped", "remains": [one.pid for one in remains]}, "state: stopped")
        if remains:
            note(f"{len(remains)} of its processes still run. Try: hermes cluster down")
        return EXIT_NOT_RUNNING
    engines: list[JsonObject] = [
        {"name": one.name, "state": _running(one), "address": f"{HOST}:{one.port}", "pid": one.pid}
        for one in state.engines
    ]
    replicas: list[JsonObject] = [
        {
            "name": f"replica {one.number}",
            "state": _health(one),
            "address": server_url({"host": HOST, "port": one.port}) or None,
            "pid": one.pid,
            "restarts": one.restarts,
        }
        for one in state.replicas
    ]
    fine = all(one["state"] in ("running", "ready") for one in (*engines, *replicas))
    document = {
        "state": "running" if fine else "degraded",
        "address": address(home) or None,
        "pid": state.pid,
        "engines": engines,
        "replicas": replicas,
    }
    own: JsonObject = {"name": "proxy", **{name: document[name] for name in ("state", "address", "pid")}}
    rows = [
        [one["name"], one["state"], one["address"] or "", f"pid {one['pid']}", _restarts(one.get("restarts"))]
        for one in (*([own] if replicas else []), *engines, *replicas)
    ]
    print_table(args, home, document, rows, flexible=2)
    return 0 if fine else EXIT_DEGRADED


def _running(process: states.ProcessState) -> str:
    return "running" if process.is_running else "dead"


def _restarts(count: int | None) -> str:
    return f"started again {count} times" if count and count > 1 else "started again once" if count else ""


def _health(replica: states.ReplicaState) -> str:
    """What a replica says of itself."""
    if not replica.is_running or not replica.port:
        return "starting" if replica.is_running else "dead"
    connection = HTTPConnection(HOST, replica.port, timeout=_READY_S_MAX)
    try:
        connection.request("GET", "/health/ready")
        return "ready" if connection.getresponse().status == 200 else "not ready"
    except (OSError, HTTPException):
        return "not answering"
    finally:
        connection.close()


@command("cluster env", help="print the addresses of PostgreSQL and NATS, with passwords, as variables for a shell")
def _env(args: argparse.Namespace, home: Home) -> int:
    states.running(home)
    variables = {variable: engine.url for variable, engine in states.engines_of(home).items()}
    tell(args, variables, *(f"export {name}={shlex.quote(url)}" for name, url in variables.items()))
    return 0


# ---- ending


@command(
    "cluster kill",
    Argument("number", metavar="N", type=number, help="the replica's number, from 1"),
    flag("--stay-dead", help="do not start it again"),
    help="kill a replica (SIGKILL), to see its runs continue elsewhere",
)
def _kill(args: argparse.Namespace, home: Home) -> int:
    replica = states.replica(home, args.number)
    if not replica.is_running:
        raise states.ClusterNotFound(f"Replica {args.number} is not running.", hint="hermes cluster status")
    if args.stay_dead:
        states.stay_dead_file(home, args.number).touch(mode=0o600)
    replica.signal(signal.SIGKILL)
    tell(args, {"killed": args.number, "pid": replica.pid}, f"Replica {args.number} (pid {replica.pid}) was killed.")
    return 0


@command("cluster down", help="let running turns end, then stop everything; the data stays")
def _down(args: argparse.Namespace, home: Home) -> int:
    state = states.read(home)
    if state is None:
        tell(args, {"stopped": False})
        note("No cluster is running in this home.")
        return EXIT_NOT_RUNNING
    state.signal(signal.SIGTERM)
    until = time.monotonic() + end_s_max(home)
    while state.is_running:
        if time.monotonic() >= until:
            raise NotStopped(f"The cluster (pid {state.pid}) has not stopped in time.", where=str(home.path))
        time.sleep(_POLL_S)
    states.remove_remains(home, states.engines_of(home).values())
    tell(args, {"stopped": True}, "The cluster has stopped.")
    return 0
