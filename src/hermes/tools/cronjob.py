"""The tool `cronjob`: jobs that run later without a new request."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta

from hermes.core import limits
from hermes.core.json_types import JsonMapping
from hermes.core.spec import narrowed
from hermes.providers.routes import is_allowed
from hermes.runs import schedule as schedules
from hermes.runs.jobs import route_of
from hermes.sandbox.base import SandboxError
from hermes.sandbox.choose import workspace_of
from hermes.services import jobs as services
from hermes.services.jobs import CEILINGS, GIVEN, Job, public_fields
from hermes.settings.schema_types import Effort
from hermes.tools.framework import approvals, toolsets
from hermes.tools.framework.registry import Answer, Prepared, ToolArguments, ToolContext, ToolDef, ToolError

_Texts = Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(max_length=64)]
_ShortText = Annotated[str, Meta(max_length=200)]


class Cronjob(ToolArguments):
    action: Literal["create", "list", "update", "pause", "resume", "remove", "run"]
    job_id: Annotated[str, Meta(description="Which job; all but create and list need it.")] | None = None
    name: Annotated[str, Meta(max_length=limits.JOB_NAME_CHARS_MAX)] | None = None
    schedule: _ShortText | None = None
    prompt: Annotated[str, Meta(description=f"At most {limits.JOB_PROMPT_CHARS_MAX} characters.")] | None = None
    skills: _Texts | None = None
    model: _ShortText | None = None
    enabled_toolsets: _Texts | None = None
    workdir: Annotated[str, Meta(max_length=4096)] | None = None
    script: Annotated[str, Meta(description="A shell command run before each turn; its output is input.")] | None = None
    effort: Annotated[Effort, Meta(description="How long the model thinks.")] | None = None
    continuity: Annotated[bool, Meta(description="Every run goes on in the same session.")] | None = None
    include_disabled: Annotated[bool, Meta(description="list: paused and finished jobs, too.")] = False
    repeat: Annotated[int, Meta(ge=1, description="How often at most; without it for ever.")] | None = None


async def _prepare(ctx: ToolContext, args: Cronjob) -> Prepared:
    if args.action != "list":
        subject = "\n".join(f"{name}: {value}" for name, value in args.as_json().items() if value)
        await approvals.write(ctx, "cron", subject, required=False, reason="")
    return Prepared()


async def _run(ctx: ToolContext, args: Cronjob) -> Answer:
    store: Any = ctx.resources.engine.store
    action, now = args.action, time.time()
    if action == "list":
        jobs = await _own_jobs(ctx)
        return {"jobs": [public_fields(job) for job in jobs if job["enabled"] or args.include_disabled]}
    await _check_place(ctx, args)
    if action == "create":
        return _answer(await store.jobs.create(await _new_job(ctx, args, now)), now)
    job_id = args.job_id or ""
    job = await store.jobs.get(job_id) if re.fullmatch("[0-9a-f]{12}", job_id) else None
    if job is None or not _is_own(ctx, job):
        raise ToolError(f"There is no job {job_id!r}.", "not_found", "The action list shows the jobs there are.")
    if action == "remove":
        await store.jobs.delete(job["id"])
        return {"removed": job["id"], "name": job["name"]}
    if changes := _changes(ctx, args, job, now):
        job = await store.jobs.update(job["id"], **changes)
        if job is None:
            raise ToolError(f"The job {job_id} is gone.", "not_found", "The action list shows the others.")
    return _answer(job, now)


def _is_own(ctx: ToolContext, job: JsonMapping) -> bool:
    """Same owner and session key."""
    return job["owner"] == ctx.owner and job.get("session_key") == ctx.session_key


async def _own_jobs(ctx: ToolContext) -> list[Job]:
    store: Any = ctx.resources.engine.store
    return [job for job in await store.jobs.list(owner=ctx.owner) if _is_own(ctx, job)]


async def _new_job(ctx: ToolContext, args: Cronjob, now: float) -> Job:
    if len(await _own_jobs(ctx)) >= limits.JOBS_MAX:
        hint = "Remove those no longer needed."
        raise ToolError(f"There are {limits.JOBS_MAX} jobs already.", "limit_reached", hint)
    job = services.new_job(args.as_json(), now, ctx.settings.timezone, ctx.secrets)
    job |= {"owner": ctx.owner, "session_key": ctx.session_key, **_ceilings(ctx, {})}
    return {**job, "origin": {"source": ctx.resources.spec.source, "session_id": ctx.session_id}}


def _changes(ctx: ToolContext, args: Cronjob, job: Job, now: float) -> Job:
    match args.action:
        case "pause":
            return services.pause_changes(job, now)
        case "resume":
            return services.resume_changes(job, now)
        case "run":
            if not job["enabled"]:
                raise ToolError("The job is paused.", "invalid_arguments", "Resume it first.")
            return {"next_run_at": now}
    changes = services.job_changes(job, args.as_json(), now, ctx.secrets)
    if not changes:
        hint = f"Give one of {', '.join((*GIVEN, 'schedule', 'repeat'))}."
        raise ToolError("Nothing was given that is to change.", "invalid_arguments", hint)
    return changes | _ceilings(ctx, job)


def _answer(job: Job, now: float) -> Answer:
    soon = job["enabled"] and job["next_run_at"] is not None and job["next_run_at"] <= now
    zone = schedules.zone_named(job["timezone"])
    times = schedules.next_times(job["schedule"], now, zone) if job["enabled"] else []
    return {"job": public_fields(job), "next_times": times, **({"note": "It is due now."} if soon else {})}


def _ceilings(ctx: ToolContext, job: JsonMapping) -> Job:
    """The ceilings of a job's runs: it may never do more than whoever made or changed it."""
    spec = ctx.resources.spec
    if spec.disabled_toolsets:
        spec = spec.within(frozenset(_all_toolsets(ctx) - spec.disabled_toolsets), None)
    ceilings: Job = {}
    for name in CEILINGS:
        names = narrowed(getattr(spec, name), None if job.get(name) is None else frozenset(job[name]))
        ceilings[name] = None if names is None else sorted(names)
    return ceilings


