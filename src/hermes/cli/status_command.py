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
    values = {**facts, "store_bytes": size(facts["store_bytes"])}
    lines = (f"{name.replace('_bytes', ' size').replace('_', ' ')}: {value}" for name, value in values.items())
    print_redacted(args, home, facts, lines)


def _route(args: Args, home: Home) -> str:
    from hermes.services.health import CHECKS, Subject

    try:
        subject = Subject(home, settings_of(args, home))
        findings = [CHECKS[name].look(subject) for name in ("model", "local runtime")]
    except HermesError as error:
        return f"none: {error.message}"
    problem = next((finding.message for finding in findings if finding.state == "fail"), "")
    return f"none: {problem}" if problem else findings[0].message


def _store(home: Home) -> JsonObject:
    from hermes.services.runs import unfinished_runs
    from hermes.services.sessions import database_exists, database_url, open_database
    from hermes.store.jobs import Jobs
    from hermes.store.stores import place_of

    with open_database(home) as db:
        running = len(unfinished_runs(db)[0])
        due = len(Jobs(db.engine).due(time.time()))
        count = db.total_bytes() if database_exists(home) else 0
    return {"runs": running, "jobs_due": due, "store": place_of(database_url(home)), "store_bytes": count}
