"""Jobs: creating and changing their records, and their runs; for HTTP, command line and tool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes.core import limits
from hermes.core.errors import ServiceError
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.guards.exfiltration import exfiltrates
from hermes.guards.injection import suspicious
from hermes.runs import schedule as schedules
from hermes.runs.jobs import run_ended
from hermes.services.delivery import checked_target, shown_target
from hermes.settings.schema_types import EFFORTS

if TYPE_CHECKING:
    from hermes.guards.secrets import Secrets
    from hermes.store.runs import Runs

Job = JsonObject
GIVEN = (
    *("name", "prompt", "skills", "model", "enabled_toolsets", "workdir"),
    *("script", "effort", "continuity"),
)
# What a job's record has besides what it was given; `session_key` and the ceilings bind its runs and are not shown.
_EMPTY: Job = {
    "name": "", "prompt": "", "skills": [], "model": None, "provider": None, "enabled_toolsets": None, "workdir": None,
    "last_run_at": None, "last_status": None, "last_error": None, "last_run_id": None, "session_id": None,
    "last_session_id": None, "deliver": "local", "origin": None, "paused_at": None, "paused_reason": None,
    "script": None, "effort": None, "continuity": False, "deliveries": [],
}  # fmt: skip
_TEXT_LIMITS = {
    "name": limits.JOB_NAME_CHARS_MAX,
    "prompt": limits.JOB_PROMPT_CHARS_MAX,
    "script": limits.JOB_SCRIPT_CHARS_MAX,
}
CEILINGS = ("tool_policy", "allowed_models")
_HIDDEN = ("owner", "session_key", *CEILINGS)


def new_job(fields: JsonMapping, now: float, timezone: str, secrets: Secrets) -> Job:
    """Raises ServiceError: bad_schedule, contains_secret, injection_suspected, invalid_arguments."""
    prompt = str(fields.get("prompt") or "").strip()
    if not prompt and not fields.get("skills"):
        raise ServiceError("`prompt` is missing: say what the job is to do.", "invalid_arguments", field="prompt")
    begin = {"timezone": timezone, "enabled": True, "state": "scheduled", "created_at": now}
    job = {**_EMPTY, **begin, "name": prompt[:60].splitlines()[0] if prompt else "Job"}
    job["repeat"] = {"times": None, "completed": 0}
    return {**job, **job_changes(job, {"schedule": "", **fields}, now, secrets)}


def job_changes(job: JsonMapping, fields: JsonMapping, now: float, secrets: Secrets) -> Job:
    """The changed fields of a job's record. Raises as `new_job`."""
    changes: Job = {name: fields[name] for name in (*GIVEN, "provider", "session_id") if name in fields}
    if "deliver" in fields:
        changes["deliver"] = checked_target(str(fields["deliver"]))
    for name, most in _TEXT_LIMITS.items():
        if changes.get(name) is not None:
            _check_text(name, str(changes[name]), most, secrets)
    if changes.get("effort") not in (None, *EFFORTS):
        raise ServiceError(f"`effort` is one of {', '.join(EFFORTS)}.", "invalid_arguments", field="effort")
    if {**job, **changes}.get("continuity") and {**job, **changes}["session_id"]:
        message = "`continuity` has a session of its own and cannot go with session_id."
        raise ServiceError(message, "invalid_arguments", "Leave one of them out.", field="continuity")
    zone = str(fields.get("timezone", job["timezone"]) or "")
    try:
        if "schedule" in fields or zone != job["timezone"]:
            where = schedules.zone_named(zone)
            text = fields.get("schedule")
            changes["schedule"] = schedules.parse(str(text), now, where) if text is not None else job["schedule"]
            changes |= {"timezone": zone, "schedule_display": changes["schedule"]["display"]}
            changes["next_run_at"] = schedules.next_time(changes["schedule"], now, where)
            changes |= {"state": "scheduled" if job["enabled"] else "paused"}
    except schedules.BadSchedule as error:
        raise ServiceError(str(error), "bad_schedule", field=error.field) from None
    once = {**job, **changes}["schedule"]["kind"] == "once"
    if "repeat" in fields or (once and job["repeat"]["times"] is None):
        changes["repeat"] = {"times": fields.get("repeat") or (1 if once else None), "completed": 0}
    return changes


def pause_changes(job: JsonMapping, now: float) -> Job:
    return {"enabled": False, "state": "paused", "paused_at": now} if job["enabled"] else {}


def resume_changes(job: JsonMapping, now: float) -> Job:
    if job["enabled"]:
        return {}
    following = schedules.next_time(job["schedule"], now, schedules.zone_named(job["timezone"]))
    if following is None:
        hint = "Give it another schedule with the action update."
        raise ServiceError("Its time is over.", "bad_schedule", hint, field="schedule")
    return {"enabled": True, "state": "scheduled", "paused_at": None, "paused_reason": None, "next_run_at": following}


def public_fields(job: JsonMapping) -> Job:
    """Every field of the record, also of one stored before all of them existed."""
    shown = {name: value for name, value in {**_EMPTY, **job}.items() if name not in _HIDDEN}
    return {**shown, "deliver": shown_target(shown["deliver"])}


def delivery_fault(job: JsonMapping) -> str | None:
    """Why the latest result is not where it was to go; None where it is, or was not tried yet."""
    latest = next(iter(job.get("deliveries") or ()), None)
    return latest["error"] if latest is not None and latest["status"] != "delivered" else None


def _check_text(name: str, text: str, most: int, secrets: Secrets) -> None:
    if not text.strip() or len(text) > most:
        message = f"`{name}` has {len(text)} characters; 1 to {most} are possible."
        raise ServiceError(message, "invalid_arguments", field=name)
    if secrets.redact(text) != text:
        hint = "Leave it out; the job finds it where you did."
        raise ServiceError(f"`{name}` holds a secret.", "contains_secret", hint, field=name)
    if why := suspicious(text) or exfiltrates(text):
        hint = "Say plainly what is to be done."
        raise ServiceError(f"`{name}` cannot be kept: {why}.", "injection_suspected", hint, field=name)


# --- runs of a job ---------------------------------------------------------------------------------------------------


def job_history(runs: Runs, job: JsonMapping, limit: int) -> list[Job]:
    """The latest runs of a job, each with the status that it gave the job."""
    records, texts, _ = runs.page(owner=job["owner"], limit=limit, job_id=job["id"])
    deliveries = {entry["run_id"]: entry for entry in job.get("deliveries") or ()}
    return [
        {
            "run_id": record.spec.run_id,
            "status": run_ended(record.state, texts.get(record.state.final_row or 0))["last_status"],
            "session_id": record.spec.session_id,
            "started_at": record.state.started_at,
            "finished_at": record.state.ended_at,
            "error": record.state.error or None,
            "delivery": deliveries.get(record.spec.run_id),
        }
        for record in records
    ]
