"""`hermes cron`: work to be done later: make jobs, look at them, let them rest, run one now."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from argparse import BooleanOptionalAction
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hermes.cli.actions import FLAG, YES, Actions, Args, Arguments, command, number
from hermes.cli.output import (
    Busy,
    Json,
    NotFound,
    UsageError,
    confirmed,
    mask,
    note,
    print_redacted,
    resolve_name,
    secrets,
    silence_logs,
    tool_errors_as_cli,
)
from hermes.cli.session_maintenance import opened
from hermes.core.errors import HermesError
from hermes.core.formatting import columns, iso, local, one_line, span, with_iso, words
from hermes.core.home import Home, is_served
from hermes.settings import config
from hermes.settings.schema import EFFORTS

if TYPE_CHECKING:
    from hermes.core.spec import RunSpec
    from hermes.store.jobs import Jobs
    from hermes.store.sessions import SessionDB
    from hermes.store.stores import Store

EXIT_INTERRUPTED = 130
_MORE = ("provider", "repeat", "session_id", "timezone", "schedule")


def _jobs(db: SessionDB) -> Jobs:
    from hermes.store.jobs import Jobs

    return Jobs(db.engine)


def _job(jobs: Jobs, text: str) -> Json:
    """The job that is meant, by its id, the beginning of it, or its name."""
    known = {job["id"]: job for job in jobs.list()}
    named = [job_id for job_id, job in known.items() if job["name"] == text]
    return known[named[0] if len(named) == 1 else resolve_name(text, known, "job", "hermes cron list")]


def _when(job: Json) -> str:
    """The next time of a job in words."""
    if not job["enabled"] or job["next_run_at"] is None:
        return str(job["state"])
    left = job["next_run_at"] - time.time()
    return f"in {span(left)} ({local(job['next_run_at'])})" if left > 0 else f"due since {span(-left)}"


def _shown(job: Json) -> Json:
    from hermes.tools.cronjob import shown

    told: Json = with_iso(shown(job))
    return told


def _say_unserved(home: Home) -> None:
    if not is_served(home):
        note("No server is up to run jobs. Try: hermes gateway run")


# ---- looking


def _list(args: Args, home: Home) -> None:
    with opened(home) as db:
        known = _jobs(db).list()
    found = known if args.all else [job for job in known if job["enabled"]]
    rows = [(job["id"], job["name"], job["schedule_display"], _when(job), job["last_status"] or "-") for job in found]
    print_redacted(args, home, {"jobs": [_shown(job) for job in found]}, columns(rows, 1))
    if not known:
        note('There are no jobs. Try: hermes cron create "every 1d" "Say what is new."')
    if hidden := len(known) - len(found):
        note(f"Not shown: {hidden} paused or finished. Try: hermes cron list --all")
    if any(job["enabled"] for job in found):
        _say_unserved(home)


def _runs(args: Args, home: Home) -> None:
    from hermes.runs.jobs import ended
    from hermes.store.runs import Runs

    with opened(home) as db:
        job = _job(_jobs(db), args.id)
        found, texts, _ = Runs(db.engine).page(owner=job["owner"], limit=args.limit, job_id=job["id"])
    rows: list[Json] = [
        {"run_id": one.spec.run_id, "status": ended(one.state, texts.get(one.state.final_row or 0))["last_status"]}
        | {"session_id": one.spec.session_id}
        | {"started_at": one.state.started_at, "finished_at": one.state.ended_at, "error": one.state.error or None}
        for one in found
    ]
    about = ["" if one["status"] == "silent" else one["error"] or one["session_id"] for one in rows]
    lines = [
        (one["run_id"], one["status"], local(one["started_at"]), text) for one, text in zip(rows, about, strict=True)
    ]
    print_redacted(args, home, {"job_id": job["id"], "runs": with_iso(rows)}, columns(lines, 3))
    if not found:
        note("It has not run yet.")


def _status(args: Args, home: Home) -> None:
    now, enabled = time.time(), config.load(home).cron.enabled
    with opened(home) as db:
        found = _jobs(db).list()
    active = [job for job in found if job["enabled"] and job["next_run_at"] is not None]
    upcoming = min((job["next_run_at"] for job in active), default=None)
    document = {"enabled": enabled, "server_running": is_served(home), "jobs": len(found), "active": len(active)}
    document |= {"due": sum(job["next_run_at"] <= now for job in active)}
    document |= {"running": sum(job["last_status"] == "running" for job in found)}
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in document.items()]
    lines.append(f"next: {local(upcoming) if upcoming else 'never'}")
    print_redacted(args, home, {**document, "next_run_at": iso(upcoming)}, lines)
    if not enabled:
        note("Jobs are turned off. Try: hermes config set cron.enabled true")
    else:
        _say_unserved(home)


# ---- changing


def _fields(args: Args, home: Home) -> Json:
    """What was given of a job, checked as far as the record itself is not."""
    from hermes.sandbox.choose import workspace_of
    from hermes.tools.cronjob import GIVEN
    from hermes.tools.framework import toolsets

    settings = config.load(home)
    given = {name: value for name in (*GIVEN, *_MORE) if (value := getattr(args, name, None)) is not None}
    if given.get("prompt") == "-":
        given["prompt"] = sys.stdin.read()
    known = {*toolsets.DEFAULTS, *toolsets.of_servers(settings)}
    if unknown := [name for name in given.get("enabled_toolsets", ()) if name not in known]:
        raise UsageError(f"There is no toolset '{unknown[0]}'.", where="--toolsets", hint="hermes tools list")
    if "workdir" in given:
        try:
            workspace_of(home, settings, "default", None, given["workdir"])
        except HermesError as error:
            hint = "hermes config set terminal.workspaces DIR"
            raise UsageError(error.message, where="--workdir", hint=hint) from None
    return given


def _create(args: Args, home: Home) -> None:
    from hermes.core.limits import JOBS_MAX
    from hermes.runs.schedule import next_times, zone_named
    from hermes.tools.cronjob import made

    fields, now = _fields(args, home), time.time()
    with tool_errors_as_cli():
        job = made(fields, now, fields.get("timezone", config.load(home).timezone), secrets(home))
    with opened(home, "make") as db:
        jobs = _jobs(db)
        if len(jobs.list(owner="default")) >= JOBS_MAX:
            raise UsageError(f"There are {JOBS_MAX} jobs already.", hint="hermes cron remove ID")
        job = jobs.create(job | {"owner": "default", "origin": {"source": "cli", "session_id": None}})
    times = next_times(job["schedule"], now, zone_named(job["timezone"]))
    lines = [f"{job['id']}  {one_line(job['name'])}  {job['schedule_display']}", *(f"  {when}" for when in times)]
    print_redacted(args, home, {"job": _shown(job), "next_times": times}, lines)
    _say_unserved(home)


def _change(change: Callable[[Args, Home], Callable[[Json, float], Json]]) -> Callable[[Args, Home], None]:
    """An action that changes a job, given what it changes."""

    def action(args: Args, home: Home) -> None:
        with opened(home, "change") as db, tool_errors_as_cli("hermes cron edit ID --schedule SCHEDULE"):
            jobs = _jobs(db)
            job = _job(jobs, args.id)
            job = jobs.update(job["id"], **change(args, home)(job, time.time())) or job
        print_redacted(args, home, {"job": _shown(job)}, [f"{job['id']}  {one_line(job['name'])}  {_when(job)}"])
        if job["enabled"]:
            _say_unserved(home)

    return action


def _edited(args: Args, home: Home) -> Callable[[Json, float], Json]:
    from hermes.tools.cronjob import changed

    fields = _fields(args, home)
    if not fields:
        raise UsageError("Nothing was given that is to change.", hint="hermes cron edit --help")
    return lambda job, now: changed(job, fields, now, secrets(home))


def _paused_or_resumed(args: Args, home: Home) -> Callable[[Json, float], Json]:
    from hermes.tools.cronjob import paused, resumed

    return paused if args.action == "pause" else resumed


def _remove(args: Args, home: Home) -> int:
    with opened(home, "change") as db:
        jobs = _jobs(db)
        job = _job(jobs, args.id)
        if not confirmed(args, f"Removing the job {job['id']}", f"{job['id']}  {one_line(job['name'])} will be gone."):
            return 1
        jobs.delete(job["id"])
    print_redacted(args, home, {"id": job["id"], "removed": True}, [f"The job {job['id']} is gone."])
    return 0


# ---- running one


def _run(args: Args, home: Home) -> int:
    from hermes.app import new_loop

    silence_logs(args)
    with opened(home, "change") as db:
        job = _job(_jobs(db), args.id)
    with asyncio.Runner(loop_factory=new_loop) as loop:
        return loop.run(_run_now(args, home, job["id"]))


async def _run_now(args: Args, home: Home, job_id: str) -> int:
    """Run it in this process, where every other one can look at it, stop and steer it."""
    from hermes.app import current
    from hermes.cli.runs_command import follow
    from hermes.core.spec import Control
    from hermes.runs.engine import Refused
    from hermes.runs.scheduler import settled

    app, stopped = await current(home), list[Any]()
    app.engine.start_background_tasks(resume=False)
    spec = await app.store.transaction(lambda: _begun(app.store.blocking, job_id))
    try:
        await app.engine.start(spec)
    except Refused as error:
        await app.store.jobs.update(job_id, last_status="failed", last_error=str(error))
        raise Busy(str(error), hint=f"hermes runs list --session {spec.session_id}") from None

    def stop() -> None:
        stopped.append(asyncio.ensure_future(app.engine.control(spec.run_id, Control("interrupt", surface="cli"))))

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
    code = await follow(args, spec.run_id, app.engine.subscribe(spec.run_id), mask(home))
    record = await app.engine.get(spec.run_id)
    if record is not None:
        await app.store.jobs.update(job_id, **await settled(app.engine, record))
    return EXIT_INTERRUPTED if stopped else code


def _begun(store: Store, job_id: str) -> RunSpec:
    """Note in the record that a run has begun, unless one is at work."""
    from hermes.runs.jobs import begun, spec_of

    job, now = store.jobs.get(job_id), time.time()
    if job is None:
        raise NotFound(f"The job {job_id} is gone.")
    last = store.runs.get(job["last_run_id"]) if job["last_run_id"] else None
    held = last is not None and store.leases.holder(f"session:{last.spec.session_id}")
    if last is not None and held and not last.state.ended:
        raise Busy(f"The job {job_id} is running already.", hint=f"hermes runs tail {last.spec.run_id}")
    spec = spec_of(job, now)
    store.jobs.update(job_id, **begun(spec, now))
    return spec


_OPTIONS = "--name --skills --model --provider --toolsets --workdir --repeat --session --timezone --script --effort "
_OPTIONS += "--continuity"
_ARGUMENTS: Arguments = YES | {
    "id": {"metavar": "ID", "help": "a job's id, the beginning of it, or its name"},
    "schedule": {"metavar": "SCHEDULE", "help": "30m, 2h, 1d; every 30m; five fields of cron; or an ISO time"},
    "prompt": {"metavar": "PROMPT", "nargs": "?", "help": "what is to be done; '-' reads it from standard input"},
    "--all": FLAG | {"help": "paused and finished jobs, too"},
    "--continuity": {"action": BooleanOptionalAction, "help": "go on with the same session each time"},
    "--effort": {"metavar": "LEVEL", "help": f"how long the model thinks: {', '.join(EFFORTS)}"},
    "--limit": {"metavar": "N", "type": number, "default": 20, "help": "how many at most (20)"},
    "--model": {"metavar": "NAME", "help": "the model to ask"},
    "--name": {"metavar": "TEXT"},
    "--prompt": {"metavar": "TEXT", "help": "what is to be done; '-' reads it from standard input"},
    "--provider": {"metavar": "ID", "help": "the provider to ask"},
    "--repeat": {"metavar": "N", "type": number, "help": "how often at most"},
    "--schedule": {"metavar": "SCHEDULE"},
    "--script": {"metavar": "COMMAND", "help": "run before each turn; its output is given to the model"},
    "--session": {"metavar": "ID", "dest": "session_id", "help": "go on with this session each time"},
    "--skills": {"metavar": "LIST", "type": words, "help": "skills to use, separated by commas"},
    "--timezone": {"metavar": "NAME", "help": "of the schedule, such as Europe/Berlin"},
    "--toolsets": {"metavar": "LIST", "type": words, "dest": "enabled_toolsets", "help": "only these toolsets"},
    "--workdir": {"metavar": "DIR", "help": "where it works, inside terminal.workspaces"},
}
_ACTIONS: Actions = {
    "list": (_list, "jobs, and when each runs next", "--all"),
    "create": (_create, "a new job; prints its next three times", f"schedule prompt {_OPTIONS}"),
    "edit": (_change(_edited), "change what is given", f"id --schedule --prompt {_OPTIONS}"),
    "pause": (_change(_paused_or_resumed), "let a job rest", "id"),
    "resume": (_change(_paused_or_resumed), "let it go on", "id"),
    "remove": (_remove, "remove a job; its sessions stay", "id -y/--yes"),
    "run": (_run, "run a job now, here, and follow it", "id"),
    "runs": (_runs, "the runs of a job, the latest first", "id --limit"),
    "status": (_status, "whether jobs are run, and when the next is", ""),
}
add_arguments, run = command(_ACTIONS, _ARGUMENTS)
