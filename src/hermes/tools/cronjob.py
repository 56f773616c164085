"""The tool `cronjob`, and what a job's record is made of: work to be done later, without anybody asking again."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hermes.core.limits import JOB_NAME_CHARS_MAX, JOB_PROMPT_CHARS_MAX, JOB_SCRIPT_CHARS_MAX, JOBS_MAX
from hermes.core.spec import narrowed
from hermes.guards.exfiltration import exfiltrates
from hermes.guards.injection import suspicious
from hermes.providers.routes import is_allowed
from hermes.runs import schedule as schedules
from hermes.runs.jobs import route_of
from hermes.sandbox.base import SandboxError
from hermes.sandbox.choose import workspace_of
from hermes.settings.schema import EFFORTS
from hermes.tools.framework import approvals, toolsets
from hermes.tools.framework.registry import Answer, Args, Prepared, ToolContext, ToolDef, ToolError

if TYPE_CHECKING:
    from hermes.guards.secrets import Secrets

Job = dict[str, Any]
ACTIONS = ("create", "list", "update", "pause", "resume", "remove", "run")
GIVEN = (
    *("name", "prompt", "skills", "model", "enabled_toolsets", "workdir"),
    *("script", "effort", "continuity"),
)
# What a job's record has besides what it was given; `session_key` and the ceilings bind its runs and are not shown.
_EMPTY: Job = {
    "name": "", "prompt": "", "skills": [], "model": None, "provider": None, "enabled_toolsets": None, "workdir": None,
    "last_run_at": None, "last_status": None, "last_error": None, "last_run_id": None, "session_id": None,
    "last_session_id": None, "deliver": "local", "origin": None, "paused_at": None, "paused_reason": None,
    "script": None, "effort": None, "continuity": False,
}  # fmt: skip
_TEXT_LIMITS = {"name": JOB_NAME_CHARS_MAX, "prompt": JOB_PROMPT_CHARS_MAX, "script": JOB_SCRIPT_CHARS_MAX}
_CEILINGS = ("tool_policy", "allowed_models")
_HIDDEN = ("owner", "session_key", *_CEILINGS)


def made(fields: Mapping[str, Any], now: float, timezone: str, secrets: Secrets) -> Job:
    """A new job's record. Raises ToolError: bad_schedule, contains_secret, injection_suspected, invalid_arguments."""
    prompt = str(fields.get("prompt") or "").strip()
    if not prompt and not fields.get("skills"):
        raise ToolError("`prompt` is missing: say what the job is to do.", "invalid_arguments")
    begin = {"timezone": timezone, "enabled": True, "state": "scheduled", "created_at": now}
    job = {**_EMPTY, **begin, "name": prompt[:60].splitlines()[0] if prompt else "Job"}
    job["repeat"] = {"times": None, "completed": 0}
    return {**job, **changed(job, {"schedule": "", **fields}, now, secrets)}


def changed(job: Mapping[str, Any], fields: Mapping[str, Any], now: float, secrets: Secrets) -> Job:
    """What of a job's record becomes different. Raises as `made`."""
    found: Job = {name: fields[name] for name in (*GIVEN, "provider", "session_id") if name in fields}
    for name, most in _TEXT_LIMITS.items():
        if found.get(name) is not None:
            _check_text(name, str(found[name]), most, secrets)
    if found.get("effort") not in (None, *EFFORTS):
        raise ToolError(f"`effort` is one of {', '.join(EFFORTS)}.", "invalid_arguments")
    if {**job, **found}.get("continuity") and {**job, **found}["session_id"]:
        hint = "Leave one of them out."
        raise ToolError(
            "`continuity` has a session of its own and cannot go with session_id.", "invalid_arguments", hint
        )
    zone = str(fields.get("timezone", job["timezone"]) or "")
    try:
        if "schedule" in fields or zone != job["timezone"]:
            where = schedules.zone_named(zone)
            text = fields.get("schedule")
            found["schedule"] = schedules.parse(str(text), now, where) if text is not None else job["schedule"]
            found |= {"timezone": zone, "schedule_display": found["schedule"]["display"]}
            found["next_run_at"] = schedules.next_time(found["schedule"], now, where)
            found |= {"state": "scheduled" if job["enabled"] else "paused"}
    except schedules.BadSchedule as error:
        raise ToolError(str(error), "bad_schedule") from None
    once = {**job, **found}["schedule"]["kind"] == "once"
    if "repeat" in fields or (once and job["repeat"]["times"] is None):
        found["repeat"] = {"times": fields.get("repeat") or (1 if once else None), "completed": 0}
    return found


def paused(job: Mapping[str, Any], now: float) -> Job:
    """What becomes different of a job that is to rest."""
    return {"enabled": False, "state": "paused", "paused_at": now} if job["enabled"] else {}


