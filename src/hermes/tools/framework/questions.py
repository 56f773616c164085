"""Questions to a person during a tool call: approvals and clarifications, with expiry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from hermes.core.events import Event
from hermes.core.ids import random_hex
from hermes.runs.control import Questions, RunControls
from hermes.runs.resume import Resumption
from hermes.runs.writer import RunWriter
from hermes.tools.framework.registry import Data


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """What is to be approved, and why. `keys` name it in the grants of a session. `patterns` are what `always` adds to
    the list `setting`; `allowed` says that the list allows it already. A reviewer is asked only where `cwd` is set;
    `reviewer` is its verdict."""

    call_id: str
    kind: str
    subject: str
    reason: str
    rules: tuple[str, ...] = ()
    choices: tuple[str, ...] = ("once", "deny")
    reviewer: Mapping[str, str] | None = None
    keys: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    setting: str = "command_allowlist"
    allowed: bool = False
    cwd: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    choice: str
    by: str
    comment: str = ""
    credential: str = ""

    @property
    def allowed(self) -> bool:
        return self.choice != "deny"


@dataclass(slots=True, eq=False)
class Asking:
    """Questions of one run to whoever may answer. `before` holds what was asked and answered before the run was
    interrupted."""

    log: RunWriter
    controls: RunControls
    mode: str
    answerable: bool
    unattended: str
    approval_s: float
    clarify_s: float
    before: Resumption | None = None
    resumes: bool = False
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    _granted: set[str] = field(default_factory=set)
    _asked: dict[str, str] = field(default_factory=dict)
    _answers: dict[str, Data] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (before := self.before) is not None:
            self._granted, self._asked, self._answers = set(before.granted), dict(before.asked), dict(before.answers)

    async def approve(self, request: ApprovalRequest, granted: set[str] | None = None) -> Decision:
        """Ask for approval; if nobody can answer, the settings decide. `granted` are the keys that the session may use:
        other questions may add to them meanwhile, and an answer for the session is added."""
        granted = set() if granted is None else granted
        if request.call_id in self._granted:
            self._granted.discard(request.call_id)  # a further question of the same call
            return Decision("once", "user")
        approval_id = self._asked.pop(request.call_id, f"apr_{random_hex(8)}")
        if not self.answerable:
            choice = "once" if self.unattended == "allow" else "deny"
            return await self._resolve(approval_id, choice, "rule", comment="Nobody is there to approve it.")
        async with self._one_at_a_time:
            if request.keys and request.keys <= granted:
                return await self._resolve(approval_id, "once", "rule", comment="It has been allowed before.")
            event = self.log.event(
                "approval.requested", approval_id=approval_id, call_id=request.call_id, kind=request.kind
            )
            event.data |= {"subject": request.subject, "reason": request.reason, "rules": list(request.rules)}
            expires_at = _expiry(self.log.state.approvals.get(approval_id), self.approval_s)
            event.data |= {"choices": list(request.choices), "expires_at": expires_at}
            event.data |= {"reviewer": dict(request.reviewer) if request.reviewer else None, "path": []}
            try:
                answer, by = await self._wait(self.controls.approvals, approval_id, event)
            except asyncio.CancelledError:
                if not self._stays_open:
                    await self._resolve(approval_id, "deny", "interrupt")
                raise
            answer = answer or {}
            choice = str(answer.get("choice", "deny"))
            choice = choice if choice in request.choices else "deny"
            details = {name: str(answer.get(name, "")) for name in ("surface", "credential", "comment")}
            decision = await self._resolve(approval_id, choice, by, **details)
            granted |= request.keys if choice in ("session", "always") else frozenset()
            return decision

    async def decide(self, call_id: str, choice: str, by: str, comment: str) -> Decision:
        return await self._resolve(f"apr_{random_hex(8)}", choice, by, comment=comment, call_id=call_id)

    async def spent(self, usage: Data) -> None:
        await self.log.emit("usage", **usage)

    async def clarify(self, call_id: str, question: str, choices: Sequence[str]) -> str | None:
        if not self.answerable:
            return None
        request_id = self._asked.pop(call_id, f"clr_{random_hex(8)}")
        event = self.log.event("clarify.requested", request_id=request_id, call_id=call_id, question=question)
        expires_at = _expiry(self.log.state.questions.get(request_id), self.clarify_s)
        event.data |= {"choices": list(choices), "expires_at": expires_at}
        answer, by = None, "interrupt"
        try:
            answer, by = await self._wait(self.controls.clarifications, request_id, event)
        finally:
            if by != "interrupt" or not self._stays_open:
                event = self.log.event("clarify.resolved", request_id=request_id, by=by, answered=answer is not None)
                event.data |= {name: str((answer or {}).get(name, "")) for name in ("surface", "credential")}
                await self.log.append(event)
        return str(answer["answer"]) if answer is not None else None

    @property
    def _stays_open(self) -> bool:
        """Whether a question is left open for the server that resumes the run."""
        return self.resumes and self.controls.stop.reason == "server_shutdown"

    async def close_stale(self, calls: Container[str]) -> None:
        """Close the questions of an interrupted run, except for those of calls that are still to be made."""
        state = self.log.state
        for question in [id_ for id_, data in state.approvals.items() if data["call_id"] not in calls]:
            await self._resolve(question, "deny", "interrupt")
        for question in [id_ for id_, data in state.questions.items() if data["call_id"] not in calls]:
            await self.log.emit("clarify.resolved", request_id=question, by="interrupt", answered=False)

    async def _wait(self, questions: Questions, question_id: str, event: Event) -> tuple[Data | None, str]:
        future, expires_at = questions.ask(question_id), event.data["expires_at"]
        try:
            if expires_at > time.time():
                await self.log.append(event)
            if (earlier := self._answers.pop(question_id, None)) is not None and not future.done():
                future.set_result(earlier)
            async with asyncio.timeout(expires_at - time.time()):
                answer = await future
            return (answer if answer.get("answer", "") is not None else None), "user"
        except TimeoutError:
            return None, "timeout"
        finally:
            future.cancel()

    async def _resolve(self, approval_id: str, choice: str, by: str, **details: str) -> Decision:
        event = self.log.event("approval.resolved", approval_id=approval_id, choice=choice, by=by)
        event.data |= {"surface": "", "credential": "", "comment": "", **details}
        await self.log.append(event)
        return Decision(choice, by, event.data["comment"], event.data["credential"] or event.data["surface"])


def _expiry(question: Data | None, seconds: float) -> float:
    """When a question expires; one that was asked before a restart keeps its time."""
    return float(question["expires_at"]) if question is not None else time.time() + seconds
