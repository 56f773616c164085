"""Jobs: scheduled work and its runs."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import LEASE_POLL_S, LEASE_TTL_S
from hermes.core.processes import this_process
from hermes.runs.engine import Refused
from hermes.runs.jobs import run_started, spec_of
from hermes.server import outcome
from hermes.server.errors import ApiError, answer, invalid
from hermes.server.idempotency import idempotent_run_id, request_created_at, resumed_admission
from hermes.server.keys import caller_of
from hermes.server.models import JobPatch, JobRequest
from hermes.server.query_params import Cursor, Page, paging
from hermes.server.request_options import session_id_of, toolsets_of, workdir_of
from hermes.server.routes import route
from hermes.server.runs import RunList, run_page
from hermes.server.turn_spec import check_model, route_of
from hermes.services.jobs import job_changes, new_job, pause_changes, public_fields, resume_changes
from hermes.services.sessions import unknown_session

if TYPE_CHECKING:
    from hermes.server.context import ServerContext
    from hermes.store.stores import AsyncStore

Record = JsonObject
_JOB = "/api/jobs/{job_id}"
_ID = re.compile(r"[0-9a-f]{12}")


class Job(Struct, kw_only=True):
    """Scheduled work, and what came of it the last time."""

    name: str
    prompt: str
    skills: list[str]
    model: str | None
    provider: str | None
    enabled_toolsets: list[str] | None
    workdir: str | None
    last_run_at: float | None
    last_status: str | None
    last_error: str | None
    last_run_id: str | None
    session_id: str | None
    last_session_id: str | None
    deliver: str
    deliveries: list[JsonObject]
    origin: JsonObject | None
    paused_at: float | None
    paused_reason: str | None
    script: str | None
    effort: str | None
    continuity: bool
    id: str
    enabled: bool
    state: Literal["scheduled", "paused", "completed", "failed"]
    created_at: float
    next_run_at: float | None
    timezone: str
    repeat: JsonObject
    schedule: JsonObject
    schedule_display: str
    owner: str | UnsetType = UNSET


class JobKept(Struct, kw_only=True):
    object: Literal["hermes.job"] | UnsetType = UNSET
    job: Job


class JobQuery(Struct, kw_only=True):
    include_disabled: Annotated[bool, Meta(description="paused and finished jobs, too")] = False


class JobList(Page[Job], kw_only=True):
    """Jobs, under both names."""

    jobs: list[Job]


@route("GET /api/jobs", "jobs", "List scheduled jobs", scope="jobs", features="jobs_api")
async def list_jobs(context: ServerContext, request: web.Request, query: JobQuery) -> JobList:
    owner = caller_of(request).visible_owner
    jobs = await _store(context).jobs.list(owner=owner, include_disabled=query.include_disabled)
    data = [_shown(request, job) for job in jobs]
    return JobList(data=data, jobs=data, **paging(None, len(data)))


@route(
    "POST /api/jobs",
    "job_create",
    "Create a job",
    scope="jobs",
    example={"schedule": "0 9 * * mon-fri", "prompt": "Say what is new in the news folder.", "name": "Morning"},
    status=201,
    answers=JobKept,
    faults=(404,),
    link=("job_id", "/job/id"),
    features="jobs_admin",
    idempotent=True,
)
async def create_job(context: ServerContext, request: web.Request, body: JobRequest) -> web.Response:
    job = await add_job(context, request, body)
    return answer(JobKept(object="hermes.job", job=job), 201, {"Location": f"/api/jobs/{job.id}"})


async def add_job(context: ServerContext, request: web.Request, body: JobRequest) -> Job:
    caller = caller_of(request)
    values = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not None}
    fields = await _fields(context, request, caller.owner, values)
    session_key = context.session_key(request)
    job = new_job(fields, time.time(), fields.get("timezone") or context.settings.timezone, context.secrets)
    job |= {"owner": caller.owner, "session_key": session_key, "origin": {"source": "api_server"}}
    job["id"] = idempotent_run_id(request)[-12:]  # a repeated request with the same key gives the same job
    ceilings = {"tool_policy": caller.toolsets, "allowed_models": caller.models}
    job |= {name: None if names is None else sorted(names) for name, names in ceilings.items()}
    await check_model(context, caller, spec_of({"id": "", **job}, time.time()))
    jobs = _store(context).jobs
    return _shown(request, await jobs.get(job["id"]) or await jobs.create(job))


@route(f"GET {_JOB}", "job", "Get a job", scope="jobs")
async def get_job(context: ServerContext, request: web.Request) -> JobKept:
    return JobKept(job=_shown(request, await _job(context, request)))


@route(f"PATCH {_JOB}", "job_update", "Update a job", scope="jobs", example={"schedule": "every 2h"})
async def update_job(context: ServerContext, request: web.Request, body: JobPatch) -> JobKept:
    values = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not UNSET}
    if not values:
        known = ", ".join(JobPatch.__struct_fields__)
        raise ApiError(400, f"Nothing was given that is to change; these can be: {known}.", "no_fields")
    job = await _job(context, request)
    enabled = values.pop("enabled", None)
    fields = await _fields(context, request, job["owner"], values, job)
    changes = job_changes(job, fields, time.time(), context.secrets) if fields else {}
    if enabled is not None:
        changes |= _switch_changes({**job, **changes}, enabled)
    return JobKept(job=_shown(request, await _change(context, job, changes)))


class JobDeleted(Struct, kw_only=True, tag_field="object", tag="hermes.job.deleted"):
    id: str
    deleted: Literal[True] = True
    ok: Literal[True] = True


@route(f"DELETE {_JOB}", "job_delete", "Delete a job", scope="jobs")
async def delete_job(context: ServerContext, request: web.Request) -> JobDeleted:
    job = await _job(context, request)
    await _store(context).jobs.delete(job["id"])
    return JobDeleted(id=job["id"])


@route(f"POST {_JOB}/pause", "job_pause", "Pause a job", scope="jobs")
async def pause_job(context: ServerContext, request: web.Request) -> JobKept:
    return await _switch(context, request, enabled=False)


@route(f"POST {_JOB}/resume", "job_resume", "Resume a job", scope="jobs")
async def resume_job(context: ServerContext, request: web.Request) -> JobKept:
    return await _switch(context, request, enabled=True)


class JobStarted(Struct, kw_only=True):
    job: Job
    run_id: str


@route(
    f"POST {_JOB}/run",
    "job_run",
    "Run a job now",
    scope="jobs",
    status=202,
    faults=(409, 429),
    idempotent=True,
    begins_turns=True,
)
async def run_job(context: ServerContext, request: web.Request) -> JobStarted:
    job_id = (await _job(context, request))["id"]
    async with _one_start(context, job_id):
        return await _run(context, request)


@contextlib.asynccontextmanager
async def _one_start(context: ServerContext, job_id: str) -> AsyncIterator[None]:
    """One start of a job at a time among all replicas."""
    name, leases = f"job:{job_id}", _store(context).leases
    until = time.monotonic() + LEASE_TTL_S
    while (token := await leases.acquire(name, this_process(), LEASE_TTL_S)) is None:
        if time.monotonic() >= until:
            raise ApiError(409, "The job is being started.", "job_running")
        await asyncio.sleep(LEASE_POLL_S)
    try:
        yield
    finally:
        await leases.release(name, token)


async def _run(context: ServerContext, request: web.Request) -> JobStarted:
    job, app, now = await _job(context, request), context.app, request_created_at(request)
    spec = spec_of(job, now).replace(run_id=idempotent_run_id(request))
    last = await app.engine.get(job["last_run_id"]) if job["last_run_id"] else None
    if last is not None and not last.state.ended and last.spec.run_id != spec.run_id:
        raise ApiError(409, f"The job runs already, as {last.spec.run_id}.", "job_running")
    try:
        if resumed_admission(request) is None:
            await asyncio.shield(asyncio.ensure_future(app.engine.submit(spec, charged=True)))
    except Refused as error:
        raise outcome.refusal(error) from None
    job = await _change(context, job, run_started(spec, now))
    return JobStarted(job=_shown(request, job), run_id=spec.run_id)


class JobRunQuery(Struct, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=200, description="how many runs")] = 50
    cursor: Cursor | None = None


@route(f"GET {_JOB}/runs", "job_runs", "List the runs of a job", scope="jobs")
async def job_runs(context: ServerContext, request: web.Request, query: JobRunQuery) -> RunList:
    job = await _job(context, request)
    return await run_page(context, request, query.limit, query.cursor, owner=job["owner"], job_id=job["id"])


# --- what they share -------------------------------------------------------------------------------------------------


def _store(context: ServerContext) -> AsyncStore:
    app = context.app
    if not app.settings.cron.enabled:
        raise ApiError(503, "Jobs are turned off here (cron.enabled).", "jobs_unavailable")
    return app.store


async def _job(context: ServerContext, request: web.Request) -> Record:
    job_id = request.match_info["job_id"]
    if not _ID.fullmatch(job_id):
        raise invalid("job_id", f"{job_id!r} is no id of a job: those have 12 hexadecimal digits.", "invalid_job_id")
    job: Record | None = await _store(context).jobs.get(job_id)
    if job is None or not caller_of(request).may_see(job["owner"]):
        raise ApiError(404, f"There is no job {job_id!r}.", "job_not_found")
    return job


async def _change(context: ServerContext, job: Record, fields: JsonMapping) -> Record:
    if not fields:
        return job
    changed: Record | None = await _store(context).jobs.update(job["id"], **fields)
    if changed is None:
        raise ApiError(404, f"There is no job {job['id']!r}.", "job_not_found")
    return changed


async def _switch(context: ServerContext, request: web.Request, *, enabled: bool) -> JobKept:
    job = await _job(context, request)
    return JobKept(job=_shown(request, await _change(context, job, _switch_changes(job, enabled))))


def _switch_changes(job: Record, enabled: bool) -> Record:
    return (resume_changes if enabled else pause_changes)(job, time.time())


async def _fields(
    context: ServerContext, request: web.Request, owner: str, values: JsonMapping, job: Record | None = None
) -> Record:
    """The validated fields of a job: model, toolsets, session, folder, script. None clears a field."""
    fields = dict(values)
    ceiling = caller_of(request).toolsets
    if fields.get("script") and ceiling is not None and "terminal" not in ceiling:
        raise invalid("script", "This key may not run commands: its toolsets do not include terminal.")
    if {"model", "provider"} & fields.keys():
        if fields.get("model", "") is None:  # a provider that came with a model goes with it
            fields.setdefault("provider", None)
        named = {**(job or {}), **fields}
        chosen = route_of(context, caller_of(request), named.get("model"), named.get("provider"))
        if chosen is None:
            fields["model"] = None
        elif chosen.provider:
            fields |= {"model": chosen.model, "provider": chosen.provider}
    if fields.get("enabled_toolsets") is not None:
        toolsets_of(fields["enabled_toolsets"], "enabled_toolsets")
    if fields.get("session_id") is not None:
        fields["session_id"] = session_id_of(fields["session_id"], "session_id")
        session = await _store(context).sessions.get_session(fields["session_id"])
        if session is not None and session["owner"] != owner:
            raise unknown_session(fields["session_id"])
    if fields.get("workdir") is not None:
        await workdir_of(context, owner, None, fields["workdir"])
    return fields


def _shown(request: web.Request, job: Record) -> Job:
    return Job(**{**public_fields(job), "owner": caller_of(request).shown_owner(job["owner"])})
