"""Runs: submitted, listed, followed, stopped, steered, and their questions answered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, get_args

from aiohttp import web

from hermes.core.events import Status
from hermes.core.spec import Control, ControlKind, RouteChoice, RunKind, RunSpec
from hermes.runs.engine import Refused
from hermes.server import outcome
from hermes.server.chat import message_of
from hermes.server.content import text_of
from hermes.server.errors import ApiError, answer, invalid
from hermes.server.idempotency import idempotent_run_id, resumed_admission
from hermes.server.keys import CALLER, RUN_SCOPES
from hermes.server.models import ApprovalRequest, ClarifyRequest, RunRequest, SteerRequest
from hermes.server.prepared_response import reader
from hermes.server.query_params import bad_cursor, cursor_of, flag, listed, number_of, shows_reasoning, whole, word
from hermes.server.render_run import ROWS, THOUGHTS, RunRenderer, run_object, used_until
from hermes.server.request_bodies import Body, read
from hermes.server.request_options import (
    RequestOptions,
    at_door,
    max_iterations_of,
    parse_options,
    session_id_of,
    toolsets_of,
    workdir_of,
)
from hermes.server.session_routes import unknown_session
from hermes.server.sse import ClientGone, replay
from hermes.server.turns import Message, check_model, open_calls, parameters
from hermes.store.base import RunRecord

if TYPE_CHECKING:
    from hermes.server.adapter import APIServerAdapter

Json = dict[str, Any]
_KINDS: tuple[str, ...] = get_args(RunKind)
# Subagents' runs are listed when they are asked for.
_LISTED = tuple(kind for kind in _KINDS if kind != "subagent")
_STATUSES: tuple[str, ...] = tuple(status for status in get_args(Status) if status != "interrupted")
_CHOICES = ("once", "session", "always", "deny")
_ALIASES = {"approve": "once", "approved": "once", "allow": "once"}


# --- submitting ------------------------------------------------------------------------------------------------------


async def submit(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /v1/runs"""
    body = await read(adapter, request, RunRequest)
    spec, history = await _spec(adapter, request, body)
    engine = (await adapter.app()).engine
    try:
        # What was asked for is done, also when the client does not stay to be told so.
        if resumed_admission(request) is None:
            await check_model(adapter, spec)
            await asyncio.shield(asyncio.ensure_future(engine.submit(spec, charged=True)))
    except Refused as error:
        raise outcome.refusal(error) from None
    record = await engine.get(spec.run_id)
    headers = {
        "Location": f"/v1/runs/{spec.run_id}",
        "X-Hermes-History": history,
        **_names(request, spec),
        **body.headers(),
    }
    told = {
        "run_id": spec.run_id,
        "status": "started",
        "object": "hermes.run",
        "session_id": spec.session_id,
        "created_at": record.created_at if record else time.time(),
    }
    return answer(told, 202, headers)


async def _spec(adapter: APIServerAdapter, request: web.Request, body: Body[RunRequest]) -> tuple[RunSpec, str]:
    """The run that is asked for, and where its history comes from."""
    asked, owner = body.model, adapter.owner_of(request)
    if asked.tools is not None:
        raise invalid("tools", "A run has no tools of its client's.", "unsupported_parameter")
    request_options = parse_options(adapter, request, user=asked.user)
    chain = await _chain(adapter, asked, owner)
    named = _session_id(asked, request_options, chain)
    given = await reader(adapter, owner).read(asked.input)
    earlier, prompt, results = given.split_messages()
    if results and not prompt:
        raise invalid("input", "A run does not take outputs of function calls.", "unsupported_value")
    earlier += ({"role": "tool", **result} for result in results)
    told, system = _history(adapter, asked, chain)
    history = [*told, *earlier]
    session = await adapter.database().get_session(named) if named else None
    if named and session is not None and session["owner"] != owner:
        raise unknown_session(named)
    stored = await adapter.stored_history(named, resumed_admission(request)) if named and session is not None else []
    await _check_answered(adapter, stored, owner)
    fields = parameters(adapter, body)
    run_id = idempotent_run_id(request)
    session_id = named or run_id
    if history and not stored:
        fields |= {"history": history, "base_id": session_id}
    instructions = asked.instructions if asked.instructions is not None or chain is None else chain.get("instructions")
    spec = RunSpec(
        user_message=prompt,
        session_id=session_id,
        kind="run",
        owner=owner,
        instructions="\n".join(text for text in (*given.system, *system, instructions) if text) or None,
        **{
            **replace(request_options, toolsets=_toolsets(asked, request_options)).fields(adapter, announces=True),
            "on_detach": "continue",
            "run_id": run_id,
        },
        **fields,
    )
    spec = await _placed(adapter, request, asked, spec)
    source = "stored" if stored or not history else "chain" if chain else "request"
    used, ignored = (stored, len(history)) if stored else (history, 0)
    return spec, f"{source}; messages={len(used)}; ignored={ignored}"


