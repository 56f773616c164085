"""The tool `cronjob`: work to be done later, without anybody asking again."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Any

from hermes.core import limits
from hermes.core.json_types import JsonMapping
from hermes.core.spec import narrowed
from hermes.providers.routes import is_allowed
from hermes.runs import schedule as schedules
from hermes.runs.jobs import route_of
from hermes.sandbox.base import SandboxError
from hermes.sandbox.choose import workspace_of
from hermes.services.jobs import (
    CEILINGS,
    GIVEN,
    Job,
    job_changes,
    new_job,
    pause_changes,
    public_fields,
    resume_changes,
)
from hermes.settings.schema import EFFORTS
from hermes.tools.framework import approvals, toolsets
from hermes.tools.framework.registry import Answer, Args, Prepared, ToolContext, ToolDef, ToolError

ACTIONS = ("create", "list", "update", "pause", "resume", "remove", "run")


class _Jobs:
    """The jobs that a session may see: those of its owner, made under its key."""

    def __init__(self, ctx: ToolContext) -> None:
        store: Any = ctx.resources.engine.store
        self._ctx, self._store = ctx, store.jobs

    async def all(self) -> list[Job]:
        return [job for job in await self._store.list(owner=self._ctx.owner) if self._is_own(job)]

    def _is_own(self, job: JsonMapping) -> bool:
        return job["owner"] == self._ctx.owner and job.get("session_key") == self._ctx.session_key

    async def one(self, args: Args) -> Job:
        job_id = str(args.get("job_id") or "")
        job: Job | None = await self._store.get(job_id) if re.fullmatch("[0-9a-f]{12}", job_id) else None
        if job is None or not self._is_own(job):
            raise ToolError(f"There is no job {job_id!r}.", "not_found", "The action list shows the jobs there are.")
        return job

    async def add(self, args: Args) -> Job:
        ctx, spec = self._ctx, self._ctx.resources.spec
        if len(await self.all()) >= limits.JOBS_MAX:
            raise ToolError(
                f"There are {limits.JOBS_MAX} jobs already.", "limit_reached", "Remove those no longer needed."
            )
        job = new_job(args, time.time(), ctx.settings.timezone, ctx.secrets)
        job |= {"owner": ctx.owner, "session_key": ctx.session_key}
        job |= _ceilings(ctx, {})
        job["origin"] = {"source": spec.source, "session_id": ctx.session_id}
        return await self._store.create(job)  # type: ignore[no-any-return]

    async def change(self, job: Job, **fields: Any) -> Job:
        now: Job | None = await self._store.update(job["id"], **fields)
        if now is None:
            raise ToolError(f"The job {job['id']} is gone.", "not_found", "The action list shows the others.")
        return now

    async def remove(self, job: Job) -> None:
        await self._store.delete(job["id"])


async def _prepare(ctx: ToolContext, args: Args) -> Prepared:
    if args["action"] != "list":
        subject = "\n".join(f"{name}: {value}" for name, value in args.items() if value)
        await approvals.write(ctx, "cron", subject, wanted=False, reason="")
    return Prepared()


async def _run(ctx: ToolContext, args: Args) -> Answer:
    jobs, action, now = _Jobs(ctx), args["action"], time.time()
    if action == "list":
        found = await jobs.all()
        return {"jobs": [public_fields(job) for job in found if job["enabled"] or args.get("include_disabled")]}
    await _check_place(ctx, args)
    if action == "create":
        return _answer(await jobs.add(args), now)
    job = await jobs.one(args)
    if action == "remove":
        await jobs.remove(job)
        return {"removed": job["id"], "name": job["name"]}
    fields: Job = {}
    if action == "update":
        fields = job_changes(job, args, now, ctx.secrets)
        if not fields:
            hint = f"Give one of {', '.join((*GIVEN, 'schedule', 'repeat'))}."
            raise ToolError("Nothing was given that is to change.", "invalid_arguments", hint)
        fields |= _ceilings(ctx, job)
    elif action in ("pause", "resume"):
        fields = pause_changes(job, now) if action == "pause" else resume_changes(job, now)
    elif action == "run":
        if not job["enabled"]:
            raise ToolError("The job is paused.", "invalid_arguments", "Resume it first.")
        fields = {"next_run_at": now}
    return _answer(await jobs.change(job, **fields) if fields else job, now)


def _answer(job: Job, now: float) -> Answer:
    soon = job["enabled"] and job["next_run_at"] is not None and job["next_run_at"] <= now
    zone = schedules.zone_named(job["timezone"])
    times = schedules.next_times(job["schedule"], now, zone) if job["enabled"] else []
    return {"job": public_fields(job), "next_times": times, **({"note": "It is due now."} if soon else {})}


def _ceilings(ctx: ToolContext, job: JsonMapping) -> Job:
    """The ceilings of a job's runs: it may never do more than whoever made or changed it."""
    spec = ctx.resources.spec
    if spec.disabled_toolsets:
        every = {*toolsets.DEFAULTS, *toolsets.of_servers(ctx.settings)}
        spec = spec.within(frozenset(every - spec.disabled_toolsets), None)
    known = {name: None if job.get(name) is None else frozenset(job[name]) for name in CEILINGS}
    found = {name: narrowed(getattr(spec, name), names) for name, names in known.items()}
    return {name: None if names is None else sorted(names) for name, names in found.items()}


