"""The end of a turn: its closing rows, its last event, and the result for its caller."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from hermes.agent.media_tags import strip_rendered_media
from hermes.agent.step import StepResult
from hermes.agent.turn import Turn
from hermes.core.events import Event
from hermes.core.failures import KINDS, Failure, error_code, explain
from hermes.core.json_types import JsonObject, Message
from hermes.core.result import Result
from hermes.core.stream_parts import Assembled, ToolCall
from hermes.runs.commits import Commit
from hermes.runs.engine import STORE_UNAVAILABLE_NOTICE
from hermes.runs.jobs import has_own_session, is_silent
from hermes.store.base import LeaseLost, Row, StoreError

log = logging.getLogger(__name__)
# The message itself is at fault: a note replaces it before the next turn, which would fail as well.
_MESSAGE_FAULTS = {"context_overflow", "payload_too_large", "image_rejected", "policy_blocked", "bad_request"}
STOPPED = "[Stopped by the user.]"


def open_answer(turn: Turn) -> StepResult | None:
    text = turn.live.log.text_of(turn.message_id)
    return StepResult(Assembled(), text, message_id=turn.message_id) if text else None


async def finish_completed(turn: Turn, answer: StepResult, pending: list[ToolCall]) -> Result:
    """The answer is complete, or the client's own calls are pending. Without the store it is returned and not
    stored."""
    calls = [call.as_dict() for call in pending]
    try:
        await _record_completed(turn, answer, calls)
    except LeaseLost:
        raise
    except StoreError as error:
        if turn.live.unrecorded:
            raise
        log.error("the answer of run %s could not be stored: %s", turn.live.spec.run_id, error)
        turn.live.notices.append(STORE_UNAVAILABLE_NOTICE)
    result = _result(turn, answer.text, answer.row, calls=calls)
    return {**result, "stop_sequence": sequence} if (sequence := _stop_sequence(turn, answer)) else result


def _stop_sequence(turn: Turn, answer: StepResult) -> str:
    """The sequence at which the answer was stopped, if it is one of those that were asked for."""
    stops = turn.live.spec.sampling.get("stop") or ()
    sequence = answer.message.stop_sequence
    return sequence if sequence in ((stops,) if isinstance(stops, str) else stops) else ""


async def _record_completed(turn: Turn, answer: StepResult, calls: list[JsonObject]) -> None:
    if has_own_session(turn.live.spec) and is_silent(answer.text):
        await turn.live.log.settle()
        await turn.live.store.sessions.update_session(turn.live.spec.session_id, archived=True)
    row = answer.row
    event = turn.live.log.event(
        "run.completed",
        message_id=answer.message_id,
        row=None,
        finish_reason="tool_calls" if calls else "stop",
        pending_calls=calls,
        steps=turn.live.log.step,
        usage=turn.totals.as_dict(),
    )
    if sequence := _stop_sequence(turn, answer):
        event.data["stop_sequence"] = sequence
    _announce_row(row, event, "row")

    if calls and turn.stored:
        await turn.live.log.put_on_record()
        spec = turn.live.spec
        ids = [call["id"] for call in calls]
        await turn.live.store.sessions.put_pending_calls(spec.session_id, spec.run_id, ids, spec.owner)

    def steers() -> None:
        event.data["pending_steer"] = _pending_steers(turn)

    await turn.live.log.commit(Commit((event,), prepare=steers))


async def close_failed(
    turn: Turn, failure: Failure, answer: StepResult | None = None, recorded: StepResult | None = None
) -> Result:
    """The turn failed. Text so far is stored as the answer; without any, a generated row answers the user's."""
    text = answer.text if answer else recorded.text if recorded else ""
    event = turn.live.log.event(
        "run.failed",
        failure=failure.kind,
        error=failure.message,
        code=failure.code,
        retryable=failure.retryable,
        partial_row=None,
        text_length=len(text),
        steps=turn.live.log.step,
        usage=turn.totals.as_dict(),
    )
    faulty = turn.user_row if failure.kind in _MESSAGE_FAULTS else None
    kind = KINDS[failure.kind]
    finish = "error" if failure.kind == "max_iterations" else error_code(kind.code).finish_reason
    message = f"[The turn failed: {kind.sentence}]"
    row = await _close(turn, event, answer, finish, message, recorded=recorded, faulty=faulty)
    return _result(turn, text, row, failure)


async def close_without_store(turn: Turn, answer: StepResult | None) -> Result:
    """The store failed during the turn. Its end is reported even if it cannot be stored."""
    failure = explain("store_unavailable", turn.route.provider, has_text=answer is not None)
    try:
        return await close_failed(turn, failure, answer)
    except LeaseLost:
        raise
    except StoreError:
        return _result(turn, answer.text if answer else "", failure=failure)


async def close_cancelled(turn: Turn, answer: StepResult | None = None, recorded: StepResult | None = None) -> Result:
    """The turn was stopped; whether that is a failure, an end or a pause depends on who stopped it."""
    stop, spec = turn.live.controls.stop, turn.live.spec
    text = answer.text if answer else recorded.text if recorded else ""
    if stop.reason == "deadline":
        failure = explain("deadline", turn.route.provider, has_text=bool(text))
        return await close_failed(turn, failure, answer)
    failure = explain("interrupted", turn.route.provider, has_text=bool(text))
    if stop.reason == "server_shutdown":
        failure = replace(failure, code="server_shutdown")
    if stop.reason == "server_shutdown" and spec.on_detach == "continue" and spec.persist:
        await turn.live.log.emit("run.interrupted")
        return {**_result(turn, text, failure=failure), "error": None, "failure": None}
    event = turn.live.log.event(
        "run.cancelled",
        by=stop.by,
        reason=stop.reason,
        partial_row=None,
        text_length=len(text),
        steps=turn.live.log.step,
        usage=turn.totals.as_dict(),
    )
    row = await _close(turn, event, answer, "interrupted", STOPPED, recorded=recorded)
    return _result(turn, text, row, failure)