async def _placed(adapter: APIServerAdapter, request: web.Request, asked: RunRequest, spec: RunSpec) -> RunSpec:
    """The run where it is to work; that of a command line works for its user, in whatever folder that one is."""
    if asked.cli is None:
        if asked.workdir is not None:
            await workdir_of(adapter, spec.owner, spec.session_key, asked.workdir)
        most = await max_iterations_of(adapter, asked.max_iterations)
        return spec.replace(workdir=asked.workdir, max_iterations=most)
    if not at_door(adapter, request):
        raise invalid("cli", "Only a command line of the user who runs this server may ask for this.")
    if asked.workdir is None or not os.path.isabs(asked.workdir):
        raise invalid("workdir", "A command line names the folder it works in, by its whole path.")
    cli = asked.cli
    return spec.replace(
        kind="cli",
        source="cli",
        workdir=asked.workdir,
        route=RouteChoice(model=cli.model, provider=cli.provider) if cli.model or cli.provider else None,
        toolsets=toolsets_of(asked.toolsets, "toolsets") if asked.toolsets is not None else None,
        toolsets_by_default=asked.toolsets is None,
        answerable=cli.answerable,
        approvals="off" if cli.yolo else None,
        memory=cli.memory,
        max_iterations=cli.max_turns,
        deadline_seconds=cli.deadline_seconds,
    )


async def _chain(adapter: APIServerAdapter, asked: RunRequest, owner: str) -> Json | None:
    """The stored response that the run goes on from."""
    if not asked.previous_response_id:
        return None
    found: Json | None = await adapter.stored_responses.get(asked.previous_response_id, owner)
    if found is None:
        message = f"There is no response {asked.previous_response_id!r}."
        raise ApiError(404, message, "previous_response_not_found", "previous_response_id")
    return found


def _session_id(asked: RunRequest, request_options: RequestOptions, chain: Json | None) -> str | None:
    """The session that is named, by whatever names it."""
    named = session_id_of(asked.session_id, "session_id") if asked.session_id else None
    if named and request_options.session_id and named != request_options.session_id:
        message = "session_id and X-Hermes-Session-Id name different sessions."
        raise ApiError(400, message, "session_conflict", "session_id")
    named = named or request_options.session_id
    if named and chain and chain.get("session_id") not in (None, named):
        message = "The response belongs to another session than the one that is named."
        raise ApiError(400, message, "session_conflict", "previous_response_id")
    return named


def _history(adapter: APIServerAdapter, asked: RunRequest, chain: Json | None) -> tuple[list[Message], list[str]]:
    """What was said before, as the response or the request knows it, and system texts in it."""
    if chain is not None:
        return list(chain.get("conversation_history") or ()), []
    chars = adapter.option("max_text_chars")
    told = [
        message_of(message, f"conversation_history[{at}]", chars)
        for at, message in enumerate(asked.conversation_history or ())
    ]
    system = [text_of(message["content"]) for message in told if message["role"] in ("system", "developer")]
    return [message for message in told if message["role"] not in ("system", "developer")], system


async def _check_answered(adapter: APIServerAdapter, stored: list[Message], owner: str) -> None:
    asked = open_calls(stored)
    if asked and await adapter.waits(asked, owner):
        message = f"The tool call {asked[0]!r} has no output; it must be answered before anything else is said."
        raise ApiError(400, message, "tool_output_missing", "tool_call_id")


def _toolsets(asked: RunRequest, request_options: RequestOptions) -> frozenset[str] | None:
    if asked.toolsets is None:
        return request_options.toolsets
    named = toolsets_of(asked.toolsets, "toolsets")
    return named if request_options.toolsets is None else named & request_options.toolsets


