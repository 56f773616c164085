"""Questions to a human, from inside a tool call: approvals and clarifications, recorded, bounded in time."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes.runs.control import Questions, RunControls
from hermes.runs.events import Event
from hermes.runs.resume import Resumption
from hermes.runs.writer import RunWriter


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """What is to be allowed, and why it needs leave."""

    call_id: str
    kind: str
    subject: str
    reason: str
    rules: tuple[str, ...] = ()
    choices: tuple[str, ...] = ("once", "deny")


class Asking:
    """The channel to whoever may answer. The call waits; the loop does not."""

    def __init__(
        self,
        log: RunWriter,
        controls: RunControls,
        *,
        mode: str,
        answerable: bool,
        unattended: str,
        approval_s: float,
        clarify_s: float,
        before: Resumption | None = None,
    ) -> None:
        self._log, self._controls = log, controls
        self._mode, self._answerable, self._unattended = mode, answerable, unattended
        self._approval_s, self._clarify_s = approval_s, clarify_s
        self._one_at_a_time = asyncio.Lock()
        # What was asked and answered before the run was cut off.
        self._granted = set(before.granted) if before else set()
        self._asked = dict(before.asked) if before else {}
        self._answers = dict(before.answers) if before else {}

    async def approve(self, request: ApprovalRequest) -> tuple[bool, str]:
        """Whether it may be done, and the comment of whoever said so."""
        if self._mode == "off" or request.call_id in self._granted:
            return True, ""
        approval_id = self._asked.pop(request.call_id, f"apr_{secrets.token_hex(8)}")
        if not self._answerable:
            choice = "once" if self._unattended == "allow" else "deny"
            await self._resolved(approval_id, choice, "rule", {})
            return choice != "deny", "Nobody is there to approve it."
        async with self._one_at_a_time:
            event = self._log.event(
                "approval.requested", approval_id=approval_id, call_id=request.call_id, kind=request.kind
            )
            event.data |= {"subject": request.subject, "reason": request.reason, "rules": list(request.rules)}
            event.data |= {"choices": list(request.choices), "expires_at": time.time() + self._approval_s}
            event.data |= {"reviewer": None, "path": []}
            try:
                answer, by = await self._wait(self._controls.approvals, approval_id, event, self._approval_s)
            except asyncio.CancelledError:
                await self._resolved(approval_id, "deny", "interrupt", {})
                raise
        choice = str(answer.get("choice", "deny")) if answer else "deny"
        if choice not in request.choices:
            choice = "deny"
        await self._resolved(approval_id, choice, by, answer or {})
        return choice != "deny", str((answer or {}).get("comment", ""))

    async def clarify(self, call_id: str, question: str, choices: Sequence[str]) -> str | None:
        """The user's answer, or None when nobody gave one."""
        if not self._answerable:
            return None
        request_id = self._asked.pop(call_id, f"clr_{secrets.token_hex(8)}")
        event = self._log.event("clarify.requested", request_id=request_id, call_id=call_id, question=question)
        event.data |= {"choices": list(choices), "expires_at": time.time() + self._clarify_s}
        answer, by = None, "interrupt"
        try:
            answer, by = await self._wait(self._controls.clarifications, request_id, event, self._clarify_s)
        finally:
            await self._log.emit("clarify.resolved", request_id=request_id, by=by, answered=answer is not None)
        return str(answer["answer"]) if answer is not None else None

    async def _wait(
        self, questions: Questions, question_id: str, event: Event, seconds: float
    ) -> tuple[Mapping[str, Any] | None, str]:
        future = questions.ask(question_id)
        try:
            await self._log.append(event)
            if (known := self._answers.pop(question_id, None)) is not None and not future.done():
                future.set_result(known)
            async with asyncio.timeout(seconds):
                answer = await future
            return (answer if answer.get("answer", "") is not None else None), "user"
        except TimeoutError:
            return None, "timeout"
        finally:
            future.cancel()

    async def _resolved(self, approval_id: str, choice: str, by: str, answer: Mapping[str, Any]) -> None:
        who = {"by": by, "surface": str(answer.get("surface", "")), "comment": str(answer.get("comment", ""))}
        await self._log.append(self._log.event("approval.resolved", approval_id=approval_id, choice=choice, **who))