async def _check_place(ctx: ToolContext, args: Args) -> None:
    """The toolsets must be known, the model and a script allowed, and the folder one that runs may work in."""
    if args.get("script") and "terminal" not in ctx.tools:
        hint = "Leave `script` out and say in the prompt what is to be done."
        raise ToolError("`script` needs the tool terminal, which this turn does not have.", "invalid_arguments", hint)
    known = {*toolsets.DEFAULTS, *toolsets.of_servers(ctx.settings)}
    if unknown := sorted(set(args.get("enabled_toolsets") or ()) - known):
        hint = f"There are: {', '.join(sorted(known))}."
        raise ToolError(f"There is no toolset {', '.join(unknown)}.", "invalid_arguments", hint)
    allowed = ctx.resources.spec.allowed_models
    if args.get("model") and not is_allowed(ctx.settings, allowed, route_of(args["model"], None)):
        hint = f"These may be used: {', '.join(sorted(allowed or ()))}."
        raise ToolError(f"The model {args['model']!r} may not be used here.", "invalid_arguments", hint)
    if args.get("workdir"):
        find = partial(workspace_of, ctx.home, ctx.settings, ctx.owner, ctx.session_key, args["workdir"])
        try:
            await ctx.blocking(find)
        except SandboxError as error:
            raise ToolError(
                str(error), "invalid_arguments", "Leave `workdir` out to use the usual workspace."
            ) from None


def _available(settings: Any) -> str | None:
    return None if settings.cron.enabled else "jobs are turned off (cron.enabled)"


_TEXTS = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 200}, "maxItems": 64}
TOOL = ToolDef(
    name="cronjob",
    toolset="cronjob",
    description=(
        "Have work done later or regularly, each time as a turn of its own that knows only its prompt: write that so "
        f"that it stands alone. A final answer of [SILENT] shows nothing. {schedules.GRAMMAR} The action run makes a job "
        "due at once."
    ),
    parameters={
        "type": "object",
        "properties": {
            "action": {"type": "string", "enum": list(ACTIONS)},
            "job_id": {"type": "string", "description": "Which job; all but create and list need it."},
            "name": {"type": "string", "maxLength": limits.JOB_NAME_CHARS_MAX},
            "schedule": {"type": "string", "maxLength": 200},
            "prompt": {"type": "string", "description": f"At most {limits.JOB_PROMPT_CHARS_MAX} characters."},
            "skills": _TEXTS,
            "model": {"type": "string", "maxLength": 200},
            "enabled_toolsets": _TEXTS,
            "workdir": {"type": "string", "maxLength": 4096},
            "script": {"type": "string", "description": "A shell command run before each turn; its output is input."},
            "effort": {"type": "string", "enum": list(EFFORTS), "description": "How long the model thinks."},
            "continuity": {"type": "boolean", "description": "Every run goes on in the same session."},
            "include_disabled": {"type": "boolean", "description": "list: paused and finished jobs, too."},
            "repeat": {"type": "integer", "minimum": 1, "description": "How often at most; without it for ever."},
        },
        "required": ["action"],
        "additionalProperties": False,
    },
    run=_run,
    prepare=_prepare,
    effect=lambda args: "read" if args.get("action") == "list" else "effect",
    scope=lambda _: frozenset({"jobs"}),
    available=_available,
    preview=lambda args: " ".join(str(args[name]) for name in ("action", "job_id", "name", "schedule") if name in args),
)
