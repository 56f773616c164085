"""Runs: submit, list, follow, stop, steer, and answer their questions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from aiohttp import web
from msgspec import Meta, Struct

from hermes.core.errors import ServiceError
from hermes.core.events import ShownStatus
from hermes.core.json_types import JsonObject, Message
from hermes.core.spec import Control, ControlKind, RunKind, RunSpec
from hermes.core.text import text_of
from hermes.runs.engine import Refused
from hermes.server import outcome
from hermes.server.chat import message_of
from hermes.server.errors import ApiError, answer, invalid, missing
from hermes.server.idempotency import idempotent_run_id, resumed_admission
from hermes.server.keys import RUN_SCOPES, caller_of
from hermes.server.models import ApprovalRequest, ClarifyRequest, RunRequest, SteerRequest
from hermes.server.prepared_response import reader
from hermes.server.query_params import ID_MAX, Cursor, Page, bad_cursor, number_of, paging, place_of, shows_reasoning
from hermes.server.render_run import ROWS, THOUGHTS, Run, RunRenderer, run_object, used_until
from hermes.server.request_bodies import Body, read
from hermes.server.request_options import (
    RequestOptions,
    max_iterations_of,
    parse_options,
    session_id_of,
    toolsets_of,
    workdir_of,
)
from hermes.server.response_record import previous_response
from hermes.server.routes import REASONING_HEADER, SESSION_ID_HEADER, TURN_HEADERS, header, route
from hermes.server.sse import ClientGone, inline_sink, replay, run_events_to_end
from hermes.server.turn_spec import build_spec, check_model, missing_output, open_calls
from hermes.services import runs, sessions
from hermes.store.base import RunRecord

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

# Subagents' runs are listed only by their kind.
_LISTED: tuple[RunKind, ...] = tuple(kind for kind in get_args(RunKind) if kind != "subagent")
# Any key that may start some kind of run; `_record` checks the scope of the run's own kind (`keys.RUN_SCOPES`).
_SCOPE = "runs|chat|jobs"
_RUN = "/v1/runs/{run_id}"


# --- submitting ------------------------------------------------------------------------------------------------------


class RunStarted(Struct, kw_only=True):
    run_id: str
    status: Literal["started"] = "started"
    object: Literal["hermes.run"] = "hermes.run"
    session_id: str
    created_at: float


@route(
    "POST /v1/runs",
    "runs",
    "Start a run",
    scope="runs",
    headers=(SESSION_ID_HEADER, *TURN_HEADERS),
    body=RunRequest,
    example={"input": "Write a shopping list.", "session_id": "kitchen"},
    status=202,
    answers=RunStarted,
    faults=(404, 409, 429),
    link=("run_id", "/run_id"),
    features="run_submission",
    idempotent=True,
    begins_turns=True,
)
async def submit_run(context: ServerContext, request: web.Request) -> web.StreamResponse:
    body = await read(context, request, RunRequest)
    spec, history = await _spec(context, request, body)
    engine = context.app.engine
    try:
        # The run is submitted even if the client disconnects meanwhile.
        if resumed_admission(request) is None:
            await check_model(context, caller_of(request), spec)
            await asyncio.shield(asyncio.ensure_future(engine.submit(spec, charged=True)))
    except Refused as error:
        raise outcome.refusal(error) from None
    record = await engine.get(spec.run_id)
    headers = {"Location": f"/v1/runs/{spec.run_id}", "X-Hermes-History": history}
    headers |= _names(request, spec) | body.headers()
    created_at = record.created_at if record else time.time()
    return answer(RunStarted(run_id=spec.run_id, session_id=spec.session_id, created_at=created_at), 202, headers)


async def _spec(context: ServerContext, request: web.Request, body: Body[RunRequest]) -> tuple[RunSpec, str]:
    """The requested run, and where its history comes from."""
    params, owner = body.model, caller_of(request).owner
    if params.tools is not None:
        raise invalid("tools", "A run has no tools of its client's.", "unsupported_parameter")
    request_options = parse_options(context, request, user=params.user)
    previous = params.previous_response_id
    chain = await previous_response(context, previous, owner) if previous else None
    named = _session_id(params, request_options, chain)
    parsed = await reader(context, owner).read(params.input)
    earlier, prompt, results = parsed.split_messages()
    if results and not prompt:
        raise invalid("input", "A run does not take outputs of function calls.", "unsupported_value")
    earlier += ({"role": "tool", **result} for result in results)
    history, system = _history(context, params, chain)
    history += earlier
    session = await context.database().get_session(named) if named else None
    if named and session is not None and session["owner"] != owner:
        raise sessions.unknown_session(named)
    stored = await context.stored_history(named, resumed_admission(request)) if named and session is not None else []
    if (call_ids := open_calls(stored)) and await context.waits(call_ids, owner):
        raise missing_output(call_ids[0])
    run_id = idempotent_run_id(request)
    session_id = named or run_id
    seeds = bool(history) and not stored
    instructions = (
        params.instructions if params.instructions is not None or chain is None else chain.get("instructions")
    )
    spec = RunSpec(
        user_message=prompt,
        session_id=session_id,
        run_id=run_id,
        kind="run",
        history=history if seeds else None,
        base_id=session_id if seeds else None,
        owner=owner,
        instructions="\n".join(text for text in (*parsed.system, *system, instructions) if text) or None,
    )
    request_options = replace(request_options, toolsets=_toolsets(params, request_options))
    spec = build_spec(context, caller_of(request), request_options, body, spec, announces=True)
    if params.workdir is not None:
        await workdir_of(context, owner, spec.session_key, params.workdir)
    max_iterations = await max_iterations_of(context, params.max_iterations)
    spec = spec.replace(workdir=params.workdir, max_iterations=max_iterations)
    source = "stored" if stored or not history else "chain" if chain else "request"
    used, ignored = (stored, len(history)) if stored else (history, 0)
    return spec, f"{source}; messages={len(used)}; ignored={ignored}"


def _session_id(params: RunRequest, request_options: RequestOptions, chain: JsonObject | None) -> str | None:
    """The session that is named, by whatever names it."""
    named = session_id_of(params.session_id, "session_id") if params.session_id else None
    if named and request_options.session_id and named != request_options.session_id:
        message = "session_id and X-Hermes-Session-Id name different sessions."
        raise ApiError(400, message, "session_conflict", "session_id")
    named = named or request_options.session_id
    if named and chain and chain.get("session_id") not in (None, named):
        message = "The response belongs to another session than the one that is named."
        raise ApiError(400, message, "session_conflict", "previous_response_id")
    return named


def _history(context: ServerContext, params: RunRequest, chain: JsonObject | None) -> tuple[list[Message], list[str]]:
    """The messages before, from the response or the request, and system texts among them."""
    if chain is not None:
        return list(chain.get("conversation_history") or ()), []
    chars = context.options.max_text_chars
    messages = [
        message_of(message, f"conversation_history[{index}]", chars)
        for index, message in enumerate(params.conversation_history or ())
    ]
    system = [text_of(message["content"]) for message in messages if message["role"] in ("system", "developer")]
    return [message for message in messages if message["role"] not in ("system", "developer")], system


def _toolsets(params: RunRequest, request_options: RequestOptions) -> frozenset[str] | None:
    if params.toolsets is None:
        return request_options.toolsets
    named = toolsets_of(params.toolsets, "toolsets")
    return named if request_options.toolsets is None else named & request_options.toolsets


def _names(request: web.Request, spec: RunSpec) -> dict[str, str]:
    names = {"X-Hermes-Run-Id": spec.run_id, "X-Hermes-Session-Id": spec.session_id}
    key = request.headers.get("X-Hermes-Session-Key")
    return names | ({"X-Hermes-Session-Key": key} if key else {})


# --- looking at them -------------------------------------------------------------------------------------------------


class RunQuery(Struct, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=200, description="how many runs")] = 50
    cursor: Cursor | None = None
    status: Annotated[ShownStatus, Meta(description="only runs of this status")] | None = None
    kind: Annotated[RunKind, Meta(description="only runs of this kind")] | None = None
    session_id: Annotated[str, Meta(description="only runs of this session")] | None = None


class RunList(Page[Run], kw_only=True):
    """Runs, the newest first."""


@route("GET /v1/runs", "run_list", "List runs, newest first", scope=_SCOPE, features="run_list")
async def list_runs(context: ServerContext, request: web.Request, query: RunQuery) -> RunList:
    kinds = [kind for kind in ([query.kind] if query.kind else _LISTED) if caller_of(request).opens(RUN_SCOPES[kind])]
    if not kinds:
        return RunList(data=[], **paging(None, 0))
    await context.app.engine.record_starts()
    return await run_page(
        context,
        request,
        query.limit,
        query.cursor,
        owner=caller_of(request).visible_owner,
        session_id=query.session_id,
        # A run that waits for the next server is shown as queued.
        statuses=[query.status, *(["interrupted"] if query.status == "queued" else [])] if query.status else (),
        kinds=kinds,
    )


async def run_page(
    context: ServerContext, request: web.Request, limit: int, cursor: str | None, **chosen: Any
) -> RunList:
    try:
        records, texts, total = await context.app.store.runs.page(limit=limit + 1, before=place_of(cursor), **chosen)
    except KeyError:
        raise bad_cursor() from None
    page = records[:limit]
    following = page[-1].spec.run_id if len(records) > limit else None
    data = [_shown(context, request, record, texts.get(record.state.final_row)) for record in page]
    return RunList(data=data, **paging(following, total))


@route(f"GET {_RUN}", "run_status", "Get a run", scope=_SCOPE, features="run_status")
async def get_run(context: ServerContext, request: web.Request) -> Run:
    return await shown_run(context, request, request.match_info["run_id"])


async def shown_run(context: ServerContext, request: web.Request, run_id: str) -> Run:
    record = await _record(context, request, run_id)
    row = record.state.final_row
    message = await context.app.engine.row(record.spec.run_id, row) if row is not None else None
    return _shown(context, request, record, text_of(message.content) if message else None)


def _shown(context: ServerContext, request: web.Request, record: RunRecord, output: str | None) -> Run:
    run = run_object(record, output, context.model_name)
    run.owner = caller_of(request).shown_owner(record.spec.owner)
    return run


class RunDeleted(Struct, kw_only=True, tag_field="object", tag="hermes.run.deleted"):
    run_id: str
    deleted: bool = True


@route(f"DELETE {_RUN}", "run_delete", "Delete a finished run", scope=_SCOPE, faults=(409,))
async def delete_run(context: ServerContext, request: web.Request) -> RunDeleted:
    record = await _record(context, request)
    run_id = record.spec.run_id
    if not record.state.ended or not await context.app.store.runs.remove(run_id):
        raise ServiceError(f"The run {run_id!r} has not ended yet.", "run_active")
    return RunDeleted(run_id=run_id)


async def _record(context: ServerContext, request: web.Request, run_id: str | None = None) -> RunRecord:
    """The run of this id, or of the path's; other owners' runs are not found."""
    run_id = request.match_info["run_id"] if run_id is None else run_id
    record = await context.app.engine.get(run_id)
    if record is None or not caller_of(request).may_see(record.spec.owner):
        raise runs.unknown_run(run_id)
    if (refusal := context.scope_refusal(caller_of(request), RUN_SCOPES[record.spec.kind])) is not None:
        raise refusal
    return record


class EventQuery(Struct, kw_only=True):
    starting_after: (
        Annotated[int, Meta(ge=0, le=ID_MAX, description="the number of the last event that is known")] | None
    ) = None
    event_names: Annotated[bool, Meta(description="give every frame an `event:` line")] = False


@route(
    f"GET {_RUN}/events",
    "run_events",
    "Stream the events of a run, replayed and live",
    scope=_SCOPE,
    headers=(
        header("Last-Event-ID", "the number of the last event that is known", type="integer", minimum=0),
        REASONING_HEADER,
    ),
    stream="the events of the run under their numbers, from any place, then live",
    faults=(410,),
    features="run_events_sse run_events_resume",
)
async def run_events(context: ServerContext, request: web.Request, query: EventQuery) -> web.StreamResponse:
    last_seen = request.headers.get("Last-Event-ID", "").strip()
    after = max(number_of(last_seen, "Last-Event-ID") if last_seen else 0, query.starting_after or 0)
    reasoning = shows_reasoning(context, request)
    record = await _record(context, request)
    spec, engine = record.spec, context.app.engine
    if record.log_expired:
        message = f"The events of the run {spec.run_id!r} are no longer stored; its status and output are."
        raise ApiError(410, message, "events_expired")
    used = used_until(await engine.durable(spec.run_id), after) if after else ()
    renderer = RunRenderer(record, context.redact, names=query.event_names, reasoning=reasoning, used=used)
    rows = ROWS | THOUGHTS if reasoning else ROWS
    stream = context.stream(request, _names(request, spec))
    if request.method == "HEAD":
        with contextlib.suppress(ClientGone):
            async with stream:
                pass
        return stream.response
    source = run_events_to_end(engine, spec.run_id, rows, after, inline_sink(renderer, stream))
    return await replay(stream, source, renderer, over=record.state.ended)


# --- steering them ---------------------------------------------------------------------------------------------------


class RunStopping(Struct, kw_only=True):
    run_id: str
    status: str = "stopping"


@route(f"POST {_RUN}/stop", "run_stop", "Stop a run", scope=_SCOPE, faults=(409,), features="run_stop")
async def stop_run(context: ServerContext, request: web.Request) -> RunStopping:
    record = await _record(context, request)
    if record.state.ended or not (record.state.stopping or await _control(context, request, record, "interrupt", {})):
        raise runs.ended_run(record)
    return RunStopping(run_id=record.spec.run_id)


class Steered(Struct, kw_only=True):
    """A message that will reach the model."""

    run_id: str
    steer_id: str
    accepted: bool = True


@route(
    f"POST {_RUN}/steer",
    "run_steer",
    "Send a message to a running turn",
    scope=_SCOPE,
    example={"text": "Leave out the milk."},
    status=202,
    faults=(409,),
    features="run_steer",
)
async def steer_run(context: ServerContext, request: web.Request, body: SteerRequest) -> Steered:
    if body.text is None and body.input is None:
        raise missing("text")
    if None not in (body.text, body.input) and body.text != body.input:
        raise invalid("input", "text and input are the same and have different values.")
    text, field = (body.text, "text") if body.text is not None else (body.input or "", "input")
    text = runs.checked_text(text, field, context.options.max_text_chars)
    record = await _record(context, request)
    control = None if record.state.ended else await _control(context, request, record, "steer", {"text": text})
    if control is None:
        raise runs.ended_run(record)
    return Steered(run_id=record.spec.run_id, steer_id=control.control_id)


class ApprovalAnswer(Struct, kw_only=True, tag_field="object", tag="hermes.run.approval_response"):
    """How many approval requests were answered."""

    run_id: str
    choice: str
    resolved: int


@route(
    f"POST {_RUN}/approval",
    "run_approval",
    "Approve or deny a tool call",
    scope=_SCOPE,
    example={"choice": "once"},
    faults=(409,),
    features="run_approval_response approval_events",
)
async def approve_run(context: ServerContext, request: web.Request, body: ApprovalRequest) -> ApprovalAnswer:
    choice = runs.approval_choice(body.choice)
    if choice == "always" and not caller_of(request).is_admin:
        raise ApiError(403, "Leave for ever needs a key with the scope 'admin'.", "insufficient_scope", "choice")
    comment = runs.denial_comment(choice, body.comment, context.options.max_text_chars)
    record = await _record(context, request)
    every = bool(body.all or body.resolve_all)
    answers = runs.approval_data(record, choice, body.approval_id, every=every, comment=comment)
    controls = [await _control(context, request, record, "approve", data) for data in answers]
    if not any(controls):
        raise runs.no_approval()
    resolved = sum(control is not None for control in controls)
    return ApprovalAnswer(run_id=record.spec.run_id, choice=choice, resolved=resolved)


class ClarifyAnswer(Struct, kw_only=True, tag_field="object", tag="hermes.run.clarify_response"):
    run_id: str
    request_id: str


@route(
    f"POST {_RUN}/clarify",
    "run_clarify",
    "Answer a question of the agent",
    scope=_SCOPE,
    example={"answer": "The blue one."},
    faults=(409,),
    features="run_clarify",
)
async def clarify_run(context: ServerContext, request: web.Request, body: ClarifyRequest) -> ClarifyAnswer:
    text = runs.checked_text(body.answer, "answer", context.options.max_text_chars)
    record = await _record(context, request)
    data = runs.answer_data(record, text, body.request_id)
    if not await _control(context, request, record, "answer", data):
        raise runs.no_question()
    return ClarifyAnswer(run_id=record.spec.run_id, request_id=data["id"])


async def _control(
    context: ServerContext, request: web.Request, record: RunRecord, kind: ControlKind, data: JsonObject
) -> Control | None:
    """None: the run has ended, or no longer waits for it."""
    control = Control(kind, data, surface="api", credential=caller_of(request).credential)
    applied = await context.app.engine.control(record.spec.run_id, control)
    if applied == "unknown":
        raise runs.unknown_run(record.spec.run_id)
    return control if applied == "applied" else None
