"""Jobs as resources: what is to be done later, when, and what came of it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from hermes.runs.engine import Refused
from hermes.runs.jobs import begun, spec_of
from hermes.sandbox.base import SandboxError
from hermes.sandbox.choose import workspace_of
from hermes.server import outcome
from hermes.server.errors import ApiError, answer, invalid
from hermes.server.idempotency import idempotent_run_id, request_created_at, resumed_admission
from hermes.server.keys import CALLER
from hermes.server.models import JobPatch, JobRequest
from hermes.server.query_params import bad_cursor, cursor_of, flag, listed, whole
from hermes.server.request_bodies import read
from hermes.server.request_options import session_id_of, toolsets_of
from hermes.server.runs import shown
from hermes.server.session_routes import unknown_session
from hermes.server.turns import check_model, route_of
from hermes.tools import cronjob
from hermes.tools.registry import ToolError

if TYPE_CHECKING:
    from hermes.server.adapter import APIServerAdapter
    from hermes.store.stores import AsyncStore

Job = dict[str, Any]
_ID = re.compile(r"[0-9a-f]{12}")
# code of the tool: the parameter it is about, and the code here
_CODES = {
    "bad_schedule": ("schedule", "invalid_schedule"),
    "injection_suspected": ("prompt", "prompt_blocked"),
    "contains_secret": ("prompt", "prompt_blocked"),
    "invalid_arguments": ("prompt", "invalid_value"),
}


async def list_jobs(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /api/jobs"""
    with_disabled = flag(request, "include_disabled")
    store = await _store(adapter)
    found = await store.jobs.list(owner=adapter.visible_owner(request), include_disabled=with_disabled)
    data = [_shown(adapter, job) for job in found]
    return answer({**listed(data, None, len(data)), "jobs": data})


