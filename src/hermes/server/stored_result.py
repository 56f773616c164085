"""The result of a run from the store, and the conversation before it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from hermes.core.json_types import JsonObject
from hermes.core.limits import STORE_POLL_S
from hermes.core.result import Result
from hermes.runs.engine import RunEngine
from hermes.server.render_run import code_of, is_partial
from hermes.store.base import StoreError

_ERRORS = {"completed": None, "cancelled": "The turn was stopped."}


async def conversation_until(sessions: Any, session_id: str, run_id: str, *, with_it: bool) -> list[JsonObject]:
    """The conversation before a run, or including it."""
    messages: list[JsonObject] = await sessions.conversation_until(session_id, run_id, with_it=with_it)
    return messages


async def result_at_end(engine: RunEngine, run_id: str) -> Result:
    """Wait for the result of a run; one that is handed on to the next server says so."""
    while (record := await engine.get(run_id)) is not None and not record.state.ended and not engine.draining:
        async with aclosing(engine.batches(run_id, record.state.last_seq)) as batches:
            async for _ in batches:
                pass
        await engine.resume(run_id)
        await asyncio.sleep(0 if engine.live(run_id) else STORE_POLL_S)
    return await stored_result(engine.store, run_id)


async def stored_result(store: Any, run_id: str) -> Result:
    """The result of an ended run."""
    record = await store.runs.get(run_id)
    if record is None:
        raise StoreError(f"There is no run {run_id!r} in the store.")
    spec, state = record.spec, record.state
    row = await store.runs.row(run_id, state.final_row) if state.final_row is not None else None
    text = row.content if row is not None and isinstance(row.content, str) else ""
    events = await store.runs.durable(run_id)
    last = events[-1].data if events else {}
    stopped = "server_shutdown" if last.get("reason") == "server_shutdown" else "interrupted"
    codes = {"failed": code_of(state.code), "cancelled": stopped, "interrupted": "server_shutdown"}
    code = codes.get(state.status)
    cut = state.status == "failed" and is_partial("failed", None, code)
    notices = [event.data for event in events if event.type == "notice" and event.data["code"] == "option_left_out"]
    result: Result = {
        "final_response": text,
        "last_reasoning": row.reasoning if row is not None else None,
        "messages": await conversation_until(store.sessions, spec.session_id, run_id, with_it=True),
        "api_calls": sum(event.type == "usage" and not event.data.get("task") for event in events),
        "completed": state.status == "completed",
        "partial": is_partial(state.status, text, code),
        "failed": state.status not in ("completed", "cancelled") and not cut,
        "interrupted": state.status == "cancelled",
        "error": state.error or _ERRORS.get(state.status, "The server ended before the turn did."),
        "error_code": code,
        "failure": state.failure or ("interrupted" if state.status == "cancelled" else None),
        "retry_after_s": None,
        "run_id": run_id,
        "session_id": spec.session_id,
        "model": state.model,
        "provider": state.provider,
        "pending_calls": list(last.get("pending_calls") or ()),
        "pending_steer": last.get("pending_steer"),
        "ignored_options": sorted({notice["message"].split("`")[1] for notice in notices}),
        "warnings": [],
        "input_tokens": state.usage.get("input_tokens") or 0,
        "output_tokens": state.usage.get("output_tokens") or 0,
        "total_tokens": state.usage.get("total_tokens") or 0,
        "usage_details": {
            "cache_read_tokens": state.usage.get("cache_read_tokens"),
            "cache_write_tokens": state.usage.get("cache_write_tokens"),
            "reasoning_tokens": state.usage.get("reasoning_tokens"),
            "cost_usd": state.usage.get("cost_usd"),
        },
    }
    return {**result, "stop_sequence": last["stop_sequence"]} if "stop_sequence" in last else result
