"""The script of a job: a command that runs before the model is called, and whose output the model gets."""

from __future__ import annotations

import json
from collections.abc import Callable

from hermes.agent.turn import Turn
from hermes.agent.turn_start import may_use
from hermes.core import message_marks
from hermes.core.ids import random_hex
from hermes.core.json_types import JsonObject
from hermes.core.stream_parts import ToolCall
from hermes.core.text import text_of
from hermes.store.base import Row
from hermes.tools.framework.registry import ToolDef
from hermes.tools.framework.round import ToolRound

CALL_ID = "job_script"
_TOOL = "terminal"
_LOST = "the server was restarted while it ran, so it may have taken effect and its output is lost"


async def run_script(turn: Turn, make_round: Callable[[dict[str, ToolDef]], ToolRound]) -> None:
    """Run the script of the turn's job, once, and append its outcome as a message. It passes through `terminal` with
    its guards, approvals, limits and records. An interrupted script is not run again."""
    spec, log = turn.live.spec, turn.live.log
    own_messages = turn.messages[turn.history_length :]
    if spec.script is None or any(
        text_of(message.get("content")).startswith(message_marks.SCRIPT_MARKS) for message in own_messages
    ):
        return
    answer, foreign = {"error": _LOST}, False
    if turn.live.resumption is None:
        answer, foreign = await _answer(turn, spec.script, make_round)
    failure = _failure(answer)
    row = Row(turn.live.transcript_id, "user", _message(answer, failure, foreign=foreign), log.run_id)
    summary = f"The job's script failed: {failure}." if failure else "The job's script has ended."
    notice = log.event("notice", level="warn" if failure else "info", code="job_script", message=summary)
    await log.append(notice, rows=[row])
    turn.messages.append(row.as_message())


async def _answer(
    turn: Turn, script: str, make_round: Callable[[dict[str, ToolDef]], ToolRound]
) -> tuple[JsonObject, bool]:
    services, settings = turn.services, turn.settings
    if not may_use(turn.live.spec, settings, _TOOL):
        return {"error": f"this job may not use the toolset {_TOOL}"}, False
    await services.outside.sandboxes.ready(settings)
    tools = services.registry().offered({_TOOL}, settings)
    if _TOOL not in tools:
        return {"error": "commands cannot be run here; `hermes doctor` says why"}, False
    call = ToolCall(CALL_ID, _TOOL, json.dumps({"command": script}))
    outcome, foreign = await make_round({_TOOL: tools[_TOOL]}).own_call(call)
    answer: JsonObject = json.loads(text_of(outcome.content))
    return answer, foreign


def _failure(answer: JsonObject) -> str:
    reason = answer.get("error") or answer.get("reason") or ""
    code = answer.get("exit_code")
    return str(reason).rstrip(".") or (f"exit code {code}" if code else "")


def _message(answer: JsonObject, failure: str, *, foreign: bool) -> list[JsonObject]:
    """Two parts: how it ended, and its output like an attached file, so that it does not count as the user's words."""
    mark = message_marks.FOREIGN_SCRIPT_MARK if foreign else message_marks.SCRIPT_MARK
    output = str(answer.get("output") or "")
    ended = f"It failed: {failure}." if failure else "It ended without an error."
    texts = [f"{mark} {ended} {'Its output follows.' if output else 'It printed nothing.'}"]
    if output:
        framed = message_marks.foreign_frame(output, random_hex(8)) if foreign else output
        texts.append(f"File script-output.txt:\n{framed}")
    return [{"type": "text", "text": text} for text in texts]