async def create(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /api/jobs"""
    body = await read(adapter, request, JobRequest)
    owner = adapter.owner_of(request)
    given = {name: value for name, value in msgspec.structs.asdict(body.model).items() if value is not None}
    fields = await _fields(adapter, owner, given)
    settings = (await adapter.app()).settings
    key, refusal = adapter.session_key(request)
    if refusal:
        raise refusal
    try:
        job = cronjob.made(fields, time.time(), fields.get("timezone") or settings.get("timezone"), adapter.secrets)
    except ToolError as error:
        raise _refused(error) from None
    job |= {"owner": owner, "session_key": key, "origin": {"source": "api_server"}}
    caller = CALLER.get()
    ceilings = {"tool_policy": caller.toolsets, "allowed_models": caller.models}
    job |= {name: None if names is None else sorted(names) for name, names in ceilings.items()}
    await check_model(adapter, spec_of({"id": "", **job}, time.time()))
    made = await (await _store(adapter)).jobs.create(job)
    told = {"object": "hermes.job", "job": _shown(adapter, made)}
    return answer(told, 201, {"Location": f"/api/jobs/{made['id']}", **body.headers()})


async def get(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /api/jobs/{job_id}"""
    return answer({"job": _shown(adapter, await _job(adapter, request))})


async def update(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """PATCH /api/jobs/{job_id}"""
    body = await read(adapter, request, JobPatch)
    given = {name: value for name, value in msgspec.structs.asdict(body.model).items() if value is not msgspec.UNSET}
    if not given:
        known = ", ".join(JobPatch.__struct_fields__)
        raise ApiError(400, f"Nothing was given that is to change; these can be: {known}.", "no_fields")
    job = await _job(adapter, request)
    enabled = given.pop("enabled", None)
    fields = await _fields(adapter, job["owner"], given, job)
    try:
        new = cronjob.changed(job, fields, time.time(), adapter.secrets) if fields else {}
        if enabled is not None:
            new |= _switched({**job, **new}, enabled)
    except ToolError as error:
        raise _refused(error) from None
    return answer({"job": _shown(adapter, await _change(adapter, job, new))})


async def delete(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """DELETE /api/jobs/{job_id}"""
    job = await _job(adapter, request)
    await (await _store(adapter)).jobs.delete(job["id"])
    return answer({"object": "hermes.job.deleted", "id": job["id"], "deleted": True, "ok": True})


async def pause(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /api/jobs/{job_id}/pause"""
    return await _switch(adapter, request, enabled=False)


async def resume(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /api/jobs/{job_id}/resume"""
    return await _switch(adapter, request, enabled=True)


async def run(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /api/jobs/{job_id}/run: now, whenever it would be due."""
    job, app, now = await _job(adapter, request), await adapter.app(), request_created_at(request)
    spec = spec_of(job, now).replace(run_id=idempotent_run_id(request))
    last = await app.engine.get(job["last_run_id"]) if job["last_run_id"] else None
    if last is not None and not last.state.ended and last.spec.run_id != spec.run_id:
        raise ApiError(409, f"The job runs already, as {last.spec.run_id}.", "job_running")
    try:
        if resumed_admission(request) is None:
            await asyncio.shield(asyncio.ensure_future(app.engine.submit(spec, charged=True)))
    except Refused as error:
        raise outcome.refusal(error) from None
    job = await _change(adapter, job, begun(spec, now))
    return answer({"job": _shown(adapter, job), "run_id": spec.run_id}, 202)


async def runs(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /api/jobs/{job_id}/runs"""
    job = await _job(adapter, request)
    limit = whole(request, "limit", 50, 1, 200)
    try:
        found, texts, total = await (await _store(adapter)).runs.page(
            owner=job["owner"], limit=limit + 1, job_id=job["id"], before=cursor_of(request)
        )
    except KeyError:
        raise bad_cursor() from None
    page = found[:limit]
    data = [shown(adapter, record, texts.get(record.state.final_row)) for record in page]
    return answer(listed(data, page[-1].spec.run_id if len(found) > limit else None, total))


# --- what they share -------------------------------------------------------------------------------------------------


async def _store(adapter: APIServerAdapter) -> AsyncStore:
    app = await adapter.app()
    if not app.settings.get("cron.enabled"):
        raise ApiError(503, "Jobs are turned off here (cron.enabled).", "jobs_unavailable")
    return app.store


async def _job(adapter: APIServerAdapter, request: web.Request) -> Job:
    job_id = request.match_info["job_id"]
    if not _ID.fullmatch(job_id):
        raise invalid("job_id", f"{job_id!r} is no id of a job: those have 12 hexadecimal digits.", "invalid_job_id")
    job: Job | None = await (await _store(adapter)).jobs.get(job_id)
    if job is None or not adapter.may_see(request, job["owner"]):
        raise ApiError(404, f"There is no job {job_id!r}.", "job_not_found")
    return job


async def _change(adapter: APIServerAdapter, job: Job, fields: Mapping[str, Any]) -> Job:
    if not fields:
        return job
    changed: Job | None = await (await _store(adapter)).jobs.update(job["id"], **fields)
    if changed is None:
        raise ApiError(404, f"There is no job {job['id']!r}.", "job_not_found")
    return changed


async def _switch(adapter: APIServerAdapter, request: web.Request, *, enabled: bool) -> web.StreamResponse:
    job = await _job(adapter, request)
    try:
        job = await _change(adapter, job, _switched(job, enabled))
    except ToolError as error:
        raise _refused(error) from None
    return answer({"job": _shown(adapter, job)})


def _switched(job: Job, enabled: bool) -> Job:
    return (cronjob.resumed if enabled else cronjob.paused)(job, time.time())


async def _fields(adapter: APIServerAdapter, owner: str, given: Mapping[str, Any], job: Job | None = None) -> Job:
    """What was given for a job of this owner, checked: model, toolsets, session, folder, script. None clears a field."""
    fields = dict(given)
    ceiling = CALLER.get().toolsets
    if fields.get("script") and ceiling is not None and "terminal" not in ceiling:
        raise invalid("script", "This key may not run commands: its toolsets do not include terminal.")
    if {"model", "provider"} & fields.keys():
        if fields.get("model", "") is None:  # a provider that came with a model goes with it
            fields.setdefault("provider", None)
        named = {**(job or {}), **fields}
        chosen = route_of(adapter, named.get("model"), named.get("provider"))
        if chosen is None:
            fields["model"] = None
        elif chosen.provider:
            fields |= {"model": chosen.model, "provider": chosen.provider}
    if fields.get("enabled_toolsets") is not None:
        toolsets_of(fields["enabled_toolsets"], "enabled_toolsets")
    if fields.get("session_id") is not None:
        fields["session_id"] = session_id_of(fields["session_id"], "session_id")
        session = await (await _store(adapter)).sessions.get_session(fields["session_id"])
        if session is not None and session["owner"] != owner:
            raise unknown_session(fields["session_id"])
    if fields.get("workdir") is not None:
        app = await adapter.app()
        try:
            await app.services.files.call(partial(workspace_of, app.home, app.settings, owner, None, fields["workdir"]))
        except SandboxError as error:
            raise invalid("workdir", str(error)) from None
    return fields


def _shown(adapter: APIServerAdapter, job: Job) -> Job:
    """The record; who sees all is told whose it is."""
    return {**cronjob.shown(job), **adapter.owner_field(job["owner"])}


def _refused(error: ToolError) -> ApiError:
    param, code = _CODES.get(error.answer["code"], (None, "invalid_value"))
    named = re.match(r"`(\w+)`", str(error.answer["error"]))
    message = f"{error.answer['error']} {error.answer.get('hint', '')}".strip()
    return ApiError(400, message, code, named[1] if named else param)