async def _close(
    turn: Turn,
    event: Event,
    answer: StepResult | None,
    finish: str,
    message: str,
    *,
    recorded: StepResult | None = None,
    faulty: Row | None = None,
) -> Row | None:
    """The last transaction of a failed or stopped turn. Processes of a stopped turn are killed before it."""
    log, transcript = turn.live.log, turn.live.transcript_id
    if turn.live.controls.stop.reason not in (None, "server_shutdown"):  # the server ends its processes itself
        await turn.services.outside.processes.end_run(log.run_id)
    if answer is not None and answer.text:
        row = Row(
            transcript,
            "assistant",
            answer.text,
            log.run_id,
            finish_reason=finish,
            announced_in=((event, "partial_row"),),
        )
        row.continues, row.active = bool(turn.prefix), not turn.prefix
        row.api_content = strip_rendered_media(answer.text) if turn.media else None
        after = [event]
        if answer.message.usage is None:  # the provider's counts are included already; the rest is estimated
            usage = turn.usage_event(None, answer.text)
            turn.totals.add(usage)
            event.data["usage"] = turn.totals.as_dict()
            after.insert(0, log.event("usage", **usage))
        await log.complete(answer.message_id, row, after=after, finish_reason=finish, tool_calls=[], partial=True)
    elif recorded is not None and recorded.text and turn.messages[-1]["role"] == "assistant":
        _announce_row(recorded.row, event, "partial_row")
        await log.append(event)
        return recorded.row
    else:
        row = Row(transcript, "assistant", message, log.run_id, finish_reason=finish, synthetic=True)
        if turn.prefix:  # it stays as it was
            turn.messages.append({"role": "assistant", "content": turn.prefix})
            turn.prefix = ""
        annotate = None
        if faulty is not None:
            await log.settle()
        if faulty is not None and faulty.id is not None:
            note = f"[A message that could not be processed was left out: {message[1:-1]}]"
            annotate = (faulty.id, note)
            turn.messages = [{**m, "content": note} if m is turn.user_message else m for m in turn.messages]
        unanswered = _unanswered_rows(turn, transcript)
        turn.messages += (tool_row.as_message() for tool_row in unanswered)
        await log.commit(Commit((event,), [*unanswered, row], annotate=annotate))
    turn.add_answer(row)
    return row


def _announce_row(row: Row | None, event: Event, name: str) -> None:
    """Put the row's id into an event; a new row gets its id when both are committed."""
    if row is not None and row.id is None:
        row.announced_in = (*row.announced_in, (event, name))
    elif row is not None:
        event.data[name] = row.id


def _unanswered_rows(turn: Turn, transcript: str) -> list[Row]:
    """Results for the unanswered calls of the last message, so that the transcript stays well-formed."""
    calls = next((m for m in reversed(turn.messages) if m["role"] != "tool"), {}).get("tool_calls") or ()
    done = {message.get("tool_call_id") for message in turn.messages}
    result = '{"status": "interrupted"}'
    return [
        Row(
            transcript,
            "tool",
            result,
            turn.live.log.run_id,
            tool_call_id=call["id"],
            tool_name=call["function"]["name"],
        )
        for call in calls
        if call["id"] not in done
    ]


def _pending_steers(turn: Turn) -> str | None:
    steers = turn.live.controls.steers
    return "\n".join([text for _, text in steers]) or None if steers else None


def _result(
    turn: Turn, text: str, row: Row | None = None, failure: Failure | None = None, calls: Sequence[Message] = ()
) -> Result:
    totals, counts = turn.totals, turn.totals.counts
    partial_only = failure is not None and failure.partial_only
    interrupted = failure is not None and failure.kind == "interrupted"
    return {
        "final_response": text,
        "last_reasoning": row.reasoning if row is not None else None,
        "messages": turn.messages,
        "api_calls": totals.calls,
        "completed": failure is None,
        "partial": failure is not None and (bool(text) or partial_only),
        "failed": failure is not None and not interrupted and not partial_only,
        "interrupted": interrupted,
        "error": failure.message if failure else None,
        "error_code": failure.code if failure else None,
        "failure": failure.kind if failure else None,
        "retry_after_s": failure.retry_after_s if failure else None,
        "run_id": turn.live.spec.run_id,
        "session_id": turn.live.spec.session_id,
        "model": turn.route.model,
        "provider": turn.route.provider,
        "pending_calls": [*calls],
        "pending_steer": _pending_steers(turn),
        "ignored_options": sorted(turn.ignored_options),
        "warnings": [
            {"code": notice[0], "message": notice[1]}
            for notice in turn.live.notices
            if notice == STORE_UNAVAILABLE_NOTICE
        ],
        "input_tokens": counts["input_tokens"],
        "output_tokens": counts["output_tokens"],
        "total_tokens": counts["total_tokens"],
        "usage_details": {
            "cache_read_tokens": counts["cache_read_tokens"],
            "cache_write_tokens": counts["cache_write_tokens"],
            "reasoning_tokens": counts["reasoning_tokens"],
            "cost_usd": totals.cost_usd,
        },
    }