def resumed(job: Mapping[str, Any], now: float) -> Job:
    """What becomes different of a job that is to go on."""
    if job["enabled"]:
        return {}
    following = schedules.next_time(job["schedule"], now, schedules.zone_named(job["timezone"]))
    if following is None:
        raise ToolError("Its time is over.", "bad_schedule", "Give it another schedule with the action update.")
    begin: Job = {"enabled": True, "state": "scheduled", "paused_at": None, "paused_reason": None}
    return {**begin, "next_run_at": following}


def shown(job: Mapping[str, Any]) -> Job:
    """The record as it is told, also one that was kept before all of its fields were known."""
    return {name: value for name, value in {**_EMPTY, **job}.items() if name not in _HIDDEN}


def _check_text(name: str, text: str, most: int, secrets: Secrets) -> None:
    if not text.strip() or len(text) > most:
        raise ToolError(f"`{name}` has {len(text)} characters; 1 to {most} are possible.", "invalid_arguments")
    if secrets.redact(text) != text:
        raise ToolError(f"`{name}` holds a secret.", "contains_secret", "Leave it out; the job finds it where you did.")
    if why := suspicious(text) or exfiltrates(text):
        raise ToolError(f"`{name}` cannot be kept: {why}.", "injection_suspected", "Say plainly what is to be done.")


class _Jobs:
    """The jobs that a session may see: those of its owner, made under its key."""

    def __init__(self, ctx: ToolContext) -> None:
        store: Any = ctx.resources.engine.store
        self._ctx, self._store = ctx, store.jobs

    async def all(self) -> list[Job]:
        return [job for job in await self._store.list(owner=self._ctx.owner) if self._is_own(job)]

    def _is_own(self, job: Mapping[str, Any]) -> bool:
        return job["owner"] == self._ctx.owner and job.get("session_key") == self._ctx.session_key

    async def one(self, args: Args) -> Job:
        job_id = str(args.get("job_id") or "")
        job: Job | None = await self._store.get(job_id) if re.fullmatch("[0-9a-f]{12}", job_id) else None
        if job is None or not self._is_own(job):
            raise ToolError(f"There is no job {job_id!r}.", "not_found", "The action list shows the jobs there are.")
        return job

    async def add(self, args: Args) -> Job:
        ctx, spec = self._ctx, self._ctx.resources.spec
        if len(await self.all()) >= JOBS_MAX:
            raise ToolError(f"There are {JOBS_MAX} jobs already.", "limit_reached", "Remove those no longer needed.")
        job = made(args, time.time(), ctx.settings.timezone, ctx.secrets)
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
        return {"jobs": [shown(job) for job in found if job["enabled"] or args.get("include_disabled")]}
    await _check_place(ctx, args)
    if action == "create":
        return _told(await jobs.add(args), now)
    job = await jobs.one(args)
    if action == "remove":
        await jobs.remove(job)
        return {"removed": job["id"], "name": job["name"]}
    fields: Job = {}
    if action == "update":
        fields = changed(job, args, now, ctx.secrets)
        if not fields:
            hint = f"Give one of {', '.join((*GIVEN, 'schedule', 'repeat'))}."
            raise ToolError("Nothing was given that is to change.", "invalid_arguments", hint)
        fields |= _ceilings(ctx, job)
    elif action in ("pause", "resume"):
        fields = paused(job, now) if action == "pause" else resumed(job, now)
    elif action == "run":
        if not job["enabled"]:
            raise ToolError("The job is paused.", "invalid_arguments", "Resume it first.")
        fields = {"next_run_at": now}
    return _told(await jobs.change(job, **fields) if fields else job, now)


def _told(job: Job, now: float) -> Answer:
    soon = job["enabled"] and job["next_run_at"] is not None and job["next_run_at"] <= now
    zone = schedules.zone_named(job["timezone"])
    times = schedules.next_times(job["schedule"], now, zone) if job["enabled"] else []
    return {"job": shown(job), "next_times": times, **({"note": "It is due now."} if soon else {})}


def _ceilings(ctx: ToolContext, job: Mapping[str, Any]) -> Job:
    """The ceilings of a job's runs: it may never do more than whoever made or changed it."""
    spec = ctx.resources.spec
    if spec.disabled_toolsets:
        every = {*toolsets.DEFAULTS, *toolsets.of_servers(ctx.settings)}
        spec = spec.within(frozenset(every - spec.disabled_toolsets), None)
    known = {name: None if job.get(name) is None else frozenset(job[name]) for name in _CEILINGS}
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
            "name": {"type": "string", "maxLength": JOB_NAME_CHARS_MAX},
            "schedule": {"type": "string", "maxLength": 200},
            "prompt": {"type": "string", "description": f"At most {JOB_PROMPT_CHARS_MAX} characters."},
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
