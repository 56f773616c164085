"""`hermes status`: how things stand, in a few lines."""

from __future__ import annotations

import time

from hermes.cli.command import Args, command
from hermes.cli.output import print_redacted, settings_of
from hermes.core.errors import HermesError
from hermes.core.formatting import size
from hermes.core.home import Home, is_served
from hermes.core.json_types import JsonObject


@command("status")
def _status(args: Args, home: Home) -> None:
    from hermes.server import status

    state = status.read_runtime_status(home) if is_served(home) else None
    server = f"{state['gateway_state']} at {status.server_url(state)} (pid {state['pid']})" if state else "not running"
    facts: JsonObject = {"profile": home.profile, "home": str(home.path), "route": _route(args, home), "server": server}
    facts |= _store(home)
    told = {**facts, "store_bytes": size(facts["store_bytes"])}
    print_redacted(
        args, home, facts, (f"{name.replace('_bytes', ' size').replace('_', ' ')}: {told[name]}" for name in told)
    )


def _route(args: Args, home: Home) -> str:
    from hermes.core.spec import RouteChoice
    from hermes.services import models

    try:
        settings = settings_of(args, home)
        route = models.primary(settings, RouteChoice())
    except HermesError as error:
        return f"none: {error.message}"
    problem = models.problem_of(settings, route, home)
    return f"none: {problem}" if problem else f"{route.provider}/{route.model}"


def _store(home: Home) -> JsonObject:
    from hermes.cli.session_maintenance import database_file, opened
    from hermes.services.runs import unfinished_runs
    from hermes.store.jobs import Jobs

    file = database_file(home)
    with opened(home) as db:
        running = len(unfinished_runs(db)[0])
        due = len(Jobs(db.engine).due(time.time()))
    count = sum(path.stat().st_size for path in (file, file.with_name(f"{file.name}-wal")) if path.exists())
    return {"runs": running, "jobs_due": due, "store": str(file), "store_bytes": count}
