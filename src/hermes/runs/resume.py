"""Interprets a log without an end: whether and how its run is resumed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hermes.core.events import Event
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import RESUME_SEQ_STEP, RESUMES_MAX
from hermes.runs.control import StopReason
from hermes.store.base import Partial

Verdict = Literal["go_on", "cancelled", "server_restarted", "crash_loop", "store_unavailable"]


@dataclass(slots=True)
class Resumption:
    """The state of an interrupted run. `message_id` names the model call that was open; without one, what follows the
    last message is still to be done. `lost`: the machine was rebooted since, so that text shown last may not be
    stored."""

    verdict: Verdict
    reason: Literal["crash", "shutdown"]
    next_seq: int
    step: int = 0
    message_id: str = ""
    attempts: int = 0
    answer_id: str = ""
    lost: bool = False
    partials: list[Partial] = field(default_factory=list)
    started: dict[str, Event] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    granted: set[str] = field(default_factory=set)
    asked: dict[str, str] = field(default_factory=dict)
    answers: dict[str, JsonMapping] = field(default_factory=dict)
    steers: list[tuple[str, str]] = field(default_factory=list)
    controls: set[str] = field(default_factory=set)
    usage: list[JsonObject] = field(default_factory=list)
    stopped_by: str = ""
    stop_reason: StopReason | Literal[""] = ""

    @property
    def cut(self) -> dict[str, int]:
        """The stored length of each open message: what was shown beyond it is lost."""
        return {p.stream_id: len(p.text) for p in self.partials if p.kind == "text"}

    def output_of(self, call_id: str) -> str:
        return "".join(p.text for p in self.partials if p.kind == "tool" and p.stream_id.rpartition("/")[0] == call_id)


def look(
    events: Sequence[Event],
    partials: Sequence[Partial],
    *,
    on_detach: str,
    now: float,
    within_s: float,
    booted_at: float = 0.0,
) -> Resumption:
    last = max([event.seq for event in events] + [partial.last_seq for partial in partials])
    resumption = Resumption("go_on", "crash", (last // RESUME_SEQ_STEP + 1) * RESUME_SEQ_STEP, partials=list(partials))
    resumes = 0
    for event in events:
        resumes = _take(resumption, event, resumes)
    resumption.step = max((event.step for event in events), default=0)
    resumption.reason = "shutdown" if events[-1].type == "run.interrupted" else "crash"
    resumption.lost = resumption.reason == "crash" and events[-1].ts < booted_at
    if resumption.stop_reason:
        resumption.verdict = "cancelled"
    elif on_detach != "continue" or now - events[-1].ts > within_s:
        resumption.verdict = "server_restarted"
    elif resumes >= RESUMES_MAX:
        resumption.verdict = "crash_loop"
    return resumption


def _take(resumption: Resumption, event: Event, resumes: int) -> int:
    """Apply one event; returns how often the run was resumed since its last progress."""
    kind, data = event.type, event.data
    if kind == "run.resumed":
        return resumes + 1
    if kind == "model.started":
        repeated = data["message_id"] == resumption.message_id
        resumption.message_id, resumption.attempts = data["message_id"], resumption.attempts + 1 if repeated else 1
    elif kind == "message.completed":
        resumption.message_id, resumption.answer_id, resumption.attempts = "", data["message_id"], 0
        resumption.started, resumption.finished = {}, set()
        return 0
    elif kind == "tool.started":
        resumption.started[data["call_id"]] = event
    elif kind == "tool.finished":
        resumption.finished.add(data["call_id"])
        return 0
    elif kind == "usage":
        resumption.usage.append(data)
    elif kind == "subagent.finished":
        resumption.usage.append({**data["usage"], "calls": data["steps"]})
    elif kind == "steer.applied":
        resumption.steers = [steer for steer in resumption.steers if steer[0] not in data["steer_ids"]]
    elif kind == "control.received":
        _take_control(resumption, data)
    elif kind in ("approval.requested", "clarify.requested"):
        resumption.asked[data["call_id"]] = data.get("approval_id") or data["request_id"]
    elif kind in ("approval.resolved", "clarify.resolved"):
        _take_answer(resumption, kind, data)
    return resumes


def _take_control(resumption: Resumption, data: JsonMapping) -> None:
    control, details = data["control"], data["data"]
    resumption.controls.add(data["control_id"])
    if control in ("interrupt", "cancel"):
        resumption.stop_reason, resumption.stopped_by = details.get("reason") or "stop", data["by"]
    elif control == "steer":
        resumption.steers.append((data["control_id"], str(details["text"])))
    else:
        # The answer is recorded, though the call that asked may not have received it.
        question = details.get("id") or next(reversed(resumption.asked.values()), "")
        origin = {"by": data["by"], "surface": data["surface"], "credential": data.get("credential", "")}
        resumption.answers[question] = {**details, **origin}


def _take_answer(resumption: Resumption, kind: str, data: JsonMapping) -> None:
    question = data.get("approval_id") or data.get("request_id")
    call_id = next((call for call, question_id in resumption.asked.items() if question_id == question), None)
    if call_id is not None:
        del resumption.asked[call_id]
        if kind == "approval.resolved" and data["choice"] != "deny":
            resumption.granted.add(call_id)