def _all_toolsets(ctx: ToolContext) -> set[str]:
    return {*toolsets.DEFAULTS, *toolsets.of_servers(ctx.settings)}


async def _check_place(ctx: ToolContext, args: Cronjob) -> None:
    """Check that the toolsets exist, the model and script are allowed, and runs may work in the folder."""
    if args.script and "terminal" not in ctx.tools:
        hint = "Leave `script` out and say in the prompt what is to be done."
        raise ToolError("`script` needs the tool terminal, which this turn does not have.", "invalid_arguments", hint)
    names = _all_toolsets(ctx)
    if unknown := sorted(set(args.enabled_toolsets or ()) - names):
        hint = f"There are: {', '.join(sorted(names))}."
        raise ToolError(f"There is no toolset {', '.join(unknown)}.", "invalid_arguments", hint)
    allowed = ctx.resources.spec.allowed_models
    if args.model and not is_allowed(ctx.settings, allowed, route_of(args.model, None)):
        hint = f"These may be used: {', '.join(sorted(allowed or ()))}."
        raise ToolError(f"The model {args.model!r} may not be used here.", "invalid_arguments", hint)
    if args.workdir:
        try:
            await ctx.blocking(partial(workspace_of, ctx.home, ctx.settings, ctx.owner, ctx.session_key, args.workdir))
        except SandboxError as error:
            hint = "Leave `workdir` out to use the usual workspace."
            raise ToolError(str(error), "invalid_arguments", hint) from None


TOOL = ToolDef(
    name="cronjob",
    toolset="cronjob",
    description=(
        "Have work done later or regularly, each time as a turn of its own that knows only its prompt: write that so "
        f"that it stands alone. A final answer of [SILENT] shows nothing. {schedules.GRAMMAR} The action run makes a job "
        "due at once."
    ),
    arguments=Cronjob,
    run=_run,
    prepare=_prepare,
    effect=lambda args: "read" if args.action == "list" else "effect",
    scope=lambda _: frozenset({"jobs"}),
    available=lambda settings: None if settings.cron.enabled else "jobs are turned off (cron.enabled)",
    preview=lambda args: " ".join(filter(None, (args.action, args.job_id, args.name, args.schedule))),
)
