"""`hermes cron`: work to be done later: make jobs, look at them, let them rest, run one now."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from argparse import BooleanOptionalAction
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hermes.cli import output
from hermes.cli.command import YES, Args, Argument, command, flag, number
from hermes.cli.output import EXIT_INTERRUPTED, UsageError, note, print_redacted, service_errors
from hermes.cli.session_maintenance import opened
from hermes.cli.table import print_table
from hermes.core.errors import HermesError
from hermes.core.formatting import counted, iso, local, one_line, span, with_iso, words
from hermes.core.home import Home, is_served
from hermes.core.json_types import JsonObject
from hermes.core.limits import JOBS_MAX
from hermes.core.spec import Control, RunSpec
from hermes.runs.jobs import run_started, spec_of, with_delivery
from hermes.services import jobs as service
from hermes.services.delivery import TARGETS, checked_target
from hermes.settings import config
from hermes.settings.schema_types import EFFORTS
from hermes.store.jobs import Jobs
from hermes.store.runs import Runs

if TYPE_CHECKING:
    from hermes.store.stores import Store

_MORE = ("deliver", "provider", "repeat", "session_id", "timezone", "schedule")
_ID = Argument("id", metavar="ID", help="a job's id, the beginning of it, or its name")
_OPTIONS = (
    Argument("--name", metavar="TEXT"),
    Argument("--skills", metavar="LIST", type=words, help="skills to use, separated by commas"),
    Argument("--model", metavar="NAME", help="the model to use"),
    Argument("--provider", metavar="ID", help="the provider to use"),
    Argument("--toolsets", metavar="LIST", type=words, dest="enabled_toolsets", help="only these toolsets"),
    Argument("--workdir", metavar="DIR", help="its working folder, inside terminal.workspaces"),
    Argument("--repeat", metavar="N", type=number, help="run at most N times"),
    Argument("--session", metavar="ID", dest="session_id", help="continue this session each time"),
    Argument("--timezone", metavar="NAME", help="time zone of the schedule, such as Europe/Berlin"),
    Argument("--script", metavar="COMMAND", help="run before each turn; its output is given to the model"),
    Argument("--effort", metavar="LEVEL", help=f"how long the model thinks: {', '.join(EFFORTS)}"),
    Argument("--deliver", metavar="TARGET", help=f"where results go besides the session: {TARGETS}"),
    Argument("--continuity", action=BooleanOptionalAction, help="continue the same session each time"),
)


def _find(jobs: Jobs, text: str) -> JsonObject:
    """The job that is meant, by its id, the beginning of it, or its name."""
    by_id = {job["id"]: job for job in jobs.list()}
    named = [job_id for job_id, job in by_id.items() if job["name"] == text]
    return by_id[named[0] if len(named) == 1 else output.resolve_name(text, by_id, "job", "hermes cron list")]


def _next_time(job: JsonObject) -> str:
    if not job["enabled"] or job["next_run_at"] is None:
        return str(job["state"])
    left = job["next_run_at"] - time.time()
    return f"in {span(left)} ({local(job['next_run_at'])})" if left > 0 else f"due since {span(-left)}"


def _last(job: JsonObject) -> str:
    return f"{job['last_status'] or '-'}{', not delivered' if service.delivery_fault(job) else ''}"


def _note_undelivered(jobs: list[JsonObject]) -> None:
    for job in jobs:
        if fault := service.delivery_fault(job):
            note(f"{one_line(job['name'])} is not delivered: {one_line(fault)} Try: hermes cron runs {job['id']}")


def _note_unserved(home: Home) -> None:
    if not is_served(home):
        note("No server is running: jobs wait for one. Try: hermes gateway run")


# ---- looking


@command("cron list", flag("--all", help="paused and finished jobs too"), help="list jobs with their next time")
def _list(args: Args, home: Home) -> None:
    with opened(home) as db:
        jobs = Jobs(db.engine).list()
    shown = jobs if args.all else [job for job in jobs if job["enabled"]]
    rows = [(job["id"], job["name"], job["schedule_display"], _next_time(job), _last(job)) for job in shown]
    document = {"jobs": [with_iso(service.public_fields(job)) for job in shown]}
    print_table(args, home, document, rows, flexible=1)
    if not jobs:
        note('There are no jobs. Try: hermes cron create "every 1d" "Say what is new."')
    if hidden := len(jobs) - len(shown):
        note(f"Not shown: {hidden} paused or finished. Try: hermes cron list --all")
    _note_undelivered(shown)
    if any(job["enabled"] for job in shown):
        _note_unserved(home)


@command(
    "cron runs",
    _ID,
    Argument("--limit", metavar="N", type=number, default=20, help="how many at most (20)"),
    help="list the runs of a job, newest first",
)
def _runs(args: Args, home: Home) -> None:
    with opened(home) as db:
        job = _find(Jobs(db.engine), args.id)
        runs = service.job_history(Runs(db.engine), job, args.limit)
    rows = []
    for run in runs:
        about = "" if run["status"] == "silent" else run["error"] or run["session_id"]
        rows.append((run["run_id"], run["status"], local(run["started_at"]), _delivery(run["delivery"]), about))
    document = {"job_id": job["id"], "runs": with_iso(runs)}
    print_table(args, home, document, rows, flexible=4, empty="It has not run yet.")


def _delivery(entry: JsonObject | None) -> str:
    if entry is None:
        return "-"
    tried = f" after {counted(entry['attempts'], 'attempt')}" if entry["attempts"] > 1 else ""
    return f"{entry['status']}{tried}" + (f": {entry['error']}" if entry["error"] else "")


@command("cron status", help="show whether jobs are run, and when the next one is due")
def _status(args: Args, home: Home) -> None:
    now, enabled = time.time(), config.load(home).cron.enabled
    with opened(home) as db:
        jobs = Jobs(db.engine).list()
    active = [job for job in jobs if job["enabled"] and job["next_run_at"] is not None]
    upcoming = min((job["next_run_at"] for job in active), default=None)
    document = {
        "enabled": enabled,
        "server_running": is_served(home),
        "jobs": len(jobs),
        "active": len(active),
        "due": sum(job["next_run_at"] <= now for job in active),
        "running": sum(job["last_status"] == "running" for job in jobs),
        "undelivered": sum(service.delivery_fault(job) is not None for job in jobs),
    }
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in document.items()]
    lines.append(f"next: {local(upcoming) if upcoming else 'never'}")
    print_redacted(args, home, {**document, "next_run_at": iso(upcoming)}, lines)
    _note_undelivered(jobs)
    if not enabled:
        note("Jobs are turned off. Try: hermes config set cron.enabled true")
    else:
        _note_unserved(home)


# ---- changing


def _fields(args: Args, home: Home) -> JsonObject:
    """The fields of a job that were given, checked as far as the record itself is not."""
    from hermes.sandbox.choose import workspace_of
    from hermes.tools.framework import toolsets

    settings = config.load(home)
    given = {name: value for name in (*service.GIVEN, *_MORE) if (value := getattr(args, name, None)) is not None}
    if given.get("prompt") == "-":
        given["prompt"] = sys.stdin.read()
    known = [*toolsets.DEFAULTS, *toolsets.of_servers(settings)]
    output.check_toolsets(given.get("enabled_toolsets", ()), known, "--toolsets")
    if "deliver" in given:
        with service_errors():
            given["deliver"] = checked_target(given["deliver"], home)
        if given["deliver"] == "notify" and not settings.notify.command:
            note("notify.command is not set. Try: hermes config describe notify.command")
    if "workdir" in given:
        try:
            workspace_of(home, settings, "default", None, given["workdir"])
        except HermesError as error:
            hint = "hermes config set terminal.workspaces DIR"
            raise UsageError(error.message, where="--workdir", hint=hint) from None
    return given


@command(
    "cron create",
    Argument("schedule", metavar="SCHEDULE", help="30m, 2h, 1d; every 30m; five fields of cron; or an ISO time"),
    Argument("prompt", metavar="PROMPT", nargs="?", help="the prompt; '-' reads it from standard input"),
    *_OPTIONS,
    help="create a job; prints its next three times",
)
def _create(args: Args, home: Home) -> None:
    from hermes.runs.schedule import next_times, zone_named

    fields, now = _fields(args, home), time.time()
    with service_errors("hermes cron create --help"):
        job = service.new_job(fields, now, fields.get("timezone", config.load(home).timezone), output.secrets(home))
    with opened(home, "make") as db:
        jobs = Jobs(db.engine)
        if len(jobs.list(owner="default")) >= JOBS_MAX:
            raise UsageError(f"There are {JOBS_MAX} jobs already.", hint="hermes cron remove ID")
        job = jobs.create(job | {"owner": "default", "origin": {"source": "cli", "session_id": None}})
    times = next_times(job["schedule"], now, zone_named(job["timezone"]))
    lines = [f"{job['id']}  {one_line(job['name'])}  {job['schedule_display']}", *(f"  {when}" for when in times)]
    print_redacted(args, home, {"job": with_iso(service.public_fields(job)), "next_times": times}, lines)
    _note_unserved(home)


def _change(args: Args, home: Home, changes: Callable[[JsonObject, float], JsonObject]) -> None:
    with opened(home, "change") as db, service_errors("hermes cron edit ID --schedule SCHEDULE"):
        jobs = Jobs(db.engine)
        job = _find(jobs, args.id)
        job = jobs.update(job["id"], **changes(job, time.time())) or job
    line = f"{job['id']}  {one_line(job['name'])}  {_next_time(job)}"
    print_redacted(args, home, {"job": with_iso(service.public_fields(job))}, [line])
    if job["enabled"]:
        _note_unserved(home)


@command(
    "cron edit",
    _ID,
    Argument("--schedule", metavar="SCHEDULE"),
    Argument("--prompt", metavar="TEXT", help="the prompt; '-' reads it from standard input"),
    *_OPTIONS,
    help="change a job",
)
def _edit(args: Args, home: Home) -> None:
    fields = _fields(args, home)
    if not fields:
        raise UsageError("Nothing was given that is to change.", hint="hermes cron edit --help")
    _change(args, home, lambda job, now: service.job_changes(job, fields, now, output.secrets(home)))


@command("cron pause", _ID, help="pause a job")
def _pause(args: Args, home: Home) -> None:
    _change(args, home, service.pause_changes)


@command("cron resume", _ID, help="resume a job")
def _resume(args: Args, home: Home) -> None:
    _change(args, home, service.resume_changes)


@command("cron remove", _ID, YES, help="remove a job; its sessions stay")
def _remove(args: Args, home: Home) -> int:
    with opened(home, "change") as db:
        jobs = Jobs(db.engine)
        job = _find(jobs, args.id)
        about = f"{job['id']}  {one_line(job['name'])} will be gone."
        if not output.confirmed(args, f"Removing the job {job['id']}", about):
            return 1
        jobs.delete(job["id"])
    print_redacted(args, home, {"id": job["id"], "removed": True}, [f"The job {job['id']} is gone."])
    return 0


# ---- running one


@command("cron run", _ID, help="run a job now, here, and follow it")
def _run(args: Args, home: Home) -> int:
    from hermes.app import new_loop

    output.silence_logs(args)
    with opened(home, "change") as db:
        job = _find(Jobs(db.engine), args.id)
    with asyncio.Runner(loop_factory=new_loop) as loop:
        return loop.run(_run_now(args, home, job["id"]))


async def _run_now(args: Args, home: Home, job_id: str) -> int:
    """Run it in this process, where every other one can look at it, stop and steer it."""
    from hermes.app import current
    from hermes.cli.runs_command import follow
    from hermes.runs.engine import Refused
    from hermes.runs.scheduler import deliver_due, settled

    app, stops = await current(home), list[Any]()
    app.engine.start_background_tasks(resume=False)
    spec = await app.store.transaction(lambda: _begin(app.store.blocking, job_id))
    try:
        await app.engine.start(spec)
    except Refused as error:
        await app.store.jobs.update(job_id, last_status="failed", last_error=str(error))
        raise output.Busy(str(error), hint=f"hermes runs list --session {spec.session_id}") from None

    def stop() -> None:
        stops.append(asyncio.ensure_future(app.engine.control(spec.run_id, Control("interrupt", surface="cli"))))

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
    code = await follow(args, spec.run_id, app.engine.subscribe(spec.run_id), output.mask(home))
    record = await app.engine.get(spec.run_id)
    if record is not None and (job := await app.store.jobs.get(job_id)) is not None:
        outcome = with_delivery(job, await settled(app.engine, record), spec.run_id, time.time())
        job = await app.store.jobs.update(job_id, **outcome) or job
        if not is_served(home):  # else the server does it
            await deliver_due(app.engine, app.store.jobs, job, app.deliverer())
    return EXIT_INTERRUPTED if stops else code


def _begin(store: Store, job_id: str) -> RunSpec:
    """Note in the record that a run has begun, unless one is at work."""
    job, now = store.jobs.get(job_id), time.time()
    if job is None:
        raise output.NotFound(f"The job {job_id} is gone.")
    last = store.runs.get(job["last_run_id"]) if job["last_run_id"] else None
    if last is not None and not last.state.ended and store.leases.holder(f"session:{last.spec.session_id}"):
        raise output.Busy(f"The job {job_id} is running already.", hint=f"hermes runs tail {last.spec.run_id}")
    spec = spec_of(job, now)
    store.jobs.update(job_id, **run_started(spec, now))
    return spec