def _names(request: web.Request, spec: RunSpec) -> dict[str, str]:
    names = {"X-Hermes-Run-Id": spec.run_id, "X-Hermes-Session-Id": spec.session_id}
    key = request.headers.get("X-Hermes-Session-Key")
    return names | ({"X-Hermes-Session-Key": key} if key else {})


# --- looking at them -------------------------------------------------------------------------------------------------


async def list_runs(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /v1/runs"""
    limit = whole(request, "limit", 50, 1, 200)
    kind, status = word(request, "kind", _KINDS), word(request, "status", _STATUSES)
    kinds = [one for one in ([kind] if kind else _LISTED) if CALLER.get().opens(RUN_SCOPES[cast(RunKind, one)])]
    if not kinds:
        return answer(listed([], None, 0))
    app = await adapter.app()
    try:
        await app.engine.record_starts()
        found, texts, total = await app.store.runs.page(
            owner=adapter.visible_owner(request),
            limit=limit + 1,
            session_id=request.query.get("session_id") or None,
            # One that waits to be taken up by the next server is shown as one that waits.
            statuses=[status, *(["interrupted"] if status == "queued" else [])] if status else (),
            kinds=kinds,
            before=cursor_of(request),
        )
    except KeyError:
        raise bad_cursor() from None
    page = found[:limit]
    data = [shown(adapter, record, texts.get(record.state.final_row)) for record in page]
    return answer(listed(data, page[-1].spec.run_id if len(found) > limit else None, total))


async def get(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /v1/runs/{run_id}"""
    record = await _record(adapter, request)
    row = record.state.final_row
    found = await (await adapter.app()).engine.row(record.spec.run_id, row) if row is not None else None
    return answer(shown(adapter, record, text_of(found.content) if found else None))


def shown(adapter: APIServerAdapter, record: RunRecord, output: str | None) -> Json:
    """The run as it stands; who sees all is told whose it is."""
    return {**run_object(record, output, adapter.model_name), **adapter.owner_field(record.spec.owner)}


async def delete(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """DELETE /v1/runs/{run_id}"""
    record = await _record(adapter, request)
    run_id = record.spec.run_id
    if not record.state.ended or not await (await adapter.app()).store.runs.remove(run_id):
        raise ApiError(409, f"The run {run_id!r} has not ended yet.", "run_active")
    return answer({"object": "hermes.run.deleted", "run_id": run_id, "deleted": True})


async def _record(adapter: APIServerAdapter, request: web.Request) -> RunRecord:
    """The run that a path names; one of somebody else's is as good as none."""
    run_id = request.match_info["run_id"]
    found = await (await adapter.app()).engine.get(run_id)
    if found is None or not adapter.may_see(request, found.spec.owner):
        raise _unknown(run_id)
    if (refusal := adapter.scope_refusal(CALLER.get(), RUN_SCOPES[found.spec.kind])) is not None:
        raise refusal
    return found


def _unknown(run_id: str) -> ApiError:
    return ApiError(404, f"There is no run {run_id!r}.", "run_not_found")


async def events(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /v1/runs/{run_id}/events"""
    last_seen = request.headers.get("Last-Event-ID", "").strip()
    after = max(
        number_of(last_seen, "Last-Event-ID") if last_seen else 0,
        number_of(given, "starting_after") if (given := request.query.get("starting_after", "").strip()) else 0,
    )
    names, reasoning = flag(request, "event_names"), shows_reasoning(adapter, request)
    record = await _record(adapter, request)
    spec, engine = record.spec, (await adapter.app()).engine
    if record.log_expired:
        message = f"The events of the run {spec.run_id!r} are no longer kept; its status and output are."
        raise ApiError(410, message, "events_expired")
    used = used_until(await engine.durable(spec.run_id), after) if after else ()
    renderer = RunRenderer(record, adapter.redact, names=names, reasoning=reasoning, used=used)
    rows = ROWS | THOUGHTS if reasoning else ROWS
    stream = adapter.stream(request, _names(request, spec))
    if request.method == "HEAD":
        with contextlib.suppress(ClientGone):
            async with stream:
                pass
        return stream.response
    return await replay(stream, engine, spec.run_id, renderer, rows=rows, after=after, over=record.state.ended)


# --- steering them ---------------------------------------------------------------------------------------------------


async def stop(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /v1/runs/{run_id}/stop"""
    record = await _record(adapter, request)
    if record.state.ended or not (record.state.stopping or await _tell(adapter, request, record, "interrupt", {})):
        raise _finished(record)
    return answer({"run_id": record.spec.run_id, "status": "stopping"})


async def steer(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /v1/runs/{run_id}/steer"""
    body = await read(adapter, request, SteerRequest)
    asked = body.model
    if asked.text is None and asked.input is None:
        raise invalid("text", "Missing required parameter: 'text'.", "missing_required_parameter")
    if None not in (asked.text, asked.input) and asked.text != asked.input:
        raise invalid("input", "text and input are the same and have different values.")
    text = _words(adapter, *((asked.text, "text") if asked.text is not None else (asked.input or "", "input")))
    record = await _record(adapter, request)
    control = None if record.state.ended else await _tell(adapter, request, record, "steer", {"text": text})
    if control is None:
        raise _finished(record)
    told = {"run_id": record.spec.run_id, "steer_id": control.control_id, "accepted": True}
    return answer(told, 202, body.headers())


async def approve(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /v1/runs/{run_id}/approval"""
    body = await read(adapter, request, ApprovalRequest)
    asked = body.model
    choice = _ALIASES.get(asked.choice, asked.choice)
    if choice not in _CHOICES:
        raise _bad_choice(_CHOICES)
    if choice == "always" and not CALLER.get().is_admin:
        raise ApiError(403, "Leave for ever needs a key with the scope 'admin'.", "insufficient_scope", "choice")
    record = await _record(adapter, request)
    run_id, pending = record.spec.run_id, record.state.approvals
    if record.state.ended:
        raise ApiError(409, f"The run {run_id!r} has ended.", "approval_not_active")
    ids = list(pending)
    if not (asked.all or asked.resolve_all):
        ids = [asked.approval_id] if asked.approval_id in pending else [] if asked.approval_id else ids[:1]
    for approval_id in ids:
        if choice not in pending[approval_id]["choices"]:
            raise _bad_choice(pending[approval_id]["choices"])
    resolved = [await _tell(adapter, request, record, "approve", {"id": one, "choice": choice}) for one in ids]
    if not any(resolved):
        raise ApiError(409, "No such question for leave is open.", "approval_not_pending")
    told = {"object": "hermes.run.approval_response", "run_id": run_id, "choice": choice}
    return answer({**told, "resolved": sum(control is not None for control in resolved)}, 200, body.headers())


def _bad_choice(choices: Any) -> ApiError:
    return invalid("choice", f"The choice is one of {', '.join(choices)}.", "invalid_approval_choice")


async def clarify(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /v1/runs/{run_id}/clarify"""
    body = await read(adapter, request, ClarifyRequest)
    asked = body.model
    said = _words(adapter, asked.answer, "answer")
    record = await _record(adapter, request)
    pending = {} if record.state.ended else record.state.questions
    request_id = asked.request_id or next(iter(pending), "")
    answered = request_id in pending and await _tell(
        adapter, request, record, "answer", {"id": request_id, "answer": said}
    )
    if not answered:
        raise ApiError(409, "No such question is open.", "clarify_not_pending")
    told = {"object": "hermes.run.clarify_response", "run_id": record.spec.run_id, "request_id": request_id}
    return answer(told, 200, body.headers())


async def _tell(
    adapter: APIServerAdapter, request: web.Request, record: RunRecord, kind: ControlKind, data: Json
) -> Control | None:
    """Tell a run something. None: it does not concern it any more."""
    surface = "cli" if at_door(adapter, request) else "api"
    control = Control(kind, data, surface=surface, credential=adapter.credential())
    applied = await (await adapter.app()).engine.control(record.spec.run_id, control)
    if applied == "unknown":
        raise _unknown(record.spec.run_id)
    return control if applied == "applied" else None


def _finished(record: RunRecord) -> ApiError:
    return ApiError(409, f"The run {record.spec.run_id!r} has ended.", "run_finished")


def _words(adapter: APIServerAdapter, given: str, where: str) -> str:
    """Words for a run: some, and not too many."""
    longest = adapter.option("max_text_chars")
    if not given.strip():
        raise invalid(where, f"{where!r} says nothing.")
    if len(given) > longest:
        raise invalid(where, f"{where!r} is longer than {longest} characters.", "string_above_max_length")
    return given
