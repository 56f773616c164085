"""The run of a job: its spec, and what the job's record says about it. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from hermes.core.events import RunState
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import DELIVERIES_KEPT, DELIVERY_ATTEMPTS_MAX, DELIVERY_WAIT_S
from hermes.core.spec import RouteChoice, RunSpec

Job = JsonObject
# A job's final text that asks for no delivery.
SILENT = "[SILENT]"
# A job whose results are delivered to its session only.
LOCAL = "local"


class Report(msgspec.Struct, frozen=True):
    """The outcome of a job's run, as it is delivered. `text` is its answer, or why it failed."""

    job_id: str
    job_name: str
    run_id: str
    session_id: str
    status: str
    text: str
    finished_at: float

    @property
    def title(self) -> str:
        return self.job_name if self.status == "completed" else f"{self.job_name}: {self.status}"


def spec_of(job: JsonMapping, now: float) -> RunSpec:
    """The spec of a job's run: in the session it names, in the one its runs share, or in a new one."""
    skills = f"Use the skills {', '.join(job['skills'])}." if job["skills"] else ""
    effort, shared = job.get("effort"), f"cron_{job['id']}" if job.get("continuity") else None
    stamp = time.strftime("%Y%m%d_%H%M%S", time.gmtime(now))
    return RunSpec(
        user_message="\n\n".join(text for text in (skills, job["prompt"]) if text),
        session_id=job["session_id"] or shared or f"cron_{job['id']}_{stamp}",
        kind="job",
        source="cron",
        owner=job["owner"],
        session_key=job.get("session_key"),
        route=route_of(job["model"], job["provider"]),
        toolsets=frozenset(job["enabled_toolsets"]) if job["enabled_toolsets"] is not None else None,
        tool_policy=_ceiling(job.get("tool_policy")),
        allowed_models=_ceiling(job.get("allowed_models")),
        reasoning={"enabled": effort != "none", "effort": effort} if effort else None,
        workdir=job["workdir"],
        script=job.get("script"),
        job_id=job["id"],
    )


def route_of(model: str | None, provider: str | None) -> RouteChoice | None:
    """The route of a job's model. Without a provider it is an alias, `provider/model`, or a model of the main
    provider."""
    if not (model or provider):
        return None
    return RouteChoice(alias=None if provider else model, model=model, provider=provider)


def _ceiling(names: Sequence[str] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)


def run_started(spec: RunSpec, now: float) -> Job:
    """The changes of a job's record when a run has started."""
    noted = {"last_run_at": now, "last_run_id": spec.run_id, "last_session_id": spec.session_id}
    return {**noted, "last_status": "running", "last_error": None}


def run_ended(state: RunState, text: str | None) -> Job:
    """The changes of a job's record when a run has ended with this text."""
    status = "silent" if state.status == "completed" and is_silent(text) else state.status
    return {"last_status": status, "last_error": state.error or None}


def is_silent(text: str | None) -> bool:
    return text is not None and text.strip() == SILENT


def has_own_session(spec: RunSpec) -> bool:
    return spec.job_id is not None and spec.session_id.startswith(f"cron_{spec.job_id}_")


# --- deliveries ------------------------------------------------------------------------------------------------------


def with_delivery(job: JsonMapping, outcome: JsonMapping, run_id: str, now: float) -> Job:
    """The outcome of a run, with its delivery marked as pending if the job wants one."""
    deliveries = job.get("deliveries") or []
    is_known = any(entry["run_id"] == run_id for entry in deliveries)
    if job.get("deliver", LOCAL) == LOCAL or outcome["last_status"] not in ("completed", "failed") or is_known:
        return dict(outcome)
    entry = {"run_id": run_id, "status": "waiting", "attempts": 0, "next_at": now, "error": None}
    return {**outcome, "deliveries": [entry, *deliveries][:DELIVERIES_KEPT]}


def due_delivery(job: JsonMapping, now: float) -> str | None:
    """The oldest run whose result is to be delivered now."""
    waiting = [entry for entry in job.get("deliveries") or () if entry["status"] == "waiting"]
    return waiting[-1]["run_id"] if waiting and waiting[-1]["next_at"] <= now else None


def after_delivery(job: JsonMapping, run_id: str, error: str | None, now: float) -> Job:
    """The changes of a job's record after a delivery attempt: delivered, to be retried, or given up."""
    deliveries = [dict(entry) for entry in job.get("deliveries") or ()]
    for entry in deliveries:
        if entry["run_id"] == run_id:
            entry["attempts"] += 1
            again = error is not None and entry["attempts"] < DELIVERY_ATTEMPTS_MAX
            entry["status"] = "waiting" if again else "delivered" if error is None else "failed"
            entry["next_at"] = now + DELIVERY_WAIT_S * 4 ** (entry["attempts"] - 1) if again else None
            entry["error"] = error
    return {"deliveries": deliveries}
